"""What a rollout engine implements: `RolloutEngine`.

One engine object serves one set of devices. Any exception from `release`, `resume` or the sync methods is fatal for
the run: an engine that is half released or holds half a sync must not sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from relax_sdk.protocols.records import FullWeightManifest, RolloutRequest, RolloutResponse, WeightBucket

__all__ = ["RolloutEngine"]


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples trajectories with weights of a known policy version.

    Constructed as ``Engine(adapter=..., model_path=..., revision=..., device="cpu"|"cuda", dtype=...)``: ``adapter``
    is an instance of the model family's adapter, ``model_path`` the model folder, ``revision`` is
    ``--model-revision`` or None, and ``dtype`` the torch dtype of ``--rollout-engine-dtype``, in which the engine
    holds its parameters. `start` loads the model, not the constructor.

    `release` and `resume` are not called yet: the engine keeps its memory while the actor trains.

    Attributes:
        policy_version: how many weight syncs the weights have received; 0 for those of the model folder.
    """

    policy_version: int

    def start(self) -> None:
        """Load the model; afterwards `generate` answers."""
        ...

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutResponse]:
        """Sample every group, in order.

        Raises:
            RolloutError: a request was made for another policy version, or sampling failed.
        """
        ...

    def release(self) -> None:
        """Give the device memory back so that the actor can train."""
        ...

    def resume(self, *, weights_only: bool = False) -> None:
        """Take the device memory again; with ``weights_only`` only what a weight sync writes to."""
        ...

    def begin_sync(self, manifest: FullWeightManifest, adapter: dict[str, object] | None = None) -> None:
        """Open a sync. ``adapter`` holds rank, alpha and target modules when the manifest's mode is adapter."""
        ...

    def receive(self, bucket: WeightBucket) -> None:
        """Take one bucket; nothing that it holds is visible to `generate` before `commit_sync`."""
        ...

    def commit_sync(self, policy_version: int) -> str:
        """Check what came against the manifest, make it the weights, and adopt the version.

        Returns:
            A checksum of the received tensors as the engine now holds them, for the actor to compare.

        Raises:
            WeightSyncError: anything unknown, missing, of another shape, or short; the earlier weights stay.
        """
        ...

    def abort_sync(self) -> None:
        """Drop the current sync, also when this engine has already committed it: the earlier weights and version
        stay or come back. Safe to call at any time; without a sync it does nothing."""
        ...

    def shutdown(self) -> None:
        """Stop everything the engine started. Safe to call twice."""
        ...
