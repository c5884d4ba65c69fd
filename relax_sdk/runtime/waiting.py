"""While the roles start and run: who is waited for, and a request to terminate."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_sdk.runtime.observer import Observer

__all__ = ["Loading", "sigterm_unwinds"]

_FIRST_LINE_S = 30.0


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """A request to terminate ends the run like Ctrl-C, with every role stopped; Ray's own handler would only crash.

    Raises:
        SystemExit: 128 + 15, from wherever the main thread is.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def terminate(number: int, _frame: Any) -> None:
        asked.append(128 + number)
        raise SystemExit(asked[0])

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except SystemExit:
        if not asked:
            raise
        # Inside a wait of Ray's own the exit passes through its core, which puts code 1 in the place of ours.
        raise SystemExit(asked[0]) from None
    finally:
        signal.signal(signal.SIGTERM, before)


class Loading:
    """Says who is still loading: at once where phases are shown, as a line of its own after half a minute, one, two...

    Args:
        observer: told.
        engines: the folder of the engines' own logs.
    """

    def __init__(self, observer: Observer, *, engines: Path) -> None:
        self._observer, self._engines = observer, engines
        self._started = time.monotonic()
        self._next_s = _FIRST_LINE_S

    def tell(self, names: list[str]) -> None:
        """Roles ``names`` have not answered yet."""
        text = ", ".join(names)
        self._observer.phase(f"loading models: {text}")
        waited_s = time.monotonic() - self._started
        if waited_s >= self._next_s:
            self._next_s *= 2
            logs = f"; logs of servers: {self._engines}" if any(self._engines.glob("*/*.log")) else ""
            self._observer.line(f"still loading after {waited_s:.0f} s: {text}{logs}")
