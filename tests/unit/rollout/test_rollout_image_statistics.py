"""Image statistics of pictures whose values are known."""

from __future__ import annotations

import pytest
import torch

from relax_sdk.rollout import image_statistics


def flat(red: int, green: int, blue: int, count: int = 2) -> torch.Tensor:
    return torch.tensor([red, green, blue], dtype=torch.uint8).reshape(1, 3, 1, 1).expand(count, 3, 8, 6)


def checkerboard(cell: int = 1, side: int = 32) -> torch.Tensor:
    line = torch.arange(side) // cell
    board = ((line[:, None] + line[None]) % 2).to(torch.uint8) * 255
    return board.expand(1, 3, side, side)


@pytest.mark.parametrize(
    ("image", "brightness", "saturation"),
    [
        (flat(0, 0, 0), 0.0, 0.0),
        (flat(255, 255, 255), 1.0, 0.0),
        (flat(255, 0, 0), 0.299, 1.0),
        (flat(0, 255, 0), 0.587, 1.0),
        (flat(0, 0, 255), 0.114, 1.0),
        (flat(51, 102, 153), 0.2 * 0.299 + 0.4 * 0.587 + 0.6 * 0.114, 0.4),
    ],
)
def test_flat_images(image: torch.Tensor, brightness: float, saturation: float) -> None:
    got = image_statistics(image)
    assert got == {
        "brightness": pytest.approx(brightness, abs=1e-6),
        "contrast": pytest.approx(0.0, abs=1e-6),
        "saturation": pytest.approx(saturation, abs=1e-6),
        "sharpness": pytest.approx(0.0, abs=1e-6),
    }


def test_checkerboard() -> None:
    got = image_statistics(checkerboard())
    assert got["brightness"] == pytest.approx(0.5, abs=1e-6)
    assert got["contrast"] == pytest.approx(0.5, abs=1e-3)
    assert got["saturation"] == pytest.approx(0.0, abs=1e-6)
    assert got["sharpness"] == pytest.approx(1.0, abs=1e-6)
    # Cells of four pixels: one of four neighbours differs, but for the border (7 of 31).
    assert image_statistics(checkerboard(cell=4))["sharpness"] == pytest.approx(7 / 31, abs=1e-6)


def test_sharpness_counts_both_directions() -> None:
    stripes = (torch.arange(8) % 2 * 255).to(torch.uint8)
    vertical = stripes.expand(1, 3, 8, 8)
    assert image_statistics(vertical)["sharpness"] == pytest.approx(0.5, abs=1e-6)
    assert image_statistics(vertical.transpose(2, 3))["sharpness"] == pytest.approx(0.5, abs=1e-6)


def test_contrast_is_within_an_image_and_statistics_are_means_over_images() -> None:
    black_and_white = torch.cat([flat(0, 0, 0, 1), flat(255, 255, 255, 1)])
    got = image_statistics(black_and_white)
    assert got["brightness"] == pytest.approx(0.5)
    assert got["contrast"] == pytest.approx(0.0, abs=1e-6)
