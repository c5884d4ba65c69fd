"""A small Qwen-Image pipeline with random weights, built once per session: every part of its real class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from relax_qwen_image.adapter import QwenImageAdapter

from relax_sdk.protocols import GroupPlan, SamplingConfig

TEXT_WIDTH = 32
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|video_pad|>")
# The scheduler configuration of the published checkpoint.
SCHEDULER: dict[str, Any] = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}


def _tokenizer() -> Any:
    """A byte-level BPE of Qwen2's kind that knows the template's words, each as one token, and spells the rest."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    words = "system\nuser\nassistant\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    words += "spatial relationships of the objects and background:\n a red circle on grass"
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    trainee = Tokenizer(models.BPE())
    trainee.normalizer = normalizers.NFC()
    trainee.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainee.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainee.train_from_iterator(
        [words] * 3,
        trainers.BpeTrainer(vocab_size=800, min_frequency=1, show_progress=False, initial_alphabet=alphabet),
    )
    learned = json.loads(trainee.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def _text_encoder(tokenizer: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": -(-len(tokenizer) // 64) * 64,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        tie_word_embeddings=False,
    )
    encoder = Qwen2_5_VLForConditionalGeneration(config).eval()
    # The library's initialisation of 0.02 gives embeddings that barely tell prompts apart.
    encoder.model.language_model.embed_tokens.weight.data.normal_()
    return encoder


@pytest.fixture(scope="session")
def pipeline() -> Any:
    """A `QwenImagePipeline` of two transformer layers, float32, on the CPU."""
    import torch
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    # Random weights alone leave attention nearly flat: without this, a wrong mask or position would go unseen.
    for name, parameter in transformer.named_parameters():
        if name.endswith("weight") and "attn.to_" not in name and parameter.ndim == 2:
            parameter.data.mul_(2.0)
    tokenizer = _tokenizer()
    built = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=AutoencoderKLQwenImage(base_dim=4, z_dim=16, dim_mult=[1, 1, 2, 2], num_res_blocks=1),
        text_encoder=_text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer.eval(),
    )
    built.set_progress_bar_config(disable=True)
    return built


@pytest.fixture(scope="session")
def pipeline_folder(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline on disk, in the published layout."""
    folder = tmp_path_factory.mktemp("qwen_image") / "model"
    pipeline.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapter() -> QwenImageAdapter:
    return QwenImageAdapter()


@pytest.fixture(scope="session")
def embedded(adapter: QwenImageAdapter, pipeline_folder: Path) -> Any:
    """The embedded model, loaded from the folder."""
    import torch

    return adapter.load_embedded_model(str(pipeline_folder), revision=None, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="session")
def scheduler_config(pipeline_folder: Path) -> dict[str, Any]:
    return json.loads((pipeline_folder / "scheduler/scheduler_config.json").read_text())


@pytest.fixture
def plan() -> GroupPlan:
    """Two candidates of one prompt; steps 1 and 3 are trained."""
    return GroupPlan(
        rollout_id=7,
        group_index=3,
        prompt="a red circle",
        sample_ids=("prompt:3:sample:0", "prompt:3:sample:1"),
        initial_noise_seeds=(11, 12),
        denoise_seeds=((1, 2, 3, 4), (5, 6, 7, 8)),
        engine_seed=99,
        sde_indices=(1, 3),
        policy_version=5,
    )


@pytest.fixture
def sampling() -> SamplingConfig:
    """Four steps of a picture that is wider than high."""
    return SamplingConfig(height=32, width=64, num_inference_steps=4, sde_indices=(1, 3))
