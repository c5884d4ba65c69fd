"""``relax-sdk plugins list`` and ``relax-sdk plugins show``."""

from __future__ import annotations

import textwrap

import click

from relax_sdk.cli.app import CONTEXT_SETTINGS, LazyGroup, debug_option
from relax_sdk.cli.output import json_option, print_json, print_table
from relax_sdk.errors import PluginError
from relax_sdk.registry import ModelSpec, PluginRecord, Registry, RewardSpec

__all__ = ["list_command", "plugins_group", "show_command"]


@click.group(
    name="plugins",
    cls=LazyGroup,
    context_settings=CONTEXT_SETTINGS,
    commands_at={
        "list": ("relax_sdk.cli.plugins:list_command", "List installed plug-ins and what they register."),
        "show": ("relax_sdk.cli.plugins:show_command", "Show one plug-in; with --check, import and check its classes."),
    },
)
@debug_option
def plugins_group() -> None:
    """Look at installed plug-ins. Plug-ins are Python packages: install one with pip."""


@click.command(name="list")
@debug_option
@json_option
def list_command(as_json: bool) -> None:
    """List installed plug-ins and what they register.

    A broken plug-in is listed with its reason; it fails only the commands that name it. Set RELAX_DISABLE_PLUGINS=1 to
    load none but the core.
    """
    records = Registry.discover().plugins()
    if as_json:
        print_json([record.model_dump(mode="json") for record in records])
        return
    rows = [
        [record.name, record.status, f"{record.distribution} {record.version}", _registers(record)]
        for record in records
    ]
    print_table(["plug-in", "status", "distribution", "registers"], rows)
    for record in records:
        if record.reason and record.status != "disabled":
            click.echo(f"\n{record.name} of {record.distribution} is {record.status}:")
            click.echo(textwrap.indent(record.reason, "  "))


def _registers(record: PluginRecord) -> str:
    parts = [
        f"{kind} {spec.name}"
        for kind, specs in (
            ("model", record.models),
            ("reward", record.rewards),
            ("engine", record.engines),
            ("weight sync", record.weight_syncs),
        )
        for spec in specs
    ]
    return ", ".join(parts) or "-"


@click.command(name="show")
@debug_option
@click.argument("name")
@click.option("--check", "check_classes", is_flag=True, help="Import every class and check it against its protocol.")
@json_option
def show_command(name: str, check_classes: bool, as_json: bool) -> None:
    """Show plug-in NAME: where it comes from, and what it registers with which import strings."""
    record = Registry.discover().plugin(name)
    problems = _check(record) if check_classes else []
    if as_json:
        print_json(
            record.model_dump(mode="json") | ({"problems": [str(item) for item in problems]} if check_classes else {})
        )
    else:
        _print_record(record)
        if check_classes and not problems:
            click.echo("\nevery class was imported and fits its protocol")
    if problems:
        raise PluginError("\n".join(str(item) for item in problems))


def _check(record: PluginRecord) -> list[PluginError]:
    problems = []
    for spec in (*record.models, *record.rewards, *record.engines, *record.weight_syncs):
        try:
            spec.load()
        except PluginError as error:
            problems.append(error)
    return problems


def _print_record(record: PluginRecord) -> None:
    click.echo(f"{record.name}: {record.distribution} {record.version}, entry point {record.entry_point}")
    for spec in (*record.models, *record.rewards, *record.engines, *record.weight_syncs):
        click.echo(f"\n{spec.kind} {spec.name}")
        lines = [spec.description] if spec.description else []
        lines.append(f"class    {spec.import_string}")
        if isinstance(spec, ModelSpec):
            lines.append(f"tasks    {', '.join(spec.tasks)}")
            for preset in spec.presets:
                lines.append(f"preset   {preset}" + (" (default)" if preset == spec.default_preset else ""))
        if isinstance(spec, RewardSpec):
            lines.append(f"returns  {', '.join(spec.components) or 'not declared'}")
            if spec.model_path is not None:
                lines.append(f"model    {spec.default_model_path()}")
        click.echo(textwrap.indent("\n".join(lines), "  "))
