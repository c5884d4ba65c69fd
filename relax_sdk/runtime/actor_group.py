"""The ranks of the actor, called together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_sdk.protocols import SyncReport
from relax_sdk.runtime.calls import rank_names, wait_all
from relax_sdk.training import UpdateReport

__all__ = ["ActorGroup"]


class ActorGroup:
    """Every method calls all ranks and waits for them; the first failure is the one that is raised.

    Args:
        ranks: actor handles of `ActorRole`, rank 0 first.
        timeout_s: of one call.
    """

    def __init__(self, ranks: Sequence[Any], *, timeout_s: float) -> None:
        self.ranks = tuple(ranks)
        self._timeout_s = timeout_s

    def update(self, rollout_id: int, *, groups: int, candidates: int) -> UpdateReport:
        """Train on a rollout's rows; the report of rank 0, whose metrics all ranks share."""
        report: UpdateReport = self._call("update", "update", rollout_id, groups, candidates)[0]
        return report

    def sync(self, engines: Sequence[Any], policy_version: int) -> SyncReport:
        """Send the weights to the engines; see `ActorRole.sync`."""
        report: SyncReport = self._call("sync", "weight sync", list(engines), policy_version)[0]
        return report

    def offload(self) -> None:
        """Free the ranks' weights and optimizer state on the devices."""
        self._call("offload", "offload of the actor")

    def wake(self) -> None:
        """Undo `offload`."""
        self._call("wake", "wake-up of the actor")

    def device_bytes(self) -> int | None:
        """Used memory of the fullest device, whoever uses it; None on a CPU."""
        used: list[int | None] = self._call("device_bytes", "memory query")
        return None if None in used else max(value for value in used if value is not None)

    def _call(self, method: str, what: str, *args: Any) -> list[Any]:
        calls = [getattr(rank, method).remote(*args) for rank in self.ranks]
        return wait_all(calls, what=what, names=rank_names(len(self.ranks)), timeout_s=self._timeout_s)
