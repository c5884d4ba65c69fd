"""The Ray role that samples and scores: one engine and, beside it on the same devices, the reward scorer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from relax_sdk.control import pulse
from relax_sdk.protocols import (
    EngineSettings,
    OffloadableScorer,
    RewardBatch,
    RewardScores,
    RolloutRequest,
    RolloutResponse,
)
from relax_sdk.registry import EngineSpec, ModelSpec, RewardSpec
from relax_sdk.rewards import build_scorer

__all__ = ["RolloutRole"]


class RolloutRole:
    """Runs inside a Ray actor.

    Args:
        engine: which engine.
        model: the model family.
        reward: which scorer.
        settings: the engine's.
        reward_model_path: the scorer's model.
        reward_runtime: ``"colocate"`` scores on this role's device, ``"cpu"`` on the CPU.
        visible_devices: ``CUDA_VISIBLE_DEVICES`` of this role: the devices of the ranks that it shares them with.
            Ray gives it none of its own.
    """

    def __init__(
        self,
        *,
        engine: EngineSpec,
        model: ModelSpec,
        reward: RewardSpec,
        settings: EngineSettings,
        reward_model_path: str | None,
        reward_runtime: str,
        visible_devices: str | None,
    ) -> None:
        if visible_devices is not None:
            # Before CUDA is initialised in this process, which looks at the variable once.
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        torch.set_num_threads(settings.threads)
        self._engine_spec, self._model = engine, model
        self._settings = settings
        self._reward, self._reward_model_path, self._reward_runtime = reward, reward_model_path, reward_runtime
        self._engine: Any = None
        self._scorer: Any = None

    def start(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Load engine and scorer; here and not in the constructor, whose errors Ray does not hand on whole.

        Returns:
            The scorer's component names, and the media tracks that it reads.
        """
        engine_class: Any = self._engine_spec.load()
        self._engine = engine_class(adapter=self._model.load()(), settings=self._settings)
        self._engine.start()
        self._scorer = build_scorer(
            self._reward,
            model_path=self._reward_model_path,
            runtime=self._reward_runtime,
            device=self._settings.device,
        )
        return tuple(self._scorer.components), tuple(self._scorer.required_tracks)

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutResponse]:
        """Sample groups."""
        return list(self._engine.generate(requests))

    def score(self, batch: RewardBatch) -> RewardScores:
        """Score media, unchecked: the driver's reward manager checks the whole round."""
        scores: RewardScores = self._scorer.score(batch)
        return scores

    def release(self) -> None:
        """Engine and scorer give their device memory back."""
        self._engine.release()
        if isinstance(self._scorer, OffloadableScorer):
            self._scorer.release()

    def resume(self, *, weights_only: bool) -> None:
        """Take it again; with ``weights_only`` only what a weight sync writes to."""
        self._engine.resume(weights_only=weights_only)
        if not weights_only and isinstance(self._scorer, OffloadableScorer):
            self._scorer.resume()

    def call_engine(self, method: str, *args: Any) -> Any:
        """Run a method of the engine: a part of a weight sync."""
        return getattr(self._engine, method)(*args)

    def ping(self) -> tuple[str, int]:
        """Machine and process; it waits its turn behind a running call."""
        return pulse()

    def engine_problem(self) -> str | None:
        """Why the engine cannot serve any more; None while it can."""
        problem: str | None = "it was not started" if self._engine is None else self._engine.problem()
        return problem

    def shutdown(self) -> None:
        """Stop what the engine started."""
        if self._engine is not None:
            self._engine.shutdown()
