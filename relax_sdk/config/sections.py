"""The sections of the configuration: every field with its default, its range, its unit and one sentence.

A field's flag follows from its section and its name (see `relax_sdk.config.options`); `Flag` adds what does not.
Rules that relate several fields are preflight's.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from relax_sdk.protocols import SamplingConfig

__all__ = [
    "ArtifactSection",
    "BackendSection",
    "ControlSection",
    "Flag",
    "FlowGrpoSection",
    "FsdpSection",
    "LoraSection",
    "ModelSection",
    "OptimizerSection",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "SamplingSection",
    "Section",
    "WeightSyncSection",
]

Dtype = Literal["bf16", "fp32"]


@dataclasses.dataclass(frozen=True)
class Flag:
    """What the command line needs besides a field's type.

    Args:
        unit: unit of the value, or what kind of thing it is.
        off: the flag that turns a switch off, when it is not ``--no-...``.
        aliases: further flags for the same field.
        unset: what happens when the field is left at None.
    """

    unit: str
    off: str | None = None
    aliases: tuple[str, ...] = ()
    unset: str = ""


class Section(BaseModel):
    """Base of the sections: frozen, no unknown keys, no NaN, and a truth value is not a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=False)
    title: ClassVar[str]
    prefix: ClassVar[str] = ""

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads "lr: yes" as a bool, which pydantic would take for 1.0.
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("expected no true or false here")
        return value


class RunSection(Section):
    """What runs, where it writes, and for how long."""

    title: ClassVar[str] = "Run"

    plugin: Annotated[str | None, Flag("plug-in name")] = Field(None, description="The plug-in whose model is trained.")
    preset: Annotated[str | None, Flag("preset name", unset="the plug-in's own, unless --model-path is given")] = Field(
        None, description="A named set of values that the plug-in offers."
    )
    run_dir: Annotated[Path | None, Flag("path", unset="runs/<plugin>-<time>")] = Field(
        None, description="New folder for recipe, metrics, TensorBoard events and pictures."
    )
    num_rollout: Annotated[int, Flag("rollouts")] = Field(100, ge=1, description="Rollouts to train.")
    rollout_seed: Annotated[int, Flag("seed")] = Field(42, ge=0, description="Seed of the prompt order.")
    use_tensorboard: Annotated[bool, Flag("switch")] = Field(True, description="Write TensorBoard events.")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag("level")] = Field(
        "warning", description="Least severe log message shown on stderr."
    )


