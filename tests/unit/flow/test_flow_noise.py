"""Noise is a function of the seed alone."""

from __future__ import annotations

import torch

from relax_sdk.flow import seeded_noise


def test_a_row_depends_on_its_seed_alone() -> None:
    shape = (4, 6)
    alone = seeded_noise([77], shape)
    for seeds in ([77, 1, 2], [9, 77], [3, 4, 5, 77, 6]):
        assert torch.equal(seeded_noise(seeds, shape)[seeds.index(77)], alone[0])
    assert not torch.equal(seeded_noise([78], shape), alone)
    assert alone.shape == (1, 4, 6)
    assert alone.dtype == torch.float32


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    first = seeded_noise([5, 6], (8,))
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    assert torch.equal(seeded_noise([5, 6], (8,)), first)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_torchs_defaults_do_not_change_it() -> None:
    """Serving code sets a default dtype while it loads models, and launchers a default device."""
    want = seeded_noise([5], (8,))
    default = torch.get_default_dtype()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            got = seeded_noise([5], (8,))
        finally:
            torch.set_default_dtype(default)
        assert got.dtype == torch.float32
        assert torch.equal(got, want)
    torch.set_default_device("meta")
    try:
        moved = seeded_noise([5], (8,), device="meta")
    finally:
        torch.set_default_device(None)
    assert moved.device.type == "meta"


def test_it_is_standard_normal_and_rows_are_independent() -> None:
    noise = seeded_noise(range(40), (2500,))
    assert abs(noise.mean().item()) < 0.015
    assert abs(noise.std().item() - 1) < 0.01
    correlation = torch.corrcoef(noise) - torch.eye(40)
    assert correlation.abs().max().item() < 0.1


def test_the_largest_seed_is_accepted() -> None:
    assert seeded_noise([2**63 - 1, 0], (3,)).isfinite().all()
