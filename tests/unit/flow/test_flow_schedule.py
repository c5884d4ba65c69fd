"""The driver's schedule against diffusers' scheduler, called as the Qwen-Image pipeline calls it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from tiny_family import SCHEDULER

from relax_sdk.errors import ConfigError
from relax_sdk.flow import dynamic_shift_mu, flow_match_sigmas, schedule_difference


def diffusers_sigmas(steps: int, tokens: int, config: dict[str, object]) -> list[float]:
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    # mu from two points by numpy; the pipeline computes it outside the scheduler.
    slope, offset = np.polyfit([256.0, 8192.0], [0.5, 0.9], 1)
    mu = float(slope * tokens + offset)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler.sigmas.tolist()


@pytest.mark.parametrize("tokens", [16, 256, 576, 4096, 8192, 10000])
@pytest.mark.parametrize("steps", [2, 3, 12, 50])
def test_dynamic_schedule_equals_diffusers(steps: int, tokens: int) -> None:
    mine = flow_match_sigmas(steps, tokens, SCHEDULER)
    assert len(mine) == steps + 1
    # One unit in the last place of a float32 near 1 is 6e-8; diffusers rounds at each of its steps.
    np.testing.assert_allclose(mine, diffusers_sigmas(steps, tokens, SCHEDULER), rtol=0, atol=4e-7)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("terminal", [None, 0.02])
def test_constant_shift_equals_diffusers(shift: float, terminal: float | None) -> None:
    config = {**SCHEDULER, "use_dynamic_shifting": False, "shift": shift, "shift_terminal": terminal}
    np.testing.assert_allclose(flow_match_sigmas(10, 576, config), diffusers_sigmas(10, 576, config), rtol=0, atol=4e-7)


@pytest.mark.parametrize("steps", [2, 12, 30])
def test_shape_of_the_schedule(steps: int) -> None:
    sigmas = flow_match_sigmas(steps, 576, SCHEDULER)
    assert sigmas[0] == 1.0
    assert sigmas[-1] == 0.0
    assert sigmas.count(0.0) == 1
    assert all(here > after for here, after in itertools.pairwise(sigmas))
    assert sigmas[-2] == pytest.approx(0.02, abs=1e-7)
    assert all(float(np.float32(sigma)) == sigma for sigma in sigmas)


def test_mu_is_the_line_through_the_two_anchors() -> None:
    assert dynamic_shift_mu(256, SCHEDULER) == pytest.approx(0.5, abs=1e-12)
    assert dynamic_shift_mu(8192, SCHEDULER) == pytest.approx(0.9, abs=1e-12)
    assert dynamic_shift_mu(4224, SCHEDULER) == pytest.approx(0.7, abs=1e-12)
    # Short and long sequences extrapolate: 0.4 / 7936 per token.
    assert dynamic_shift_mu(16, SCHEDULER) == pytest.approx(0.5 - 240 * 0.4 / 7936, abs=1e-12)


def test_unstretched_exponential_shift_in_closed_form() -> None:
    config = {**SCHEDULER, "shift_terminal": None}
    mu = 0.5 + (576 - 256) * 0.4 / 7936
    want = [math.exp(mu) / (math.exp(mu) + (1 / s - 1)) for s in np.linspace(1, 1 / 8, 8)] + [0.0]
    np.testing.assert_allclose(flow_match_sigmas(8, 576, config), want, rtol=0, atol=6e-8)


@pytest.mark.parametrize("key", ["base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"])
def test_missing_key_is_named(key: str) -> None:
    config = {name: value for name, value in SCHEDULER.items() if name != key}
    with pytest.raises(ConfigError, match=key):
        flow_match_sigmas(12, 576, config)


def test_missing_constant_shift_is_named() -> None:
    with pytest.raises(ConfigError, match="'shift'"):
        flow_match_sigmas(12, 576, {"use_dynamic_shifting": False})


@pytest.mark.parametrize("bad", ["1.0", None, True])
def test_a_value_that_is_no_number_is_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match="base_shift"):
        flow_match_sigmas(12, 576, {**SCHEDULER, "base_shift": bad})


def test_other_spacings_are_refused() -> None:
    with pytest.raises(ConfigError, match="linear"):
        flow_match_sigmas(12, 576, {**SCHEDULER, "time_shift_type": "linear"})
    with pytest.raises(ConfigError, match="use_karras_sigmas"):
        flow_match_sigmas(12, 576, {**SCHEDULER, "use_karras_sigmas": True})


def test_schedule_difference() -> None:
    mine = flow_match_sigmas(6, 576, SCHEDULER)
    assert schedule_difference(mine, mine) is None
    assert schedule_difference(mine, tuple(diffusers_sigmas(6, 576, SCHEDULER))) is None

    doubled = schedule_difference(mine, (*mine, 0.0))
    assert doubled is not None
    assert "twice" in doubled

    short = schedule_difference(mine, mine[:-1])
    assert short is not None
    assert "7" in short
    assert "6" in short

    shifted = schedule_difference(mine, (*mine[1:], 0.0))
    assert shifted is not None
    assert "step 0" in shifted
    assert "off by one" in shifted

    one_wrong = list(mine)
    one_wrong[3] += 1e-3
    wrong = schedule_difference(mine, tuple(one_wrong))
    assert wrong is not None
    assert "step 3" in wrong
    assert "off by one" not in wrong

    not_a_number = list(mine)
    not_a_number[2] = math.nan
    assert "step 2" in (schedule_difference(mine, tuple(not_a_number)) or "")


def test_a_double_time_shift_is_refused() -> None:
    """Shifting what is already shifted, as an engine does that shifts the driver's sigmas again."""
    mine = flow_match_sigmas(12, 576, SCHEDULER)
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    scheduler.set_timesteps(sigmas=list(mine[:-1]), mu=dynamic_shift_mu(576, SCHEDULER))
    assert "step 1" in (schedule_difference(mine, tuple(scheduler.sigmas.tolist())) or "")
