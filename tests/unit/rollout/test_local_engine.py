"""The embedded engine against a float64 loop, and its weight sync as a transaction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tiny_family import (
    SCHEDULER,
    SIDE,
    TOKENS,
    RowwiseTinyAdapter,
    TinyAdapter,
    TinyEmbedded,
    TinyTransformer,
    reference_log_prob,
    reference_moments,
)

from relax_sdk.errors import RolloutError, WeightSyncError
from relax_sdk.flow import seeded_noise
from relax_sdk.protocols import (
    FullWeightManifest,
    PromptRecord,
    RolloutRequest,
    RolloutResponse,
    SamplingConfig,
    WeightBucket,
)
from relax_sdk.rollout import plan_groups
from relax_sdk.rollout.local import LocalEngine
from relax_sdk.weights import inject_lora, is_lora_name, tensor_checksum, to_wire_name

STEPS = 6
LORA: dict[str, object] = {"rank": 2, "alpha": 4.0, "target_modules": ["to_q", "to_out"]}


def engine(adapter: Any = None) -> LocalEngine:
    made = LocalEngine(
        adapter=adapter or TinyAdapter(), model_path="", revision=None, device="cpu", dtype=torch.float32
    )
    made.start()
    return made


def requests(
    texts: Iterable[str] = ("red", "a blue square"),
    *,
    count: int = 3,
    version: int = 0,
    steps: tuple[int, ...] = (1, 3),
    **sampling: Any,
) -> list[RolloutRequest]:
    config = SamplingConfig(num_inference_steps=STEPS, **sampling)
    plans = plan_groups(
        [PromptRecord(prompt=text, prompt_id=text) for text in texts],
        rollout_id=0,
        samples_per_prompt=count,
        sampling=config,
        generation_seed=42,
        policy_version=version,
        sde_indices=steps,
    )
    return [TinyAdapter().build_rollout_request(plan, config, scheduler_config=SCHEDULER) for plan in plans]


def float64_loop(request: RolloutRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """States [K, T+1, N, C] and log-probs [K, T] of a group, stepped by the formulas written out here."""
    model = TinyTransformer().double()
    sigmas = request.sigmas
    assert sigmas is not None
    text = torch.tensor(list(request.plan.prompt.encode()), dtype=torch.float64).mean() / 255
    noise = seeded_noise(request.plan.initial_noise_seeds, request.latent_shape)
    x = torch.stack([row.reshape(row.shape[0], TOKENS).T for row in noise]).double()
    states, log_probs = [x], []
    for step in range(STEPS):
        rows = x.shape[0]
        with torch.no_grad():
            v = model(x, torch.full((rows,), sigmas[step], dtype=torch.float64), text.expand(rows))
        if step in request.plan.sde_indices:
            mean, tau = reference_moments(
                x, v, sigmas[step], sigmas[step + 1], eta=request.eta, sde_type=request.sde_type, clamp=sigmas[1]
            )
            x = mean + tau * seeded_noise([seeds[step] for seeds in request.plan.denoise_seeds], x.shape[1:]).double()
            log_probs.append(reference_log_prob(x, mean, tau))
        else:
            x = x + (sigmas[step + 1] - sigmas[step]) * v
            log_probs.append(torch.zeros(rows, dtype=torch.float64))
        states.append(x)
    return torch.stack(states, 1), torch.stack(log_probs, 1)


@pytest.mark.parametrize(
    ("sde_type", "steps"), [("sde", (1, 3)), ("sde", (0,)), ("dance", (0, 2, 4)), ("cps", (2, 3)), ("sde", ())]
)
def test_the_trajectory_is_the_float64_loop(sde_type: str, steps: tuple[int, ...]) -> None:
    asked = requests(steps=steps, sde_type=sde_type)
    for request, response in zip(asked, engine().generate(asked), strict=True):
        states, log_probs = float64_loop(request)
        assert response.trajectory_latents.shape == (3, STEPS + 1, TOKENS, 4)
        torch.testing.assert_close(response.trajectory_latents.double(), states, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(response.rollout_log_probs.double(), log_probs, rtol=1e-3, atol=1e-3)
        for step in range(STEPS):
            trained = step in steps
            assert bool(response.rollout_log_probs[:, step].ne(0).all()) == trained
            assert bool(response.rollout_log_probs[:, step].eq(0).all()) != trained
        assert response.sde_indices == steps
        assert response.sigmas.tolist() == list(request.sigmas or ())
        torch.testing.assert_close(response.timesteps, torch.tensor(request.sigmas[:-1]) * 1000)  # type: ignore[index]
        assert (response.engine, response.policy_version, response.height, response.width) == ("local", 0, SIDE, SIDE)
        pixels = TinyEmbedded(TinyTransformer()).decode_latents(
            response.trajectory_latents[:, -1], height=SIDE, width=SIDE
        )
        assert torch.equal(response.media["image"], pixels)


def test_a_candidate_depends_on_nothing_but_itself() -> None:
    """Bit for bit: whatever the group size, the other groups, and their order. One row per forward, as the
    kernels of a matrix product may differ with the number of rows."""

    def first(answers: list[RolloutResponse], asked: list[RolloutRequest]) -> RolloutResponse:
        return next(answer for answer, request in zip(answers, asked, strict=True) if request.plan.prompt == "red")

    base_asked = requests(("red",), count=2)
    base = first(engine(RowwiseTinyAdapter()).generate(base_asked), base_asked)
    for texts, count in ((("red",), 5), (("red", "blue"), 2), (("a very long other prompt", "red"), 3)):
        asked = requests(texts, count=count)
        other = first(engine(RowwiseTinyAdapter()).generate(asked), asked)
        for field in ("trajectory_latents", "rollout_log_probs"):
            assert torch.equal(getattr(other, field)[:2], getattr(base, field)), (texts, count, field)
        assert torch.equal(other.media["image"][:2], base.media["image"])


def test_group_mates_in_one_request_change_no_bit() -> None:
    """The groups of a request go through the model one by one, whatever the model's kernels are."""
    asked = requests(("red", "blue", "green"))
    together = engine().generate(asked)
    for request, response in zip(asked, together, strict=True):
        (alone,) = engine().generate([request])
        assert torch.equal(alone.trajectory_latents, response.trajectory_latents)
        assert torch.equal(alone.rollout_log_probs, response.rollout_log_probs)


