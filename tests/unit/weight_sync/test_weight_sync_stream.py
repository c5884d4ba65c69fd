"""The transaction: everything or nothing, on all engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_family import SCHEDULER, TinyAdapter
from tiny_training import make_trainer, tiny_groups

from relax_sdk.errors import WeightSyncError
from relax_sdk.protocols import FullWeightManifest, PromptRecord, ReplayBatch, SamplingConfig, WeightBucket
from relax_sdk.rollout import plan_groups
from relax_sdk.rollout.local import LocalEngine
from relax_sdk.weight_sync import StreamedSync, WireWeights
from relax_sdk.weights import tensor_checksum

MIB = 2**20
FLOATS = 100_000  # 0.38 MiB a tensor


def tensors(count: int = 8) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((FLOATS,), float(n)) for n in range(count)}


def manifest(named: dict[str, torch.Tensor]) -> FullWeightManifest:
    return FullWeightManifest.describe(
        "full", [(name, tuple(part.shape), part.numel() * part.element_size()) for name, part in named.items()]
    )


class Source:
    """Draws like the gathering iterator, and knows how far it was drawn."""

    def __init__(self, named: dict[str, torch.Tensor], fail_at: int | None = None) -> None:
        self.named, self.fail_at = named, fail_at
        self.drawn = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.named.items():
            if self.drawn == self.fail_at:
                raise RuntimeError("a collective failed")
            self.drawn += 1
            yield name, tensor


class FakeEngines:
    """Two engines that record every call; ``fail`` makes one call of one engine raise."""

    def __init__(self, fail: dict[str, Exception] | None = None, checksums: Callable[[str], list[str]] | None = None):
        self.calls: list[str] = []
        self.buckets: list[WeightBucket] = []
        self.fail = fail or {}
        self.checksums = checksums or (lambda right: [right, right])
        self.versions: list[int] = []
        self.adapters: list[Any] = []

    def __call__(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append(method)
        if method in self.fail and not (method == "receive" and len(self.buckets) < 1):
            raise self.fail[method]
        if method == "begin_sync":
            self.adapters.append(arguments[1])
        if method == "receive":
            self.buckets.append(arguments[0])
        if method == "commit_sync":
            self.versions.append(arguments[0])
            everything = [(name, part) for bucket in self.buckets for name, part in bucket.tensors.items()]
            return self.checksums(tensor_checksum(everything))
        return [None, None]


def run(
    engines: FakeEngines, source: Source, *, announced: FullWeightManifest | None = None, bucket_size_mb: int = 1
) -> Any:
    return StreamedSync(bucket_size_mb=bucket_size_mb).run(
        iter(source),
        engines,
        manifest=announced or manifest(source.named),
        policy_version=4,
        adapter=None,
    )


def test_a_sync_that_goes_well() -> None:
    engines, named = FakeEngines(), tensors()
    report = run(engines, Source(named))
    assert (report.policy_version, report.manifest) == (4, manifest(named))
    assert report.seconds >= 0
    assert engines.calls[0] == "begin_sync"
    assert engines.calls[-1] == "commit_sync"
    assert engines.versions == [4]
    assert "abort_sync" not in engines.calls
    got = {name: part for bucket in engines.buckets for name, part in bucket.tensors.items()}
    assert list(got) == list(named)
    assert all(torch.equal(got[name], named[name]) for name in named)


def test_buckets_are_bounded_numbered_and_not_tiny() -> None:
    engines = FakeEngines()
    run(engines, Source(tensors(10)))
    sizes = [sum(part.numel() * 4 for part in bucket.tensors.values()) for bucket in engines.buckets]
    assert [bucket.index for bucket in engines.buckets] == list(range(len(sizes)))
    assert len(sizes) == 4
    assert all(size < MIB + 4 * FLOATS for size in sizes), "never more than the limit and the tensor that reaches it"
    assert all(size >= MIB for size in sizes[:-1])
    one = FakeEngines()
    run(one, Source(tensors(10)), bucket_size_mb=512)
    assert len(one.buckets) == 1


def test_the_adapter_description_reaches_the_engines() -> None:
    engines, named = FakeEngines(), tensors(2)
    described: dict[str, object] = {"rank": 2, "alpha": 4.0}
    StreamedSync().run(iter(named.items()), engines, manifest=manifest(named), policy_version=1, adapter=described)
    assert engines.adapters == [described]


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_engine_with_other_weights_rolls_all_back(wrong: int) -> None:
    def checksums(right: str) -> list[str]:
        return ["other" if engine == wrong else right for engine in range(2)]

    engines = FakeEngines(checksums=checksums)
    with pytest.raises(WeightSyncError, match=rf"engines \[{wrong}\]") as caught:
        run(engines, Source(tensors()))
    assert "other" in str(caught.value)
    assert engines.calls[-1] == "abort_sync"
    assert engines.calls.count("abort_sync") == 1


@pytest.mark.parametrize("method", ["begin_sync", "receive", "commit_sync"])
@pytest.mark.parametrize("error", [WeightSyncError("names unknown"), OSError("engine gone"), ValueError("bad name")])
def test_a_failing_engine_rolls_all_back_and_the_tensors_are_drawn_to_the_end(method: str, error: Exception) -> None:
    """The other ranks sit in the collectives of the remaining tensors."""
    engines, source = FakeEngines(fail={method: error}), Source(tensors())
    with pytest.raises(WeightSyncError, match=str(error)):
        run(engines, source)
    assert source.drawn == 8
    assert engines.calls[-1] == "abort_sync"
    assert engines.versions == []


def test_a_gather_that_fails_rolls_back() -> None:
    engines = FakeEngines()
    with pytest.raises(WeightSyncError, match="a collective failed"):
        run(engines, Source(tensors(), fail_at=5))
    assert engines.calls[-1] == "abort_sync"
    assert "commit_sync" not in engines.calls


def test_both_causes_are_told_when_the_abort_fails_too() -> None:
    engines = FakeEngines(fail={"receive": OSError("engine 1 ran out of memory"), "abort_sync": OSError("no answer")})
    source = Source(tensors())
    with pytest.raises(WeightSyncError) as caught:
        run(engines, source)
    assert "engine 1 ran out of memory" in str(caught.value)
    assert "no answer" in str(caught.value)
    assert source.drawn == 8


@pytest.mark.parametrize("change", ["one fewer", "one more", "other bytes"])
def test_what_was_announced_must_be_sent_before_anything_is_committed(change: str) -> None:
    named = tensors()
    other = {
        "one fewer": tensors(7),
        "one more": tensors(9),
        "other bytes": {name: tensor.double() for name, tensor in named.items()},
    }[change]
    engines = FakeEngines()
    with pytest.raises(WeightSyncError, match="announced"):
        run(engines, Source(named), announced=manifest(other))
    assert "commit_sync" not in engines.calls
    assert engines.calls[-1] == "abort_sync"


# --- with the real gather and the real embedded engine ----------------------------------------------------------------


def two_local_engines() -> list[LocalEngine]:
    made = [
        LocalEngine(adapter=TinyAdapter(), model_path="", revision=None, device="cpu", dtype=torch.float32)
        for _ in range(2)
    ]
    for engine in made:
        engine.start()
    return made


def call_all(engines: list[LocalEngine]) -> Callable[..., list[Any]]:
    return lambda method, *arguments: [getattr(engine, method)(*arguments) for engine in engines]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("mode", "trainable"), [("full", "full"), ("full", "lora"), ("adapter", "lora")])
def test_after_a_sync_the_engine_samples_with_the_trained_policy(mode: str, trainable: str) -> None:
    made = make_trainer(mode=trainable, fsdp={"activation_checkpointing": True})
    engines = two_local_engines()
    batch = ReplayBatch(
        latents=torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(0)),
        sigmas=torch.tensor([0.9, 0.4]),
        conditions=({"encoder_hidden_states": torch.ones(3, 1)},) * 2,
        height=4,
        width=4,
    )
    adapter = {"rank": 2, "alpha": 4.0, "target_modules": ["to_q", "to_out"]} if mode == "adapter" else None
    previous = None
    for version in (1, 2):
        made.update(tiny_groups(seed=version))
        view = WireWeights(
            made.module,
            mode=mode,
            dtype=torch.float32,
            name_map=TinyAdapter().weight_name_map(),
            lora_rank=2,
            lora_alpha=4.0,
        )
        StreamedSync(bucket_size_mb=1).run(
            iter(view), call_all(engines), manifest=view.manifest, policy_version=version, adapter=adapter
        )
        with torch.no_grad():
            want = TinyAdapter().replay_transition(made.module, batch)
        for engine in engines:
            assert engine.policy_version == version
            got = TinyAdapter().replay_transition(engine._model.transformer, batch)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert previous is None or not torch.allclose(want, previous, atol=1e-4)
        previous = want


@pytest.mark.usefixtures("process_group")
def test_one_engine_that_refuses_takes_the_other_back() -> None:
    made = make_trainer()
    made.update(tiny_groups())
    engines = two_local_engines()
    view = WireWeights(made.module, mode="full", dtype=torch.float32, name_map=TinyAdapter().weight_name_map())
    sampling = SamplingConfig(num_inference_steps=4)
    (plan,) = plan_groups(
        [PromptRecord(prompt="red", prompt_id="0")],
        rollout_id=0,
        samples_per_prompt=2,
        sampling=sampling,
        generation_seed=1,
        policy_version=0,
        sde_indices=(1,),
    )
    request = TinyAdapter().build_rollout_request(plan, sampling, scheduler_config=SCHEDULER)
    before = engines[0].generate([request])[0].trajectory_latents

    def refuse(policy_version: int) -> str:
        raise WeightSyncError("engine 1 refuses")

    engines[1].commit_sync = refuse  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="engine 1 refuses"):
        StreamedSync().run(iter(view), call_all(engines), manifest=view.manifest, policy_version=1, adapter=None)
    for engine in engines:
        assert engine.policy_version == 0
        assert torch.equal(engine.generate([request])[0].trajectory_latents, before)
