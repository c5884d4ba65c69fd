"""The functions of SGLang that the server side hooks; shared by the contract check, the server side and the engine.

Its own module, so that the engine need not import the server side.
"""

from __future__ import annotations

__all__ = [
    "EXECUTE_FORWARD",
    "LOAD_MODEL",
    "PREPARE_LATENTS",
    "PREPARE_TIMESTEPS",
    "REQUIRED_HOOKS",
    "SDE_STEP",
    "STEP_NOISE",
    "UPDATE_WEIGHTS",
]

_RUNTIME = "sglang.multimodal_gen.runtime"
_WORKER = f"{_RUNTIME}.managers.gpu_worker.GPUWorker"
_CONTROLLER = f"{_RUNTIME}.post_training.flow_rollout_controller.FlowRolloutController"
_STAGES = f"{_RUNTIME}.pipelines_core.stages"

LOAD_MODEL = f"{_WORKER}.init_device_and_model"
EXECUTE_FORWARD = f"{_WORKER}.execute_forward"
PREPARE_LATENTS = f"{_STAGES}.latent_preparation.LatentPreparationStage.forward"
PREPARE_TIMESTEPS = f"{_STAGES}.timestep_preparation.TimestepPreparationStage.forward"
STEP_NOISE = f"{_CONTROLLER}._rollout_variance_noise"
SDE_STEP = f"{_CONTROLLER}.flow_sde_sampling"
UPDATE_WEIGHTS = (
    f"{_RUNTIME}.post_training.gpu_worker_post_training_mixin.GPUWorkerPostTrainingMixin.update_weights_from_tensor"
)

REQUIRED_HOOKS = (
    EXECUTE_FORWARD,
    LOAD_MODEL,
    PREPARE_LATENTS,
    PREPARE_TIMESTEPS,
    SDE_STEP,
    STEP_NOISE,
    UPDATE_WEIGHTS,
)
"""Targets that every worker must report as hooked."""
