"""Protocols that plug-ins implement, and the records that pass between rooms. Importing this loads no torch."""

from relax_sdk.protocols.adapter import EmbeddedModel, EmbeddedModelAdapter, GenerativeModelAdapter
from relax_sdk.protocols.base import Record
from relax_sdk.protocols.engine import RolloutEngine
from relax_sdk.protocols.records import (
    FullWeightManifest,
    GroupPlan,
    PromptRecord,
    ReplayBatch,
    RewardBatch,
    RewardScores,
    RolloutRequest,
    RolloutResponse,
    SyncReport,
    TrainRow,
    Trajectory,
    WeightBucket,
)
from relax_sdk.protocols.reward import RewardScorer
from relax_sdk.protocols.sampling import SDE_TYPES, SamplingConfig, SdeType
from relax_sdk.protocols.tensors import Tensor, TensorSpec
from relax_sdk.protocols.weight_sync import EngineCall, WeightSync

__all__ = [
    "SDE_TYPES",
    "EmbeddedModel",
    "EmbeddedModelAdapter",
    "EngineCall",
    "FullWeightManifest",
    "GenerativeModelAdapter",
    "GroupPlan",
    "PromptRecord",
    "Record",
    "ReplayBatch",
    "RewardBatch",
    "RewardScorer",
    "RewardScores",
    "RolloutEngine",
    "RolloutRequest",
    "RolloutResponse",
    "SamplingConfig",
    "SdeType",
    "SyncReport",
    "Tensor",
    "TensorSpec",
    "TrainRow",
    "Trajectory",
    "WeightBucket",
    "WeightSync",
]
