"""The sampler follows the driver's recipe: start noise, step noise, sigmas, and the ``dance`` transition.

A request carries its recipe in ``diffusers_kwargs``; without one nothing is sampled (`control.guard_forward`). Every
random number comes from the recipe's seeds through `relax_sdk.flow.seeded_noise`, so a candidate does not depend on
its batch mates. What is left to SGLang: text encoding, the transformer, the ``sde`` and ``cps`` transitions, decoding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from relax_sdk.flow import seeded_noise, transition_moments
from relax_sdk.protocols import SDE_TYPES
from relax_sdk.rollout.sglang.session import RECIPE_KEY
from relax_sdk.rollout.sglang.targets import PREPARE_LATENTS, PREPARE_TIMESTEPS, SDE_STEP, STEP_NOISE

__all__ = ["SAMPLER_HOOKS", "Recipe", "recipe_of"]

_STEP = "_relax_step"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the driver fixed for the K candidates of one request.

    Args:
        initial_noise_seeds: K seeds of x_T.
        denoise_seeds: step -> K seeds, for the steps with noise.
        latent_shape: in which x_T of one candidate is drawn.
        sde_type: ``"sde"``, ``"dance"`` or ``"cps"``.
        eta: the noise level.
        sigmas: T + 1 values, or None for SGLang's own schedule.
        policy_version: of the weights that the request is for.
    """

    initial_noise_seeds: tuple[int, ...]
    denoise_seeds: Mapping[int, tuple[int, ...]]
    latent_shape: tuple[int, ...]
    sde_type: str
    eta: float
    sigmas: tuple[float, ...] | None
    policy_version: int

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Recipe:
        """From a request's JSON values.

        Raises:
            ValueError: a value is missing, unknown, or does not fit the others.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) != names:
            raise ValueError(f"recipe has {sorted(values)}, expected {sorted(names)}")
        recipe = cls(
            initial_noise_seeds=tuple(int(seed) for seed in values["initial_noise_seeds"]),
            denoise_seeds={
                int(step): tuple(int(seed) for seed in seeds) for step, seeds in values["denoise_seeds"].items()
            },
            latent_shape=tuple(int(size) for size in values["latent_shape"]),
            sde_type=str(values["sde_type"]),
            eta=float(values["eta"]),
            sigmas=None if values["sigmas"] is None else tuple(float(sigma) for sigma in values["sigmas"]),
            policy_version=int(values["policy_version"]),
        )
        if recipe.sde_type not in SDE_TYPES:
            raise ValueError(f"recipe has sde_type {recipe.sde_type!r}, expected one of {', '.join(SDE_TYPES)}")
        count = len(recipe.initial_noise_seeds)
        wrong = [step for step, seeds in recipe.denoise_seeds.items() if len(seeds) != count]
        if count == 0 or wrong:
            raise ValueError(f"recipe has {count} start seeds, and another number of seeds at steps {wrong}")
        return recipe


def recipe_of(batch: Any) -> Recipe:
    """The recipe of a request, parsed once.

    Raises:
        ValueError: there is none, or it does not fit.
    """
    extra = batch.extra
    parsed: Recipe | None = extra.get(RECIPE_KEY)
    if parsed is None:
        values = (extra.get("diffusers_kwargs") or {}).get(RECIPE_KEY)
        if values is None:
            raise ValueError("a request without a recipe; this server serves its engine alone")
        parsed = extra[RECIPE_KEY] = Recipe.parse(values)
    return parsed


def draw_start_noise(original: Callable[..., Any], stage: Any, batch: Any, server_args: Any) -> Any:
    """AROUND ``LatentPreparationStage.forward``: x_T from the recipe's seeds, in SGLang's shape and dtype."""
    recipe = recipe_of(batch)
    if batch.latents is not None:
        raise ValueError("a request with a recipe came with latents of its own")
    count = batch.batch_size
    if count != len(recipe.initial_noise_seeds):
        raise ValueError(f"recipe for {len(recipe.initial_noise_seeds)} candidates in a batch of {count}")
    frames = stage.get_forward_latent_num_frames(batch, server_args)
    spec = stage.get_latent_preparation_spec(batch, server_args, count, frames, "cpu")
    noise = seeded_noise(recipe.initial_noise_seeds, recipe.latent_shape)
    if noise.numel() != math.prod(spec.shape):
        raise ValueError(f"recipe draws x_T as {list(noise.shape)}, the pipeline wants {list(spec.shape)}")
    batch.latents = noise.reshape(tuple(spec.shape)).to(spec.dtype)
    return original(stage, batch, server_args)


def use_driver_sigmas(original: Callable[..., Any], stage: Any, batch: Any, server_args: Any) -> Any:
    """AROUND ``TimestepPreparationStage.forward``: the driver's sigmas as they are, without a second shift."""
    batch = original(stage, batch, server_args)
    recipe = recipe_of(batch)
    if recipe.sigmas is not None:
        scheduler = batch.scheduler
        if len(recipe.sigmas) != len(scheduler.sigmas):
            raise ValueError(f"recipe has {len(recipe.sigmas)} sigmas, the scheduler {len(scheduler.sigmas)}")
        old = scheduler.timesteps
        sigmas = torch.tensor(recipe.sigmas, dtype=torch.float32)
        scale = float(scheduler.config.num_train_timesteps)
        scheduler.sigmas = sigmas.to(scheduler.sigmas.device)
        scheduler.timesteps = (sigmas[:-1] * scale).to(old)
        batch.timesteps = scheduler.timesteps
    return batch


