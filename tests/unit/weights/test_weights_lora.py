"""LoRA injection, names on the wire, merging."""

from __future__ import annotations

import pytest
import torch
from tiny_family import TinyTransformer

from relax_sdk.errors import ConfigError
from relax_sdk.weights import (
    inject_lora,
    is_lora_name,
    lora_shapes,
    merge_delta,
    to_peft_name,
    to_wire_name,
)

TARGETS = ("to_q", "to_out")
INPUTS = (
    torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)),
    torch.tensor([0.3, 0.8]),
    torch.tensor([0.1, 0.2]),
)


def wrapped(seed: int = 0, **kwargs: object) -> TinyTransformer:
    module = TinyTransformer()
    options = {"rank": 3, "alpha": 6.0, "target_modules": TARGETS, "seed": seed, **kwargs}
    inject_lora(module, **options)  # type: ignore[arg-type]
    return module


def lora(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in module.named_parameters() if is_lora_name(name)}


def test_every_target_is_wrapped_and_listed() -> None:
    module = TinyTransformer()
    names = inject_lora(module, rank=3, alpha=6.0, target_modules=TARGETS, seed=0)
    want = [f"blocks.{block}.{layer}" for block in (0, 1) for layer in TARGETS]
    assert names == want
    assert sorted(lora(module)) == sorted(f"{name}.lora_{side}.default.weight" for name in want for side in "AB")


def test_a_depends_on_the_seed_alone_and_b_is_zero() -> None:
    torch.manual_seed(123)
    first = lora(wrapped(seed=5))
    torch.manual_seed(456)
    second, other = lora(wrapped(seed=5)), lora(wrapped(seed=6))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        if ".lora_B." in name:
            assert not tensor.any()
        else:
            assert tensor.any()
            assert not torch.equal(tensor, other[name])
    drawn = [tensor for name, tensor in first.items() if ".lora_A." in name]
    assert not torch.equal(drawn[0], drawn[1]), "layers must not share one draw"


def test_the_global_generator_is_not_moved() -> None:
    module = TinyTransformer()
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    inject_lora(module, rank=3, alpha=6.0, target_modules=TARGETS, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_wrapping_changes_no_output_and_freezes_the_base() -> None:
    module = wrapped()
    with torch.no_grad():
        assert torch.equal(module(*INPUTS), TinyTransformer()(*INPUTS))
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad == is_lora_name(name), name


def test_a_target_that_matches_nothing_is_refused_and_nothing_is_wrapped() -> None:
    module = TinyTransformer()
    with pytest.raises(ConfigError, match="'to_queue'") as caught:
        inject_lora(module, rank=3, alpha=6.0, target_modules=("to_q", "to_queue"))
    assert "to_q" in (caught.value.expected or "")
    assert not lora(module)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_target_matches_whole_name_segments_only() -> None:
    """``q`` is the end of ``to_q``, but not a module of that name."""
    with pytest.raises(ConfigError, match="'q'"):
        inject_lora(TinyTransformer(), rank=3, alpha=6.0, target_modules=("q",))


def test_a_target_that_is_no_linear_layer_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'blocks'"):
        inject_lora(TinyTransformer(), rank=3, alpha=6.0, target_modules=("blocks",))


def test_names_go_there_and_back() -> None:
    for peft_name in lora(wrapped()):
        wire = to_wire_name(peft_name)
        assert ".default" not in wire
        assert wire.endswith((".lora_A.weight", ".lora_B.weight"))
        assert to_peft_name(wire) == peft_name
        assert not is_lora_name(wire)
    assert to_peft_name("blocks.0.to_q.weight") is None
    assert to_peft_name("blocks.0.to_q.lora_A.default.weight") is None
    assert not is_lora_name("blocks.0.to_q.base_layer.weight")
    # A module that is itself called "default" keeps its name.
    assert to_wire_name("default.to_q.lora_A.default.weight") == "default.to_q.lora_A.weight"


@pytest.mark.parametrize("alpha", [3.0, 12.0])
def test_the_merged_weights_give_the_wrapped_forward(alpha: float) -> None:
    module = wrapped(alpha=alpha)
    generator = torch.Generator().manual_seed(2)
    for name, tensor in lora(module).items():
        if ".lora_B." in name:
            tensor.data = torch.randn(tensor.shape, generator=generator)
    tensors = dict(module.named_parameters())
    merged = {}
    for name in TinyTransformer().state_dict():
        layer, _, leaf = name.rpartition(".")
        if f"{layer}.base_layer.{leaf}" in tensors:
            merged[name] = tensors[f"{layer}.base_layer.{leaf}"]
            if leaf == "weight":
                sides = [tensors[f"{layer}.lora_{side}.default.weight"] for side in "AB"]
                delta = merge_delta(*sides, rank=3, alpha=alpha)
                assert delta.dtype == torch.float32
                merged[name] = merged[name] + delta
        else:
            merged[name] = tensors[name]
    plain = TinyTransformer()
    plain.load_state_dict(merged)
    with torch.no_grad():
        assert not torch.allclose(module(*INPUTS), TinyTransformer()(*INPUTS), atol=1e-2)
        torch.testing.assert_close(plain(*INPUTS), module(*INPUTS), rtol=1e-5, atol=1e-5)


def test_the_shapes_are_known_before_anything_is_wrapped() -> None:
    module = TinyTransformer()
    known = lora_shapes(module, rank=3, target_modules=TARGETS)
    assert not any("lora" in name for name, _ in module.named_parameters())
    inject_lora(module, rank=3, alpha=1.0, target_modules=TARGETS)
    added = {to_wire_name(n): tuple(t.shape) for n, t in module.named_parameters() if is_lora_name(n)}
    assert known == added
    for targets in (("to_x",), ("blocks",)):
        with pytest.raises(ConfigError, match=targets[0]):
            lora_shapes(TinyTransformer(), rank=3, target_modules=targets)
