"""The records that pass between rooms.

Axis legend: K candidates of one prompt group; T denoising steps; S trained SDE steps; N latent tokens; C channels
of a token; B rows of a batch; H, W pixels. sigma runs from 1 (noise) to 0 (image).
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from relax_sdk.protocols.base import Record
from relax_sdk.protocols.sampling import SdeType
from relax_sdk.protocols.tensors import Tensor, TensorSpec

__all__ = [
    "GroupPlan",
    "PromptRecord",
    "ReplayBatch",
    "RewardBatch",
    "RewardScores",
    "RolloutRequest",
    "RolloutResponse",
    "TrainRow",
    "Trajectory",
]


class PromptRecord(Record):
    """One line of a prompt file. ``prompt_id`` comes from ``metadata`` when it is there, else from the position."""

    prompt: str
    prompt_id: str
    metadata: dict[str, Any] = Field(default_factory=dict)


class GroupPlan(Record):
    """What the driver decided for one prompt group before any model runs.

    Every random number of a candidate is fixed here: ``initial_noise_seeds[k]`` draws its x_T and
    ``denoise_seeds[k][i]`` its noise at step i, so that a candidate depends on nothing but its own identity and the
    weights. ``rollout_id`` is None for held-out evaluation.
    """

    rollout_id: int | None
    group_index: int = Field(ge=0)
    prompt: str
    sample_ids: tuple[str, ...] = Field(min_length=1)
    initial_noise_seeds: tuple[int, ...]
    denoise_seeds: tuple[tuple[int, ...], ...]
    engine_seed: int
    sde_indices: tuple[int, ...]
    policy_version: int = Field(ge=0)

    @model_validator(mode="after")
    def _one_recipe_per_candidate(self) -> Self:
        counts = {len(self.sample_ids), len(self.initial_noise_seeds), len(self.denoise_seeds)}
        if len(counts) != 1:
            raise ValueError(
                f"sample_ids ({len(self.sample_ids)}), initial_noise_seeds ({len(self.initial_noise_seeds)}) and "
                f"denoise_seeds ({len(self.denoise_seeds)}) must have one entry per candidate"
            )
        if len(set(self.sample_ids)) != len(self.sample_ids):
            raise ValueError(f"sample_ids must differ within a group, came {list(self.sample_ids)}")
        return self


class RolloutRequest(Record):
    """One group's order to an engine: the plan, plus what the model family adds to it."""

    plan: GroupPlan
    height: int = Field(gt=0)
    width: int = Field(gt=0)
    num_inference_steps: int = Field(ge=2)
    guidance_scale: float = 1.0
    negative_prompt: str = ""
    eta: float = Field(gt=0)
    sde_type: SdeType
    sigmas: tuple[float, ...] | None = Field(
        None, description="The driver's schedule, T + 1 values from sigma_0 down to 0; None lets the engine compute."
    )
    latent_shape: tuple[int, ...] = Field(description="Shape in which x_T of one candidate is drawn.")

    @model_validator(mode="after")
    def _schedule(self) -> Self:
        if self.sigmas is not None:
            if len(self.sigmas) != self.num_inference_steps + 1:
                raise ValueError(
                    f"sigmas: expected T+1 = {self.num_inference_steps + 1} values, came {len(self.sigmas)}"
                )
            for step, (here, after) in enumerate(zip(self.sigmas, self.sigmas[1:], strict=False)):
                if not here > after:
                    raise ValueError(f"sigmas: not strictly decreasing at step {step}: {here} then {after}")
            if self.sigmas[-1] != 0.0:
                raise ValueError(f"sigmas: the last value must be 0, came {self.sigmas[-1]}")
        return self


class RolloutResponse(Record):
    """What an engine returns for one group.

    ``trajectory_latents[k, i]`` is x_i exactly as the engine held it, i = 0 (noise) .. T (image).
    ``rollout_log_probs[k, i]`` is the engine's own log-probability of step i, 0 at ODE steps.
    ``conditions`` are the frozen text conditions of the group's prompt, without a batch axis.
    ``media`` maps a track (``"image"``) to decoded uint8 pixels.
    """

    trajectory_latents: Annotated[Tensor, TensorSpec("K T+1 N C", "float32")]
    sigmas: Annotated[Tensor, TensorSpec("T+1", "float32")]
    timesteps: Annotated[Tensor, TensorSpec("T", "float32")]
    rollout_log_probs: Annotated[Tensor, TensorSpec("K T", "float32")]
    sde_indices: tuple[int, ...]
    conditions: Annotated[dict[str, Tensor], TensorSpec("...")]
    media: Annotated[dict[str, Tensor], TensorSpec("K 3 H W", "uint8")]
    height: int
    width: int
    policy_version: int
    engine: str = Field(description="Name of the engine that made it, for messages.")
    truncated_prompts: int = Field(0, ge=0, description="1 when the text encoder had to cut this prompt.")


