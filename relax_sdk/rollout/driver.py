"""The rollout driver: from prompts to trajectories on disk and decoded media in memory.

It resolves the SDE steps of a round once, plans every candidate, spreads the groups over the engines in waves,
checks each response, and writes one sidecar and K images per group. It leaves out how engines are reached (the
`EngineFleet`) and how media are scored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from relax_sdk.errors import RolloutError
from relax_sdk.flow import schedule_difference
from relax_sdk.protocols import (
    GenerativeModelAdapter,
    PromptRecord,
    RewardBatch,
    RolloutRequest,
    RolloutResponse,
    SamplingConfig,
)
from relax_sdk.rollout.identity import plan_groups
from relax_sdk.rollout.sidecar import group_path, prune_stale_artifacts, rollout_folder, write_image, write_sidecar

__all__ = ["EngineFleet", "GroupResult", "RolloutBatch", "RolloutDriver"]


class EngineFleet(Protocol):
    """Reaches the engines."""

    @property
    def size(self) -> int:
        """How many engines there are."""
        ...

    def generate(self, assignments: Sequence[Sequence[RolloutRequest]]) -> list[list[RolloutResponse]]:
        """Let engine e answer ``assignments[e]``, all at once; the responses in the same order.

        Raises:
            RolloutError: an engine failed or did not answer in time.
        """
        ...


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """One group after its rollout; media are uint8 [K, 3, H, W], ``sidecar`` is None in an evaluation."""

    group_index: int
    prompt: PromptRecord
    media: dict[str, Tensor]
    sidecar: Path | None
    truncated: bool


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """All groups of a round, in group order."""

    rollout_id: int | None
    policy_version: int
    sde_indices: tuple[int, ...]
    samples_per_prompt: int
    groups: tuple[GroupResult, ...]
    sampling_fingerprint: str = ""

    def reward_batch(self) -> RewardBatch:
        """Every candidate's media beside its own prompt: row ``group * K + slot``."""
        repeated = [group.prompt for group in self.groups for _ in range(self.samples_per_prompt)]
        tracks = {name: torch.cat([group.media[name] for group in self.groups]) for name in self.groups[0].media}
        return RewardBatch(
            prompts=tuple(item.prompt for item in repeated),
            tracks=tracks,
            metadata=tuple(item.metadata for item in repeated),
        )

    def truncated_prompts(self) -> int:
        """How many groups' prompts the text encoder had to cut."""
        return sum(group.truncated for group in self.groups)