class BackendSection(Section):
    """Training backend and placement of the roles on devices."""

    title: ClassVar[str] = "Backend and placement"

    train_backend: Annotated[Literal["fsdp"], Flag("backend")] = Field("fsdp", description="Training actor: FSDP2.")
    colocate: Annotated[bool, Flag("switch")] = Field(
        False, description="Actor and engines take turns on the same devices; required."
    )
    fully_async: Annotated[bool, Flag("switch")] = Field(False, description="Refused: training is synchronous.")
    hybrid: Annotated[bool, Flag("switch")] = Field(False, description="Refused: training is synchronous.")
    offload_train: Annotated[bool, Flag("switch")] = Field(
        False, description="While engines sample, move the actor's weights and AdamW state to pinned host memory."
    )
    offload_rollout: Annotated[bool, Flag("switch")] = Field(
        False, description="While the actor trains, free the engines' device memory; local has nothing to free."
    )
    use_fault_tolerance: Annotated[bool, Flag("switch")] = Field(
        False, description="Restart an engine that died, with the actor's weights; without it the run ends."
    )
    resource: Annotated[dict[str, tuple[int, int]], Flag("nodes x devices")] = Field(
        {"actor": (1, 1), "rollout": (1, 1)},
        description="[nodes, devices of each node] of each role; a rank is one device or CPU process.",
    )
    collective_timeout_s: Annotated[int, Flag("s")] = Field(
        600, ge=1, description="Longest wait for the other ranks before the run fails."
    )

    @field_validator("resource")
    @classmethod
    def _both_roles(cls, value: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        if set(value) != {"actor", "rollout"}:
            raise ValueError(f"expected the keys 'actor' and 'rollout', came {sorted(value)}")
        if any(count < 1 for pair in value.values() for count in pair):
            raise ValueError("expected counts of at least 1")
        return value


class ModelSection(Section):
    """The model that is trained."""

    title: ClassVar[str] = "Task and model"

    generation_task: Annotated[str, Flag("task")] = Field("t2i", description="What is generated: t2i, text to image.")
    model_path: Annotated[str | None, Flag("path", unset="from the preset")] = Field(
        None, description="Model folder in the Hugging Face diffusers layout."
    )
    model_revision: Annotated[str | None, Flag("revision")] = Field(None, description="Revision of the model.")
    model_adapter_path: Annotated[str | None, Flag("name or package.module:Class", unset="the plug-in's model")] = (
        Field(None, description="The model family's adapter.")
    )


class RolloutSection(Section):
    """Engines, prompts and the geometry of a rollout batch."""

    title: ClassVar[str] = "Rollout and evaluation"

    rollout_engine: Annotated[str, Flag("name or package.module:Class", aliases=("--rollout-engine-class-path",))] = (
        Field("local", description="What samples: local, embedded in the rollout role, or sglang, a server of its own.")
    )
    rollout_engine_dtype: Annotated[Dtype, Flag("dtype")] = Field(
        "bf16", description="Dtype in which the engine holds its model."
    )
    rollout_num_gpus_per_engine: Annotated[int, Flag("devices")] = Field(
        1, description="Devices that one engine spreads over; the actor's must be divisible by it."
    )
    rollout_candidates_per_request: Annotated[int | None, Flag("images", unset="1 with sglang")] = Field(
        None, ge=1, description="Candidates of one request to a server; above 1, rounding depends on their number."
    )
    rollout_engine_args: Annotated[str | None, Flag("arguments")] = Field(
        None, description="Further arguments for the engine's server, e.g. '--attention-backend torch_sdpa'."
    )
    prompt_data: Annotated[Path | None, Flag("path")] = Field(
        None, description="Training prompts: JSONL, or text with one prompt per line."
    )
    rollout_batch_size: Annotated[int | None, Flag("prompts")] = Field(
        None, ge=1, description="Prompts (groups) of one rollout."
    )
    n_samples_per_prompt: Annotated[int | None, Flag("images")] = Field(
        None, ge=1, description="Candidates of one prompt: the group size."
    )
    global_batch_size: Annotated[int | None, Flag("images", unset="prompts x images per prompt")] = Field(
        None, ge=1, description="Candidates of one rollout."
    )
    micro_batch_size: Annotated[int, Flag("images")] = Field(
        1, ge=1, description="Candidates of one forward of the actor; changes speed and memory only."
    )
    replay_steps_per_forward: Annotated[int | None, Flag("steps", unset="all trained steps")] = Field(
        None, ge=1, description="Trained steps of a candidate in one forward, at most; changes speed and memory only."
    )
    rollout_wave_size: Annotated[int, Flag("groups")] = Field(
        0, ge=0, description="Groups that one engine takes at a time; 0 for all."
    )
    eval_prompt_data: Annotated[tuple[str, Path] | None, Flag("name and path")] = Field(
        None, description="Held-out prompts, and the name that their metrics carry."
    )
    eval_interval: Annotated[int | None, Flag("rollouts", unset="at the start and the end")] = Field(
        None, ge=1, description="Rollouts between evaluations."
    )
    n_samples_per_eval_prompt: Annotated[int, Flag("images")] = Field(
        1, ge=1, description="Images of one held-out prompt."
    )


class ArtifactSection(Section):
    """Sidecars and images on disk."""

    title: ClassVar[str] = "Artifacts"
    prefix: ClassVar[str] = "artifact-"

    root: Annotated[Path | None, Flag("path", unset="<run dir>/artifacts")] = Field(
        None, description="Folder of sidecars and images; driver and all ranks must reach it."
    )
    retention_rollouts: Annotated[int, Flag("rollouts")] = Field(
        2, description="Rollouts whose files are kept; 0 or less keeps all."
    )


class SamplingSection(Section):
    """The sampler."""

    title: ClassVar[str] = "Sampling"

    sampling_config: Annotated[SamplingConfig, Flag("JSON object")] = Field(
        SamplingConfig(), description="Geometry, steps and noise; merged key by key over lower layers."
    )
    generation_seed: Annotated[int, Flag("seed")] = Field(1234, ge=0, description="Base seed of all sampling noise.")


class FsdpSection(Section):
    """FSDP2 training."""

    title: ClassVar[str] = "FSDP2 training"
    prefix: ClassVar[str] = "fsdp-"

    trainable_mode: Annotated[Literal["full", "lora"], Flag("mode")] = Field(
        "full", description="Train all parameters, or LoRA (then with --lora-rank)."
    )
    trainable_attr: Annotated[str, Flag("attribute")] = Field(
        "transformer", description="The model bundle's attribute that holds the trained module."
    )
    param_dtype: Annotated[Dtype, Flag("dtype")] = Field("bf16", description="Dtype of gathered parameters.")
    reduce_dtype: Annotated[Dtype, Flag("dtype")] = Field("fp32", description="Dtype of gradient reduction.")
    master_dtype: Annotated[Dtype | None, Flag("dtype", unset="as loaded")] = Field(
        None, description="Storage dtype of trainable parameters; fp32 for LoRA."
    )
    reshard_after_forward: Annotated[bool, Flag("switch")] = Field(
        True, description="Free gathered parameters after the forward; off trades memory for speed."
    )
    activation_checkpointing: Annotated[bool, Flag("switch")] = Field(
        False, description="Recompute each transformer block in the backward."
    )
    cpu_offload: Annotated[bool, Flag("switch")] = Field(
        False, description="FSDP2 parameter offload to the CPU; refused with LoRA."
    )
    load_wave_size: Annotated[int, Flag("ranks")] = Field(
        0, ge=0, description="Ranks that load and shard the base model at a time; 0 for all."
    )
    lr_scheduler: Annotated[Literal["constant", "linear", "cosine"], Flag("shape")] = Field(
        "constant", description="Learning rate after warm-up."
    )
    debug_fingerprint: Annotated[bool, Flag("switch")] = Field(
        False, description="Print weight fingerprints around the step, and the [logp parity] line."
    )


class OptimizerSection(Section):
    """AdamW and its learning rate; everything counts optimizer steps, not rollouts."""

    title: ClassVar[str] = "Optimizer (AdamW)"

    lr: Annotated[float | None, Flag("per step")] = Field(None, description="Peak learning rate.")
    weight_decay: Annotated[float, Flag("per step")] = Field(0.0, ge=0, description="Decoupled weight decay.")
    adam_beta1: Annotated[float, Flag("ratio")] = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    adam_beta2: Annotated[float, Flag("ratio")] = Field(0.999, ge=0, lt=1, description="Decay of the second moment.")
    adam_eps: Annotated[float, Flag("absolute")] = Field(1e-8, gt=0, description="Added to the denominator.")
    lr_warmup_iters: Annotated[int, Flag("optimizer steps")] = Field(0, ge=0, description="Linear warm-up.")
    lr_decay_iters: Annotated[int | None, Flag("optimizer steps")] = Field(
        None, ge=1, description="Length of the linear or cosine decay."
    )
    min_lr: Annotated[float, Flag("per step")] = Field(0.0, ge=0, description="Learning rate after the decay.")
    clip_grad: Annotated[float, Flag("gradient norm")] = Field(1.0, gt=0, description="Gradient norm limit of a step.")


class FlowGrpoSection(Section):
    """Advantages and the clipped objective."""

    title: ClassVar[str] = "FlowGRPO"

    advantage_estimator: Annotated[Literal["grpo"], Flag("estimator")] = Field("grpo", description="Group advantages.")
    num_updates_per_batch: Annotated[int, Flag("updates")] = Field(
        1, ge=1, description="Disjoint optimizer updates that a rollout batch is split into."
    )
    eps_clip: Annotated[float, Flag("ratio")] = Field(0.2, description="Clip range; 1e-4 for flow models.")
    eps_clip_high: Annotated[float | None, Flag("ratio", unset="as --eps-clip")] = Field(
        None, description="Upper clip range when it differs."
    )
    generative_advantage_std_mode: Annotated[
        Literal["group", "batch", "none"] | None, Flag("mode", unset="group, or none when disabled below")
    ] = Field(None, description="Standard deviation that divides centred rewards.")
    disable_grpo_std_normalization: Annotated[bool, Flag("switch")] = Field(
        False, description="Do not divide by a standard deviation (Dr.GRPO)."
    )
    kl_coef: Annotated[float, Flag("weight")] = Field(0.0, description="Refused unless 0: no reference model.")
    use_kl_loss: Annotated[bool, Flag("switch")] = Field(False, description="Refused: there is no reference model.")


class LoraSection(Section):
    """LoRA adapters."""

    title: ClassVar[str] = "LoRA"
    prefix: ClassVar[str] = "lora-"

    rank: Annotated[int, Flag("rank")] = Field(0, ge=0, description="Rank; 0 without LoRA.")
    alpha: Annotated[float | None, Flag("scale numerator", unset="the rank")] = Field(
        None, gt=0, description="The adapter is scaled by alpha / rank."
    )
    dropout: Annotated[float, Flag("probability")] = Field(
        0.0, ge=0, lt=1, description="Must be 0: the anchors are a replay of the live model."
    )
    target_modules: Annotated[list[str] | None, Flag("JSON list", unset="the adapter's own")] = Field(
        None, description="Suffixes of the module names that are wrapped."
    )
    adapter_mode: Annotated[bool, Flag("switch", off="--lora-merge-mode")] = Field(
        False, description="Send only the adapter to the engines, or the merged weights."
    )

    @property
    def scale_numerator(self) -> float:
        """``alpha``, or the rank when it is not set: the adapter is scaled by this over the rank."""
        return float(self.rank) if self.alpha is None else self.alpha


class RewardSection(Section):
    """Scoring."""

    title: ClassVar[str] = "Reward"
    prefix: ClassVar[str] = "reward-"

    runtime: Annotated[Literal["colocate", "cpu"], Flag("place")] = Field(
        "cpu", description="Score on the rollout device, or on the CPU."
    )
    scorer_path: Annotated[str | None, Flag("name or package.module:Class", aliases=("--reward",))] = Field(
        None, description="The reward scorer."
    )
    model_path: Annotated[str | None, Flag("path", unset="the scorer's own, with a preset's model")] = Field(
        None, description="The scorer's model folder."
    )
    required_components: Annotated[list[str] | None, Flag("JSON list", unset="the weighted ones, or all")] = Field(
        None, description="Components that every image must have."
    )
    component_weights: Annotated[dict[str, float] | None, Flag("JSON object", unset="1 each")] = Field(
        None, description="Weights that combine component advantages into one."
    )
    batch_size: Annotated[int, Flag("rows")] = Field(64, ge=1, description="Rows of one scoring call.")


class WeightSyncSection(Section):
    """Weights on their way from the actor to the engines."""

    title: ClassVar[str] = "Weight sync"
    prefix: ClassVar[str] = "weight-sync-"

    mode: Annotated[
        Literal["full", "adapter"] | None, Flag("mode", unset="adapter with --lora-adapter-mode, else full")
    ] = Field(None, description="Follows from --lora-adapter-mode; a contradicting value is refused.")
    wire_dtype: Annotated[Dtype, Flag("dtype")] = Field(
        "bf16", description="Dtype on the wire; must equal --fsdp-param-dtype."
    )
    bucket_size_mb: Annotated[int, Flag("MiB")] = Field(
        512, ge=1, description="Size of a bucket; each rank sends through two, in its device's memory."
    )


class ControlSection(Section):
    """The HTTP controller, through which a run is watched and stopped."""

    title: ClassVar[str] = "Controller"

    control: Annotated[bool, Flag("switch")] = Field(
        True, description="Answer relax-sdk status and relax-sdk stop, over HTTP, while the run lasts."
    )
    control_host: Annotated[str, Flag("address")] = Field(
        "127.0.0.1", min_length=1, description="Address to listen on; one that other machines reach requires a token."
    )
    control_port: Annotated[int, Flag("port")] = Field(
        0, ge=0, le=65535, description="Port to listen on; 0 for a free one."
    )
    control_token_file: Annotated[Path | None, Flag("path", unset="RELAX_CONTROL_TOKEN, or no token")] = Field(
        None, description="File with the token that requests must carry: 16 characters or more."
    )
