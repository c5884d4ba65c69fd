"""Wall-clock time of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["PhaseTimer"]


class PhaseTimer:
    """Times the phases of one step and announces them.

    Args:
        phase: shown to the user: text, done, total.
        title: of the step, which begins every text.
        started: told the name of every phase that begins.
    """

    def __init__(
        self,
        phase: Callable[[str, int, int], None],
        title: str,
        *,
        started: Callable[[str], None] | None = None,
    ) -> None:
        self._phase, self._title, self._on_start = phase, title, started
        self._name, self._started = "", time.perf_counter()
        self._begin = self._started
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str) -> PhaseTimer:
        """The context of the phase ``name``."""
        self._name = name
        self._phase(f"{self._title}: {name}", 0, 0)
        if self._on_start is not None:
            self._on_start(name)
        return self

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._name] = time.perf_counter() - self._started

    def progress(self, done: int, total: int) -> None:
        """Announce that the current phase advanced."""
        self._phase(f"{self._title}: {self._name}", done, total)

    def metrics(self) -> dict[str, float]:
        """``perf/<phase>_time`` in seconds, and ``perf/step_time``."""
        step = time.perf_counter() - self._begin
        return {f"perf/{name}_time": value for name, value in self.seconds.items()} | {"perf/step_time": step}
