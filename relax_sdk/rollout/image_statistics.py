"""Plain image statistics that show reward hacking early: grids, black frames, saturated or washed-out images."""

from __future__ import annotations

from torch import Tensor

__all__ = ["image_statistics"]


def image_statistics(media: Tensor) -> dict[str, float]:
    """Means over a batch of images.

    Args:
        media: [B, 3, H, W] uint8.

    Returns:
        ``brightness`` (mean luma, 0..1), ``contrast`` (std of luma within an image), ``saturation`` (mean of max
        minus min channel) and ``sharpness`` (mean absolute difference of neighbouring pixels' luma, which a grid or
        noise raises and blur lowers). Luma weights: ITU-R BT.601.
    """
    pixels = media.float() / 255
    red, green, blue = pixels.unbind(1)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    across = (luma[:, :, 1:] - luma[:, :, :-1]).abs().mean()
    down = (luma[:, 1:] - luma[:, :-1]).abs().mean()
    return {
        "brightness": luma.mean().item(),
        "contrast": luma.flatten(1).std(dim=1).mean().item(),
        "saturation": (pixels.amax(1) - pixels.amin(1)).mean().item(),
        "sharpness": ((across + down) / 2).item(),
    }
