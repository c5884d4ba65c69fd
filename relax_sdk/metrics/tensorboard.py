"""TensorBoard events, written by the `tensorboard` package itself: `torch.utils.tensorboard` would load torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["TensorBoardSink"]


class TensorBoardSink:
    """Writes every metric as a scalar under its own name; the step is the shared axis.

    Args:
        folder: where the event file is created.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one event holding all values, and flush it."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
