"""From a loaded module to a sharded, trainable one: LoRA, dtypes, activation checkpointing, FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from relax_sdk.config import FsdpSection, LoraSection
from relax_sdk.errors import ConfigError, TrainingError
from relax_sdk.weights import inject_lora, is_lora_name

__all__ = ["TORCH_DTYPES", "hold_gathered", "prepare_module", "trainable_parameters"]

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def prepare_module(
    bundle: Any,
    *,
    fsdp: FsdpSection,
    lora: LoraSection,
    target_modules: tuple[str, ...],
    block_module_names: tuple[str, ...],
    mesh: DeviceMesh,
    seed: int,
) -> nn.Module:
    """Make the bundle's trainable module ready, in place.

    Args:
        bundle: what `load_train_model` returned, on the CPU.
        fsdp: dtypes, checkpointing, resharding.
        lora: rank and alpha.
        target_modules: module suffixes that LoRA wraps.
        block_module_names: attribute paths of the block lists.
        mesh: one dimension, one entry per rank.
        seed: initialises LoRA's A, the same on every rank.

    Returns:
        The sharded module.

    Raises:
        ConfigError: the bundle has no such attribute, or a block list is missing.
        TrainingError: the trainable boundary is not what the mode says.
    """
    module = getattr(bundle, fsdp.trainable_attr, None)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"the model bundle has no module {fsdp.trainable_attr!r}",
            where="--fsdp-trainable-attr",
            expected="one of " + ", ".join(sorted(k for k, v in vars(bundle).items() if isinstance(v, nn.Module))),
        )
    if fsdp.trainable_mode == "lora":
        inject_lora(module, rank=lora.rank, alpha=lora.scale_numerator, target_modules=target_modules, seed=seed)
    else:
        module.requires_grad_(True)
    _check_boundary(module, fsdp.trainable_mode)
    if fsdp.master_dtype is not None:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(TORCH_DTYPES[fsdp.master_dtype])
    module.train()
    _shard(module, fsdp, block_module_names, mesh)
    return module


def _shard(module: nn.Module, fsdp: FsdpSection, block_module_names: tuple[str, ...], mesh: DeviceMesh) -> None:
    precision = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[fsdp.param_dtype], reduce_dtype=TORCH_DTYPES[fsdp.reduce_dtype]
    )
    offload = CPUOffloadPolicy() if fsdp.cpu_offload else OffloadPolicy()
    for path in block_module_names:
        blocks = dict(module.named_modules()).get(path)
        if not isinstance(blocks, nn.ModuleList):
            raise ConfigError(f"{path!r} of {type(module).__name__} is not a ModuleList", where="block_module_names")
        for index, block in enumerate(blocks):
            if fsdp.activation_checkpointing:
                block = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
                blocks[index] = block
            fully_shard(
                block,
                mesh=mesh,
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=fsdp.reshard_after_forward,
            )
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=precision,
        offload_policy=offload,
        reshard_after_forward=fsdp.reshard_after_forward,
    )


def hold_gathered(module: nn.Module, fsdp: FsdpSection, *, last: bool) -> None:
    """With ``--no-fsdp-reshard-after-forward``: gather once per update and reduce once, after its last micro-batch.

    The gradient is the same sum; parameters and their gradients stay whole on every rank meanwhile.

    Args:
        module: the sharded module.
        fsdp: its settings.
        last: whether the next backward is the update's last.
    """
    if isinstance(module, FSDPModule) and not fsdp.reshard_after_forward:
        module.set_requires_gradient_sync(last)
        module.set_reshard_after_backward(last)


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimizer moves, in module order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _check_boundary(module: nn.Module, mode: str) -> None:
    """Full: nothing frozen. LoRA: adapters trainable and everything else frozen."""
    wrong = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad != (mode == "full" or is_lora_name(name))
    ]
    if wrong:
        raise TrainingError(
            f"{len(wrong)} parameters lie on the wrong side of the trainable boundary (first: {wrong[:3]})",
            where=f"--fsdp-trainable-mode {mode}",
        )