def draw_step_noise(original: Callable[..., Any], controller: Any, batch: Any, model_output: Tensor) -> Tensor:
    """AROUND ``FlowRolloutController._rollout_variance_noise``: row k from the candidate's own seed of this step."""
    recipe = recipe_of(batch)
    step = getattr(controller, _STEP)
    if step not in recipe.denoise_seeds:
        raise ValueError(f"step {step} draws noise, but the recipe has seeds for {sorted(recipe.denoise_seeds)} only")
    shape = tuple(controller.latents_shape)
    noise = seeded_noise(recipe.denoise_seeds[step], shape[1:], device=model_output.device).to(model_output.dtype)
    # SGLang reads the whole noise from its buffer for the log-probability, also when ranks hold parts of it.
    controller.noise_buffer = noise
    return _shard(controller, batch, noise, tuple(model_output.shape))


def take_step(
    original: Callable[..., Tensor],
    controller: Any,
    batch: Any,
    model_output: Tensor,
    sample: Tensor,
    current_sigma: Tensor,
    next_sigma: Tensor,
    step_index: int,
) -> Tensor:
    """AROUND ``FlowRolloutController.flow_sde_sampling``: remembers the step, and adds the ``dance`` transition."""
    recipe = recipe_of(batch)
    setattr(controller, _STEP, step_index)
    trained = controller.sde_step_indices is None or step_index in controller.sde_step_indices
    _require_recipe(controller, recipe)
    if recipe.sde_type != "dance" or not trained:
        stock: Tensor = original(
            controller,
            batch=batch,
            model_output=model_output,
            sample=sample,
            current_sigma=current_sigma,
            next_sigma=next_sigma,
            step_index=step_index,
        )
        return stock
    if controller.debug_mode or controller.log_prob_no_const:
        raise ValueError("dance records neither debug tensors nor log-probabilities without constants")
    model_output, sample = model_output.float(), sample.float()
    # Through the class attribute, so that the hook above it applies.
    noise = controller._rollout_variance_noise(batch, model_output)
    whole = controller.noise_buffer
    mean, tau = transition_moments(
        sample,
        model_output,
        current_sigma.reshape(1),
        next_sigma.reshape(1),
        eta=controller.noise_level,
        sde_type="dance",
        sigma_clamp=controller.sigma_max,
    )
    count = float(math.prod(whole.shape[1:]))
    density = -whole.square() / 2 - torch.log(tau) - 0.5 * math.log(2 * math.pi)
    controller.append_local_rollout_log_probs(
        density.flatten(1).sum(dim=1), density.new_full((density.shape[0],), count)
    )
    drawn: Tensor = mean + tau * noise
    return drawn


def _require_recipe(controller: Any, recipe: Recipe) -> None:
    """Refuse to sample otherwise than the driver said: an argument lost on the way would bias every log-probability."""
    stock = "cps" if recipe.sde_type == "cps" else "sde"
    steps = sorted(recipe.denoise_seeds)
    found = (controller.sde_type, float(controller.noise_level), sorted(controller.sde_step_indices or ()))
    if controller.sde_step_indices is None or found != (stock, recipe.eta, steps):
        raise ValueError(
            f"the sampler has type {found[0]!r}, noise level {found[1]} and SDE steps {controller.sde_step_indices}; "
            f"the recipe says {stock!r}, {recipe.eta} and {steps}"
        )


def _shard(controller: Any, batch: Any, noise: Tensor, expected: tuple[int, ...]) -> Tensor:
    local: Tensor = controller.shard_for_sp(batch, noise)
    if tuple(local.shape) != expected:
        raise ValueError(f"this rank's part of the noise is {list(local.shape)}, its latents are {list(expected)}")
    return local


SAMPLER_HOOKS: Mapping[str, Callable[..., Any]] = {
    PREPARE_LATENTS: draw_start_noise,
    PREPARE_TIMESTEPS: use_driver_sigmas,
    STEP_NOISE: draw_step_noise,
    SDE_STEP: take_step,
}
"""Targets and their AROUND hooks."""
