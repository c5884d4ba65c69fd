"""Statistics of rewards in plain Python: per rollout over groups, and before against after on held-out prompts."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from relax_sdk.errors import RecordError

__all__ = ["DEGENERATE_STD", "PairedDifference", "group_statistics", "paired_difference"]

DEGENERATE_STD = 1e-6
"""Below this spread of the advantages a rollout has no signal."""


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """Mean of ``after - before`` over pairs, its standard error, their quotient ``t``, and the number of pairs."""

    mean: float
    standard_error: float
    t: float
    n: int


def paired_difference(before: Sequence[float], after: Sequence[float]) -> PairedDifference:
    """Compare two scores of the same items: same prompts, same seeds, two policies.

    With d_i = after_i - before_i: mean(d), standard error s(d) / sqrt(n) with s the sample standard deviation
    (divisor n - 1), and Student's t = mean / standard error, n - 1 degrees of freedom. When all differences are
    equal, t is 0 for no difference and otherwise infinite with its sign.

    Raises:
        RecordError: fewer than two pairs, unequal lengths, or a value that is not finite.
    """
    if len(before) != len(after) or len(before) < 2:
        raise RecordError(
            f"cannot pair {len(before)} values before with {len(after)} after", expected="two or more pairs"
        )
    if not all(math.isfinite(value) for value in (*before, *after)):
        raise RecordError("cannot compare: a value is not finite", where="paired_difference")
    differences = [late - early for early, late in zip(before, after, strict=True)]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    if error > 0:
        t = mean / error
    elif mean:
        t = math.copysign(math.inf, mean)
    else:
        t = 0.0
    return PairedDifference(mean=mean, standard_error=error, t=t, n=len(differences))


def group_statistics(
    scores: Mapping[str, Sequence[Sequence[float]]],
    *,
    weights: Mapping[str, float],
    advantages: Sequence[Sequence[float]],
) -> dict[str, float]:
    """The ``reward/*`` metrics of a rollout.

    Standard deviations have the divisor n - 1, as in `relax_sdk.objectives`; that of a single value is 0.

    Args:
        scores: component -> raw scores [P, K]: P prompt groups of K candidates.
        weights: component -> weight; components without one do not count in ``group_std_mean``.
        advantages: the combined advantages [P, K].

    Raises:
        RecordError: a component or the advantages have another shape than the first component.
    """
    shape: list[int] | None = None
    for name, table in {**scores, "advantages": advantages}.items():
        here = [len(group) for group in table]
        shape = here if shape is None else shape
        if here != shape or not here or 0 in here:
            raise RecordError(f"{name}: group sizes are {here}", where="group_statistics", expected=str(shape))
    metrics: dict[str, float] = {}
    for name, table in scores.items():
        values = _flat(table)
        metrics[f"reward/{name}_mean"] = statistics.fmean(values)
        metrics[f"reward/{name}_std"] = _std(values)
        metrics[f"reward/{name}_min"] = min(values)
        metrics[f"reward/{name}_max"] = max(values)
    groups = [
        [sum(weights.get(name, 0.0) * table[p][k] for name, table in scores.items()) for k in range(size)]
        for p, size in enumerate(shape or [])
    ]
    flat = _flat(advantages)
    spread = _std(flat)
    return metrics | {
        "reward/advantage_mean": statistics.fmean(flat),
        "reward/advantage_std": spread,
        "reward/group_std_mean": statistics.fmean([_std(group) for group in groups]),
        "reward/num_groups": len(groups),
        "reward/zero_spread_groups": sum(min(group) == max(group) for group in groups),
        "reward/degenerate": int(spread < DEGENERATE_STD),
    }


def _flat(table: Sequence[Sequence[float]]) -> list[float]:
    return [value for group in table for value in group]


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
