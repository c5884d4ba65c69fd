"""Does the installed SGLang fit the engine? Read from its source before a server starts, without importing it.

SGLang logs and skips a hook whose target is gone, and a server drops a request field it does not know. Either would let
a run go on with trajectories or weights that are not the recorded ones, so everything that the engine and its
server-side plug-in rely on is listed in `CONTRACT`, and every departure from it is reported at once.

The version decides nothing: a patched or a later SGLang passes when the contract holds. Left out: what the functions
named here do, which the hooks report for themselves once the server runs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from relax_sdk.errors import PreflightError
from relax_sdk.rollout.sglang.expectations import (
    Calls,
    Constant,
    Default,
    Expectation,
    Flags,
    Imported,
    Inherits,
    Members,
    Route,
    SelfAttributes,
    Signature,
    file_problems,
)

__all__ = [
    "CONTRACT",
    "INSTALL_COMMAND",
    "SUPPORTED_VERSION",
    "contract_problems",
    "preflight_problems",
    "require_contract",
]

_PARSING = threading.Lock()
SUPPORTED_VERSION = "0.5.23"
INSTALL_COMMAND = 'pip install "relax-sdk[sglang]"'

_LOG = logging.getLogger(__name__)

_RUNTIME = "sglang.multimodal_gen.runtime"
_STAGES = f"{_RUNTIME}.pipelines_core.stages"
_LATENT = "add_standard_latent_preparation_stage"
_TIMESTEP = "add_standard_timestep_preparation_stage"
_STAGE_BUILDERS = (_LATENT, _TIMESTEP, "add_standard_t2i_stages")

_PLUGINS: Mapping[str, tuple[Expectation, ...]] = {
    "multimodal_gen/runtime/platforms/plugins.py": (
        Constant("GENERAL_PLUGINS_GROUP", value="sglang.multimodal_gen.plugins"),
        Signature("plugin_hook", parameters="target, type"),
        Imported("HookType", module="sglang.srt.plugins.hook_registry"),
        Inherits("HookRegistry", bases="_HookRegistry", inherited=("register", "apply_hooks")),
        Members("HookRegistry", members=("_patched",)),
    ),
    "srt/plugins/hook_registry.py": (
        Members("HookType", members=("BEFORE", "AFTER", "AROUND", "REPLACE")),
        Signature("HookRegistry.register", parameters="cls, target, hook, hook_type, *, source"),
        Calls("HookRegistry.apply_hooks", calls=("cls._patched.add(target)",)),
    ),
}
"""Found by entry point, hooked by dotted target; what took hold is read from ``_patched``."""

_ENDPOINTS: Mapping[str, tuple[Expectation, ...]] = {
    "multimodal_gen/runtime/entrypoints/http_server.py": (
        Route("/health", method="GET"),
        Imported("rollout_api", module=f"{_RUNTIME}.entrypoints.post_training"),
        Imported("weights_api", module=f"{_RUNTIME}.entrypoints.post_training"),
        Calls(
            "create_app",
            calls=(
                "app.include_router(health_router)",
                "app.include_router(rollout_api.router)",
                "app.include_router(weights_api.router)",
            ),
        ),
    ),
    "multimodal_gen/runtime/entrypoints/post_training/rollout_api.py": (Route("/rollout/generate", method="POST"),),
    "multimodal_gen/runtime/entrypoints/post_training/weights_api.py": (
        Route("/update_weights_from_tensor", method="POST"),
        Route("/release_memory_occupation", method="POST"),
        Route("/resume_memory_occupation", method="POST"),
        Route("/get_weights_checksum", method="POST"),
    ),
    "multimodal_gen/runtime/entrypoints/post_training/io_struct.py": (
        Members(
            "RolloutRequest",
            members=(
                *("prompt", "negative_prompt", "seed", "generator_device", "width", "height", "num_inference_steps"),
                *("num_outputs_per_prompt", "guidance_scale", "true_cfg_scale", "rollout", "rollout_sde_type"),
                *("rollout_noise_level", "rollout_log_prob_no_const", "rollout_debug_mode"),
                *("rollout_return_denoising_env", "rollout_return_dit_trajectory", "rollout_sde_step_indices"),
                *("suppress_logs", "extra_sampling_params"),
            ),
        ),
        Members(
            "RolloutResponse", members=("generated_output", "rollout_log_probs", "denoising_env", "dit_trajectory")
        ),
        Members(
            "UpdateWeightFromTensorReqInput",
            members=(
                *("serialized_named_tensors", "payload_gpu_uuids", "load_format", "target_modules"),
                *("weight_update_mode", "lora_alpha", "lora_rank"),
            ),
        ),
        Members("GetWeightsChecksumReqInput", members=("module_names",)),
    ),
    "multimodal_gen/configs/sample/sampling_params.py": (
        Members("SamplingParams", members=("diffusers_kwargs", "quality", "max_sequence_length")),
    ),
}

_TEXT: Mapping[str, tuple[Expectation, ...]] = {
    "multimodal_gen/configs/models/encoders/qwen_image.py": (Constant("QwenImageArchConfig.text_len", value=512),),
    "multimodal_gen/configs/pipeline_configs/qwen_image.py": (
        Signature("QwenImagePipelineConfig.tokenize_prompt", parameters="self, prompts, tokenizer, tok_kwargs"),
        Default("qwen_image_postprocess_text", parameter="drop_idx", value=34),
    ),
}
"""Qwen-Image's window: 512 tokens of the whole template unless a request asks for more; its first 34 are dropped."""

