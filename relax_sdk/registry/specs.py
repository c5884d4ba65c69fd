"""What a plug-in registers: frozen specs that hold import strings, so that listing them loads nothing.

Specs are picklable and travel to Ray processes, where ``spec.load()`` imports and checks the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, Field, model_validator

from relax_sdk.errors import PluginError, UnknownNameError
from relax_sdk.protocols import GenerativeModelAdapter, Record, RewardScorer, RolloutEngine, WeightSync
from relax_sdk.registry.conformance import conformance_problems
from relax_sdk.registry.imports import guarded, import_object, is_import_string, normalise_dotted

__all__ = ["EngineSpec", "ModelSpec", "PluginRecord", "RewardSpec", "Spec", "WeightSyncSpec"]


def _checked_import_string(value: str) -> str:
    if not is_import_string(value):
        raise ValueError("expected an import string 'package.module:Name'")
    return value


def _checked_name(value: str) -> str:
    if not value or any(not (char.isalnum() or char in "_-") for char in value):
        raise ValueError("expected a name of letters, digits, '_' and '-'")
    return value


ImportString = Annotated[str, AfterValidator(_checked_import_string)]
Name = Annotated[str, AfterValidator(_checked_name)]


class Spec(Record):
    """Base of the four specs. ``plugin`` and ``distribution`` are filled in by the registry, for messages."""

    kind: ClassVar[str]
    target_field: ClassVar[str]
    protocol: ClassVar[type]
    check_attributes: ClassVar[bool] = False

    name: str
    description: str = ""
    plugin: str = ""
    distribution: str = ""

    @classmethod
    def from_path(cls, path: str) -> Self:
        """The spec of a class that no plug-in registered.

        Args:
            path: ``package.module:Class`` or ``package.module.Class``.

        Raises:
            ConfigError: malformed.
        """
        target = normalise_dotted(path, kind=cls.kind)
        # The name of a registered spec cannot be an import path; this one has no other.
        return cast("Self", cls.model_construct(**{"name": target, cls.target_field: target, **cls._defaults()}))

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        return {
            name: field.get_default(call_default_factory=True)
            for name, field in cls.model_fields.items()
            if not field.is_required()
        }

    @property
    def import_string(self) -> str:
        """The import string of the class itself."""
        return cast(str, getattr(self, self.target_field))

    @property
    def where(self) -> str:
        """Plug-in and distribution, for messages."""
        if not self.plugin:
            return f"{self.kind} path {self.name!r}"
        return f"plug-in {self.plugin!r} of distribution {self.distribution!r}"

    def load(self) -> Any:
        """Import the class and check it against its protocol.

        Raises:
            PluginError: the import failed, or the class does not fit; every difference is listed.
        """
        target = import_object(self.import_string, where=self.where, next_step=self._next_step())
        problems = conformance_problems(target, self.protocol, attributes=self.check_attributes)
        problems += [] if problems else self._declared_problems(target)
        if problems:
            raise PluginError(
                f"{self.import_string!r} is not a {self.protocol.__name__}:\n"
                + "\n".join(f"  - {problem}" for problem in problems),
                where=self.where,
                expected=f"the protocol relax_sdk.protocols.{self.protocol.__name__}",
            )
        return target

    def _declared_problems(self, target: Any) -> list[str]:
        """Where the spec and the class contradict each other."""
        return []

    def _next_step(self) -> str | None:
        return f"mend the class, then: relax-sdk plugins show {self.plugin} --check" if self.plugin else None


class ModelSpec(Spec):
    """A model family.

    Args:
        name: the key, e.g. ``"qwen_image"``.
        adapter: import string of the `GenerativeModelAdapter` class. Importing it must not import torch, because
            preflight asks it which sizes it can sample.
        tasks: generation tasks with a working replay path; must be among the adapter's ``supported_tasks``.
        presets: name -> import string of a callable without arguments that returns configuration values as a
            mapping, by section (``{"optimizer": {"lr": 3e-4}}``) or by path (``{"optimizer.lr": 3e-4}``).
        default_preset: the preset used when the user gives neither ``--preset`` nor ``--model-path``.
    """

    kind: ClassVar[str] = "model adapter"
    target_field: ClassVar[str] = "adapter"
    protocol: ClassVar[type] = GenerativeModelAdapter
    check_attributes: ClassVar[bool] = True

    name: Name
    adapter: ImportString
    tasks: tuple[str, ...] = ("t2i",)
    presets: dict[str, ImportString] = Field(default_factory=dict)
    default_preset: str | None = None

    @model_validator(mode="after")
    def _default_exists(self) -> Self:
        if self.default_preset is not None and self.default_preset not in self.presets:
            raise ValueError(f"default_preset {self.default_preset!r} is not among presets {sorted(self.presets)}")
        return self

    def load(self) -> type[GenerativeModelAdapter]:
        """The adapter class; see `Spec.load`."""
        return cast("type[GenerativeModelAdapter]", super().load())

    def load_preset(self, name: str) -> Mapping[str, Any]:
        """Call a preset.

        Raises:
            UnknownNameError: no such preset.
            PluginError: the callable is missing, raised, or returned something other than a mapping.
        """
        if name not in self.presets:
            raise UnknownNameError("preset", name, self.presets, where=self.where)
        make = import_object(self.presets[name], where=self.where)
        with guarded(f"preset {name!r} of {self.name!r} failed", where=self.where):
            values = make()
        if not isinstance(values, Mapping):
            raise PluginError(
                f"preset {name!r} of {self.name!r} returned {type(values).__name__}",
                where=f"{self.where}, import string {self.presets[name]!r}",
                expected="a mapping of configuration values",
            )
        return values

    def _declared_problems(self, target: Any) -> list[str]:
        supported = getattr(target, "supported_tasks", None)
        if not self.plugin or not isinstance(supported, tuple):
            return []
        extra = [task for task in self.tasks if task not in supported]
        return [f"the spec declares tasks {extra} but supported_tasks is {supported!r}"] if extra else []


class RewardSpec(Spec):
    """A reward scorer.

    Args:
        name: the key, e.g. ``"pickscore"``.
        scorer: import string of the `RewardScorer` class.
        components: names of the components it returns; must equal the scorer's ``components``.
        model_path: import string of a callable without arguments that returns the path of a bundled model, used
            without ``--reward-model-path`` when the trained model is a preset's bundled one too; with a model of the
            user's own, preflight asks for the flag.
    """

    kind: ClassVar[str] = "reward scorer"
    target_field: ClassVar[str] = "scorer"
    protocol: ClassVar[type] = RewardScorer
    check_attributes: ClassVar[bool] = True

    name: Name
    scorer: ImportString
    components: tuple[str, ...] = ()
    model_path: ImportString | None = None

    def load(self) -> type[RewardScorer]:
        """The scorer class; see `Spec.load`."""
        return cast("type[RewardScorer]", super().load())

    def default_model_path(self) -> Path | None:
        """Path of the bundled model, or None when the plug-in bundles none.

        Raises:
            PluginError: the callable is missing or raised.
        """
        if self.model_path is None:
            return None
        locate = import_object(self.model_path, where=self.where)
        with guarded(f"the model path of {self.name!r} failed", where=self.where):
            return Path(locate())

    def _declared_problems(self, target: Any) -> list[str]:
        actual = getattr(target, "components", None)
        if not self.components or not isinstance(actual, tuple) or set(actual) == set(self.components):
            return []
        return [f"the spec declares components {self.components!r} but the class has {actual!r}"]


class EngineSpec(Spec):
    """A rollout engine.

    Args:
        name: the key, e.g. ``"local"``.
        engine: import string of the `RolloutEngine` class.
        adapter_protocol: import string of the protocol that a model family's adapter needs beside
            `GenerativeModelAdapter`, when there is one.
        preflight: import string of a callable without arguments that returns the texts of what the engine lacks on
            this machine, e.g. a package; called before anything starts.
        driver_sigmas_only: whether it cannot compute a schedule of its own.
        max_devices: how many devices one engine can use; None for any number.
        takes_arguments: whether ``--rollout-engine-args`` reaches a server of its own.
    """

    kind: ClassVar[str] = "rollout engine"
    target_field: ClassVar[str] = "engine"
    protocol: ClassVar[type] = RolloutEngine

    name: Name
    engine: ImportString
    adapter_protocol: ImportString | None = None
    preflight: ImportString | None = None
    driver_sigmas_only: bool = False
    max_devices: int | None = Field(None, ge=1)
    takes_arguments: bool = False

    def load(self) -> type[RolloutEngine]:
        """The engine class; see `Spec.load`."""
        return cast("type[RolloutEngine]", super().load())

    def missing_from(self, adapter: Any) -> list[str]:
        """Names of `adapter_protocol` that an adapter lacks.

        Raises:
            PluginError: the protocol cannot be imported.
        """
        if self.adapter_protocol is None:
            return []
        protocol = import_object(self.adapter_protocol, where=self.where)
        needed = [name for name in vars(protocol) if not name.startswith("_")]
        needed += [name for name in vars(protocol).get("__annotations__", {}) if name not in needed]
        return sorted(name for name in needed if getattr(adapter, name, None) is None)

    def preflight_problems(self) -> list[str]:
        """What the engine lacks on this machine.

        Raises:
            PluginError: the callable is missing or raised.
        """
        if self.preflight is None:
            return []
        check = import_object(self.preflight, where=self.where)
        with guarded(f"the checks of {self.name!r} failed", where=self.where):
            return list(check())


class WeightSyncSpec(Spec):
    """A weight sync: ``sync`` is the import string of the `WeightSync` class."""

    kind: ClassVar[str] = "weight sync"
    target_field: ClassVar[str] = "sync"
    protocol: ClassVar[type] = WeightSync

    name: Name
    sync: ImportString

    def load(self) -> type[WeightSync]:
        """The weight sync class; see `Spec.load`."""
        return cast("type[WeightSync]", super().load())


class PluginRecord(Record):
    """One plug-in as ``relax-sdk plugins list`` shows it.

    ``status`` is ``ok``; ``broken`` (loading failed); ``conflict`` (two distributions share the name); or
    ``disabled``. ``reason`` says why it is not ``ok``.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    status: Literal["ok", "broken", "conflict", "disabled"]
    reason: str | None = None
    models: tuple[ModelSpec, ...] = ()
    rewards: tuple[RewardSpec, ...] = ()
    engines: tuple[EngineSpec, ...] = ()
    weight_syncs: tuple[WeightSyncSpec, ...] = ()
