"""The picture of a run: training reward per rollout, and the held-out evaluations. matplotlib is loaded on use."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_sdk.errors import ArtifactError
from relax_sdk.files import write_bytes_atomically
from relax_sdk.metrics.jsonl import read_metrics
from relax_sdk.metrics.names import STEP_KEY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_curve"]

_INK = "#1f2933"
_QUIET = "#7b8794"
_GRID = "#e4e7eb"
_TRAIN = "#3d6fb4"
_EVAL = "#c8553d"
_EVAL_NAME = re.compile(r"^eval/(?P<set>[^/]+)/(?P<component>.+?)(?<!_delta)_mean$")


def plot_curve(metrics_path: Path, out: Path, *, component: str | None = None) -> None:
    """Draw a run's reward curve.

    The line is the mean raw reward of each rollout's candidates (sampled with noise), its band the mean spread within
    a prompt group. The points are held-out evaluations (deterministic sampler) with the standard error of the paired
    change since the first one, which has none.

    Args:
        metrics_path: a `metrics.jsonl`.
        out: ``.png``, ``.svg`` or ``.pdf``; written whole or not at all.
        component: the reward component; None takes the first in the file.

    Raises:
        ArtifactError: the file cannot be read, has no such series, or the picture cannot be written.
    """
    records = read_metrics(metrics_path)
    component = component or _first_component(records, metrics_path)
    training = _series(records, f"reward/{component}_mean")
    evaluations = {
        name: _series(records, name)
        for name in dict.fromkeys(name for record in records for name in record)
        if (match := _EVAL_NAME.match(name)) and match["component"] == component
    }
    if not training and not evaluations:
        raise ArtifactError(f"no rewards of component {component!r} in {metrics_path.name}", where=str(metrics_path))
    write_bytes_atomically(out, _render(component, training, evaluations, form=out.suffix.removeprefix(".") or "png"))


def _series(records: Sequence[dict[str, float]], name: str) -> list[dict[str, float]]:
    """The records that hold a metric, by step. A resumed run writes some steps again: the last one counts."""
    by_step = {record[STEP_KEY]: record for record in records if name in record}
    return [by_step[step] for step in sorted(by_step)]


def _first_component(records: Sequence[dict[str, float]], path: Path) -> str:
    for record in records:
        for name in record:
            match = _EVAL_NAME.match(name) or re.match(r"^reward/(?P<component>.+)_max$", name)
            if match:
                return match["component"]
    raise ArtifactError(f"no reward and no evaluation in {path.name}", where=str(path))


def _render(
    component: str,
    training: Sequence[dict[str, float]],
    evaluations: dict[str, list[dict[str, float]]],
    *,
    form: str,
) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    axes: Any = figure.add_subplot()
    _style(axes)
    if training:
        steps = [record[STEP_KEY] for record in training]
        means = [record[f"reward/{component}_mean"] for record in training]
        spreads = [record.get("reward/group_std_mean", 0.0) for record in training]
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        axes.fill_between(steps, low, high, color=_TRAIN, alpha=0.14, linewidth=0, label="spread within a group")
        axes.plot(steps, means, color=_TRAIN, linewidth=1.6, label="training rollouts, mean")
    for index, (name, rows) in enumerate(evaluations.items()):
        _draw_evaluations(axes, name, rows, marker="os^D"[index % 4], labelled=len(evaluations) > 1)
    axes.set_xlabel("rollouts", color=_QUIET)
    axes.set_title(f"{component} reward", loc="left", color=_INK, fontsize=11, pad=10)
    axes.margins(x=0.03, y=0.12)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK, loc="best")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form)
    return buffer.getvalue()


def _draw_evaluations(axes: Axes, name: str, rows: Sequence[dict[str, float]], *, marker: str, labelled: bool) -> None:
    stem = name.removesuffix("_mean")
    steps = [row[STEP_KEY] for row in rows]
    values = [row[name] for row in rows]
    errors = [row.get(f"{stem}_delta_se", 0.0) for row in rows]
    held_out = f"held-out evaluation ({name.split('/')[1]})" if labelled else "held-out evaluation"
    axes.errorbar(
        steps,
        values,
        yerr=errors,
        color=_EVAL,
        marker=marker,
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.8,
        linewidth=1.2,
        elinewidth=1.2,
        capsize=2.5,
        label=f"{held_out}, ± paired s.e.",
        zorder=3,
    )
    # The last point's value beside it, the first one's above it.
    places: dict[int, dict[str, Any]] = {-1: {"xytext": (8, 0), "va": "center"}, 0: {"xytext": (0, 8), "ha": "center"}}
    for index, place in list(places.items())[: len(rows)]:
        axes.annotate(
            f"{values[index]:.3f}",
            (steps[index], values[index]),
            textcoords="offset points",
            color=_EVAL,
            fontsize=9,
            **place,
        )


def _style(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=_QUIET, labelsize=8.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
