"""What the ranks of a two-process test of `RayEngineLink` run: whole syncs over real gloo groups."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_sync import CPU, FakeEngine, described, named_shapes

from relax_sdk.errors import RelaxError, WeightSyncError
from relax_sdk.runtime import engine_link
from relax_sdk.runtime.engine_link import ControlGroups, RayEngineLink
from relax_sdk.weight_sync import StreamedSync

TIMEOUT_S = 4.0


class Worker:
    """Stands in for a Ray actor handle; a call is run when its result is waited for."""

    def __init__(self, engine: Any) -> None:
        self.call_engine = self
        self._engine = engine

    def remote(self, method: str, *args: Any) -> Any:
        return lambda: getattr(self._engine, method)(*args)


def wait_all(refs: Sequence[Any], **_: Any) -> list[Any]:
    return [ref() for ref in refs]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"w{n}": torch.randn(300_000, generator=generator) for n in range(5)}


def draws(name_to_die_at: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Each draw is a collective of the default group, as a gather is."""
    for name, tensor in tensors().items():
        if name == name_to_die_at:
            os._exit(7)
        dist.all_reduce(torch.zeros(1))
        yield name, tensor


def one_sync(
    rank: int, groups: ControlGroups, ranks_per_engine: int, fail: dict[int, dict[str, Exception]], die_at: str | None
) -> dict[str, Any]:
    """A sync with engines that live in their leaders' processes; what came of it here."""
    index = rank // ranks_per_engine
    engine = FakeEngine(f"engine {index}", fail.get(index))
    link = RayEngineLink(
        [Worker(engine)] * (2 // ranks_per_engine),
        groups=groups,
        rank=rank,
        world=2,
        ranks_per_engine=ranks_per_engine,
        timeout_s=TIMEOUT_S,
    )
    named, started = tensors(), time.monotonic()
    error = ""
    try:
        StreamedSync(bucket_size_mb=2, device=CPU).run(
            draws(die_at if rank == 1 else None),
            link,
            manifest=described(named),
            tensors=named_shapes(named),
            dtype="float32",
            policy_version=1,
            adapter=None,
        )
    except RelaxError as caught:
        error = str(caught)
    held = all(torch.equal(engine.held[name], named[name]) for name in engine.held)
    seconds = time.monotonic() - started
    return {
        "error": error,
        "calls": engine.calls,
        "held": len(engine.held) if held else -1,
        "buffers": len(engine.offer.buffers) if engine.offer else 0,
        "version": engine.version,
        "seconds": seconds,
        "name": link.engine,
    }


def link_rank_entry(rank: int, folder: str) -> None:
    """Every scenario, and what came of each, to ``<folder>/link<rank>.pt``."""
    torch.set_num_threads(1)
    engine_link.wait_all = wait_all  # type: ignore[assignment]
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    wait = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
    found: dict[str, Any] = {}
    for g in (1, 2):
        groups = ControlGroups.create(rank=rank, world=2, ranks_per_engine=g, timeout_s=TIMEOUT_S)
        for name, fail in (("well", {}), ("refused", {0: {"receive:1": WeightSyncError("bad bytes")}})):
            found[f"{name} {g}"] = one_sync(rank, groups, g, fail, None)
    torch.save(found, Path(folder) / f"link{rank}.pt")
    # Last: it ends rank 1.
    groups = ControlGroups.create(rank=rank, world=2, ranks_per_engine=1, timeout_s=TIMEOUT_S)
    found["died"] = one_sync(rank, groups, 1, {}, "w3")
    torch.save(found, Path(folder) / f"link{rank}.pt")
