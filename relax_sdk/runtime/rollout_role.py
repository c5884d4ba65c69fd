"""The Ray role that samples and scores: one engine and, beside it on the same device, the reward scorer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from relax_sdk.protocols import RewardBatch, RewardScores, RolloutRequest, RolloutResponse
from relax_sdk.registry import EngineSpec, ModelSpec, RewardSpec
from relax_sdk.rewards import build_scorer
from relax_sdk.training import TORCH_DTYPES

__all__ = ["RolloutRole"]


class RolloutRole:
    """Runs inside a Ray actor.

    Args:
        engine: which engine.
        model: the model family.
        reward: which scorer.
        model_path, model_revision: the pipeline.
        reward_model_path: the scorer's model.
        reward_runtime: ``"colocate"`` scores on this role's device, ``"cpu"`` on the CPU.
        engine_dtype: ``"bf16"`` or ``"fp32"``.
        device: ``"cuda"`` or ``"cpu"``.
        threads: CPU threads of this process.
    """

    def __init__(
        self,
        *,
        engine: EngineSpec,
        model: ModelSpec,
        reward: RewardSpec,
        model_path: str,
        model_revision: str | None,
        reward_model_path: str | None,
        reward_runtime: str,
        engine_dtype: str,
        device: str,
        threads: int,
    ) -> None:
        torch.set_num_threads(threads)
        self._engine_spec, self._model = engine, model
        self._pipeline = {"model_path": model_path, "revision": model_revision}
        self._dtype = TORCH_DTYPES[engine_dtype]
        self._reward, self._reward_model_path = reward, reward_model_path
        self._reward_runtime, self._device = reward_runtime, device
        self._engine: Any = None
        self._scorer: Any = None

    def start(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Load engine and scorer; here and not in the constructor, whose errors Ray does not hand on whole.

        Returns:
            The scorer's component names, and the media tracks that it reads.
        """
        engine_class: Any = self._engine_spec.load()
        self._engine = engine_class(
            adapter=self._model.load()(), device=self._device, dtype=self._dtype, **self._pipeline
        )
        self._engine.start()
        self._scorer = build_scorer(
            self._reward, model_path=self._reward_model_path, runtime=self._reward_runtime, device=self._device
        )
        return tuple(self._scorer.components), tuple(self._scorer.required_tracks)

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutResponse]:
        """Sample groups."""
        return list(self._engine.generate(requests))

    def score(self, batch: RewardBatch) -> RewardScores:
        """Score media, unchecked: the driver's reward manager checks the whole round."""
        scores: RewardScores = self._scorer.score(batch)
        return scores

    def call_engine(self, method: str, *args: Any) -> Any:
        """Run a weight sync method of the engine."""
        return getattr(self._engine, method)(*args)

    def shutdown(self) -> None:
        """Stop what the engine started."""
        if self._engine is not None:
            self._engine.shutdown()
