"""Records to SGLang's request, and SGLang's answer to records; an answer that lacks anything is refused as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_sdk.errors import RolloutError
from relax_sdk.flow import seeded_noise
from relax_sdk.protocols import RolloutRequest, RolloutResponse
from relax_sdk.rollout.sglang.session import RECIPE_KEY

__all__ = ["ENGINE_NAME", "decode_tensors", "rollout_body", "rollout_response"]

ENGINE_NAME = "sglang"
_NEEDED = (
    "generated_output",
    "rollout_log_probs",
    "denoising_env.pos_cond_kwargs",
    "dit_trajectory.latents",
    "dit_trajectory.timesteps",
    "dit_trajectory.sigmas",
)
# x_T differs from the recipe's noise by one rounding to the engine's dtype: half a unit in the last place.
_ROUNDING = {"bf16": 2.0**-8, "fp32": 1e-6}


def rollout_body(request: RolloutRequest, candidates: slice, *, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON body of ``POST /rollout/generate`` for some candidates of one group: outputs of one prompt.

    ``rollout_sde_type`` is one that SGLang knows; the recipe holds the real one. An evaluation has no SDE step.
    """
    plan = request.plan
    steps = list(plan.sde_indices)
    return {
        "prompt": plan.prompt,
        "negative_prompt": request.negative_prompt,
        # Not used: every random number comes from the recipe. SGLang wants a seed all the same.
        "seed": plan.engine_seed % 2**31,
        "generator_device": "cpu",
        "width": request.width,
        "height": request.height,
        "num_inference_steps": request.num_inference_steps,
        "num_outputs_per_prompt": len(plan.sample_ids[candidates]),
        "guidance_scale": request.guidance_scale,
        "true_cfg_scale": request.guidance_scale,
        "rollout": True,
        "rollout_sde_type": "cps" if request.sde_type == "cps" else "sde",
        "rollout_noise_level": request.eta,
        "rollout_log_prob_no_const": False,
        "rollout_debug_mode": False,
        "rollout_return_denoising_env": True,
        "rollout_return_dit_trajectory": True,
        "rollout_sde_step_indices": steps,
        "suppress_logs": True,
        "extra_sampling_params": {
            **sampling_params,
            # Fast paths that round elsewhere would move the log-probabilities away from the replay's.
            "quality": "exact",
            "diffusers_kwargs": {
                RECIPE_KEY: {
                    "initial_noise_seeds": list(plan.initial_noise_seeds[candidates]),
                    "denoise_seeds": {
                        str(step): [seeds[step] for seeds in plan.denoise_seeds[candidates]] for step in steps
                    },
                    "latent_shape": list(request.latent_shape),
                    "sde_type": request.sde_type,
                    "eta": request.eta,
                    "sigmas": None if request.sigmas is None else list(request.sigmas),
                    "policy_version": plan.policy_version,
                }
            },
        },
    }


