"""Rules about LoRA, the optimizer, the objective and weight sync."""

from __future__ import annotations

from collections.abc import Iterator

from relax_sdk.config import is_chosen
from relax_sdk.preflight.situation import Rule, Situation

__all__ = ["RULES", "WARNINGS"]


def mode_and_rank_agree(situation: Situation) -> Iterator[str]:
    """LoRA needs a rank, and a rank needs LoRA."""
    lora_mode, rank = situation.config.fsdp.trainable_mode == "lora", situation.config.lora.rank
    if lora_mode and rank <= 0:
        yield f"{situation.given('fsdp.trainable_mode')}: give --lora-rank above 0"
    elif not lora_mode and rank > 0:
        yield f"{situation.given('lora.rank')}: give --fsdp-trainable-mode lora, or --lora-rank 0"


def lora_is_trainable(situation: Situation) -> Iterator[str]:
    """What LoRA cannot be combined with."""
    config = situation.config
    if config.fsdp.trainable_mode != "lora":
        return
    if config.lora.dropout != 0:
        yield f"{situation.given('lora.dropout')}: expected 0; dropout makes the first update's ratio differ from 1"
    if config.fsdp.cpu_offload:
        yield f"{situation.given('fsdp.cpu_offload')}: LoRA gradients on the CPU cannot be clipped; leave it out"
    defaults = getattr(situation.adapter, "lora_target_modules", None)
    if config.lora.target_modules == [] or (config.lora.target_modules is None and defaults == ()):
        yield f"{situation.given('lora.target_modules')}: name at least one module suffix to wrap"


def full_training_has_no_lora_values(situation: Situation) -> Iterator[str]:
    """A LoRA value without LoRA would be ignored. What a preset or the project filled in is nobody's wish."""
    config = situation.config
    if config.fsdp.trainable_mode != "full":
        return
    lora = config.lora
    chosen = {
        "alpha": lora.alpha is not None,
        "dropout": lora.dropout != 0,
        "target_modules": lora.target_modules is not None,
    }
    for field, is_set in chosen.items():
        if is_set and is_chosen(config.provenance, f"lora.{field}"):
            yield f"{situation.given(f'lora.{field}')}: full training has no LoRA; give --fsdp-trainable-mode lora too"


def sync_mode_agrees(situation: Situation) -> Iterator[str]:
    """The sync mode follows from --lora-adapter-mode; a value that contradicts is refused, not overridden."""
    config = situation.config
    mode, adapter_mode = config.weight_sync.mode, config.lora.adapter_mode
    if config.fsdp.trainable_mode == "full":
        if adapter_mode:
            yield f"{situation.given('lora.adapter_mode')}: full training has no adapter to send; use --lora-merge-mode"
        elif mode != "full":
            yield f"{situation.given('weight_sync.mode')}: full training sends full weights; leave it out"
    elif adapter_mode and mode != "adapter":
        yield f"{situation.given('weight_sync.mode')}: --lora-adapter-mode sends only the adapter; leave one out"
    elif not adapter_mode and mode == "adapter":
        yield f"{situation.given('weight_sync.mode')}: give --lora-adapter-mode instead; the sync mode follows from it"


def wire_carries_the_policy(situation: Situation) -> Iterator[str]:
    """The engine must sample with the very weights that the trainer computes with."""
    config = situation.config
    if config.weight_sync.wire_dtype != config.fsdp.param_dtype:
        yield (
            f"{situation.given('weight_sync.wire_dtype')}: expected {config.fsdp.param_dtype!r} as in "
            f"--fsdp-param-dtype; otherwise the engine samples with other weights than the trainer's"
        )


def engine_keeps_what_it_receives(situation: Situation) -> Iterator[str]:
    """The actor compares checksums of the weights as the engine holds them, after any rounding."""
    config = situation.config
    wire, engine = config.weight_sync.wire_dtype, config.rollout.rollout_engine_dtype
    # Another wire than the trainer's is a violation already, and its cure may make this one go away.
    if wire == config.fsdp.param_dtype == "fp32" and engine == "bf16":
        yield (
            f"{situation.given('rollout.rollout_engine_dtype')}: the engine would round what --weight-sync-wire-dtype "
            "fp32 sends, and no sync's checksums could agree; give --rollout-engine-dtype fp32"
        )


