"""``samples.png``: the same held-out prompts and noise before and after training, side by side."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from relax_sdk.files import write_bytes_atomically

__all__ = ["draw_samples"]

_CELL, _GAP, _MARGIN = 144, 12, 88
_BACKGROUND, _INK, _FAINT = (255, 255, 255), (32, 33, 36), (110, 114, 120)


def draw_samples(
    path: Path,
    *,
    prompts: Sequence[str],
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    title: str,
    columns: int = 8,
    rows: int = 2,
) -> None:
    """Write the comparison: ``rows`` bands of ``columns`` prompts, each with a row before and a row after.

    Args:
        path: the PNG to write.
        prompts: captions.
        before, after: uint8 [3, H, W], one per prompt, in the same order.
        title: a line on top.
        columns, rows: how many prompts are shown; they are spread over the set.

    Raises:
        ArtifactError: the file could not be written.
    """
    count = min(len(prompts), columns * rows)
    # Golden-ratio order: spread over the whole set without falling into step with a pattern in its order.
    picked = sorted(sorted(range(len(prompts)), key=lambda index: index * 0.6180339887 % 1)[:count])
    rows = -(-count // columns)
    small, large = ImageFont.load_default(size=13), ImageFont.load_default(size=17)
    height, width = before[0].shape[1:]
    cell = (_CELL, max(1, round(_CELL * height / width)))
    caption_height, head = 54, 44
    band = 2 * (cell[1] + _GAP) + caption_height
    size = (_MARGIN + min(columns, count) * (_CELL + _GAP) + _GAP, head + rows * (band + _GAP))
    canvas = Image.new("RGB", size, _BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    draw.text((_GAP, 12), title, fill=_INK, font=large)
    for place, index in enumerate(picked):
        row, column = divmod(place, columns)
        left, top = _MARGIN + column * (_CELL + _GAP), head + row * (band + _GAP)
        lines = textwrap.wrap(prompts[index], width=21)
        text = "\n".join(lines[:3]) + (" …" if len(lines) > 3 else "")
        draw.multiline_text((left, top), text, fill=_INK, font=small, spacing=2)
        for offset, (label, images) in enumerate((("before", before), ("after", after))):
            y = top + caption_height + offset * (cell[1] + _GAP)
            canvas.paste(_thumbnail(images[index], cell), (left, y))
            draw.rectangle((left - 1, y - 1, left + cell[0], y + cell[1]), outline=(218, 220, 224))
            if column == 0:
                draw.text((_GAP, y + cell[1] // 2 - 8), label, fill=_FAINT, font=large)
    buffer = io.BytesIO()
    canvas.save(buffer, format="PNG", optimize=True)
    write_bytes_atomically(path, buffer.getvalue())


def _thumbnail(pixels: Tensor, size: tuple[int, int]) -> Image.Image:
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().cpu().numpy())
    # Small pictures are shown as the pixels they are; large ones are smoothed.
    method = Image.Resampling.NEAREST if image.width < size[0] else Image.Resampling.LANCZOS
    return image.resize(size, method)
