"""The comparison shows before above after, for the same prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from relax_sdk.runtime.samples import draw_samples


@pytest.mark.parametrize(("count", "size"), [(3, (64, 64)), (40, (32, 64))])
def test_before_is_red_and_above_after_which_is_blue(tmp_path: Path, count: int, size: tuple[int, int]) -> None:
    red, blue = torch.zeros(3, *size, dtype=torch.uint8), torch.zeros(3, *size, dtype=torch.uint8)
    red[0], blue[2] = 255, 255
    path = tmp_path / "samples.png"
    draw_samples(
        path,
        prompts=[f"prompt {index} " + "with many words " * index for index in range(count)],
        before=[red] * count,
        after=[blue] * count,
        title="title",
    )
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    is_red = (pixels[..., 0] > 200) & (pixels[..., 1:].max(-1) < 50)
    is_blue = (pixels[..., 2] > 200) & (pixels[..., :2].max(-1) < 50)
    shown = min(count, 16)
    cell = 144 * round(144 * size[0] / size[1])
    assert is_red.sum() == pytest.approx(shown * cell, rel=0.05)
    assert is_blue.sum() == pytest.approx(shown * cell, rel=0.05)
    first_band = pixels.shape[0] // (2 if shown > 8 else 1)
    assert np.where(is_red[:first_band].any(1))[0].max() < np.where(is_blue[:first_band].any(1))[0].max()
