"""A small ``sglang`` package that keeps the contract with SGLang 0.5.23: path inside the package -> source.

Written down by hand, not made from the contract: what it says about SGLang is a second statement.
"""

from __future__ import annotations

GEN = "multimodal_gen"
PLUGINS = f"{GEN}/runtime/platforms/plugins.py"
REGISTRY = "srt/plugins/hook_registry.py"
HTTP = f"{GEN}/runtime/entrypoints/http_server.py"
ROLLOUT = f"{GEN}/runtime/entrypoints/post_training/rollout_api.py"
WEIGHTS = f"{GEN}/runtime/entrypoints/post_training/weights_api.py"
RECORDS = f"{GEN}/runtime/entrypoints/post_training/io_struct.py"
SAMPLING = f"{GEN}/configs/sample/sampling_params.py"
ENCODER = f"{GEN}/configs/models/encoders/qwen_image.py"
TEXT = f"{GEN}/configs/pipeline_configs/qwen_image.py"
FLAGS = f"{GEN}/configs/pipeline_configs/base.py"
QWEN = f"{GEN}/runtime/pipelines/qwen_image.py"
LORA = f"{GEN}/runtime/pipelines_core/lora/pipeline.py"
COMPOSED = f"{GEN}/runtime/pipelines_core/composed_pipeline_base.py"
STAGES = f"{GEN}/runtime/pipelines_core/stages/__init__.py"
LATENT = f"{GEN}/runtime/pipelines_core/stages/latent_preparation.py"
TIMESTEP = f"{GEN}/runtime/pipelines_core/stages/timestep_preparation.py"
BATCH = f"{GEN}/runtime/pipelines_core/schedule_batch.py"
HOOKS = f"{GEN}/runtime/post_training/rollout_hooks.py"
CONTROLLER = f"{GEN}/runtime/post_training/flow_rollout_controller.py"
MIXIN = f"{GEN}/runtime/post_training/gpu_worker_post_training_mixin.py"
WORKER = f"{GEN}/runtime/managers/gpu_worker.py"
CPU_WORKER = f"{GEN}/runtime/managers/cpu_worker.py"
UPDATER = f"{GEN}/runtime/post_training/weights_updater.py"
CACHE = f"{GEN}/runtime/cache/conditioning.py"
LOADER = f"{GEN}/runtime/loader/utils.py"
DIT = f"{GEN}/runtime/models/dits/base.py"
QWEN_DIT = f"{GEN}/runtime/models/dits/qwen_image.py"
DISTRIBUTED = f"{GEN}/runtime/distributed/__init__.py"
MAIN = "cli/main.py"
SERVE = "cli/serve.py"
ARGUMENTS = f"{GEN}/runtime/server_args/server_args.py"
RUNTIME = f"sglang.{GEN}.runtime"


def record(name: str, fields: str) -> str:
    return f"class {name}:\n" + "".join(f"    {field}: object = None\n" for field in fields.split())


