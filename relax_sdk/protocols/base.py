"""The base of every record: frozen, no unknown fields, tensors checked, one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from relax_sdk.errors import RecordError
from relax_sdk.protocols.tensors import TensorSpec

__all__ = ["Record", "describe_validation_error"]


class Record(BaseModel):
    """A frozen value that passes between rooms.

    Raises:
        RecordError: on construction, when a field is missing, unknown, of the wrong type, or holds a tensor whose
            shape, dtype or content does not fit its `TensorSpec`. The message names every field at fault.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            # pydantic's own ValidationError does not survive a trip between processes with its text intact.
            raise RecordError(
                f"{type(self).__name__} is not valid: " + "; ".join(describe_validation_error(error)),
                where=type(self).__name__,
            ) from None

    @model_validator(mode="after")
    def _check_tensors(self) -> Self:
        bound: dict[str, tuple[int, str]] = {}
        problems = []
        for name, field in type(self).model_fields.items():
            for spec in (item for item in field.metadata if isinstance(item, TensorSpec)):
                for label, value in _tensors_of(f"{type(self).__name__}.{name}", getattr(self, name)):
                    problem = spec.check(label, value, bound)
                    if problem is not None:
                        problems.append(problem)
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _tensors_of(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of a field: itself, or the values of a mapping; nothing for None."""
    if value is None:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{label}[{key!r}]", item
    else:
        yield label, value


def describe_validation_error(error: ValidationError) -> list[str]:
    """One short text per problem of a pydantic error: the field, what was expected, what came."""
    texts = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            texts.append(f"{path}: missing")
        elif item["type"] == "extra_forbidden":
            texts.append(f"{path}: unknown field")
        elif path:
            came = repr(item["input"])
            texts.append(f"{path}: {message}" + (f", came {came}" if len(came) <= 120 else ""))
        else:
            texts.append(message)
    return texts
