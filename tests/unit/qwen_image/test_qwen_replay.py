"""Replay: a row depends on nothing but itself, and the transformer is handed what it was trained to read."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model

from relax_sdk import RecordError
from relax_sdk.protocols import ReplayBatch

HEIGHT, WIDTH = 32, 64
TOKENS = (HEIGHT // 16) * (WIDTH // 16)
SIGMAS = (0.95, 0.6, 0.25)


@pytest.fixture
def transformer(adapter, pipeline_folder):
    return adapter.load_train_model(str(pipeline_folder), revision=None, dtype=torch.float32).transformer


def _condition(length: int, seed: int) -> dict[str, torch.Tensor]:
    return {"encoder_hidden_states": torch.randn(length, 32, generator=torch.Generator().manual_seed(seed))}


def _batch(conditions, *, rows=None, height=HEIGHT, width=WIDTH) -> ReplayBatch:
    count = len(conditions) if rows is None else rows
    latents = torch.randn(count, (height // 16) * (width // 16), 64, generator=torch.Generator().manual_seed(5))
    return ReplayBatch(
        latents=latents,
        sigmas=torch.tensor([SIGMAS[row % len(SIGMAS)] for row in range(count)]),
        conditions=tuple(conditions),
        height=height,
        width=width,
    )


def _row(batch: ReplayBatch, row: int) -> ReplayBatch:
    return ReplayBatch(
        latents=batch.latents[row : row + 1],
        sigmas=batch.sigmas[row : row + 1],
        conditions=batch.conditions[row : row + 1],
        height=batch.height,
        width=batch.width,
    )


class Spy(torch.nn.Module):
    """Stands where the transformer stands; keeps what it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.lora_A = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, **arguments):
        self.arguments = arguments
        return (arguments["hidden_states"] * 2,)


def test_padded_rows_equal_the_same_rows_alone(adapter, transformer):
    batch = _batch([_condition(5, 1), _condition(23, 2), _condition(11, 3)])
    with torch.no_grad():
        together = adapter.replay_transition(transformer, batch)
        alone = torch.cat([adapter.replay_transition(transformer, _row(batch, row)) for row in range(3)])
        wrong_text = adapter.replay_transition(transformer, _batch([_condition(5, 4), *batch.conditions[1:]]))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    # The text matters, and that of one row matters to this row only.
    assert (wrong_text[0] - together[0]).abs().max() > 1e-2
    torch.testing.assert_close(wrong_text[1:], together[1:], atol=1e-5, rtol=0)


def test_what_stands_in_the_padding_does_not_matter(adapter, transformer, monkeypatch):
    batch = _batch([_condition(5, 1), _condition(23, 2)])
    expected = adapter.replay_transition(transformer, batch)
    pad = torch.nn.utils.rnn.pad_sequence
    monkeypatch.setattr(torch.nn.utils.rnn, "pad_sequence", lambda rows, **kw: pad(rows, padding_value=3.0, **kw))
    torch.testing.assert_close(adapter.replay_transition(transformer, batch), expected, atol=1e-5, rtol=0)


def test_equal_lengths_are_neither_padded_nor_masked(adapter):
    spy = Spy(torch.float32)
    condition = _condition(7, 1)
    adapter.replay_transition(spy, _batch([condition, condition]))
    assert spy.arguments["encoder_hidden_states_mask"] is None
    assert spy.arguments["encoder_hidden_states"].shape == (2, 7, 32)
    adapter.replay_transition(spy, _batch([condition, _condition(9, 2)]))
    mask = spy.arguments["encoder_hidden_states_mask"]
    assert mask.dtype == torch.bool
    assert mask.sum(dim=1).tolist() == [7, 9]
    assert mask[0, :7].all()


def test_sigma_is_rounded_once_to_the_dtype_of_the_base(adapter):
    spy = Spy(torch.bfloat16)
    sigma = torch.tensor([0.8164720535278320])
    batch = ReplayBatch(
        latents=torch.randn(1, TOKENS, 64), sigmas=sigma, conditions=(_condition(3, 1),), height=HEIGHT, width=WIDTH
    )
    velocity = adapter.replay_transition(spy, batch)
    assert spy.arguments["timestep"].dtype == torch.bfloat16
    assert spy.arguments["timestep"].item() == sigma.to(torch.bfloat16).item() == 0.81640625
    assert spy.arguments["hidden_states"].dtype == spy.arguments["encoder_hidden_states"].dtype == torch.bfloat16
    assert velocity.dtype == torch.float32


def test_picture_shape_is_given_per_row_rows_first(adapter):
    spy = Spy(torch.float32)
    adapter.replay_transition(spy, _batch([_condition(3, 1)] * 2))
    assert spy.arguments["img_shapes"] == [[(1, 2, 4)], [(1, 2, 4)]]


