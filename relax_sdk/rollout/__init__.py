"""Rollout: candidate identity, the driver, sidecars and images, and the embedded engine."""

from relax_sdk.rollout.driver import EngineFleet, GroupResult, RolloutBatch, RolloutDriver
from relax_sdk.rollout.identity import EVALUATION_ROUND, candidate_seed, plan_groups, sample_ids
from relax_sdk.rollout.image_statistics import image_statistics
from relax_sdk.rollout.sidecar import (
    group_path,
    prune_stale_artifacts,
    read_sidecar,
    rollout_folder,
    write_image,
    write_sidecar,
)

__all__ = [
    "EVALUATION_ROUND",
    "EngineFleet",
    "GroupResult",
    "RolloutBatch",
    "RolloutDriver",
    "candidate_seed",
    "group_path",
    "image_statistics",
    "plan_groups",
    "prune_stale_artifacts",
    "read_sidecar",
    "rollout_folder",
    "sample_ids",
    "write_image",
    "write_sidecar",
]
