"""Reads a CLIP folder in the published Hugging Face layout: `config.json`, the weights, `preprocessor_config.json`.

Everything the scorer needs is turned into frozen records here, and everything it cannot honour is refused: an unknown
activation, a processor that resizes another way, a shard that the index names and the folder lacks. It leaves out
pickled weights (``pytorch_model.bin``): reading them would run code from the file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_sdk import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ClipConfig", "ProcessorConfig", "TowerConfig", "read_clip_config", "read_processor_config", "read_tensors"]

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
VOCAB_SIZE = 49408
END_OF_TEXT = VOCAB_SIZE - 1
# A config.json lists only what its writer chose to list; transformers' CLIPConfig gives the rest these values.
_TEXT_DEFAULTS: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": END_OF_TEXT,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
# The published CLIP processor: bicubic, shortest side, OpenAI's channel statistics.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """The sizes that both transformers of a CLIP have."""

    width: int
    mlp_width: int
    layers: int
    heads: int
    layer_norm_eps: float


@dataclasses.dataclass(frozen=True)
class ClipConfig:
    """What `config.json` says, as far as it decides shapes or arithmetic. Sizes in pixels and tokens."""

    text: TowerConfig
    vision: TowerConfig
    embed_dim: int
    context_length: int
    vocab_size: int
    image_size: int
    patch_size: int
    quick_gelu: bool


@dataclasses.dataclass(frozen=True)
class ProcessorConfig:
    """What `preprocessor_config.json` says: resize the shortest side, crop the middle, scale, normalise."""

    image_size: int
    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def read_clip_config(folder: Path) -> ClipConfig:
    """Read `config.json`.

    Raises:
        ConfigError: the folder or the file is missing or malformed, is not a CLIP, or asks for arithmetic that the
            conversion does not cover; the key and its value are named.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"no PickScore model folder at {str(folder)!r}",
            where="--reward-model-path",
            expected=f"a folder with config.json and {WEIGHTS}, as published at yuvalkirstain/PickScore_v1",
        )
    path = folder / "config.json"
    raw = _read_json(path)
    if raw.get("model_type", "clip") != "clip":
        raise ConfigError(f"model_type is {raw['model_type']!r}", where=str(path), expected="'clip'")
    text = _section(raw, "text_config", _TEXT_DEFAULTS, path)
    vision = _section(raw, "vision_config", _VISION_DEFAULTS, path)
    activations = {text["hidden_act"], vision["hidden_act"]}
    if len(activations) != 1 or not activations <= {"gelu", "quick_gelu"}:
        raise ConfigError(
            f"hidden_act is {text['hidden_act']!r} (text) and {vision['hidden_act']!r} (vision)",
            where=str(path),
            expected="'gelu' or 'quick_gelu', the same for both",
        )
    if text["eos_token_id"] not in (2, END_OF_TEXT):  # 2: written by transformers before 4.31, means the same
        raise ConfigError(
            f"text_config.eos_token_id is {text['eos_token_id']!r}",
            where=str(path),
            expected=f"{END_OF_TEXT} (or 2, from older releases): the end-of-text token of CLIP's tokenizer",
        )
    if text["vocab_size"] < VOCAB_SIZE:
        raise ConfigError(
            f"text_config.vocab_size is {text['vocab_size']}",
            where=str(path),
            expected=f"at least {VOCAB_SIZE}, the size of CLIP's tokenizer",
        )
    if vision["num_channels"] != 3:
        raise ConfigError(
            f"vision_config.num_channels is {vision['num_channels']}", where=str(path), expected="3 (RGB)"
        )
    return ClipConfig(
        text=_tower(text, "text_config", path),
        vision=_tower(vision, "vision_config", path),
        embed_dim=_positive_int(raw.get("projection_dim", 512), "projection_dim", path),
        context_length=_positive_int(text["max_position_embeddings"], "text_config.max_position_embeddings", path),
        vocab_size=text["vocab_size"],
        image_size=_positive_int(vision["image_size"], "vision_config.image_size", path),
        patch_size=_positive_int(vision["patch_size"], "vision_config.patch_size", path),
        quick_gelu=activations == {"quick_gelu"},
    )


