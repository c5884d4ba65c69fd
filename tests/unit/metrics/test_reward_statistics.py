from __future__ import annotations

import math

import numpy
import pytest

from relax_sdk.errors import RecordError
from relax_sdk.metrics import find_metric, group_statistics, paired_difference


def test_paired_difference_of_a_worked_example() -> None:
    # d = 1, 2, 3, 4: mean 5/2, variance 5/3, standard error sqrt(5/12), t = sqrt(15).
    result = paired_difference([10.0, 20.0, 30.0, 40.0], [11.0, 22.0, 33.0, 44.0])
    assert (result.mean, result.n) == (2.5, 4)
    assert result.standard_error == pytest.approx(math.sqrt(5 / 12))
    assert result.t == pytest.approx(math.sqrt(15))
    assert paired_difference([11.0, 22.0, 33.0, 44.0], [10.0, 20.0, 30.0, 40.0]).t == pytest.approx(-math.sqrt(15))


def test_pairing_removes_what_both_share() -> None:
    generator = numpy.random.default_rng(0)
    prompts = generator.normal(0, 10, 100)
    gain = 0.1 + generator.normal(0, 0.05, 100)
    result = paired_difference(prompts.tolist(), (prompts + gain).tolist())
    assert result.mean == pytest.approx(gain.mean())
    assert result.standard_error == pytest.approx(gain.std(ddof=1) / 10)
    assert result.t > 15


def test_equal_differences_have_no_finite_t() -> None:
    assert paired_difference([1.0, 2.0], [1.0, 2.0]).t == 0
    assert paired_difference([1.0, 2.0], [2.0, 3.0]).t == math.inf
    assert paired_difference([2.0, 3.0], [1.0, 2.0]).t == -math.inf


@pytest.mark.parametrize(
    ("before", "after"), [([], []), ([1.0], [2.0]), ([1.0, 2.0], [1.0]), ([1.0, math.nan], [1.0, 2.0])]
)
def test_what_cannot_be_paired_is_refused(before: list[float], after: list[float]) -> None:
    with pytest.raises(RecordError, match="cannot"):
        paired_difference(before, after)


def test_group_statistics_against_numpy() -> None:
    generator = numpy.random.default_rng(1)
    scores = {"pickscore": generator.normal(0.8, 0.1, (5, 4)), "ocr": generator.normal(0, 1, (5, 4))}
    weights = {"pickscore": 1.0, "ocr": 0.25}
    advantages = generator.normal(0, 1, (5, 4))
    result = group_statistics(
        {name: table.tolist() for name, table in scores.items()}, weights=weights, advantages=advantages.tolist()
    )
    expected = {}
    for name, table in scores.items():
        expected[f"reward/{name}_mean"] = table.mean()
        expected[f"reward/{name}_std"] = table.std(ddof=1)
        expected[f"reward/{name}_min"] = table.min()
        expected[f"reward/{name}_max"] = table.max()
    total = sum(weights[name] * table for name, table in scores.items())
    expected |= {
        "reward/advantage_mean": advantages.mean(),
        "reward/advantage_std": advantages.std(ddof=1),
        "reward/group_std_mean": total.std(axis=1, ddof=1).mean(),
        "reward/num_groups": 5,
        "reward/zero_spread_groups": 0,
        "reward/degenerate": 0,
    }
    assert result == pytest.approx(expected)
    assert all(find_metric(name) for name in result)


def test_groups_without_spread_are_counted() -> None:
    result = group_statistics(
        {"a": [[0.1, 0.1, 0.1], [0.2, 0.3, 0.4]]}, weights={"a": 1.0}, advantages=[[0.0, 0.0, 0.0], [-1.0, 0.0, 1.0]]
    )
    assert (result["reward/zero_spread_groups"], result["reward/degenerate"]) == (1, 0)
    assert result["reward/group_std_mean"] == pytest.approx(0.05)
    flat = group_statistics({"a": [[0.1], [0.2]]}, weights={"a": 1.0}, advantages=[[0.0], [0.0]])
    assert (flat["reward/zero_spread_groups"], flat["reward/degenerate"], flat["reward/group_std_mean"]) == (2, 1, 0)


@pytest.mark.parametrize(
    ("scores", "advantages"),
    [
        ({"a": [[1.0, 2.0]], "b": [[1.0]]}, [[0.0, 0.0]]),
        ({"a": [[1.0, 2.0]]}, [[0.0]]),
        ({"a": []}, []),
        ({"a": [[]]}, [[]]),
    ],
)
def test_shapes_that_differ_are_refused(scores: dict[str, list[list[float]]], advantages: list[list[float]]) -> None:
    with pytest.raises(RecordError, match="group sizes"):
        group_statistics(scores, weights={}, advantages=advantages)
