"""Weight syncs in tests: offers made by hand, ranks as threads, engines in this process, and receivers in another."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from tiny_family import TinyAdapter
from torch import Tensor

from relax_sdk.protocols import (
    AdapterConfig,
    BufferHandle,
    EngineSettings,
    FullWeightManifest,
    SyncOffer,
    SyncReport,
    WeightBucket,
)
from relax_sdk.rollout.local import LocalEngine
from relax_sdk.weight_sync import StreamedSync
from relax_sdk.weights import OpenBuffer, SendBuffer, buffer_for, bytes_checksum, combine_checksums

LORA = AdapterConfig(rank=2, alpha=4.0, target_modules=("to_q", "to_out"))
CPU = torch.device("cpu")
WAIT_S = 10.0
"""Ranks that wait longer for each other would wait for ever."""


def engine_settings(**changes: Any) -> EngineSettings:
    fields = {
        "model_path": "",
        "device": "cpu",
        "dtype": "fp32",
        "sync_mode": "full",
        "work_dir": Path("unused"),
        "timeout_s": 5.0,
    }
    return EngineSettings(**{**fields, **changes})


def embedded_engine(adapter: Any = None, **changes: Any) -> LocalEngine:
    """A started engine of the tiny family."""
    made = LocalEngine(adapter=adapter or TinyAdapter(), settings=engine_settings(**changes))
    made.start()
    return made


def described(tensors: Mapping[str, Tensor], mode: Any = "full") -> FullWeightManifest:
    return FullWeightManifest.describe(mode, [(n, tuple(t.shape), t.nbytes) for n, t in tensors.items()])


def named_shapes(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())


def wire_name(tensors: Mapping[str, Tensor]) -> Any:
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


def offer_of(
    tensors: Mapping[str, Tensor], handles: Sequence[BufferHandle], adapter: AdapterConfig | None = None
) -> SyncOffer:
    return SyncOffer(
        manifest=described(tensors, "adapter" if adapter else "full"),
        dtype=wire_name(tensors),
        tensors=named_shapes(tensors),
        buffers=tuple(handles),
        adapter=adapter,
    )


def raw(tensors: Sequence[Tensor]) -> bytes:
    """The tensors' bytes back to back, by numpy."""
    return b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)


def buckets_of(tensors: Mapping[str, Tensor], per_bucket: int) -> list[tuple[WeightBucket, bytes]]:
    """Buckets of so many tensors each, with what belongs into their slots (0 and 1 in turn)."""
    names, made = list(tensors), []
    for index, first in enumerate(range(0, len(names), per_bucket)):
        part = [tensors[name] for name in names[first : first + per_bucket]]
        content = raw(part)
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        bucket = WeightBucket(
            index=index,
            slot=index % 2,
            first=first,
            count=len(part),
            bytes=len(content),
            checksum=bytes_checksum(data),
        )
        made.append((bucket, content))
    return made


def write(buffer: SendBuffer, slot: int, content: bytes) -> None:
    buffer.slot(slot)[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def deliver(
    engine: Any,
    tensors: Mapping[str, Tensor],
    *,
    version: int = 1,
    adapter: AdapterConfig | None = None,
    per_bucket: int = 3,
) -> tuple[str, str]:
    """A sync by hand; the engine's checksum, and that of what was sent."""
    parts = buckets_of(tensors, per_bucket)
    with SendBuffer.open(CPU, max(len(content) for _, content in parts)) as buffer:
        engine.begin_sync(offer_of(tensors, [buffer.handle], adapter))
        for bucket, content in parts:
            write(buffer, bucket.slot, content)
            engine.receive(bucket)
        held = engine.commit_sync(version)
    return held, combine_checksums([bucket.checksum for bucket, _ in parts])


# --- ranks as threads -------------------------------------------------------------------------------------------------


class Collective:
    """An all-gather of threads; whoever waits too long breaks it for everybody."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=WAIT_S)
        self._values: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class FakeEngine:
    """Keeps what comes. ``fail`` maps a method to what it raises; ``receive:2`` is the bucket of index 2."""

    def __init__(self, name: str, fail: Mapping[str, Exception] | None = None) -> None:
        self.name, self.fail = name, dict(fail or {})
        self.calls: list[str] = []
        self.offer: SyncOffer | None = None
        self.buffers: list[OpenBuffer] = []
        self.buckets: list[WeightBucket] = []
        self.held: dict[str, Tensor] = {}
        self.version = 0
        self.corrupt_commit = False
        self.in_slot: Callable[[], None] = lambda: None

    def _may_fail(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fail:
            raise self.fail[call]

    def begin_sync(self, offer: SyncOffer) -> None:
        self._may_fail("begin_sync")
        self.offer = offer
        self.buffers = [OpenBuffer.open(handle, CPU) for handle in offer.buffers]

    def receive(self, bucket: WeightBucket) -> None:
        self._may_fail(f"receive:{bucket.index}")
        assert self.offer is not None
        self.in_slot()
        for buffer in self.buffers:
            data = buffer.slot(bucket.slot)[: bucket.bytes].clone()
            assert bytes_checksum(data) == bucket.checksum
            for name, shape, offset in self.offer.entries(bucket):
                size = self.offer.item_bytes * max(1, torch.Size(shape).numel())
                part = data[offset : offset + size].view(getattr(torch, self.offer.dtype))
                self.held[name] = part.view(shape)
        self.buckets.append(bucket)

    def commit_sync(self, policy_version: int) -> str:
        self._may_fail("commit_sync")
        self.version = policy_version
        self._close()
        sums = [bucket.checksum for bucket in self.buckets]
        return combine_checksums(sums[:-1] if self.corrupt_commit else sums)

    def abort_sync(self) -> None:
        self._may_fail("abort_sync")
        self.version = 0
        self._close()

    def _close(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        self.buffers = []


class FakeLink:
    """A rank's link; the engine answers from a thread of its own, in order, as an actor does."""

    def __init__(
        self, fleet: FakeFleet, rank: int, *, engine: Any, name: str, is_leader: bool, shared: Collective
    ) -> None:
        self._fleet, self._rank, self._engine, self._shared = fleet, rank, engine, shared
        self.engine, self.is_leader = name, is_leader
        self.lost: Exception | None = None
        self._worker = ThreadPoolExecutor(max_workers=1)

    def submit(self, method: str, *args: Any) -> Callable[[], Any]:
        assert self.is_leader
        future = self._worker.submit(getattr(self._engine, method), *args)
        return lambda: future.result(timeout=WAIT_S)

    def share(self, value: Any) -> list[Any]:
        return self._shared.gather(self._rank % self._fleet.ranks_per_engine, value)

    def agree(self, value: Any) -> list[Any]:
        if self.lost is not None:
            raise self.lost
        return self._fleet.everyone.gather(self._rank, value)

    def close(self) -> None:
        self._worker.shutdown()


@dataclasses.dataclass
class Draws:
    """A rank's draws; each is a collective of all ranks, as a gather is. ``fail_at`` raises after that many."""

    tensors: Mapping[str, Tensor]
    gather: Callable[[str], Any]
    fail_at: int | None = None
    drawn: int = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._items = iter(self.tensors.items())
        return self

    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._items)
        self.drawn += 1
        self.gather(name)
        if self.drawn - 1 == self.fail_at:
            raise torch.OutOfMemoryError("no memory for the merge")
        return name, tensor


