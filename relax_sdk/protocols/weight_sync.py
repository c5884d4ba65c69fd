"""What a weight sync implements: `WeightSync`, the actor's side of the transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from relax_sdk.protocols.records import FullWeightManifest, SyncReport
    from relax_sdk.protocols.tensors import Tensor

__all__ = ["EngineCall", "WeightSync"]

EngineCall = Callable[..., list[Any]]
"""``call(method, *args)`` runs a `RolloutEngine` method on every engine and returns their results in order."""


@runtime_checkable
class WeightSync(Protocol):
    """Carries weights from the actor to all engines, as one transaction. Runs on rank 0 of the actor."""

    def run(
        self,
        named_tensors: Iterator[tuple[str, Tensor]],
        engines: EngineCall,
        *,
        manifest: FullWeightManifest,
        policy_version: int,
        adapter: dict[str, object] | None,
    ) -> SyncReport:
        """Send, verify, commit.

        Args:
            named_tensors: engine names and tensors in wire dtype, in the manifest's order. Drawing from it takes
                part in collectives of all ranks, so it is drawn to its end whatever happens.
            engines: calls every engine.
            manifest: what the tensors add up to.
            policy_version: the version that the engines adopt on success.
            adapter: the LoRA description when only adapter tensors are sent, else None.

        Raises:
            WeightSyncError: after every engine has been told to keep its earlier weights.
        """
        ...
