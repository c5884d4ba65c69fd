"""What the core itself registers, through the same hooks as everybody else."""

from __future__ import annotations

from collections.abc import Callable

from relax_sdk.registry.hooks import RELAX_API_VERSION, hookimpl
from relax_sdk.registry.specs import EngineSpec, WeightSyncSpec

__all__ = ["relax_register_engines", "relax_register_weight_syncs"]

relax_api_version = RELAX_API_VERSION


@hookimpl
def relax_register_engines(register: Callable[[EngineSpec], None]) -> None:
    """The embedded engine."""
    register(
        EngineSpec(
            name="local",
            engine="relax_sdk.rollout.local:LocalEngine",
            description="Embedded sampler in the rollout process, on a CPU or one GPU; shares flow with the trainer.",
        )
    )


@hookimpl
def relax_register_weight_syncs(register: Callable[[WeightSyncSpec], None]) -> None:
    """The streaming weight sync."""
    register(
        WeightSyncSpec(
            name="stream",
            sync="relax_sdk.weight_sync.stream:StreamedSync",
            description="Gathers on rank 0 and streams buckets to every engine, verified against a manifest.",
        )
    )