class Trajectory(Record):
    """A group as the trainer needs it, and as the sidecar stores it: ``common.*``, ``conditions.*``, ``tracks.*``.

    Only the S trained steps are kept: ``latents[k, s]`` is x at step ``sde_indices[s]`` and ``next_latents[k, s]``
    the x after it.
    """

    sigmas: Annotated[Tensor, TensorSpec("T+1", "float32")]
    timesteps: Annotated[Tensor, TensorSpec("T", "float32")]
    sde_indices: Annotated[Tensor, TensorSpec("S", "int64")]
    sample_indices: Annotated[Tensor, TensorSpec("K", "int64")]
    rollout_log_probs: Annotated[Tensor, TensorSpec("K S", "float32")]
    latents: Annotated[Tensor, TensorSpec("K S N C", "float32")]
    next_latents: Annotated[Tensor, TensorSpec("K S N C", "float32")]
    conditions: Annotated[dict[str, Tensor], TensorSpec("...")]
    track: str = Field("image", description="Name of the latent track, as in ``tracks.<track>.latents``.")
    height: int
    width: int
    policy_version: int
    group_index: int
    rollout_id: int | None
    sde_type: SdeType
    eta: float
    sigma_clamp: float = Field(description="sigma~: what 1 - sigma uses where sigma is 1, at step 0.")
    seed_hash: str = Field(description="sha256 of every seed of the group, for tracing.")

    @model_validator(mode="after")
    def _steps_exist(self) -> Self:
        steps = self.sde_indices.tolist()
        last = len(self.timesteps) - 1
        if steps != sorted(set(steps)) or (steps and not 0 <= steps[0] <= steps[-1] <= last):
            raise ValueError(f"sde_indices: expected increasing steps in 0..{last}, came {steps}")
        return self


class ReplayBatch(Record):
    """Rows for one forward of the transformer. ``conditions`` has one mapping per row (rows may share one)."""

    latents: Annotated[Tensor, TensorSpec("B N C", "float32")]
    sigmas: Annotated[Tensor, TensorSpec("B", "float32")]
    conditions: tuple[dict[str, Any], ...]
    height: int
    width: int

    @model_validator(mode="after")
    def _one_condition_per_row(self) -> Self:
        if len(self.conditions) != self.latents.shape[0]:
            raise ValueError(f"conditions: expected B = {self.latents.shape[0]} mappings, came {len(self.conditions)}")
        return self


class RewardBatch(Record):
    """Media to score. ``prompts[b]`` belongs to ``tracks[...][b]``, whatever group either came from."""

    prompts: tuple[str, ...]
    tracks: Annotated[dict[str, Tensor], TensorSpec("B 3 H W", "uint8")]
    metadata: tuple[dict[str, Any], ...] = ()

    @model_validator(mode="after")
    def _paired(self) -> Self:
        for name, track in self.tracks.items():
            if track.shape[0] != len(self.prompts):
                raise ValueError(f"tracks[{name!r}]: expected B = {len(self.prompts)} rows, came {track.shape[0]}")
        if self.metadata and len(self.metadata) != len(self.prompts):
            raise ValueError(f"metadata: expected B = {len(self.prompts)} entries, came {len(self.metadata)}")
        return self


class RewardScores(Record):
    """Raw reward components by name, one float per row of the batch, in its order."""

    components: dict[str, tuple[float, ...]]
    truncated_prompts: int = Field(0, ge=0)


class TrainRow(Record):
    """One candidate as it travels through TransferQueue: numbers and a path, never a large tensor."""

    rollout_id: int = Field(ge=0)
    group_index: int = Field(ge=0)
    slot: int = Field(ge=0, description="The candidate's position in its group.")
    advantage: float
    rewards: dict[str, float]
    sidecar: str
    policy_version: int = Field(ge=0)
    sampling_fingerprint: str = Field("", description="sha256 of the sampler's settings and the noise schedule's.")
    weight_manifest_hash: str = Field(
        "", description="`ordered_name_shape_hash` of the sync that made the sampling weights; empty for the base."
    )
