"""LoRA layers inside SGLang's transformer: the same expression as in training, never merged into the base.

Merging and unmerging in bfloat16 would let the base drift by a rounding per sync, and SGLang's own wrappers compile
per layer; these add B A x times ``alpha / rank`` to the base layer's output, in the base's dtype, as peft does. Only
layers that are whole on every device can be wrapped (no tensor parallelism).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from relax_sdk.errors import WeightSyncError

__all__ = ["LoraLayer", "LoraPart", "wrap_layers"]


@dataclasses.dataclass
class LoraPart:
    """One adapted projection: one row block of a layer, or all of it.

    ``lora_a`` is [r, in], ``lora_b`` [out, r]; both are views of a buffer of the weight sync.
    """

    lora_a: Tensor
    lora_b: Tensor


class LoraLayer(nn.Module):
    """A linear layer of SGLang with adapters on some of its equal row blocks.

    Args:
        base_layer: returns ``(output, bias or None)``, as SGLang's linear layers do.
        parts: how many equal row blocks the base layer consists of; 1 for a plain layer.
        scale: ``alpha / rank``.
    """

    def __init__(self, base_layer: nn.Module, *, parts: int, scale: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._parts = parts
        self._scale = scale
        self.adapters: dict[int, LoraPart] = {}
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        # SGLang's blocks read attributes of the layer (its bias, its quantisation) beside calling it.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[..., in] -> ([..., out], bias that the caller adds or None)."""
        self.calls += 1
        if self._parts == 1:
            output, bias = self.base_layer(x)
            part = self.adapters.get(0)
            return (output if part is None else output + self._delta(x, part)), bias
        base: Any = self.base_layer
        weights = base.weight.chunk(self._parts)
        biases = [None] * self._parts if base.bias is None else base.bias.chunk(self._parts)
        blocks = []
        for index, (weight, bias_rows) in enumerate(zip(weights, biases, strict=True)):
            # Block by block, as the trainer's separate projections round.
            block = functional.linear(x, weight, bias_rows)
            part = self.adapters.get(index)
            blocks.append(block if part is None else block + self._delta(x, part))
        return torch.cat(blocks, dim=-1), None

    def _delta(self, x: Tensor, part: LoraPart) -> Tensor:
        hidden = functional.linear(x.to(part.lora_a.dtype), part.lora_a)
        return (functional.linear(hidden, part.lora_b) * self._scale).to(x.dtype)


def wrap_layers(transformer: nn.Module, layers: dict[str, int], *, scale: float) -> dict[str, LoraLayer]:
    """Replace layers by `LoraLayer` in place.

    Args:
        transformer: SGLang's.
        layers: name of a layer -> of how many row blocks it consists.
        scale: ``alpha / rank``.

    Raises:
        WeightSyncError: a name stands for no layer with a 2-D weight.
    """
    found = dict(transformer.named_modules())
    wrapped = {}
    for name, parts in layers.items():
        layer = found.get(name)
        weight = getattr(layer, "weight", None)
        if layer is None or weight is None or weight.dim() != 2:
            raise WeightSyncError(f"{name!r} is no linear layer of the engine's {type(transformer).__name__}")
        parent, _, leaf = name.rpartition(".")
        wrapped[name] = LoraLayer(layer, parts=parts, scale=scale)
        setattr(found[parent], leaf, wrapped[name])
    return wrapped
