"""What a person sees of a run: lasting lines, and on a terminal one live bar below them. All of it on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from relax_sdk.runtime import Observer

__all__ = ["LineObserver", "LiveObserver", "terminal_observer"]


class LineObserver:
    """For logs and pipes: lines only, flushed as they come."""

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Not shown."""

    def line(self, text: str) -> None:
        """Write a line to stderr."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class LiveObserver:
    """For a terminal: lines scroll by above one bar that shows the current phase.

    Args:
        progress: a started bar on stderr.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("starting", total=None)
        self._name = ""

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Show a phase; its clock starts anew when the name changes."""
        if name != self._name:
            self._name = name
            self._progress.reset(self._task)
        self._progress.update(self._task, description=name, completed=done)
        # `update` takes None for "leave it": a phase of unknown length would show the length of the one before.
        self._progress.tasks[0].total = total or None

    def line(self, text: str) -> None:
        """Print above the bar, as written: no markup, no wrapping at words of its own."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def terminal_observer() -> Iterator[Observer]:
    """The observer for this stderr; the bar is gone when the block ends, however it ends."""
    if not sys.stderr.isatty():
        yield LineObserver()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class Count(MofNCompleteColumn):
        """``3/8``, and nothing while the length is unknown."""

        def render(self, task: Task) -> Text:
            return Text() if task.total is None else super().render(task)

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        Count(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield LiveObserver(progress)
