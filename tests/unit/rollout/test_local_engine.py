"""The embedded engine against a float64 loop, and its weight sync as a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from tiny_family import (
    SIDE,
    STEPS,
    TOKENS,
    RowwiseTinyAdapter,
    TinyAdapter,
    TinyEmbedded,
    TinyTransformer,
    reference_log_prob,
    reference_moments,
)
from tiny_requests import tiny_requests
from tiny_sync import CPU, LORA, buckets_of, deliver, engine_settings, offer_of, write
from tiny_sync import embedded_engine as engine

from relax_sdk.errors import RolloutError, WeightSyncError
from relax_sdk.flow import seeded_noise
from relax_sdk.protocols import AdapterConfig, RolloutRequest, RolloutResponse
from relax_sdk.rollout.local import LocalEngine
from relax_sdk.weights import SendBuffer, inject_lora, is_lora_name, to_wire_name


def requests(
    texts: Iterable[str] = ("red", "a blue square"),
    *,
    count: int = 3,
    version: int = 0,
    steps: tuple[int, ...] = (1, 3),
    **sampling: Any,
) -> list[RolloutRequest]:
    return tiny_requests(TinyAdapter(), texts, count=count, version=version, steps=steps, **sampling)


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


def test_sampled_one_by_one_a_candidate_does_not_see_its_group() -> None:
    (three,) = engine(candidates_per_request=1).generate(requests(("red",)))
    (whole,) = engine().generate(requests(("red",)))
    torch.testing.assert_close(three.trajectory_latents, whole.trajectory_latents)
    assert three.media["image"].shape == whole.media["image"].shape
    assert (three.rollout_log_probs != 0).equal(whole.rollout_log_probs != 0)


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
    asleep = LocalEngine(adapter=TinyAdapter(), settings=engine_settings())
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
        LocalEngine(adapter=TrainOnly(), settings=engine_settings())


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


def images(target: LocalEngine) -> torch.Tensor:
    (response,) = target.generate(requests(("red",), version=target.policy_version))
    return response.trajectory_latents


def test_a_full_sync_makes_the_sent_weights_the_engines() -> None:
    target, fresh = engine(), engine(TinyAdapter(seed=9))
    before = images(target)
    held, sent = deliver(target, new_weights())
    assert held == sent
    assert target.policy_version == 1
    assert torch.equal(images(target), images(fresh))
    assert not torch.equal(images(target), before)
    with pytest.raises(RolloutError, match="version"):
        target.generate(requests(version=0))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_wire_weights_in_bfloat16_are_taken_as_they_are(dtype: str) -> None:
    held, sent = deliver(engine(dtype=dtype), {name: tensor.bfloat16() for name, tensor in new_weights().items()})
    assert held == sent


def test_the_answer_tells_what_the_engine_holds() -> None:
    """float32 on the wire does not survive in a bfloat16 engine: the actor must hear of it."""
    held, sent = deliver(engine(dtype="bf16"), new_weights())
    assert held != sent


def test_an_adapter_sync_adds_alpha_over_rank_times_b_a() -> None:
    target, merged, base = engine(sync_mode="adapter"), engine(), images(engine())
    tensors = adapter_weights()
    held, sent = deliver(target, tensors, adapter=LORA)
    assert held == sent
    full = {name: tensor.detach().clone() for name, tensor in TinyTransformer().named_parameters()}
    for name in full:
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in tensors:
            full[name] += 2.0 * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
    deliver(merged, full)
    torch.testing.assert_close(images(target), images(merged), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(images(target), base, atol=1e-2)
    # A second sync replaces the first, in whatever order its tensors come.
    deliver(target, dict(reversed(adapter_weights(10).items())), version=2, adapter=LORA)
    assert not torch.allclose(images(target), images(merged), atol=1e-2)


def test_nothing_is_visible_before_the_commit_and_slots_may_be_used_again() -> None:
    target = engine()
    before = images(target)
    ((bucket, content),) = buckets_of(new_weights(), per_bucket=100)
    with SendBuffer.open(CPU, bucket.bytes) as buffer:
        target.begin_sync(offer_of(new_weights(), [buffer.handle]))
        write(buffer, 0, content)
        target.receive(bucket)
        assert torch.equal(images(target), before)
        buffer.slot(0).zero_()
        target.commit_sync(1)
    assert torch.equal(images(target), images(engine(TinyAdapter(seed=9))))


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
PREFIXED = {f"transformer.{name}": tensor for name, tensor in adapter_weights().items()}
PEFT_NAMED = {name.replace(".weight", ".default.weight"): tensor for name, tensor in adapter_weights().items()}
HALF = {name: tensor for name, tensor in adapter_weights().items() if ".to_out." not in name}
UNPAIRED = {name: tensor for name, tensor in adapter_weights().items() if name != "blocks.1.to_q.lora_B.weight"}
RANK_3 = {name: tensor.repeat(2, 2) for name, tensor in adapter_weights().items()}


@pytest.mark.parametrize(
    ("tensors", "adapter", "message"),
    [
        (with_changes(proj_in__extra=torch.ones(2)), None, "proj_in.extra"),
        (with_changes(proj_in__bias=None), None, "proj_in.bias"),
        (with_changes(proj_in__bias=None, proj_on__bias=torch.ones(8)), None, "did you mean 'proj_in.bias'"),
        (WRAPPED, None, "_checkpoint_wrapped_module"),
        (with_changes(proj_in__bias=torch.ones(9)), None, "proj_in.bias"),
        (with_changes(proj_in__bias=torch.ones(1)), None, "proj_in.bias"),
        (with_changes(blocks__0__to_out__weight=torch.ones(64)), None, "to_out.weight"),
        (adapter_weights(), None, "lora_A"),
        (HALF, LORA, "to_out"),
        (UNPAIRED, LORA, r"to_q\.lora_B"),
        (PREFIXED, LORA, r"transformer\.blocks"),
        (PEFT_NAMED, LORA, r"default\.weight"),
        (RANK_3, LORA, r"shape \[4, 16\]"),
        (new_weights(), LORA, "unknown names"),
        (adapter_weights(), LORA.model_copy(update={"target_modules": ("to_x",)}), "to_x"),
        (adapter_weights(), LORA.model_copy(update={"rank": 3}), r"expected: \[3, 8\]"),
    ],
    ids=[
        "unknown", "missing", "misspelt", "wrapper names", "shape", "broadcastable", "flat", "adapter for full",
        "half of the layers", "A without B", "prefixed", "peft's names", "other rank", "full for adapter",
        "no such target", "announced rank",
    ],
)  # fmt: skip
def test_an_offer_that_does_not_fit_is_refused_before_anything_moves(
    tensors: Mapping[str, torch.Tensor], adapter: AdapterConfig | None, message: str
) -> None:
    target = engine(sync_mode="adapter" if adapter else "full")
    before, names = images(target), [name for name, _ in target._model.transformer.named_parameters()]
    with SendBuffer.open(CPU, 64) as buffer, pytest.raises(WeightSyncError, match=message):
        target.begin_sync(offer_of(tensors, [buffer.handle], adapter))
    with pytest.raises(WeightSyncError, match="begin_sync"):
        target.commit_sync(1)
    target.abort_sync()
    assert target.policy_version == 0
    assert torch.equal(images(target), before)
    assert [name for name, _ in target._model.transformer.named_parameters()] == names, "no layer was wrapped"
    # The right sync still works.
    held, sent = deliver(target, adapter_weights() if adapter else new_weights(), adapter=LORA if adapter else None)
    assert held == sent


def test_a_sync_of_the_other_mode_is_refused() -> None:
    """Wrapped layers would miss every base weight; an adapter would sit on another base than it was trained for."""
    for mode, tensors, adapter in (("adapter", new_weights(), None), ("full", adapter_weights(), LORA)):
        with SendBuffer.open(CPU, 64) as buffer, pytest.raises(WeightSyncError, match=f"expected: '{mode}'"):
            engine(sync_mode=mode).begin_sync(offer_of(tensors, [buffer.handle], adapter))


def test_the_adapter_may_not_change() -> None:
    target = engine(sync_mode="adapter")
    deliver(target, adapter_weights(), adapter=LORA)
    with pytest.raises(WeightSyncError, match=r"changed.*alpha=8\.0"):
        deliver(target, adapter_weights(), adapter=LORA.model_copy(update={"alpha": 8.0}))


def test_names_that_come_twice_are_refused() -> None:
    entries = [*new_weights().items(), ("proj_in.bias", torch.ones(8))]
    target = engine()
    with SendBuffer.open(CPU, 64) as buffer:
        good = offer_of(new_weights(), [buffer.handle])
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in entries)
        manifest = type(good.manifest).describe("full", [(n, tuple(t.shape), t.nbytes) for n, t in entries])
        with pytest.raises(WeightSyncError, match="11 tensors with 10 names"):
            target.begin_sync(type(good)(**{**dict(good), "tensors": shapes, "manifest": manifest}))


@pytest.mark.parametrize("change", ["content", "order", "repeated", "size", "slot", "first"])
def test_a_bucket_that_is_not_what_it_says_is_refused(change: str) -> None:
    target = engine()
    before = images(target)
    parts = buckets_of(new_weights(), per_bucket=3)
    with SendBuffer.open(CPU, max(len(content) for _, content in parts)) as buffer:
        target.begin_sync(offer_of(new_weights(), [buffer.handle]))
        for bucket, content in parts[:2]:
            write(buffer, bucket.slot, content)
        first, second = (bucket for bucket, _ in parts[:2])
        if change == "content":
            buffer.slot(0)[17] ^= 1
            wrong = first
        elif change == "order":
            wrong = second
        elif change == "repeated":
            target.receive(first)
            wrong = first
        else:
            changes = {"size": {"bytes": first.bytes - 4}, "slot": {"slot": 2}, "first": {"first": 1}}[change]
            wrong = first.model_copy(update=changes)
        with pytest.raises(WeightSyncError):
            target.receive(wrong)
        with pytest.raises(WeightSyncError, match="as announced"):
            target.commit_sync(1)
        target.abort_sync()
    assert target.policy_version == 0
    assert torch.equal(images(target), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    target = engine()
    before = images(target)
    with pytest.raises(WeightSyncError, match=r"proj_out\.bias"):
        deliver(target, with_changes(proj_out__bias=torch.tensor([1.0, value, 0.0, 0.0])))
    target.abort_sync()
    assert torch.equal(images(target), before)


def test_calls_out_of_order_are_refused() -> None:
    target = engine()
    ((bucket, _),) = buckets_of(new_weights(), per_bucket=100)
    for call in (lambda: target.receive(bucket), lambda: target.commit_sync(1)):
        with pytest.raises(WeightSyncError, match="begin_sync"):
            call()
    target.abort_sync()
    deliver(target, new_weights())
    with pytest.raises(WeightSyncError, match="begin_sync"):
        target.commit_sync(2)
    asleep = LocalEngine(adapter=TinyAdapter(), settings=engine_settings())
    with SendBuffer.open(CPU, 64) as buffer, pytest.raises(WeightSyncError, match="before start"):
        asleep.begin_sync(offer_of(new_weights(), [buffer.handle]))


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "adapter"])
def test_abort_after_the_commit_brings_weights_and_version_back(adapter: AdapterConfig | None) -> None:
    """Another engine may have refused the version that this one already took."""
    make = adapter_weights if adapter else new_weights
    target = engine(sync_mode="adapter" if adapter else "full")
    deliver(target, make(3), version=1, adapter=adapter)
    before = images(target)
    deliver(target, make(4), version=2, adapter=adapter)
    target.abort_sync()
    assert target.policy_version == 1
    assert torch.equal(images(target), before)
    target.abort_sync()
    assert torch.equal(images(target), before)
    deliver(target, make(4), version=2, adapter=adapter)
    assert target.policy_version == 2
    assert not torch.equal(images(target), before)


def test_abort_of_the_first_adapter_sync_leaves_the_base_output() -> None:
    target = engine(sync_mode="adapter")
    before = images(target)
    deliver(target, adapter_weights(), adapter=LORA)
    target.abort_sync()
    assert target.policy_version == 0
    assert torch.equal(images(target), before)


def test_abort_undoes_the_current_sync_only() -> None:
    target = engine()
    deliver(target, new_weights(), version=1)
    after = images(target)
    ((bucket, content),) = buckets_of(new_weights(4), per_bucket=100)
    with SendBuffer.open(CPU, bucket.bytes) as buffer:
        target.begin_sync(offer_of(new_weights(4), [buffer.handle]))
        write(buffer, 0, content)
        target.receive(bucket)
        target.abort_sync()
        assert target.policy_version == 1
        assert torch.equal(images(target), after)
        # A sync that is refused at once must not take the one before it along.
        with pytest.raises(WeightSyncError):
            target.begin_sync(offer_of(adapter_weights(), [buffer.handle], LORA))
    target.abort_sync()
    assert target.policy_version == 1
    assert torch.equal(images(target), after)


def test_no_mapping_outlives_its_sync() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:  # noqa: PTH123 - no regular file
            return sum("memfd:relax-weights" in line for line in maps)

    target, before = engine(), mapped()
    deliver(target, new_weights())
    with SendBuffer.open(CPU, 64) as buffer:
        target.begin_sync(offer_of(new_weights(), [buffer.handle]))
        assert mapped() == before + 2
        target.abort_sync()
        assert mapped() == before + 1
        target.begin_sync(offer_of(new_weights(), [buffer.handle]))
        target.shutdown()
    assert mapped() == before
