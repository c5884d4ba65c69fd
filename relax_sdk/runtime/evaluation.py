"""Held-out evaluation: the same prompts, the same noise, the deterministic sampler, compared pair by pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from relax_sdk.metrics import PairedDifference, paired_difference
from relax_sdk.protocols import PromptRecord, RewardScores
from relax_sdk.rewards import RewardManager
from relax_sdk.rollout import RolloutBatch, RolloutDriver
from relax_sdk.runtime.recovery import Recovery
from relax_sdk.runtime.timer import PhaseTimer

__all__ = ["Evaluation", "Evaluator"]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One pass over the held-out prompts.

    Attributes:
        step: rollouts trained before it.
        metrics: ``eval/<set>/...``.
        per_prompt: component -> mean over each prompt's images, in prompt order.
        differences: component -> paired difference to the baseline pass, over prompts; empty for the baseline.
        images: one uint8 [3, H, W] per prompt, each from the same noise in every pass.
    """

    step: int
    metrics: dict[str, float]
    per_prompt: dict[str, list[float]]
    differences: dict[str, PairedDifference]
    images: list[Tensor]


class Evaluator:
    """Evaluates one named set; the first pass is the baseline.

    Args:
        name: of the set, in metric names.
        prompts: held-out prompts.
        samples_per_prompt: images of each.
        driver: samples them.
        rewards: scores them.
        recovery: brings the engines' turn, and restarts them.
    """

    def __init__(
        self,
        *,
        name: str,
        prompts: Sequence[PromptRecord],
        samples_per_prompt: int,
        driver: RolloutDriver,
        rewards: RewardManager,
        recovery: Recovery,
    ) -> None:
        self.name = name
        self.prompts = tuple(prompts)
        self._samples = samples_per_prompt
        self._driver = driver
        self._rewards = rewards
        self._recovery = recovery
        self.baseline: Evaluation | None = None

    def run(self, step: int, policy_version: int, *, phase: Callable[[str, int, int], None]) -> Evaluation:
        """Evaluate the weights of ``policy_version`` after ``step`` trained rollouts.

        The unit of the paired difference is the prompt: images of one prompt are not independent.
        """
        timer = PhaseTimer(phase, f"evaluation after {step} rollouts")

        def sample_and_score() -> tuple[RolloutBatch, RewardScores]:
            batch = self._driver.evaluate(
                self.prompts,
                step=step,
                samples_per_prompt=self._samples,
                policy_version=policy_version,
                progress=timer.progress,
            )
            return batch, self._rewards.score(batch.reward_batch(), group_size=self._samples).scores

        with timer("eval"):
            batch, scores = self._recovery.sample(sample_and_score, policy_version=policy_version)
        per_prompt = {name: self._per_prompt(values) for name, values in scores.components.items()}
        metrics = {"perf/eval_time": timer.seconds["eval"]} | self._means(scores.components)
        differences = {}
        if self.baseline is not None and len(self.prompts) > 1:  # one pair has no standard error
            differences = {
                name: paired_difference(self.baseline.per_prompt[name], values) for name, values in per_prompt.items()
            }
            metrics |= self._changes(differences)
        evaluation = Evaluation(
            step=step,
            metrics=metrics,
            per_prompt=per_prompt,
            differences=differences,
            images=[group.media["image"][0] for group in batch.groups if "image" in group.media],
        )
        if self.baseline is None:
            self.baseline = evaluation
        return evaluation

    def _per_prompt(self, values: Sequence[float]) -> list[float]:
        return [
            sum(values[start : start + self._samples]) / self._samples for start in range(0, len(values), self._samples)
        ]

    def _means(self, components: dict[str, tuple[float, ...]]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, values in components.items():
            column = torch.tensor(values, dtype=torch.float64)
            metrics[f"eval/{self.name}/{name}_mean"] = column.mean().item()
            metrics[f"eval/{self.name}/{name}_std"] = column.std(correction=0).item()
        return metrics

    def _changes(self, differences: dict[str, PairedDifference]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, change in differences.items():
            prefix = f"eval/{self.name}/{name}_delta"
            metrics |= {f"{prefix}_mean": change.mean, f"{prefix}_se": change.standard_error, f"{prefix}_t": change.t}
        return metrics
