"""LoRA as both the trainer and the embedded engine put it into a transformer, and its names on the wire.

On the wire an adapter tensor is ``<module>.lora_A.weight`` or ``<module>.lora_B.weight``; inside a peft-wrapped
module it is ``<module>.lora_A.default.weight``. Sampling and training add B A x times alpha / rank to the wrapped
layer, Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from relax_sdk.errors import ConfigError

__all__ = [
    "ADAPTER_NAME",
    "inject_lora",
    "is_lora_name",
    "lora_shapes",
    "merge_delta",
    "to_peft_name",
    "to_wire_name",
]

ADAPTER_NAME = "default"
_PEFT_LORA = re.compile(r"\.lora_(A|B)\.default\.weight$")
_WIRE_LORA = re.compile(r"\.lora_(A|B)\.weight$")


def inject_lora(
    module: nn.Module, *, rank: int, alpha: float, target_modules: Sequence[str], seed: int = 0
) -> list[str]:
    """Wrap the target layers in place; A is initialised from ``seed``, B is zero, everything else is frozen.

    Args:
        module: the transformer.
        rank: r.
        alpha: the update is scaled by alpha / r.
        target_modules: suffixes of module names.
        seed: makes A the same on every rank, without touching the global generator.

    Returns:
        The names of the wrapped modules, in module order.

    Raises:
        ConfigError: a suffix matches no module, or one that is not linear: such an adapter would be bound to nothing.
    """
    from peft import LoraConfig, inject_adapter_in_model

    _targets(module, target_modules)
    module.requires_grad_(False)
    # peft draws A on the CPU; only that generator is seeded, and it is put back.
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        inject_adapter_in_model(
            # peft divides alpha by the rank and takes any number, whatever its annotation says.
            LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(target_modules)),  # type: ignore[arg-type]
            module,
            adapter_name=ADAPTER_NAME,
        )
    finally:
        torch.default_generator.set_state(state)
    wrapped = [name.removesuffix(".lora_A") for name, _ in module.named_modules() if name.endswith(".lora_A")]
    if not wrapped:
        raise ConfigError(f"LoRA wrapped no layer of {type(module).__name__}", where="--lora-target-modules")
    return wrapped


def lora_shapes(module: nn.Module, *, rank: int, target_modules: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Wire names and shapes of the adapter tensors that `inject_lora` would add; the module stays as it is.

    Raises:
        ConfigError: as `inject_lora`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in _targets(module, target_modules).items():
        shapes[f"{name}.lora_A.weight"] = (rank, layer.in_features)
        shapes[f"{name}.lora_B.weight"] = (layer.out_features, rank)
    return shapes


def _targets(module: nn.Module, target_modules: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear layers whose names end in one of the suffixes, in module order."""
    linear = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    found: set[str] = set()
    for suffix in target_modules:
        matches = [name for name, _ in module.named_modules() if name == suffix or name.endswith("." + suffix)]
        if not matches or not set(matches) <= set(linear):
            problem = "matches no module" if not matches else f"matches {matches[0]!r}, which is no linear layer,"
            known = sorted({name.split(".", 2)[-1] for name in linear})
            raise ConfigError(
                f"LoRA target {suffix!r} {problem} of {type(module).__name__}",
                where="--lora-target-modules",
                expected="suffixes of its linear layers, e.g. " + ", ".join(known[:8]),
            )
        found.update(matches)
    return {name: part for name, part in linear.items() if name in found}


def is_lora_name(name: str) -> bool:
    """Whether a peft parameter name is an adapter tensor."""
    return _PEFT_LORA.search(name) is not None


def to_wire_name(peft_name: str) -> str:
    """``...to_q.lora_A.default.weight`` -> ``...to_q.lora_A.weight``."""
    return _PEFT_LORA.sub(r".lora_\1.weight", peft_name)


def to_peft_name(wire_name: str) -> str | None:
    """The inverse of `to_wire_name`; None when the name is not an adapter tensor's."""
    return _WIRE_LORA.sub(r".lora_\1.default.weight", wire_name) if _WIRE_LORA.search(wire_name) else None


def merge_delta(lora_a: Tensor, lora_b: Tensor, *, rank: int, alpha: float) -> Tensor:
    """The weight update alpha / r * B A, float32: [out, r] x [r, in] -> [out, in]."""
    return (lora_b.float() @ lora_a.float()) * (alpha / rank)
