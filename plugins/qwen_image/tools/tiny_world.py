"""The picture world of the bundled tiny models: coloured shapes of 64x64 pixels, drawn and judged without a network.

A picture holds one form (circle, square, triangle) of one colour (six) on one background (three): 54 combinations,
numbered `colour * 9 + form * 3 + background`. No colour is also a background, so a caption is never ambiguous.

`draw` renders pictures on any device, `captions` words them, `read_pictures` looks at pixels only and says what a
picture shows. The last one is the independent witness against the learned scorer: it has no weights to be fooled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

SIDE = 64
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 35, 40),
    "green": (40, 170, 70),
    "blue": (45, 80, 220),
    "yellow": (245, 215, 50),
    "purple": (140, 50, 185),
    "orange": (245, 130, 30),
}
FORMS: tuple[str, ...] = ("circle", "square", "triangle")
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (250, 250, 250),
    "black": (12, 12, 12),
    "gray": (128, 128, 128),
}
COMBINATIONS = len(COLOURS) * len(FORMS) * len(BACKGROUNDS)

# `{c}` colour, `{ac}` colour with its article, `{f}` form, `{b}` background. The last two are held out: no training
# prompt of the RL demo uses them (the base model has seen them, as a real base model has seen English).
PHRASINGS: tuple[str, ...] = (
    "{ac} {f} on a {b} background",
    "a {f} that is {c}, on a {b} background",
    "{b} background with {ac} {f}",
    "one {c} {f} drawn on {b}",
    "a picture of {ac} {f}, the background is {b}",
    "{c} {f}, {b} backdrop",
    "the shape is {ac} {f} and the backdrop is {b}",
    "a drawing of a single {c} {f} against a plain {b} background",
)
HELD_OUT_PHRASINGS: tuple[int, ...] = (6, 7)
# One combination per colour never appears in a training prompt; every form and background is among them twice.
HELD_OUT_COMBINATIONS: tuple[int, ...] = tuple(c * 9 + (c % 3) * 3 + ((c + c // 3) % 3) for c in range(6))


def split(combination: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combination numbers (int64, any shape) to their colour, form and background numbers."""
    return combination // 9, combination // 3 % 3, combination % 3


def join(colour: Tensor, form: Tensor, background: Tensor) -> Tensor:
    """The inverse of `split`."""
    return colour * 9 + form * 3 + background


