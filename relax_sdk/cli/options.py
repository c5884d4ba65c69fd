"""Click options made from the schema, and a help page grouped by its sections."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from relax_sdk.config import Option, options

__all__ = ["ConfigCommand", "config_options", "flags_of"]

_F = TypeVar("_F", bound=Callable[..., Any])

_METAVARS = {"int": "INT", "float": "FLOAT", "path": "PATH", "json": "JSON", "pair": "NAME PATH"}


_NAME_COLUMN = 34
"""Widest first column of the help page; longer names stand on a line of their own."""


class ConfigOption(click.Option):
    """An option of the schema. Values stay text: the schema alone decides what fits, for every source alike."""

    def __init__(self, option: Option) -> None:
        names = [option.flag, *option.aliases]
        declaration = "/".join((names[0], option.off)) if option.off else names[0]
        super().__init__(
            [parameter_name(option), declaration, *names[1:]],
            is_flag=option.kind == "switch",
            nargs=2 if option.kind == "pair" else 1,
            default=None,
            type=click.UNPROCESSED if option.kind != "switch" else click.BOOL,
            metavar=None if option.kind == "switch" else metavar(option),
            help=help_text(option),
        )
        self.option = option

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Flags with their metavar, and the description with unit and default."""
        if self.option.off:
            return f"{self.option.flag} / {self.option.off}", self.help or ""
        names = ", ".join((self.option.flag, *self.option.aliases))
        return f"{names} {metavar(self.option)}", self.help or ""


def parameter_name(option: Option) -> str:
    """A Python name for the option, unique over sections."""
    return option.path.replace(".", "__")


def metavar(option: Option) -> str:
    """What stands for the value in help."""
    if option.choices:
        return f"[{'|'.join(option.choices)}]"
    named = {"path": "PATH", "plug-in name": "NAME", "preset name": "NAME"}
    if option.kind == "text":
        return "NAME" if option.unit.startswith("name or") else named.get(option.unit, "TEXT")
    return _METAVARS[option.kind]


def help_text(option: Option) -> str:
    """Description, unit and default: ``Peak learning rate. [per step; no default]``."""
    told_by_metavar = option.kind in ("switch", "choice", "path", "pair") or option.unit in ("path", "JSON object")
    parts = [] if told_by_metavar else [option.unit]
    return f"{option.description} [{'; '.join([*parts, _default(option)])}]"


def _default(option: Option) -> str:
    if option.unset:
        return f"default: {option.unset}"
    if option.default is None:
        return "no default"
    if option.kind == "switch":
        named = not (option.off or "").startswith("--no-")
        states = (option.off, option.flag) if named else ("off", "on")
        return f"default: {states[bool(option.default)]}"
    if option.path == "sampling.sampling_config":
        return "keys: relax-sdk config explain"
    return f"default: {json.dumps(option.default) if option.kind == 'json' else option.default}"


class ConfigCommand(click.Command):
    """A command whose options are grouped by the schema's sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command's own options first, then one group per section."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = param.option.section_title if isinstance(param, ConfigOption) else "Options"
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                _write_records(formatter, records)


def _write_records(formatter: click.HelpFormatter, records: list[tuple[str, str]]) -> None:
    """Two columns like click's own, but a line is never broken inside a flag such as ``--lora-rank``."""
    indent = formatter.current_indent
    column = min(max(len(names) for names, _ in records), _NAME_COLUMN) + 2
    for names, text in records:
        lines = textwrap.wrap(text, formatter.width - indent - column, break_on_hyphens=False, break_long_words=False)
        if len(names) + 2 <= column:
            formatter.write(f"{'':{indent}}{names:<{column}}{lines.pop(0) if lines else ''}\n")
        else:
            formatter.write(f"{'':{indent}}{names}\n")
        for line in lines:
            formatter.write(f"{'':{indent + column}}{line}\n")


def config_options(function: _F) -> _F:
    """Add ``--config`` and every flag of the schema to a command."""
    params: list[click.Parameter] = [
        click.Option(
            ["--config", "config_file"],
            metavar="FILE",
            help="YAML file with one mapping per section, or the recipe.json of a run.",
        )
    ]
    params += [ConfigOption(option) for option in options()]
    # click reads decorators from the bottom up.
    function.__click_params__ = [*getattr(function, "__click_params__", []), *reversed(params)]  # type: ignore[attr-defined]
    return function


def flags_of(parameters: dict[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """Split a command's parameters into the ``--config`` file and the flags that were given, by path."""
    config_file = parameters["config_file"]
    given = {
        option.path: parameters[parameter_name(option)]
        for option in options()
        if parameters[parameter_name(option)] is not None
    }
    return None if config_file is None else Path(config_file).expanduser(), given
