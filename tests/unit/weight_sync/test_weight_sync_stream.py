"""The transaction: everything or nothing, on all engines, and every rank hears the same."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_family import SCHEDULER, TinyAdapter
from tiny_sync import LORA, WAIT_S, Draws, FakeEngine, FakeFleet, Outcome, described, embedded_engine
from tiny_training import make_trainer, tiny_groups

from relax_sdk.errors import WeightSyncError
from relax_sdk.protocols import PromptRecord, ReplayBatch, SamplingConfig
from relax_sdk.rollout import plan_groups
from relax_sdk.weight_sync import StreamedSync, WireWeights
from relax_sdk.weight_sync.plan import plan_buckets

MIB = 2**20
FLOATS = 100_000  # 0.38 MiB a tensor
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]


@pytest.fixture(autouse=True)
def _no_buffer_is_left() -> Iterator[None]:
    """Each has given its file back, whatever the test did; a failure's frames hold it until they are collected."""
    yield
    if open_buffers():
        gc.collect()
    assert open_buffers() == 0


def open_buffers() -> int:
    """Of this process, as the system counts them."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the others is gone again
            found += "memfd:relax-weights" in str(path.readlink())
    return found


def tensors(count: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return {f"w{n}": torch.randn(FLOATS // 100, 100, generator=generator) for n in range(count)}


def fleet(engines: int, ranks_per_engine: int, fail: Mapping[int, Mapping[str, Exception]] | None = None) -> FakeFleet:
    """``fail``: what which engine raises where."""
    made = [FakeEngine(f"engine {index}", (fail or {}).get(index)) for index in range(engines)]
    return FakeFleet(made, ranks_per_engine=ranks_per_engine)


def run(
    ranks: FakeFleet,
    named: Mapping[str, torch.Tensor],
    *,
    draws: Mapping[int, Draws] | None = None,
    announced: Mapping[str, torch.Tensor] | None = None,
    **options: Any,
) -> list[Outcome]:
    all_draws = [(draws or {}).get(rank) or ranks.draws(rank, named) for rank in range(ranks.world)]
    return ranks.run(all_draws, announced or named, version=4, **options)


def errors_of(ranks: FakeFleet, outcomes: list[Outcome], *, drawn: int, aborted: bool = True) -> str:
    """The one text that all ranks raise; all engines were told to abort, and all ranks drew to the same tensor."""
    for outcome in outcomes:
        assert isinstance(outcome.error, WeightSyncError), outcome
        assert outcome.report is None
        assert outcome.drawn == drawn
    texts = {str(outcome.error) for outcome in outcomes}
    assert len(texts) == 1, texts
    for engine in ranks.engines:
        if "begin_sync" not in engine.calls:
            # It knows of no sync, and an abort would take back the one before.
            assert engine.calls == []
            continue
        assert engine.calls[-1] == "abort_sync"
        assert engine.calls.count("abort_sync") == 1
        if aborted:
            assert engine.version == 0
    return texts.pop()


@pytest.mark.parametrize(("engines", "ranks_per_engine"), SHAPES)
def test_a_sync_that_goes_well(engines: int, ranks_per_engine: int) -> None:
    ranks, named = fleet(engines, ranks_per_engine), tensors()
    outcomes = run(ranks, named)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert outcome.report is not None
        assert outcome.report.policy_version == 4
        assert outcome.report.manifest == outcomes[0].report.manifest  # type: ignore[union-attr]
        assert list(outcome.report.timings) == ["open", "send", "commit"]
        assert 0 < sum(outcome.report.timings.values()) <= outcome.report.seconds
        assert outcome.drawn == 8
    for engine in ranks.engines:
        assert engine.calls == ["begin_sync", *(f"receive:{index}" for index in range(4)), "commit_sync"]
        assert engine.version == 4
        assert len(engine.offer.buffers) == ranks_per_engine
        assert len({handle.address["path"] for handle in engine.offer.buffers}) == ranks_per_engine
        assert list(engine.held) == list(named)
        assert all(torch.equal(engine.held[name], named[name]) for name in named)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_shapes_and_strides_arrive(dtype: torch.dtype) -> None:
    base = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    named = {
        "scalar": base[0, 0].clone(),
        "odd": base[:3, :1],
        "transposed": base.t(),
        "every other": base[::2],
        "expanded": base[:1].expand(4, 5),
        "empty": base[:0],
    }
    ranks = fleet(1, 1)
    (outcome,) = run(ranks, named)
    assert outcome.error is None, outcome.error
    held = ranks.engines[0].held
    for name, tensor in named.items():
        assert held[name].shape == tensor.shape
        assert torch.equal(held[name], tensor), name


def test_filling_goes_on_while_the_engine_reads_but_not_in_the_slot_it_reads() -> None:
    """The engine holds on to bucket 0 until the ranks have drawn bucket 1; they cannot have drawn any of bucket 2."""
    ranks, named = fleet(1, 2), tensors()
    draws = [ranks.draws(rank, named) for rank in range(2)]
    seen: list[tuple[int, ...]] = []
    drew_the_next = threading.Event()
    plain = ranks.gathers.gather

    def gather(rank: int, name: Any) -> list[Any]:
        if name == "w3":
            drew_the_next.set()
        return plain(rank, name)

    def in_slot() -> None:
        assert drew_the_next.wait(WAIT_S), "nothing is drawn while the engine reads"
        seen.append(tuple(draw.drawn for draw in draws))

    ranks.gathers.gather = gather  # type: ignore[method-assign]
    ranks.engines[0].in_slot = in_slot
    outcomes = run(ranks, named, draws=dict(enumerate(draws)))
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert max(seen[0]) <= 4


@pytest.mark.parametrize("ranks_per_engine", [1, 2])
def test_a_slow_engine_reads_what_was_meant_for_it(ranks_per_engine: int) -> None:
    """Tensors that are not sharded are drawn without a gather, which would otherwise hold the ranks together."""
    ranks, named = fleet(1, ranks_per_engine), tensors(12)
    ranks.engines[0].in_slot = lambda: time.sleep(0.1)
    outcomes = run(ranks, named, draws={rank: Draws(named, lambda _: None) for rank in range(ranks_per_engine)})
    assert [outcome.error for outcome in outcomes] == [None] * ranks_per_engine
    assert all(torch.equal(ranks.engines[0].held[name], named[name]) for name in named)


@pytest.mark.parametrize(("engines", "ranks_per_engine"), SHAPES)
@pytest.mark.parametrize(
    ("where", "drawn"),
    [("begin_sync", 0), ("receive:0", 8), ("receive:1", 8), ("receive:3", 8), ("commit_sync", 8)],
)
@pytest.mark.parametrize("error", [WeightSyncError("names unknown", expected="w0"), OSError("gone")])
def test_an_engine_that_fails_takes_all_back(
    engines: int, ranks_per_engine: int, where: str, drawn: int, error: Exception
) -> None:
    """The ranks of the other engine, and the second rank of this one, sit in the gathers of what is still to come."""
    failing = engines - 1
    ranks = fleet(engines, ranks_per_engine, {failing: {where: error}})
    text = errors_of(ranks, run(ranks, tensors()), drawn=drawn)
    assert text.splitlines()[0].startswith(f"weight sync to version 4 failed at engine {failing}: ")
    assert ("names unknown, expected w0" if isinstance(error, WeightSyncError) else "OSError: gone") in text
    assert [f"engine {index}: aborted" in text for index in range(engines)] == [True] * engines
    if where != "commit_sync":
        assert all("commit_sync" not in engine.calls for engine in ranks.engines)
    if where == "receive:0":
        assert "receive:3" not in ranks.engines[failing].calls, "it goes on sending after a refusal"


def test_two_engines_fail_and_the_first_cause_is_told_first() -> None:
    ranks = fleet(2, 1, {0: {"receive:3": OSError("later")}, 1: {"receive:0": OSError("sooner")}})
    text = errors_of(ranks, run(ranks, tensors()), drawn=8)
    assert "failed at engine 1: OSError: sooner" in text.splitlines()[0]
    assert "engine 0: OSError: later; aborted" in text
    assert text.count("sooner") == 1


@pytest.mark.parametrize(("engines", "ranks_per_engine"), SHAPES)
def test_an_engine_with_other_weights_takes_all_back(engines: int, ranks_per_engine: int) -> None:
    ranks = fleet(engines, ranks_per_engine)
    ranks.engines[0].corrupt_commit = True
    text = errors_of(ranks, run(ranks, tensors()), drawn=8)
    assert "failed at engine 0: it holds other weights than were sent" in text
    assert all("commit_sync" in engine.calls for engine in ranks.engines), "they had committed, and were taken back"


@pytest.mark.parametrize(("engines", "ranks_per_engine"), SHAPES)
def test_a_failing_abort_is_told_with_the_cause(engines: int, ranks_per_engine: int) -> None:
    ranks = fleet(engines, ranks_per_engine, {0: {"receive:1": OSError("no memory"), "abort_sync": OSError("silent")}})
    text = errors_of(ranks, run(ranks, tensors()), drawn=8, aborted=False)
    assert "OSError: no memory" in text.splitlines()[0]
    assert "engine 0: the abort failed: OSError: silent" in text
    assert "restart the run" in text
    assert engines == 1 or "engine 1: aborted" in text


@pytest.mark.parametrize(("engines", "ranks_per_engine"), SHAPES)
@pytest.mark.parametrize("fail_at", [0, 3, 7])
def test_a_rank_that_fails_on_a_gathered_tensor_goes_on_gathering(
    engines: int, ranks_per_engine: int, fail_at: int
) -> None:
    ranks, named = fleet(engines, ranks_per_engine), tensors()
    last = ranks.world - 1
    text = errors_of(ranks, run(ranks, named, draws={last: ranks.draws(last, named, fail_at)}), drawn=8)
    assert f"failed at engine {engines - 1}: gathering a tensor failed: OutOfMemoryError" in text


def test_a_gather_that_fails_on_all_ranks_ends_the_draws() -> None:
    ranks, named = fleet(2, 2), tensors()

    def draws(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(named.items()):
            ranks.gathers.gather(rank, name)
            if index == 5:
                raise RuntimeError("the collective timed out")
            yield name, tensor

    outcomes = ranks.run([draws(rank) for rank in range(4)], named, version=4)
    assert {type(outcome.error) for outcome in outcomes} == {WeightSyncError}
    assert all("the collective timed out" in str(outcome.error) for outcome in outcomes)
    assert all(engine.calls[-1] == "abort_sync" for engine in ranks.engines)


def changed(named: Mapping[str, torch.Tensor], change: str) -> dict[str, torch.Tensor]:
    made = dict(named)
    if change == "one fewer":
        made.popitem()
    elif change == "one more":
        made["extra"] = torch.ones(3)
    elif change == "renamed":
        made = {name.replace("w5", "w5x"): tensor for name, tensor in made.items()}
    elif change == "reordered":
        made = dict(reversed(made.items()))
    elif change == "shape":
        made["w2"] = made["w2"].t()
    else:
        made["w2"] = made["w2"].bfloat16()
    return made


@pytest.mark.parametrize("change", ["one fewer", "one more", "renamed", "reordered", "shape", "dtype"])
@pytest.mark.parametrize("ranks_per_engine", [1, 2])
def test_what_is_drawn_must_be_what_was_announced(change: str, ranks_per_engine: int) -> None:
    ranks, named = fleet(1, ranks_per_engine), tensors()
    drawn = changed(named, change)
    text = errors_of(ranks, run(ranks, drawn, announced=named), drawn=len(drawn))
    assert "announced" in text
    assert "commit_sync" not in ranks.engines[0].calls


def test_ranks_of_one_engine_must_hold_the_same_bytes() -> None:
    ranks, named = fleet(1, 2), tensors()
    other = {name: tensor + (name == "w4") for name, tensor in named.items()}
    text = errors_of(ranks, run(ranks, named, draws={1: ranks.draws(1, other)}), drawn=8)
    assert "bucket 2 with different bytes" in text
    assert "receive:2" not in ranks.engines[0].calls


def test_ranks_must_announce_the_same() -> None:
    ranks, named = fleet(2, 1), tensors()
    sync = [StreamedSync(bucket_size_mb=1, device=torch.device("cpu")) for _ in range(2)]
    caught: list[str] = []

    def one(rank: int) -> None:
        mine = named if rank else changed(named, "renamed")
        view = {
            "manifest": described(mine),
            "tensors": tuple((name, tuple(tensor.shape)) for name, tensor in mine.items()),
        }
        with pytest.raises(WeightSyncError) as error:
            sync[rank].run(
                iter(ranks.draws(rank, mine)),
                ranks.links[rank],
                dtype="float32",
                policy_version=4,
                adapter=None,
                **view,  # type: ignore[arg-type]
            )
        caught.append(str(error.value))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * WAIT_S)
    assert len(caught) == 2
    assert len(set(caught)) == 1
    assert "its ranks would send different weights" in caught[0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_without_room_for_its_buffer_stops_all_before_anything_is_drawn(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = fleet(2, 2)
    reserve, count = os.posix_fallocate, iter(range(10))

    def full(descriptor: int, start: int, size: int) -> None:
        if next(count) == rank:
            raise OSError(28, "No space left on device")
        reserve(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    text = errors_of(ranks, run(ranks, tensors()), drawn=0)
    assert "no memory for a send buffer" in text


@pytest.mark.parametrize("problem", ["nothing", "manifest", "dtype"])
def test_an_announcement_that_makes_no_sense(problem: str) -> None:
    ranks, named = fleet(1, 1), tensors(2)
    if problem == "nothing":
        named = {"w": torch.empty(0, 3)}
        with pytest.raises(WeightSyncError, match="nothing to send"):
            plan_buckets([("w", (0, 3))], dtype="float32", bucket_bytes=MIB)
        return
    with pytest.raises(WeightSyncError) as caught:
        StreamedSync(bucket_size_mb=1, device=torch.device("cpu")).run(
            iter(ranks.draws(0, named)),
            ranks.links[0],
            manifest=described(named if problem == "dtype" else tensors(3)),
            tensors=tuple((name, tuple(tensor.shape)) for name, tensor in named.items()),
            dtype="float64" if problem == "dtype" else "float32",
            policy_version=4,
            adapter=None,
        )
    assert ("float64" if problem == "dtype" else "the manifest is") in str(caught.value)


def test_ranks_that_cannot_agree_abort_their_own_engine() -> None:
    ranks = fleet(2, 1)
    for link in ranks.links:
        link.lost = RuntimeError("connection closed by peer")
    for outcome in run(ranks, tensors()):
        assert isinstance(outcome.error, WeightSyncError)
        assert "the ranks could not agree: RuntimeError: connection closed by peer" in str(outcome.error)
        assert outcome.drawn == 0
    assert [engine.calls for engine in ranks.engines] == [["begin_sync", "abort_sync"]] * 2


# --- with the real gather and the real embedded engine ----------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("mode", "trainable"), [("full", "full"), ("full", "lora"), ("adapter", "lora")])
def test_after_a_sync_the_engine_samples_with_the_trained_policy(mode: str, trainable: str) -> None:
    made = make_trainer(mode=trainable, fsdp={"activation_checkpointing": True})
    engine = embedded_engine(sync_mode=mode)
    batch = ReplayBatch(
        latents=torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(0)),
        sigmas=torch.tensor([0.9, 0.4]),
        conditions=({"encoder_hidden_states": torch.ones(3, 1)},) * 2,
        height=4,
        width=4,
    )
    previous = None
    for version in (1, 2):
        made.update(tiny_groups(seed=version))
        view = wire(made, mode)
        ranks = FakeFleet([engine])
        StreamedSync(bucket_size_mb=1, device=torch.device("cpu")).run(
            iter(view),
            ranks.links[0],
            manifest=view.manifest,
            tensors=view.tensors,
            dtype=view.dtype,
            policy_version=version,
            adapter=LORA if mode == "adapter" else None,
        )
        ranks.links[0].close()
        with torch.no_grad():
            want = TinyAdapter().replay_transition(made.module, batch)
        assert engine.policy_version == version
        got = TinyAdapter().replay_transition(engine._model.transformer, batch)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert previous is None or not torch.allclose(want, previous, atol=1e-4)
        previous = want


@pytest.mark.usefixtures("process_group")
def test_one_engine_that_refuses_takes_the_other_back() -> None:
    made = make_trainer()
    made.update(tiny_groups())
    named = dict(wire(made, "full"))
    engines = [embedded_engine() for _ in range(2)]
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
    outcomes = run(FakeFleet(engines), named)
    assert all("engine 1 refuses" in str(outcome.error) for outcome in outcomes)
    for engine in engines:
        assert engine.policy_version == 0
        assert torch.equal(engine.generate([request])[0].trajectory_latents, before)


def wire(made: Any, mode: str) -> WireWeights:
    return WireWeights(
        made.module,
        mode=mode,
        dtype=torch.float32,
        name_map=TinyAdapter().weight_name_map(),
        lora_rank=2,
        lora_alpha=4.0,
    )
