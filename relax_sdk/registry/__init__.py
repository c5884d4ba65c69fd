"""Plug-ins: declare with hooks, discover from package metadata, load one by one, look up by name.

Importing this room, discovering and listing load no torch: a spec holds import strings, and only ``spec.load()``
imports what they name. Left out on purpose: installing packages, and any registry of (model x algorithm) pairs.
"""

from relax_sdk.registry.hooks import ENTRY_POINT_GROUP, RELAX_API_VERSION, hookimpl, hookspec
from relax_sdk.registry.registry import DISABLE_PLUGINS_ENV, Registry
from relax_sdk.registry.specs import EngineSpec, ModelSpec, PluginRecord, RewardSpec, WeightSyncSpec

__all__ = [
    "DISABLE_PLUGINS_ENV",
    "ENTRY_POINT_GROUP",
    "RELAX_API_VERSION",
    "EngineSpec",
    "ModelSpec",
    "PluginRecord",
    "Registry",
    "RewardSpec",
    "WeightSyncSpec",
    "hookimpl",
    "hookspec",
]
