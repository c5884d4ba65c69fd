"""Merge the layers into a `RunConfig`, validate every value once, and fill in what follows from others.

This is the only place that derives values: batch size, run folder, artifact root, sync mode, std mode, LoRA alpha,
adapter, reward components and their weights. The plug-ins are reached through `PluginLookup`, which
`relax_sdk.registry.Registry` fits; the two rooms do not import each other.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from relax_sdk.config.options import SAMPLING_PATH, options, options_by_path
from relax_sdk.config.schema import RunConfig, section_types
from relax_sdk.config.sections import Section
from relax_sdk.config.sources import Entry, Layer, from_environment, from_flags, from_mapping, from_yaml, origin
from relax_sdk.errors import ConfigError, RecordError
from relax_sdk.protocols import SamplingConfig

__all__ = ["ModelLike", "PluginLookup", "RewardLike", "resolve"]


class ModelLike(Protocol):
    """What resolving needs of a registered model."""

    @property
    def name(self) -> str:
        """Its key."""
        ...

    @property
    def default_preset(self) -> str | None:
        """The preset that applies by default."""
        ...

    def load_preset(self, name: str) -> Mapping[str, Any]:
        """The values of a preset."""
        ...


class RewardLike(Protocol):
    """What resolving needs of a registered reward."""

    @property
    def components(self) -> tuple[str, ...]:
        """Names of its components; empty when unknown."""
        ...

    def default_model_path(self) -> Path | None:
        """Its bundled model."""
        ...


class PluginLookup(Protocol):
    """The part of a registry that resolving uses."""

    def plugin_model(self, name: str) -> ModelLike:
        """The model of ``--plugin NAME``."""
        ...

    def model(self, name: str) -> ModelLike:
        """A model by name or import path."""
        ...

    def reward(self, name: str) -> RewardLike:
        """A reward by name or import path."""
        ...


def resolve(
    values: Mapping[str, Any] | None = None,
    *,
    registry: PluginLookup,
    config_file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    now: datetime.datetime | None = None,
) -> RunConfig:
    """Merge schema defaults, preset, file, environment and flags, in this order.

    Args:
        values: for callers in Python, on top of everything: by section, or by path (``{"optimizer.lr": 3e-4}``).
        registry: looks plug-ins up.
        config_file: ``--config``: a configuration file, or the ``recipe.json`` of an earlier run.
        flags: path -> text, as the command line parsed it.
        environ: the ``RELAX_*`` variables of this mapping are read (None: ``os.environ``).
        now: local time, for the name of the run folder.

    Raises:
        ConfigError: an unknown key or a value that does not fit, with where it was given; all such values at once.
        UnknownNameError: plug-in, model, reward or preset.
        PluginError: the named plug-in is broken.
    """
    upper = from_environment(os.environ if environ is None else environ)
    upper |= from_flags(flags or {})
    upper |= from_mapping(values or {}, lambda keys: "call " + ".".join(keys))
    if config_file is not None:
        upper = _without_outdated(from_yaml(config_file), upper) | upper
    model = _chosen_model(upper, registry)
    layer = _without_outdated(_preset_layer(upper, model), upper) | upper
    config = _validated(layer)
    return _derived(config, {path: entry.source for path, entry in layer.items()}, model, registry, now)


def _chosen_model(layer: Layer, registry: PluginLookup) -> ModelLike | None:
    for path, look_up in (("run.plugin", registry.plugin_model), ("model.model_adapter_path", registry.model)):
        entry = layer.get(path)
        if entry is not None and isinstance(entry.value, str):
            return look_up(entry.value)
    return None


def _preset_layer(upper: Layer, model: ModelLike | None) -> Layer:
    given = upper.get("run.preset")
    if given is None or given.value is None:
        if model is None or model.default_preset is None or _is_set(upper, "model.model_path"):
            return {}
        given = Entry(model.default_preset, f"default preset of {model.name}")
    if model is None:
        raise ConfigError(
            f"preset {given.value!r} of which plug-in?",
            where=given.source,
            expected="--plugin, whose presets are meant",
            next_step="relax-sdk plugins list",
        )
    label = f"preset {model.name}:{given.value}"
    layer = from_mapping(model.load_preset(str(given.value)), lambda keys: label)
    for path in ("run.plugin", "run.preset"):
        if path in layer:
            raise ConfigError(f"a preset sets {path}", where=label, expected="only the user chooses it")
    return layer | {"run.preset": given}


_CHOSEN_FOR = {
    "reward.model_path": ("reward.scorer_path",),
    "reward.required_components": ("reward.scorer_path",),
    "reward.component_weights": ("reward.scorer_path",),
    "rollout.global_batch_size": ("rollout.rollout_batch_size", "rollout.n_samples_per_prompt"),
}
"""Values that a preset chose for another of its values: they go when the user replaces that one."""

_DERIVED_FROM = {
    "model.model_adapter_path": ("run.plugin",),
    "rollout.global_batch_size": ("rollout.rollout_batch_size", "rollout.n_samples_per_prompt"),
    "flow_grpo.generative_advantage_std_mode": (
        "flow_grpo.disable_grpo_std_normalization",
        "rollout.n_samples_per_prompt",
    ),
    "weight_sync.mode": ("lora.adapter_mode",),
    "lora.alpha": ("lora.rank",),
    "reward.model_path": ("reward.scorer_path", "model.model_path"),
    "reward.required_components": ("reward.scorer_path", "reward.component_weights"),
    "reward.component_weights": ("reward.scorer_path", "reward.required_components"),
}
"""Values that an earlier run derived and its recipe holds: derived anew when the user changes what they follow from."""


def _without_outdated(lower: Layer, upper: Layer) -> Layer:
    """The preset, or the configuration file, without what nobody chose and ``upper`` makes obsolete."""
    owners_by_kind = {"preset": _CHOSEN_FOR, "derived:": _DERIVED_FROM}

    def outdated(path: str, entry: Entry) -> bool:
        owners = owners_by_kind.get(origin(entry.source).partition(" ")[0], {})
        return any(owner in upper for owner in owners.get(path, ()))

    return {path: entry for path, entry in lower.items() if not outdated(path, entry)}


def _is_set(layer: Layer, path: str) -> bool:
    return path in layer and layer[path].value is not None


def _validated(layer: Layer) -> RunConfig:
    """Check every value against its field, and report all that do not fit in one error."""
    nested: dict[str, dict[str, Any]] = {name: {} for name in section_types()}
    sampling: dict[str, Entry] = {}
    for path, entry in layer.items():
        section, _, field = path.partition(".")
        if path.startswith(SAMPLING_PATH + "."):
            sampling[path.removeprefix(SAMPLING_PATH + ".")] = entry
        else:
            nested[section][field] = entry.value
    problems = []
    try:
        nested["sampling"]["sampling_config"] = SamplingConfig(**{key: entry.value for key, entry in sampling.items()})
    except RecordError as error:
        sources = [entry.source for key, entry in sampling.items() if re.search(rf"\b{key}\b", error.what)]
        problems.append(
            (
                error.what.replace("SamplingConfig is not valid: ", "--sampling-config: "),
                ", ".join(dict.fromkeys(sources)),
            )
        )
    try:
        config = RunConfig(**{name: fields for name, fields in nested.items() if fields})
    except ValidationError as error:
        problems += [_problem(item, layer) for item in error.errors(include_url=False)]
    if problems:
        raise _invalid(problems)
    return config


def _problem(item: Any, layer: Layer) -> tuple[str, str]:
    """One pydantic error as (text, source)."""
    path = ".".join(str(part) for part in item["loc"][:2])
    inner = ".".join(str(part) for part in item["loc"][2:])
    option = options_by_path()[path]
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "literal_error":
        message = "expected " + item["ctx"]["expected"]
    label = option.flag + (f" [{inner}]" if inner else "")
    entry = layer.get(path)
    return f"{label}: {message[:1].lower() + message[1:]}, came {item['input']!r}", entry.source if entry else "default"


def _invalid(problems: list[tuple[str, str]]) -> ConfigError:
    step = "relax-sdk train --help"
    if len(problems) == 1:
        text, source = problems[0]
        return ConfigError(text, where=source or None, next_step=step)
    lines = [f"  - {text}" + (f"  ({source})" if source else "") for text, source in problems]
    return ConfigError(f"{len(problems)} values do not fit\n" + "\n".join(lines), next_step=step)


def _derived(
    config: RunConfig,
    sources: dict[str, str],
    model: ModelLike | None,
    registry: PluginLookup,
    now: datetime.datetime | None,
) -> RunConfig:
    updates: dict[str, tuple[Any, str]] = {}

    def fill(path: str, value: Any, source: str) -> None:
        section, _, field = path.partition(".")
        if value is not None and getattr(getattr(config, section), field) is None:
            updates[path] = (value, f"derived: {source}")

    rollout, lora = config.rollout, config.lora
    if rollout.rollout_batch_size and rollout.n_samples_per_prompt:
        product = rollout.rollout_batch_size * rollout.n_samples_per_prompt
        fill("rollout.global_batch_size", product, "--rollout-batch-size x --n-samples-per-prompt")
    normalised = not (config.flow_grpo.disable_grpo_std_normalization or rollout.n_samples_per_prompt == 1)
    fill(
        "flow_grpo.generative_advantage_std_mode", "group" if normalised else "none", "the group's std unless disabled"
    )
    if config.flow_grpo.generative_advantage_std_mode in ("group", "batch") and rollout.n_samples_per_prompt == 1:
        updates["flow_grpo.generative_advantage_std_mode"] = ("none", "derived: groups of one have no std")
    fill("weight_sync.mode", "adapter" if lora.adapter_mode else "full", "--lora-adapter-mode")
    fill("lora.alpha", float(lora.rank) if lora.rank else None, "--lora-rank")
    if model is not None:
        fill("model.model_adapter_path", model.name, "--plugin")
    _fill_reward(config, registry, fill, bundled=origin(sources.get("model.model_path", "")).startswith("preset"))
    moment = (now or datetime.datetime.now()).strftime("%Y%m%d-%H%M%S")
    run_dir = config.run.run_dir or Path("runs") / f"{_run_name(config, model)}-{moment}"
    fill("run.run_dir", run_dir, "plug-in and start time")
    fill("artifact.root", run_dir / "artifacts", "--run-dir")
    return _with_paths(_updated(config, sources, updates))


def _fill_reward(
    config: RunConfig, registry: PluginLookup, fill: Callable[[str, Any, str], None], *, bundled: bool
) -> None:
    """Components, weights, and the scorer's bundled model when the trained model comes from a preset too.

    With a model of the user's own, a bundled scorer would judge pictures that it may never have been made for, and
    nothing would look wrong; preflight asks for ``--reward-model-path`` instead. A scorer given by its class's path
    tells its components only when it is loaded: without weights both fields stay None, for all of them, 1 each.
    """
    reward = config.reward
    if reward.scorer_path is None:
        return
    spec = registry.reward(reward.scorer_path)
    if bundled:
        path = spec.default_model_path()
        fill("reward.model_path", None if path is None else str(path), "bundled with the scorer")
    components = reward.required_components
    if components is None and reward.component_weights:
        components = list(reward.component_weights)
        fill("reward.required_components", components, "--reward-component-weights")
    elif components is None and spec.components:
        components = list(spec.components)
        fill("reward.required_components", components, "every component of the scorer")
    fill("reward.component_weights", dict.fromkeys(components or (), 1.0) or None, "equal weights")


def _run_name(config: RunConfig, model: ModelLike | None) -> str:
    name = config.run.plugin or (model.name if model is not None else None) or "run"
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)


def _updated(config: RunConfig, sources: dict[str, str], updates: Mapping[str, tuple[Any, str]]) -> RunConfig:
    sections: dict[str, Section] = {}
    for path, (value, source) in updates.items():
        name, _, field = path.partition(".")
        section = sections.get(name, getattr(config, name))
        sections[name] = section.model_copy(update={field: value})
        sources[path] = source
    return config.model_copy(update={**sections, "provenance": _all_sources(sources)})


def _all_sources(sources: Mapping[str, str]) -> dict[str, str]:
    paths = [option.path for option in options() if option.path != SAMPLING_PATH]
    paths += [f"{SAMPLING_PATH}.{key}" for key in SamplingConfig.model_fields]
    return {path: sources.get(path, "default") for path in paths}


def _with_paths(config: RunConfig) -> RunConfig:
    """Expand ``~`` and make paths absolute, because Ray's processes may run in another folder."""
    model, reward, rollout = config.model, config.reward, config.rollout
    evaluation = rollout.eval_prompt_data
    sections: dict[str, Section] = {
        "run": config.run.model_copy(update={"run_dir": _absolute(config.run.run_dir)}),
        "artifact": config.artifact.model_copy(update={"root": _absolute(config.artifact.root)}),
        "model": model.model_copy(update={"model_path": _absolute_text(model.model_path)}),
        "reward": reward.model_copy(update={"model_path": _absolute_text(reward.model_path)}),
        "rollout": rollout.model_copy(
            update={
                "prompt_data": _absolute(rollout.prompt_data),
                "eval_prompt_data": None if evaluation is None else (evaluation[0], _absolute(evaluation[1])),
            }
        ),
    }
    return config.model_copy(update=sections)


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().absolute()


def _absolute_text(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())
