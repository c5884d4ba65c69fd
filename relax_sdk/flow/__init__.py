"""Flow-matching mathematics: schedule, transition, log-probability, noise. Pure torch, no state, no model."""

from relax_sdk.flow.noise import seeded_noise
from relax_sdk.flow.schedule import dynamic_shift_mu, flow_match_sigmas, schedule_difference
from relax_sdk.flow.transition import (
    ode_step,
    replay_log_prob,
    sde_step,
    transition_log_prob,
    transition_moments,
)

__all__ = [
    "dynamic_shift_mu",
    "flow_match_sigmas",
    "ode_step",
    "replay_log_prob",
    "schedule_difference",
    "sde_step",
    "seeded_noise",
    "transition_log_prob",
    "transition_moments",
]