_SAMPLER: Mapping[str, tuple[Expectation, ...]] = {
    # Qwen-Image is built from the stock stages that the hooks patch.
    "multimodal_gen/runtime/pipelines/qwen_image.py": (
        Inherits("QwenImagePipeline", bases="LoRAPipeline, ComposedPipelineBase", inherited=_STAGE_BUILDERS),
        Calls("QwenImagePipeline.create_pipeline_stages", calls=("self.add_standard_t2i_stages",)),
    ),
    "multimodal_gen/runtime/pipelines_core/lora/pipeline.py": (
        Inherits("LoRAPipeline", bases="ComposedPipelineBase", inherited=_STAGE_BUILDERS),
    ),
    "multimodal_gen/runtime/pipelines_core/composed_pipeline_base.py": (
        Imported("LatentPreparationStage", module=_STAGES),
        Imported("TimestepPreparationStage", module=_STAGES),
        Calls("ComposedPipelineBase.add_standard_t2i_stages", calls=(f"self.{_LATENT}", f"self.{_TIMESTEP}")),
        Calls(f"ComposedPipelineBase.{_LATENT}", calls=("LatentPreparationStage",)),
        Calls(f"ComposedPipelineBase.{_TIMESTEP}", calls=("TimestepPreparationStage",)),
    ),
    "multimodal_gen/runtime/pipelines_core/stages/__init__.py": (
        Imported("LatentPreparationStage", module=f"{_STAGES}.latent_preparation"),
        Imported("TimestepPreparationStage", module=f"{_STAGES}.timestep_preparation"),
    ),
    "multimodal_gen/runtime/pipelines_core/stages/latent_preparation.py": (
        Signature("LatentPreparationStage.forward", parameters="self, batch, server_args"),
        Signature("LatentPreparationStage.get_forward_latent_num_frames", parameters="self, batch, server_args"),
        Signature(
            "LatentPreparationStage.get_latent_preparation_spec",
            parameters="self, batch, server_args, batch_size, num_frames, device",
        ),
        Members("LatentPreparationSpec", members=("shape", "dtype")),
    ),
    "multimodal_gen/runtime/pipelines_core/stages/timestep_preparation.py": (
        Signature("TimestepPreparationStage.forward", parameters="self, batch, server_args"),
    ),
    "multimodal_gen/runtime/pipelines_core/schedule_batch.py": (
        Members("Req", members=("latents", "timesteps", "scheduler", "extra")),
        Members("OutputBatch", members=("error",)),
    ),
    "multimodal_gen/runtime/post_training/rollout_hooks.py": (
        Imported("FlowRolloutController", module=f"{_RUNTIME}.post_training.flow_rollout_controller"),
        Calls("_build_scheduler_rollout_controller", calls=("FlowRolloutController",)),
    ),
    "multimodal_gen/runtime/post_training/flow_rollout_controller.py": (
        Signature(
            "FlowRolloutController.flow_sde_sampling",
            parameters="self, batch, model_output, sample, current_sigma, next_sigma, step_index",
        ),
        Signature("FlowRolloutController._rollout_variance_noise", parameters="self, batch, model_output"),
        Signature(
            "FlowRolloutController.append_local_rollout_log_probs", parameters="self, log_prob_sum, log_prob_count"
        ),
        Calls("FlowRolloutController.transition", calls=("self.flow_sde_sampling",)),
        Calls("FlowRolloutController.flow_sde_sampling", calls=("self._rollout_variance_noise",)),
        SelfAttributes(
            "FlowRolloutController",
            attributes=(
                *("sde_step_indices", "noise_level", "sigma_max", "noise_buffer", "latents_shape", "shard_for_sp"),
                *("debug_mode", "log_prob_no_const"),
            ),
        ),
    ),
}

