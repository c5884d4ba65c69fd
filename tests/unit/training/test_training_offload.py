"""Offload and wake: storages really empty in between, everything as it was afterwards, training none the wiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload_ranks import copies, local_tensors, storage_bytes, train_with_pause
from tiny_training import make_trainer, tiny_groups
from torch import Tensor, nn

from relax_sdk.errors import TrainingError
from relax_sdk.training import StorageOffload
from relax_sdk.weights import HostBlocks

CPU = torch.device("cpu")
MODES = ("full", "lora")


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_training_with_offload_is_training_without(mode: str, reshard: bool) -> None:
    changes: dict[str, Any] = {"mode": mode, "fsdp": {"reshard_after_forward": reshard, "param_dtype": "bf16"}}
    plain, paused = (train_with_pause(pause=pause, **changes) for pause in (False, True))
    assert paused["away"] == [0, 0]
    assert paused["same"] == [True, True]
    assert paused["metrics"] == plain["metrics"]
    assert_equal(paused["end"], plain["end"])


@pytest.mark.usefixtures("process_group")
def test_gathered_parameters_and_gradients_are_freed() -> None:
    """With --no-fsdp-reshard-after-forward a forward leaves whole parameters in the place of the sharded ones."""
    made = make_trainer(fsdp={"reshard_after_forward": False})
    group = tiny_groups(1)[0].trajectory
    made._adapter.replay_transition(made.module, _batch(group))
    gathered = [parameter.untyped_storage() for parameter in made.module.parameters()]
    assert all(not hasattr(parameter, "to_local") for parameter in made.module.parameters()), "they are gathered"
    made.offload()
    assert {storage.nbytes() for storage in gathered} == {0}
    optimized = [parameter.to_local() for parameter in made._optimizer.param_groups[0]["params"]]
    assert {shard.untyped_storage().nbytes() for shard in optimized} == {0}
    assert storage_bytes(made) == 0
    made.wake()
    for parameter in made.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.offload()
    made.wake()
    assert all(parameter.grad is None for parameter in made.module.parameters())


def _batch(trajectory: Any) -> Any:
    from relax_sdk.protocols import ReplayBatch

    return ReplayBatch(
        latents=trajectory.latents[:, 0],
        sigmas=torch.full((4,), 0.5),
        conditions=(trajectory.conditions,) * 4,
        height=trajectory.height,
        width=trajectory.width,
    )


@pytest.mark.usefixtures("process_group")
def test_what_needs_the_weights_is_refused_meanwhile() -> None:
    made = make_trainer()
    made.offload()
    assert made.is_offloaded
    with pytest.raises(TrainingError, match=r"update\(\) needs the weights, which are offloaded") as caught:
        made.update(tiny_groups())
    assert "wake()" in str(caught.value)
    with pytest.raises(TrainingError, match="offloaded"):
        _ = made.module
    made.wake()
    assert not made.is_offloaded
    made.update(tiny_groups())


@pytest.mark.usefixtures("process_group")
def test_a_second_offload_or_wake_does_nothing() -> None:
    made = make_trainer()
    made.update(tiny_groups())
    before = copies(made)
    assert made.wake() == 0
    freed = made.offload()
    assert freed == sum(tensor.nbytes for tensor in before.values())
    assert made.offload() == 0
    assert made.wake() == freed
    assert made.wake() == 0
    assert_equal(copies(made), before)


@pytest.mark.usefixtures("process_group")
def test_host_memory_is_allocated_once() -> None:
    made = make_trainer()
    held = StorageOffload(made._module, made._optimizer, device=CPU, block_bytes=256)
    sizes, blocks = [], []
    for seed in range(12):
        held.offload()
        sizes.append(held.host_bytes)
        blocks.append([block.data_ptr() for block in held._host.blocks])
        held.wake()
        if seed in (3, 4):
            made.update(tiny_groups(1, 2))
    # Once for the parameters, once more for the moments that the first optimizer step creates.
    assert len(set(sizes[:4])) == len(set(sizes[4:])) == 1
    assert sizes[4] >= 2 * sizes[0]
    assert blocks[4][: len(blocks[0])] == blocks[0]
    assert all(block == blocks[4] for block in blocks[5:])


class Shared(nn.Module):
    """Everything that a module may hold: tied weights, a view of another buffer, odd sizes and dtypes, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.first.weight
        self.short = nn.Parameter(torch.randn(3).bfloat16())
        whole = torch.randn(11)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[4:9], persistent=False)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("elsewhere", torch.zeros(2, device="meta"))