def optimizer_moves(situation: Situation) -> Iterator[str]:
    """A positive learning rate and a schedule that ends after it began."""
    optimizer, shape = situation.config.optimizer, situation.config.fsdp.lr_scheduler
    if optimizer.lr is None:
        yield "give --lr: the peak learning rate (about 3e-4 for LoRA, 3e-5 for all parameters)"
    elif optimizer.lr <= 0:
        yield f"{situation.given('optimizer.lr')}: expected above 0"
    elif optimizer.min_lr > optimizer.lr:
        yield f"{situation.given('optimizer.min_lr')}: above --lr {optimizer.lr!r}"
    if shape == "constant":
        return
    if optimizer.lr_decay_iters is None:
        yield f"{situation.given('fsdp.lr_scheduler')}: give --lr-decay-iters, in optimizer steps"
    elif optimizer.lr_decay_iters <= optimizer.lr_warmup_iters:
        yield (
            f"{situation.given('optimizer.lr_decay_iters')}: expected more than --lr-warmup-iters "
            f"{optimizer.lr_warmup_iters}"
        )


def objective_is_flow_grpo(situation: Situation) -> Iterator[str]:
    """Clip ranges are positive; there is no reference model; the std switches agree."""
    objective = situation.config.flow_grpo
    if objective.eps_clip <= 0:
        yield f"{situation.given('flow_grpo.eps_clip')}: expected above 0, e.g. 1e-4"
    if objective.eps_clip_high is not None and objective.eps_clip_high <= 0:
        yield f"{situation.given('flow_grpo.eps_clip_high')}: expected above 0"
    if objective.kl_coef != 0:
        yield f"{situation.given('flow_grpo.kl_coef')}: expected 0; there is no reference model"
    if objective.use_kl_loss:
        yield f"{situation.given('flow_grpo.use_kl_loss')}: leave it out; there is no reference model"
    if objective.disable_grpo_std_normalization and objective.generative_advantage_std_mode != "none":
        yield (
            f"{situation.given('flow_grpo.generative_advantage_std_mode')}: contradicts "
            "--disable-grpo-std-normalization; leave one of them out"
        )


def lora_masters_are_fp32(situation: Situation) -> Iterator[str]:
    """bf16 masters round updates of 1e-4 away."""
    fsdp = situation.config.fsdp
    if fsdp.trainable_mode == "lora" and fsdp.master_dtype != "fp32":
        yield (
            f"{situation.given('fsdp.master_dtype')}: use --fsdp-master-dtype fp32 with LoRA; bf16 masters lose small "
            "updates while loss and gradient norm look healthy"
        )


def one_update_has_no_clipping(situation: Situation) -> Iterator[str]:
    """With one update the ratio is 1 throughout."""
    if situation.config.flow_grpo.num_updates_per_batch == 1:
        yield (
            f"{situation.given('flow_grpo.num_updates_per_batch')}: with one update the ratio is always 1, so the loss "
            "reads 0 and clipping never acts; 2 or more is usual"
        )


def decay_is_ignored(situation: Situation) -> Iterator[str]:
    """The constant shape has no decay."""
    optimizer = situation.config.optimizer
    if situation.config.fsdp.lr_scheduler == "constant" and (optimizer.lr_decay_iters or optimizer.min_lr):
        yield "--lr-decay-iters and --min-lr have no effect while --fsdp-lr-scheduler is constant"


def engine_computes_in_another_dtype(situation: Situation) -> Iterator[str]:
    """Sampling and replay then round differently."""
    config = situation.config
    if config.rollout.rollout_engine_dtype != config.fsdp.param_dtype:
        yield (
            f"{situation.given('rollout.rollout_engine_dtype')}: differs from --fsdp-param-dtype "
            f"{config.fsdp.param_dtype}, so replayed log-probabilities differ from the sampled ones"
        )


RULES: tuple[Rule, ...] = (
    mode_and_rank_agree,
    lora_is_trainable,
    full_training_has_no_lora_values,
    sync_mode_agrees,
    wire_carries_the_policy,
    engine_keeps_what_it_receives,
    optimizer_moves,
    objective_is_flow_grpo,
)
WARNINGS: tuple[Rule, ...] = (
    lora_masters_are_fp32,
    one_update_has_no_clipping,
    decay_is_ignored,
    engine_computes_in_another_dtype,
)