def decode_tensors(value: Any) -> Any:
    """Replace every tensor envelope in a decoded answer by its tensor.

    Raises:
        RolloutError: an envelope that cannot be read, or whose shape is not the one it states.
    """
    if isinstance(value, dict):
        if value.get("__tensor__"):
            return _tensor(value)
        return {key: decode_tensors(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_tensors(item) for item in value]
    return value


def rollout_response(
    request: RolloutRequest, items: Sequence[Mapping[str, Any]], *, adapter: Any, dtype: str
) -> RolloutResponse:
    """One group's record from SGLang's outputs.

    Args:
        request: what was asked for.
        items: decoded outputs, one per candidate.
        adapter: the model family's; reads the frozen conditions and packs noise.
        dtype: ``"bf16"`` or ``"fp32"``, the engine's, which x_T was rounded to.

    Raises:
        RolloutError: listing everything that is missing or that contradicts the request.
    """
    plan = request.plan
    problems = (
        [] if len(items) == len(plan.sample_ids) else [f"{len(items)} outputs for {len(plan.sample_ids)} candidates"]
    )
    for index, item in enumerate(items):
        problems += [f"output {index} lacks {path}" for path in _NEEDED if _at(item, path) is None]
    _refuse(problems, plan.group_index)
    start = adapter.pack_initial_noise(seeded_noise(plan.initial_noise_seeds, request.latent_shape)).float()
    _refuse(_shape_problems(request, items, tokens=tuple(start.shape[1:])), plan.group_index)
    latents = torch.stack([_at(item, "dit_trajectory.latents").float() for item in items])
    sigmas = [_at(item, "dit_trajectory.sigmas").float() for item in items]
    conditions = [adapter.conditions_from_sglang(_at(item, "denoising_env.pos_cond_kwargs")) for item in items]
    # x_T as the engine recorded it must be the recipe's, to one rounding: else a hook did not take hold.
    strange = (latents[:, 0] - start).abs() > _ROUNDING[dtype] * start.abs() + 1e-6
    problems = [f"candidate {index} did not start from its own noise" for index, row in enumerate(strange) if row.any()]
    for index, (own, condition) in enumerate(zip(sigmas, conditions, strict=True)):
        if not torch.equal(own, sigmas[0]):
            problems.append(f"candidate {index} was sampled with other sigmas than candidate 0")
        if condition.keys() != conditions[0].keys() or any(
            not torch.equal(condition[name], conditions[0][name]) for name in condition
        ):
            problems.append(f"candidate {index} was sampled with other text conditions than candidate 0")
    _refuse(problems, plan.group_index)
    return RolloutResponse(
        trajectory_latents=latents,
        sigmas=sigmas[0],
        timesteps=_at(items[0], "dit_trajectory.timesteps").float()[:-1],
        rollout_log_probs=torch.stack([item["rollout_log_probs"].float() for item in items]),
        sde_indices=plan.sde_indices,
        conditions=conditions[0],
        media={"image": torch.stack([_pixels(item["generated_output"]) for item in items])},
        height=request.height,
        width=request.width,
        policy_version=plan.policy_version,
        engine=ENGINE_NAME,
        truncated_prompts=int(adapter.sglang_text_was_cut(conditions[0])),
    )


def _shape_problems(
    request: RolloutRequest, items: Sequence[Mapping[str, Any]], *, tokens: tuple[int, ...]
) -> list[str]:
    """Every tensor of every output that has another shape than the request's, or holds NaN; ``tokens`` is (N, C)."""
    steps = request.num_inference_steps
    shapes = {
        "generated_output": ("3, 1, H, W", (3, 1, request.height, request.width)),
        "rollout_log_probs": ("T", (steps,)),
        "dit_trajectory.latents": ("T+1, N, C", (steps + 1, *tokens)),
        # SGLang records the final state with the last timestep once more.
        "dit_trajectory.timesteps": ("T+1", (steps + 1,)),
        "dit_trajectory.sigmas": ("T+1", (steps + 1,)),
    }
    return [
        f"output {index}: {path} {problem}"
        for index, item in enumerate(items)
        for path, (axes, shape) in shapes.items()
        if (problem := _tensor_problem(_at(item, path), axes, shape)) is not None
    ]


def _tensor_problem(value: Any, axes: str, shape: tuple[int, ...]) -> str | None:
    """What is wrong with one tensor of an answer."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    if tuple(value.shape) != shape:
        return f"has shape {list(value.shape)}, expected [{axes}] = {list(shape)}"
    return None if bool(value.isfinite().all()) else "holds NaN or infinite values"


def _pixels(output: Tensor) -> Tensor:
    """[3, 1, H, W] in 0..1 to [3, H, W] uint8."""
    return output[:, 0].float().clamp(0, 1).mul(255).round().to(torch.uint8)


def _at(item: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(item, Mapping):
            return None
        item = item.get(key)
    return item


def _refuse(problems: list[str], group: int) -> None:
    if problems:
        raise RolloutError(
            f"SGLang's answer for group {group} cannot be trained on: " + "; ".join(problems), where="engine 'sglang'"
        )


def _tensor(envelope: Mapping[str, Any]) -> Tensor:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensor = load(envelope["data"])["t"]
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise RolloutError(f"a tensor of SGLang's answer cannot be read: {error}") from error
    if list(tensor.shape) != envelope.get("shape"):
        raise RolloutError(f"a tensor says shape {envelope.get('shape')}, it has {list(tensor.shape)}")
    return tensor
