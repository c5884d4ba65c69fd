"""The sampler's hooks: every number from the recipe, against `seeded_noise` and a float64 statement of the step."""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fake_sglang import Controller
from tiny_family import reference_log_prob, reference_moments
from torch import Tensor

from relax_sdk.flow import sde_step, seeded_noise
from relax_sdk.rollout.sglang.server_side.recipe import (
    Recipe,
    draw_start_noise,
    draw_step_noise,
    recipe_of,
    take_step,
    use_driver_sigmas,
)
from relax_sdk.rollout.sglang.session import RECIPE_KEY

SIGMAS = (1.0, 0.9, 0.6, 0.25, 0.0)
SEEDS = (11, 2**62 + 5, 13)
STEP_SEEDS = {1: (101, 102, 103), 2: (201, 202, 203)}
TOKENS, CHANNELS = 6, 4


def values(**changes: Any) -> dict[str, Any]:
    """A recipe as it comes out of JSON: lists, and steps as texts."""
    made: dict[str, Any] = {
        "initial_noise_seeds": list(SEEDS),
        "denoise_seeds": {str(step): list(seeds) for step, seeds in STEP_SEEDS.items()},
        "latent_shape": [CHANNELS, 2, 3],
        "sde_type": "sde",
        "eta": 0.7,
        "sigmas": list(SIGMAS),
        "policy_version": 4,
    }
    return {**made, **changes}


def batch_of(recipe: dict[str, Any] | None, **changes: Any) -> Any:
    made = {
        "extra": {} if recipe is None else {"diffusers_kwargs": {RECIPE_KEY: recipe}},
        "latents": None,
        "batch_size": len(SEEDS),
        "scheduler": None,
        "timesteps": None,
    }
    return types.SimpleNamespace(**{**made, **changes})


# --- parsing ----------------------------------------------------------------------------------------------------------


def test_a_recipe_is_read_from_a_request_once() -> None:
    batch = batch_of(values())
    recipe = recipe_of(batch)
    assert recipe == Recipe(SEEDS, STEP_SEEDS, (CHANNELS, 2, 3), "sde", 0.7, SIGMAS, 4)
    batch.extra["diffusers_kwargs"] = None
    assert recipe_of(batch) is recipe


@pytest.mark.parametrize("extra", [{}, {"diffusers_kwargs": None}, {"diffusers_kwargs": {"other": 1}}])
def test_a_request_of_somebody_else_is_refused_by_every_hook(extra: dict[str, Any]) -> None:
    batch = batch_of(None, extra=extra)
    for attempt in (
        lambda: recipe_of(batch),
        lambda: prepared(batch, shape=(1,)),
        lambda: use_driver_sigmas(lambda _stage, batch, _args: batch, None, batch, None),
        lambda: draw_step_noise(refuse, controller_for(1), batch, torch.zeros(1)),
        lambda: step(controller_for(3), None, 1, torch.zeros(3, TOKENS, CHANNELS), torch.ones(3, TOKENS, CHANNELS)),
    ):
        with pytest.raises(ValueError, match="a request without a recipe"):
            attempt()


