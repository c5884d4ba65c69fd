"""What the actor puts on the wire, from a module that is checkpoint-wrapped, LoRA-wrapped and sharded."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
import torch
from tiny_family import TinyAdapter, TinyTransformer
from tiny_training import make_trainer, tiny_groups, weights

from relax_sdk.errors import WeightSyncError
from relax_sdk.weight_sync import WireWeights, gather, strip_transport_wrappers
from relax_sdk.weights import inject_lora, to_peft_name

INPUTS = (
    torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(1)),
    torch.tensor([0.3, 0.8]),
    torch.tensor([0.1, 0.2]),
)


def trained(mode: str) -> torch.nn.Module:
    """A sharded module with activation checkpointing whose weights have moved."""
    made = make_trainer(mode=mode, fsdp={"activation_checkpointing": True})
    made.update(tiny_groups())
    made.update(tiny_groups(seed=1))
    return made.module


def wire(
    module: torch.nn.Module, mode: str = "full", dtype: torch.dtype = torch.float32, **changes: Any
) -> WireWeights:
    options = {"name_map": TinyAdapter().weight_name_map(), "lora_rank": 2, "lora_alpha": 4.0, **changes}
    return WireWeights(module, mode=mode, dtype=dtype, **options)


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("blocks.0._checkpoint_wrapped_module.to_q.weight", "blocks.0.to_q.weight"),
        ("_fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.to_q.bias", "blocks.0.to_q.bias"),
        ("_orig_mod.proj_in.weight", "proj_in.weight"),
        ("proj_in.weight", "proj_in.weight"),
    ],
)
def test_wrapper_segments_are_taken_out(wrapped: str, plain: str) -> None:
    assert strip_transport_wrappers(wrapped) == plain


@pytest.mark.usefixtures("process_group")
def test_the_names_are_those_of_a_bare_module() -> None:
    module = trained("full")
    assert any("_checkpoint_wrapped_module" in name for name, _ in module.named_parameters())
    bare = dict(TinyTransformer().named_parameters())
    sent = dict(wire(module))
    assert list(sent) == list(bare)
    for name, tensor in sent.items():
        assert type(tensor) is torch.Tensor, "an engine cannot take a DTensor"
        assert tensor.shape == bare[name].shape
        assert not tensor.requires_grad
        assert torch.equal(tensor, weights(module)[name])


@pytest.mark.usefixtures("process_group")
def test_the_wire_dtype() -> None:
    module = trained("full")
    for name, tensor in wire(module, dtype=torch.bfloat16):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, weights(module)[name].bfloat16())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("mode", "lora"), [("full", "full"), ("full", "lora"), ("adapter", "lora")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_manifest_counts_what_is_sent(mode: str, lora: str, dtype: torch.dtype) -> None:
    view = wire(trained(lora), mode, dtype)
    sent = list(view)
    assert view.manifest.mode == mode
    assert view.manifest.tensors == len(sent)
    assert view.manifest.bytes == sum(tensor.numel() * tensor.element_size() for _, tensor in sent)
    lines = "".join(f"{name}|{','.join(map(str, tensor.shape))}\n" for name, tensor in sent)
    assert view.manifest.ordered_name_shape_hash == hashlib.sha256(lines.encode()).hexdigest()
    assert [name for name, _ in view] == [name for name, _ in sent], "a view can be drawn again"
    assert view.tensors == tuple((name, tuple(tensor.shape)) for name, tensor in sent)
    assert {tensor.dtype for _, tensor in sent} == {getattr(torch, view.dtype)} == {dtype}


@pytest.mark.usefixtures("process_group")
def test_adapter_mode_sends_the_adapters_only() -> None:
    module = trained("lora")
    sent = dict(wire(module, "adapter"))
    layers = [f"blocks.{block}.{layer}" for block in (0, 1) for layer in ("to_q", "to_out")]
    assert sorted(sent) == sorted(f"{layer}.lora_{side}.weight" for layer in layers for side in "AB")
    for name, tensor in sent.items():
        assert torch.equal(tensor, weights(module)[str(to_peft_name(name))])
        assert tensor.any(), "B has moved away from 0"


@pytest.mark.usefixtures("process_group")
def test_merged_weights_give_the_forward_of_the_wrapped_module() -> None:
    module = trained("lora")
    sent = dict(wire(module))
    bare = TinyTransformer()
    assert list(sent) == list(dict(bare.named_parameters())), "no base_layer, no lora name"
    start = {name: tensor.detach().clone() for name, tensor in bare.named_parameters()}
    with torch.no_grad():
        before = bare(*INPUTS)
        bare.load_state_dict(sent)
        merged, wrapped = bare(*INPUTS), module(*INPUTS)
    torch.testing.assert_close(merged, wrapped, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(merged, before, atol=1e-3)
    moved = {name for name in sent if not torch.equal(sent[name], start[name])}
    assert moved == {f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in ("to_q", "to_out")}


@pytest.mark.usefixtures("process_group")
def test_merging_leaves_the_trained_module_alone() -> None:
    module = trained("lora")
    before = weights(module)
    list(wire(module))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(module).items())


def test_the_merge_is_rounded_once() -> None:
    """alpha / r * B A is added in float32; rounding the update to bfloat16 first would round twice."""
    module = TinyTransformer().bfloat16()
    inject_lora(module, rank=2, alpha=4.0, target_modules=("to_q",), seed=0)
    for name, tensor in module.named_parameters():
        if "lora_" in name:
            tensor.data = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
    parts = dict(module.named_parameters())
    sent = dict(wire(module, dtype=torch.bfloat16))
    layer = "blocks.1.to_q"
    a, b = (parts[f"{layer}.lora_{side}.default.weight"].double() for side in "AB")
    want = (parts[f"{layer}.base_layer.weight"].double() + 2.0 * b @ a).bfloat16()
    assert torch.equal(sent[f"{layer}.weight"], want)


def test_the_adapters_name_map_is_used() -> None:
    sent = dict(wire(TinyTransformer(), name_map=lambda name: f"model.{name}"))
    assert set(sent) == {f"model.{name}" for name, _ in TinyTransformer().named_parameters()}


def test_two_parameters_with_one_wire_name_are_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"blocks\.to_q\.weight"):
        wire(TinyTransformer(), name_map=lambda name: re.sub(r"blocks\.\d", "blocks", name))


def test_adapter_mode_without_lora_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="no LoRA"):
        wire(TinyTransformer(), "adapter")


def test_a_failed_merge_leaves_the_iterator_at_the_next_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks go on gathering, and wait for this one."""
    module = TinyTransformer()
    inject_lora(module, rank=2, alpha=4.0, target_modules=("to_q", "to_out"))

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory for the merge")

    monkeypatch.setattr(gather, "merge_delta", out_of_memory)
    view, drawn, failed = wire(module), [], 0
    draws = iter(view)
    for name, _ in view.tensors:
        try:
            drawn.append(next(draws)[0])
            assert drawn[-1] == name
        except torch.OutOfMemoryError:
            failed += 1
    assert failed == 4
    assert len(drawn) == len(view.tensors) - 4
    assert next(draws, None) is None


def test_a_failed_gather_ends_the_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nobody to gather with; trying the next tensor would wait for another timeout."""
    plain = gather._whole

    def lost(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (8, 8):
            raise RuntimeError("connection closed by peer")
        return plain(tensor)

    monkeypatch.setattr(gather, "_whole", lost)
    draws = iter(wire(TinyTransformer()))
    assert [next(draws)[0] for _ in range(2)] == ["proj_in.weight", "proj_in.bias"]
    with pytest.raises(RuntimeError, match="closed by peer"):
        next(draws)
    assert list(draws) == []
