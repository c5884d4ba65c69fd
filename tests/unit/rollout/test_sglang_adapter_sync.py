"""Adapter sync inside the server: what peft computes, on an untouched base, and back again after an abort."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import fake_sglang
import pytest
import torch
from fake_sglang import (
    LORA,
    TARGETS,
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
from tiny_sync import CPU
from torch import Tensor, nn

from relax_sdk.errors import WeightSyncError
from relax_sdk.protocols import AdapterConfig
from relax_sdk.rollout.sglang.server_side.lora import LoraLayer
from relax_sdk.rollout.sglang.server_side.sync import WeightReceiver
from relax_sdk.weights import inject_lora, is_lora_name, to_wire_name

TO_Q = "blocks.0.attn.to_q"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_sglang.install(monkeypatch)


@pytest.fixture
def transformer(world: World) -> ServerTransformer:
    return server_transformer(plain_transformer())


@pytest.fixture
def receiver(transformer: ServerTransformer) -> WeightReceiver:
    return WeightReceiver(transformer, device=CPU)


def peft_transformer(seed: int, *, targets: tuple[str, ...] = TARGETS, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The trainer's module: base weights of seed 0, LoRA of its own seed, in one dtype."""
    made = plain_transformer()
    inject_lora(made, rank=LORA.rank, alpha=LORA.alpha, target_modules=targets)
    fill((tensor for name, tensor in made.named_parameters() if is_lora_name(name)), seed)
    return made.to(dtype)


def lora_tensors(peft: nn.Module) -> dict[str, Tensor]:
    return {
        to_wire_name(name): tensor.detach().clone() for name, tensor in peft.named_parameters() if is_lora_name(name)
    }


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype)


@torch.no_grad()
def output(module: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    return module(inputs(dtype))


# --- what the layers compute ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "targets",
    [TARGETS, ("attn.to_q",), ("attn.add_k_proj",), ("attn.add_q_proj", "attn.add_v_proj", "attn.to_out.0")],
    ids=["all", "unfused", "one block of the fused", "two blocks and one unfused"],
)
def test_the_output_is_pefts(
    targets: tuple[str, ...], receiver: WeightReceiver, transformer: ServerTransformer
) -> None:
    peft = peft_transformer(1, targets=targets)
    before = output(transformer)
    held, sent = sync(receiver, lora_tensors(peft), 1, adapter=LORA)
    assert held == sent
    torch.testing.assert_close(output(transformer), output(peft), atol=2e-5, rtol=1e-5)
    assert (output(transformer) - before).abs().max() > 0.1


