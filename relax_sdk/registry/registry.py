"""`Registry`: which plug-ins there are, and what a name stands for.

Who owns a name, in order: the core (a plug-in that registers one of its names is refused); the entry point of that
name; else the one plug-in that registers it. Two plug-ins without such an entry point are an error naming both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from relax_sdk.errors import ConfigError, PluginError, UnknownNameError
from relax_sdk.registry.imports import is_dotted
from relax_sdk.registry.loading import PluginEntry, find_entries, load_plugin
from relax_sdk.registry.specs import EngineSpec, ModelSpec, PluginRecord, RewardSpec, Spec, WeightSyncSpec

__all__ = ["DISABLE_PLUGINS_ENV", "Registry"]

DISABLE_PLUGINS_ENV = "RELAX_DISABLE_PLUGINS"
CORE_TASKS = ("t2i",)

_HOOK_OF: dict[type[Spec], str] = {
    ModelSpec: "relax_register_models",
    RewardSpec: "relax_register_rewards",
    EngineSpec: "relax_register_engines",
    WeightSyncSpec: "relax_register_weight_syncs",
}
_HOOK_OF_FIELD = {name: f"relax_register_{name}" for name in ("models", "rewards", "engines", "weight_syncs")}
_SpecT = TypeVar("_SpecT", bound=Spec)
_Loaded = Mapping[str, tuple[Spec, ...]]


def _core_entry() -> PluginEntry:
    from relax_sdk import __version__

    return PluginEntry("core", "relax_sdk.registry.builtin", "relax-sdk", __version__)


class Registry:
    """Plug-ins by name. Loading is lazy, guarded and done once per plug-in; a broken one fails only who names it.

    Args:
        entries: the plug-ins besides the core, as `Registry.discover` finds them.
        disabled: list them, but load none.
    """

    def __init__(self, entries: Iterable[PluginEntry] = (), *, disabled: bool = False) -> None:
        self._disabled = disabled
        self._entries: dict[str, list[PluginEntry]] = {}
        for entry in (_core_entry(), *entries):
            self._entries.setdefault(entry.name, []).append(entry)
        self._loaded: dict[str, _Loaded | PluginError] = {}

    @classmethod
    def discover(cls, environ: Mapping[str, str] | None = None) -> Registry:
        """Read the installed distributions' metadata; imports no plug-in.

        ``RELAX_DISABLE_PLUGINS=1`` leaves only the core.
        """
        setting = (os.environ if environ is None else environ).get(DISABLE_PLUGINS_ENV, "")
        return cls(find_entries(), disabled=setting not in ("", "0"))

    def plugins(self) -> list[PluginRecord]:
        """Every plug-in, the core first, loaded as far as registering goes. Never raises for a broken one."""
        records = []
        for name, entries in sorted(self._entries.items(), key=lambda item: (item[0] != "core", item[0])):
            records += [self._record(name, entry, shared=len(entries) > 1) for entry in entries]
        return records

    def plugin(self, name: str) -> PluginRecord:
        """One plug-in by its entry-point name.

        Raises:
            UnknownNameError: not installed, or plug-ins are disabled.
            PluginError: it is broken, or two distributions share the name.
        """
        if name not in self._entries or (self._disabled and name != "core"):
            known = ["core"] if self._disabled else list(self._entries)
            raise UnknownNameError("plug-in", name, known, next_step=self._advice("relax-sdk plugins list"))
        self._load(name)
        return self._record(name, self._entries[name][0], shared=False)

    def plugin_model(self, name: str) -> ModelSpec:
        """The model family of ``--plugin NAME``: its only one, or the one with the plug-in's own name.

        Raises:
            ConfigError: the plug-in registers no model, or several with other names.
            UnknownNameError: as `plugin`.
            PluginError: as `plugin`.
        """
        models = {spec.name: spec for spec in self.plugin(name).models}
        if name in models:
            return models[name]
        if len(models) == 1:
            return next(iter(models.values()))
        raise ConfigError(
            f"plug-in {name!r} registers " + (f"several models: {', '.join(sorted(models))}" if models else "no model"),
            where="--plugin",
            expected="a plug-in with one model family" if not models else "one of them in --model-adapter-path",
            next_step="relax-sdk plugins list",
        )

    def model(self, name: str) -> ModelSpec:
        """A model family by registered name or ``package.module:Class``.

        Raises:
            UnknownNameError: nothing registers it.
            PluginError: the plug-in that would is broken, or two register it.
        """
        return self._lookup(ModelSpec, name)

    def reward(self, name: str) -> RewardSpec:
        """A reward scorer; see `model`."""
        return self._lookup(RewardSpec, name)

    def engine(self, name: str) -> EngineSpec:
        """A rollout engine; see `model`."""
        return self._lookup(EngineSpec, name)

    def weight_sync(self, name: str) -> WeightSyncSpec:
        """A weight sync; see `model`."""
        return self._lookup(WeightSyncSpec, name)

    def tasks(self) -> tuple[str, ...]:
        """The task vocabulary: the core's, then what the loadable plug-ins' models declare."""
        declared = [task for record in self.plugins() for spec in record.models for task in spec.tasks]
        return tuple(dict.fromkeys((*CORE_TASKS, *declared)))

    def _lookup(self, kind: type[_SpecT], name: str) -> _SpecT:
        if is_dotted(name):
            by_path = kind.from_path(name)
            # One of the core's own, named by its path, keeps what the core says about it.
            own = self._own(kind, "core").values()
            return next((spec for spec in own if spec.import_string == by_path.import_string), by_path)
        owner = self._own(kind, "core").get(name)
        if owner is None and name in self._entries and not self._disabled:
            owner = self._own(kind, name).get(name)  # raises when it is broken: the user named it
        if owner is not None:
            return owner
        found: list[_SpecT] = []
        known: set[str] = set()
        for plugin in self._names():
            if self._error(plugin) is None:
                specs = self._own(kind, plugin)
                known |= set(specs)
                found += [specs[name]] if name in specs else []
        if len(found) > 1:
            raise PluginError(
                f"{len(found)} plug-ins register the {kind.kind} {name!r}: "
                + " and ".join(f"{spec.plugin!r} of distribution {spec.distribution!r}" for spec in found),
                expected="one owner; or name the class as package.module:Class",
                next_step="relax-sdk plugins list",
            )
        if not found:
            raise UnknownNameError(kind.kind, name, known, next_step=self._advice("relax-sdk plugins list"))
        return found[0]

    def _names(self) -> Sequence[str]:
        return ["core"] if self._disabled else list(self._entries)

    def _own(self, kind: type[_SpecT], plugin: str) -> dict[str, _SpecT]:
        specs = cast("tuple[_SpecT, ...]", self._load(plugin)[_HOOK_OF[kind]])
        return {spec.name: spec for spec in specs}

    def _load(self, name: str) -> _Loaded:
        if name not in self._loaded:
            try:
                self._loaded[name] = self._load_now(name)
            except PluginError as error:
                self._loaded[name] = error
        outcome = self._loaded[name]
        if isinstance(outcome, PluginError):
            raise outcome
        return outcome

    def _load_now(self, name: str) -> _Loaded:
        entries = self._entries[name]
        if len(entries) > 1:
            owners = [f"{entry.distribution!r} {entry.version} ({entry.target})" for entry in entries]
            raise PluginError(
                f"{len(entries)} distributions provide a plug-in named {name!r}: " + " and ".join(owners),
                expected="one distribution for each plug-in name",
                next_step=f"pip uninstall {entries[-1].distribution}  (or the other one)",
            )
        loaded = load_plugin(entries[0])
        if name != "core":
            core = self._load("core")
            for hook, specs in loaded.items():
                taken = {spec.name for spec in core[hook]}
                for spec in specs:
                    if spec.name in taken:
                        raise PluginError(
                            f"plug-in {name!r} registers the {spec.kind} {spec.name!r}, a name of the core",
                            where=entries[0].where,
                            expected="another name",
                        )
        return loaded

    def _error(self, name: str) -> PluginError | None:
        try:
            self._load(name)
        except PluginError as error:
            return error
        return None

    def _record(self, name: str, entry: PluginEntry, *, shared: bool) -> PluginRecord:
        fields: dict[str, Any] = {
            "name": name,
            "distribution": entry.distribution,
            "version": entry.version,
            "entry_point": entry.target,
        }
        if self._disabled and name != "core":
            return PluginRecord(**fields, status="disabled", reason=f"{DISABLE_PLUGINS_ENV} is set")
        error = self._error(name)
        if error is not None:
            return PluginRecord(**fields, status="conflict" if shared else "broken", reason=str(error))
        fields |= {field: self._load(name)[hook] for field, hook in _HOOK_OF_FIELD.items()}
        return PluginRecord(**fields, status="ok")

    def _advice(self, step: str) -> str:
        """The next command, and what may hide the name the user wants."""
        if self._disabled:
            return f"unset {DISABLE_PLUGINS_ENV}: it disables every plug-in but the core"
        broken = [name for name in self._entries if self._error(name) is not None]
        return f"{step}  (not loadable: {', '.join(sorted(broken))})" if broken else step
