"""What a rollout engine implements: `RolloutEngine`.

One engine object serves one set of devices. Any exception from `release`, `resume` or the sync methods ends the run,
unless `problem` says that the engine is gone and ``--use-fault-tolerance`` starts it again: an engine that is half
released or holds half a sync must not sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pydantic import Field

from relax_sdk.protocols.base import Record

if TYPE_CHECKING:
    from relax_sdk.protocols.records import RolloutRequest, RolloutResponse
    from relax_sdk.protocols.transport import SyncOffer, WeightBucket

__all__ = ["EngineSettings", "RolloutEngine"]


class EngineSettings(Record):
    """What an engine is constructed with, beside the adapter."""

    model_path: str = Field(description="The pipeline's folder.")
    revision: str | None = Field(None, description="--model-revision.")
    device: Literal["cpu", "cuda"]
    devices: int = Field(1, ge=1, description="How many devices it spreads over; the process sees exactly these.")
    dtype: Literal["bf16", "fp32"] = Field(description="--rollout-engine-dtype: what its parameters are held in.")
    sync_mode: Literal["full", "adapter"] = Field(description="Which weight syncs will come.")
    work_dir: Path = Field(description="A folder for logs and sockets that belongs to this engine alone.")
    timeout_s: float = Field(gt=0, description="Longest wait for one answer of whatever the engine talks to.")
    candidates_per_request: int | None = Field(
        None, ge=1, description="Candidates of a group that are sampled together; None leaves it to the engine."
    )
    extra_arguments: tuple[str, ...] = Field((), description="--rollout-engine-args, for the engine's own server.")
    threads: int = Field(1, ge=1, description="CPU threads that it may use.")


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples trajectories with weights of a known policy version.

    Constructed as ``Engine(adapter=..., settings=EngineSettings(...))``, where ``adapter`` is an instance of the model
    family's adapter. `start` loads the model, not the constructor.

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
        """Give the device memory back so that the actor can train. Called between rollouts, with --offload-rollout."""
        ...

    def resume(self, *, weights_only: bool = False) -> None:
        """Take the device memory again; with ``weights_only`` only what a weight sync writes to."""
        ...

    def begin_sync(self, offer: SyncOffer) -> None:
        """Check an announced sync and open the sender's buffers. Nothing has moved yet, so a refusal changes nothing.

        Raises:
            WeightSyncError: unknown or missing names, another shape, a full sync over LoRA layers (or the other way
                round), or no buffer on this engine's device.
        """
        ...

    def receive(self, bucket: WeightBucket) -> None:
        """Copy one bucket out of its slot; when this returns, the sender may fill the slot again.

        An engine may write straight into its weights. It must not sample with them before `commit_sync`.

        Raises:
            WeightSyncError: the bytes do not have the bucket's checksum, or buckets came out of order.
        """
        ...

    def commit_sync(self, policy_version: int) -> str:
        """Check that everything announced has come, and adopt the version.

        Returns:
            `relax_sdk.weights.combine_checksums` of the buckets as the engine now holds them, for the actor to
            compare with what it sent.

        Raises:
            WeightSyncError: the sync is not complete.
        """
        ...

    def abort_sync(self) -> None:
        """Drop the current sync, also when this engine has already committed it. Safe to call at any time.

        Afterwards the engine holds its earlier weights and version; or, when those are overwritten, `generate`
        raises until a whole sync has been committed.
        """
        ...

    def problem(self) -> str | None:
        """Why the engine cannot serve any more, e.g. how its server ended; None while it can."""
        ...

    def shutdown(self) -> None:
        """Stop everything the engine started. Safe to call twice."""
        ...
