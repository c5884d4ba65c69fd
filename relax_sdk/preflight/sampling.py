"""Rules about the sampler: guidance, sizes, and which steps may be trained."""

from __future__ import annotations

from collections.abc import Iterator

from relax_sdk.config import is_chosen
from relax_sdk.preflight.situation import Rule, Situation, call_adapter
from relax_sdk.protocols import SamplingConfig

__all__ = ["RULES", "WARNINGS"]


def guidance_is_off(situation: Situation) -> Iterator[str]:
    """Replay is one conditional forward."""
    if situation.sampling.guidance_scale != 1.0:
        yield (
            f"{situation.given_sampling('guidance_scale')}: expected 1.0; replay runs one conditional forward, and "
            "guided samples would train a policy that never sampled"
        )


def steps_are_trained(situation: Situation) -> Iterator[str]:
    """At least one step must be an SDE step."""
    sampling = situation.sampling
    if sampling.sde_resample_per_rollout and sampling.num_sde_steps == 0:
        yield (
            f"{situation.given_sampling('sde_resample_per_rollout')}: give num_sde_steps above 0 too, the number of "
            "steps that each rollout draws"
        )
    elif not sampling.trainable_steps():
        last = sampling.num_inference_steps - 2
        yield (
            "no SDE step is configured, so no step can be trained: give --sampling-config sde_indices, or "
            f"num_sde_steps with sde_timestep_fraction, e.g. '{{\"sde_indices\": {_example(last)}}}'"
        )


def first_step_is_singular(situation: Situation) -> Iterator[str]:
    """Under ``sde`` the diffusion coefficient eta * sqrt(sigma / (1 - sigma)) has no value at sigma = 1."""
    sampling = situation.sampling
    if sampling.sde_type == "sde" and 0 in sampling.trainable_steps():
        yield (
            f"{_origin(situation, 0)}: step 0 could be trained, whose noise is singular under sde_type 'sde' "
            f"(sigma = 1); {_cure(sampling, 0)}, or use sde_type 'dance'"
        )


def last_step_is_not_trained(situation: Situation) -> Iterator[str]:
    """At the last step sigma' is 0 and tau tiny: the log-probability is dominated by rounding."""
    sampling = situation.sampling
    last = sampling.num_inference_steps - 1
    if last in sampling.trainable_steps():
        yield (
            f"{_origin(situation, last)}: the last step, {last} of 0..{last}, could be trained, where sigma ends at 0 "
            f"and the log-probability is rounding noise; {_cure(sampling, last)}"
        )


def _origin(situation: Situation, step: int) -> str:
    """Which key makes a step trainable, and where that key was given."""
    sampling = situation.sampling
    if step in (sampling.sde_indices or ()):
        return situation.given_sampling("sde_indices")
    if sampling.sde_pool is not None and sampling.sde_resample_per_rollout:
        return situation.given_sampling("sde_pool")
    return situation.given_sampling("sde_timestep_fraction")


def _cure(sampling: SamplingConfig, step: int) -> str:
    steps = sampling.num_inference_steps
    if steps < 3:
        return "use 3 or more num_inference_steps"
    if sampling.sde_pool is not None or sampling.sde_indices is not None:
        return f"leave {step} out of sde_indices and sde_pool"
    return f"leave {step} out, e.g. sde_timestep_fraction [{1.25 / steps:.3f}, {1 - 1.25 / steps:.3f}]"


def _example(last: int) -> list[int]:
    return [step for step in (1, 3, 5) if step <= last] or [1]


def family_can_sample(situation: Situation) -> Iterator[str]:
    """The model family's own rules, e.g. sizes on its grid."""
    if situation.adapter is not None:
        # Guidance has a rule of its own above; the family need not repeat it.
        unguided = situation.sampling.model_copy(update={"guidance_scale": 1.0})
        for text in call_adapter(situation, "validate_sampling", unguided):
            yield f"--sampling-config: {text}"


def engine_has_a_schedule(situation: Situation) -> Iterator[str]:
    """Some engines compute no schedule of their own."""
    if situation.engine.driver_sigmas_only and not situation.sampling.driver_sigmas:
        yield (
            f"{situation.given_sampling('driver_sigmas')}: expected true; the engine {situation.engine.name!r} has no "
            "other schedule"
        )


def start_noise_is_the_drivers(situation: Situation) -> Iterator[str]:
    """Every request carries the recipe of x_T, and no engine is asked to ignore it."""
    if not situation.sampling.driver_xt:
        yield f"{situation.given_sampling('driver_xt')}: expected true; every engine starts from the driver's noise"


def steps_fit_the_window(situation: Situation) -> Iterator[str]:
    """More steps than there are would be cut down in silence. A per-rollout draw is checked by the record itself."""
    sampling = situation.sampling
    window = sampling.fraction_window()
    strided = sampling.sde_indices is None and not sampling.sde_resample_per_rollout
    if strided and sampling.num_sde_steps > len(window):
        yield (
            f"{situation.given_sampling('num_sde_steps')}: sde_timestep_fraction "
            f"{list(sampling.sde_timestep_fraction)} leaves only {len(window)} of the {sampling.num_inference_steps} "
            "steps"
        )


def noise_level_fits_the_transition(situation: Situation) -> Iterator[str]:
    """``cps`` turns by the angle eta * pi / 2: beyond a right angle the predicted noise would change its sign."""
    if situation.sampling.sde_type == "cps" and situation.sampling.eta > 1:
        yield f"{situation.given_sampling('eta')}: expected at most 1 with sde_type 'cps'"


def indices_are_not_used(situation: Situation) -> Iterator[str]:
    """A per-rollout draw wins over explicit steps; a preset may hold both."""
    sampling = situation.sampling
    chosen = is_chosen(situation.config.provenance, "sampling.sampling_config.sde_indices")
    if chosen and sampling.sde_indices is not None and sampling.sde_resample_per_rollout:
        yield (
            f"{situation.given_sampling('sde_indices')}: it has no effect while sde_resample_per_rollout is true; "
            "set that to false"
        )


def pool_is_not_used(situation: Situation) -> Iterator[str]:
    """Only a per-rollout draw looks at the pool."""
    if situation.sampling.sde_pool is not None and not situation.sampling.sde_resample_per_rollout:
        yield f"{situation.given_sampling('sde_pool')}: it has no effect without sde_resample_per_rollout"


def clamp_is_the_engines(situation: Situation) -> Iterator[str]:
    """At sigma = 1 sampler and replay use the schedule's second sigma; another clamp would have no effect."""
    if situation.sampling.sigma_max != SamplingConfig.model_fields["sigma_max"].default:
        yield (
            f"{situation.given_sampling('sigma_max')}: leave it out; at sigma = 1 engines clamp to the second sigma of "
            "the schedule, and replay follows them"
        )


RULES: tuple[Rule, ...] = (
    engine_has_a_schedule,
    start_noise_is_the_drivers,
    clamp_is_the_engines,
    guidance_is_off,
    steps_are_trained,
    steps_fit_the_window,
    noise_level_fits_the_transition,
    first_step_is_singular,
    last_step_is_not_trained,
    family_can_sample,
)
WARNINGS: tuple[Rule, ...] = (indices_are_not_used, pool_is_not_used)
