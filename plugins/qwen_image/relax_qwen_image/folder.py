"""Is a model folder whole? Answered from file names, JSON and safetensors headers alone; imports no torch.

A missing shard, a truncated download or a Git-LFS pointer is found here in milliseconds, before any GPU starts. Whether
the tensors fit the model is found by loading it (`relax_qwen_image.loading`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PIPELINE_PARTS", "TRAIN_PARTS", "folder_problems"]

TRAIN_PARTS = ("transformer",)
PIPELINE_PARTS = ("transformer", "scheduler", "vae", "text_encoder", "tokenizer")

_TRANSFORMER_CLASS = "QwenImageTransformer2DModel"
_VAE_CLASS = "AutoencoderKLQwenImage"


def folder_problems(model_path: str, parts: Sequence[str] = PIPELINE_PARTS) -> list[str]:
    """What a model folder lacks.

    Args:
        model_path: a local folder in the layout of the published Qwen-Image checkpoint.
        parts: the sub-folders that will be read, a subset of `PIPELINE_PARTS`.

    Returns:
        One text per missing or broken file, named relative to the folder; empty when nothing is wrong.
    """
    root = Path(model_path)
    if not root.is_dir():
        return [f"{model_path!r} is not a folder"]
    problems: list[str] = []
    for part in parts:
        problems += _CHECKS[part](root) if (root / part).is_dir() else [f"{part}/ is missing"]
    return problems


def _transformer(root: Path) -> list[str]:
    config, problems = _config(root, "transformer/config.json", expected_class=_TRANSFORMER_CLASS)
    # Variants of the class that need inputs which a text-to-image replay does not have.
    problems += [
        f"transformer/config.json: {key} = true is another variant of the model, which cannot be replayed"
        for key in ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope")
        if config.get(key)
    ]
    return problems + _weights(root, "transformer", "diffusion_pytorch_model")


def _scheduler(root: Path) -> list[str]:
    return _config(root, "scheduler/scheduler_config.json")[1]


def _vae(root: Path) -> list[str]:
    return _config(root, "vae/config.json", expected_class=_VAE_CLASS)[1] + _weights(
        root, "vae", "diffusion_pytorch_model"
    )


def _text_encoder(root: Path) -> list[str]:
    return _config(root, "text_encoder/config.json")[1] + _weights(root, "text_encoder", "model")


def _tokenizer(root: Path) -> list[str]:
    problems = _config(root, "tokenizer/tokenizer_config.json")[1]
    folder = root / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        lacking = [name for name in ("vocab.json", "merges.txt") if not (folder / name).is_file()]
        if lacking:
            problems.append(f"tokenizer/ has neither tokenizer.json nor {' and '.join(lacking)}")
    return problems


_CHECKS: dict[str, Callable[[Path], list[str]]] = {
    "transformer": _transformer,
    "scheduler": _scheduler,
    "vae": _vae,
    "text_encoder": _text_encoder,
    "tokenizer": _tokenizer,
}


def _config(root: Path, name: str, *, expected_class: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Read a JSON object; returns it (empty when unreadable) and what is wrong with it."""
    path = root / name
    if not path.is_file():
        return {}, [f"{name} is missing"]
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, [f"{name} is not readable JSON: {error}"]
    if not isinstance(config, dict):
        return {}, [f"{name} holds a {type(config).__name__}, expected a JSON object"]
    found = config.get("_class_name")
    if expected_class is not None and found != expected_class:
        return config, [f"{name}: _class_name is {found!r}, expected {expected_class!r}"]
    return config, []


def _weights(root: Path, part: str, stem: str) -> list[str]:
    """Check one safetensors file, or every shard that the index names."""
    single, index = f"{part}/{stem}.safetensors", f"{part}/{stem}.safetensors.index.json"
    if (root / single).is_file():
        return _safetensors(root, single)
    if not (root / index).is_file():
        return [f"{part}/ has no weights: neither {stem}.safetensors nor {stem}.safetensors.index.json"]
    content, problems = _config(root, index)
    shards = content.get("weight_map")
    if problems or not isinstance(shards, dict) or not shards:
        return problems or [f"{index} names no shards"]
    for shard in sorted({f"{part}/{name}" for name in shards.values()}):
        lost = [] if (root / shard).is_file() else [f"{shard} is missing (named by {index})"]
        problems += lost or _safetensors(root, shard)
    return problems


def _safetensors(root: Path, name: str) -> list[str]:
    """Compare a safetensors file's length with what its own header announces.

    The format: 8 bytes of little-endian header length, a JSON header with ``data_offsets`` per tensor, then the data.
    """
    path = root / name
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= size else None
        if header is None:
            return [f"{name} is not a whole safetensors file ({size} bytes)"]
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        return [f"{name} is not a readable safetensors file: {error}"]
    announced = 8 + length + max(ends, default=0)
    return [] if size == announced else [f"{name} has {size} bytes, its header announces {announced}"]
