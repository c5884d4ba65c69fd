"""The rollout roles as one engine fleet and one scorer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_sdk.errors import RewardError
from relax_sdk.protocols import RewardBatch, RewardScores, RolloutRequest, RolloutResponse
from relax_sdk.runtime.calls import engine_names, wait_all

__all__ = ["RolloutFleet"]


class RolloutFleet:
    """An `EngineFleet` and a `RewardScorer` over Ray actors of `RolloutRole`.

    Args:
        workers: the actor handles, engine 0 first.
        components: what the scorer returns.
        required_tracks: media that it reads.
        timeout_s: of one wave, and of one scoring.
        score_rows: rows of one scoring call.
    """

    def __init__(
        self,
        workers: Sequence[Any],
        *,
        components: tuple[str, ...],
        required_tracks: tuple[str, ...],
        timeout_s: float,
        score_rows: int,
    ) -> None:
        self.workers = tuple(workers)
        self.components = components
        self.required_tracks = required_tracks
        self._timeout_s = timeout_s
        self._score_rows = score_rows

    @property
    def size(self) -> int:
        """How many engines there are."""
        return len(self.workers)

    def generate(self, assignments: Sequence[Sequence[RolloutRequest]]) -> list[list[RolloutResponse]]:
        """See `EngineFleet.generate`."""
        calls = [
            worker.generate.remote(list(requests)) for worker, requests in zip(self.workers, assignments, strict=True)
        ]
        return wait_all(calls, what="generate", names=engine_names(self.size), timeout_s=self._timeout_s)

    def score(self, batch: RewardBatch) -> RewardScores:
        """Score in chunks of whole rows spread over the workers; the result in row order."""
        count = len(batch.prompts)
        calls, names = [], []
        for index, start in enumerate(range(0, count, self._score_rows)):
            rows = slice(start, min(start + self._score_rows, count))
            part = RewardBatch(
                prompts=batch.prompts[rows],
                tracks={name: track[rows] for name, track in batch.tracks.items()},
                metadata=batch.metadata[rows],
            )
            worker = index % self.size
            calls.append(self.workers[worker].score.remote(part))
            names.append(engine_names(self.size)[worker])
        parts: list[RewardScores] = wait_all(calls, what="scoring", names=names, timeout_s=self._timeout_s)
        merged: dict[str, tuple[float, ...]] = {}
        for index, part_scores in enumerate(parts):
            first = index * self._score_rows
            rows_of_part = min(self._score_rows, count - first)
            for name, values in part_scores.components.items():
                # Here, because a row too few in one part and one too many in the next would shift the rows between.
                if len(values) != rows_of_part:
                    raise RewardError(
                        f"returned {len(values)} values of {name!r} for {rows_of_part} rows", where=names[index]
                    )
                merged[name] = merged.get(name, ()) + values
        return RewardScores(components=merged, truncated_prompts=sum(part.truncated_prompts for part in parts))
