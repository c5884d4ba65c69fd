"""The name mapping against both architectures at full size, and what happens to weights that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from relax_pickscore.convert import convert_tensors, name_mapping
from relax_pickscore.layout import ClipConfig, TowerConfig, read_clip_config
from relax_pickscore.scorer import PickScoreScorer
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel

from relax_sdk import ConfigError, RewardError
from relax_sdk.protocols import RewardBatch, RewardScorer

VIT_H_14 = {
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "eos_token_id": 2,
    },
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 224,
        "hidden_act": "gelu",
    },
    "projection_dim": 1024,
}


def test_mapping_covers_the_published_architecture(tmp_path: Path) -> None:
    """transformers' ViT-H-14 goes in, exactly open_clip's own ViT-H-14 comes out; nothing is allocated."""
    (tmp_path / "config.json").write_text(json.dumps(VIT_H_14))
    config = read_clip_config(tmp_path)
    assert config == ClipConfig(
        text=TowerConfig(width=1024, mlp_width=4096, layers=24, heads=16, layer_norm_eps=1e-5),
        vision=TowerConfig(width=1280, mlp_width=5120, layers=32, heads=16, layer_norm_eps=1e-5),
        embed_dim=1024,
        context_length=77,
        vocab_size=49408,
        image_size=224,
        patch_size=14,
        quick_gelu=False,
    )
    with torch.device("meta"):
        published = CLIPModel(CLIPConfig(**VIT_H_14)).state_dict()
        model = open_clip.CLIP(**open_clip.get_model_config("ViT-H-14"))
    state = convert_tensors(published, config, where="meta")
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    sources = [source for entry in name_mapping(config) for source in entry.sources]
    assert sorted(sources) == sorted(published)  # every published tensor is used, and used once
    assert sum(value.numel() for value in state.values()) == 986_109_441


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_act": "gelu"}
    config = CLIPConfig(
        text_config={"hidden_size": 8, **sizes},
        vision_config={"hidden_size": 12, "image_size": 16, "patch_size": 8, **sizes},
        projection_dim=6,
    )
    CLIPModel(config).save_pretrained(tmp_path)
    return tmp_path


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_json(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "config.json") -> None:
    raw = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    change(raw)
    (folder / name).write_text(json.dumps(raw))


Q_PROJ = "vision_model.encoder.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(Q_PROJ), f"{Q_PROJ}: missing"),
        (lambda tensors: tensors.update(lora=torch.zeros(1)), "lora: unknown"),
        (
            lambda tensors: tensors.update({Q_PROJ: torch.zeros(12, 6)}),
            f"{Q_PROJ}: expected shape [12, 12], came [12, 6]",
        ),
        (
            lambda tensors: tensors.update({"text_projection.weight": torch.zeros(8, 6)}),
            "text_projection.weight: expected shape [6, 8], came [8, 6]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(folder: Path, change: Callable[..., object], message: str) -> None:
    edit_weights(folder, change)
    with pytest.raises(ConfigError) as caught:
        PickScoreScorer(model_path=folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(model_type="siglip"), "model_type is 'siglip'"),
        (lambda raw: raw["text_config"].update(hidden_act="relu"), "hidden_act is 'relu' (text)"),
        (lambda raw: raw["text_config"].update(hidden_act="quick_gelu"), "the same for both"),
        (lambda raw: raw["text_config"].update(eos_token_id=7), "eos_token_id is 7"),
        (lambda raw: raw["text_config"].update(vocab_size=1000), "vocab_size is 1000"),
        (lambda raw: raw["vision_config"].update(num_attention_heads=5), "12 is not a multiple of"),
        (lambda raw: raw["vision_config"].update(num_hidden_layers="1"), "num_hidden_layers is '1'"),
        (lambda raw: raw["vision_config"].update(num_channels=4), "num_channels is 4"),
        (lambda raw: raw.update(text_config_dict={"hidden_size": 9}), "text_config_dict.hidden_size is 9"),
        (lambda raw: raw["vision_config"].update(num_hidden_layers=2), "layers.1.layer_norm1.weight: missing"),
    ],
)
def test_configurations_that_do_not_fit_are_named(folder: Path, change: Callable[..., object], message: str) -> None:
    edit_json(folder, change)
    with pytest.raises(ConfigError) as caught:
        PickScoreScorer(model_path=folder)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"do_center_crop": False}, "do_center_crop is False"),
        ({"resample": 2}, "resample is 2"),
        ({"size": {"shortest_edge": 224}}, "size is {'shortest_edge': 224}"),
        ({"size": {"height": 16, "width": 16}}, "size is {'height': 16"),
        ({"crop_size": 24}, "crop_size is 24"),
        ({"image_mean": [0.5]}, "image_mean is [0.5]"),
    ],
)
def test_another_image_processor_is_refused(folder: Path, processor: dict[str, Any], message: str) -> None:
    edit_json(folder, lambda raw: raw.update(processor), "preprocessor_config.json")
    with pytest.raises(ConfigError) as caught:
        PickScoreScorer(model_path=folder)
    assert message in str(caught.value)


def test_processor_values_are_read_from_the_file(folder: Path) -> None:
    image = torch.full((1, 3, 16, 16), 200, dtype=torch.uint8)
    plain = PickScoreScorer(model_path=folder).embed_images(image)
    edit_json(
        folder,
        lambda raw: raw.update(size=16, crop_size=16, image_mean=[0.1, 0.2, 0.3], image_std=[1, 1, 1]),
        "preprocessor_config.json",
    )
    assert not torch.allclose(PickScoreScorer(model_path=folder).embed_images(image), plain, atol=1e-3)


def test_a_folder_without_readable_weights(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no PickScore model folder"):
        PickScoreScorer(model_path=folder / "absent")
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"cannot read model\.safetensors"):
        PickScoreScorer(model_path=folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is not read"):
        PickScoreScorer(model_path=folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read config\.json"):
        PickScoreScorer(model_path=folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read config\.json"):
        PickScoreScorer(model_path=folder)


def test_an_index_that_promises_too_much(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**dict.fromkeys(names, "part.safetensors"), "x": "gone.safetensors"}}))
    with pytest.raises(ConfigError, match=r"cannot read gone\.safetensors"):
        PickScoreScorer(model_path=folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "x"], "part.safetensors")}))
    with pytest.raises(ConfigError, match="does not hold what the index says: x"):
        PickScoreScorer(model_path=folder)


def test_the_scorer_answers_its_protocol(folder: Path) -> None:
    scorer = PickScoreScorer(model_path=folder)
    assert isinstance(scorer, RewardScorer)
    empty = RewardBatch(prompts=(), tracks={"image": torch.zeros(0, 3, 16, 16, dtype=torch.uint8)})
    assert scorer.score(empty).components == {"pickscore": ()}
    with pytest.raises(RewardError, match="no 'image' track"):
        scorer.score(RewardBatch(prompts=("a",), tracks={"video": torch.zeros(1, 3, 16, 16, dtype=torch.uint8)}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device is visible"):
        PickScoreScorer(model_path=folder, device="cuda")
