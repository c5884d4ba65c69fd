"""The table of every metric: name, unit, meaning. A name that is not here is refused by the logger.

``<component>`` stands for a reward component and ``<set>`` for an evaluation set; both are letters, digits, ``_``,
``-`` and ``.``. The unit ``1`` means a plain number, ``reward`` the scale of the scorer.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable

from relax_sdk.errors import RecordError, nearest_name

__all__ = ["METRICS", "STEP_KEY", "Metric", "check_names", "find_metric"]

STEP_KEY = "rollout/step"
"""The axis that all series share: how many rollouts have been trained on when the value was taken."""

_PLACEHOLDER = re.compile(r"<[a-z]+>")
_WORD = r"[A-Za-z0-9_.-]+"


@dataclasses.dataclass(frozen=True)
class Metric:
    """One row of the table."""

    name: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether a full name is this metric, with its placeholders filled in."""
        return _pattern(self.name).fullmatch(name) is not None


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(_WORD.join(re.escape(part) for part in _PLACEHOLDER.split(name)))


METRICS: tuple[Metric, ...] = (
    Metric("train/loss", "1", "clipped objective, mean over the rollout's cells (sample x trained step)"),
    Metric("train/ratio_mean", "1", "rho = exp(logp_new - logp_anchor), mean over cells"),
    Metric("train/ratio_std", "1", "standard deviation of rho over cells"),
    Metric("train/ratio_min", "1", "smallest rho, over all ranks"),
    Metric("train/ratio_max", "1", "largest rho, over all ranks"),
    Metric("train/ratio_max_deviation", "1", "max |rho - 1| over all updates and ranks"),
    Metric(
        "train/first_update_ratio_max_deviation",
        "1",
        "max |rho - 1| in the first update: exactly 0 when the replay repeats itself",
    ),
    Metric("train/clip_fraction", "1", "share of cells where the clipped branch was the larger loss"),
    Metric("train/approx_kl", "1", "mean of (rho - 1) - log rho over cells"),
    Metric("train/grad_norm", "1", "gradient norm before clipping, mean over the rollout's updates"),
    Metric("train/lr", "1", "learning rate of the last optimizer step"),
    Metric("train/optimizer_steps", "count", "optimizer steps since the start of the run"),
    Metric("train/optimizer_skips", "count", "micro-batches of updates without any advantage, which took no step"),
    Metric("train/num_microbatches", "count", "forward passes with a gradient on one rank in this rollout"),
    Metric("train/policy_version", "count", "committed weight syncs since the start of the run"),
    Metric("train/weight_sync_tensors", "count", "tensors sent by the weight sync"),
    Metric("train/weight_sync_gb", "GB", "payload of the weight sync, in 10^9 bytes"),
    Metric("train/weight_sync_failures", "count", "weight syncs rolled back since the start of the run"),
    Metric(
        "train/logp_parity_mean", "1", "mean |replayed anchor - engine's log-prob| over cells; healthy: 2e-5 to 6e-5"
    ),
    Metric("train/logp_parity_max", "1", "max |replayed anchor - engine's log-prob| over cells"),
    Metric("rollout/engine_restarts", "count", "rollout engines started again since the start of the run"),
    Metric("reward/<component>_mean", "reward", "raw reward, mean over all candidates"),
    Metric("reward/<component>_std", "reward", "raw reward, standard deviation over all candidates"),
    Metric("reward/<component>_min", "reward", "raw reward, smallest"),
    Metric("reward/<component>_max", "reward", "raw reward, largest"),
    Metric("reward/advantage_mean", "1", "combined advantage, mean over all candidates"),
    Metric("reward/advantage_std", "1", "combined advantage, standard deviation over all candidates"),
    Metric("reward/group_std_mean", "reward", "standard deviation of the weighted reward in a group, mean over groups"),
    Metric("reward/num_groups", "count", "prompt groups in the rollout"),
    Metric("reward/zero_spread_groups", "count", "groups whose candidates all scored the same: they teach nothing"),
    Metric("reward/degenerate", "1", "1 when the advantages' standard deviation is below 1e-6, else 0"),
    Metric("reward/truncated_prompts", "count", "prompts that the scorer's text encoder had to cut"),
    Metric("reward/score_time", "s", "scoring, with the transfer of the images to the scorer"),
    Metric("reward/score_samples_per_s", "1/s", "candidates scored per second of score_time"),
    Metric("data/truncated_prompts", "count", "prompts that the model's text encoder had to cut"),
    Metric("image/brightness_mean", "1", "mean luma of the rollout's images, 0 to 1"),
    Metric("image/contrast_mean", "1", "standard deviation of luma within an image, mean over images"),
    Metric("image/saturation_mean", "1", "largest minus smallest channel of a pixel, mean over pixels"),
    Metric("image/sharpness_mean", "1", "luma difference of neighbouring pixels, mean: grids and noise raise it"),
    Metric("eval/<set>/<component>_mean", "reward", "held-out reward, deterministic sampler, mean over images"),
    Metric("eval/<set>/<component>_std", "reward", "held-out reward, standard deviation over images"),
    Metric("eval/<set>/<component>_delta_mean", "reward", "change of the held-out reward since the first evaluation"),
    Metric("eval/<set>/<component>_delta_se", "reward", "standard error of that change, paired prompt by prompt"),
    Metric("eval/<set>/<component>_delta_t", "1", "that change over its standard error"),
    Metric("perf/rollout_time", "s", "sampling and writing artifacts"),
    Metric("perf/reward_time", "s", "scoring: transfer to the scorer, scoring, and checking its answer"),
    Metric("perf/handover_time", "s", "engines release the devices, the actor wakes"),
    Metric("perf/train_time", "s", "handing rows over, replay and optimizer steps"),
    Metric("perf/sync_time", "s", "weight sync"),
    Metric("perf/eval_time", "s", "held-out evaluation"),
    Metric("perf/step_time", "s", "the whole training step, without evaluation"),
    Metric("perf/train_transitions_per_s", "1/s", "replayed transitions (one candidate, one trained step) per second"),
    Metric("perf/train_samples_per_s", "1/s", "trained candidates per second"),
    Metric(
        "perf/train_tflops",
        "10^12 FLOP/s",
        "model FLOPs of the replay (anchors, forward and backward) per second and device, without recomputation",
    ),
    Metric(
        "perf/train_recompute_tflops", "10^12 FLOP/s", "repeated by activation checkpointing, at most; not in the MFU"
    ),
    Metric("perf/mfu", "1", "perf/train_tflops over the device's measured matrix rate in the compute dtype; GPUs only"),
    Metric("perf/mem_allocated_gb", "GB", "allocated device memory, worst rank, in 10^9 bytes"),
    Metric("perf/mem_reserved_gb", "GB", "reserved device memory, worst rank, in 10^9 bytes"),
    Metric(
        "perf/mem_idle_gb",
        "GB",
        "used memory of the fullest device while engines and actor are both off it: contexts and caches, in 10^9 bytes",
    ),
    Metric("perf/mem_peak_gb", "GB", "peak allocated device memory, worst rank, in 10^9 bytes"),
)


def find_metric(name: str) -> Metric | None:
    """The row of a metric, or None. Where several fit, the one that spells out most of the name."""
    found = [metric for metric in METRICS if metric.matches(name)]
    return max(found, key=lambda metric: len(_PLACEHOLDER.sub("", metric.name)), default=None)


def check_names(names: Iterable[str]) -> None:
    """Refuse names that the table does not have.

    Raises:
        RecordError: naming the first one and the nearest valid name.
    """
    for name in names:
        if find_metric(name) is None:
            raise RecordError(
                f"unknown metric {name!r}",
                expected="a name from relax_sdk.metrics.METRICS",
                nearest=nearest_name(name, [metric.name for metric in METRICS]),
            )
