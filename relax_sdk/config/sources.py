"""The layers below the schema's validation: nested mappings, the YAML file, environment variables and flags.

Each reader returns a `Layer`: path -> (value, source). Unknown keys are errors here, with the file, the line and the
nearest valid key; whether a value fits its field is decided once, in `relax_sdk.config.resolve`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relax_sdk.config.options import SAMPLING_PATH, Option, options, options_by_path
from relax_sdk.config.schema import section_types
from relax_sdk.errors import ConfigError, nearest_name
from relax_sdk.protocols import SamplingConfig

__all__ = ["Entry", "Layer", "from_environment", "from_flags", "from_mapping", "from_yaml", "is_chosen", "origin"]

CONTROL_VARIABLES = ("RELAX_CONTROL_TOKEN", "RELAX_DISABLE_PLUGINS")
"""``RELAX_*`` variables that are not fields."""

SAMPLE_ID_MODE_VARIABLE = "RELAX_NATIVE_GENERATION_SAMPLE_ID_MODE"
"""Sets one key of the sampling configuration."""


class Entry(NamedTuple):
    """A value as it was given, and where."""

    value: Any
    source: str


Layer = dict[str, Entry]

_NEW_IN_EVERY_RUN = ("run.run_dir", "artifact.root")
"""What a recipe records but does not pass on: a new run writes into a folder of its own."""

_RECIPE_SOURCE = re.compile(r"recipe .*?:\d+ \((.*)\)")


def origin(source: str) -> str:
    """Where a value first came from: what a recipe recorded as its source, or the source itself."""
    recorded = _RECIPE_SOURCE.fullmatch(source)
    return recorded[1] if recorded is not None else source


def is_chosen(provenance: Mapping[str, str], path: str) -> bool:
    """Whether a person gave the value: neither a default, nor a preset's, nor derived, also by way of a recipe."""
    return not origin(provenance.get(path, "default")).startswith(("default", "preset", "derived"))


def from_mapping(values: Mapping[Any, Any], source: Callable[[tuple[str, ...]], str]) -> Layer:
    """Flatten ``{"optimizer": {"lr": ...}}``, or ``{"optimizer.lr": ...}``, to paths.

    Args:
        values: by section, by path, or both.
        source: keys as written (``("optimizer", "lr")``) -> text for provenance and messages.

    Raises:
        ConfigError: unknown section, field or sampling key; or a section that is not a mapping.
    """
    layer: Layer = {}
    for keys, path, value in _walk(values, source):
        if path in layer:
            raise ConfigError(f"{path} is given twice", where=source(keys))
        layer[path] = Entry(value, source(keys))
    return layer


def _walk(
    values: Mapping[Any, Any], source: Callable[[tuple[str, ...]], str]
) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    for key, value in values.items():
        section, dot, field = str(key).partition(".")
        if section not in section_types():
            raise _unknown_section(str(key), source((str(key),)))
        if dot:
            yield from _walk_field((str(key),), section, field, value, source)
            continue
        if value is None:
            continue  # "optimizer:" with nothing below it
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"section {section!r} holds {value!r}", where=source((section,)), expected="a mapping of its fields"
            )
        for name, item in value.items():
            yield from _walk_field((section, str(name)), section, str(name), item, source)


def _walk_field(
    keys: tuple[str, ...], section: str, field: str, value: Any, source: Callable[[tuple[str, ...]], str]
) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    path = f"{section}.{field}"
    if path.startswith(SAMPLING_PATH + "."):
        check_sampling_key(path.removeprefix(SAMPLING_PATH + "."), source(keys))
        yield keys, path, value
    elif path not in options_by_path():
        raise _unknown_field(section, field, source(keys))
    elif path == SAMPLING_PATH:
        if isinstance(value, SamplingConfig):
            value = value.model_dump()
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} is {value!r}", where=source(keys), expected="a mapping of sampling keys")
        for key, item in value.items():
            check_sampling_key(str(key), source((*keys, str(key))))
            yield (*keys, str(key)), f"{path}.{key}", item
    else:
        yield keys, path, value


def check_sampling_key(key: str, where: str) -> None:
    """Refuse a key that `SamplingConfig` does not have, with the nearest one."""
    if key not in SamplingConfig.model_fields:
        raise ConfigError(
            f"unknown key {key!r} in --sampling-config",
            where=where,
            expected="one of " + ", ".join(sorted(SamplingConfig.model_fields)),
            nearest=nearest_name(key, SamplingConfig.model_fields),
        )


def _unknown_section(key: str, where: str) -> ConfigError:
    owners = [option.path for option in options() if key in (option.field, option.flag.lstrip("-").replace("-", "_"))]
    return ConfigError(
        f"unknown section {key!r}",
        where=where,
        expected=f"{owners[0]}: fields belong into sections" if owners else "one of " + ", ".join(section_types()),
        nearest=owners[0] if owners else nearest_name(key, section_types()),
    )


def _unknown_field(section: str, field: str, where: str) -> ConfigError:
    own = [option.field for option in options() if option.section == section]
    elsewhere = [option.path for option in options() if option.field == field]
    return ConfigError(
        f"unknown key {field!r} in section {section!r}",
        where=where,
        expected="one of " + ", ".join(own),
        nearest=elsewhere[0] if elsewhere else nearest_name(field, own),
    )