def caption(combination: int, phrasing: int) -> str:
    """One combination in words, e.g. `an orange square on a black background`."""
    colour = list(COLOURS)[combination // 9]
    article = "an" if colour[0] in "aeiou" else "a"
    background = list(BACKGROUNDS)[combination % 3]
    return PHRASINGS[phrasing].format(c=colour, ac=f"{article} {colour}", f=FORMS[combination // 3 % 3], b=background)


@lru_cache
def _palette(values: tuple[tuple[int, int, int], ...], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device) / 255.0


def palette(table: dict[str, tuple[int, int, int]], device: torch.device | str) -> Tensor:
    """A colour table as float32 `[n, 3]` in 0..1; kept, since a copy to a GPU would stall every training step."""
    return _palette(tuple(table.values()), str(device))


@dataclass(frozen=True, kw_only=True)
class Pose:
    """Where and how large each shape is, in pixels and radians; every field is float32 `[B]`."""

    x: Tensor
    y: Tensor
    radius: Tensor
    angle: Tensor


def random_pose(count: int, generator: torch.Generator) -> Pose:
    """Poses that keep every form inside the picture, on the generator's device."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=generator, device=generator.device) * (high - low) + low

    return Pose(x=uniform(26, 38), y=uniform(26, 38), radius=uniform(12, 17), angle=uniform(-0.1, 0.1))


def coverage(form: Tensor, pose: Pose, wobble: Tensor | None = None, side: int = SIDE) -> Tensor:
    """Anti-aliased coverage of each shape: float32 `[B, side, side]` in 0..1.

    Args:
        form: int64 `[B]`.
        pose: of B shapes. The three forms of one radius have about the same area.
        wobble: float32 `[B, 3]`: amplitude in pixels, waves per turn, phase; bends the outline (for bad examples).
    """
    grid = torch.arange(side, device=form.device, dtype=torch.float32) + 0.5
    dx = grid[None, None, :] - pose.x[:, None, None]
    dy = grid[None, :, None] - pose.y[:, None, None]
    cos, sin = torch.cos(pose.angle)[:, None, None], torch.sin(pose.angle)[:, None, None]
    u, v = cos * dx + sin * dy, cos * dy - sin * dx
    radius = pose.radius[:, None, None]
    circle = torch.sqrt(u * u + v * v + 1e-12) - radius
    square = torch.maximum(u.abs(), v.abs()) - radius * (math.sqrt(math.pi) / 2)
    # An equilateral triangle as three half-planes, all at the inradius from its centre; the tip points up.
    inradius = radius * math.sqrt(math.pi / (3 * math.sqrt(3)))
    slope = math.sqrt(3) / 2
    triangle = torch.maximum(torch.maximum(slope * u - 0.5 * v, -slope * u - 0.5 * v), v) - inradius
    distance = torch.stack([circle, square, triangle], dim=1)
    distance = distance.gather(1, form[:, None, None, None].expand(-1, 1, side, side))[:, 0]
    if wobble is not None:
        amplitude, waves, phase = (wobble[:, i, None, None] for i in range(3))
        distance = distance + amplitude * torch.sin(waves * torch.atan2(v, u) + phase)
    return (0.5 - distance).clamp(0.0, 1.0)


def draw(
    combination: Tensor, generator: torch.Generator, *, pose: Pose | None = None, wobble: Tensor | None = None
) -> Tensor:
    """Render pictures: float32 `[B, 3, 64, 64]` in 0..1, on the generator's device.

    Args:
        combination: int64 `[B]`.
        generator: draws the poses (unless given) and a slight tint of both colours.
        pose: fixed poses instead of random ones.
        wobble: see `coverage`.
    """
    device = generator.device
    count = combination.shape[0]
    colour, form, background = split(combination)
    pose = random_pose(count, generator) if pose is None else pose
    mask = coverage(form, pose, wobble)[:, None]
    tint = (torch.rand(2, count, 3, generator=generator, device=device) - 0.5) * 0.04
    front = (palette(COLOURS, device)[colour] + tint[0]).clamp(0, 1)[:, :, None, None]
    back = (palette(BACKGROUNDS, device)[background] + tint[1]).clamp(0, 1)[:, :, None, None]
    return back + (front - back) * mask


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the pixel check saw in B pictures.

    `combination` int64 `[B]`, -1 where the picture is no clean picture of this world; `overlap` float32 `[B]` is the
    best intersection over union with an ideal form; `edge` float32 `[B]` the width of the outline in pixels.
    """

    combination: Tensor
    overlap: Tensor
    edge: Tensor


def read_pictures(pictures: Tensor) -> Reading:
    """Say what pictures show from their pixels alone.

    The background is the median of the border, the colour the median of what differs from it, each by its nearest
    palette entry; the form is the ideal form of the same area and centroid that overlaps best. A picture is clean when
    both colours are near the palette, few pixels lie off the line between them, the outline is narrow and the overlap
    is at least 0.85.

    Args:
        pictures: float32 `[B, 3, 64, 64]` in 0..1.
    """
    count, device = pictures.shape[0], pictures.device
    border = torch.cat([pictures[:, :, :2].flatten(2), pictures[:, :, -2:].flatten(2)], dim=2)
    border = torch.cat([border, pictures[..., :2].flatten(2), pictures[..., -2:].flatten(2)], dim=2)
    back = border.median(dim=2).values
    back_gap, background = torch.cdist(back, palette(BACKGROUNDS, device)).min(dim=1)

    differs = (pictures - back[:, :, None, None]).norm(dim=1) > 0.17
    inside = torch.where(differs[:, None], pictures, torch.nan).flatten(2)
    front = inside.nanmedian(dim=2).values.nan_to_num(0.0)
    front_gap, colour = torch.cdist(front, palette(COLOURS, device)).min(dim=1)

    axis = front - back
    length = axis.square().sum(dim=1).clamp_min(1e-6)
    offset = pictures - back[:, :, None, None]
    along = (offset * axis[:, :, None, None]).sum(dim=1) / length[:, None, None]
    stray = (offset - along.clamp(0, 1)[:, None] * axis[:, :, None, None]).norm(dim=1) > 0.2
    mask = (along > 0.5).float()
    area = mask.sum(dim=(1, 2))
    safe = area.clamp_min(1.0)
    grid = torch.arange(SIDE, device=device, dtype=torch.float32) + 0.5
    x = (mask * grid[None, None, :]).sum(dim=(1, 2)) / safe
    y = (mask * grid[None, :, None]).sum(dim=(1, 2)) / safe
    edge = ((along > 0.15) & (along < 0.85)).sum(dim=(1, 2)) / (2 * torch.sqrt(math.pi * safe))

    best = torch.zeros(count, device=device)
    form = torch.zeros(count, dtype=torch.int64, device=device)
    for candidate in range(len(FORMS)):
        forms = torch.full((count,), candidate, device=device)
        for angle in (-0.1, -0.05, 0.0, 0.05, 0.1):
            pose = Pose(x=x, y=y, radius=torch.sqrt(safe / math.pi), angle=torch.full((count,), angle, device=device))
            ideal = (coverage(forms, pose) > 0.5).float()
            overlap = (ideal * mask).sum(dim=(1, 2)) / torch.maximum(ideal, mask).sum(dim=(1, 2)).clamp_min(1.0)
            form = torch.where(overlap > best, forms, form)
            best = torch.maximum(overlap, best)

    clean = (back_gap < 0.15) & (front_gap < 0.2) & (stray.float().mean(dim=(1, 2)) < 0.03)
    clean &= (area > 200) & (area < 1400) & (best > 0.85) & (edge < 3.0)
    found = torch.where(clean, join(colour, form, background), -1)
    return Reading(combination=found, overlap=best, edge=edge)


def prompt_rows() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """The bundled prompt sets as (train, eval) rows: `{"prompt": ..., "metadata": {...}}`.

    Evaluation: every combination in a phrasing no training prompt uses, and the held-out combinations in three more.
    """

    def row(prompt: str, name: str) -> dict[str, object]:
        return {"prompt": prompt, "metadata": {"task": "t2i", "sample_id": name}}

    seen = [p for p in range(len(PHRASINGS)) if p not in HELD_OUT_PHRASINGS]
    train = [caption(k, p) for p in seen for k in range(COMBINATIONS) if k not in HELD_OUT_COMBINATIONS]
    evaluation = [caption(k, HELD_OUT_PHRASINGS[k % 2]) for k in range(COMBINATIONS)]
    evaluation += [caption(k, p) for k in HELD_OUT_COMBINATIONS for p in seen[:3]]
    if set(train) & set(evaluation):
        raise ValueError("a training prompt is also an evaluation prompt")
    return (
        [row(text, f"shapes_train_{i:03d}") for i, text in enumerate(train)],
        [row(text, f"shapes_eval_{i:03d}") for i, text in enumerate(evaluation)],
    )
