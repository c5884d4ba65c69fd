"""Where each wire name lands inside SGLang's transformer: a view of one of its parameters.

SGLang may keep several projections of a checkpoint as rows of one parameter. Its own loader skips names that it does
not know; here every name has a place, or the sync is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from relax_sdk.errors import WeightSyncError, nearest_name

__all__ = ["Destination", "destinations", "name_mapper"]

NameMapper = Callable[[str], tuple[str, int | None, int | None]]


@dataclasses.dataclass(frozen=True)
class Destination:
    """A parameter, or part ``part`` of the ``parts`` equal row blocks that it is made of."""

    parameter: str
    part: int | None = None
    parts: int | None = None

    def view(self, parameter: Tensor) -> Tensor:
        """The rows of ``parameter`` that this destination stands for.

        Raises:
            WeightSyncError: the rows do not divide evenly.
        """
        if self.part is None or self.parts is None:
            return parameter
        rows, rest = divmod(parameter.shape[0], self.parts)
        if rest:
            raise WeightSyncError(f"{self.parameter}: {parameter.shape[0]} rows do not make {self.parts} equal parts")
        return parameter[self.part * rows : (self.part + 1) * rows]


def name_mapper(module: nn.Module) -> NameMapper:
    """SGLang's own renaming rules of a module: ``name -> (its name, part or None, parts or None)``."""
    from sglang.multimodal_gen.runtime.loader.utils import get_param_names_mapping

    rules = getattr(module, "param_names_mapping", None)
    if not rules:
        return lambda name: (name, None, None)
    mapper: NameMapper = get_param_names_mapping(rules)
    return mapper


def destinations(
    names: Iterable[str], known: Mapping[str, Any], mapper: NameMapper
) -> tuple[dict[str, Destination], list[str]]:
    """Place every wire name.

    Args:
        names: wire names.
        known: names that exist on SGLang's side.
        mapper: `name_mapper` of the module.

    Returns:
        The placed names, and one text per name that has no place, with the nearest known name.
    """
    placed: dict[str, Destination] = {}
    problems: list[str] = []
    for name in names:
        if name in known:
            placed[name] = Destination(name)
            continue
        mapped, part, parts = mapper(name)
        if mapped in known:
            placed[name] = Destination(mapped, part, parts)
            continue
        near = nearest_name(name, known)
        problems.append(f"unknown name {name!r}" + (f" (nearest: {near!r})" if near else ""))
    return placed, problems