def test_candidates_of_a_group_differ() -> None:
    (response,) = engine().generate(requests(("red",)))
    assert not torch.equal(response.trajectory_latents[0], response.trajectory_latents[1])
    assert len(set(response.rollout_log_probs[:, 1].tolist())) == 3


def test_the_cut_prompt_is_reported() -> None:
    answers = engine().generate(requests(("short", "a prompt that is longer than thirty bytes")))
    assert [answer.truncated_prompts for answer in answers] == [0, 1]


def test_requests_it_cannot_answer_are_refused() -> None:
    with pytest.raises(RolloutError, match="version"):
        engine().generate(requests(version=1))
    no_schedule = [RolloutRequest(**{**dict(request), "sigmas": None}) for request in requests()]
    with pytest.raises(RolloutError, match="schedule"):
        engine().generate(no_schedule)
    asleep = LocalEngine(adapter=TinyAdapter(), model_path="", revision=None, device="cpu", dtype=torch.float32)
    with pytest.raises(RolloutError, match="before start"):
        asleep.generate(requests())
    ended = engine()
    ended.shutdown()
    ended.shutdown()
    with pytest.raises(RolloutError, match="before start"):
        ended.generate(requests())
    assert engine().generate([]) == []


def test_an_adapter_without_the_second_protocol_is_refused() -> None:
    class TrainOnly:
        pass

    with pytest.raises(RolloutError, match="load_embedded_model"):
        LocalEngine(adapter=TrainOnly(), model_path="", revision=None, device="cpu", dtype=torch.float32)


# --- weight sync ----------------------------------------------------------------------------------------------------


def new_weights(seed: int = 9) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in TinyTransformer(seed).named_parameters()}


def adapter_weights(seed: int = 9) -> dict[str, torch.Tensor]:
    module = TinyTransformer()
    inject_lora(module, rank=2, alpha=4.0, target_modules=("to_q", "to_out"))
    generator = torch.Generator().manual_seed(seed)
    return {
        to_wire_name(name): 0.3 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in module.named_parameters()
        if is_lora_name(name)
    }


def manifest(tensors: dict[str, torch.Tensor], mode: Any = "full") -> FullWeightManifest:
    return FullWeightManifest.describe(
        mode, [(name, tuple(part.shape), part.numel() * part.element_size()) for name, part in tensors.items()]
    )


