"""Tables and JSON on stdout. rich is imported only when a table is drawn."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

__all__ = ["STATUS_STYLES", "json_option", "print_json", "print_table"]

STATUS_STYLES = {
    "ok": "green",
    "disabled": "yellow",
    "warn": "yellow",
    "broken": "red",
    "conflict": "red",
    "fail": "red",
}

_PIPE_WIDTH = 1000

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def print_json(data: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table: as wide as the terminal, where long cells fold; into a pipe one line per row, uncut, for grep.

    The first column never folds. A cell that is exactly a status (``ok``, ``broken``, ...) gets its colour.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers, box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*(Text(cell, style=STATUS_STYLES.get(cell, "")) for cell in row))
    folds = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if folds else _PIPE_WIDTH)
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
