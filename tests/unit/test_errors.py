"""The exception tree: drawn, with an exit code each, and whole after a trip between processes."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from relax_sdk import errors
from relax_sdk.errors import ConfigError, PreflightError, RelaxError, UnknownNameError, nearest_name


def classes() -> dict[str, type[RelaxError]]:
    return {
        name: item
        for name, item in vars(errors).items()
        if inspect.isclass(item) and issubclass(item, RelaxError) and item.__module__ == errors.__name__
    }


def drawn() -> dict[str, tuple[int, int]]:
    """Class name -> (depth in the drawing, exit code)."""
    found = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    (?P<lead>[ |`-]*)(?P<name>\w+Error)\s+(?P<code>\d+)\b", line)
        if match:
            found[match["name"]] = (len(match["lead"]) // 4, int(match["code"]))
    return found


def test_the_drawing_is_the_tree():
    tree = drawn()
    assert set(tree) == set(classes())
    for name, item in classes().items():
        depth = [base for base in item.__mro__ if issubclass(base, RelaxError)].index(RelaxError)
        assert tree[name] == (depth, item.exit_code), name


def test_exit_codes():
    assert {item.exit_code for item in classes().values()} == {1, 2, 3, 4}
    assert (errors.EXIT_OK, errors.EXIT_INTERRUPTED) == (0, 130)


def make(name: str, item: type[RelaxError]) -> RelaxError:
    if name == "UnknownNameError":
        return UnknownNameError("plug-in", "qwen_imag", ["qwen_image"], where="--plugin")
    if name == "PreflightError":
        return PreflightError(["a", "b"])
    return item("what", where="here", expected="that", nearest="this", next_step="do")


@pytest.mark.parametrize("name", sorted(classes()))
def test_every_error_survives_pickling(name):
    error = make(name, classes()[name])
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_the_parts_are_shown_and_absent_ones_left_out():
    text = str(ConfigError("lr is -1", where="--lr", expected="above 0", nearest="1", next_step="try"))
    assert text.splitlines() == [
        "lr is -1",
        "  where:    --lr",
        "  expected: above 0",
        "  did you mean '1'?",
        "  next:     try",
    ]
    assert str(ConfigError("alone")) == "alone"


def test_an_unknown_name():
    error = UnknownNameError("reward", "pickscor", {"pickscore", "aesthetic"})
    assert (error.nearest, error.exit_code) == ("pickscore", 2)
    assert error.expected == "one of aesthetic, pickscore"
    assert "none is installed" in str(UnknownNameError("reward", "x", []))
    assert nearest_name("zzz", ["pickscore"]) is None


def test_violations_are_all_shown():
    error = PreflightError(["first", "second"])
    assert error.violations == ("first", "second")
    assert "2 rules are broken\n  - first\n  - second" in str(error)
    assert "1 rule is broken" in str(PreflightError(["only"]))
