"""What ``--use-fault-tolerance`` does: an engine that died is started again and gets the actor's weights.

Without the switch the first failure ends the run. With it, a failed wave, hand-over or weight sync is repeated once
the dead engines are back, a few times at most; a failure without a dead engine is never repeated, because nothing
says that it would go away. Weights are never guessed: after a restart all engines are synced from the actor before
anything is sampled, and a wave is sampled only with engines and actor at one version. A rank that dies ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from relax_sdk.errors import RelaxError, RunError
from relax_sdk.protocols import SyncReport
from relax_sdk.runtime.actor_group import ActorGroup
from relax_sdk.runtime.fleet import RolloutFleet
from relax_sdk.runtime.turns import Turns

__all__ = ["Recovery"]

_RESTARTS_PER_OPERATION = 2
_T = TypeVar("_T")


class Recovery:
    """Runs operations on the engines, and restarts engines in between when that is wanted.

    Args:
        actor: the training ranks.
        fleet: the engines.
        turns: whose turn it is.
        enabled: ``--use-fault-tolerance``.
        line: told what happens.
    """

    def __init__(
        self, *, actor: ActorGroup, fleet: RolloutFleet, turns: Turns, enabled: bool, line: Callable[[str], None]
    ) -> None:
        self._actor, self._fleet, self._turns = actor, fleet, turns
        self._enabled, self._line = enabled, line
        # Engines that were restarted hold the model folder's weights until the next sync.
        self._behind = False
        self.restarts = 0
        self.sync_failures = 0

    def sample(self, work: Callable[[], _T], *, policy_version: int) -> _T:
        """Run ``work`` with the engines resident, at ``policy_version``.

        Args:
            work: samples or scores; it is run again from its beginning after a restart.
            policy_version: of the actor.

        Raises:
            RelaxError: ``work``'s own, or the hand-over's, when no engine died or engines died too often.
        """

        def attempt() -> _T:
            if self._behind:
                self._sync(policy_version)
            self._turns.engines_sample()
            return work()

        return self._with_restarts(attempt)

    def train(self) -> None:
        """Hand the devices to the actor.

        Raises:
            RelaxError: the hand-over failed, and no engine died or engines died too often.
        """
        self._with_restarts(self._turns.actor_trains)

    def sync(self, policy_version: int) -> SyncReport:
        """Carry the actor's weights to all engines, as ``policy_version``.

        Raises:
            WeightSyncError: the transaction failed, and no engine died or engines died too often. Actor and engines
                keep the earlier version.
        """
        return self._with_restarts(lambda: self._sync(policy_version))

    def memory_metrics(self) -> dict[str, float]:
        """``perf/mem_idle_gb`` once a device was seen with both sides off it."""
        idle = self._turns.idle_bytes
        return {} if idle is None else {"perf/mem_idle_gb": idle / 1e9}

    def _sync(self, policy_version: int) -> SyncReport:
        self._turns.weights_move()
        try:
            report = self._actor.sync(self._fleet.workers, policy_version)
        except RelaxError:
            self.sync_failures += 1
            raise
        self._behind = False
        return report

    def _with_restarts(self, attempt: Callable[[], _T]) -> _T:
        """``attempt`` until it succeeds; a death in an attempt or in a restart costs one of the restarts."""
        left = _RESTARTS_PER_OPERATION
        while True:
            try:
                return attempt()
            except RelaxError as error:
                failure = error
            while True:
                dead = self._fleet.dead_engines() if self._enabled and left else {}
                if not dead:
                    raise failure
                left -= 1
                try:
                    self._restart(dead, failure)
                    break
                except RelaxError as error:
                    failure = error

    def _restart(self, dead: dict[int, str], cause: RelaxError) -> None:
        self.restarts += len(dead)
        self._behind = True
        for index, reason in dead.items():
            self._line(f"rollout engine {index} is gone ({reason.splitlines()[0]}); starting it again")
        # Whole pipelines are about to load: as while sampling, the actor is not beside them.
        self._turns.actor_leaves()
        try:
            self._fleet.restart(dead)
        except RelaxError as error:
            raise RunError(
                f"rollout engines {sorted(dead)} could not be started again: {error}", where=f"after: {cause.what}"
            ) from error
        # Hand-overs address all engines: the survivors become as resident as the restarted ones.
        self._fleet.resume(weights_only=False)
        self._turns.engines_restarted()
