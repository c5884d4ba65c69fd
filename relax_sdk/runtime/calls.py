"""Waiting for Ray calls: with a timeout, first failure first, and the project's own errors unwrapped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from relax_sdk.errors import RelaxError, RunError

_TELL_EVERY_S = 1.0

__all__ = ["engine_names", "rank_names", "wait_all"]


def rank_names(count: int) -> list[str]:
    """What messages call the actor's ranks."""
    return [f"actor rank {rank}" for rank in range(count)]


def engine_names(count: int) -> list[str]:
    """What messages call the rollout engines."""
    return [f"rollout engine {index}" for index in range(count)]


def wait_all(
    refs: Sequence[Any],
    *,
    what: str,
    names: Sequence[str],
    timeout_s: float,
    waiting: Callable[[list[str]], None] | None = None,
) -> list[Any]:
    """Results in order; the first call that fails ends the wait, while the others may still hang on it.

    Args:
        refs: the calls.
        what: the operation, for messages, e.g. ``"update"``.
        names: the role behind each call.
        timeout_s: for all of them together.
        waiting: told about once a second who has not answered yet.

    Raises:
        RelaxError: a role's own error, as it was raised there.
        RunError: a role died, failed otherwise, or did not answer in time; the role is named.
    """
    started = time.monotonic()
    results: dict[Any, Any] = {}
    name_of = dict(zip(refs, names, strict=True))
    pending = list(refs)
    while pending:
        left_s = max(started + timeout_s - time.monotonic(), 0.0)
        done, pending = ray.wait(
            pending, num_returns=1, timeout=left_s if waiting is None else min(left_s, _TELL_EVERY_S)
        )
        if not done:
            late = list(dict.fromkeys(name_of[ref] for ref in pending))
            if left_s > _TELL_EVERY_S and waiting is not None:
                waiting(late)
                continue
            raise RunError(f"{what} did not finish within {timeout_s:.0f} s", where=f"waiting for {', '.join(late)}")
        try:
            results[done[0]] = ray.get(done[0], timeout=timeout_s)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RelaxError):
                raise cause from None
            raise RunError(f"{what} failed: {type(cause).__name__}: {cause}", where=name_of[done[0]]) from error
        except RayActorError as error:
            raise RunError(f"{name_of[done[0]]} died during {what}", where=str(error).splitlines()[0]) from error
        except GetTimeoutError as error:
            raise RunError(f"the result of {what} did not arrive", where=name_of[done[0]]) from error
        except RayError as error:
            text = str(error).splitlines()[0]
            raise RunError(f"{what} failed: {type(error).__name__}: {text}", where=name_of[done[0]]) from error
    return [results[ref] for ref in refs]