_WORKER_HOOKS = (
    *("init_device_and_model", "execute_forward", "release_memory_occupation", "resume_memory_occupation"),
    *("_drop_breakable_cuda_graphs", "update_weights_from_tensor"),
)

_WEIGHTS: Mapping[str, tuple[Expectation, ...]] = {
    "multimodal_gen/runtime/post_training/gpu_worker_post_training_mixin.py": (
        Signature("GPUWorkerPostTrainingMixin.update_weights_from_tensor", parameters="self, req"),
        Imported("WeightsUpdater", module=f"{_RUNTIME}.post_training.weights_updater"),
    ),
    "multimodal_gen/runtime/managers/gpu_worker.py": (
        Inherits("GPUWorker", bases="GPUWorkerPostTrainingMixin", inherited=("update_weights_from_tensor",)),
        Signature("GPUWorker.init_device_and_model", parameters="self"),
        Signature("GPUWorker.execute_forward", parameters="self, batch, return_req, defer_finalize"),
        Signature("GPUWorker.release_memory_occupation", parameters="self"),
        Signature("GPUWorker.resume_memory_occupation", parameters="self"),
        Signature("GPUWorker._drop_breakable_cuda_graphs", parameters="self, reason"),
        SelfAttributes("GPUWorker", attributes=("rank", "pipeline")),
    ),
    "multimodal_gen/runtime/managers/cpu_worker.py": (
        Inherits("CPUWorker", bases="GPUWorker", inherited=_WORKER_HOOKS),
    ),
    "multimodal_gen/runtime/post_training/weights_updater.py": (
        Signature(
            "WeightsUpdater.update_weights_from_tensor",
            parameters="self, named_tensors, load_format, target_modules, weight_update_mode, lora_alpha, lora_rank",
        ),
        Signature("get_updatable_modules", parameters="pipeline"),
        Signature("_build_module_weight_name_mapper", parameters="module"),
        Signature("load_weights_into_model", parameters="weights_iter, model_params, module_name"),
        Imported("invalidate_conditioning_caches", module=f"{_RUNTIME}.cache.conditioning"),
    ),
    "multimodal_gen/runtime/cache/conditioning.py": (
        Signature("invalidate_conditioning_caches", parameters="modules"),
    ),
    "multimodal_gen/runtime/loader/utils.py": (
        Signature("get_param_names_mapping", parameters="mapping_dict, valid_target_names"),
    ),
    "multimodal_gen/runtime/models/dits/base.py": (
        Signature("BaseDiT.refresh_weight_derived_caches", parameters="self, *, weights_path"),
    ),
    "multimodal_gen/runtime/models/dits/qwen_image.py": (
        Members("QwenImageTransformer2DModel", members=("param_names_mapping",)),
    ),
    "multimodal_gen/runtime/distributed/__init__.py": (
        Imported("get_local_torch_device", module=f"{_RUNTIME}.distributed.group_coordinator"),
        Imported("get_tp_world_size", module=f"{_RUNTIME}.distributed.parallel_state"),
        Imported("get_world_group", module=f"{_RUNTIME}.distributed.parallel_state"),
    ),
}

