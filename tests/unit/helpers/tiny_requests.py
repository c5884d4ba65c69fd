"""Requests for the tiny family, as the driver would plan them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tiny_family import SCHEDULER, STEPS

from relax_sdk.protocols import PromptRecord, RolloutRequest, SamplingConfig
from relax_sdk.rollout import plan_groups


def tiny_requests(
    adapter: Any, texts: Iterable[str], *, count: int, version: int, steps: tuple[int, ...], **sampling: Any
) -> list[RolloutRequest]:
    """One group of ``count`` candidates for each text."""
    config = SamplingConfig(num_inference_steps=STEPS, **sampling)
    plans = plan_groups(
        [PromptRecord(prompt=text, prompt_id=text) for text in texts],
        rollout_id=0,
        samples_per_prompt=count,
        sampling=config,
        generation_seed=42,
        policy_version=version,
        sde_indices=steps,
    )
    return [adapter.build_rollout_request(plan, config, scheduler_config=SCHEDULER) for plan in plans]