@pytest.mark.parametrize("block_bytes", [512, 1280, 1 << 20])
def test_shared_storages_odd_sizes_and_buffers(block_bytes: int) -> None:
    """Small blocks cut the larger storages, those of 1280 bytes also one that begins within a block."""
    module = Shared()
    module.register_buffer("long", torch.randn(1000))
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    here = {name: tensor for name, tensor in module.named_buffers() if name not in ("nothing", "elsewhere")}
    here |= dict(module.named_parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    before = {name: tensor.detach().clone() for name, tensor in here.items()}
    moments = [value.clone() for value in states]
    held = StorageOffload(module, optimizer, device=CPU, block_bytes=block_bytes)
    for _ in range(3):
        freed = held.offload()
        assert {tensor.untyped_storage().nbytes() for tensor in (*here.values(), *states)} == {0}
        held.wake()
        assert_equal({name: tensor.detach() for name, tensor in here.items()}, before)
        assert all(torch.equal(got, want) for got, want in zip(states, moments, strict=True))
    # The view and the tied weight cost nothing of their own.
    alone = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in here.values()}
    assert freed == sum(alone.values()) + sum(value.nbytes for value in states)
    module.whole[5] = 42.0
    assert module.part[1] == 42.0
    assert module.tied.weight is module.first.weight


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("moment", ["offload", "wake"])
def test_a_failed_move_is_fatal(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_trainer()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    if moment == "offload":
        monkeypatch.setattr(HostBlocks, "_new_block", broken)
    else:
        made.offload()
        monkeypatch.setattr(HostBlocks, "copy", broken)
    with pytest.raises(TrainingError, match="out of memory"):
        getattr(made, moment)()
    monkeypatch.undo()
    for attempt in (made.offload, made.wake, lambda: made.update(tiny_groups()), lambda: made.module):
        with pytest.raises(TrainingError, match=r"were lost: .* failed: out of memory"):
            attempt()


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_with_offload_train_like_two_without(two_ranks: list[dict[str, Any]], mode: str) -> None:
    """Uneven shards too: of LoRA's rank-2 matrices and odd biases a rank may hold nothing."""
    for results in two_ranks:
        plain, paused = (results["offload"][mode, pause] for pause in (False, True))
        assert paused["away"] == [0, 0]
        assert paused["same"] == [True, True]
        assert paused["metrics"] == plain["metrics"]
        assert_equal(paused["end"], plain["end"])


def test_a_wave_has_sharded_its_copies_before_the_next_loads(two_ranks: list[dict[str, Any]]) -> None:
    (alone_start, alone_end), (second_start, _) = (results["waves"][0] for results in two_ranks)
    assert alone_start < alone_end <= second_start
    (first_start, first_end), (second_start, second_end) = (results["waves"][1] for results in two_ranks)
    assert max(first_start, second_start) < min(first_end, second_end), "one wave loads at the same time"


def test_repeated_work_is_counted_once(two_ranks: list[dict[str, Any]]) -> None:
    """Two groups of four candidates, shared; two of three, which every rank replays whole: cells count once."""
    shared, repeated = ([results["tflops"][which]["perf/train_tflops"] for results in two_ranks] for which in (0, 1))
    assert shared[0] == shared[1] > 0
    assert repeated[0] == repeated[1] == pytest.approx(shared[0] * 3 / 4)


@pytest.mark.usefixtures("process_group")
def test_local_tensors_list_what_a_rank_holds() -> None:
    """The tests above look at these: parameters and, after a step, two moments and a step count each."""
    made = make_trainer()
    count = sum(1 for _ in made.module.parameters())
    assert sum(1 for _ in local_tensors(made)) == count
    made.update(tiny_groups())
    assert sum(1 for _ in local_tensors(made)) == 4 * count