_COMMAND_LINE: Mapping[str, tuple[Expectation, ...]] = {
    "cli/main.py": (Signature("main", parameters=""),),
    "cli/serve.py": (Flags("_extract_model_type_override", flags=("--model-type",)),),
    "multimodal_gen/runtime/server_args/server_args.py": (
        Flags(
            "ServerArgs.add_cli_args",
            flags=(
                *("--model-path", "--backend", "--model-id", "--host", "--port", "--scheduler-port", "--master-port"),
                "--sleep-on-idle",
                *("--warmup-mode", "--num-gpus", "--tp-size", "--attention-backend"),
            ),
        ),
        Calls("ServerArgs.add_cli_args", calls=("PipelineConfig.add_cli_args(parser)",)),
        # Several requests in one batch would go round `LatentPreparationStage.forward` and its hook.
        Constant("ServerArgs.batching_max_size", value=1),
    ),
    "multimodal_gen/configs/pipeline_configs/base.py": (
        Flags("PipelineConfig.add_cli_args", flags=("--dit-precision", "--vae-precision", "--text-encoder-precisions")),
    ),
}

CONTRACT: Mapping[str, tuple[Expectation, ...]] = {
    **_PLUGINS,
    **_ENDPOINTS,
    **_TEXT,
    **_SAMPLER,
    **_WEIGHTS,
    **_COMMAND_LINE,
}
"""Files of the ``sglang`` package, and what each must contain."""


def contract_problems(package_dir: Path | None = None) -> list[str]:
    """Every departure of an SGLang from what the engine relies on; nothing of it is imported.

    Args:
        package_dir: the folder of the ``sglang`` package; the installed one when None.

    Returns:
        One text per departure, with file, what was expected and what was found; empty when it fits.
    """
    folder = package_dir or _installed_package()
    if folder is None:
        return [f"sglang: expected an installed package, found none; next: {INSTALL_COMMAND}"]
    if not (folder / "multimodal_gen").is_dir():
        return [f"sglang/multimodal_gen: expected SGLang's diffusion runtime, found none; next: {INSTALL_COMMAND}"]
    return [text for path, expectations in CONTRACT.items() for text in file_problems(folder, path, expectations)]


def preflight_problems() -> list[str]:
    """What training with SGLang lacks on this machine: the installed SGLang against the contract, and msgpack."""
    problems = contract_problems()
    if importlib.util.find_spec("msgpack") is None:
        problems.append(f"the package msgpack is not installed; {INSTALL_COMMAND}")
    return problems


def require_contract(package_dir: Path | None = None) -> None:
    """Refuse an SGLang that the engine does not fit; one of another version that fits is only logged.

    Raises:
        PreflightError: every problem, with the installed version and the one that the engine is tested with.
    """
    # Python 3.11's parser keeps its recursion depth per interpreter: two threads that parse disturb each other.
    with _PARSING:
        problems = contract_problems(package_dir)
    version = _version(package_dir) or "of unknown version"
    if not problems:
        if version != SUPPORTED_VERSION:
            _LOG.warning("sglang %s fits; the engine is tested with %s", version, SUPPORTED_VERSION)
        return
    folder = package_dir or _installed_package()
    error = PreflightError(problems)
    error.where = f"sglang {version} in {folder}" if folder else f"the environment of {sys.executable}"
    error.expected = f"an SGLang that fits the engine, which is tested with {SUPPORTED_VERSION}"
    error.next_step = INSTALL_COMMAND
    if version == SUPPORTED_VERSION:
        error.next_step = f"pip install --force-reinstall --no-deps sglang=={SUPPORTED_VERSION}"
    raise error


def _installed_package() -> Path | None:
    """The folder of the installed package; `find_spec` imports nothing for a name without dots."""
    spec = importlib.util.find_spec("sglang")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _version(package_dir: Path | None) -> str | None:
    path = sys.path if package_dir is None else [str(package_dir.parent)]
    return next((item.version for item in importlib.metadata.distributions(name="sglang", path=path)), None)
