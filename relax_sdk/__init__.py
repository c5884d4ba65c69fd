"""relax-sdk: reinforcement-learning post-training of flow-matching image models, extended by installed plug-ins.

This module is the public surface for plug-in authors, with `relax_sdk.protocols` (what to implement),
`relax_sdk.flow` (the shared maths) and `relax_sdk.weights` (the engine's side of a weight sync). Names are imported on
first use, so that ``import relax_sdk`` costs nothing and a room of the core can be imported alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_sdk.errors import (
        ArtifactError,
        ConfigError,
        DataError,
        PluginError,
        RecordError,
        RelaxError,
        RewardError,
        RolloutError,
        RunError,
        TrainingError,
        UsageError,
        WeightSyncError,
    )
    from relax_sdk.registry import RELAX_API_VERSION, EngineSpec, ModelSpec, RewardSpec, WeightSyncSpec, hookimpl

__version__ = "0.1.0"

__all__ = [
    "RELAX_API_VERSION",
    "ArtifactError",
    "ConfigError",
    "DataError",
    "EngineSpec",
    "ModelSpec",
    "PluginError",
    "RecordError",
    "RelaxError",
    "RewardError",
    "RewardSpec",
    "RolloutError",
    "RunError",
    "TrainingError",
    "UsageError",
    "WeightSyncError",
    "WeightSyncSpec",
    "__version__",
    "hookimpl",
]

_REGISTRY_NAMES = {"RELAX_API_VERSION", "EngineSpec", "ModelSpec", "RewardSpec", "WeightSyncSpec", "hookimpl"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("relax_sdk.registry" if name in _REGISTRY_NAMES else "relax_sdk.errors")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
