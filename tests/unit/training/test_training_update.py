"""One rank in this process against a plain float64 reference of the whole objective."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tiny_family import TinyAdapter, TinyTransformer
from tiny_training import (
    CLIP,
    LR,
    captured_gradients,
    make_trainer,
    reference_update,
    repeatable,
    tiny_groups,
    weights,
)
from torch import Tensor, nn

from relax_sdk.errors import ConfigError, RecordError, TrainingError
from relax_sdk.training import trainable_parameters
from relax_sdk.weights import is_lora_name

pytestmark = pytest.mark.usefixtures("process_group")

MODES = ("full", "lora")


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], *, relative: float) -> None:
    """Relative to the norm of each tensor, plus a floor for tensors that are 0 (LoRA's A before B moves)."""
    assert got.keys() == want.keys()
    floor = 1e-7 * max(tensor.double().norm().item() for tensor in want.values())
    for name, tensor in want.items():
        gap = (got[name].double() - tensor.double()).norm().item()
        assert gap <= relative * tensor.double().norm().item() + floor, (name, gap, tensor.norm().item())


@pytest.mark.parametrize("mode", MODES)
def test_gradients_loss_and_weights_equal_the_reference(mode: str) -> None:
    groups = tiny_groups()
    want = reference_update(groups, updates=2, mode=mode)
    made = make_trainer(mode=mode, updates=2)
    with captured_gradients(made.module) as gradients:
        metrics = made.update(groups).metrics
    assert len(gradients) == 2
    for got, expected in zip(gradients, want.gradients, strict=True):
        assert_close(got, expected, relative=2e-3)
    assert_close(weights(made.module), want.weights, relative=1e-4)
    assert metrics["train/loss"] == pytest.approx(sum(want.losses) / 2, rel=1e-3, abs=1e-6)
    ratios = torch.cat(want.ratios)
    assert metrics["train/ratio_mean"] == pytest.approx(ratios.mean().item(), abs=1e-5)
    assert metrics["train/ratio_std"] == pytest.approx(ratios.std(correction=0).item(), rel=0.02)
    assert metrics["train/ratio_min"] == pytest.approx(ratios.min().item(), abs=1e-5)
    assert metrics["train/ratio_max"] == pytest.approx(ratios.max().item(), abs=1e-5)
    assert metrics["train/approx_kl"] == pytest.approx((ratios - 1 - ratios.log()).mean().item(), rel=0.05, abs=1e-7)
    assert metrics["train/optimizer_steps"] == 2.0
    assert metrics["train/num_microbatches"] == 8.0
    assert metrics["train/optimizer_skips"] == 0.0


def test_the_clip_range_acts_in_the_second_update() -> None:
    groups = tiny_groups()
    want = reference_update(groups, updates=2, high=10 * CLIP)
    made = make_trainer(updates=2, eps_clip_high=10 * CLIP)
    with captured_gradients(made.module) as gradients:
        metrics = made.update(groups).metrics
    assert_close(gradients[1], want.gradients[1], relative=2e-3)
    held_back = 0
    for group, ratios in zip(groups[2:], want.ratios[1].chunk(2), strict=True):
        advantages = group.advantages[:, None].expand(-1, 2).flatten()
        held_back += int(((advantages > 0) & (ratios > 1 + 10 * CLIP)).sum())
        held_back += int(((advantages < 0) & (ratios < 1 - CLIP)).sum())
    assert held_back > 0
    assert metrics["train/clip_fraction"] == pytest.approx(held_back / 32)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_the_first_ratio_is_exactly_one(mode: str, dtype: str) -> None:
    made = make_trainer(mode=mode, updates=2, fsdp={"param_dtype": dtype})
    metrics = made.update(tiny_groups()).metrics
    assert metrics["train/first_update_ratio_max_deviation"] == 0.0
    assert metrics["train/ratio_max_deviation"] > 0.0, "the second update has left its anchors"
    one = make_trainer(mode=mode, updates=1, fsdp={"param_dtype": dtype}).update(tiny_groups()).metrics
    assert one["train/ratio_max_deviation"] == 0.0
    assert one["train/clip_fraction"] == 0.0


def test_the_loss_of_one_update_is_zero_with_centred_advantages() -> None:
    groups = [
        dataclasses.replace(group, advantages=group.advantages - group.advantages.mean()) for group in tiny_groups()
    ]
    assert make_trainer().update(groups).metrics["train/loss"] == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_shape_of_a_forward_does_not_change_the_gradient(mode: str, reshard: bool) -> None:
    """Candidates and trained steps of a forward; 2 of 3 steps leave an uneven rest."""
    groups = tiny_groups(2, 8, steps=(1, 2, 4))
    seen = {}
    for micro, steps in ((8, None), (1, None), (2, 3), (4, 2), (3, None), (8, 1), (1, 1), (2, 2)):
        made = make_trainer(mode=mode, micro=micro, steps=steps, fsdp={"reshard_after_forward": reshard})
        with captured_gradients(made.module) as gradients:
            metrics = made.update(groups).metrics
        (seen[micro, steps],) = gradients
        assert metrics["train/num_microbatches"] == (2 if micro == 3 else 16 / micro) * math.ceil(3 / (steps or 3))
        assert metrics["train/first_update_ratio_max_deviation"] == 0.0
    for gradient in seen.values():
        assert_close(gradient, seen[8, None], relative=1e-5)


@pytest.mark.parametrize(("steps", "rows"), [(None, 6), (3, 6), (2, 4), (1, 2)])
def test_a_forward_holds_candidates_times_steps(steps: int | None, rows: int) -> None:
    adapter, groups = TinyAdapter(), tiny_groups(2, 4, steps=(1, 2, 4))
    make_trainer(adapter, micro=2, steps=steps, updates=2).update(groups)
    trained = [latents for grad, latents in adapter.forwards if grad]
    assert max(latents.shape[0] for latents in trained) == rows
    # In whatever forwards: every cell once.
    want = torch.cat([group.trajectory.latents.flatten(0, 1) for group in groups])
    assert sorted(row.sum().item() for row in torch.cat(trained)) == sorted(row.sum().item() for row in want)


def test_uneven_forwards_train_like_the_reference() -> None:
    groups = tiny_groups(steps=(1, 2, 4))
    want = reference_update(groups, updates=2)
    made = make_trainer(micro=1, steps=2, updates=2)
    metrics = made.update(groups).metrics
    assert_close(weights(made.module), want.weights, relative=1e-4)
    assert metrics["train/loss"] == pytest.approx(sum(want.losses) / 2, rel=1e-3, abs=1e-6)
    assert metrics["train/logp_parity_max"] < 1e-5


def test_updates_are_disjoint_and_use_every_candidate_once() -> None:
    adapter, groups = TinyAdapter(), tiny_groups()
    made = make_trainer(adapter, updates=2)
    steps_taken: list[int] = []
    with captured_gradients(made.module) as gradients:
        adapter.replay_transition = _counting(adapter, steps_taken, gradients)  # type: ignore[method-assign]
        made.update(groups)
    anchored = [latents for grad, latents in adapter.forwards if not grad]
    trained = [latents for grad, latents in adapter.forwards if grad]
    want = torch.cat([group.trajectory.latents.flatten(0, 1) for group in groups])
    assert torch.equal(torch.cat(anchored), want)
    assert torch.equal(torch.cat(trained), want)
    # All anchors before the first optimizer step; then half of the micro-batches on each side of it.
    assert steps_taken == [0] * 8 + [0] * 4 + [1] * 4


def _counting(adapter: TinyAdapter, steps_taken: list[int], gradients: list[Any]) -> Any:
    plain = adapter.replay_transition

    def replay(model: Any, batch: Any) -> Tensor:
        steps_taken.append(len(gradients))
        return plain(model, batch)

    return replay


@pytest.mark.parametrize("mode", MODES)
def test_activation_checkpointing_changes_nothing(mode: str) -> None:
    results = []
    for checkpointing in (False, True):
        made = make_trainer(mode=mode, updates=2, fsdp={"activation_checkpointing": checkpointing})
        with captured_gradients(made.module) as gradients:
            metrics = repeatable(made.update(tiny_groups()).metrics)
        results.append((gradients, weights(made.module), metrics))
        wrapped = any("_checkpoint_wrapped_module" in name for name, _ in made.module.named_parameters())
        assert wrapped == checkpointing
    (plain_gradients, plain, plain_metrics), (gradients, recomputed, metrics) = results
    for got, want in zip(gradients, plain_gradients, strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert all(torch.equal(recomputed[name], plain[name]) for name in plain)
    assert metrics == plain_metrics


def test_two_runs_with_one_seed_are_identical() -> None:
    runs = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        made = make_trainer(mode="lora", updates=2)
        runs.append((repeatable(made.update(tiny_groups()).metrics), weights(made.module)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


def test_lora_moves_the_adapters_only() -> None:
    made = make_trainer(mode="lora", updates=2, fsdp={"param_dtype": "bf16"})
    before = weights(made.module)
    assert {parameter.dtype for parameter in trainable_parameters(made.module)} == {torch.float32}
    made.update(tiny_groups())
    made.update(tiny_groups(seed=1))
    for name, tensor in weights(made.module).items():
        assert torch.equal(tensor, before[name]) != is_lora_name(name), name


def test_full_training_moves_every_weight() -> None:
    made = make_trainer()
    before = weights(made.module)
    made.update(tiny_groups())
    assert not any(torch.equal(tensor, before[name]) for name, tensor in weights(made.module).items())


@pytest.mark.parametrize("cells", ["all", "second update"])
def test_a_degenerate_update_takes_no_optimizer_step(cells: str) -> None:
    """Momentum and weight decay would move the weights even on a zero gradient."""
    made = make_trainer(updates=2, optimizer={"weight_decay": 0.1})
    made.update(tiny_groups())
    before = weights(made.module)
    flat = tiny_groups(seed=1)
    for group in flat if cells == "all" else flat[2:]:
        group.advantages.zero_()
    with captured_gradients(made.module) as gradients:
        metrics = made.update(flat).metrics
    moved = any(not torch.equal(tensor, before[name]) for name, tensor in weights(made.module).items())
    if cells == "all":
        assert not moved
        assert gradients == []
        assert metrics["train/optimizer_skips"] == metrics["train/num_microbatches"] == 8.0
        assert metrics["train/optimizer_steps"] == 2.0
        assert metrics["train/grad_norm"] == 0.0
        assert metrics["train/loss"] == 0.0
    else:
        assert moved
        assert len(gradients) == 1
        assert metrics["train/optimizer_skips"] == 4.0
        assert metrics["train/optimizer_steps"] == 3.0


def test_the_gradient_is_clipped_to_the_norm_and_reported_unclipped() -> None:
    free, bound = make_trainer(), make_trainer(optimizer={"clip_grad": 1e-3})
    with captured_gradients(free.module) as plain:
        free_metrics = free.update(tiny_groups()).metrics
    with captured_gradients(bound.module) as clipped:
        metrics = bound.update(tiny_groups()).metrics
    norm = math.sqrt(sum(tensor.double().square().sum().item() for tensor in plain[0].values()))
    assert norm > 1e-3
    assert free_metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    want = {name: tensor * (1e-3 / norm) for name, tensor in plain[0].items()}
    assert_close(clipped[0], want, relative=1e-3)


def test_the_rate_counts_optimizer_steps_across_rollouts() -> None:
    made = make_trainer(updates=2, optimizer={"lr_warmup_iters": 4})
    seen = []
    for seed in range(3):
        seen.append(made.update(tiny_groups(seed=seed)).metrics["train/lr"])
    assert seen == pytest.approx([LR * 2 / 4, LR, LR])
    assert made.optimizer_steps == 6


def test_parity_with_the_engine_is_measured() -> None:
    groups = tiny_groups()
    metrics = make_trainer(updates=2).update(groups).metrics
    assert metrics["train/logp_parity_max"] < 1e-5
    groups[1].trajectory.rollout_log_probs[2, 1] += 0.5
    metrics = make_trainer(updates=2).update(groups).metrics
    assert metrics["train/logp_parity_max"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["train/logp_parity_mean"] == pytest.approx(0.5 / 32, abs=1e-5)


def test_a_schedule_off_by_one_shows_in_the_parity() -> None:
    groups = tiny_groups()
    for group in groups:
        group.trajectory.sigmas[:-1] = group.trajectory.sigmas[1:].clone()
    assert make_trainer().update(groups).metrics["train/logp_parity_mean"] > 5e-3


def test_the_fingerprint_line() -> None:
    made = make_trainer(fsdp={"debug_fingerprint": True})
    before = sum(tensor.double().abs().sum().item() for tensor in weights(made.module).values())
    fingerprint, parity = made.update(tiny_groups()).lines
    assert fingerprint.startswith("[fingerprint]")
    assert f"{before:.9e}" in fingerprint
    assert fingerprint.endswith("(moved)")
    assert parity.startswith("[logp parity]")
    assert parity.endswith("max |rho - 1| 0")
    assert make_trainer().update(tiny_groups()).lines == ()


def test_the_fingerprint_does_not_count_gathered_copies() -> None:
    """Kept gathered, in another dtype, without a step: the weights have not moved."""
    kept = {"debug_fingerprint": True, "reshard_after_forward": False, "param_dtype": "bf16", "master_dtype": "fp32"}
    groups = [dataclasses.replace(group, advantages=torch.zeros(4, dtype=torch.float64)) for group in tiny_groups()]
    fingerprint, _ = make_trainer(fsdp=kept).update(groups).lines
    assert fingerprint.endswith("(NOT moved)")


# --- what must not reach the weights ----------------------------------------------------------------------------------


def refused(made: Any, groups: Any) -> str:
    """The error's text, after checking that no weight moved and that the next rollout trains."""
    before = weights(made.module)
    steps = made.optimizer_steps
    with pytest.raises((TrainingError, RecordError)) as caught:
        made.update(groups)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(made.module).items())
    assert made.optimizer_steps == steps
    made.update(tiny_groups())
    assert not all(torch.equal(tensor, before[name]) for name, tensor in weights(made.module).items())
    assert all(tensor.isfinite().all() for tensor in weights(made.module).values())
    return str(caught.value)


def test_a_log_prob_that_is_not_finite_names_the_cell() -> None:
    groups = tiny_groups()
    groups[3].trajectory.next_latents[2, 1, 0, 0] = float("nan")
    message = refused(make_trainer(updates=2), groups)
    assert "group 3" in message
    assert "candidate 2" in message
    assert "step 3" in message


def test_nan_latents_are_refused_before_any_step() -> None:
    groups = tiny_groups()
    groups[3].trajectory.latents[2, 1, 0, 0] = float("nan")
    assert "latents" in refused(make_trainer(updates=2), groups)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("group", [0, 3])
def test_a_bad_advantage_is_refused_before_any_step(group: int, bad: float) -> None:
    """Also in the second update: the first must not have moved the weights by then."""
    groups = tiny_groups()
    groups[group].advantages[1] = bad
    message = refused(make_trainer(updates=2), groups)
    assert f"group {group}" in message
    assert "1" in message


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    class Exploding(TinyAdapter):
        """Finite velocities with an infinite slope at 0."""

        def replay_transition(self, model: Any, batch: Any) -> Tensor:
            velocity = super().replay_transition(model, batch)
            return velocity + (velocity - velocity.detach()).abs().sqrt()

    made = make_trainer(Exploding())
    before = weights(made.module)
    with pytest.raises(TrainingError, match="gradient"):
        made.update(tiny_groups())
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(made.module).items())


def test_groups_of_different_sizes_are_refused() -> None:
    with pytest.raises(TrainingError, match="different sizes"):
        make_trainer().update([*tiny_groups(1, 4), *tiny_groups(1, 2)])
    with pytest.raises(TrainingError, match=r"\[1, 2\] trained steps"):
        make_trainer().update([*tiny_groups(1, 4), *tiny_groups(1, 4, steps=(1,))])


# --- preparing the module ---------------------------------------------------------------------------------------------


def test_a_bundle_without_the_attribute_names_what_it_has() -> None:
    with pytest.raises(ConfigError, match="'unet'") as caught:
        make_trainer(fsdp={"trainable_attr": "unet"})
    assert "transformer" in str(caught.value)


def test_a_block_path_that_is_no_module_list_is_refused() -> None:
    class Misplaced(TinyAdapter):
        block_module_names = ("proj_in",)

    with pytest.raises(ConfigError, match="'proj_in'"):
        make_trainer(Misplaced())


def test_a_block_path_that_does_not_exist_is_refused() -> None:
    class Missing(TinyAdapter):
        block_module_names = ("transformer_blocks",)

    with pytest.raises(ConfigError, match="transformer_blocks"):
        make_trainer(Missing())


def test_a_module_that_loads_partly_frozen_is_trained_whole() -> None:
    class Frozen(TinyAdapter):
        def load_train_model(self, model_path: str, *, revision: str | None, dtype: torch.dtype) -> Any:
            bundle = super().load_train_model(model_path, revision=revision, dtype=dtype)
            bundle.transformer.proj_in.requires_grad_(False)
            return bundle

    assert len(trainable_parameters(make_trainer(Frozen()).module)) == len(list(TinyTransformer().parameters()))


def test_the_module_is_in_training_mode() -> None:
    module = make_trainer().module
    assert isinstance(module, nn.Module)
    assert all(part.training for part in module.modules())
