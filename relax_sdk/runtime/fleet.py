"""The rollout roles as one engine fleet and one scorer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from relax_sdk.errors import RewardError
from relax_sdk.protocols import RewardBatch, RewardScores, RolloutRequest, RolloutResponse
from relax_sdk.runtime.calls import engine_names, wait_all

__all__ = ["RolloutFleet"]

_SHUTDOWN_TIMEOUT_S = 10.0


class RolloutFleet:
    """An `EngineFleet` and a `RewardScorer` over Ray actors of `RolloutRole`.

    Args:
        workers: the actor handles, engine 0 first.
        components: what the scorer returns.
        required_tracks: media that it reads.
        timeout_s: of one wave, and of one scoring.
        start_timeout_s: of starting an engine again.
        score_rows: rows of one scoring call.
        replace: creates a new, unstarted role for an engine index; the old one is gone.
    """

    def __init__(
        self,
        workers: Sequence[Any],
        *,
        components: tuple[str, ...],
        required_tracks: tuple[str, ...],
        timeout_s: float,
        start_timeout_s: float,
        score_rows: int,
        replace: Callable[[int], Any],
    ) -> None:
        self._workers = list(workers)
        self.components = components
        self.required_tracks = required_tracks
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._score_rows = score_rows
        self._replace = replace

    @property
    def workers(self) -> tuple[Any, ...]:
        """The actor handles, engine 0 first; a restart may replace some."""
        return tuple(self._workers)

    @property
    def size(self) -> int:
        """How many engines there are."""
        return len(self._workers)

    def generate(self, assignments: Sequence[Sequence[RolloutRequest]]) -> list[list[RolloutResponse]]:
        """See `EngineFleet.generate`."""
        calls = [
            worker.generate.remote(list(requests)) for worker, requests in zip(self._workers, assignments, strict=True)
        ]
        return wait_all(calls, what="generate", names=engine_names(self.size), timeout_s=self._timeout_s)

    def release(self) -> None:
        """Every engine gives its device memory back, and every scorer that can."""
        self._hand_over("release", [worker.release.remote() for worker in self._workers])

    def resume(self, *, weights_only: bool) -> None:
        """Every engine takes its device memory again; with ``weights_only`` what a weight sync writes to."""
        self._hand_over("resume", [worker.resume.remote(weights_only=weights_only) for worker in self._workers])

    def dead_engines(self) -> dict[int, str]:
        """Engines that cannot serve any more, with the reason; one that does not answer counts.

        An engine that still works at an earlier call answers after it.
        """
        calls = [worker.engine_problem.remote() for worker in self._workers]
        ray.wait(calls, num_returns=len(calls), timeout=self._timeout_s)
        dead = {}
        for index, call in enumerate(calls):
            try:
                problem = ray.get(call, timeout=0)
            except RayActorError as error:
                problem = f"its process died: {str(error).splitlines()[0]}"
            except RayTaskError as error:
                problem = f"asked for its state, it failed: {error.cause}"
            except GetTimeoutError:
                problem = f"it did not answer within {self._timeout_s:.0f} s"
            if problem is not None:
                dead[index] = problem
        return dead

    def restart(self, indices: Iterable[int]) -> None:
        """Start engines again in new roles, with the weights of the model folder.

        Raises:
            RelaxError: one of them does not start.
        """
        starts, names = [], []
        for index in indices:
            # The role goes too: it may be stuck in the call that its engine never answered. It ends its server first,
            # which could be stopped and then would not notice that its owner is gone.
            ray.wait([self._workers[index].shutdown.remote()], timeout=_SHUTDOWN_TIMEOUT_S)
            ray.kill(self._workers[index])
            self._workers[index] = self._replace(index)
            starts.append(self._workers[index].start.remote())
            names.append(engine_names(self.size)[index])
        wait_all(starts, what="restart", names=names, timeout_s=self._start_timeout_s)

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
            calls.append(self._workers[worker].score.remote(part))
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

    def _hand_over(self, what: str, calls: Sequence[Any]) -> None:
        wait_all(calls, what=f"{what} of the engines", names=engine_names(self.size), timeout_s=self._timeout_s)
