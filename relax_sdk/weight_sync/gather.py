"""The actor's weights as the engine should get them: names, order, shapes, dtype, whole tensors.

Drawing from `WireWeights` gathers one FSDP2 parameter at a time, a collective that every rank must join.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from relax_sdk.errors import WeightSyncError
from relax_sdk.protocols import FullWeightManifest
from relax_sdk.weights import is_lora_name, merge_delta, to_wire_name

__all__ = ["WireWeights", "strip_transport_wrappers"]

_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


def strip_transport_wrappers(name: str) -> str:
    """Take out the segments that checkpointing, FSDP or compilation put into a parameter's name.

    An engine does not know them, and stock loaders skip unknown names in silence.
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class WireWeights:
    """A view of the trained module for one sync; each iteration draws everything again.

    A draw that fails after its gather (a merge that runs out of memory) leaves the iterator usable, so that this rank
    can go on to take part in the other ranks' gathers. A gather that fails ends it: there is nobody to gather with.

    Attributes:
        manifest: what a draw to the end adds up to.
        tensors: wire names and shapes, in order.
        dtype: name of the wire dtype, ``"bfloat16"`` or ``"float32"``.

    Args:
        module: the sharded module.
        mode: ``"full"`` sends every parameter, with LoRA merged into its base layers; ``"adapter"`` only LoRA's.
        dtype: wire dtype.
        name_map: the adapter's `weight_name_map`.
        lora_rank, lora_alpha: used when LoRA is merged.

    Raises:
        WeightSyncError: adapter mode on a module without LoRA, or two parameters with one wire name.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mode: str,
        dtype: torch.dtype,
        name_map: Callable[[str], str],
        lora_rank: int = 0,
        lora_alpha: float = 0.0,
    ) -> None:
        self._dtype = dtype
        self._rank, self._alpha = lora_rank, lora_alpha
        parameters = {strip_transport_wrappers(name): tensor for name, tensor in module.named_parameters()}
        lora = {name: tensor for name, tensor in parameters.items() if is_lora_name(name)}
        self._sources: list[tuple[str, Tensor, tuple[Tensor, Tensor] | None]] = []
        if mode == "adapter":
            if not lora:
                raise WeightSyncError("adapter sync asked for, but the module holds no LoRA layer")
            self._sources = [(name_map(to_wire_name(name)), tensor, None) for name, tensor in lora.items()]
        else:
            for name, tensor in parameters.items():
                if name in lora:
                    continue
                pair = None
                layer, _, leaf = name.rpartition(".base_layer.")
                if layer:
                    name = f"{layer}.{leaf}"
                    if leaf == "weight":
                        pair = (lora[f"{layer}.lora_A.default.weight"], lora[f"{layer}.lora_B.default.weight"])
                self._sources.append((name_map(name), tensor, pair))
        names = [name for name, _, _ in self._sources]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise WeightSyncError(f"{len(twice)} wire names stand for two parameters (first: {twice[:3]})")
        self.tensors = tuple((name, tuple(tensor.shape)) for name, tensor, _ in self._sources)
        self.dtype = str(dtype).removeprefix("torch.")
        self.manifest = FullWeightManifest.describe(
            "adapter" if mode == "adapter" else "full",
            ((name, shape, math.prod(shape) * dtype.itemsize) for name, shape in self.tensors),
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """``(wire name, whole tensor in wire dtype)`` in the manifest's order, on the module's device."""
        return _Draws(self._sources, self._finish)

    def _finish(self, whole: Tensor, pair: Sequence[Tensor]) -> Tensor:
        """What the wire gets of a gathered tensor: LoRA merged in float32, rounded once."""
        if pair:
            whole = whole.float() + merge_delta(pair[0], pair[1], rank=self._rank, alpha=self._alpha)
        return whole.to(self._dtype)


class _Draws:
    """One iteration. No generator, which would be at its end after any error."""

    def __init__(
        self,
        sources: Sequence[tuple[str, Tensor, tuple[Tensor, Tensor] | None]],
        finish: Callable[[Tensor, Sequence[Tensor]], Tensor],
    ) -> None:
        self._sources = iter(sources)
        self._finish = finish

    def __iter__(self) -> Self:
        return self

    @torch.no_grad()
    def __next__(self) -> tuple[str, Tensor]:
        name, tensor, pair = next(self._sources)
        try:
            whole, *parts = [_whole(part) for part in (tensor, *(pair or ()))]
        except Exception:
            self._sources = iter(())
            raise
        return name, self._finish(whole, parts)


def _whole(tensor: Tensor) -> Tensor:
    """All shards of a DTensor together; a plain tensor as it is."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach()
