"""`metrics.jsonl`: one JSON object a line, appended and flushed, and its reader.

JSON has no NaN or infinity. A metric with such a value is written as the string ``"NaN"``, ``"Infinity"`` or
``"-Infinity"``: the line stays valid for every reader, and the value that a user most needs to see is not lost.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

from relax_sdk.errors import ArtifactError
from relax_sdk.metrics.names import STEP_KEY

__all__ = ["JsonlSink", "read_metrics"]

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink:
    """Appends records to a file.

    A line that a killed process left unfinished at the end of the file is removed when the file is opened again, so
    that it cannot run into the next record.

    Raises:
        ArtifactError: the file cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_unfinished_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ArtifactError(f"could not open {path.name}: {error.strerror or error}", where=str(path)) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line, the step first, and flush it."""
        record = {STEP_KEY: step, **{name: _to_json(value) for name, value in metrics.items()}}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # closing tries the same write again
                self._file.close()
            raise ArtifactError(f"could not write {self.path.name}: {error.strerror}", where=str(self.path)) from error

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Every record of a `metrics.jsonl`, in file order, each with its ``rollout/step``.

    An unfinished last line, as a killed process leaves it, is left out.

    Raises:
        ArtifactError: the file cannot be read, or any other line is not a record; the line is named.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ArtifactError(f"could not read {path.name}: {error.strerror}", where=str(path)) from error
    *lines, rest = text.split("\n")
    records = [_parse(line, number, path) for number, line in enumerate(lines, start=1)]
    if rest:
        try:
            records.append(_parse(rest, len(lines) + 1, path))
        except ArtifactError:  # the one line that may be unfinished
            return records
    return records


def _parse(line: str, number: int, path: Path) -> dict[str, float]:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"not an object but {type(record).__name__}")
        if not isinstance(record.get(STEP_KEY), int):
            raise ValueError(f"no {STEP_KEY!r}")
        return {name: _from_json(value) for name, value in record.items()}
    except ValueError as error:
        raise ArtifactError(f"line {number} of {path.name}: {error}", where=f"{path}:{number}") from None


def _to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _from_json(value: object) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is not a number")


def _drop_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as handle:
        data = handle.read()
        handle.truncate(data.rfind(b"\n") + 1)