def read_processor_config(folder: Path, *, image_size: int) -> ProcessorConfig:
    """Read `preprocessor_config.json`; without the file, the published CLIP processor's values at ``image_size``.

    Args:
        folder: the model folder.
        image_size: what the model takes, in pixels; the file has to agree.

    Raises:
        ConfigError: the file asks for another resize, crop or order of steps than CLIP's; the key is named.
    """
    path = folder / "preprocessor_config.json"
    if not path.exists():
        logger.info("%s has no preprocessor_config.json; using the published CLIP values", folder)
    raw = _read_json(path) if path.exists() else {}
    for step in ("do_resize", "do_center_crop", "do_rescale", "do_normalize"):
        if raw.get(step, True) is not True:
            raise ConfigError(f"{step} is {raw[step]!r}", where=str(path), expected="true")
    if raw.get("resample", _BICUBIC) != _BICUBIC:
        raise ConfigError(f"resample is {raw['resample']!r}", where=str(path), expected=f"{_BICUBIC} (bicubic)")
    # Older files hold a bare number for both sizes.
    size, crop = raw.get("size", image_size), raw.get("crop_size", image_size)
    if size not in (image_size, {"shortest_edge": image_size}):
        raise ConfigError(f"size is {size!r}", where=str(path), expected=f"{{'shortest_edge': {image_size}}}")
    if crop not in (image_size, {"height": image_size, "width": image_size}):
        raise ConfigError(
            f"crop_size is {crop!r}", where=str(path), expected=f"{{'height': {image_size}, 'width': {image_size}}}"
        )
    return ProcessorConfig(
        image_size=image_size,
        rescale_factor=float(raw.get("rescale_factor", 1 / 255)),
        mean=_three_floats(raw.get("image_mean", _MEAN), "image_mean", path),
        std=_three_floats(raw.get("image_std", _STD), "image_std", path),
    )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of `model.safetensors`, or of the shards that its index lists, on the CPU.

    Raises:
        ConfigError: no weights, a shard that is missing, unreadable or lacks a tensor that the index promises.
    """
    index = folder / WEIGHTS_INDEX
    if (folder / WEIGHTS).exists():
        return _read_safetensors(folder / WEIGHTS)
    if not index.exists():
        pickled = "; pytorch_model.bin is not read" if (folder / "pytorch_model.bin").exists() else ""
        raise ConfigError(f"no {WEIGHTS} in {str(folder)!r}{pickled}", expected=f"{WEIGHTS} or {WEIGHTS_INDEX}")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ConfigError("weight_map is missing or malformed", where=str(index), expected="{tensor name: shard file}")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        found = _read_safetensors(folder / shard)
        promised = {name for name, owner in weight_map.items() if owner == shard}
        if found.keys() != promised:
            names = ", ".join(sorted(found.keys() ^ promised))
            raise ConfigError(f"{shard} does not hold what the index says: {names}", where=str(index))
        tensors.update(found)
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path.name}: {error}", where=str(path)) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path.name}: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} holds a {type(value).__name__}", where=str(path), expected="a JSON object")
    return value


def _section(raw: Mapping[str, Any], name: str, defaults: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """One tower's keys. Older files repeat some of them in ``<name>_dict``: allowed as long as both agree."""
    section, repeated = raw.get(name) or {}, raw.get(f"{name}_dict") or {}
    if not (isinstance(section, dict) and isinstance(repeated, dict)):
        raise ConfigError(f"{name} is {section!r}", where=str(path), expected="a JSON object")
    for key in defaults:
        if key in section and key in repeated and section[key] != repeated[key]:
            raise ConfigError(
                f"{name}.{key} is {section[key]!r} but {name}_dict.{key} is {repeated[key]!r}",
                where=str(path),
                expected="one value",
            )
    return {**defaults, **repeated, **section}


def _tower(section: Mapping[str, Any], name: str, path: Path) -> TowerConfig:
    width, heads = (
        _positive_int(section[key], f"{name}.{key}", path) for key in ("hidden_size", "num_attention_heads")
    )
    if width % heads:
        raise ConfigError(
            f"{name}.hidden_size = {width} is not a multiple of {name}.num_attention_heads = {heads}", where=str(path)
        )
    return TowerConfig(
        width=width,
        mlp_width=_positive_int(section["intermediate_size"], f"{name}.intermediate_size", path),
        layers=_positive_int(section["num_hidden_layers"], f"{name}.num_hidden_layers", path),
        heads=heads,
        layer_norm_eps=float(section["layer_norm_eps"]),
    )


def _positive_int(value: object, name: str, path: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{name} is {value!r}", where=str(path), expected="a positive integer")
    return value


def _three_floats(value: Any, name: str, path: Path) -> tuple[float, float, float]:
    if len(value) != 3 or not all(isinstance(item, int | float) for item in value):
        raise ConfigError(f"{name} is {value!r}", where=str(path), expected="three numbers")
    return (float(value[0]), float(value[1]), float(value[2]))