TREE = {
    PLUGINS: (
        "from sglang.srt.plugins.hook_registry import HookRegistry as _HookRegistry\n"
        "from sglang.srt.plugins.hook_registry import HookType\n"
        'GENERAL_PLUGINS_GROUP = "sglang.multimodal_gen.plugins"\n'
        "class HookRegistry(_HookRegistry):\n    _patched = set()\n"
        "def plugin_hook(target: str, type: HookType = HookType.AFTER): ...\n"
    ),
    REGISTRY: (
        "class HookType:\n    BEFORE = 1\n    AFTER = 2\n    AROUND = 3\n    REPLACE = 4\n"
        "class HookRegistry:\n"
        "    @classmethod\n    def register(cls, target, hook, hook_type=None, *, source=None): ...\n"
        "    @classmethod\n    def apply_hooks(cls):\n        for target in cls._hooks:\n"
        "            cls._patched.add(target)\n"
    ),
    HTTP: (
        f"from {RUNTIME}.entrypoints.post_training import rollout_api, weights_api\n"
        'health_router = APIRouter()\n@health_router.get("/health")\nasync def health(request): ...\n'
        "def create_app(server_args):\n    app.include_router(health_router)\n"
        "    app.include_router(weights_api.router)\n    app.include_router(rollout_api.router)\n"
    ),
    ROLLOUT: (
        'router = APIRouter(prefix="/rollout", tags=["rollout"])\n'
        '@router.post("/generate", response_class=Response)\nasync def rollout_generate(request): ...\n'
    ),
    WEIGHTS: "router = APIRouter()\n"
    + "".join(
        f'@router.post("/{name}")\nasync def {name}(request): ...\n'
        for name in (
            *("update_weights_from_tensor", "release_memory_occupation", "resume_memory_occupation"),
            "get_weights_checksum",
        )
    ),
    RECORDS: record(
        "RolloutRequest",
        "prompt negative_prompt seed generator_device width height num_inference_steps num_outputs_per_prompt "
        "guidance_scale true_cfg_scale rollout rollout_sde_type rollout_noise_level rollout_log_prob_no_const "
        "rollout_debug_mode rollout_return_denoising_env rollout_return_dit_trajectory rollout_sde_step_indices "
        "suppress_logs extra_sampling_params",
    )
    + record("RolloutResponse", "generated_output rollout_log_probs denoising_env dit_trajectory")
    + record(
        "UpdateWeightFromTensorReqInput",
        "serialized_named_tensors payload_gpu_uuids load_format target_modules weight_update_mode lora_alpha lora_rank",
    )
    + record("GetWeightsChecksumReqInput", "module_names"),
    SAMPLING: record("SamplingParams", "quality diffusers_kwargs max_sequence_length"),
    ENCODER: "class QwenImageArchConfig(Base):\n    text_len: int = 512\n",
    TEXT: (
        "def qwen_image_postprocess_text(outputs, _text_inputs, drop_idx=34, return_attention_mask=False): ...\n"
        "class QwenImagePipelineConfig:\n    def tokenize_prompt(self, prompts: list, tokenizer, tok_kwargs): ...\n"
    ),
    QWEN: (
        "class QwenImagePipeline(LoRAPipeline, ComposedPipelineBase):\n"
        "    def create_pipeline_stages(self, server_args):\n        self.add_standard_t2i_stages(mu=1)\n"
    ),
    LORA: "class LoRAPipeline(ComposedPipelineBase):\n    pass\n",
    COMPOSED: (
        f"from {RUNTIME}.pipelines_core.stages import LatentPreparationStage, TimestepPreparationStage\n"
        "class ComposedPipelineBase:\n"
        "    def add_standard_t2i_stages(self):\n        self.add_standard_latent_preparation_stage()\n"
        "        self.add_standard_timestep_preparation_stage(extra=1)\n"
        "    def add_standard_latent_preparation_stage(self):\n"
        "        return self.add_stage(LatentPreparationStage(1))\n"
        "    def add_standard_timestep_preparation_stage(self, extra):\n"
        "        return self.add_stage(TimestepPreparationStage(1))\n"
    ),
    STAGES: (
        f"from {RUNTIME}.pipelines_core.stages.latent_preparation import LatentPreparationStage\n"
        f"from {RUNTIME}.pipelines_core.stages.timestep_preparation import TimestepPreparationStage\n"
    ),
    LATENT: (
        "class LatentPreparationSpec:\n    shape: tuple\n    dtype: object\n"
        "class LatentPreparationStage:\n    def forward(self, batch: Req, server_args) -> Req: ...\n"
        "    def get_forward_latent_num_frames(self, batch, server_args): ...\n"
        "    def get_latent_preparation_spec(self, batch, server_args, batch_size, num_frames, device): ...\n"
    ),
    TIMESTEP: "class TimestepPreparationStage:\n    def forward(self, batch, server_args): ...\n",
    BATCH: record("Req", "latents timesteps scheduler extra") + record("OutputBatch", "error"),
    HOOKS: (
        f"from {RUNTIME}.post_training.flow_rollout_controller import FlowRolloutController\n"
        "def _build_scheduler_rollout_controller(*, batch):\n    return FlowRolloutController(batch=batch)\n"
    ),
    CONTROLLER: (
        "class FlowRolloutController:\n"
        "    def __init__(self, sigmas):\n        self.sde_step_indices = self.noise_level = sigmas\n"
        "        self.sigma_max = self.latents_shape = self.shard_for_sp = 1\n"
        "        self.debug_mode, self.log_prob_no_const = False, False\n"
        "        self.noise_buffer: object = None\n"
        "    def transition(self, batch):\n        return self.flow_sde_sampling(batch)\n"
        "    def _rollout_variance_noise(self, batch, model_output): ...\n"
        "    def flow_sde_sampling(self, batch, model_output, sample, current_sigma, next_sigma, step_index: int):\n"
        "        if step_index:\n            return self._rollout_variance_noise(batch, model_output)\n"
        "    def append_local_rollout_log_probs(self, log_prob_sum, log_prob_count): ...\n"
    ),
    MIXIN: (
        f"from {RUNTIME}.post_training.weights_updater import WeightsUpdater\n"
        "class GPUWorkerPostTrainingMixin:\n    def update_weights_from_tensor(self, req): ...\n"
    ),
    WORKER: (
        "class GPUWorker(GPUWorkerPostTrainingMixin):\n"
        "    def __init__(self, rank):\n        self.rank = rank\n        self.pipeline = None\n"
        "    def init_device_and_model(self): ...\n"
        "    def execute_forward(self, batch, return_req=False, defer_finalize=False): ...\n"
        "    def release_memory_occupation(self): ...\n    def resume_memory_occupation(self): ...\n"
        "    def _drop_breakable_cuda_graphs(self, reason): ...\n"
    ),
    CPU_WORKER: "class CPUWorker(GPUWorker):\n    def __init__(self): ...\n",
    UPDATER: (
        f"from {RUNTIME}.cache.conditioning import (\n    invalidate_conditioning_caches,\n)\n"
        "def get_updatable_modules(pipeline): ...\ndef _build_module_weight_name_mapper(module): ...\n"
        "def load_weights_into_model(weights_iter, model_params, module_name=None): ...\n"
        "class WeightsUpdater:\n    def update_weights_from_tensor(self, named_tensors, load_format=None, "
        "target_modules=None, weight_update_mode=None, lora_alpha=None, lora_rank=None): ...\n"
    ),
    CACHE: "def invalidate_conditioning_caches(modules=None): ...\n",
    LOADER: "def get_param_names_mapping(mapping_dict, valid_target_names=None): ...\n",
    DIT: "class BaseDiT:\n    def refresh_weight_derived_caches(self, *, weights_path): ...\n",
    QWEN_DIT: "class QwenImageTransformer2DModel:\n    param_names_mapping = {}\n",
    DISTRIBUTED: (
        f"from {RUNTIME}.distributed.group_coordinator import get_local_torch_device\n"
        f"from {RUNTIME}.distributed.parallel_state import get_tp_world_size, get_world_group\n"
    ),
    MAIN: "def main(): ...\n",
    SERVE: 'def _extract_model_type_override(argv):\n    return [arg == "--model-type" for arg in argv]\n',
    ARGUMENTS: (
        "class ServerArgs:\n    batching_max_size: int = 1\n    @staticmethod\n    def add_cli_args(parser):\n"
        + "".join(
            f'        parser.add_argument("--{flag}", type=str)\n'
            for flag in (
                *(
                    "model-path",
                    "backend",
                    "model-id",
                    "host",
                    "port",
                    "scheduler-port",
                    "master-port",
                    "sleep-on-idle",
                ),
                *("warmup-mode", "num-gpus", "tp-size", "attention-backend"),
            )
        )
        + "        PipelineConfig.add_cli_args(parser)\n"
    ),
    FLAGS: (
        'class PipelineConfig:\n    @staticmethod\n    def add_cli_args(parser, prefix=""):\n'
        + "".join(
            f'        parser.add_argument(f"--{{prefix}}{flag}", type=str)\n'
            for flag in ("dit-precision", "vae-precision", "text-encoder-precisions")
        )
    ),
}