def sync(
    target: LocalEngine,
    tensors: dict[str, torch.Tensor],
    *,
    version: int = 1,
    announced: FullWeightManifest | None = None,
    adapter: dict[str, object] | None = None,
) -> str:
    target.begin_sync(announced or manifest(tensors, "adapter" if adapter else "full"), adapter)
    names = list(tensors)
    for index, start in enumerate(range(0, len(names), 3)):
        part = {name: tensors[name] for name in names[start : start + 3]}
        target.receive(WeightBucket(index=index, tensors=part))
    return target.commit_sync(version)


def images(target: LocalEngine) -> torch.Tensor:
    (response,) = target.generate(requests(("red",), version=target.policy_version))
    return response.trajectory_latents


def test_a_full_sync_makes_the_sent_weights_the_engines() -> None:
    target, fresh = engine(), engine(TinyAdapter(seed=9))
    before = images(target)
    checksum = sync(target, new_weights())
    assert checksum == tensor_checksum(new_weights().items())
    assert target.policy_version == 1
    assert torch.equal(images(target), images(fresh))
    assert not torch.equal(images(target), before)
    with pytest.raises(RolloutError, match="version"):
        target.generate(requests(version=0))


def test_wire_weights_in_bfloat16_are_taken_as_they_are() -> None:
    target = engine()
    low = {name: tensor.bfloat16() for name, tensor in new_weights().items()}
    assert sync(target, low) == tensor_checksum(low.items())


