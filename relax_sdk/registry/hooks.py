"""The hooks that a plug-in implements. Each gets a ``register`` callback and hands it specs; none returns a value.

A complete plug-in module::

    from relax_sdk import ModelSpec, hookimpl

    relax_api_version = 1

    @hookimpl
    def relax_register_models(register):
        register(ModelSpec(name="my_model", adapter="my_package.adapter:MyAdapter"))

declared in its distribution's ``pyproject.toml``::

    [project.entry-points."relax_sdk.plugins"]
    my_model = "my_package.plugin"
"""

from __future__ import annotations

from collections.abc import Callable

import pluggy

from relax_sdk.registry.specs import EngineSpec, ModelSpec, RewardSpec, WeightSyncSpec

__all__ = ["ENTRY_POINT_GROUP", "HOOK_KINDS", "RELAX_API_VERSION", "HookSpecs", "hookimpl", "hookspec"]

ENTRY_POINT_GROUP = "relax_sdk.plugins"
RELAX_API_VERSION = 1
"""A plug-in may declare ``relax_api_version``; one that differs is refused. Raised when a hook or spec changes."""

HOOK_KINDS: dict[str, type[ModelSpec | RewardSpec | EngineSpec | WeightSyncSpec]] = {
    "relax_register_models": ModelSpec,
    "relax_register_rewards": RewardSpec,
    "relax_register_engines": EngineSpec,
    "relax_register_weight_syncs": WeightSyncSpec,
}
"""Which spec each hook's ``register`` callback takes."""

hookspec = pluggy.HookspecMarker("relax_sdk")
hookimpl = pluggy.HookimplMarker("relax_sdk")


class HookSpecs:
    """Signatures of the hooks; pluggy checks every implementation against them."""

    @hookspec
    def relax_register_models(self, register: Callable[[ModelSpec], None]) -> None:
        """Register model families."""

    @hookspec
    def relax_register_rewards(self, register: Callable[[RewardSpec], None]) -> None:
        """Register reward scorers."""

    @hookspec
    def relax_register_engines(self, register: Callable[[EngineSpec], None]) -> None:
        """Register rollout engines."""

    @hookspec
    def relax_register_weight_syncs(self, register: Callable[[WeightSyncSpec], None]) -> None:
        """Register weight syncs."""