def test_the_update_is_b_a_times_alpha_over_rank(receiver: WeightReceiver, transformer: ServerTransformer) -> None:
    """Hu et al. 2021, section 4.1, in float64, on one layer of each kind."""
    tensors = lora_tensors(peft_transformer(1))
    sync(receiver, tensors, 1, adapter=LORA)
    attention, x = transformer.blocks[0].attn, inputs()
    (got_q, _), (got_added, _) = attention.to_q(x), attention.to_added_qkv(x)
    base = plain_transformer().double().blocks[0].attn
    outputs = {
        "to_q": got_q,
        **dict(zip(("add_q_proj", "add_k_proj", "add_v_proj"), got_added.chunk(3, -1), strict=True)),
    }
    for name, got in outputs.items():
        a, b = (tensors[f"blocks.0.attn.{name}.lora_{half}.weight"].double() for half in "AB")
        expected = getattr(base, name)(x.double()) + x.double() @ (b @ a).T * (LORA.alpha / LORA.rank)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_as_close_as_its_rounding(world: World) -> None:
    """The same operations in the same order as peft's: equal, up to kernels that differ by shape."""
    peft = peft_transformer(1, dtype=torch.bfloat16)
    transformer = server_transformer(plain_transformer()).bfloat16()
    sync(WeightReceiver(transformer, device=CPU), lora_tensors(peft), 1, adapter=LORA)
    got, expected = output(transformer, torch.bfloat16), output(peft, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    exact = peft_transformer(1).to(torch.bfloat16).double()
    rounding = (expected.double() - output(exact, torch.float64)).abs().max()
    assert (got.double() - expected.double()).abs().max() <= rounding


def test_a_base_bias_is_added_once(receiver: WeightReceiver, transformer: ServerTransformer) -> None:
    nothing = {name: torch.zeros_like(tensor) for name, tensor in lora_tensors(peft_transformer(1)).items()}
    before = output(transformer)
    sync(receiver, nothing, 1, adapter=LORA)
    torch.testing.assert_close(output(transformer), before, atol=1e-6, rtol=1e-6)


def test_the_base_is_untouched_bit_for_bit(receiver: WeightReceiver, transformer: ServerTransformer) -> None:
    parameters = dict(transformer.named_parameters())
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    for version in (1, 2, 3):
        sync(receiver, lora_tensors(peft_transformer(version)), version, adapter=LORA)
        output(transformer)
    assert all(torch.equal(before[name], parameter) for name, parameter in parameters.items())
    assert all(any(parameter is held for held in transformer.parameters()) for parameter in parameters.values())


def test_a_wrapped_layer_still_shows_its_own_attributes(
    receiver: WeightReceiver, transformer: ServerTransformer
) -> None:
    base = transformer.blocks[0].attn.to_q
    sync(receiver, lora_tensors(peft_transformer(1)), 1, adapter=LORA)
    layer = transformer.blocks[0].attn.to_q
    assert isinstance(layer, LoraLayer)
    assert (layer.weight is base.weight, layer.quant_method) == (True, "none")
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = layer.nothing_of_the_kind


def test_layers_are_wrapped_once_and_count_their_calls(
    receiver: WeightReceiver, transformer: ServerTransformer
) -> None:
    sync(receiver, lora_tensors(peft_transformer(1)), 1, adapter=LORA)
    wrapped = dict(receiver.wrapped)
    assert sorted(wrapped) == [f"blocks.{b}.attn.{n}" for b in (0, 1) for n in ("to_added_qkv", "to_out.0", "to_q")]
    sync(receiver, lora_tensors(peft_transformer(2)), 2, adapter=LORA)
    assert all(receiver.wrapped[name] is layer for name, layer in wrapped.items())
    assert not any(isinstance(layer.base_layer, LoraLayer) for layer in wrapped.values())
    output(transformer)
    output(transformer)
    assert {layer.calls for layer in wrapped.values()} == {2}


# --- the transaction --------------------------------------------------------------------------------------------------


def test_an_abort_after_the_commit_brings_the_earlier_adapter_back_exactly(
    receiver: WeightReceiver, transformer: ServerTransformer
) -> None:
    base = output(transformer)
    sync(receiver, lora_tensors(peft_transformer(1)), 1, adapter=LORA)
    first = output(transformer)
    sync(receiver, lora_tensors(peft_transformer(2)), 2, adapter=LORA)
    assert not torch.equal(output(transformer), first)
    receiver.abort(undo=True)
    assert torch.equal(output(transformer), first)
    assert (receiver.version, receiver.invalid) == (1, None)
    receiver.require_valid(1)
    # once only: a second abort has nothing to undo
    receiver.abort(undo=True)
    assert (receiver.version, torch.equal(output(transformer), first)) == (1, True)
    # and the engine is as good as before
    sync(receiver, lora_tensors(peft_transformer(2)), 2, adapter=LORA)
    torch.testing.assert_close(output(transformer), output(peft_transformer(2)), atol=2e-5, rtol=1e-5)
    assert not torch.equal(output(transformer), base)


def test_an_abort_after_the_first_commit_brings_the_base_back(
    receiver: WeightReceiver, transformer: ServerTransformer
) -> None:
    base = output(transformer)
    sync(receiver, lora_tensors(peft_transformer(1)), 1, adapter=LORA)
    receiver.abort(undo=True)
    assert receiver.version == 0
    torch.testing.assert_close(output(transformer), base, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("corrupt", [False, True])
def test_an_unfinished_sync_leaves_the_adapter_in_use_alone(
    corrupt: bool, receiver: WeightReceiver, transformer: ServerTransformer
) -> None:
    sync(receiver, lora_tensors(peft_transformer(1)), 1, adapter=LORA)
    first = output(transformer)
    refused = pytest.raises(WeightSyncError, match="arrived with checksum") if corrupt else contextlib.nullcontext()
    with refused:
        partial_sync(receiver, lora_tensors(peft_transformer(2)), adapter=LORA, buckets=2, corrupt=corrupt)
    receiver.abort(undo=False)
    assert torch.equal(output(transformer), first)
    receiver.require_valid(1)


def test_a_second_sync_reuses_the_memory_and_a_third_the_first_buffers(receiver: WeightReceiver) -> None:
    seen = []
    for version in range(1, 6):
        sync(receiver, lora_tensors(peft_transformer(version)), version, adapter=LORA)
        seen.append(receiver.wrapped[TO_Q].adapters[0].lora_a.data_ptr())
    assert seen[0] != seen[1]
    assert seen == [seen[0], seen[1]] * 2 + [seen[0]]


def test_the_spare_buffer_can_be_dropped_between_syncs(
    receiver: WeightReceiver, transformer: ServerTransformer
) -> None:
    receiver.drop_spare()
    sync(receiver, lora_tensors(peft_transformer(1)), 1, adapter=LORA)
    sync(receiver, lora_tensors(peft_transformer(2)), 2, adapter=LORA)
    kept = output(transformer)
    receiver.drop_spare()
    assert torch.equal(output(transformer), kept)
    # what was dropped cannot be brought back, and is not pretended to be
    receiver.abort(undo=True)
    assert (receiver.version, torch.equal(output(transformer), kept)) == (2, True)
    sync(receiver, lora_tensors(peft_transformer(3)), 3, adapter=LORA)
    torch.testing.assert_close(output(transformer), output(peft_transformer(3)), atol=2e-5, rtol=1e-5)


# --- refusals ---------------------------------------------------------------------------------------------------------


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    """The adapter with some tensors replaced, or taken out; ``__`` stands for a dot."""
    made = lora_tensors(peft_transformer(1))
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del made[name]
        else:
            made[name] = value
    return made


A, B = "blocks__0__attn__to_q__lora_A__weight", "blocks__0__attn__to_q__lora_B__weight"
REFUSED: dict[str, tuple[Mapping[str, Tensor], str]] = {
    "an A without its B": (changed(**{B: None}), f"'{TO_Q}' has only lora_A"),
    "a B without its A": (changed(**{A: None}), f"'{TO_Q}' has only lora_B"),
    "unknown layer": (
        {
            "blocks.9.attn.to_q.lora_A.weight": torch.zeros(3, WIDTH),
            "blocks.9.attn.to_q.lora_B.weight": torch.zeros(WIDTH, 3),
        },
        r"unknown name 'blocks.9.attn.to_q.weight' \(nearest: 'blocks.\d.attn.to_q.weight'\)",
    ),
    "peft's own names": (
        {"blocks.0.attn.to_q.lora_A.default.weight": torch.zeros(3, WIDTH)},
        "'blocks.0.attn.to_q.lora_A.default.weight' is no adapter tensor",
    ),
    "a base tensor among them": (
        {**changed(), "blocks.0.attn.to_q.weight": torch.zeros(WIDTH, WIDTH)},
        "'blocks.0.attn.to_q.weight' is no adapter tensor",
    ),
    "another rank": (changed(**{A: torch.zeros(4, WIDTH)}), r"lora_A.weight has shape \[4, 12\], expected \[3, 12\]"),
    "the fused layer's rows": (
        changed(blocks__1__attn__add_v_proj__lora_B__weight=torch.zeros(3 * WIDTH, 3)),
        r"add_v_proj.lora_B.weight has shape \[36, 3\], expected \[12, 3\]",
    ),
    "a layer that is not linear": (
        {
            "blocks.0.attn.norm_q.lora_A.weight": torch.zeros(3, WIDTH),
            "blocks.0.attn.norm_q.lora_B.weight": torch.zeros(WIDTH, 3),
        },
        "'blocks.0.attn.norm_q' is no linear layer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_does_not_fit_is_refused_untouched(
    case: str, receiver: WeightReceiver, transformer: ServerTransformer
) -> None:
    tensors, text = REFUSED[case]
    before = output(transformer)
    with pytest.raises(WeightSyncError, match=text):
        partial_sync(receiver, tensors, adapter=LORA)
    receiver.abort(undo=False)
    assert receiver.wrapped == {}
    assert torch.equal(output(transformer), before)
    receiver.require_valid(0)


def test_a_buffer_that_cannot_be_opened_wraps_nothing(
    receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise WeightSyncError("cannot open the sender's buffer")

    monkeypatch.setattr("relax_sdk.rollout.sglang.server_side.sync.OpenBuffer.open", refuse)
    with pytest.raises(WeightSyncError, match="cannot open"):
        partial_sync(receiver, lora_tensors(peft_transformer(1)), adapter=LORA)
    assert receiver.wrapped == {}


def test_an_adapter_of_fewer_layers_than_before_is_refused(
    receiver: WeightReceiver, transformer: ServerTransformer
) -> None:
    sync(receiver, lora_tensors(peft_transformer(1)), 1, adapter=LORA)
    first = output(transformer)
    fewer = {name: tensor for name, tensor in lora_tensors(peft_transformer(2)).items() if name.startswith("blocks.0")}
    with pytest.raises(WeightSyncError, match="adapter"):
        partial_sync(receiver, fewer, adapter=LORA)
    receiver.abort(undo=False)
    assert torch.equal(output(transformer), first)
    receiver.require_valid(1)


@pytest.mark.parametrize(
    ("change", "targets"),
    [
        ({"alpha": 12.0}, TARGETS),
        # the same layers of the engine, fewer of the projections in them
        ({}, tuple(name for name in TARGETS if "add_k" not in name)),
    ],
    ids=["alpha", "projections"],
)
def test_an_adapter_that_changes_between_syncs_is_refused(
    change: dict[str, Any], targets: tuple[str, ...], receiver: WeightReceiver, transformer: ServerTransformer
) -> None:
    """The layers keep the scale and the layout of the first: another would be applied, or undone, wrongly."""
    sync(receiver, lora_tensors(peft_transformer(1)), 1, adapter=LORA)
    first = output(transformer)
    other = AdapterConfig(**{**LORA.model_dump(), **change})
    with pytest.raises(WeightSyncError, match="changed"):
        sync(receiver, lora_tensors(peft_transformer(2, targets=targets)), 2, adapter=other)
    receiver.abort(undo=False)
    assert torch.equal(output(transformer), first)


def test_an_adapter_that_was_undone_still_fixes_the_scale(receiver: WeightReceiver) -> None:
    sync(receiver, lora_tensors(peft_transformer(1)), 1, adapter=LORA)
    receiver.abort(undo=True)
    other = AdapterConfig(**{**LORA.model_dump(), "alpha": 12.0})
    with pytest.raises(WeightSyncError, match="changed"):
        sync(receiver, lora_tensors(peft_transformer(1)), 1, adapter=other)


def test_a_full_sync_after_an_adapter_is_refused(receiver: WeightReceiver, transformer: ServerTransformer) -> None:
    sync(receiver, lora_tensors(peft_transformer(1)), 1, adapter=LORA)
    first = output(transformer)
    with pytest.raises(WeightSyncError, match="'full' came after one in mode 'adapter': the layers are LoRA-wrapped"):
        partial_sync(receiver, wire_tensors(plain_transformer(seed=5)))
    assert torch.equal(output(transformer), first)
    receiver.require_valid(1)


def test_wrong_versions_are_refused_in_either_direction(receiver: WeightReceiver) -> None:
    sync(receiver, lora_tensors(peft_transformer(1)), 7, adapter=LORA)
    receiver.require_valid(7)
    for version in (6, 8):
        with pytest.raises(WeightSyncError, match=f"policy version {version}\n.*7"):
            receiver.require_valid(version)
