"""Calls a scorer and lets through only what can train: every required component, one finite float per row.

Nothing is repaired. A score that is missing or not finite fails the whole rollout, naming its group and prompt,
because a group normalised around a made-up value trains all of its candidates wrongly.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

from relax_sdk.errors import ConfigError, RelaxError, RewardError, nearest_name
from relax_sdk.protocols import RewardBatch, RewardScorer, RewardScores

__all__ = ["RewardManager", "RewardResult"]


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """Checked scores, and how long the scorer took for them in seconds."""

    scores: RewardScores
    rows: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """``reward/score_time``, ``reward/score_samples_per_s`` and ``reward/truncated_prompts``."""
        return {
            "reward/score_time": self.seconds,
            "reward/score_samples_per_s": self.rows / self.seconds if self.seconds > 0 else 0.0,
            "reward/truncated_prompts": self.scores.truncated_prompts,
        }


class RewardManager:
    """A scorer with the checks around it.

    Args:
        scorer: what `build_scorer` returned.
        required_components: ``--reward-required-components``.
        component_weights: ``--reward-component-weights``, for combining advantages.
        name: the reward's name, for messages; the class name by default.
        where: what implements it, for messages; the class of ``scorer`` by default.

    Raises:
        ConfigError: a required or weighted component that the scorer does not have, a required one without a weight,
            or a weight that is not finite.
    """

    def __init__(
        self,
        scorer: RewardScorer,
        *,
        required_components: Sequence[str],
        component_weights: Mapping[str, float],
        name: str | None = None,
        where: str | None = None,
    ) -> None:
        self.scorer = scorer
        self.required_components = tuple(required_components)
        self.component_weights = dict(component_weights)
        self.name = name or type(scorer).__name__
        self._where = where or f"{type(scorer).__module__}:{type(scorer).__qualname__}"
        for flag, components in (
            ("--reward-required-components", self.required_components),
            ("--reward-component-weights", tuple(self.component_weights)),
        ):
            for component in components:
                if component not in scorer.components:
                    raise ConfigError(
                        f"reward {self.name!r} has no component {component!r}",
                        where=flag,
                        expected="one of " + ", ".join(scorer.components),
                        nearest=nearest_name(component, scorer.components),
                    )
        for component in self.required_components:
            if component not in self.component_weights:
                raise ConfigError(
                    f"required component {component!r} has no weight",
                    where="--reward-component-weights",
                    expected=f"a number for {component!r}",
                )
        for component, weight in self.component_weights.items():
            if not math.isfinite(weight):
                raise ConfigError(
                    f"the weight of {component!r} is {weight}", where="--reward-component-weights", expected="a number"
                )

    def score(self, batch: RewardBatch, *, group_size: int) -> RewardResult:
        """Score a rollout.

        Args:
            batch: B rows, group after group: row ``g * group_size + k`` is candidate k of group g.
            group_size: K, candidates per prompt group.

        Returns:
            All components that the scorer declares, raw, in row order.

        Raises:
            RewardError: a track is missing, the scorer failed, or its answer lacks a component, has another number of
                rows, or holds a value that is not finite; the group, candidate and prompt are named.
        """
        missing = [track for track in self.scorer.required_tracks if track not in batch.tracks]
        if missing:
            raise self._error(f"needs track {missing[0]!r}, but the batch has {sorted(batch.tracks)}")
        rows = len(batch.prompts)
        if rows == 0 or group_size < 1 or rows % group_size:
            raise self._error(f"cannot score {rows} rows in groups of {group_size}")
        started = time.perf_counter()
        scores = self._call(batch)
        seconds = time.perf_counter() - started
        self._check(scores, batch, group_size)
        return RewardResult(scores=scores, rows=rows, seconds=seconds)

    def _call(self, batch: RewardBatch) -> RewardScores:
        try:
            scores = self.scorer.score(batch)
        except RelaxError as error:
            raise self._error(f"failed: {error.what}", expected=error.expected) from error
        except Exception as error:
            raise self._error(f"failed: {type(error).__name__}: {error}") from error
        if not isinstance(scores, RewardScores):
            raise self._error(f"returned {type(scores).__name__}", expected="RewardScores")
        return scores

    def _check(self, scores: RewardScores, batch: RewardBatch, group_size: int) -> None:
        declared = (*self.required_components, *self.scorer.components)
        for component in declared:
            if component not in scores.components:
                raise self._error(
                    f"returned no component {component!r}, only {sorted(scores.components)}",
                    nearest=nearest_name(component, scores.components),
                )
        for component, values in scores.components.items():
            if component not in declared:
                raise self._error(
                    f"returned component {component!r}, which it does not declare",
                    expected="components " + ", ".join(self.scorer.components),
                )
            if len(values) != len(batch.prompts):
                raise self._error(f"returned {len(values)} values of {component!r} for {len(batch.prompts)} rows")
            for row, value in enumerate(values):
                if not math.isfinite(value):
                    group, candidate = divmod(row, group_size)
                    prompt = batch.prompts[row]
                    raise self._error(
                        f"returned {component} = {value} for group {group}, candidate {candidate}; "
                        f"prompt {prompt if len(prompt) <= 120 else prompt[:117] + '...'!r}",
                        expected="a finite number for every candidate; the group cannot be normalised without it",
                    )

    def _error(self, what: str, *, expected: str | None = None, nearest: str | None = None) -> RewardError:
        return RewardError(
            f"reward {self.name!r} {what}", where=f"scorer {self._where}", expected=expected, nearest=nearest
        )
