"""Whose turn it is on the devices: engines and actor share them, one after the other.

Sampling and scoring are the engines' turn, with the actor's storage on the host under ``--offload-train``. Training is
the actor's, with the engines released under ``--offload-rollout``. A weight sync needs both: the actor, and of the
engines the transformer alone. Without the two flags everything stays resident and the turns cost nothing. A failure to
hand over is never passed over: going on would fail for lack of memory many steps later, with no hint of the cause.
"""

from __future__ import annotations

from typing import Literal

from relax_sdk.runtime.actor_group import ActorGroup
from relax_sdk.runtime.fleet import RolloutFleet

__all__ = ["Turns"]


class Turns:
    """Moves both sides in and out.

    Args:
        actor: the training ranks, resident.
        fleet: the engines, resident.
        offload_train: whether the actor leaves the devices while engines sample.
        offload_rollout: whether the engines leave them while the actor trains.
    """

    def __init__(self, actor: ActorGroup, fleet: RolloutFleet, *, offload_train: bool, offload_rollout: bool) -> None:
        self._actor, self._fleet = actor, fleet
        self._offload_train, self._offload_rollout = offload_train, offload_rollout
        self._actor_in = True
        self._engines: Literal["in", "out", "weights"] = "in"
        self.idle_bytes: int | None = None

    def actor_leaves(self) -> None:
        """With ``--offload-train`` the actor gives its device memory away."""
        if self._offload_train and self._actor_in:
            self._actor.offload()
            self._actor_in = False

    def engines_sample(self) -> None:
        """The actor leaves, then the engines come back whole."""
        self.actor_leaves()
        if self._engines != "in":
            self._fleet.resume(weights_only=False)
            self._engines = "in"

    def actor_trains(self) -> None:
        """The engines leave, then the actor comes back. `idle_bytes` is what the devices hold in between."""
        if self._offload_rollout and self._engines != "out":
            self._fleet.release()
            self._engines = "out"
        if not self._actor_in:
            if self._engines == "out":
                self.idle_bytes = self._actor.device_bytes()
            self._actor.wake()
            self._actor_in = True

    def weights_move(self) -> None:
        """The actor stays, and of the engines only what a weight sync writes to comes back."""
        self.actor_trains()
        if self._engines == "out":
            self._fleet.resume(weights_only=True)
            self._engines = "weights"

    def engines_restarted(self) -> None:
        """Every engine is resident again, as after a start."""
        self._engines = "in"
