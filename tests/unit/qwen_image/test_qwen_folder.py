"""Model folders that are incomplete, broken or of another model: refused with the part named, loaded or not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax_sdk import ConfigError

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(pipeline_folder, tmp_path) -> Path:
    return Path(shutil.copytree(pipeline_folder, tmp_path / "copy"))


def _load(adapter, folder: Path):
    return adapter.load_train_model(str(folder), revision=None, dtype=torch.float32)


def _edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_whole_folder_has_no_problems(adapter, pipeline_folder):
    assert adapter.check_model_path(str(pipeline_folder)) == []


def test_training_reads_the_transformer_folder_only(adapter, folder, pipeline):
    for other in ("vae", "text_encoder", "tokenizer", "scheduler"):
        shutil.rmtree(folder / other)
    loaded = _load(adapter, folder).transformer.state_dict()
    expected = pipeline.transformer.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_folder_that_is_not_there(adapter, tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        _load(adapter, tmp_path / "nowhere")


def test_folder_without_transformer(adapter, folder):
    shutil.rmtree(folder / "transformer")
    with pytest.raises(ConfigError, match="transformer/ is missing") as caught:
        _load(adapter, folder)
    assert "--model-path" in str(caught.value)
    assert adapter.check_model_path(str(folder)) == ["transformer/ is missing"]


@pytest.mark.parametrize(
    ("lost", "problem"),
    [
        ("transformer/config.json", "transformer/config.json is missing"),
        (WEIGHTS, "transformer/ has no weights"),
        ("scheduler/scheduler_config.json", "scheduler/scheduler_config.json is missing"),
        ("vae/config.json", "vae/config.json is missing"),
        ("vae/diffusion_pytorch_model.safetensors", "vae/ has no weights"),
        ("text_encoder/model.safetensors", "text_encoder/ has no weights"),
        ("tokenizer/tokenizer.json", "tokenizer/ has neither tokenizer.json nor vocab.json and merges.txt"),
    ],
)
def test_each_lost_file_is_named(adapter, folder, lost, problem):
    (folder / lost).unlink()
    (found,) = adapter.check_model_path(str(folder))
    assert found.startswith(problem)
    with pytest.raises(ConfigError, match=problem):
        adapter.load_embedded_model(str(folder), revision=None, device="cpu", dtype=torch.float32)


def test_every_lost_part_is_listed_at_once(adapter, folder):
    shutil.rmtree(folder / "vae")
    (folder / "transformer/config.json").unlink()
    assert adapter.check_model_path(str(folder)) == ["transformer/config.json is missing", "vae/ is missing"]
    assert adapter.check_model_path(str(folder), embedded=False) == ["transformer/config.json is missing"]


@pytest.mark.parametrize("kept", [1000, 4, 0])
def test_truncated_weights_are_found_without_loading(adapter, folder, kept):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[: kept - 0])
    (found,) = adapter.check_model_path(str(folder))
    assert WEIGHTS in found
    with pytest.raises(ConfigError, match="safetensors"):
        _load(adapter, folder)


def test_weights_a_few_bytes_short_are_found(adapter, folder):
    path = folder / WEIGHTS
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-3])
    assert adapter.check_model_path(str(folder)) == [f"{WEIGHTS} has {size - 3} bytes, its header announces {size}"]


def test_lost_shard_is_named(adapter, folder):
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    first = sorted(tensors)[0]
    save_file({first: tensors[first]}, folder / "transformer/part-1.safetensors")
    index = {"weight_map": {name: f"part-{1 if name == first else 2}.safetensors" for name in tensors}}
    (folder / "transformer/diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (found,) = adapter.check_model_path(str(folder))
    assert found.startswith("transformer/part-2.safetensors is missing")


def test_broken_json_is_named(adapter, folder):
    (folder / "scheduler/scheduler_config.json").write_text("{")
    (found,) = adapter.check_model_path(str(folder))
    assert found.startswith("scheduler/scheduler_config.json is not readable JSON")


def test_another_model_is_refused(adapter, folder):
    _edit(folder / "transformer/config.json", _class_name="FluxTransformer2DModel")
    with pytest.raises(ConfigError, match="'FluxTransformer2DModel', expected 'QwenImageTransformer2DModel'"):
        _load(adapter, folder)


def test_guidance_distilled_variant_is_refused(adapter, folder):
    _edit(folder / "transformer/config.json", guidance_embeds=True)
    (found,) = adapter.check_model_path(str(folder))
    assert "guidance_embeds = true" in found


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_layers": 3}, "missing tensors transformer_blocks.2."),
        ({"num_layers": 1}, "unexpected tensors transformer_blocks.1."),
        ({"joint_attention_dim": 48}, "transformer/ of model folder"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(adapter, folder, config, message):
    _edit(folder / "transformer/config.json", **config)
    with pytest.raises(ConfigError, match=message):
        _load(adapter, folder)


def test_text_encoder_that_lacks_a_layer_is_refused(adapter, folder):
    path = folder / "text_encoder/model.safetensors"
    tensors = load_file(path)
    lost = next(name for name in tensors if "layers.1.self_attn.q_proj.weight" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"text_encoder/ .* missing tensors .*layers\.1\.self_attn\.q_proj\.weight"):
        adapter.load_embedded_model(str(folder), revision=None, device="cpu", dtype=torch.float32)


def test_embedded_model_is_frozen_and_of_the_asked_dtype(adapter, pipeline_folder):
    model = adapter.load_embedded_model(str(pipeline_folder), revision=None, device="cpu", dtype=torch.bfloat16)
    for part in (model.transformer, model.vae, model.text_encoder):
        assert not part.training
        assert {parameter.dtype for parameter in part.parameters()} == {torch.bfloat16}
        assert not any(parameter.requires_grad for parameter in part.parameters())
    (condition,), _ = model.encode_prompts(["a red circle"])
    assert condition["encoder_hidden_states"].dtype == torch.bfloat16
    assert model.decode_latents(torch.zeros(1, 4, 64), height=32, width=32).dtype == torch.uint8


def test_checks_and_requests_import_no_model_library(pipeline_folder):
    script = f"""
import sys
from relax_qwen_image import presets
from relax_qwen_image.adapter import QwenImageAdapter
from relax_sdk.protocols import SamplingConfig
adapter = QwenImageAdapter()
assert adapter.check_model_path({str(pipeline_folder)!r}) == []
assert len(adapter.validate_sampling(SamplingConfig(height=100, width=64, guidance_scale=2.0))) == 2
for preset in (presets.tiny, presets.lora, presets.full):
    assert preset()
print([name for name in ("torch", "diffusers", "transformers", "peft") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
