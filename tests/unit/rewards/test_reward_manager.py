from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from relax_sdk.errors import ConfigError, RewardError
from relax_sdk.metrics import find_metric
from relax_sdk.protocols import RewardBatch, RewardScores
from relax_sdk.rewards import RewardManager


class FakeScorer:
    """Scores a row by its first pixel, or answers whatever the test wants."""

    components: tuple[str, ...] = ("pixel", "length")
    required_tracks: tuple[str, ...] = ("image",)

    def __init__(self, answer: Callable[[RewardBatch], Any] | None = None) -> None:
        self.answer = answer

    def score(self, batch: RewardBatch) -> RewardScores:
        if self.answer is not None:
            answer: RewardScores = self.answer(batch)
            return answer
        return scores(
            pixel=[float(image[0, 0, 0]) for image in batch.tracks["image"]],
            length=[float(len(prompt)) for prompt in batch.prompts],
        )


def scores(**components: list[float]) -> RewardScores:
    return RewardScores(components={name: tuple(values) for name, values in components.items()}, truncated_prompts=2)


def batch(rows: int = 6) -> RewardBatch:
    images = torch.arange(rows, dtype=torch.uint8)[:, None, None, None].expand(rows, 3, 2, 2)
    return RewardBatch(prompts=tuple(f"{'p' * (row // 2 + 1)}" for row in range(rows)), tracks={"image": images})


def manager(answer: Callable[[RewardBatch], Any] | None = None, **arguments: Any) -> RewardManager:
    settings = {"required_components": ["pixel"], "component_weights": {"pixel": 1.0}, "name": "fake"} | arguments
    return RewardManager(FakeScorer(answer), **settings)


def test_scores_come_back_in_row_order_with_their_cost() -> None:
    result = manager().score(batch(), group_size=2)
    assert result.scores.components == {"pixel": (0, 1, 2, 3, 4, 5), "length": (1, 1, 2, 2, 3, 3)}
    metrics = result.metrics()
    assert metrics["reward/score_time"] > 0
    assert metrics["reward/score_samples_per_s"] == pytest.approx(6 / metrics["reward/score_time"])
    assert metrics["reward/truncated_prompts"] == 2
    assert all(find_metric(name) for name in metrics)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("component", ["pixel", "length"])
def test_a_value_that_is_not_finite_names_group_candidate_and_prompt(bad: float, component: str) -> None:
    values = {"pixel": [0.0] * 6, "length": [0.0] * 6}
    values[component] = [0.0, 1.0, 2.0, 3.0, 4.0, bad]
    with pytest.raises(RewardError) as caught:
        manager(lambda _: scores(**values)).score(batch(), group_size=2)
    assert f"reward 'fake' returned {component} = {bad} for group 2, candidate 1; prompt 'ppp'" in str(caught.value)
    assert "FakeScorer" in str(caught.value)


@pytest.mark.parametrize("count", [0, 5, 7, 36])
def test_a_wrong_count_is_refused(count: int) -> None:
    with pytest.raises(RewardError, match=f"returned {count} values of 'pixel' for 6 rows"):
        manager(lambda _: scores(pixel=[1.0] * count, length=[1.0] * 6)).score(batch(), group_size=2)


def test_missing_and_undeclared_components_are_refused() -> None:
    six = [1.0] * 6
    with pytest.raises(
        RewardError, match=r"(?s)no component 'pixel', only \['length', 'pixels'\].*did you mean 'pixels'"
    ):
        manager(lambda _: scores(pixels=six, length=six)).score(batch(), group_size=2)
    with pytest.raises(RewardError, match="no component 'length'"):
        manager(lambda _: scores(pixel=six)).score(batch(), group_size=2)
    with pytest.raises(RewardError, match="component 'extra', which it does not declare"):
        manager(lambda _: scores(pixel=six, length=six, extra=six)).score(batch(), group_size=2)
    with pytest.raises(RewardError, match="returned dict"):
        manager(lambda _: {"pixel": six}).score(batch(), group_size=2)


def test_what_the_scorer_raises_is_wrapped_with_its_name() -> None:
    def fail(_: RewardBatch) -> RewardScores:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RewardError, match="reward 'fake' failed: RuntimeError: CUDA out of memory") as caught:
        manager(fail).score(batch(), group_size=2)
    assert isinstance(caught.value.__cause__, RuntimeError)

    def refuse(_: RewardBatch) -> RewardScores:
        raise RewardError("cannot score 1x1 pixels", expected="larger images")

    with pytest.raises(RewardError, match=r"(?s)'fake' failed: cannot score 1x1 pixels.*expected: larger images"):
        manager(refuse).score(batch(), group_size=2)

    def interrupt(_: RewardBatch) -> RewardScores:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manager(interrupt).score(batch(), group_size=2)


def test_a_batch_that_cannot_be_scored() -> None:
    video = RewardBatch(prompts=("a",), tracks={"video": torch.zeros(1, 3, 2, 2, dtype=torch.uint8)})
    with pytest.raises(RewardError, match=r"needs track 'image', but the batch has \['video'\]"):
        manager().score(video, group_size=1)
    for rows, group_size in ((0, 2), (6, 4), (6, 0)):
        with pytest.raises(RewardError, match=f"cannot score {rows} rows in groups of {group_size}"):
            manager().score(batch(rows), group_size=group_size)


def test_a_configuration_that_does_not_fit_the_scorer() -> None:
    with pytest.raises(ConfigError, match=r"(?s)no component 'pixl'.*required-components.*did you mean 'pixel'"):
        manager(required_components=["pixl"])
    with pytest.raises(ConfigError, match=r"(?s)no component 'other'.*component-weights"):
        manager(component_weights={"pixel": 1.0, "other": 1.0})
    with pytest.raises(ConfigError, match="required component 'length' has no weight"):
        manager(required_components=["pixel", "length"])
    with pytest.raises(ConfigError, match="weight of 'pixel' is nan"):
        manager(component_weights={"pixel": math.nan})
