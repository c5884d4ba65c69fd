"""The untrained parts of the bundled tiny models: their sizes, the tokenizer, and how they are written to disk.

Every part is of the class the published checkpoint uses, only smaller, so that diffusers, stock SGLang and open_clip
load the folders as they load the published ones. Nothing here trains; see `tiny_train`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tiny_world import COMBINATIONS, PHRASINGS, SIDE, caption
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

TEXT_WIDTH = 64
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Qwen-Image wraps a prompt in this and drops the embeddings of the part before the prompt, which it takes to be
# exactly 34 tokens long whatever the tokenizer says.
TEMPLATE_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
TEMPLATE_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
TEMPLATE_PREFIX_TOKENS = 34
# How Qwen2's tokenizer cuts text into words before the byte-pair merges.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A little English beyond the captions, so that the words of ordinary prompts are not all spelled out byte by byte.
ENGLISH = """
A small picture can show a single shape, or many of them side by side. The circle is round, the square has four equal
sides, and the triangle has three corners. Paint the left half in a light color and the right half in a dark one.
There are two large blue squares under the bright yellow sun, next to a tall green tree and an old brown house.
Please draw a photo of a cat on a table, a dog in the garden, a bird over the sea, a red car in the street at night.
The sign above the door reads hello world. The text should be sharp, centered, and written in bold letters.
Nothing else is in the picture; the background stays plain, clean, and even, without noise, blur, or shadow.
One, two, three, four, five, six, seven, eight, nine, ten. First, second, third. Big, little, near, far, up, down.
In the style of an oil painting, a pencil sketch, a watercolor, a woodcut, a poster, a children's book, or a map.
"""
# The scheduler configuration published with Qwen-Image.
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def caption_variants() -> list[tuple[int, str]]:
    """Every (combination, text): all phrasings, as written and with a capital and a full stop."""
    rows = [(k, caption(k, p)) for p in range(len(PHRASINGS)) for k in range(COMBINATIONS)]
    return rows + [(k, text[0].upper() + text[1:] + ".") for k, text in rows]


def make_tokenizer() -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer of Qwen2's kind on the prompt template, the captions and a little English.

    Being byte-level it takes any Unicode text.

    Raises:
        ValueError: the template's prefix does not give exactly 34 tokens.
    """
    trainee = Tokenizer(models.BPE())
    trainee.normalizer = normalizers.NFC()
    trainee.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainee.decoder = decoders.ByteLevel()
    template = TEMPLATE_PREFIX + TEMPLATE_SUFFIX
    for token in SPECIAL_TOKENS:
        template = template.replace(token, "\n")
    corpus = [ENGLISH, *([template] * 4), *(text for _, text in caption_variants())]
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    trainee.train_from_iterator(corpus, trainer)
    learned = json.loads(trainee.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=131072,
        padding_side="right",
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    found = len(tokenizer(TEMPLATE_PREFIX).input_ids)
    if found != TEMPLATE_PREFIX_TOKENS:
        raise ValueError(f"the template's prefix gives {found} tokens, Qwen-Image drops {TEMPLATE_PREFIX_TOKENS}")
    return tokenizer


def make_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """A two-layer Qwen2.5-VL with random weights (float32, CPU); its image tower is there but unused."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    # A multiple of 64 above the tokenizer's size, as published checkpoints pad theirs.
    vocabulary = -(-len(tokenizer) // 64) * 64
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 4 * TEXT_WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def make_transformer() -> QwenImageTransformer2DModel:
    """A four-layer Qwen-Image transformer, 128 wide, random weights (float32, CPU)."""
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    )


def make_vae(base_dim: int) -> AutoencoderKLQwenImage:
    """A Qwen-Image autoencoder with one residual block a level, random weights (float32, CPU)."""
    return AutoencoderKLQwenImage(base_dim=base_dim, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1)


def make_clip() -> CLIPModel:
    """A CLIP of ViT-H's architecture (exact GELU, class token, pre- and post-norm), shrunk to 64x64 pictures.

    The text tower keeps CLIP's own vocabulary of 49,408 tokens, hence its small width.
    """
    return CLIPModel(
        CLIPConfig(
            text_config={
                "vocab_size": 49408,
                "hidden_size": 32,
                "intermediate_size": 128,
                "projection_dim": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "max_position_embeddings": 77,
                "hidden_act": "gelu",
                "bos_token_id": 49406,
                "eos_token_id": 49407,
                "pad_token_id": 0,
            },
            vision_config={
                "hidden_size": 96,
                "intermediate_size": 384,
                "projection_dim": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 3,
                "image_size": SIDE,
                "patch_size": 8,
                "hidden_act": "gelu",
            },
            projection_dim=64,
            logit_scale_init_value=3.258,
        )
    )


@lru_cache
def _clip_statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
    return mean, std


def clip_pixels(pictures: Tensor) -> Tensor:
    """Normalise pictures float32 `[B, 3, 64, 64]` in 0..1 as CLIP expects them."""
    mean, std = _clip_statistics(pictures.device)
    return (pictures - mean) / std


def write_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a temporary sibling folder, then put it in `folder`'s place."""
    temporary = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    fill(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)


def save_qwen_image(pipeline: QwenImagePipeline, folder: Path) -> None:
    """Write a pipeline in the published layout; `vocab.json` and `merges.txt` too, which some loaders still read.

    Transformer and autoencoder are stored in bfloat16, the text encoder in float32 (of bfloat16 values): transformers
    loads a file in its own dtype and diffusers in float32, so that `from_pretrained(folder)` alone gets one dtype.
    """

    def fill(target: Path) -> None:
        pipeline.transformer.to(torch.bfloat16)
        pipeline.vae.to(torch.bfloat16)
        pipeline.save_pretrained(target)
        learned = json.loads(pipeline.tokenizer.backend_tokenizer.to_str())["model"]
        merges = "".join(f"{left} {right}\n" for left, right in learned["merges"])
        write_text(target / "tokenizer/vocab.json", json.dumps(learned["vocab"], ensure_ascii=False))
        write_text(target / "tokenizer/merges.txt", "#version: 0.2\n" + merges)

    replace_folder(folder, fill)


def save_clip(model: CLIPModel, folder: Path) -> None:
    """Write a CLIP in the layout of `yuvalkirstain/PickScore_v1` (no tokenizer files: it uses CLIP's own BPE)."""
    processor = {
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(CLIP_MEAN),
        "image_processor_type": "CLIPImageProcessor",
        "image_std": list(CLIP_STD),
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": SIDE},
    }

    def fill(target: Path) -> None:
        model.save_pretrained(target)
        write_text(target / "preprocessor_config.json", json.dumps(processor, indent=2) + "\n")

    replace_folder(folder, fill)


def write_jsonl(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Write one JSON object a line."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler with the published Qwen-Image configuration."""
    return FlowMatchEulerDiscreteScheduler(**SCHEDULER)