def from_yaml(path: Path) -> Layer:
    """Read a configuration file, or the recipe of an earlier run (a mapping with ``config`` and ``provenance``).

    A recipe's values keep the source that it recorded: ``recipe PATH:LINE (flag --lr)``; see `origin`.

    Raises:
        ConfigError: missing, unreadable, not YAML, a key given twice, or unknown keys; with file and line.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"cannot read the configuration file {str(path)!r}: {reason}", where="--config", expected="a YAML file"
        ) from error
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        lines: dict[tuple[str, ...], int] = {}
        if node is not None:
            _key_lines(node, (), lines, path)
        data = loader.construct_document(node) if node is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"not valid YAML: {getattr(error, 'problem', None) or error}",
            where=f"{path}:{mark.line + 1}" if mark else str(path),
        ) from error
    finally:
        loader.dispose()
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} holds {type(data).__name__}", where=str(path), expected="a mapping of sections")
    values, recorded = data.get("config"), data.get("provenance")
    if isinstance(values, Mapping) and isinstance(recorded, Mapping):
        return _from_recipe(values, recorded, lines, path)
    return from_mapping(data, lambda keys: f"file {_place(keys, lines, path)}")


def _from_recipe(
    values: Mapping[Any, Any], recorded: Mapping[Any, Any], lines: Mapping[tuple[str, ...], int], path: Path
) -> Layer:
    layer = from_mapping(values, lambda keys: f"recipe {_place(('config', *keys), lines, path)}")
    return {
        key: Entry(entry.value, f"{entry.source} ({origin(str(recorded[key]))})" if key in recorded else entry.source)
        for key, entry in layer.items()
        if key not in _NEW_IN_EVERY_RUN
    }


def _place(keys: tuple[str, ...], lines: Mapping[tuple[str, ...], int], path: Path) -> str:
    """``PATH:LINE`` of a key, or of the innermost key around it that has a line."""
    while keys and keys not in lines:
        keys = keys[:-1]
    return f"{path}:{lines[keys]}" if keys else str(path)


def _key_lines(node: Any, keys: tuple[str, ...], lines: dict[tuple[str, ...], int], path: Path) -> None:
    """Record the line of every key, and refuse a key that is given twice: YAML would keep the last in silence."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        here = (*keys, str(key_node.value))
        line = key_node.start_mark.line + 1
        if here in lines:
            raise ConfigError(f"key {here[-1]!r} is given twice", where=f"{path}:{lines[here]} and {path}:{line}")
        lines[here] = line
        _key_lines(value_node, here, lines, path)


def from_environment(environ: Mapping[str, str]) -> Layer:
    """Read ``RELAX_<FLAG>`` variables.

    Raises:
        ConfigError: a ``RELAX_*`` variable that is no field, or JSON that does not parse.
    """
    known = {option.env: option for option in options()}
    layer: Layer = {}
    for name in sorted(environ):
        if not name.startswith("RELAX_") or name in CONTROL_VARIABLES:
            continue
        if name == SAMPLE_ID_MODE_VARIABLE:
            layer[f"{SAMPLING_PATH}.sample_id_mode"] = Entry(environ[name], f"env {name}")
        elif name not in known:
            raise ConfigError(
                f"unknown variable {name}={environ[name]!r}",
                where="environment",
                expected="RELAX_<FLAG>, e.g. RELAX_NUM_ROLLOUT for --num-rollout",
                nearest=nearest_name(name, (*known, *CONTROL_VARIABLES, SAMPLE_ID_MODE_VARIABLE)),
            )
    # The whole sampling configuration comes before its single key, which wins.
    given = {name: environ[name] for name in known if name in environ}
    parsed = [_parsed_text(known[name], text, f"env {name}") for name, text in given.items()]
    return {path: entry for part in parsed for path, entry in part.items()} | layer


def from_flags(values: Mapping[str, Any]) -> Layer:
    """Read parsed flags: path -> text (or bool of a switch, or two texts of a pair).

    Raises:
        ConfigError: JSON that does not parse, or an unknown sampling key.
    """
    layer: Layer = {}
    for path, value in values.items():
        option = options_by_path()[path]
        flag = option.off if value is False and option.off else option.flag
        layer |= _parsed_text(option, value, f"flag {flag}")
    return layer


def _parsed_text(option: Option, value: Any, source: str) -> Layer:
    if option.kind == "pair" and isinstance(value, str):
        value = json_value(value, source) if value.lstrip().startswith("[") else value.split(None, 1)
    if option.kind == "json" and isinstance(value, str):
        value = json_value(value, source)
    if option.path != SAMPLING_PATH:
        return {option.path: Entry(value, source)}
    return from_mapping({option.path: value}, lambda keys: source)


def json_value(text: str, source: str) -> Any:
    """Parse JSON, or raise ConfigError with the position."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"not valid JSON: {text!r}",
            where=source,
            expected=f"JSON; at character {error.pos + 1}: {error.msg}",
            next_step="quote it for the shell, e.g. '{\"height\": 512}' or '[\"pickscore\"]'",
        ) from error
