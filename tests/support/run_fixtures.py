"""Fixtures for whole runs, shared by the tests on a CPU and on CUDA."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import Run, processes_of, run_train

__all__ = ["mark", "train"]


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark for this test's processes; whatever still carries it at the end is killed."""
    value = uuid.uuid4().hex
    yield value
    for pid in processes_of(value):
        os.kill(pid, 9)


@pytest.fixture
def train(tmp_path: Path, mark: str) -> Callable[..., Run]:
    """`relax-sdk train` on the small geometry."""
    return lambda *arguments, name="run": run_train(*arguments, run_dir=tmp_path / name, mark=mark)