@pytest.mark.parametrize("name", sorted(values()))
def test_a_missing_value_is_refused(name: str) -> None:
    rest = {key: value for key, value in values().items() if key != name}
    with pytest.raises(ValueError, match=f"expected .*'{name}'"):
        Recipe.parse(rest)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"colour": 0.7}, "recipe has .*'colour'"),
        ({"denoise_seeds": {"1": [101, 102, 103], "2": [201]}}, r"3 start seeds, and another number .* steps \[2\]"),
        ({"initial_noise_seeds": [], "denoise_seeds": {}}, "0 start seeds"),
        ({"sde_type": "ddim"}, "'ddim'"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Recipe.parse(values(**changes))


# --- start noise ------------------------------------------------------------------------------------------------------


def prepared(batch: Any, *, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Any:
    """Run the hook around a stage that wants ``shape``; the batch as the stage saw it."""
    asked: list[Any] = []

    def spec(batch: Any, server_args: Any, count: int, frames: int, device: str) -> Any:
        asked.append((count, frames))
        return types.SimpleNamespace(shape=tuple(shape), dtype=dtype)

    stage = types.SimpleNamespace(get_forward_latent_num_frames=lambda *_: 1, get_latent_preparation_spec=spec)
    seen = draw_start_noise(lambda stage, batch, server_args: batch, stage, batch, "args")
    assert asked in ([], [(batch.batch_size, 1)])
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_start_noise_is_the_recipes_in_the_stages_shape_and_dtype(dtype: torch.dtype) -> None:
    latents = prepared(batch_of(values()), shape=(3, 1, CHANNELS, 2, 3), dtype=dtype).latents
    assert latents.dtype == dtype
    for row, seed in zip(latents, SEEDS, strict=True):
        alone = torch.randn(CHANNELS, 2, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
        assert torch.equal(row, alone[None])


@pytest.mark.parametrize(
    ("changes", "shape", "text"),
    [
        ({"latents": torch.zeros(1)}, (3, CHANNELS, 2, 3), "latents of its own"),
        ({"batch_size": 1}, (1, CHANNELS, 2, 3), "3 candidates in a batch of 1"),
        ({}, (3, CHANNELS, 2, 4), r"draws x_T as \[3, 4, 2, 3\], the pipeline wants \[3, 4, 2, 4\]"),
    ],
)
def test_start_noise_that_does_not_fit_is_refused(changes: dict[str, Any], shape: Sequence[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        prepared(batch_of(values(), **changes), shape=shape)


# --- sigmas -----------------------------------------------------------------------------------------------------------


def scheduled(batch: Any, count: int = len(SIGMAS)) -> Any:
    """The hook around a stage whose scheduler shifts: linear sigmas, squared."""

    def stage(stage: Any, batch: Any, server_args: Any) -> Any:
        sigmas = torch.linspace(1, 0, count) ** 2
        batch.scheduler = types.SimpleNamespace(
            sigmas=sigmas, timesteps=1000 * sigmas[:-1], config=types.SimpleNamespace(num_train_timesteps=1000)
        )
        batch.timesteps = batch.scheduler.timesteps
        return batch

    return use_driver_sigmas(stage, None, batch, None)


def test_the_drivers_sigmas_are_used_as_they_are() -> None:
    batch = scheduled(batch_of(values()))
    assert torch.equal(batch.scheduler.sigmas, torch.tensor(SIGMAS))
    expected = torch.tensor([1000.0, 900.0, 600.0, 250.0])
    torch.testing.assert_close(batch.timesteps, expected, rtol=2.0**-23, atol=0)
    assert batch.timesteps is batch.scheduler.timesteps
    assert batch.timesteps.dtype == torch.float32


def test_without_driver_sigmas_the_schedule_is_sglangs() -> None:
    batch = scheduled(batch_of(values(sigmas=None)))
    assert torch.equal(batch.scheduler.sigmas, torch.linspace(1, 0, 5) ** 2)


def test_a_schedule_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="recipe has 5 sigmas, the scheduler 6"):
        scheduled(batch_of(values()), count=6)


# --- step noise -------------------------------------------------------------------------------------------------------


def controller_for(rows: int, **changes: Any) -> Controller:
    made = Controller((rows, TOKENS, CHANNELS), sigmas=SIGMAS, steps=tuple(STEP_SEEDS))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("stock code ran")


def noise_of(rows: Sequence[int], step: int = 1, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Controller]:
    """Step noise of some candidates in one batch."""
    recipe = values(
        initial_noise_seeds=[SEEDS[row] for row in rows],
        denoise_seeds={str(at): [seeds[row] for row in rows] for at, seeds in STEP_SEEDS.items()},
    )
    controller = controller_for(len(rows), _relax_step=step)
    output = torch.zeros(len(rows), TOKENS, CHANNELS, dtype=dtype)
    return draw_step_noise(refuse, controller, batch_of(recipe), output), controller


def test_a_rows_step_noise_is_its_own_seeds_whatever_the_batch() -> None:
    together, controller = noise_of((0, 1, 2))
    for row in range(3):
        seed = STEP_SEEDS[1][row]
        alone = torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(together[row], alone)
        assert torch.equal(noise_of((row,))[0][0], alone)
    assert torch.equal(noise_of((2, 0))[0], together[[2, 0]])
    assert not torch.equal(noise_of((0,), step=2)[0], noise_of((0,), step=1)[0])
    # SGLang takes the log-probability from here.
    assert torch.equal(controller.noise_buffer, together)


def test_step_noise_has_the_model_outputs_dtype() -> None:
    noise, controller = noise_of((0,), dtype=torch.bfloat16)
    assert noise.dtype == controller.noise_buffer.dtype == torch.bfloat16


def test_a_rank_gets_its_part_of_the_noise_and_keeps_the_whole_for_the_log_probability() -> None:
    controller = controller_for(3, _relax_step=1, share=slice(3, 6))
    part = draw_step_noise(refuse, controller, batch_of(values()), torch.zeros(3, 3, CHANNELS))
    whole, _ = noise_of((0, 1, 2))
    assert torch.equal(part, whole[:, 3:6])
    assert torch.equal(controller.noise_buffer, whole)
    with pytest.raises(ValueError, match=r"part of the noise is \[3, 3, 4\], its latents are \[3, 2, 4\]"):
        draw_step_noise(refuse, controller, batch_of(values()), torch.zeros(3, 2, CHANNELS))


def test_a_step_without_seeds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step 3 draws noise.* \[1, 2\] only"):
        noise_of((0,), step=3)


# --- the transition ---------------------------------------------------------------------------------------------------


def hooked(controller: Controller) -> Controller:
    """Its noise method is the hook, as SGLang's registry would have it."""
    controller._rollout_variance_noise = lambda batch, output: draw_step_noise(  # type: ignore[attr-defined]
        refuse, controller, batch, output
    )
    return controller


def step(
    controller: Controller, recipe: dict[str, Any] | None, index: int, x: Tensor, v: Tensor, original: Any = refuse
) -> Tensor:
    return take_step(
        original,
        controller,
        batch=batch_of(recipe),
        model_output=v,
        sample=x,
        current_sigma=torch.tensor(SIGMAS[index]),
        next_sigma=torch.tensor(SIGMAS[index + 1]),
        step_index=index,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dance_is_the_step_of_the_trainer(dtype: torch.dtype) -> None:
    x, v = torch.randn(2, 3, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0)).to(dtype)
    controller = hooked(controller_for(3))
    drawn = step(controller, values(sde_type="dance"), 2, x, v)
    noise = seeded_noise(STEP_SEEDS[2], (TOKENS, CHANNELS))

    # an independent statement, in float64
    mean, tau = reference_moments(x, v, SIGMAS[2], SIGMAS[3], eta=0.7, sde_type="dance", clamp=SIGMAS[1])
    exact = mean + tau * noise.double()
    torch.testing.assert_close(drawn.double(), exact, atol=1e-6, rtol=1e-6)
    (total,), (count,) = controller.sums, controller.counts
    torch.testing.assert_close((total / count).double(), reference_log_prob(exact, mean, tau), atol=1e-6, rtol=1e-6)
    assert count.tolist() == [TOKENS * CHANNELS] * 3
    assert drawn.dtype == total.dtype == torch.float32

    # and the very numbers that the embedded engine records
    row = torch.tensor(SIGMAS[2]).expand(3), torch.tensor(SIGMAS[3]).expand(3)
    same, log_prob = sde_step(x, v, noise, *row, eta=0.7, sde_type="dance", sigma_clamp=SIGMAS[1])
    assert torch.equal(drawn, same)
    torch.testing.assert_close(total / count, log_prob, atol=2e-7, rtol=0)


def test_dance_on_a_part_of_the_tokens_sums_over_all_of_them() -> None:
    x, v = torch.randn(2, 3, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0))
    whole = hooked(controller_for(3))
    expected = step(whole, values(sde_type="dance"), 1, x, v)
    part = hooked(controller_for(3, share=slice(0, 2)))
    drawn = step(part, values(sde_type="dance"), 1, x[:, :2], v[:, :2])
    assert torch.equal(drawn, expected[:, :2])
    assert torch.equal(part.sums[0], whole.sums[0])
    assert torch.equal(part.counts[0], whole.counts[0])


def test_dance_at_step_0_is_regular() -> None:
    x, v = torch.randn(2, 1, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0))
    controller = hooked(controller_for(1, sde_step_indices=[0]))
    recipe = values(sde_type="dance", initial_noise_seeds=[1], denoise_seeds={"0": [7]})
    drawn = step(controller, recipe, 0, x, v)
    mean = x.double() * (1 + 0.49 * -0.1 / 2) + v.double() * -0.1
    noise = torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(7)).double()
    torch.testing.assert_close(drawn.double(), mean + 0.7 * math.sqrt(0.1) * noise, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "index"),
    [
        (values(sde_type="sde"), 1),
        (values(sde_type="cps"), 1),
        (values(sde_type="dance"), 3),  # an ODE step
    ],
)
def test_every_other_step_is_stock_and_remembers_where_it_is(recipe: dict[str, Any], index: int) -> None:
    marker, seen = torch.ones(1), {}

    def stock(controller: Any, **named: Any) -> Tensor:
        seen.update(named)
        return marker

    kind = "sde" if recipe["sde_type"] == "dance" else recipe["sde_type"]
    controller = controller_for(3, sde_type=kind)
    x, v = torch.zeros(3, TOKENS, CHANNELS), torch.ones(3, TOKENS, CHANNELS)
    assert step(controller, recipe, index, x, v, original=stock) is marker
    assert (seen["sample"] is x, seen["model_output"] is v, seen["step_index"]) == (True, True, index)
    assert controller._relax_step == index  # type: ignore[attr-defined]
    assert controller.sums == []


@pytest.mark.parametrize(
    "lost",
    [{"noise_level": 0.5}, {"sde_type": "cps"}, {"sde_step_indices": None}, {"sde_step_indices": [1]}],
    ids=["noise level", "transition", "no steps", "other steps"],
)
def test_an_argument_that_was_lost_on_the_way_is_refused(lost: dict[str, Any]) -> None:
    x = torch.zeros(3, TOKENS, CHANNELS)
    with pytest.raises(ValueError, match=r"the recipe says 'sde', 0\.7 and \[1, 2\]"):
        step(hooked(controller_for(3, **lost)), values(), 3, x, x)


@pytest.mark.parametrize("switch", ["debug_mode", "log_prob_no_const"])
def test_dance_refuses_what_it_does_not_record(switch: str) -> None:
    x = torch.zeros(3, TOKENS, CHANNELS)
    with pytest.raises(ValueError, match="dance records neither"):
        step(hooked(controller_for(3, **{switch: True})), values(sde_type="dance"), 1, x, x)
