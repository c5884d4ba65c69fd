"""The keys of ``--sampling-config``, and which SDE steps a round trains.

Read by the adapter, the rollout driver and the trainer's replay alike, so that no two of them can hold different
defaults: ``eta`` in particular has one value for sampling and replay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from relax_sdk.protocols.base import Record

__all__ = ["SAMPLE_ID_MODES", "SDE_TYPES", "SamplingConfig", "SdeType"]

SdeType = Literal["sde", "dance", "cps"]
SDE_TYPES: tuple[str, ...] = ("sde", "dance", "cps")
SAMPLE_ID_MODES: tuple[str, ...] = ("metadata", "positional", "group_index")


class SamplingConfig(Record):
    """Geometry and noise of the sampler. Sizes are pixels; ``eta`` is the noise level (no unit)."""

    height: int = Field(384, gt=0, description="Output height in pixels.")
    width: int = Field(384, gt=0, description="Output width in pixels.")
    num_inference_steps: int = Field(12, ge=2, description="Denoising steps T of a full generation.")
    guidance_scale: float = Field(1.0, description="Must be 1.0: replay runs one conditional forward, no CFG.")
    eta: float = Field(0.7, gt=0, description="SDE noise level, used for sampling and for replay alike.")
    sigma_max: float = Field(
        0.99, gt=0, lt=1, description="Only 0.99: sampler and replay clamp sigma = 1 to the schedule's second value."
    )
    sde_type: SdeType = Field("sde", description="Transition of the trained steps: sde, dance or cps.")
    driver_sigmas: bool = Field(True, description="Send the driver's own sigma schedule instead of the engine's.")
    driver_xt: bool = Field(True, description="Start latents come from the driver's recipe (candidate identity).")
    init_noise_latent_shape: tuple[int, ...] | None = Field(None, description="Overrides the shape of x_T.")
    sample_id_mode: Literal["metadata", "positional", "group_index"] = Field(
        "metadata", description="How a candidate's stable id is built."
    )
    sde_resample_per_rollout: bool = Field(False, description="Draw the trained steps anew for every rollout.")
    sde_pool: tuple[int, ...] | None = Field(None, description="Steps that a per-rollout draw chooses from.")
    sde_indices: tuple[int, ...] | None = Field(None, description="Explicit trained steps (without a draw).")
    num_sde_steps: int = Field(0, ge=0, description="How many steps to train.")
    sde_timestep_fraction: tuple[float, float] = Field(
        (0.0, 1.0), description="Window [lo, hi] of the schedule, as fractions of its length."
    )

    @field_validator("sde_timestep_fraction")
    @classmethod
    def _window(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0.0 <= value[0] < value[1] <= 1.0:
            raise ValueError(f"expected 0 <= lo < hi <= 1, came {list(value)}")
        return value

    @model_validator(mode="after")
    def _steps_in_range(self) -> Self:
        for name in ("sde_pool", "sde_indices"):
            steps: Sequence[int] = getattr(self, name) or ()
            outside = [step for step in steps if not 0 <= step < self.num_inference_steps]
            if outside:
                raise ValueError(f"{name}: steps {outside} lie outside 0..{self.num_inference_steps - 1}")
        pool = self.step_pool()
        if self.sde_resample_per_rollout and self.num_sde_steps > len(pool):
            raise ValueError(f"num_sde_steps = {self.num_sde_steps} but the pool has only {len(pool)} steps")
        return self

    def fraction_window(self) -> tuple[int, ...]:
        """The steps inside ``sde_timestep_fraction``: ``floor(lo * T)`` up to ``ceil(hi * T)``, end excluded."""
        low, high = self.sde_timestep_fraction
        first = math.floor(low * self.num_inference_steps + 1e-9)
        last = math.ceil(high * self.num_inference_steps - 1e-9)
        return tuple(range(first, last))

    def step_pool(self) -> tuple[int, ...]:
        """The candidate steps of a per-rollout draw: ``sde_pool``, or the fraction window."""
        return tuple(sorted(set(self.sde_pool))) if self.sde_pool is not None else self.fraction_window()

    def resolve_sde_indices(self, rollout_id: int | None) -> tuple[int, ...]:
        """The SDE steps of a rollout, sorted, the same in every process that asks.

        Precedence: a per-rollout draw (``numpy.random.default_rng(rollout_id)`` over the pool, without
        replacement) when ``sde_resample_per_rollout`` is set and there is a rollout id; then ``sde_indices``; then
        ``num_sde_steps`` strided over the fraction window at ``floor(k * len(window) / num_sde_steps)``.

        Args:
            rollout_id: the round, or None for held-out evaluation.

        Returns:
            Step indices in ``0..T-1``; empty when no SDE step is configured.
        """
        if self.sde_resample_per_rollout and rollout_id is not None and self.num_sde_steps > 0:
            import numpy

            drawn = numpy.random.default_rng(rollout_id).choice(
                numpy.asarray(self.step_pool()), size=self.num_sde_steps, replace=False
            )
            return tuple(sorted(int(step) for step in drawn))
        if self.sde_indices is not None:
            return tuple(sorted(set(self.sde_indices)))
        window = self.fraction_window()
        count = min(self.num_sde_steps, len(window))
        return tuple(window[math.floor(k * len(window) / count)] for k in range(count))

    def trainable_steps(self) -> tuple[int, ...]:
        """Every step that any rollout of this configuration could train, sorted."""
        steps = set(self.sde_indices or ())
        if self.sde_resample_per_rollout and self.num_sde_steps > 0:
            steps |= set(self.step_pool())
        elif self.sde_indices is None:
            steps |= set(self.resolve_sde_indices(None))
        return tuple(sorted(steps))
