"""A rank's way to its rollout engine, over Ray, and to the other ranks, over gloo groups of its own.

Whoever waits for somebody that waits gets the longer timeout, so that the one nearest to the fault reports it. With T
for ``--collective-timeout-s``: an engine waits T / 2 for whatever it talks to, a rank 3 T / 4 for its engine, the
others T in a gather for that rank, and the groups here, in which a rank may wait for one whose gather is timing out,
2 T.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from relax_sdk.errors import WeightSyncError
from relax_sdk.runtime.calls import engine_names, wait_all

__all__ = ["ENGINE_WAIT", "ControlGroups", "RayEngineLink"]

ENGINE_WAIT = 0.5
"""An engine's own longest wait, in units of ``--collective-timeout-s``."""
_CALL_WAIT = 0.75
_CONTROL_WAIT = 2.0


@dataclasses.dataclass(frozen=True)
class ControlGroups:
    """Process groups for small objects, apart from those of gathers and gradients.

    Attributes:
        everyone: all ranks.
        engine: the ranks of this rank's engine; None when it is alone.
    """

    everyone: dist.ProcessGroup
    engine: dist.ProcessGroup | None

    @classmethod
    def create(cls, *, rank: int, world: int, ranks_per_engine: int, timeout_s: float) -> ControlGroups:
        """Collective over all ranks, after `torch.distributed.init_process_group`.

        Args:
            rank, world: of the default group.
            ranks_per_engine: g; engine e has the ranks ``e * g .. e * g + g - 1``.
            timeout_s: of the default group's collectives.
        """

        def group(members: Sequence[int]) -> Any:
            wait = datetime.timedelta(seconds=_CONTROL_WAIT * timeout_s)
            return dist.new_group(list(members), backend="gloo", timeout=wait)

        everyone = group(range(world))
        if ranks_per_engine == 1:
            return cls(everyone=everyone, engine=None)
        # Every rank takes part in making every group, also in those that it is no member of.
        engines = [group(range(first, first + ranks_per_engine)) for first in range(0, world, ranks_per_engine)]
        return cls(everyone=everyone, engine=engines[rank // ranks_per_engine])


class RayEngineLink:
    """An `EngineLink` over a Ray actor of `RolloutRole`.

    Args:
        workers: the handles of all engines, engine 0 first.
        groups: this rank's.
        rank, world: position in the actor group.
        ranks_per_engine: as in `ControlGroups.create`.
        timeout_s: of the ranks' collectives; an answer of the engine may take three quarters of it.

    Raises:
        WeightSyncError: the engines do not tile the ranks.
    """

    def __init__(
        self,
        workers: Sequence[Any],
        *,
        groups: ControlGroups,
        rank: int,
        world: int,
        ranks_per_engine: int,
        timeout_s: float,
    ) -> None:
        if len(workers) * ranks_per_engine != world:
            raise WeightSyncError(
                f"{len(workers)} engines of {ranks_per_engine} devices for {world} ranks",
                expected="the engines' devices are the ranks' devices",
            )
        index = rank // ranks_per_engine
        self.engine = engine_names(len(workers))[index]
        self.is_leader = rank % ranks_per_engine == 0
        self._worker = workers[index]
        self._groups = groups
        self._timeout_s = _CALL_WAIT * timeout_s

    def submit(self, method: str, *args: Any) -> Callable[[], Any]:
        """See `EngineLink.submit`; calls are run in the order of their submission.

        Raises:
            RelaxError: from the returned function, as `relax_sdk.runtime.calls.wait_all`.
        """
        call = self._worker.call_engine.remote(method, *args)

        def wait() -> Any:
            what, names = f"weight sync ({method})", [self.engine]
            return wait_all([call], what=what, names=names, timeout_s=self._timeout_s)[0]

        return wait

    def share(self, value: Any) -> list[Any]:
        """See `EngineLink.share`."""
        return [value] if self._groups.engine is None else _gathered(value, self._groups.engine)

    def agree(self, value: Any) -> list[Any]:
        """See `EngineLink.agree`."""
        return _gathered(value, self._groups.everyone)


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
