"""One training step, in the eight lines of the design: roll out, score, advantages, rows, update, sync, record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from relax_sdk.config import RunConfig
from relax_sdk.control import RunState
from relax_sdk.data import PromptSampler
from relax_sdk.protocols import SyncReport
from relax_sdk.rewards import RewardManager
from relax_sdk.rollout import RolloutDriver, image_statistics
from relax_sdk.runtime.cluster import Cluster
from relax_sdk.runtime.recovery import Recovery
from relax_sdk.runtime.scoring import combined_advantages, reward_statistics, train_rows
from relax_sdk.runtime.timer import PhaseTimer

__all__ = ["StepContext", "run_step"]

_STATES: dict[str, RunState] = {
    "rollout": "rolling out",
    "reward": "scoring",
    "handover": "training",
    "train": "training",
    "sync": "syncing",
}


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What a step works with; the same for the whole run."""

    config: RunConfig
    prompts: PromptSampler
    driver: RolloutDriver
    rewards: RewardManager
    cluster: Cluster
    recovery: Recovery
    phase: Callable[[str, int, int], None]
    line: Callable[[str], None]


def run_step(
    context: StepContext, rollout_id: int, policy_version: int, weight_manifest_hash: str
) -> tuple[dict[str, float], SyncReport]:
    """Roll out, train and sync once.

    Args:
        context: the run.
        rollout_id: the round, counted from 0.
        policy_version: of the weights that actor and engines hold now; both hold the next one on return.
        weight_manifest_hash: of the sync that brought those weights; empty for the base.

    Returns:
        The step's metrics by name, and the weight sync at its end.
    """
    config, recovery = context.config, context.recovery
    actor, queue = context.cluster.actor, context.cluster.rows
    control = context.cluster.control
    timer = PhaseTimer(
        context.phase,
        f"rollout {rollout_id + 1}",
        started=lambda name: control.publish(
            state=_STATES[name], rollout=rollout_id + 1, policy_version=policy_version
        ),
    )
    prompts = context.prompts.batch(rollout_id)
    with timer("rollout"):
        batch = recovery.sample(
            lambda: context.driver.rollout(
                prompts,
                rollout_id=rollout_id,
                samples_per_prompt=config.group_size,
                policy_version=policy_version,
                progress=timer.progress,
            ),
            policy_version=policy_version,
        )
    with timer("reward"):
        rewards = recovery.sample(
            lambda: context.rewards.score(batch.reward_batch(), group_size=config.group_size),
            policy_version=policy_version,
        )
    scores, weights = rewards.scores, context.rewards.component_weights
    advantages = combined_advantages(scores, weights, group_size=config.group_size, std_mode=config.std_mode)
    with timer("handover"):
        recovery.train()
    with timer("train"):
        queue.put(train_rows(batch, scores, advantages, weight_manifest_hash=weight_manifest_hash))
        update = actor.update(rollout_id, groups=len(prompts), candidates=config.group_size)
        queue.clear(rollout_id, groups=len(prompts), candidates=config.group_size)
    with timer("sync"):
        report = recovery.sync(policy_version + 1)
    for line in update.lines:
        context.line(line)
    metrics = update.metrics | reward_statistics(scores, advantages, weights, group_size=config.group_size)
    metrics |= rewards.metrics()
    images = [group.media["image"] for group in batch.groups if "image" in group.media]
    if images:
        metrics |= {f"image/{name}_mean": value for name, value in image_statistics(torch.cat(images)).items()}
    metrics |= timer.metrics() | recovery.memory_metrics()
    metrics |= {
        "train/policy_version": float(report.policy_version),
        "train/weight_sync_failures": float(recovery.sync_failures),
        "rollout/engine_restarts": float(recovery.restarts),
        "train/weight_sync_tensors": float(report.manifest.tensors),
        "train/weight_sync_gb": report.manifest.bytes / 1e9,
        "data/truncated_prompts": float(batch.truncated_prompts()),
        "perf/train_samples_per_s": len(advantages) / timer.seconds["train"],
        "perf/train_transitions_per_s": len(advantages) * len(batch.sde_indices) / timer.seconds["train"],
    }
    return metrics, report
