"""Calls of a library that may wait for ever: given a limit, and ended early when an actor behind them dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from relax_sdk.errors import RunError

__all__ = ["bounded"]

_LOOK_EVERY_S = 1.0
_GIVE_UP_S = 10.0
_T = TypeVar("_T")


def bounded(
    call: Callable[[], _T],
    *,
    what: str,
    where: str,
    timeout_s: float,
    actors: Mapping[str, Any],
    expected: str | None = None,
    give_up: Callable[[], None] | None = None,
) -> _T:
    """The call's result.

    The call runs in a thread of its own, which nobody waits for after an error: it may be stuck for good. Not in Ray,
    though, which after its shutdown ends a process where a thread still waits for it: see ``give_up``.

    Args:
        call: what to do.
        what: it, for messages, e.g. ``"putting rows"``.
        where: whose call it is, for messages.
        timeout_s: seconds for it.
        actors: Ray actors that must be alive for the call to end, by what messages call them. They are asked, once a
            second, for anything at all.
        expected: what the call needs to end in time, for the message.
        give_up: makes the call end, when it is not waited for any longer.

    Raises:
        RunError: an actor is dead, the call failed, or the time is up.
    """
    results: list[_T] = []
    failures: list[Exception] = []
    # Not the thread's own end: an interrupt of `Thread.join` makes Python 3.11 believe that it has come.
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - told by the thread that waits
            failures.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, name=what, daemon=True).start()
    deadline = time.monotonic() + timeout_s
    asked: dict[str, Any] = {}
    try:
        while True:
            ended.wait(min(_LOOK_EVERY_S, max(deadline - time.monotonic(), 0.0)))
            if results:
                return results[0]
            _require_alive(actors, asked, what)
            if failures:
                (error,) = failures
                raise RunError(f"{what} failed: {type(error).__name__}: {error}", where=where) from error
            if time.monotonic() >= deadline:
                raise RunError(f"{what} did not finish within {timeout_s:.0f} s", where=where, expected=expected)
    except BaseException:  # an interrupt too
        if give_up is not None:
            _end(ended, give_up)
        raise


def _end(ended: threading.Event, give_up: Callable[[], None]) -> None:
    """Give up, more than once: the call may be about to begin with what it would wait for next."""
    deadline = time.monotonic() + _GIVE_UP_S
    while not ended.is_set() and time.monotonic() < deadline:
        give_up()
        ended.wait(_LOOK_EVERY_S)


def _require_alive(actors: Mapping[str, Any], asked: dict[str, Any], what: str) -> None:
    """Ask those whose last answer is in, and look at the answers that are."""
    for name, actor in actors.items():
        if name not in asked:
            asked[name] = actor.__ray_ready__.remote()
    done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=0.2) if asked else ([], [])
    for name in [name for name, answer in asked.items() if answer in done]:
        try:
            ray.get(asked.pop(name), timeout=_LOOK_EVERY_S)
        except ActorUnavailableError:
            continue  # out of reach, perhaps for a moment
        except RayActorError as error:
            raise RunError(f"{name} died during {what}", where=str(error).splitlines()[0]) from error
