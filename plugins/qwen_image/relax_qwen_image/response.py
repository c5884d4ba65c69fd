"""Does an engine's response answer its request? Everything that is missing or differs, as texts."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from relax_qwen_image.geometry import TOKEN_CHANNELS, token_grid

if TYPE_CHECKING:
    from relax_sdk.protocols import RolloutRequest, RolloutResponse

__all__ = ["response_problems"]

_REQUIRED = ("trajectory_latents", "sigmas", "timesteps", "rollout_log_probs", "sde_indices", "conditions", "media")
TIMESTEP_SCALE = 1000.0
# Timesteps are sigma * 1000 rounded to float32 by the engine: one unit in the last place of 1000.
TIMESTEP_TOLERANCE = 2.0**-14


def response_problems(request: RolloutRequest, response: RolloutResponse) -> list[str]:
    """Compare a response with its request.

    Returns:
        One text per fault, in the order of the fields; empty when the response may be trained on.
    """
    problems = [f"{name} is missing" for name in _REQUIRED if getattr(response, name, None) is None]
    whole = not problems
    problems += _identity(request, response)
    # Shapes are compared only when everything is there, and values only when the shapes allow it.
    shapes = _shapes(request, response) if whole else []
    problems += shapes
    if whole and not shapes:
        problems += _schedule(request, response) + _log_probs(request, response)
    return problems


def _identity(request: RolloutRequest, response: RolloutResponse) -> list[str]:
    """What the engine echoes must be what was asked for."""
    problems = []
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("height", request.height, getattr(response, "height", None)),
        ("width", request.width, getattr(response, "width", None)),
        ("policy_version", request.plan.policy_version, getattr(response, "policy_version", None)),
    )
    for name, expected, came in pairs:
        if came is None:
            problems.append(f"{name} is missing")
        elif came != expected:
            problems.append(f"{name}: expected {expected}, came {came}")
    came_steps = getattr(response, "sde_indices", None)
    if came_steps is not None and tuple(came_steps) != request.plan.sde_indices:
        problems.append(f"sde_indices: expected {list(request.plan.sde_indices)}, came {list(came_steps)}")
    return problems


def _shapes(request: RolloutRequest, response: RolloutResponse) -> list[str]:
    candidates, steps = len(request.plan.sample_ids), request.num_inference_steps
    rows, columns = token_grid(request.height, request.width)
    problems = []
    latents = tuple(response.trajectory_latents.shape)
    if len(latents) == 4 and latents[1] != steps + 1:
        problems.append(
            f"trajectory_latents: expected x_0 to x_{steps}, T+1 = {steps + 1} latents, came {latents[1]}"
            + (f": x_{latents[1]} is missing" if latents[1] <= steps else "")
        )
    expected: tuple[tuple[str, Any, tuple[int, ...]], ...] = (
        ("trajectory_latents", response.trajectory_latents, (candidates, steps + 1, rows * columns, TOKEN_CHANNELS)),
        ("sigmas", response.sigmas, (steps + 1,)),
        ("timesteps", response.timesteps, (steps,)),
        ("rollout_log_probs", response.rollout_log_probs, (candidates, steps)),
    )
    for name, tensor, shape in expected:
        if tuple(tensor.shape) != shape:
            problems.append(f"{name}: expected shape {list(shape)}, came {list(tensor.shape)}")
    states = response.conditions.get("encoder_hidden_states")
    if states is None:
        problems.append(f"conditions['encoder_hidden_states'] is missing (came: {sorted(response.conditions)})")
    elif states.ndim != 2 or states.shape[0] == 0:
        problems.append(f"conditions['encoder_hidden_states']: expected [L, D], came {list(states.shape)}")
    image = response.media.get("image")
    shape = (candidates, 3, request.height, request.width)
    if image is None:
        problems.append(f"media['image'] is missing (came: {sorted(response.media)})")
    elif tuple(image.shape) != shape:
        problems.append(f"media['image']: expected shape {list(shape)}, came {list(image.shape)}")
    return problems


def _schedule(request: RolloutRequest, response: RolloutResponse) -> list[str]:
    from relax_sdk.flow import schedule_difference

    problems = []
    sigmas = [float(value) for value in response.sigmas]
    if request.sigmas is not None:
        difference = schedule_difference(request.sigmas, tuple(sigmas))
        if difference is not None:
            problems.append(f"sigmas: {difference}")
    if sigmas[-1] != 0.0:
        problems.append(f"sigmas: expected the last value to be 0, came {sigmas[-1]!r}")
    for step, (here, after) in enumerate(itertools.pairwise(sigmas)):
        if not here > after:
            problems.append(f"sigmas: not strictly decreasing at step {step}: {here!r} then {after!r}")
            break
    for step, timestep in enumerate(response.timesteps.tolist()):
        if abs(timestep - sigmas[step] * TIMESTEP_SCALE) > TIMESTEP_TOLERANCE:
            problems.append(
                f"timesteps: expected {sigmas[step] * TIMESTEP_SCALE!r} (1000 sigma) at step {step}, came {timestep!r}"
            )
            break
    return problems


def _log_probs(request: RolloutRequest, response: RolloutResponse) -> list[str]:
    """A step is stochastic exactly where the plan says so: log-probabilities are 0 at the other steps only."""
    problems = []
    for step in range(request.num_inference_steps):
        column = response.rollout_log_probs[:, step]
        if step in request.plan.sde_indices:
            if not bool(column.any()):
                problems.append(f"rollout_log_probs: all 0 at SDE step {step}: the engine took no random step there")
        elif bool(column.any()):
            problems.append(f"rollout_log_probs: not 0 at step {step}, which is not an SDE step of this request")
    return problems
