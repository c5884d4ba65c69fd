"""Training: sharding, optimizer, micro-batch plan, replay, the policy update of one rank, and its offload."""

from relax_sdk.training.flops import FlopsModel, ReplayFlops, measure_matrix_rate
from relax_sdk.training.offload import StorageOffload
from relax_sdk.training.optimizer import build_optimizer, lr_at_step
from relax_sdk.training.plan import MicroBatch, plan_updates
from relax_sdk.training.replay import replay_cells
from relax_sdk.training.sharding import TORCH_DTYPES, prepare_module, trainable_parameters
from relax_sdk.training.trainer import Trainer, TrainerSettings, TrainGroup, UpdateReport

__all__ = [
    "TORCH_DTYPES",
    "FlopsModel",
    "MicroBatch",
    "ReplayFlops",
    "StorageOffload",
    "TrainGroup",
    "Trainer",
    "TrainerSettings",
    "UpdateReport",
    "build_optimizer",
    "lr_at_step",
    "measure_matrix_rate",
    "plan_updates",
    "prepare_module",
    "replay_cells",
    "trainable_parameters",
]
