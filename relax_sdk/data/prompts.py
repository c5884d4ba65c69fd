"""Reads a prompt file whole, or refuses it with the line at fault.

Two forms:

- ``*.jsonl``: one object a line, ``{"prompt": "...", "metadata": {"task": "t2i", "sample_id": "..."}}``. ``metadata``
  and each of its keys may be absent; ``task``, if there, must be the run's task. Other metadata travels on to the
  scorers. Any other top-level key is refused.
- ``*.txt``: one prompt a line.

In both, blank lines are skipped, a byte order mark is dropped, lines end with ``\\n`` or ``\\r\\n`` only (never at the
other Unicode line separators), and a prompt is kept character by character as written. An empty prompt can therefore
only be written in JSONL, as ``""``, where it is taken to be meant: it is a prompt like any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relax_sdk.errors import DataError, nearest_name
from relax_sdk.protocols import PromptRecord

__all__ = ["load_prompts"]

_SCHEMA = '{"prompt": "...", "metadata": {"task": "t2i", "sample_id": "..."}}'
_KEYS = ("prompt", "metadata")
_ID_KEYS = ("prompt_id", "sample_id")


def load_prompts(path: Path | str, *, task: str) -> tuple[PromptRecord, ...]:
    """Load every prompt of a file.

    Args:
        path: a ``.jsonl`` or ``.txt`` file in UTF-8.
        task: the run's ``--generation-task``.

    Returns:
        The prompts in file order. ``prompt_id`` is ``metadata.prompt_id``, else ``metadata.sample_id``, else the
        position of the line in the file, counted from 0; no two are equal.

    Raises:
        DataError: the file is missing, a folder, unreadable, empty, not UTF-8, or has a line that does not fit; the
            message names the line and what was expected.
    """
    path = Path(path)
    parsers: dict[str, Callable[[str, str, str], PromptRecord | str]] = {".jsonl": _from_json, ".txt": _from_text}
    parse = parsers.get(path.suffix.lower())
    data = _read(path)
    if parse is None:
        raise DataError(
            f"unknown kind of prompt file {path.name!r}",
            where=str(path),
            expected=".jsonl (one JSON object a line) or .txt (one prompt a line)",
        )
    records = []
    line_of: dict[str, int] = {}
    for number, line in _lines(data, path):
        record = parse(line, str(number - 1), task)
        if isinstance(record, str):
            raise DataError(f"line {number} of {path.name}: {record}", where=f"{path}:{number}", expected=_SCHEMA)
        earlier = line_of.setdefault(record.prompt_id, number)
        if earlier != number:
            raise DataError(
                f"line {number} of {path.name}: prompt id {record.prompt_id!r} was already used on line {earlier}",
                where=f"{path}:{number}",
                expected="a different metadata.sample_id (or metadata.prompt_id) on every line",
            )
        records.append(record)
    if not records:
        raise DataError(f"no prompts in {path.name}", where=str(path), expected="at least one prompt")
    return tuple(records)


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise DataError(f"prompt file {str(path)!r} is a folder", expected="a .jsonl or .txt file")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"no prompt file at {str(path)!r}",
            where=None if path.is_absolute() else f"relative to {Path.cwd()}",
            nearest=nearest_name(path.name, siblings),
        ) from None
    except OSError as error:
        raise DataError(f"cannot read prompt file {str(path)!r}: {error.strerror}") from error


def _lines(data: bytes, path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers (from 1) and texts of the lines that are not blank."""
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            line = raw.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"line {number} of {path.name}: not UTF-8: byte {raw[error.start : error.start + 1]!r} "
                f"at position {error.start}",
                where=f"{path}:{number}",
                expected="a file in UTF-8",
            ) from None
        if line.strip():
            yield number, line


def _from_text(line: str, position: str, task: str) -> PromptRecord:
    return PromptRecord(prompt=line, prompt_id=position, metadata={"task": task})


def _from_json(line: str, position: str, task: str) -> PromptRecord | str:
    """The record of one line, or what is wrong with it."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not valid JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        return "not valid JSON: nested too deeply"
    if not isinstance(row, dict):
        return f"not a JSON object but {_kind(row)}"
    unknown = [key for key in row if key not in _KEYS]
    if "prompt" not in row:
        near = nearest_name("prompt", unknown)
        return "no 'prompt'" + (f"; is {near!r} meant?" if near else f" among its keys {sorted(row)}")
    if unknown:
        return f"unknown key {unknown[0]!r}; what belongs to the sample goes into 'metadata'"
    prompt, metadata = row["prompt"], row.get("metadata", {})
    if not isinstance(prompt, str):
        return f"'prompt' is {_kind(prompt)}, not a string"
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        return f"'prompt' holds half a surrogate pair, {prompt[error.start]!r}, which is no character"
    if not isinstance(metadata, dict):
        return f"'metadata' is {_kind(metadata)}, not an object"
    if metadata.get("task", task) != task:
        return f"metadata.task is {metadata['task']!r}, but the run's task is {task!r}"
    for key in _ID_KEYS:
        if key in metadata and (not isinstance(metadata[key], str | int) or isinstance(metadata[key], bool)):
            return f"metadata.{key} is {_kind(metadata[key])}, not a string or an integer"
        if metadata.get(key) == "":
            return f"metadata.{key} is empty"
    name = next((metadata[key] for key in _ID_KEYS if key in metadata), position)
    return PromptRecord(prompt=prompt, prompt_id=str(name), metadata=metadata)


def _kind(value: Any) -> str:
    """What JSON calls a value, for messages."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names[type(value)]
