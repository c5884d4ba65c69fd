"""The sigma schedule of flow-matching Euler samplers, as the driver computes it.

Pure arithmetic on the checkpoint's own ``scheduler_config.json``: nothing has a default here, because a guessed
shift silently changes the task.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from relax_sdk.errors import ConfigError

__all__ = ["dynamic_shift_mu", "flow_match_sigmas", "schedule_difference"]


def dynamic_shift_mu(image_seq_len: int, scheduler_config: Mapping[str, Any]) -> float:
    """mu, linear in the packed sequence length through (base_image_seq_len, base_shift) and (max_..., max_shift).

    Args:
        image_seq_len: latent tokens N; lengths outside the two anchors extrapolate.
        scheduler_config: needs ``base_image_seq_len, max_image_seq_len, base_shift, max_shift``.

    Raises:
        ConfigError: a key is missing.
    """
    low_len, high_len = (_number(scheduler_config, key) for key in ("base_image_seq_len", "max_image_seq_len"))
    low, high = (_number(scheduler_config, key) for key in ("base_shift", "max_shift"))
    slope = (high - low) / (high_len - low_len)
    return low + slope * (image_seq_len - low_len)


def flow_match_sigmas(
    num_inference_steps: int, image_seq_len: int, scheduler_config: Mapping[str, Any]
) -> tuple[float, ...]:
    """The T + 1 sigmas from sigma_0 = 1 (noise) down to 0 (image), the terminal 0 once.

    The T steps are first spaced evenly from 1 to 1/T, then shifted: exponentially with mu(N) when
    ``use_dynamic_shifting`` is set (sigma' = e^mu / (e^mu + 1/sigma - 1)), else by the constant ``shift``
    (sigma' = shift sigma / (1 + (shift - 1) sigma)); then, with ``shift_terminal``, 1 - sigma is stretched so that
    the last step before 0 lands on it. Computed in float64 and rounded once, so that each value is a float32.

    Source: the flow-matching Euler scheduler of Qwen-Image's published checkpoint; dynamic shifting is from Esser et
    al. 2024, "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", section 5.3.2.

    Raises:
        ConfigError: a key is missing, or the configuration asks for a spacing that is not implemented.
    """
    for key in (
        "use_karras_sigmas",
        "use_exponential_sigmas",
        "use_beta_sigmas",
        "invert_sigmas",
        "stochastic_sampling",
    ):
        if scheduler_config.get(key):
            raise ConfigError(
                f"scheduler config sets {key}, which the driver's schedule does not implement",
                where="scheduler/scheduler_config.json",
            )
    steps = num_inference_steps
    sigmas = [1.0 - i * (1.0 - 1.0 / steps) / (steps - 1) for i in range(steps)]
    if scheduler_config.get("use_dynamic_shifting"):
        kind = scheduler_config.get("time_shift_type", "exponential")
        if kind != "exponential":
            raise ConfigError(
                f"unsupported time_shift_type {kind!r}",
                where="scheduler/scheduler_config.json",
                expected="'exponential'",
            )
        scale = math.exp(dynamic_shift_mu(image_seq_len, scheduler_config))
        sigmas = [scale / (scale + 1.0 / sigma - 1.0) for sigma in sigmas]
    else:
        shift = _number(scheduler_config, "shift")
        sigmas = [shift * sigma / (1.0 + (shift - 1.0) * sigma) for sigma in sigmas]
    terminal = scheduler_config.get("shift_terminal")
    if terminal:
        stretch = (1.0 - sigmas[-1]) / (1.0 - float(terminal))
        sigmas = [1.0 - (1.0 - sigma) / stretch for sigma in sigmas]
    return (*map(_float32, sigmas), 0.0)


def schedule_difference(mine: tuple[float, ...], engine: tuple[float, ...], *, tolerance: float = 2e-6) -> str | None:
    """Compare the driver's schedule with an engine's snapshot.

    Returns:
        None when they agree, else one sentence that names the first differing step and, where it fits, the usual
        cause: a wrong count, a repeated terminal 0, an offset by one step.
    """
    if len(mine) != len(engine):
        doubled = len(engine) == len(mine) + 1 and engine[-2:] == (0.0, 0.0)
        cause = " (the terminal 0 is there twice)" if doubled else ""
        return f"expected {len(mine)} sigmas, the engine used {len(engine)}{cause}"
    for step, (want, got) in enumerate(zip(mine, engine, strict=True)):
        if not abs(want - got) <= tolerance:
            shifted = step + 1 < len(mine) and abs(mine[step + 1] - got) <= tolerance
            cause = "; this is the next step's value: the schedule is off by one" if shifted else ""
            return f"sigma at step {step}: expected {want!r}, the engine used {got!r}{cause}"
    return None


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(
            f"scheduler config has no number for {key!r} (found {value!r})",
            where="scheduler/scheduler_config.json",
            expected="the published checkpoint's own scheduler_config.json",
        )
    return float(value)


def _float32(value: float) -> float:
    """Round to the nearest float32, kept as a Python float."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
