"""One record in, every sink out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from relax_sdk.errors import RecordError
from relax_sdk.metrics.console import ConsoleSink
from relax_sdk.metrics.jsonl import JsonlSink
from relax_sdk.metrics.names import check_names
from relax_sdk.metrics.tensorboard import TensorBoardSink

__all__ = ["MetricsLogger", "MetricsSink", "open_run_metrics"]


class MetricsSink(Protocol):
    """Where records go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one checked record: known names, plain floats and ints, possibly not finite."""
        ...

    def close(self) -> None:
        """Flush and let go; called once."""
        ...


class MetricsLogger:
    """Checks records and hands them to every sink. A context manager that closes the sinks.

    Args:
        sinks: in the order in which they receive each record.
    """

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one record.

        Args:
            step: rollouts trained on so far (0 before the first): the axis that all series share. Several records
                may have the same step.
            metrics: metric name -> number.

        Raises:
            RecordError: a name that the table of metrics does not have, or a value that is no number.
            ArtifactError: a sink could not write.
        """
        check_names(metrics)
        record: dict[str, float] = {}
        for name, value in metrics.items():
            if not isinstance(value, Real):
                raise RecordError(f"{name}: expected a number, came {type(value).__name__} {value!r}")
            record[name] = int(value) if isinstance(value, int) else float(value)
        for sink in self._sinks:
            sink.write(step, record)

    def close(self) -> None:
        """Close every sink, also when closing one fails."""
        sinks, self._sinks = self._sinks, ()
        with contextlib.ExitStack() as stack:
            for sink in sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_run_metrics(
    run_dir: Path,
    *,
    num_rollout: int,
    use_tensorboard: bool = True,
    write_line: Callable[[str], object] | None = None,
) -> MetricsLogger:
    """The logger of a run: ``metrics.jsonl``, ``tensorboard/`` and the console line.

    Args:
        run_dir: the run's folder, created if missing.
        num_rollout: rollouts of the whole run, for the line and its ETA.
        use_tensorboard: ``--use-tensorboard``.
        write_line: receives the console lines; None leaves them out.
    """
    sinks: list[MetricsSink] = [JsonlSink(run_dir / "metrics.jsonl")]
    if use_tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard"))
    if write_line is not None:
        sinks.append(ConsoleSink(write_line, num_rollout=num_rollout))
    return MetricsLogger(sinks)
