from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from PIL import Image

from relax_sdk.errors import ArtifactError
from relax_sdk.metrics import JsonlSink, MetricsLogger, plot_curve


def write_run(path: Path, rollouts: int = 20) -> Path:
    generator = numpy.random.default_rng(0)
    with MetricsLogger([JsonlSink(path)]) as logger:
        for step in range(rollouts + 1):
            if step % 10 == 0:
                value = 0.64 + 0.004 * step
                record = {"eval/held/pickscore_mean": value, "eval/held/pickscore_std": 0.1}
                if step:
                    record |= {"eval/held/pickscore_delta_mean": value - 0.64, "eval/held/pickscore_delta_se": 0.01}
                logger.log(step, record)
            if step:
                mean = 0.6 + 0.003 * step + generator.normal(0, 0.01)
                logger.log(step, {"reward/pickscore_mean": mean, "reward/group_std_mean": 0.05})
    return path


def test_the_curve_is_a_picture_with_both_series(tmp_path: Path) -> None:
    out = tmp_path / "pictures" / "curve.png"
    plot_curve(write_run(tmp_path / "metrics.jsonl"), out)
    assert [item.name for item in out.parent.iterdir()] == ["curve.png"]  # no temporary file stays
    pixels = numpy.asarray(Image.open(out).convert("RGB")).astype(int)
    for colour in ((0x3D, 0x6F, 0xB4), (0xC8, 0x55, 0x3D)):
        assert (numpy.abs(pixels - colour).sum(axis=2) < 12).sum() > 100


def test_svg_and_partial_runs(tmp_path: Path) -> None:
    plot_curve(write_run(tmp_path / "one.jsonl", rollouts=1), tmp_path / "one.svg")
    assert (tmp_path / "one.svg").read_text().startswith("<?xml")
    with MetricsLogger([JsonlSink(tmp_path / "train.jsonl")]) as logger:
        logger.log(1, {"reward/a_mean": 1.0, "reward/a_max": 2.0})
    plot_curve(tmp_path / "train.jsonl", tmp_path / "train.png")


def test_a_resumed_run_draws_each_step_once(tmp_path: Path) -> None:
    once = write_run(tmp_path / "once.jsonl")
    twice = write_run(write_run(tmp_path / "twice.jsonl"))
    assert len(twice.read_bytes()) == 2 * len(once.read_bytes())
    plot_curve(once, tmp_path / "once.png")
    plot_curve(twice, tmp_path / "twice.png")
    assert (tmp_path / "once.png").read_bytes() == (tmp_path / "twice.png").read_bytes()


def test_nothing_to_draw(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"rollout/step": 1, "train/loss": 0.0}\n')
    with pytest.raises(ArtifactError, match="no reward and no evaluation"):
        plot_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    write_run(tmp_path / "run.jsonl", rollouts=2)
    with pytest.raises(ArtifactError, match="no rewards of component 'ocr'"):
        plot_curve(tmp_path / "run.jsonl", tmp_path / "curve.png", component="ocr")
    assert not (tmp_path / "curve.png").exists()
