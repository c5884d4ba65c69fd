"""Carries published CLIP weights into open_clip's CLIP.

Both are the same network under other names: open_clip keeps the three attention projections in one ``in_proj``, and
multiplies by its output projections from the right, so those are transposed. `name_mapping` is the whole story; the
shapes that each source must have follow from the open_clip module itself. It leaves out everything about files
(`layout`) and pixels (`preprocess`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from open_clip import CLIP, CLIPTextCfg, CLIPVisionCfg
from torch import Tensor

from relax_pickscore.layout import ClipConfig, TowerConfig
from relax_sdk import ConfigError

__all__ = ["IGNORED_BUFFERS", "MappedName", "build_clip", "convert_tensors", "load_clip", "name_mapping"]

# Saved by transformers before 4.31: 0, 1, 2, ... for looking up position embeddings. No parameters.
IGNORED_BUFFERS = frozenset({"text_model.embeddings.position_ids", "vision_model.embeddings.position_ids"})


@dataclasses.dataclass(frozen=True)
class MappedName:
    """One open_clip parameter and the published tensors it is made of.

    ``sources`` are concatenated along the first axis, in order; ``transposed`` then swaps the two axes.
    """

    target: str
    sources: tuple[str, ...]
    transposed: bool = False


def name_mapping(config: ClipConfig) -> tuple[MappedName, ...]:
    """Every parameter of the open_clip model, once."""
    return (
        MappedName("logit_scale", ("logit_scale",)),
        MappedName("token_embedding.weight", ("text_model.embeddings.token_embedding.weight",)),
        MappedName("positional_embedding", ("text_model.embeddings.position_embedding.weight",)),
        *_blocks("transformer.resblocks", "text_model.encoder.layers", config.text.layers),
        *_affine("ln_final", "text_model.final_layer_norm"),
        MappedName("text_projection", ("text_projection.weight",), transposed=True),
        MappedName("visual.conv1.weight", ("vision_model.embeddings.patch_embedding.weight",)),
        MappedName("visual.class_embedding", ("vision_model.embeddings.class_embedding",)),
        MappedName("visual.positional_embedding", ("vision_model.embeddings.position_embedding.weight",)),
        *_affine("visual.ln_pre", "vision_model.pre_layrnorm"),  # spelt so in every published checkpoint
        *_blocks("visual.transformer.resblocks", "vision_model.encoder.layers", config.vision.layers),
        *_affine("visual.ln_post", "vision_model.post_layernorm"),
        MappedName("visual.proj", ("visual_projection.weight",), transposed=True),
    )


def _affine(target: str, source: str) -> Iterator[MappedName]:
    for part in ("weight", "bias"):
        yield MappedName(f"{target}.{part}", (f"{source}.{part}",))


def _blocks(target: str, source: str, layers: int) -> Iterator[MappedName]:
    for layer in range(layers):
        ours, theirs = f"{target}.{layer}", f"{source}.{layer}"
        yield from _affine(f"{ours}.ln_1", f"{theirs}.layer_norm1")
        for part in ("weight", "bias"):
            projections = tuple(f"{theirs}.self_attn.{name}_proj.{part}" for name in "qkv")
            yield MappedName(f"{ours}.attn.in_proj_{part}", projections)
        yield from _affine(f"{ours}.attn.out_proj", f"{theirs}.self_attn.out_proj")
        yield from _affine(f"{ours}.ln_2", f"{theirs}.layer_norm2")
        yield from _affine(f"{ours}.mlp.c_fc", f"{theirs}.mlp.fc1")
        yield from _affine(f"{ours}.mlp.c_proj", f"{theirs}.mlp.fc2")


def build_clip(config: ClipConfig) -> CLIP:
    """The open_clip model of these sizes on the meta device: names and shapes, no memory, no initialisation."""

    def ratio(tower: TowerConfig) -> float:
        # open_clip takes floor(width * ratio); the half keeps rounding from losing a unit.
        return (tower.mlp_width + 0.5) / tower.width

    vision = CLIPVisionCfg(
        layers=config.vision.layers,
        width=config.vision.width,
        head_width=config.vision.width // config.vision.heads,
        mlp_ratio=ratio(config.vision),
        patch_size=config.patch_size,
        image_size=config.image_size,
        norm_kwargs={"eps": config.vision.layer_norm_eps},
    )
    text = CLIPTextCfg(
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        width=config.text.width,
        heads=config.text.heads,
        layers=config.text.layers,
        mlp_ratio=ratio(config.text),
        norm_kwargs={"eps": config.text.layer_norm_eps},
    )
    with torch.device("meta"):
        return CLIP(config.embed_dim, vision, text, quick_gelu=config.quick_gelu)


def convert_tensors(tensors: Mapping[str, Tensor], config: ClipConfig, *, where: str) -> dict[str, Tensor]:
    """Rename, pack and transpose published tensors into the state of `build_clip`, as float32.

    Args:
        tensors: published name -> tensor, any floating dtype.
        config: the sizes from the folder's `config.json`.
        where: the folder, for the message.

    Raises:
        ConfigError: listing every tensor that is missing, unknown, or of another shape than `config` implies.
    """
    mapping = name_mapping(config)
    shapes = {name: tuple(value.shape) for name, value in build_clip(config).state_dict().items()}
    expected = {source: shape for entry in mapping for source, shape in _source_shapes(entry, shapes[entry.target])}
    problems = [f"{name}: missing" for name in expected if name not in tensors]
    problems += [f"{name}: unknown" for name in tensors if name not in expected and name not in IGNORED_BUFFERS]
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            problems.append(f"{name}: expected shape {list(shape)}, came {list(tensors[name].shape)}")
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise ConfigError(
            "the weights are not the CLIP that config.json describes: " + "; ".join(problems[:8]) + more,
            where=where,
            expected=f"{len(expected)} tensors of the Hugging Face CLIP layout",
        )
    state = {}
    for entry in mapping:
        parts = [tensors[source].to(torch.float32) for source in entry.sources]
        value = torch.cat(parts) if len(parts) > 1 else parts[0]
        state[entry.target] = value.T.contiguous() if entry.transposed else value
    return state


def _source_shapes(entry: MappedName, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shape of every source of an entry, given its target's."""
    shape = tuple(reversed(shape)) if entry.transposed else shape
    for source in entry.sources:
        yield source, (shape[0] // len(entry.sources), *shape[1:]) if len(entry.sources) > 1 else shape


def load_clip(tensors: Mapping[str, Tensor], config: ClipConfig, *, where: str) -> CLIP:
    """The open_clip model with published weights: float32, on the CPU, in eval mode, without gradients.

    Raises:
        ConfigError: as `convert_tensors`.
    """
    model = build_clip(config)
    model.load_state_dict(convert_tensors(tensors, config, where=where), strict=True, assign=True)
    # The causal mask is no part of the state, so it is still a meta tensor: query i sees keys 0..i.
    blocked = torch.full((config.context_length, config.context_length), float("-inf"))
    model.attn_mask = blocked.triu(1)
    return model.eval().requires_grad_(False)
