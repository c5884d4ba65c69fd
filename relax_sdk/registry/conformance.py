"""Whether a class fits a protocol, told without constructing it: attributes declared, methods callable by the core.

`isinstance` against a runtime-checkable protocol only looks for names on an instance; this also compares signatures
and says what differs, so that a wrong adapter fails when it is named and not in the middle of a rollout.
"""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["conformance_problems"]

_TYPES: dict[str, tuple[str, Any]] = {
    "str": ("a str", lambda value: isinstance(value, str)),
    "tuple[str, ...]": (
        "a tuple of str",
        lambda value: isinstance(value, tuple) and all(isinstance(item, str) for item in value),
    ),
}


def conformance_problems(candidate: Any, protocol: type, *, attributes: bool = True) -> list[str]:
    """Compare a class with a protocol class.

    Args:
        candidate: what an import string led to.
        protocol: a ``typing.Protocol`` whose annotations and functions are the contract.
        attributes: also require the data attributes, as class attributes or as annotations.

    Returns:
        One text per difference: missing attribute or method, wrong type, wrong signature. Empty when it fits.
    """
    if not inspect.isclass(candidate):
        return [f"expected a class, came {type(candidate).__name__} {candidate!r}"]
    problems = []
    if attributes:
        for name, annotation in inspect.get_annotations(protocol).items():
            problems += _attribute_problem(candidate, name, str(annotation))
    for name, function in vars(protocol).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            problems += _method_problem(candidate, name, function)
    return problems


def _attribute_problem(candidate: type, name: str, annotation: str) -> list[str]:
    if not hasattr(candidate, name):
        declared = any(name in inspect.get_annotations(base) for base in candidate.__mro__)
        return [] if declared else [f"missing attribute {name}: {annotation} (declare it on the class)"]
    value = getattr(candidate, name)
    if isinstance(value, property) or annotation not in _TYPES:
        return []
    expected, fits = _TYPES[annotation]
    return [] if fits(value) else [f"attribute {name}: expected {expected}, came {value!r}"]


def _method_problem(candidate: type, name: str, contract: Any) -> list[str]:
    expected = inspect.signature(contract)
    shown = _shown(expected, drop_self=True)
    if not hasattr(candidate, name):
        return [f"missing method {name}{shown}"]
    static = inspect.getattr_static(candidate, name)
    method = getattr(candidate, name)
    if not callable(method):
        return [f"{name}: expected a method {name}{shown}, came {type(method).__name__}"]
    try:
        actual = inspect.signature(method)
    except (TypeError, ValueError):
        return []  # a method implemented in C has no signature to compare
    bound = isinstance(static, staticmethod | classmethod)
    parameters = list(expected.parameters.values())[1:]
    positional: list[Any] = [] if bound else [None]  # the instance
    positional += [None for item in parameters if item.kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = {item.name: None for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY}
    try:
        actual.bind(*positional, **keywords)
    except TypeError as error:
        return [f"method {name}: expected {name}{shown}, came {name}{_shown(actual, drop_self=not bound)}: {error}"]
    return []


def _shown(signature: inspect.Signature, *, drop_self: bool) -> str:
    """Parameter names only, e.g. ``(model_path, *, revision, dtype)``."""
    parameters = list(signature.parameters.values())[1 if drop_self else 0 :]
    bare = [item.replace(annotation=inspect.Parameter.empty) for item in parameters]
    return str(inspect.Signature(bare))
