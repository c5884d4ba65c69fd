"""FLOPs that a replay needs, counted from the operators of its own forward, and the matrix rate of a device.

Convention: PaLM (Chowdhery et al. 2022), appendix B. A multiply-add is 2 FLOPs; only matrix products count: linear
layers, batched products, convolutions and both products of scaled-dot-product attention (without a causal discount).
Model FLOPs are what the mathematics needs: what activation checkpointing repeats is counted apart, and so is left out
of the MFU. Element-wise work, norms and the optimizer count as nothing.

A forward F costs F. Its backward costs, for each product, F once more for every factor that needs a gradient: about
2 F when everything is trained (hence the usual 3 F for a training step), and about F under LoRA, whose frozen weights
need none. Attention follows the same rule over its four gradient products.

Shapes come from the operators themselves, below autograd, so that FSDP2, LoRA and checkpoint wrappers change nothing.
A fused kernel outside torch counts as nothing until it has a formula (`register_flop_formula` of
`torch.utils.flop_counter`); with one, its backward counts as 2 F.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["FlopsModel", "ReplayFlops", "measure_matrix_rate"]

_aten = torch.ops.aten

# Positions of a product's two factors; the gradient of each is one more product of the same size.
_FACTORS: dict[Any, tuple[int, int]] = {
    _aten.mm: (0, 1),
    _aten.addmm: (1, 2),
    _aten.bmm: (0, 1),
    _aten.baddbmm: (1, 2),
    _aten.convolution: (0, 1),
}
# All take query [B, H, L, D], key [B, H, M, D] and value [B, H, M, E] first. The CPU's is not in torch's own table.
_ATTENTION: set[Any] = {
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_fused_attention_overrideable,
}


@dataclasses.dataclass(frozen=True)
class ReplayFlops:
    """FLOPs of one forward with a gradient, and of what follows from it.

    Attributes:
        forward: the forward alone; an anchor costs this much.
        backward: the backward, for the gradients that are needed.
        recompute: what activation checkpointing repeats in the backward, at most; not part of the two above.
    """

    forward: int = 0
    backward: int = 0
    recompute: int = 0


class FlopsModel:
    """Remembers the FLOPs of each input geometry; the first forward of a geometry is counted while it runs.

    Args:
        module: the trained module, wrapped as it will be called.
    """

    def __init__(self, module: nn.Module) -> None:
        self._checkpointed = [part for part in module.modules() if isinstance(part, CheckpointWrapper)]
        self._known: dict[Hashable, ReplayFlops] = {}

    def __getitem__(self, geometry: Hashable) -> ReplayFlops:
        """The FLOPs of a geometry whose forward was counted."""
        return self._known[geometry]

    @contextlib.contextmanager
    def counting(self, geometry: Hashable) -> Iterator[None]:
        """Around a forward with grad mode on: count it, unless its geometry is known."""
        if geometry in self._known:
            yield
            return
        counter = _Counter()
        with contextlib.ExitStack() as stack:
            for part in self._checkpointed:
                stack.callback(part.register_forward_pre_hook(counter.enter).remove)
                stack.callback(part.register_forward_hook(counter.leave).remove)
            stack.enter_context(counter)
            yield
        self._known[geometry] = ReplayFlops(counter.forward, counter.backward, counter.recompute)


class _Counter(TorchDispatchMode):
    """Adds up the operators of one forward; between `enter` and `leave` they are repeated in the backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = self.backward = self.recompute = 0
        self._depth = 0

    def enter(self, *_: object) -> None:
        self._depth += 1

    def leave(self, *_: object) -> None:
        self._depth -= 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        operator = func._overloadpacket
        if operator in _ATTENTION:
            forward, backward = _attention(*args[:3])
        elif operator in flop_registry:
            forward = flop_registry[operator](*args, **kwargs, out_val=out)
            backward = forward * _gradients(operator, args)
        else:
            return out
        self.forward += forward
        self.backward += backward
        self.recompute += forward if self._depth else 0
        return out


def _gradients(operator: Any, args: Sequence[Any]) -> int:
    """How many products of the forward's size the backward needs."""
    if operator in _FACTORS:
        return sum(_needs_gradient(args[position]) for position in _FACTORS[operator])
    return 2 if any(isinstance(arg, Tensor) and _needs_gradient(arg) for arg in args) else 0


def _attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
    """Forward: P = softmax(Q K^T), O = P V. Backward: dV = P^T dO; dP = dO V^T, then dQ = dS K and dK = dS^T Q."""
    batch, heads, rows, width = query.shape
    columns, value_width = value.shape[-2:]
    scores = 2 * batch * heads * rows * columns * width
    values = 2 * batch * heads * rows * columns * value_width
    for_query, for_key, for_value = (_needs_gradient(part) for part in (query, key, value))
    backward = values * (for_value + (for_query or for_key)) + scores * (for_query + for_key)
    return scores + values, backward


def _needs_gradient(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


@torch.no_grad()
def measure_matrix_rate(
    device: torch.device, dtype: torch.dtype, *, size: int = 8192, seconds: float = 0.2, rounds: int = 5
) -> float:
    """FLOP/s of square matrix products: what a perfect MFU would reach on this device, with its power and clocks.

    Takes ``3 size^2`` elements of device memory meanwhile.

    Args:
        device: where; a CPU too, with a much smaller ``size``.
        dtype: of both factors, e.g. the training's compute dtype.
        size: rows and columns of the factors.
        seconds: about how long to measure. Short bursts run faster than a chip sustains.
        rounds: the median of so many equal stretches is taken.
    """
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(left)

    def timed(count: int) -> float:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right, out=out)
        _synchronize(device)
        return time.perf_counter() - start

    timed(3)
    count = max(1, round(seconds / rounds / max(timed(3) / 3, 1e-9)))
    return 2 * size**3 * count / statistics.median(timed(count) for _ in range(rounds))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
