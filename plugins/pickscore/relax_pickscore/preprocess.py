"""Pixels as the published CLIP processor hands them to the model, for a whole batch of uint8 tensors.

The processor resizes the shortest side with PIL's antialiased bicubic filter, crops the middle, scales to 0..1 and
normalises. Here torch's antialiased bicubic (the same filter, a = -0.5) runs in float32 over the width, then over the
height, and rounds to whole levels after each pass as PIL does. What differs: PIL's weights are fixed-point, so about
one value in ten thousand (one in a hundred when enlarging) comes out a level of 255 apart, rarely two; and Pillow 13
takes the height first for some tall images, which moves a quarter of the values by a level. All of it is tested.
Everything after the resize is the same arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from relax_pickscore.layout import ProcessorConfig

__all__ = ["clip_pixels"]


def clip_pixels(images: Tensor, config: ProcessorConfig) -> Tensor:
    """Resize, crop, scale and normalise.

    Args:
        images: [B, 3, H, W] uint8, on any device.
        config: the folder's processor values.

    Returns:
        [B, 3, S, S] float32 on the same device, S = ``config.image_size``.
    """
    size = config.image_size
    height, width = images.shape[-2:]
    short = min(height, width)
    # The long side is floored, as the processor does.
    resized = (size * height // short, size * width // short)
    pixels = images.to(torch.float32)
    for target in ((height, resized[1]), resized):
        if target != tuple(pixels.shape[-2:]):
            pixels = functional.interpolate(pixels, size=target, mode="bicubic", antialias=True, align_corners=False)
            pixels = pixels.round().clamp(0, 255)
    top, left = (resized[0] - size) // 2, (resized[1] - size) // 2
    pixels = pixels[..., top : top + size, left : left + size]
    mean = torch.tensor(config.mean, device=images.device)[:, None, None]
    std = torch.tensor(config.std, device=images.device)[:, None, None]
    return (pixels * config.rescale_factor - mean) / std