def test_an_adapter_sync_adds_alpha_over_rank_times_b_a() -> None:
    target, merged = engine(), engine()
    tensors = adapter_weights()
    assert sync(target, tensors, adapter=LORA) == tensor_checksum(tensors.items())
    full = {name: tensor.detach().clone() for name, tensor in TinyTransformer().named_parameters()}
    for name in full:
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in tensors:
            full[name] += 2.0 * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
    sync(merged, full)
    torch.testing.assert_close(images(target), images(merged), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(images(target), images(engine()), atol=1e-2)
    # A second sync replaces the first.
    sync(target, adapter_weights(10), version=2, adapter=LORA)
    assert not torch.allclose(images(target), images(merged), atol=1e-2)


def test_nothing_is_visible_before_the_commit() -> None:
    target = engine()
    before = images(target)
    tensors = new_weights()
    target.begin_sync(manifest(tensors))
    target.receive(WeightBucket(index=0, tensors=tensors))
    assert torch.equal(images(target), before)
    # The sender may reuse its buffers once `receive` has returned.
    for tensor in tensors.values():
        tensor.zero_()
    assert target.commit_sync(1) == tensor_checksum(new_weights().items())


def with_changes(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The new weights with tensors replaced, added, or (None) left out; dots are spelt ``__``."""
    tensors = new_weights()
    for spelt, value in changes.items():
        name = spelt.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    return tensors


WRAPPED = {
    name.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module."): tensor for name, tensor in new_weights().items()
}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (with_changes(proj_in__extra=torch.ones(2)), "proj_in.extra"),
        (with_changes(proj_in__bias=None), "proj_in.bias"),
        (with_changes(proj_in__bias=None, proj_on__bias=torch.ones(8)), "proj_on.bias"),
        (WRAPPED, "_checkpoint_wrapped_module"),
        (with_changes(proj_in__bias=torch.ones(9)), "proj_in.bias"),
        (with_changes(proj_in__bias=torch.ones(1)), "proj_in.bias"),
        (with_changes(blocks__0__to_out__weight=torch.ones(64)), "to_out.weight"),
        (with_changes(proj_out__bias=torch.tensor([1.0, float("nan"), 0.0, 0.0])), "proj_out.bias"),
        (with_changes(proj_out__bias=torch.tensor([1.0, float("inf"), 0.0, 0.0])), "proj_out.bias"),
    ],
    ids=["unknown", "missing", "misspelt", "wrapper names", "shape", "broadcastable", "flat", "nan", "inf"],
)
def test_a_sync_that_does_not_fit_is_refused_whole(tensors: dict[str, torch.Tensor], message: str) -> None:
    target = engine()
    before = images(target)
    with pytest.raises(WeightSyncError, match=message):
        sync(target, tensors)
    target.abort_sync()
    assert target.policy_version == 0
    assert torch.equal(images(target), before)
    sync(target, new_weights())
    assert torch.equal(images(target), images(engine(TinyAdapter(seed=9))))


def test_what_was_announced_must_arrive() -> None:
    tensors = new_weights()
    reordered = dict(reversed(tensors.items()))
    half = {name: tensor.half() for name, tensor in tensors.items()}
    for other in (reordered, half, dict(list(tensors.items())[:-1])):
        target = engine()
        with pytest.raises(WeightSyncError, match="announced"):
            sync(target, tensors, announced=manifest(other))
        assert target.policy_version == 0
    target = engine()
    target.begin_sync(manifest(tensors))
    with pytest.raises(WeightSyncError, match="announced"):
        target.commit_sync(1)


def test_a_tensor_that_comes_twice_is_refused() -> None:
    target = engine()
    target.begin_sync(manifest(new_weights()))
    target.receive(WeightBucket(index=0, tensors=new_weights()))
    with pytest.raises(WeightSyncError, match="twice"):
        target.receive(WeightBucket(index=1, tensors={"proj_in.bias": torch.ones(8)}))


def test_calls_out_of_order_are_refused() -> None:
    target = engine()
    with pytest.raises(WeightSyncError, match="begin_sync"):
        target.receive(WeightBucket(index=0, tensors=new_weights()))
    with pytest.raises(WeightSyncError, match="begin_sync"):
        target.commit_sync(1)
    target.abort_sync()
    sync(target, new_weights())
    with pytest.raises(WeightSyncError, match="begin_sync"):
        target.commit_sync(2)


def test_modes_do_not_mix() -> None:
    first = engine()
    sync(first, new_weights())
    with pytest.raises(WeightSyncError, match="after a full sync"):
        first.begin_sync(manifest(adapter_weights(), "adapter"), LORA)
    second = engine()
    sync(second, adapter_weights(), adapter=LORA)
    with pytest.raises(WeightSyncError, match="after an adapter sync"):
        second.begin_sync(manifest(new_weights()))
    with pytest.raises(WeightSyncError, match="changed"):
        second.begin_sync(manifest(adapter_weights(), "adapter"), {**LORA, "alpha": 8.0})
    for mode, adapter in (("full", LORA), ("adapter", None)):
        with pytest.raises(WeightSyncError, match=mode):
            engine().begin_sync(manifest(new_weights(), mode), adapter)


def test_an_adapter_sync_must_touch_every_wrapped_layer() -> None:
    """LoRA bound to half of its layers trains, but samples with another policy."""
    tensors = {name: tensor for name, tensor in adapter_weights().items() if ".to_out." not in name}
    target = engine()
    with pytest.raises(WeightSyncError, match="to_out"):
        sync(target, tensors, adapter=LORA)
    prefixed = {f"transformer.{name}": tensor for name, tensor in adapter_weights().items()}
    with pytest.raises(WeightSyncError, match=r"transformer\.blocks"):
        sync(engine(), prefixed, adapter=LORA)


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "adapter"])
def test_abort_after_the_commit_brings_weights_and_version_back(adapter: dict[str, object] | None) -> None:
    """Another engine may have refused the version that this one already took."""
    make = adapter_weights if adapter else new_weights
    target = engine()
    sync(target, make(3), version=1, adapter=adapter)
    before = images(target)
    sync(target, make(4), version=2, adapter=adapter)
    target.abort_sync()
    assert target.policy_version == 1
    assert torch.equal(images(target), before)
    target.abort_sync()
    assert torch.equal(images(target), before)
    sync(target, make(4), version=2, adapter=adapter)
    assert target.policy_version == 2
    assert not torch.equal(images(target), before)


def test_abort_of_the_first_adapter_sync_leaves_the_base_output() -> None:
    target = engine()
    before = images(target)
    sync(target, adapter_weights(), adapter=LORA)
    target.abort_sync()
    assert target.policy_version == 0
    assert torch.equal(images(target), before)


def test_abort_undoes_the_current_sync_only() -> None:
    target = engine()
    sync(target, new_weights(), version=1)
    after = images(target)
    target.begin_sync(manifest(new_weights(4)))
    target.receive(WeightBucket(index=0, tensors=new_weights(4)))
    target.abort_sync()
    assert target.policy_version == 1
    assert torch.equal(images(target), after)
    # A sync that is refused at once must not take the one before it along.
    with pytest.raises(WeightSyncError):
        target.begin_sync(manifest(new_weights(4)), LORA)
    target.abort_sync()
    assert target.policy_version == 1
    assert torch.equal(images(target), after)
