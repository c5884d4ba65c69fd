"""Full weight sync inside the server: every tensor lands in its place, or nothing is sampled with what is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_sglang
import pytest
import torch
from fake_sglang import (
    LORA,
    WIDTH,
    ServerTransformer,
    World,
    fill,
    partial_sync,
    plain_transformer,
    server_transformer,
    sync,
    wire_tensors,
)
from tiny_sync import CPU, buckets_of, offer_of, write
from torch import Tensor

from relax_sdk.errors import WeightSyncError
from relax_sdk.rollout.sglang.server_side.destinations import Destination
from relax_sdk.rollout.sglang.server_side.sync import WeightReceiver
from relax_sdk.weights import SendBuffer

FUSED = "blocks.1.attn.add_k_proj.weight"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_sglang.install(monkeypatch)


@pytest.fixture
def transformer(world: World) -> ServerTransformer:
    return server_transformer(plain_transformer(seed=0))


@pytest.fixture
def receiver(transformer: ServerTransformer) -> WeightReceiver:
    return WeightReceiver(transformer, device=CPU)


@pytest.fixture
def new() -> dict[str, Tensor]:
    """The weights that come."""
    return wire_tensors(plain_transformer(seed=1))


def state_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def valid(receiver: WeightReceiver, version: int) -> bool:
    try:
        receiver.require_valid(version)
    except WeightSyncError:
        return False
    return True


# --- what a whole sync does -------------------------------------------------------------------------------------------


def test_a_full_sync_writes_every_parameter_and_its_row_blocks(
    receiver: WeightReceiver, transformer: ServerTransformer, new: dict[str, Tensor], world: World
) -> None:
    addresses = {name: parameter.data_ptr() for name, parameter in transformer.named_parameters()}
    held, sent = sync(receiver, new, 1)
    assert held == sent
    assert same(state_of(transformer), state_of(server_transformer(plain_transformer(seed=1))))
    # in place: captured graphs and other references keep their memory
    assert addresses == {name: parameter.data_ptr() for name, parameter in transformer.named_parameters()}
    assert (receiver.version, receiver.invalid, valid(receiver, 1), valid(receiver, 0)) == (1, None, True, False)
    # what SGLang derived from the earlier weights is gone
    assert (world.forgotten, transformer.refreshed) == (1, 1)


def test_a_bfloat16_engine_holds_what_a_bfloat16_wire_brought(world: World, new: dict[str, Tensor]) -> None:
    transformer = server_transformer(plain_transformer()).bfloat16()
    rounded = {name: tensor.bfloat16() for name, tensor in new.items()}
    held, sent = sync(WeightReceiver(transformer, device=CPU), rounded, 1)
    assert held == sent
    assert torch.equal(transformer.state_dict()["blocks.0.attn.to_q.weight"], rounded["blocks.0.attn.to_q.weight"])


def test_an_engine_that_would_round_what_comes_says_so(world: World, new: dict[str, Tensor]) -> None:
    """float32 into bfloat16 parameters: the checksum is that of what is held, so it cannot agree."""
    receiver = WeightReceiver(server_transformer(plain_transformer()).bfloat16(), device=CPU)
    with pytest.raises(WeightSyncError, match="arrived with checksum"):
        sync(receiver, new, 1)


def test_the_checksum_is_of_what_is_held_not_of_what_was_sent(
    receiver: WeightReceiver, new: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_foreach_copy_", lambda places, parts: None)
    with pytest.raises(WeightSyncError, match=r"bucket 0 \(4 tensors, first 'blocks.0.attn.to_q.weight'\)"):
        sync(receiver, new, 1)


def test_syncs_follow_each_other(receiver: WeightReceiver, transformer: ServerTransformer) -> None:
    for version in (1, 2, 3):
        sync(receiver, wire_tensors(plain_transformer(seed=version)), version)
        assert same(state_of(transformer), state_of(server_transformer(plain_transformer(seed=version))))
        assert valid(receiver, version)


def test_split_layers_are_refused_at_once(world: World, transformer: ServerTransformer) -> None:
    with pytest.raises(WeightSyncError, match=r"tensor parallelism of 2"):
        WeightReceiver(transformer, device=CPU, tensor_parallel=2)


# --- refusals before anything is written ------------------------------------------------------------------------------


def renamed(tensors: dict[str, Tensor], name: str, to: str) -> dict[str, Tensor]:
    return {to if key == name else key: value for key, value in tensors.items()}


def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if key not in names}


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "unknown name": (
        lambda all_: renamed(all_, "blocks.0.attn.to_q.weight", "blocks.0.attn.to_qq.weight"),
        r"unknown name 'blocks.0.attn.to_qq.weight' \(nearest: 'blocks.0.attn.to_q.weight'\)",
    ),
    "prefixed names": (
        lambda all_: {f"module.{name}": value for name, value in all_.items()},
        r"unknown name 'module\.blocks\.0.*; and \d+ more",
    ),
    "missing parameter": (
        lambda all_: without(all_, "blocks.1.attn.norm_q.weight"),
        r"1 parameters of the engine are not, or not exactly once, in the sync: \['blocks.1.attn.norm_q.weight'\]",
    ),
    "missing block of a fused parameter": (
        lambda all_: without(all_, FUSED),
        r"1 parameters .* not exactly once, in the sync: \['blocks.1.attn.to_added_qkv.weight'\]",
    ),
    "wrong shape": (
        lambda all_: {**all_, "blocks.0.attn.to_q.weight": torch.zeros(WIDTH, WIDTH + 1)},
        r"'blocks.0.attn.to_q.weight' has shape \[12, 13\], the engine's \[12, 12\]",
    ),
    "transposed shape with the same bytes": (
        lambda all_: {**all_, "blocks.0.attn.to_q.bias": torch.zeros(3, 4)},
        r"'blocks.0.attn.to_q.bias' has shape \[3, 4\], the engine's \[12\]",
    ),
    "wrong shape of a block": (
        lambda all_: {**all_, FUSED: torch.zeros(3 * WIDTH, WIDTH)},
        r"add_k_proj.weight' has shape \[36, 12\], the engine's \[12, 12\]",
    ),
    "the whole and a block of it": (
        lambda all_: {"blocks.1.attn.to_added_qkv.weight": torch.zeros(3 * WIDTH, WIDTH), **all_},
        r"1 parameters .* not exactly once, in the sync: \['blocks.1.attn.to_added_qkv.weight'\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_untouched(
    case: str, receiver: WeightReceiver, transformer: ServerTransformer, new: dict[str, Tensor]
) -> None:
    change, text = WRONG[case]
    before = state_of(transformer)
    with pytest.raises(WeightSyncError, match=text):
        partial_sync(receiver, change(new))
    receiver.abort(undo=False)
    assert same(before, state_of(transformer))
    assert (receiver.version, receiver.invalid, valid(receiver, 0)) == (0, None, True)
    sync(receiver, new, 1)


def test_a_name_that_comes_twice_is_refused(receiver: WeightReceiver, new: dict[str, Tensor]) -> None:
    name = "blocks.0.attn.to_q.weight"
    with SendBuffer.open(CPU, 4096) as buffer:
        offer = offer_of(new, [buffer.handle])
        twice = (*offer.tensors, (name, (WIDTH, WIDTH)))
        described = [(key, shape, 4 * torch.Size(shape).numel()) for key, shape in twice]
        manifest = type(offer.manifest).describe("full", described)
        doubled = type(offer)(manifest=manifest, dtype="float32", tensors=twice, buffers=offer.buffers, adapter=None)
        with pytest.raises(WeightSyncError, match=rf"'{name}' comes 2 times"):
            receiver.begin(doubled)


def test_rows_that_do_not_divide_into_their_parts_are_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"x\.weight: 7 rows do not make 3 equal parts"):
        Destination("x.weight", 0, 3).view(torch.zeros(7, 2))


def test_a_buffer_that_cannot_be_opened_is_refused_untouched(
    receiver: WeightReceiver, transformer: ServerTransformer, new: dict[str, Tensor]
) -> None:
    before = state_of(transformer)
    with SendBuffer.open(CPU, 4096) as buffer:
        offer = offer_of(new, [buffer.handle])
    with pytest.raises(WeightSyncError, match="cannot open the sender's buffer"):
        receiver.begin(offer)
    assert same(before, state_of(transformer))
    assert valid(receiver, 0)


# --- failures on the way ----------------------------------------------------------------------------------------------


def test_corrupt_bytes_are_refused_and_nothing_is_sampled_with_them(
    receiver: WeightReceiver, new: dict[str, Tensor]
) -> None:
    with pytest.raises(WeightSyncError, match=r"bucket 1 \(4 tensors, first '.*'\) arrived with checksum"):
        partial_sync(receiver, new, buckets=2, corrupt=True)
    assert not valid(receiver, 0)
    receiver.abort(undo=False)
    assert receiver.version == 0
    assert receiver.invalid == "weights are partly those of an unfinished sync after version 0"
    with pytest.raises(WeightSyncError, match="partly those of an unfinished sync"):
        receiver.require_valid(0)
    sync(receiver, new, 1)
    assert valid(receiver, 1)


def test_an_open_sync_is_not_sampled_with(receiver: WeightReceiver, new: dict[str, Tensor]) -> None:
    partial_sync(receiver, new, buckets=0)
    with pytest.raises(WeightSyncError, match="a weight sync is open"):
        receiver.require_valid(0)
    receiver.abort(undo=False)
    assert valid(receiver, 0)


@pytest.mark.parametrize("buckets", [0, 1])
def test_an_abort_leaves_valid_weights_only_before_the_first_bucket(
    buckets: int, receiver: WeightReceiver, transformer: ServerTransformer, new: dict[str, Tensor]
) -> None:
    before = state_of(transformer)
    partial_sync(receiver, new, buckets=buckets)
    receiver.abort(undo=False)
    assert valid(receiver, 0) == same(before, state_of(transformer)) == (buckets == 0)
    with pytest.raises(WeightSyncError, match="no weight sync is open"):
        receiver.commit(1)


def test_buckets_out_of_order_or_beyond_the_list_are_refused(receiver: WeightReceiver, new: dict[str, Tensor]) -> None:
    parts = buckets_of(new, 4)
    first, second = parts[0][0], parts[1][0]
    changed: list[tuple[Any, str]] = [
        (second, r"bucket 1 begins at tensor 4\n.*bucket 0 at tensor 0"),
        (first.model_copy(update={"first": 1}), "bucket 0 begins at tensor 1"),
        (first.model_copy(update={"count": 99}), r"ends beyond the 22 announced tensors"),
        (first.model_copy(update={"bytes": first.bytes + 4}), r"says \d+ bytes, its tensors have"),
        (first.model_copy(update={"slot": 2}), "slot 2 of a buffer with 2"),
    ]
    with SendBuffer.open(CPU, max(len(content) for _, content in parts)) as buffer:
        receiver.begin(offer_of(new, [buffer.handle]))
        write(buffer, 0, parts[0][1])
        for bucket, text in changed:
            with pytest.raises(WeightSyncError, match=text):
                receiver.receive(bucket)
            assert receiver.invalid is None, "nothing was written yet"
        receiver.receive(first)
        with pytest.raises(WeightSyncError, match="bucket 0 begins at tensor 0"):
            receiver.receive(first)


def test_a_commit_before_everything_has_come_is_refused(receiver: WeightReceiver, new: dict[str, Tensor]) -> None:
    with pytest.raises(WeightSyncError, match=r"8 tensors came\n.*22, as announced"):
        partial_sync(receiver, new, buckets=2, commit=1)
    receiver.abort(undo=False)
    assert not valid(receiver, 0)
    assert not valid(receiver, 1)


def test_without_begin_there_is_nothing_to_receive_or_commit(receiver: WeightReceiver, new: dict[str, Tensor]) -> None:
    with pytest.raises(WeightSyncError, match="no weight sync is open"):
        receiver.receive(buckets_of(new, 4)[0][0])
    with pytest.raises(WeightSyncError, match="no weight sync is open"):
        receiver.commit(1)
    receiver.abort(undo=True)
    assert valid(receiver, 0)


def test_an_undone_full_sync_leaves_no_valid_weights_until_the_next(
    receiver: WeightReceiver, new: dict[str, Tensor]
) -> None:
    sync(receiver, new, 1)
    receiver.abort(undo=True)
    assert (receiver.version, receiver.invalid) == (0, "the weights of version 0 are overwritten")
    assert not valid(receiver, 0)
    assert not valid(receiver, 1)
    sync(receiver, new, 1)
    assert valid(receiver, 1)


def test_an_abort_without_undo_keeps_the_last_commit(receiver: WeightReceiver, new: dict[str, Tensor]) -> None:
    sync(receiver, new, 1)
    receiver.abort(undo=False)
    assert valid(receiver, 1)
    # and the refusal of the next sync does not make the last commit undoable
    with pytest.raises(WeightSyncError):
        partial_sync(receiver, without(new, FUSED))
    receiver.abort(undo=True)
    assert valid(receiver, 1)


def test_weights_that_were_given_up_stay_invalid_through_an_abort(
    receiver: WeightReceiver, new: dict[str, Tensor]
) -> None:
    receiver.lost("released")
    partial_sync(receiver, new, buckets=1)
    receiver.abort(undo=False)
    assert receiver.invalid == "released"
    sync(receiver, new, 1)
    assert valid(receiver, 1)


def test_modes_do_not_mix(receiver: WeightReceiver, new: dict[str, Tensor]) -> None:
    sync(receiver, new, 1)
    shapes = {"A": (3, WIDTH), "B": (WIDTH, 3)}
    lora = {f"blocks.0.attn.to_q.lora_{half}.weight": torch.ones(shape) for half, shape in shapes.items()}
    fill(lora.values(), seed=3)
    with pytest.raises(WeightSyncError, match="'adapter' came after one in mode 'full': the base is no longer"):
        partial_sync(receiver, lora, adapter=LORA)
    assert valid(receiver, 1)
    assert receiver.wrapped == {}
