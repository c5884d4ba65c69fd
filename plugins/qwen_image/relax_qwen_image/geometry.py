"""Pixels, latents and tokens of Qwen-Image: which sizes exist, and how latents are packed. Imports no torch.

The VAE shrinks each side by 8; the transformer reads patches of 2 x 2 latents as one token. So sides are multiples of
16 pixels, and an H x W picture is N = (H / 16) (W / 16) tokens of C = 64 channels, row by row. N alone does not tell
H from W, which is why height and width travel with every latent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "LATENT_CHANNELS",
    "PATCH",
    "SIDE_MULTIPLE",
    "TOKEN_CHANNELS",
    "VAE_SCALE",
    "latent_shape",
    "nearest_side",
    "noise_shape_problem",
    "pack_latents",
    "size_problems",
    "token_grid",
    "unpack_tokens",
]

VAE_SCALE = 8
PATCH = 2
SIDE_MULTIPLE = VAE_SCALE * PATCH
LATENT_CHANNELS = 16
TOKEN_CHANNELS = LATENT_CHANNELS * PATCH * PATCH


def nearest_side(pixels: int) -> int:
    """The valid side length closest to ``pixels``; the smaller one when two are equally close."""
    below = max(pixels // SIDE_MULTIPLE, 1) * SIDE_MULTIPLE
    above = below + SIDE_MULTIPLE
    return below if pixels - below <= above - pixels else above


def size_problems(height: int, width: int) -> list[str]:
    """One text per side that is off the grid, with the nearest valid value; empty when the size can be drawn."""
    return [
        f"{name} = {pixels} is not a multiple of {SIDE_MULTIPLE}; the nearest valid {name} is {nearest_side(pixels)}"
        for name, pixels in (("height", height), ("width", width))
        if pixels <= 0 or pixels % SIDE_MULTIPLE
    ]


def token_grid(height: int, width: int) -> tuple[int, int]:
    """Rows and columns of tokens of an H x W picture (pixels)."""
    return height // SIDE_MULTIPLE, width // SIDE_MULTIPLE


def latent_shape(height: int, width: int) -> tuple[int, int, int]:
    """Shape of the VAE latent of an H x W picture: (16, H / 8, W / 8). x_T is drawn in it."""
    return LATENT_CHANNELS, height // VAE_SCALE, width // VAE_SCALE


def noise_shape_problem(shape: Sequence[int], height: int, width: int) -> str | None:
    """What is wrong with an ``init_noise_latent_shape``, or None.

    Axes of length 1 (a frame, a batch) may stand before the two spatial ones, because they do not change the order
    in which the numbers are drawn.
    """
    expected = latent_shape(height, width)
    if tuple(shape[-2:]) == expected[1:] and math.prod(shape[:-2]) == LATENT_CHANNELS and LATENT_CHANNELS in shape[:-2]:
        return None
    return (
        f"init_noise_latent_shape = {list(shape)} does not fit {height}x{width} pixels; expected {list(expected)}, "
        "with any axes of length 1 before the last two"
    )


def pack_latents(latents: Tensor) -> Tensor:
    """Latents [B, 16, H/8, W/8] to tokens [B, N, 64]; within a token the order is channel, patch row, patch column."""
    batch, channels, height, width = latents.shape
    rows, columns = height // PATCH, width // PATCH
    patches = latents.reshape(batch, channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, rows * columns, channels * PATCH * PATCH)


def unpack_tokens(tokens: Tensor, *, height: int, width: int) -> Tensor:
    """The inverse of `pack_latents` for an H x W picture (pixels): [B, N, 64] to [B, 16, H/8, W/8]."""
    rows, columns = token_grid(height, width)
    patches = tokens.reshape(tokens.shape[0], rows, columns, LATENT_CHANNELS, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(tokens.shape[0], *latent_shape(height, width))
