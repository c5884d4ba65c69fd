"""`QwenImageAdapter`: Qwen-Image text-to-image for the trainer and for the embedded engine.

Text-to-image only, without classifier-free guidance: replay is one conditional forward. torch and diffusers are
imported by the methods that compute; preflight and the driver's checks run without them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from relax_qwen_image.folder import PIPELINE_PARTS, TRAIN_PARTS, folder_problems
from relax_qwen_image.geometry import (
    LATENT_CHANNELS,
    TOKEN_CHANNELS,
    latent_shape,
    noise_shape_problem,
    pack_latents,
    size_problems,
    token_grid,
)
from relax_qwen_image.loading import TrainBundle, load_transformer, require_folder
from relax_qwen_image.response import response_problems
from relax_qwen_image.text import MAX_TEXT_TOKENS, PREFIX_TOKENS
from relax_sdk import ConfigError, RecordError, RolloutError
from relax_sdk.protocols import RolloutRequest, Trajectory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from relax_qwen_image.embedded import QwenImageEmbeddedModel
    from relax_sdk.protocols import GroupPlan, ReplayBatch, RolloutResponse, SamplingConfig

__all__ = ["QwenImageAdapter"]


class QwenImageAdapter:
    """A `GenerativeModelAdapter`, `EmbeddedModelAdapter` and `SGLangModelAdapter` (see `relax_sdk.protocols`)."""

    family = "qwen_image"
    sglang_model_id = "Qwen-Image"
    # SGLang counts the template's 34 dropped tokens too; its own default would keep 34 fewer of the prompt.
    sglang_sampling_params: Mapping[str, Any] = MappingProxyType(
        {"max_sequence_length": PREFIX_TOKENS + MAX_TEXT_TOKENS}
    )
    supported_tasks: tuple[str, ...] = ("t2i",)
    lora_target_modules: tuple[str, ...] = (
        # image stream
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        # text stream
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )
    block_module_names: tuple[str, ...] = ("transformer_blocks",)

    def load_train_model(self, model_path: str, *, revision: str | None, dtype: torch.dtype) -> TrainBundle:
        """Load ``transformer/`` on the CPU; the other folders are not read and may be absent.

        Args:
            model_path: a local folder in the layout of the published Qwen-Image checkpoint.
            revision: kept for the record; selects nothing inside a local folder.
            dtype: of all parameters.

        Raises:
            ConfigError: the folder or a file in it is missing, broken, or does not fit the model.
        """
        require_folder(model_path, TRAIN_PARTS)
        return TrainBundle(transformer=load_transformer(model_path, revision=revision, dtype=dtype))

    def check_model_path(self, model_path: str, *, embedded: bool = True) -> list[str]:
        """What a model folder lacks, found without loading it (imports no torch).

        Args:
            model_path: a local folder.
            embedded: also ask for what the embedded engine reads: VAE, text encoder, tokenizer.
        """
        return folder_problems(model_path, PIPELINE_PARTS if embedded else (*TRAIN_PARTS, "scheduler"))

    def validate_sampling(self, sampling: SamplingConfig) -> list[str]:
        """Sizes off the 16-pixel grid, guidance other than 1.0, an x_T shape that does not fit. Imports no torch."""
        problems = size_problems(sampling.height, sampling.width)
        if sampling.guidance_scale != 1.0:
            problems.append(
                f"guidance_scale = {sampling.guidance_scale} must be 1.0: replay runs one conditional forward, so a "
                "policy sampled with guidance would not be the one that is trained"
            )
        if not problems and sampling.init_noise_latent_shape is not None:
            shape_problem = noise_shape_problem(sampling.init_noise_latent_shape, sampling.height, sampling.width)
            problems += [shape_problem] if shape_problem else []
        return problems

    def build_rollout_request(
        self, plan: GroupPlan, sampling: SamplingConfig, *, scheduler_config: Mapping[str, Any]
    ) -> RolloutRequest:
        """Complete a group's plan: geometry, the driver's schedule (with ``driver_sigmas``), the shape of x_T.

        Raises:
            ConfigError: everything `validate_sampling` finds, or an incomplete ``scheduler_config``.
        """
        problems = self.validate_sampling(sampling)
        if problems:
            raise ConfigError("Qwen-Image cannot sample this: " + "; ".join(problems), where="--sampling-config")
        sigmas = None
        if sampling.driver_sigmas:
            from relax_sdk.flow import flow_match_sigmas

            rows, columns = token_grid(sampling.height, sampling.width)
            sigmas = flow_match_sigmas(sampling.num_inference_steps, rows * columns, scheduler_config)
        return RolloutRequest(
            plan=plan,
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            guidance_scale=sampling.guidance_scale,
            eta=sampling.eta,
            sde_type=sampling.sde_type,
            sigmas=sigmas,
            latent_shape=sampling.init_noise_latent_shape or latent_shape(sampling.height, sampling.width),
        )

    def validate_rollout_response(self, request: RolloutRequest, response: RolloutResponse) -> None:
        """Refuse a response that does not answer its request.

        Checked: candidates, T+1 latents on the request's token grid, the schedule against the driver's (within float32
        rounding) and against the timesteps, log-probabilities at exactly the SDE steps, conditions, the image, size
        and policy version.

        Raises:
            RolloutError: listing everything that is missing or differs.
        """
        problems = response_problems(request, response)
        if problems:
            plan = request.plan
            raise RolloutError(
                f"the response for group {plan.group_index} does not answer its request: " + "; ".join(problems),
                where=f"engine {getattr(response, 'engine', None)!r}, prompt {plan.prompt!r}",
            )

    def pack_trajectory(self, request: RolloutRequest, response: RolloutResponse) -> Trajectory:
        """Keep the S trained steps of a validated response.

        Of the conditions only ``encoder_hidden_states`` is kept: masks and rotary tables that an engine may return
        beside it follow from lengths and sizes, and are made anew at replay.

        Raises:
            RolloutError: a training rollout without any SDE step, which would train nothing.
        """
        import torch

        plan = request.plan
        if plan.rollout_id is not None and not response.sde_indices:
            raise RolloutError(
                f"group {plan.group_index} of rollout {plan.rollout_id} has no SDE step to train",
                where="--sampling-config",
                expected="sde_indices, or num_sde_steps with sde_resample_per_rollout or sde_timestep_fraction",
            )
        steps = torch.tensor(response.sde_indices, dtype=torch.int64)
        at = steps.to(response.trajectory_latents.device)
        return Trajectory(
            sigmas=response.sigmas,
            timesteps=response.timesteps,
            sde_indices=steps,
            sample_indices=torch.arange(len(plan.sample_ids)),
            rollout_log_probs=response.rollout_log_probs[:, steps.to(response.rollout_log_probs.device)],
            latents=response.trajectory_latents[:, at],
            next_latents=response.trajectory_latents[:, at + 1],
            conditions={"encoder_hidden_states": response.conditions["encoder_hidden_states"]},
            track="image",
            height=request.height,
            width=request.width,
            policy_version=response.policy_version,
            group_index=plan.group_index,
            rollout_id=plan.rollout_id,
            sde_type=request.sde_type,
            eta=request.eta,
            # Engines replace 1 - sigma at sigma = 1 by that of the schedule's second value.
            sigma_clamp=float(response.sigmas[1]),
            seed_hash=_seed_hash(plan),
        )

    def replay_transition(self, model: Any, batch: ReplayBatch) -> Tensor:
        """One conditional forward of the transformer, plain, peft-wrapped or sharded.

        sigma (which is t / 1000) is handed over in float32 and rounded to the parameter dtype, once. Texts are
        padded on the right and masked only when their lengths differ; the text's rotary positions start after the
        picture's, so padding moves nothing.

        Returns:
            The velocity [B, N, 64], float32, on the model's device.

        Raises:
            RecordError: N or C does not fit the size, or a row has no ``encoder_hidden_states``.
        """
        rows, columns = token_grid(batch.height, batch.width)
        expected = (rows * columns, TOKEN_CHANNELS)
        if tuple(batch.latents.shape[1:]) != expected:
            raise RecordError(
                f"latents of a {batch.height}x{batch.width} picture have shape {list(batch.latents.shape)}",
                where="ReplayBatch.latents",
                expected=f"[B, {expected[0]}, {expected[1]}]",
            )
        parameter = _base_parameter(model)
        target = {"device": parameter.device, "dtype": parameter.dtype}
        text_BLD, mask_BL = _collate_text(batch.conditions, **target)
        velocity_BNC: Tensor
        (velocity_BNC,) = model(
            hidden_states=batch.latents.to(**target),
            timestep=batch.sigmas.to(**target),
            encoder_hidden_states=text_BLD,
            encoder_hidden_states_mask=mask_BL,
            img_shapes=[[(1, rows, columns)] for _ in batch.conditions],
            return_dict=False,
        )
        return velocity_BNC.float()

    def artifact_tracks(self) -> tuple[str, ...]:
        """One track, ``"image"``."""
        return ("image",)

    def weight_name_map(self) -> Callable[[str], str]:
        """The identity: diffusers and SGLang name Qwen-Image's parameters alike.

        Names that wrappers add (activation checkpointing, peft) are the trainer's to strip before this map.
        """
        return _same_name

    def load_embedded_model(
        self, model_path: str, *, revision: str | None, device: str, dtype: torch.dtype
    ) -> QwenImageEmbeddedModel:
        """Load the whole pipeline for sampling, frozen.

        Raises:
            ConfigError: a component is missing, broken, or does not fit.
        """
        from relax_qwen_image.embedded import load_embedded_model

        return load_embedded_model(model_path, revision=revision, device=device, dtype=dtype)

    def pack_initial_noise(self, noise: Tensor) -> Tensor:
        """Noise [K, *latent_shape] to tokens [K, N, 64], the pipeline's packing."""
        return pack_latents(noise.reshape(noise.shape[0], LATENT_CHANNELS, *noise.shape[-2:]))

    def conditions_from_sglang(self, pos_cond_kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Text states [L, D] of one candidate.

        SGLang masks padded text; a group has one prompt, so there is nothing to pad, and a mask is refused.

        Raises:
            RolloutError: no text states, or masked ones.
        """
        states = pos_cond_kwargs.get("encoder_hidden_states")
        if isinstance(states, list) and len(states) == 1:
            states = states[0]
        if getattr(states, "ndim", None) != 2:
            raise RolloutError(
                f"SGLang recorded no text states [L, D] (it recorded {sorted(pos_cond_kwargs)})", where="denoising_env"
            )
        mask = pos_cond_kwargs.get("encoder_hidden_states_mask")
        masks = mask if isinstance(mask, list) else [mask]
        if any(item is not None and not bool(item.all()) for item in masks):
            raise RolloutError("SGLang padded the text of a group of one prompt", where="denoising_env")
        return {"encoder_hidden_states": states.float()}

    def sglang_text_was_cut(self, conditions: Mapping[str, Tensor]) -> bool:
        """Whether the text states fill the window of 512 tokens, as those of a longer prompt do."""
        return len(conditions["encoder_hidden_states"]) >= MAX_TEXT_TOKENS


def _same_name(name: str) -> str:
    return name


def _seed_hash(plan: GroupPlan) -> str:
    seeds = [plan.engine_seed, plan.initial_noise_seeds, plan.denoise_seeds]
    return hashlib.sha256(json.dumps(seeds).encode()).hexdigest()


def _base_parameter(model: Any) -> Any:
    """A parameter of the base model: its device and dtype are what the forward computes in.

    LoRA weights are passed over, because their float32 masters sit beside a bfloat16 base. Under FSDP2's mixed
    precision the float32 inputs are rounded by FSDP itself, once, as here.
    """
    return next(parameter for name, parameter in model.named_parameters() if "lora_" not in name)


def _collate_text(
    conditions: Sequence[Mapping[str, Tensor]], *, device: Any, dtype: Any
) -> tuple[Tensor, Tensor | None]:
    """Stack text states [L_b, D] to [B, L, D]; the mask [B, L] (bool, True = text) is None when lengths agree."""
    import torch

    rows = []
    for index, condition in enumerate(conditions):
        if "encoder_hidden_states" not in condition:
            raise RecordError(
                f"row {index} has no 'encoder_hidden_states' (it has {sorted(condition)})",
                where=f"ReplayBatch.conditions[{index}]",
            )
        rows.append(condition["encoder_hidden_states"].to(device=device, dtype=dtype))
    lengths = [len(row) for row in rows]
    if len(set(lengths)) == 1:
        return torch.stack(rows), None
    text = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    positions = torch.arange(max(lengths), device=device)
    return text, positions < torch.tensor(lengths, device=device)[:, None]
