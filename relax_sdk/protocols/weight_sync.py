"""What a weight sync implements: `WeightSync`, the actor's side of the transaction, and the link it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from relax_sdk.protocols.tensors import Tensor
    from relax_sdk.protocols.transport import AdapterConfig, FullWeightManifest, SyncReport

__all__ = ["EngineLink", "WeightSync"]


class EngineLink(Protocol):
    """A rank's way to its engine and to the other ranks.

    Engine e serves the devices of the ranks ``e * g .. e * g + g - 1``, where g is ``--rollout-num-gpus-per-engine``;
    the first of them is its leader and the only one that calls it.

    Attributes:
        engine: what messages call this rank's engine, e.g. ``"rollout engine 0"``.
        is_leader: whether this rank calls the engine.
    """

    engine: str
    is_leader: bool

    def submit(self, method: str, *args: Any) -> Callable[[], Any]:
        """Start a `RolloutEngine` method on this rank's engine; the returned function waits for its result.

        Raises:
            RelaxError: from the returned function: the engine's own error, or that it died or did not answer in time.
        """
        ...

    def share(self, value: Any) -> list[Any]:
        """Collective over this engine's ranks: everybody's value, in rank order."""
        ...

    def agree(self, value: Any) -> list[Any]:
        """Collective over all ranks: everybody's value, in rank order."""
        ...


@runtime_checkable
class WeightSync(Protocol):
    """Carries weights from the actor to all engines, as one transaction. Runs on every rank of the actor."""

    def run(
        self,
        named_tensors: Iterator[tuple[str, Tensor]],
        link: EngineLink,
        *,
        manifest: FullWeightManifest,
        tensors: tuple[tuple[str, tuple[int, ...]], ...],
        dtype: str,
        policy_version: int,
        adapter: AdapterConfig | None,
    ) -> SyncReport:
        """Announce, send, verify, commit.

        Args:
            named_tensors: engine names and whole tensors in wire dtype on this rank's device, in the manifest's
                order. Drawing from it takes part in collectives of all ranks: once any rank draws, every rank draws to
                the end, whatever happens.
            link: this rank's engine and the other ranks.
            manifest: what the tensors add up to.
            tensors: their names and shapes, in order.
            dtype: name of the wire dtype, ``"bfloat16"`` or ``"float32"``.
            policy_version: the version that the engines adopt on success.
            adapter: the LoRA description when only adapter tensors are sent, else None.

        Raises:
            WeightSyncError: on every rank, when anything failed on any; it names each engine's problem. By then every
                engine was told to abort: it holds its earlier weights, or refuses to sample until a sync succeeds.
        """
        ...
