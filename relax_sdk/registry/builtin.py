"""What the core itself registers, through the same hooks as everybody else."""

from __future__ import annotations

from collections.abc import Callable

from relax_sdk.registry.hooks import RELAX_API_VERSION, hookimpl
from relax_sdk.registry.specs import EngineSpec, WeightSyncSpec

__all__ = ["relax_register_engines", "relax_register_weight_syncs"]

relax_api_version = RELAX_API_VERSION


@hookimpl
def relax_register_engines(register: Callable[[EngineSpec], None]) -> None:
    """The embedded engine, and SGLang."""
    register(
        EngineSpec(
            name="local",
            engine="relax_sdk.rollout.local:LocalEngine",
            adapter_protocol="relax_sdk.protocols:EmbeddedModelAdapter",
            driver_sigmas_only=True,
            max_devices=1,
            description="Embedded sampler in the rollout process, on a CPU or one GPU; shares flow with the trainer.",
        )
    )
    register(
        EngineSpec(
            name="sglang",
            engine="relax_sdk.rollout.sglang.engine:SGLangNativeGenerationEngine",
            adapter_protocol="relax_sdk.protocols:SGLangModelAdapter",
            preflight="relax_sdk.rollout.sglang.contract:preflight_problems",
            takes_arguments=True,
            description="Stock SGLang as a server of its own per engine; weights arrive in its device memory.",
        )
    )


@hookimpl
def relax_register_weight_syncs(register: Callable[[WeightSyncSpec], None]) -> None:
    """The streaming weight sync."""
    register(
        WeightSyncSpec(
            name="stream",
            sync="relax_sdk.weight_sync.stream:StreamedSync",
            description="Streams buckets through device memory to every engine, verified against a manifest.",
        )
    )