class RolloutDriver:
    """Runs rounds of a fixed geometry.

    Args:
        adapter: the model family.
        sampling: the ``--sampling-config``.
        scheduler_config: the checkpoint's ``scheduler_config.json``.
        fleet: the engines.
        artifact_root: root of sidecars and images.
        task: subfolder of the root.
        generation_seed: base of every seed.
        wave_size: groups per engine and wave; 0 sends everything in one wave.
        retention: rollout folders to keep; 0 or less keeps all.
    """

    def __init__(
        self,
        *,
        adapter: GenerativeModelAdapter,
        sampling: SamplingConfig,
        scheduler_config: Mapping[str, Any],
        fleet: EngineFleet,
        artifact_root: Path,
        task: str,
        generation_seed: int,
        wave_size: int = 0,
        retention: int = 2,
    ) -> None:
        self._adapter = adapter
        self._sampling = sampling
        self._scheduler_config = scheduler_config
        self._fleet = fleet
        self._root = artifact_root
        self._task = task
        self._seed = generation_seed
        settings = {"sampling": sampling.model_dump(mode="json"), "scheduler": dict(scheduler_config)}
        self._fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        self._wave_size = wave_size
        self._retention = retention

    def rollout(
        self,
        prompts: Sequence[PromptRecord],
        *,
        rollout_id: int,
        samples_per_prompt: int,
        policy_version: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> RolloutBatch:
        """Sample a training round and write its artifacts.

        Args:
            prompts: one per group.
            rollout_id: the round.
            samples_per_prompt: candidates K per group.
            policy_version: the actor's; engines and responses must have the same.
            progress: called with (groups done, groups in all) after each wave.

        Raises:
            RolloutError: no SDE step is configured, a response does not fit, or an engine failed.
            ArtifactError: the artifacts could not be written.
        """
        steps = self._sampling.resolve_sde_indices(rollout_id)
        if not steps:
            raise RolloutError(
                "no SDE step is configured: a trajectory without one has nothing to train",
                where="--sampling-config",
                expected="sde_indices, num_sde_steps, or sde_resample_per_rollout with num_sde_steps",
            )
        prune_stale_artifacts(self._root, self._task, rollout_id=rollout_id, keep=self._retention)
        folder = rollout_folder(self._root, self._task, rollout_id)
        return self._run(
            prompts,
            steps,
            folder,
            rollout_id=rollout_id,
            samples=samples_per_prompt,
            version=policy_version,
            progress=progress,
        )

    def evaluate(
        self,
        prompts: Sequence[PromptRecord],
        *,
        step: int,
        samples_per_prompt: int,
        policy_version: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> RolloutBatch:
        """Sample held-out prompts with the deterministic ODE and the same noise in every pass; write images only.

        Args:
            step: rollouts trained so far, for the folder's name; other arguments as `rollout`.
        """
        folder = rollout_folder(self._root / "eval", self._task, step)
        return self._run(
            prompts, (), folder, rollout_id=None, samples=samples_per_prompt, version=policy_version, progress=progress
        )

    def _run(
        self,
        prompts: Sequence[PromptRecord],
        sde_indices: tuple[int, ...],
        folder: Path,
        *,
        rollout_id: int | None,
        samples: int,
        version: int,
        progress: Callable[[int, int], None] | None,
    ) -> RolloutBatch:
        plans = plan_groups(
            prompts,
            rollout_id=rollout_id,
            samples_per_prompt=samples,
            sampling=self._sampling,
            generation_seed=self._seed,
            policy_version=version,
            sde_indices=sde_indices,
        )
        requests = [
            self._adapter.build_rollout_request(plan, self._sampling, scheduler_config=self._scheduler_config)
            for plan in plans
        ]
        groups: list[GroupResult] = []
        for wave in self._waves(requests):
            # Round robin, so that the engines of a last, shorter wave differ by one group at most.
            assignments = [wave[engine :: self._fleet.size] for engine in range(self._fleet.size)]
            answers = self._fleet.generate(assignments)
            responses: list[RolloutResponse | None] = [None] * len(wave)
            for engine, (asked, answered) in enumerate(zip(assignments, answers, strict=True)):
                if len(asked) != len(answered):
                    raise RolloutError(f"engine {engine} answered {len(answered)} of {len(asked)} groups")
                responses[engine :: self._fleet.size] = answered
            for request, response in zip(wave, responses, strict=True):
                assert response is not None
                groups.append(self._accept(request, response, prompts[request.plan.group_index], folder))
            if progress is not None:
                progress(len(groups), len(requests))
        return RolloutBatch(
            rollout_id=rollout_id,
            policy_version=version,
            sde_indices=sde_indices,
            samples_per_prompt=samples,
            groups=tuple(groups),
            sampling_fingerprint=self._fingerprint,
        )

    def _waves(self, requests: list[RolloutRequest]) -> list[list[RolloutRequest]]:
        size = self._wave_size * self._fleet.size or max(len(requests), 1)
        return [requests[start : start + size] for start in range(0, len(requests), size)]

    def _accept(
        self, request: RolloutRequest, response: RolloutResponse, prompt: PromptRecord, folder: Path
    ) -> GroupResult:
        where = f"group {request.plan.group_index} of rollout {request.plan.rollout_id}, engine {response.engine}"
        if request.sigmas is not None:
            difference = schedule_difference(request.sigmas, tuple(response.sigmas.tolist()))
            if difference is not None:
                raise RolloutError(f"schedule mismatch: {difference}", where=where)
        if response.policy_version != request.plan.policy_version:
            raise RolloutError(
                f"policy version mismatch: sampled with {response.policy_version}",
                where=where,
                expected=str(request.plan.policy_version),
            )
        missing = sorted(set(self._adapter.artifact_tracks()) - set(response.media))
        if missing:
            raise RolloutError(f"response lacks media tracks {missing}", where=where)
        self._adapter.validate_rollout_response(request, response)
        sidecar = None
        if request.plan.sde_indices:
            sidecar = group_path(folder, request.plan.group_index)
            write_sidecar(sidecar, self._adapter.pack_trajectory(request, response))
        for slot, pixels in enumerate(response.media.get("image", ())):
            write_image(folder, request.plan.group_index, slot, pixels)
        return GroupResult(
            group_index=request.plan.group_index,
            prompt=prompt,
            media=dict(response.media),
            sidecar=sidecar,
            truncated=bool(response.truncated_prompts),
        )