def test_portrait_and_landscape_differ(adapter, transformer):
    condition = _condition(6, 1)
    with torch.no_grad():
        landscape = adapter.replay_transition(transformer, _batch([condition]))
        portrait = adapter.replay_transition(transformer, _batch([condition], height=WIDTH, width=HEIGHT))
    assert (landscape - portrait).abs().max() > 1e-3


def test_tokens_that_do_not_fit_the_size_are_refused(adapter, transformer):
    batch = _batch([_condition(6, 1)])
    odd = ReplayBatch(latents=batch.latents, sigmas=batch.sigmas, conditions=batch.conditions, height=32, width=32)
    with pytest.raises(RecordError, match=r"32x32 picture have shape \[1, 8, 64\]"):
        adapter.replay_transition(transformer, odd)


def test_row_without_text_states_is_named(adapter, transformer):
    with pytest.raises(RecordError, match=r"row 1 has no 'encoder_hidden_states' \(it has \['prompt_embeds'\]\)"):
        adapter.replay_transition(transformer, _batch([_condition(6, 1), {"prompt_embeds": torch.zeros(6, 32)}]))


def test_lora_targets_are_the_eight_projections_of_every_block(adapter, transformer):
    matches = {
        target: [name for name, _ in transformer.named_modules() if name.endswith(f".{target}")]
        for target in adapter.lora_target_modules
    }
    assert len(matches) == 8
    assert {len(names) for names in matches.values()} == {len(transformer.transformer_blocks)}
    modules = dict(transformer.named_modules())
    assert all(isinstance(modules[name], torch.nn.Linear) for names in matches.values() for name in names)


def test_block_module_names_are_module_lists(adapter, transformer):
    assert all(isinstance(getattr(transformer, name), torch.nn.ModuleList) for name in adapter.block_module_names)


def test_full_size_adapter_is_as_large_as_the_verified_run_reports(adapter):
    # Rank 64 on the published model: about 377 MB of bfloat16 adapter tensors.
    from diffusers import QwenImageTransformer2DModel

    with torch.device("meta"):
        block = QwenImageTransformer2DModel(num_layers=1).transformer_blocks[0]
    linears = [
        module
        for name, module in block.named_modules()
        if any(f"block.{name}".endswith(f".{target}") for target in adapter.lora_target_modules)
    ]
    assert len(linears) == 8
    parameters = 60 * sum(64 * (linear.in_features + linear.out_features) for linear in linears)
    assert round(parameters * 2 / 1e6) == 377


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_fresh_adapter_changes_nothing_and_gets_gradients(adapter, transformer, wrapped):
    batch = _batch([_condition(5, 1), _condition(9, 2)])
    expected = adapter.replay_transition(transformer, batch).detach()
    config = LoraConfig(r=2, lora_alpha=4, target_modules=list(adapter.lora_target_modules))
    model = get_peft_model(transformer, config) if wrapped else inject_adapter_in_model(config, transformer)
    velocity = adapter.replay_transition(model, batch)
    assert torch.equal(velocity, expected)
    velocity.square().mean().backward()
    adapted = {name: parameter for name, parameter in model.named_parameters() if "lora_B" in name}
    assert len(adapted) == 8 * 2
    # The last block's text stream ends there: nothing reads it, so its own output projection gets no gradient.
    silent = {name for name, parameter in adapted.items() if parameter.grad is None or not parameter.grad.any()}
    assert all("transformer_blocks.1.attn" in name for name in silent)
    assert {name.split(".attn.")[1].split(".lora")[0] for name in silent} == {"to_add_out", "add_q_proj"}


def test_bfloat16_base_with_float32_adapter_computes_in_bfloat16(adapter, pipeline_folder):
    transformer = adapter.load_train_model(str(pipeline_folder), revision=None, dtype=torch.bfloat16).transformer
    batch = _batch([_condition(5, 1)])
    expected = adapter.replay_transition(transformer, batch).detach()
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=list(adapter.lora_target_modules)), transformer)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    velocity = adapter.replay_transition(model, batch)
    assert velocity.dtype == torch.float32
    assert torch.equal(velocity, expected)


# The velocity is a view of the last projection's output, which is harmless because replay changes nothing in place.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("process_group")
def test_sharded_transformer_gives_the_same_velocity(adapter, transformer, pipeline_folder, dtype):
    """float32 masters, all-gathered in ``dtype``: bit for bit the numbers of a plain model of that dtype."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    batch = _batch([_condition(5, 1), _condition(9, 2)])
    plain = adapter.load_train_model(str(pipeline_folder), revision=None, dtype=dtype).transformer
    expected = adapter.replay_transition(plain, batch).detach()
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for name in adapter.block_module_names:
        for block in getattr(transformer, name):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(transformer, mesh=mesh, mp_policy=policy)
    velocity = adapter.replay_transition(transformer, batch)
    velocity.square().mean().backward()
    assert torch.equal(velocity, expected)
