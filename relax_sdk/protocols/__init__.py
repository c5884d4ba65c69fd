"""Protocols that plug-ins implement, and the records that pass between rooms. Importing this loads no torch."""

from relax_sdk.protocols.adapter import (
    EmbeddedModel,
    EmbeddedModelAdapter,
    GenerativeModelAdapter,
    SGLangModelAdapter,
)
from relax_sdk.protocols.base import Record
from relax_sdk.protocols.engine import EngineSettings, RolloutEngine
from relax_sdk.protocols.records import (
    GroupPlan,
    PromptRecord,
    ReplayBatch,
    RewardBatch,
    RewardScores,
    RolloutRequest,
    RolloutResponse,
    TrainRow,
    Trajectory,
)
from relax_sdk.protocols.reward import OffloadableScorer, RewardScorer
from relax_sdk.protocols.sampling import SDE_TYPES, SamplingConfig, SdeType
from relax_sdk.protocols.tensors import Tensor, TensorSpec
from relax_sdk.protocols.transport import (
    AdapterConfig,
    BufferHandle,
    FullWeightManifest,
    SyncOffer,
    SyncReport,
    WeightBucket,
)
from relax_sdk.protocols.weight_sync import EngineLink, WeightSync

__all__ = [
    "SDE_TYPES",
    "AdapterConfig",
    "BufferHandle",
    "EmbeddedModel",
    "EmbeddedModelAdapter",
    "EngineLink",
    "EngineSettings",
    "FullWeightManifest",
    "GenerativeModelAdapter",
    "GroupPlan",
    "OffloadableScorer",
    "PromptRecord",
    "Record",
    "ReplayBatch",
    "RewardBatch",
    "RewardScorer",
    "RewardScores",
    "RolloutEngine",
    "RolloutRequest",
    "RolloutResponse",
    "SGLangModelAdapter",
    "SamplingConfig",
    "SdeType",
    "SyncOffer",
    "SyncReport",
    "Tensor",
    "TensorSpec",
    "TrainRow",
    "Trajectory",
    "WeightBucket",
    "WeightSync",
]
