from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from relax_sdk.errors import ArtifactError, RecordError
from relax_sdk.metrics import (
    METRICS,
    STEP_KEY,
    ConsoleSink,
    JsonlSink,
    MetricsLogger,
    TensorBoardSink,
    find_metric,
    format_evaluation,
    format_rollout,
    open_run_metrics,
    read_metrics,
)

RECORD = {
    "reward/pickscore_mean": 0.84123,
    "reward/advantage_mean": 0.0,
    "reward/group_std_mean": 0.0131,
    "train/clip_fraction": 0.125,
    "train/grad_norm": 0.034,
    "train/ratio_max_deviation": 2.1e-5,
    "train/policy_version": 3,
    "perf/step_time": 8.0,
}


class ListSink:
    def __init__(self, fail: bool = False) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self.fail = fail

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.records.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1
        if self.fail:
            raise ArtifactError("cannot close")


def test_every_name_of_the_table_is_unique_and_found() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        filled = metric.name.replace("<component>", "pick_score").replace("<set>", "held-out")
        assert find_metric(filled) is metric
        assert metric.unit
        assert metric.meaning


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("train/los", "train/loss"),
        ("train/lossy", "train/loss"),
        ("train/clip_frac", "train/clip_fraction"),
        ("perf/rolout_time", "perf/rollout_time"),
        ("reward/_median", None),
        ("reward/a/b_mean", None),
        ("eval/pickscore_mean", None),
        ("eval/x/pickscore_delta", None),
        ("nonsense", None),
    ],
)
def test_unknown_names_are_refused(name: str, nearest: str | None) -> None:
    sink = ListSink()
    with pytest.raises(RecordError, match="unknown metric") as caught:
        MetricsLogger([sink]).log(1, {"train/loss": 1.0, name: 1.0})
    assert nearest is None or caught.value.nearest == nearest
    assert sink.records == []


@pytest.mark.parametrize("value", ["1.0", None, [1.0], 1 + 2j])
def test_values_that_are_no_numbers_are_refused(value: object) -> None:
    with pytest.raises(RecordError, match="train/loss: expected a number"):
        MetricsLogger([]).log(1, {"train/loss": value})  # type: ignore[dict-item]


def test_every_sink_gets_plain_numbers_and_is_closed_even_if_another_fails() -> None:
    import numpy

    first, second = ListSink(), ListSink(fail=True)
    logger = MetricsLogger([first, second])
    logger.log(4, {"train/loss": numpy.float32(0.5), "reward/degenerate": True, "reward/num_groups": 8})
    with pytest.raises(ArtifactError, match="cannot close"):
        logger.close()
    assert first.records == second.records == [(4, {"train/loss": 0.5, "reward/degenerate": 1, "reward/num_groups": 8})]
    assert [type(value) for value in first.records[0][1].values()] == [float, int, int]
    assert first.closed == second.closed == 1
    logger.close()


def test_jsonl_round_trip_is_valid_json_even_for_nan(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    values = {"train/loss": math.nan, "train/ratio_max": math.inf, "train/ratio_min": -math.inf, "train/lr": 3e-4}
    with MetricsLogger([JsonlSink(path)]) as logger:
        logger.log(1, values)
        assert path.read_text().endswith("\n")  # flushed at once
        logger.log(2, {"train/policy_version": 2})

    def strict(constant: str) -> float:
        raise AssertionError(f"not JSON: {constant}")

    lines = [json.loads(line, parse_constant=strict) for line in path.read_text().splitlines()]
    assert lines[0] == {STEP_KEY: 1, "train/loss": "NaN", "train/ratio_max": "Infinity"} | {
        "train/ratio_min": "-Infinity",
        "train/lr": 3e-4,
    }
    first, second = read_metrics(path)
    assert math.isnan(first["train/loss"])
    assert (first["train/ratio_max"], first["train/ratio_min"]) == (math.inf, -math.inf)
    assert second == {STEP_KEY: 2, "train/policy_version": 2}


def test_a_truncated_last_line_is_left_out_and_removed_on_reopening(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLogger([JsonlSink(path)]) as logger:
        logger.log(1, {"train/loss": 1.0})
        logger.log(2, {"train/loss": 2.0})
    whole = path.read_bytes()
    for cut in range(1, len(whole) - whole.index(b"\n") - 1):
        path.write_bytes(whole[:-cut])
        steps = [record[STEP_KEY] for record in read_metrics(path)]
        assert steps == ([1, 2] if cut == 1 else [1])  # without its newline the line is still whole
    with MetricsLogger([JsonlSink(path)]) as logger:
        logger.log(3, {"train/loss": 3.0})
    assert [record[STEP_KEY] for record in read_metrics(path)] == [1, 3]


@pytest.mark.parametrize("line", ["{", "[1]", '{"train/loss": 1.0}', '{"rollout/step": 1, "train/loss": "x"}', ""])
def test_any_other_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"{STEP_KEY}": 1}}\n{line}\n{{"{STEP_KEY}": 3}}\n')
    with pytest.raises(ArtifactError, match=r"line 2 of metrics\.jsonl") as caught:
        read_metrics(path)
    assert f"{path}:2" in str(caught.value)


