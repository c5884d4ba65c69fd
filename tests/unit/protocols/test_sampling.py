"""Which steps a round trains: the precedence of the keys, and numbers worked out by hand."""

from __future__ import annotations

import numpy
import pytest

from relax_sdk.errors import RecordError
from relax_sdk.protocols import SamplingConfig


def test_a_window_of_the_first_half_trains_steps_0_2_4():
    config = SamplingConfig(num_inference_steps=12, num_sde_steps=3, sde_timestep_fraction=(0.0, 0.5))
    assert config.fraction_window() == (0, 1, 2, 3, 4, 5)
    assert config.resolve_sde_indices(7) == (0, 2, 4)


@pytest.mark.parametrize(
    ("steps", "fraction", "window"),
    [
        (12, (0.0, 1.0), tuple(range(12))),
        (10, (0.1, 0.4), (1, 2, 3)),
        (10, (0.3, 0.7), (3, 4, 5, 6)),
        (10, (0.05, 0.11), (0, 1)),
        (3, (0.34, 0.65), (1,)),
    ],
)
def test_windows(steps, fraction, window):
    assert SamplingConfig(num_inference_steps=steps, sde_timestep_fraction=fraction).fraction_window() == window


def test_precedence():
    drawn = {
        "sde_resample_per_rollout": True,
        "num_sde_steps": 3,
        "sde_pool": (1, 2, 3, 4, 5),
        "sde_indices": (3, 4, 5),
    }
    config = SamplingConfig(**drawn)
    for rollout in range(5):
        draw = numpy.random.default_rng(rollout).choice(numpy.array([1, 2, 3, 4, 5]), size=3, replace=False)
        assert config.resolve_sde_indices(rollout) == tuple(sorted(draw))
    assert config.resolve_sde_indices(None) == (3, 4, 5), "held-out evaluation never draws"
    assert len({config.resolve_sde_indices(rollout) for rollout in range(30)}) > 3
    assert SamplingConfig(sde_indices=(5, 1, 5), num_sde_steps=9).resolve_sde_indices(0) == (1, 5)
    assert SamplingConfig().resolve_sde_indices(0) == ()
    assert SamplingConfig(num_sde_steps=99).resolve_sde_indices(0) == tuple(range(12))


def test_trainable_steps_cover_every_rollout():
    for config in (
        SamplingConfig(sde_resample_per_rollout=True, num_sde_steps=2, sde_pool=(1, 4, 7), sde_indices=(2,)),
        SamplingConfig(sde_resample_per_rollout=True, num_sde_steps=2, sde_timestep_fraction=(0.1, 0.6)),
        SamplingConfig(num_sde_steps=4),
        SamplingConfig(sde_indices=(1, 3)),
        SamplingConfig(sde_resample_per_rollout=True, sde_pool=(1, 2)),
    ):
        used = {step for rollout in (None, *range(200)) for step in config.resolve_sde_indices(rollout)}
        assert set(config.trainable_steps()) == used


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sde_indices": (12,)}, r"\[12\] lie outside 0\.\.11"),
        ({"sde_pool": (-1, 2)}, r"\[-1\] lie outside"),
        ({"sde_resample_per_rollout": True, "sde_pool": (1,), "num_sde_steps": 2}, "the pool has only 1"),
        ({"sde_timestep_fraction": (0.6, 0.5)}, "0 <= lo < hi <= 1"),
        ({"sde_type": "ode"}, "sde_type"),
        ({"eta": 0.0}, "eta"),
        ({"num_inference_steps": 1}, "num_inference_steps"),
        ({"steps": 3}, "unknown field"),
    ],
)
def test_what_does_not_fit(changes, expected):
    with pytest.raises(RecordError, match=expected):
        SamplingConfig(**changes)
