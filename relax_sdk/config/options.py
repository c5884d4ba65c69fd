"""The options of the command line, derived from the schema: nothing about a flag is written twice.

``<section prefix><field with dashes>`` is the flag, ``RELAX_<FLAG>`` the variable, ``section.field`` the path that
files, presets and provenance use. A switch gets ``--x / --no-x``, so that a flag can undo a file.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from relax_sdk.config.schema import section_types
from relax_sdk.config.sections import Flag

__all__ = ["SAMPLING_PATH", "Kind", "Option", "options", "options_by_path"]

Kind = Literal["text", "int", "float", "path", "choice", "switch", "json", "pair"]

SAMPLING_PATH = "sampling.sampling_config"
"""The one field whose keys are merged, and whose keys have provenance of their own."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One field as a flag, a variable and a key.

    Attributes:
        path: ``section.field``.
        flag: the main flag; for a switch the one that turns it on.
        off: the flag that turns a switch off, else None.
        aliases: other flags with the same meaning.
        env: the environment variable.
        kind: how text is read: ``json`` takes JSON, ``pair`` two values.
        choices: the values of a ``choice``.
        default: the schema's default; None when the field has none or is derived (then ``unset`` says from what).
    """

    path: str
    flag: str
    off: str | None
    aliases: tuple[str, ...]
    env: str
    kind: Kind
    choices: tuple[str, ...]
    default: Any
    unit: str
    unset: str
    description: str
    section_title: str

    @property
    def section(self) -> str:
        """The section's name."""
        return self.path.partition(".")[0]

    @property
    def field(self) -> str:
        """The field's name within its section."""
        return self.path.partition(".")[2]


@functools.cache
def options() -> tuple[Option, ...]:
    """Every option, in the order of the schema."""
    found = []
    for section_name, section in section_types().items():
        for field_name, field in section.model_fields.items():
            flag = next(item for item in field.metadata if isinstance(item, Flag))
            kind, choices = _kind(field.annotation)
            name = section.prefix + field_name.replace("_", "-")
            found.append(
                Option(
                    path=f"{section_name}.{field_name}",
                    flag=f"--{name}",
                    off=(flag.off or f"--no-{name}") if kind == "switch" else None,
                    aliases=flag.aliases,
                    env="RELAX_" + name.replace("-", "_").upper(),
                    kind=kind,
                    choices=choices,
                    default=field.get_default(call_default_factory=True),
                    unit=flag.unit,
                    unset=flag.unset,
                    description=field.description or "",
                    section_title=section.title,
                )
            )
    return tuple(found)


@functools.cache
def options_by_path() -> dict[str, Option]:
    """``section.field`` -> option."""
    return {option.path: option for option in options()}


def _kind(annotation: Any) -> tuple[Kind, tuple[str, ...]]:
    """How text for a field of this type is read, and the choices of a Literal. ``X | None`` reads like ``X``."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = [item for item in get_args(annotation) if item is not type(None)]
    if get_origin(annotation) is Literal:
        return "choice", tuple(get_args(annotation))
    simple: dict[Any, Kind] = {bool: "switch", int: "int", float: "float", str: "text", Path: "path"}
    if annotation in simple:
        return simple[annotation], ()
    return ("pair" if get_origin(annotation) is tuple else "json"), ()
