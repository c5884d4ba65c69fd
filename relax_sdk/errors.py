"""Every error a user can meet, and the exit code each one ends the process with.

    RelaxError                    1  the run failed
    |-- UsageError                2  the command line, the configuration or the data is wrong
    |   |-- ConfigError           2  a value, a key or a section of the configuration
    |   |-- UnknownNameError      2  a name that nothing registered (carries the nearest valid one)
    |   `-- DataError             2  a prompt file that is missing, unreadable or malformed
    |-- PluginError               3  a plug-in failed to load or to pass its checks
    |-- PreflightError            4  the collected violations of the rules checked before any GPU starts
    |-- RecordError               1  a record that crosses a room has the wrong shape, dtype or values
    `-- RunError                  1  something failed while the run was under way
        |-- RolloutError          1  the engine, its response, or the trajectory
        |-- ArtifactError         1  a sidecar or an image could not be written or read
        |-- RewardError           1  a scorer failed, or returned the wrong count or a non-finite value
        |-- TrainingError         1  replay, loss, gradient or optimizer
        `-- WeightSyncError       1  weights did not arrive; the policy version was rolled back

An error says what happened, where, what was expected, the nearest valid name, and what to type next; the parts
that do not apply are left out. Every class survives pickling with its parts, because errors travel between Ray
processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

EXIT_OK = 0
EXIT_INTERRUPTED = 130


class RelaxError(Exception):
    """Base of all errors that the project raises on purpose.

    Args:
        what: one sentence: what is wrong, with the offending value as ``repr``.
        where: the place: a file and line, a flag, a plug-in and its distribution, a record's field.
        expected: what would have been right.
        nearest: the closest valid name, shown as "did you mean".
        next_step: a command to type, or an action to take.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        nearest: str | None = None,
        next_step: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = expected
        self.nearest = nearest
        self.next_step = next_step

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where:    {self.where}")
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.nearest:
            lines.append(f"  did you mean {self.nearest!r}?")
        if self.next_step:
            lines.append(f"  next:     {self.next_step}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.what, dict(self.__dict__)))


def _rebuild(cls: type[RelaxError], what: str, state: dict[str, Any]) -> RelaxError:
    """Recreate a pickled error without running a subclass's own constructor."""
    error = cls.__new__(cls)
    Exception.__init__(error, what)
    error.__dict__.update(state)
    return error


class UsageError(RelaxError):
    """The command line, the configuration or the data is wrong: nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A value, a key or a section of the configuration is wrong."""


class UnknownNameError(UsageError):
    """A name that nothing registered.

    Args:
        kind: what was looked up, e.g. ``"plug-in"``.
        name: what the user wrote.
        known: every valid name.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        *,
        where: str | None = None,
        next_step: str | None = None,
    ) -> None:
        names = sorted(known)
        super().__init__(
            f"unknown {kind} {name!r}",
            where=where,
            expected=("one of " + ", ".join(names)) if names else f"a {kind}; none is installed",
            nearest=nearest_name(name, names),
            next_step=next_step,
        )


class DataError(UsageError):
    """A prompt file is missing, unreadable or malformed."""


class PluginError(RelaxError):
    """A plug-in failed to load, or loaded and failed a check."""

    exit_code = 3


class PreflightError(RelaxError):
    """All rules that the configuration breaks, collected, so that one run shows every one of them.

    Args:
        violations: one text per broken rule, in the order of the rules.
    """

    exit_code = 4

    def __init__(self, violations: Sequence[str]) -> None:
        count = len(violations)
        noun = "rule is" if count == 1 else "rules are"
        super().__init__(
            f"preflight failed: {count} {noun} broken\n" + "\n".join(f"  - {text}" for text in violations),
            next_step="relax-sdk config explain  (shows each value and where it came from)",
        )
        self.violations = tuple(violations)


class RecordError(RelaxError):
    """A record that passes between rooms has a field of the wrong shape, dtype or content."""


class RunError(RelaxError):
    """Something failed while the run was under way."""


class RolloutError(RunError):
    """The engine failed, or its response does not answer the request."""


class ArtifactError(RunError):
    """A sidecar or an image could not be written or read; no partial file is left behind."""


class RewardError(RunError):
    """A scorer failed, or returned the wrong number of values or a non-finite one."""


class TrainingError(RunError):
    """Replay, loss, gradient or optimizer step refused."""


class WeightSyncError(RunError):
    """New weights did not arrive whole at every engine; both sides keep the earlier policy version."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The valid name closest to ``name``, or None when nothing is close (difflib ratio below 0.6)."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
