"""How the bundled tiny PickScore is trained: good and bad pictures, and the scores they deserve.

The targets fall evenly with every wrong attribute and with every kind of mess (noise, blur, wobble, two pictures at
once, disturbed latents, nothing at all), so that the reward has a smooth slope and no easy hacks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLQwenImage
from tiny_models import clip_pixels
from tiny_train import Inputs, decode, encode, optimise, random_combinations, round_weights
from tiny_world import BACKGROUNDS, COLOURS, COMBINATIONS, draw, palette, split
from torch import Tensor
from torch.nn import functional
from transformers import CLIPModel

SCORE_DIVISOR = 26.0  # what users of PickScore divide its logits by
SCORE_RIGHT, SCORE_WRONG_ATTRIBUTE, SCORE_MESS = 0.88, 0.22, 0.1


@dataclass(frozen=True, kw_only=True)
class JudgedPictures:
    """Pictures uint8 `[P, 3, 64, 64]` and the score float32 `[P, 54]` that each caption should get for them."""

    pictures: Tensor
    targets: Tensor


def _ideal_scores(combination: Tensor) -> Tensor:
    """Scores `[B, 54]` of clean pictures: 0.88 when all is right, 0.22 less for every wrong attribute."""
    every = torch.arange(COMBINATIONS, device=combination.device)
    wrong = sum((a[:, None] != b[None]).float() for a, b in zip(split(combination), split(every), strict=True))
    return SCORE_RIGHT - SCORE_WRONG_ATTRIBUTE * wrong


def _fade(scores: Tensor, quality: Tensor) -> Tensor:
    """Pull scores `[B, 54]` towards that of a mess as quality `[B]` falls from 1 to 0."""
    return SCORE_MESS + (scores - SCORE_MESS) * quality.clamp(0, 1)[:, None]


def _blur(pictures: Tensor, strength: Tensor) -> Tensor:
    """Gaussian blur of each picture with its own standard deviation in pixels, float32 `[B]`."""
    reach = torch.arange(-12, 13, device=pictures.device, dtype=torch.float32)
    kernel = torch.exp(-0.5 * (reach[None] / strength.clamp_min(0.2)[:, None]) ** 2)
    kernel = (kernel / kernel.sum(dim=1, keepdim=True)).repeat_interleave(3, dim=0)
    flat = pictures.reshape(1, -1, *pictures.shape[2:])
    flat = functional.conv2d(
        functional.pad(flat, (12, 12, 0, 0), "replicate"), kernel[:, None, None, :], groups=flat.shape[1]
    )
    flat = functional.conv2d(
        functional.pad(flat, (0, 0, 12, 12), "replicate"), kernel[:, None, :, None], groups=flat.shape[1]
    )
    return flat.reshape(pictures.shape)


@torch.no_grad()
def judged_pictures(vae: AutoencoderKLQwenImage, count: int, generator: torch.Generator) -> JudgedPictures:
    """About `count` good and bad pictures with the scores they deserve.

    Clean, through the autoencoder, with noisy latents (how a sampler errs), noisy, blurred, wobbly, two at once, empty,
    and plain garbage. Runs in chunks of 432.
    """
    device, parts, chunk = generator.device, [], 432

    def rand(size: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.rand(size, generator=generator, device=device) * (high - low) + low

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    for _ in range(max(1, count // chunk)):
        kind = torch.arange(chunk, device=device) % 12
        combination = random_combinations(chunk, generator)
        scores = _ideal_scores(combination)
        quality = torch.ones(chunk, device=device)
        wobble = torch.stack([rand(chunk, 0, 5), rand(chunk, 3, 9).floor(), rand(chunk, 0, 6.28)], dim=1)
        wobble[:, 0] *= kind == 3
        quality -= ((wobble[:, 0] - 0.4) / 3.5).clamp(0, 1)
        pictures = draw(combination, generator, wobble=wobble)

        # Kinds 4 and 5: two pictures at once, blended everywhere or one half beside the other.
        other = random_combinations(chunk, generator)
        second = draw(other, generator)
        share = rand(chunk)
        beside = (torch.arange(64, device=device)[None] / 64 < share[:, None])[:, None, None, :].float()
        weight = torch.where((kind == 4)[:, None, None, None], share[:, None, None, None], beside)
        two = ((kind == 4) | (kind == 5)).float()
        weight = 1 - two[:, None, None, None] * (1 - weight)
        pictures = pictures * weight + second * (1 - weight)
        portion = (1 - two * (1 - share))[:, None]
        scores = scores * portion + _ideal_scores(other) * (1 - portion)
        quality -= two * 2.4 * share * (1 - share)

        # Kinds 0, 3, 4, 6 and 7 pass through the autoencoder; for 6 and 7 its latents are disturbed on the way.
        through = (kind == 0) | (kind == 3) | (kind == 4) | (kind == 6) | (kind == 7)
        latents = encode(vae, pictures[through])
        strength = rand(chunk, 0, 1.3) * ((kind == 6) | (kind == 7))
        disturbed = strength[through][:, None, None]
        pictures[through] = decode(vae, latents * (1 - 0.4 * disturbed) + disturbed * randn(*latents.shape))
        quality -= ((strength - 0.15) / 0.65).clamp(0, 1)

        noise = rand(chunk, 0, 0.4) * (kind == 8)
        pictures = pictures + noise[:, None, None, None] * randn(*pictures.shape)
        quality -= noise / 0.4
        blur = rand(chunk, 0.2, 5) * (kind == 9)
        pictures = torch.where((kind == 9)[:, None, None, None], _blur(pictures, blur), pictures)
        quality -= ((blur - 0.4) / 3.5).clamp(0, 1)

        # Kind 10: a background (or a shape's colour) and nothing else. Kind 11: coloured blotches of any grain.
        plain = torch.cat([palette(BACKGROUNDS, device), palette(COLOURS, device)])
        plain = plain[torch.randint(0, 9, (chunk,), generator=generator, device=device)][:, :, None, None]
        pictures = torch.where((kind == 10)[:, None, None, None], plain.expand_as(pictures), pictures)
        blotches = _blur(randn(*pictures.shape), rand(chunk, 0.2, 8))
        blotches = 0.5 + 0.5 * blotches / blotches.flatten(1).std(dim=1)[:, None, None, None]
        pictures = torch.where((kind == 11)[:, None, None, None], blotches, pictures)
        quality = quality * (kind < 10)
        pictures = pictures + rand(chunk, 0, 0.015)[:, None, None, None] * randn(*pictures.shape)
        parts.append(((pictures.clamp(0, 1) * 255).round().byte(), _fade(scores, quality)))
    return JudgedPictures(pictures=torch.cat([p for p, _ in parts]), targets=torch.cat([t for _, t in parts]))


def scores(model: CLIPModel, pictures: Tensor, tokens: Tensor) -> Tensor:
    """Score matrix float32 `[B, T]`: exp(logit scale) * cosine / 26, for pictures in 0..1 and CLIP tokens `[T, L]`."""
    seen = model.visual_projection(model.vision_model(pixel_values=clip_pixels(pictures)).pooler_output)
    read = model.text_projection(model.text_model(input_ids=tokens).pooler_output)
    cosine = functional.normalize(seen.float(), dim=-1) @ functional.normalize(read.float(), dim=-1).T
    return model.logit_scale.exp() * cosine / SCORE_DIVISOR


def train_clip(
    model: CLIPModel, data: JudgedPictures, tokens: Tensor, generator: torch.Generator, *, steps: int, batch: int
) -> None:
    """Train the scorer in place on all 54 captions at once, then round to float16.

    Args:
        tokens: CLIP tokens int64 `[T, L]`; T is a multiple of 54 and row t words combination t % 54.
    """
    device = generator.device
    wordings = tokens.shape[0] // COMBINATIONS
    every = torch.arange(COMBINATIONS, device=device)

    def inputs_at(_step: int) -> Inputs:
        # Not too sharp, not too flat: scores stay comparable with cosines.
        model.logit_scale.clamp_(math.log(24.0), math.log(30.0))
        pick = torch.randint(0, data.pictures.shape[0], (batch,), generator=generator, device=device)
        wording = torch.randint(0, wordings, (COMBINATIONS,), generator=generator, device=device)
        return data.pictures[pick].float() / 255, data.targets[pick], tokens[every + wording * COMBINATIONS]

    def loss_of(pictures: Tensor, wanted: Tensor, words: Tensor) -> Tensor:
        found = scores(model, pictures, words)
        # Of 54 captions one is right and few are nearly right: weigh those up.
        weight = 1 + 20 * (wanted - SCORE_MESS).clamp_min(0) ** 2
        regression = (weight * (found - wanted).square()).mean()
        contrast = functional.cross_entropy(found * SCORE_DIVISOR, functional.softmax(wanted * SCORE_DIVISOR, dim=-1))
        return regression + 0.03 * contrast

    model.train()
    optimise("scorer", list(model.parameters()), steps, 1.5e-3, inputs_at, loss_of)
    model.eval()
    # Words no caption holds were never trained: zero rows say so (and compress well).
    table = model.text_model.embeddings.token_embedding.weight
    used = torch.zeros(table.shape[0], dtype=torch.bool, device=device)
    used[tokens.unique()] = True
    with torch.no_grad():
        table[~used] = 0
    round_weights(model, torch.float16)
