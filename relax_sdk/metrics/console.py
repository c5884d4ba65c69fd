"""The line a researcher watches: one per rollout, and one per evaluation set."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

__all__ = ["ConsoleSink", "format_evaluation", "format_rollout"]

_NOT_COMPONENTS = {"advantage", "group_std"}
_REWARD_MEAN = re.compile(r"^reward/(?P<component>.+)_mean$")
_EVAL_MEAN = re.compile(r"^eval/(?P<set>[^/]+)/(?P<component>.+?)(?<!_delta)_mean$")


class ConsoleSink:
    """Turns records into lines.

    A record with reward metrics gives a rollout line, and each evaluation set in a record gives a line of its own.

    Args:
        write: receives each finished line, e.g. a console's print.
        num_rollout: rollouts of the whole run.
    """

    def __init__(self, write: Callable[[str], object], *, num_rollout: int) -> None:
        self._write = write
        self._num_rollout = num_rollout
        self._step_times: list[float] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print what the record holds."""
        if _reward_components(metrics):
            self._write(format_rollout(step, metrics, num_rollout=self._num_rollout, eta=self._eta(step, metrics)))
        for line in format_evaluation(step, metrics):
            self._write(line)

    def close(self) -> None:
        """Nothing to close."""

    def _eta(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """Seconds left, from the mean step time; the first step, which warms up, counts only while it is alone."""
        if "perf/step_time" not in metrics:
            return None
        self._step_times.append(metrics["perf/step_time"])
        steady = self._step_times[1:] or self._step_times
        return (self._num_rollout - step) * sum(steady) / len(steady)


def format_rollout(step: int, metrics: Mapping[str, float], *, num_rollout: int, eta: float | None = None) -> str:
    """One line: rollout, reward mean and spread in the groups, clip, gradient, ratio, weights, time.

    Args:
        step: rollouts trained on so far, this one included.
        metrics: the record; what it lacks is left out of the line.
        num_rollout: rollouts of the whole run.
        eta: seconds left.
    """
    width = len(str(num_rollout))
    parts = [f"rollout {step:>{width}}/{num_rollout}"]
    components = _reward_components(metrics)
    rewards = " ".join(f"{name} {metrics[f'reward/{name}_mean']:.4f}" for name in components)
    if "reward/group_std_mean" in metrics:
        rewards += f" ± {metrics['reward/group_std_mean']:.4f}"
    parts.append(rewards)
    for name, label, form in (
        ("train/clip_fraction", "clip", ".1%"),
        ("train/grad_norm", "grad", ".2e"),
        ("train/ratio_max_deviation", "max|rho-1|", ".1e"),
        ("train/policy_version", "policy v", ".0f"),
        ("perf/step_time", "", ".1f"),
    ):
        if name in metrics:
            unit = " s" if name == "perf/step_time" else ""
            gap = " " if label and not label.endswith("v") else ""
            parts.append(f"{label}{gap}{metrics[name]:{form}}{unit}")
    if metrics.get("reward/degenerate"):
        parts.append("no reward spread")
    if eta is not None and math.isfinite(eta):
        parts.append(f"eta {_duration(eta)}")
    return "  ".join(part for part in parts if part)


def format_evaluation(step: int, metrics: Mapping[str, float]) -> list[str]:
    """One line per evaluation set and component: the mean, and the paired change when it is known."""
    lines = []
    for name in metrics:
        match = _EVAL_MEAN.match(name)
        if match is None:
            continue
        stem = name.removesuffix("_mean")
        line = f"eval {match['set']} after {step} rollouts  {match['component']} {metrics[name]:.4f}"
        if f"{stem}_delta_mean" in metrics:
            change, error = metrics[f"{stem}_delta_mean"], metrics[f"{stem}_delta_se"]
            line += f"  change {change:+.4f} ± {error:.4f} (t {metrics[f'{stem}_delta_t']:.1f})"
        lines.append(line)
    return lines


def _reward_components(metrics: Mapping[str, float]) -> list[str]:
    matches = (_REWARD_MEAN.match(name) for name in metrics)
    return [match["component"] for match in matches if match and match["component"] not in _NOT_COMPONENTS]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
