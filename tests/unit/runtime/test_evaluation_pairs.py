"""Held-out evaluation compares prompt with prompt, against the first pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from relax_sdk.protocols import PromptRecord, RewardScores
from relax_sdk.rollout import GroupResult, RolloutBatch
from relax_sdk.runtime.evaluation import Evaluator


class Driver:
    """Draws images whose pixels say which prompt they are for."""

    def evaluate(self, prompts: Sequence[PromptRecord], *, samples_per_prompt: int, **_: Any) -> RolloutBatch:
        groups = tuple(
            GroupResult(
                group_index=index,
                prompt=prompt,
                media={"image": torch.full((samples_per_prompt, 3, 4, 4), index, dtype=torch.uint8)},
                sidecar=None,
                truncated=False,
            )
            for index, prompt in enumerate(prompts)
        )
        return RolloutBatch(
            rollout_id=None, policy_version=0, sde_indices=(), samples_per_prompt=samples_per_prompt, groups=groups
        )


class Rewards:
    """Answers with one list of values a pass."""

    def __init__(self, *passes: tuple[float, ...]) -> None:
        self._passes = iter(passes)

    def score(self, _batch: Any, *, group_size: int) -> Any:
        values = next(self._passes)
        return type("Result", (), {"scores": RewardScores(components={"x": values})})


class Resident:
    """Engines that are always there."""

    def sample(self, work: Any, *, policy_version: int) -> Any:
        return work()


def evaluator(count: int, *passes: tuple[float, ...]) -> Evaluator:
    prompts = [PromptRecord(prompt=f"p{index}", prompt_id=str(index)) for index in range(count)]
    driver: Any = Driver()
    rewards: Any = Rewards(*passes)
    resident: Any = Resident()
    return Evaluator(
        name="set", prompts=prompts, samples_per_prompt=2, driver=driver, rewards=rewards, recovery=resident
    )


def quiet(*_: Any) -> None:
    pass


def test_the_unit_of_the_comparison_is_the_prompt() -> None:
    made = evaluator(2, (1.0, 3.0, 5.0, 5.0), (2.0, 4.0, 8.0, 8.0))
    first = made.run(0, 0, phase=quiet)
    assert first.per_prompt == {"x": [2.0, 5.0]}
    assert first.metrics["eval/set/x_mean"] == 3.5
    assert first.differences == {}
    second = made.run(10, 10, phase=quiet)
    # Differences of the prompts' means: 1 and 3.
    assert second.differences["x"].mean == 2.0
    assert second.differences["x"].standard_error == pytest.approx(1.0)
    assert second.metrics["eval/set/x_delta_t"] == pytest.approx(2.0)
    assert [int(image[0, 0, 0]) for image in second.images] == [0, 1]


def test_one_prompt_has_no_comparison() -> None:
    made = evaluator(1, (1.0, 3.0), (2.0, 4.0))
    made.run(0, 0, phase=quiet)
    assert made.run(1, 1, phase=quiet).differences == {}
