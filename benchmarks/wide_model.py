"""A Qwen-Image pipeline folder of full width (3072) and any number of layers, for benchmarks and runs without a hub.

    python benchmarks/wide_model.py FOLDER --layers 12            # random weights, drawn on the GPU when there is one
    python benchmarks/wide_model.py FOLDER --layers 60 --sparse   # zeros that take no room on disk

VAE, text encoder and tokenizer are those of the bundled tiny model, so the transformer reads texts of its width.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import relax_qwen_image
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import save_file

TINY = Path(relax_qwen_image.__file__).parent / "assets" / "tiny"
SHARD_BYTES = 4 * 2**30
INDEX = "diffusion_pytorch_model.safetensors.index.json"


def wide_config(layers: int) -> dict[str, object]:
    """The published transformer's width and heads, with the tiny model's text width."""
    tiny = json.loads((TINY / "transformer" / "config.json").read_text())
    return tiny | {
        "num_layers": layers,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "axes_dims_rope": [16, 56, 56],
    }


def wide_transformer(layers: int, device: torch.device | str, *, seed: int = 0) -> QwenImageTransformer2DModel:
    """A bfloat16 transformer of random weights, made on ``device``: normal of width 0.02, norms 1, biases 0."""
    with torch.device("meta"):
        module = QwenImageTransformer2DModel.from_config(wide_config(layers))
    module = module.to(torch.bfloat16).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    # The rotary tables are plain attributes, which `to_empty` does not make.
    fresh = type(module.pos_embed)(theta=10000, axes_dim=list(module.config.axes_dims_rope), scale_rope=True)
    module.pos_embed = fresh
    return module.eval()


def build_folder(folder: Path, layers: int, *, sparse: bool) -> None:
    """Write the pipeline folder; an existing one is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("transformer"))
    target = folder / "transformer"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(wide_config(layers), indent=2))
    if sparse:
        with torch.device("meta"):
            module = QwenImageTransformer2DModel.from_config(wide_config(layers))
        shapes = {name: tuple(item.shape) for name, item in module.state_dict().items()}
        weight_map = {}
        for index, part in enumerate(_parts(shapes)):
            file = f"diffusion_pytorch_model-{index:05d}.safetensors"
            _write_zeros(target / file, part)
            weight_map |= dict.fromkeys(part, file)
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        state = wide_transformer(layers, device).state_dict()
        weight_map = {}
        for index, part in enumerate(_parts({name: tuple(item.shape) for name, item in state.items()})):
            file = f"diffusion_pytorch_model-{index:05d}.safetensors"
            save_file({name: state[name].cpu().contiguous() for name in part}, target / file)
            weight_map |= dict.fromkeys(part, file)
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _parts(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    part: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes.items():
        part[name] = shape
        size += 2 * torch.Size(shape).numel()
        if size > SHARD_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _write_zeros(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file whose data is a hole."""
    header: dict[str, object] = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sparse", action="store_true")
    arguments = parser.parse_args()
    build_folder(arguments.folder, arguments.layers, sparse=arguments.sparse)
    print(arguments.folder)
