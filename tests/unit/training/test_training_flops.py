"""Counted FLOPs against counts by hand and against what torch's own counter sees of a real backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_family import CHANNELS, TOKENS, WIDTH
from tiny_training import make_trainer, tiny_groups
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode

from relax_sdk.training import FlopsModel, measure_matrix_rate, replay, trainer
from relax_sdk.weights import inject_lora

ROWS, LENGTH, DIM, HEADS, HIDDEN, RANK = 2, 6, 8, 2, 24, 3
M = ROWS * LENGTH
PROJECTION = 2 * M * DIM * DIM
PRODUCT = 2 * ROWS * LENGTH * LENGTH * DIM  # Q K^T, or P V, over all heads
MLP = 2 * M * DIM * HIDDEN
ADAPTER = 2 * M * DIM * RANK


class Block(nn.Module):
    def __init__(self, *, attention: bool = True) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM, bias=False)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.to_q, self.to_k, self.to_v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v) if self.attention else q + k + v
        x = x + self.to_out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Tiny(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.proj_in = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Block(**kwargs), Block(**kwargs)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
        return x


BLOCK = 4 * PROJECTION + 2 * PRODUCT + 2 * MLP


def counted(module: nn.Module) -> tuple[int, int, int]:
    model = FlopsModel(module)
    with model.counting("only"):
        module(torch.randn(ROWS, LENGTH, DIM))
    found = model["only"]
    return found.forward, found.backward, found.recompute


def test_full_training_by_hand() -> None:
    forward = PROJECTION + 2 * BLOCK
    # Twice the forward, except that nobody asks for the gradient of the input.
    assert counted(Tiny()) == (forward, 2 * forward - PROJECTION, 0)


def test_lora_by_hand() -> None:
    """LoRA on to_q and to_out: no weight gradient but the adapters', and nothing before the first adapter."""
    module = Tiny()
    inject_lora(module, rank=RANK, alpha=6.0, target_modules=("to_q", "to_out"))
    forward = PROJECTION + 2 * BLOCK + 2 * 4 * ADAPTER
    outward = PROJECTION + 2 * MLP  # to_out and the MLP: towards their inputs
    adapters = 4 * 2 * ADAPTER  # A and B of both layers: weights and inputs
    # In the first block q alone of the three is on the way to an adapter: dP = dO V^T and dQ = dS K; and A of its
    # to_q has an input that needs nothing.
    first = outward + adapters - ADAPTER + 2 * PRODUCT
    # In the second, everything: dV, dP, dQ, dK, and the projections towards x.
    second = outward + adapters + 4 * PRODUCT + 3 * PROJECTION
    assert counted(module) == (forward, first + second, 0)


def test_what_is_recomputed_is_counted_apart() -> None:
    module = Tiny()
    plain = counted(module)
    module.blocks[1] = checkpoint_wrapper(module.blocks[1], checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    assert counted(module) == (plain[0], plain[1], BLOCK)
    assert not module.blocks[1]._forward_hooks, "the hooks of the count are gone"
    assert not module.blocks[1]._forward_pre_hooks


@pytest.mark.parametrize("lora", [False, True])
def test_torch_sees_as_much_in_the_backward(lora: bool) -> None:
    """Without attention, whose backward torch counts with the kernel's own recomputation."""
    module = Tiny(attention=False)
    if lora:
        inject_lora(module, rank=RANK, alpha=6.0, target_modules=("to_q", "to_out"))
    forward, backward, _ = counted(module)
    with FlopCounterMode(display=False) as counter:
        out = module(torch.randn(ROWS, LENGTH, DIM))
        assert counter.get_total_flops() == forward
        out.sum().backward()
    assert counter.get_total_flops() == forward + backward


def test_a_forward_without_gradient_needs_no_backward() -> None:
    with torch.no_grad():
        assert counted(Tiny())[1] == 0


def test_a_geometry_is_counted_once_and_a_failed_forward_never() -> None:
    module = Tiny()
    model = FlopsModel(module)
    with pytest.raises(RuntimeError, match="shapes"), model.counting("a"):
        module(torch.randn(ROWS, LENGTH, DIM + 1))
    with pytest.raises(KeyError):
        model["a"]
    for rows in (ROWS, 5):
        with model.counting("a"):
            module(torch.randn(rows, LENGTH, DIM))
    assert model["a"].forward == PROJECTION + 2 * BLOCK


# --- the trainer's metrics --------------------------------------------------------------------------------------------


def row_flops() -> tuple[int, int]:
    """Forward and backward of one row of the tiny family, by hand; its input is latents, sigma and text."""
    token = 2 * WIDTH * ((CHANNELS + 2) + 4 * WIDTH + CHANNELS)
    return TOKENS * token, TOKENS * (2 * token - 2 * WIDTH * (CHANNELS + 2))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("steps", [None, 1])
def test_the_rate_of_an_update(checkpointing: bool, steps: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_trainer(steps=steps, updates=2, fsdp={"activation_checkpointing": checkpointing})
    ticks = iter((10.0, 14.0))
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: next(ticks))
    metrics = made.update(tiny_groups()).metrics
    forward, backward = row_flops()
    cells = 4 * 4 * 2
    # Anchor, forward and backward of every cell, in 4 s; the blocks' linear layers are what a checkpoint repeats.
    assert metrics["perf/train_tflops"] == pytest.approx(cells * (2 * forward + backward) / 4 / 1e12)
    repeated = cells * TOKENS * 4 * 2 * WIDTH * WIDTH if checkpointing else 0
    assert metrics["perf/train_recompute_tflops"] == pytest.approx(repeated / 4 / 1e12)
    assert "perf/mfu" not in metrics


@pytest.mark.usefixtures("process_group")
def test_the_share_of_the_matrix_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_trainer()
    monkeypatch.setattr(made, "_measured_matrix_rate", lambda: 5e9)
    metrics = made.update(tiny_groups()).metrics
    assert metrics["perf/mfu"] == pytest.approx(metrics["perf/train_tflops"] * 1e12 / 5e9)


def test_geometries_differ_where_costs_do() -> None:
    one, two = (group.trajectory for group in tiny_groups(2))
    base = replay.replay_geometry(one, (0, 1), (0, 1))
    assert base == replay.replay_geometry(two, (2, 3), (0, 1)) == replay.replay_geometry(one, (1, 2), (1, 0))
    assert base != replay.replay_geometry(one, (0, 1), (0,))
    longer = one.conditions | {"encoder_hidden_states": torch.ones(9, 1)}
    assert base != replay.replay_geometry(one.model_copy(update={"conditions": longer}), (0, 1), (0, 1))


def test_a_matrix_rate_is_positive_and_finite() -> None:
    rate = measure_matrix_rate(torch.device("cpu"), torch.float32, size=32, seconds=0.001)
    assert 0 < rate < 1e15
