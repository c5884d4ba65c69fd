"""``relax-sdk config explain``."""

from __future__ import annotations

import dataclasses
import json
import os
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from relax_sdk.cli.app import CONTEXT_SETTINGS, LazyGroup, debug_option
from relax_sdk.cli.options import ConfigCommand, config_options, flags_of
from relax_sdk.cli.output import json_option, print_json, print_table
from relax_sdk.config import ExplainRow, explain, resolve
from relax_sdk.registry import Registry

__all__ = ["config_group", "explain_command"]


@click.group(
    name="config",
    cls=LazyGroup,
    context_settings=CONTEXT_SETTINGS,
    commands_at={
        "explain": ("relax_sdk.cli.config:explain_command", "Print every value with its unit and its source."),
    },
)
@debug_option
def config_group() -> None:
    """Look at the configuration that train would run with."""


@click.command(name="explain", cls=ConfigCommand)
@debug_option
@json_option
@click.option("--changed", is_flag=True, help="Leave out values that are schema defaults.")
@config_options
def explain_command(as_json: bool, changed: bool, **parameters: Any) -> None:
    """Print every value with its unit and its source; takes the same flags as train, and starts nothing."""
    config_file, flags = flags_of(parameters)
    config = resolve(registry=Registry.discover(), config_file=config_file, flags=flags)
    rows = [row for row in explain(config) if not (changed and row.source == "default")]
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
        return
    for number, (section, items) in enumerate(groupby(rows, key=lambda row: row.section)):
        if number:
            click.echo()
        print_table(
            ["flag", "value", "source"], [[_name(row), _shown(row), row.source] for row in items], title=section
        )


def _name(row: ExplainRow) -> str:
    """The flag; a key of ``--sampling-config`` alone, indented."""
    flag, _, key = row.flag.partition(" ")
    return f"  {key}" if key else flag


def _shown(row: ExplainRow) -> str:
    """The value as one would type it, with the unit of a number; paths relative to the current folder."""
    if row.value is None:
        return "-"
    if isinstance(row.value, bool) or not isinstance(row.value, int | float):
        text = row.value if isinstance(row.value, str) else json.dumps(row.value)
        return text.replace(str(Path.cwd()) + os.sep, "")
    return f"{row.value} [{row.unit}]"
