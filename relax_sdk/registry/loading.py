"""Finding plug-ins in package metadata, which imports nothing, and loading one of them, guarded.

Every plug-in gets a pluggy manager of its own. One shared manager would stop at the first import failure, drop the
second of two plug-ins with one name, and keep a plug-in whose hook failed validation.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import pluggy

from relax_sdk.errors import PluginError, nearest_name
from relax_sdk.registry.hooks import ENTRY_POINT_GROUP, HOOK_KINDS, RELAX_API_VERSION, HookSpecs
from relax_sdk.registry.imports import guarded, import_object
from relax_sdk.registry.specs import Spec

__all__ = ["PluginEntry", "find_entries", "load_plugin"]


@dataclasses.dataclass(frozen=True)
class PluginEntry:
    """An entry point of one distribution, not yet imported."""

    name: str
    target: str
    distribution: str
    version: str

    @property
    def where(self) -> str:
        """Plug-in, distribution and entry point, for messages."""
        return (
            f"plug-in {self.name!r} of distribution {self.distribution!r} {self.version}, entry point {self.target!r}"
        )


def find_entries() -> list[PluginEntry]:
    """Every entry point of the group, of every installed distribution, sorted by name."""
    entries = []
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        target = f"{point.module}:{point.attr}" if point.attr else point.module
        distribution = point.dist.name if point.dist else "unknown"
        version = point.dist.version if point.dist else "unknown"
        entries.append(PluginEntry(point.name, target, distribution, version))
    return sorted(entries, key=lambda entry: (entry.name, entry.distribution))


def load_plugin(entry: PluginEntry) -> dict[str, tuple[Spec, ...]]:
    """Import a plug-in, check it and collect what it registers.

    Returns:
        Hook name -> the specs that were registered through it.

    Raises:
        PluginError: import failed, another API version, a hook that is misspelt or not marked, a wrong signature, a
            hook that raised, or something registered that is not the hook's spec.
    """
    plugin = import_object(entry.target, where=entry.where)
    if inspect.isclass(plugin):
        raise PluginError(
            f"plug-in {entry.name!r} is the class {plugin.__name__!r}",
            where=entry.where,
            expected="a module, or an instance with hook methods",
        )
    _check_api_version(entry, plugin)
    manager = pluggy.PluginManager("relax_sdk")
    manager.add_hookspecs(HookSpecs)
    try:
        manager.register(plugin, name=entry.name)
        _check_hook_names(entry, plugin, manager)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        # The first line of pluggy's text repeats the plug-in's repr; the lines below it name hook and signature.
        raise PluginError(f"a hook of plug-in {entry.name!r} is wrong: {error}", where=entry.where) from error
    return {hook: _collect(entry, manager, hook, kind) for hook, kind in HOOK_KINDS.items()}


def _check_api_version(entry: PluginEntry, plugin: Any) -> None:
    declared = getattr(plugin, "relax_api_version", RELAX_API_VERSION)
    if declared != RELAX_API_VERSION:
        raise PluginError(
            f"plug-in {entry.name!r} declares relax_api_version = {declared!r}",
            where=entry.where,
            expected=f"{RELAX_API_VERSION} (this relax-sdk)",
            next_step=f"pip install --upgrade relax-sdk {entry.distribution}",
        )


def _check_hook_names(entry: PluginEntry, plugin: Any, manager: pluggy.PluginManager) -> None:
    """Refuse what pluggy accepts in silence: misspelt hooks, hooks without the marker, no hook at all."""
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        if caller.spec is None:
            raise PluginError(
                f"plug-in {entry.name!r} implements an unknown hook {caller.name!r}",
                where=entry.where,
                expected="one of " + ", ".join(HOOK_KINDS),
                nearest=nearest_name(caller.name, HOOK_KINDS),
            )
    marked = {caller.name for caller in callers}
    unmarked = [name for name in dir(plugin) if name.startswith("relax_register_") and name not in marked]
    if unmarked or not marked:
        what = f"{unmarked[0]!r} lacks the @hookimpl marker" if unmarked else "it implements no hook"
        raise PluginError(
            f"plug-in {entry.name!r} would register nothing: {what}",
            where=entry.where,
            expected="functions marked with @relax_sdk.hookimpl, named " + ", ".join(HOOK_KINDS),
        )


def _collect(entry: PluginEntry, manager: pluggy.PluginManager, hook: str, kind: type[Spec]) -> tuple[Spec, ...]:
    found: dict[str, Spec] = {}
    with guarded(f"hook {hook} of plug-in {entry.name!r} failed", where=entry.where):
        getattr(manager.hook, hook)(register=_callback(entry, hook, kind, found))
    return tuple(found.values())


def _callback(entry: PluginEntry, hook: str, kind: type[Spec], found: dict[str, Spec]) -> Callable[[Any], None]:
    def register(spec: Any) -> None:
        if not isinstance(spec, kind):
            raise PluginError(
                f"hook {hook} of plug-in {entry.name!r} registered {type(spec).__name__} {spec!r}",
                where=entry.where,
                expected=f"a relax_sdk.{kind.__name__}",
            )
        if spec.name in found:
            raise PluginError(
                f"plug-in {entry.name!r} registers the {kind.kind} {spec.name!r} twice", where=entry.where
            )
        found[spec.name] = spec.model_copy(update={"plugin": entry.name, "distribution": entry.distribution})

    return register