def test_missing_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"could not read metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"could not open metrics\.jsonl"):
        JsonlSink(tmp_path / "file" / "metrics.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.close()
    with Path("/dev/full").open("a", encoding="utf-8") as full:
        sink._file = full
        with pytest.raises(ArtifactError, match="No space left"), MetricsLogger([sink]) as logger:
            logger.log(1, {"train/loss": 1.0})


def test_tensorboard_events_hold_the_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    with MetricsLogger([TensorBoardSink(tmp_path / "tb")]) as logger:
        logger.log(0, {"eval/held/pickscore_mean": 0.5})
        logger.log(1, {"train/loss": 0.25, "train/lr": 3e-4})
    (file,) = (tmp_path / "tb").iterdir()
    found = {
        (event.step, value.tag): next(iter(value.tensor.float_val), value.simple_value)
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert found == {
        (0, "eval/held/pickscore_mean"): 0.5,
        (1, "train/loss"): 0.25,
        (1, "train/lr"): pytest.approx(3e-4),
    }


def test_the_rollout_line() -> None:
    assert format_rollout(3, RECORD, num_rollout=60, eta=448.4) == (
        "rollout  3/60  pickscore 0.8412 ± 0.0131  clip 12.5%  grad 3.40e-02  max|rho-1| 2.1e-05  policy v3  8.0 s"
        "  eta 7m28s"
    )
    assert format_rollout(1, {"reward/a_mean": 1.0, "reward/b_mean": 2.0}, num_rollout=1) == (
        "rollout 1/1  a 1.0000 b 2.0000"
    )
    assert "no reward spread" in format_rollout(1, {"reward/a_mean": 1.0, "reward/degenerate": 1}, num_rollout=1)


def test_the_evaluation_line() -> None:
    before = {"eval/held-out/pickscore_mean": 0.64, "eval/held-out/pickscore_std": 0.1}
    after = before | {
        "eval/held-out/pickscore_delta_mean": 0.058,
        "eval/held-out/pickscore_delta_se": 0.0131,
        "eval/held-out/pickscore_delta_t": 4.43,
    }
    assert format_evaluation(0, before) == ["eval held-out after 0 rollouts  pickscore 0.6400"]
    assert format_evaluation(60, after) == [
        "eval held-out after 60 rollouts  pickscore 0.6400  change +0.0580 ± 0.0131 (t 4.4)"
    ]


def test_the_console_counts_down_without_the_first_slow_step() -> None:
    lines: list[str] = []
    sink = ConsoleSink(lines.append, num_rollout=10)
    sink.write(1, RECORD | {"perf/step_time": 60.0})
    sink.write(2, RECORD | {"perf/step_time": 4.0})
    sink.write(2, {"eval/held/pickscore_mean": 0.5})
    sink.write(2, {"perf/eval_time": 1.0})
    sink.write(10, RECORD | {"perf/step_time": 6.0})
    sink.close()
    assert [line.split()[0] for line in lines] == ["rollout", "rollout", "eval", "rollout"]
    assert lines[0].endswith("eta 9m00s")
    assert lines[1].endswith("eta 32s")
    assert lines[3].endswith("eta 0s")


def test_a_run_writes_all_three(tmp_path: Path) -> None:
    lines: list[str] = []
    with open_run_metrics(tmp_path, num_rollout=2, write_line=lines.append) as logger:
        logger.log(1, RECORD)
    assert len(lines) == len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    with open_run_metrics(tmp_path / "quiet", num_rollout=2, use_tensorboard=False) as logger:
        logger.log(1, RECORD)
    assert [item.name for item in (tmp_path / "quiet").iterdir()] == ["metrics.jsonl"]
