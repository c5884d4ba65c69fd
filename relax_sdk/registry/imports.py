"""Import strings: their form, and a guarded import that tells a plug-in's mistake from ours.

An import string is ``package.module:attribute`` (``package.module`` alone names the module itself).
"""

from __future__ import annotations

import importlib
import re
import traceback
from typing import Any

from relax_sdk.errors import ConfigError, PluginError, nearest_name

__all__ = ["describe_exception", "guarded", "import_object", "is_dotted", "is_import_string", "normalise_dotted"]

_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_IMPORT_STRING = re.compile(rf"^{_DOTTED}:{_DOTTED}$")
_DOTTED_CLASS = re.compile(rf"^(?P<module>{_DOTTED})\.(?P<attribute>[A-Za-z_]\w*)$")


def is_import_string(text: str) -> bool:
    """True for ``package.module:attribute``."""
    return _IMPORT_STRING.match(text) is not None


def is_dotted(name: str) -> bool:
    """True when the user wrote an import path rather than a registered name (names hold neither ``.`` nor ``:``)."""
    return ":" in name or "." in name


def normalise_dotted(path: str, *, kind: str) -> str:
    """Turn ``package.module.Class`` into ``package.module:Class``; leave ``package.module:Class`` alone.

    Raises:
        ConfigError: it is neither.
    """
    if is_import_string(path):
        return path
    match = _DOTTED_CLASS.match(path)
    if match is None:
        raise ConfigError(f"malformed {kind} path {path!r}", expected="a registered name, or package.module:Class")
    return f"{match['module']}:{match['attribute']}"


def import_object(import_string: str, *, where: str, next_step: str | None = None) -> Any:
    """Import what an import string names.

    Args:
        import_string: ``package.module:attribute`` or ``package.module``.
        where: who asked for it (plug-in and distribution), for the message.
        next_step: what the user can do about a failure.

    Raises:
        PluginError: the module is missing or raised on import, or lacks the attribute. The original exception's
            type, message, file and line are in the text, and it is the cause.
    """
    module_name, _, attribute = import_string.partition(":")
    where = f"{where}, import string {import_string!r}"
    with guarded(f"cannot import {import_string!r}", where=where, next_step=next_step):
        target: Any = importlib.import_module(module_name)
    for part in attribute.split(".") if attribute else ():
        if not hasattr(target, part):
            raise PluginError(
                f"{module_name!r} has no attribute {attribute!r}",
                where=where,
                nearest=nearest_name(part, [name for name in dir(target) if not name.startswith("_")]),
                next_step=next_step,
            )
        target = getattr(target, part)
    return target


class guarded:  # noqa: N801 -- a context manager reads as a verb
    """Context manager: whatever a plug-in's code raises becomes a `PluginError` that quotes it.

    ``KeyboardInterrupt`` passes; ``SystemExit`` does not, because a plug-in must not be able to end the command.
    """

    def __init__(self, what: str, *, where: str, next_step: str | None = None) -> None:
        self.what = what
        self.where = where
        self.next_step = next_step

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _tb: object) -> None:
        if error is None or isinstance(error, KeyboardInterrupt | PluginError):
            return
        if isinstance(error, Exception | SystemExit):
            raise PluginError(
                f"{self.what}: {describe_exception(error)}", where=self.where, next_step=self.next_step
            ) from error


def describe_exception(error: BaseException) -> str:
    """``ValueError: message (file.py:12)``: the place is the deepest frame outside Python's own import machinery."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ")
        and frame.filename != __file__
        and frame.filename != importlib.__file__
    ]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text