@dataclasses.dataclass
class Outcome:
    report: SyncReport | None
    error: Exception | None
    drawn: int


class FakeFleet:
    """Ranks and engines of one run: engine e serves the ranks ``e * g .. e * g + g - 1``."""

    def __init__(self, engines: Sequence[Any], *, ranks_per_engine: int = 1) -> None:
        self.engines, self.ranks_per_engine = list(engines), ranks_per_engine
        self.world = len(self.engines) * ranks_per_engine
        self.everyone, self.gathers = Collective(self.world), Collective(self.world)
        shared = [Collective(ranks_per_engine) for _ in self.engines]
        self.links = [
            FakeLink(
                self,
                rank,
                engine=self.engines[rank // ranks_per_engine],
                name=f"engine {rank // ranks_per_engine}",
                is_leader=rank % ranks_per_engine == 0,
                shared=shared[rank // ranks_per_engine],
            )
            for rank in range(self.world)
        ]

    def draws(self, rank: int, tensors: Mapping[str, Tensor], fail_at: int | None = None) -> Draws:
        return Draws(tensors, lambda name: self.gathers.gather(rank, name), fail_at)

    def run(
        self,
        draws: Sequence[Iterable[tuple[str, Tensor]]],
        announced: Mapping[str, Tensor],
        *,
        version: int = 1,
        adapter: AdapterConfig | None = None,
        bucket_size_mb: int = 1,
    ) -> list[Outcome]:
        """Every rank's part at once; what came of it, in rank order."""

        def one(rank: int) -> Outcome:
            report, error = None, None
            try:
                report = StreamedSync(bucket_size_mb=bucket_size_mb, device=CPU).run(
                    iter(draws[rank]),
                    self.links[rank],
                    manifest=described(announced, "adapter" if adapter else "full"),
                    tensors=named_shapes(announced),
                    dtype=wire_name(announced),
                    policy_version=version,
                    adapter=adapter,
                )
            except Exception as caught:  # noqa: BLE001 - looked at by the test
                error = caught
            return Outcome(report, error, getattr(draws[rank], "drawn", -1))

        with ThreadPoolExecutor(max_workers=self.world) as pool:
            outcomes = list(pool.map(one, range(self.world)))
        for link in self.links:
            link.close()
        return outcomes


# --- a receiver in another process ------------------------------------------------------------------------------------


@contextlib.contextmanager
def receiver(device: str = "cpu") -> Iterator[tuple[Connection, Any]]:
    """A receiver process and the pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receiver_entry, args=(theirs, device))
    process.start()
    theirs.close()
    try:
        yield ours, process
    finally:
        ours.close()
        process.kill()
        process.join(timeout=10)


def ask(pipe: Connection, *message: Any) -> Any:
    """Send a receiver a command and wait for its answer."""
    pipe.send(message)
    assert pipe.poll(120), "the receiver did not answer"
    return pipe.recv()


def receiver_entry(pipe: Connection, device: str) -> None:
    """Opens what it is sent and answers with checksums, until told to stop or to die with the buffer open."""
    torch.set_num_threads(1)
    where = torch.device(device)
    opened: OpenBuffer | None = None
    while True:
        command, *arguments = pipe.recv()
        if command == "open":
            handles = [BufferHandle.model_validate_json(text) for text in arguments[0]]
            opened = OpenBuffer.open(buffer_for(handles, where), where)
            pipe.send("open")
        elif command == "sum":
            assert opened is not None
            slot, size = arguments
            pipe.send(bytes_checksum(opened.slot(slot)[:size]))
        elif command == "close":
            assert opened is not None
            opened.close()
            pipe.send(torch.cuda.mem_get_info()[0] if where.type == "cuda" else 0)
        elif command == "die":
            os._exit(9)
        else:
            return
