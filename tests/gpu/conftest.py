"""Tests that need CUDA devices are left out, and counted as left out, where there are fewer."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from runs import Run, processes_of, run_train


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    there = torch.cuda.device_count()
    wanting = [item for item in items if (gpu := item.get_closest_marker("gpu")) and gpu.args[0] > there]
    if wanting:
        config.hook.pytest_deselected(items=wanting)
        items[:] = [item for item in items if item not in wanting]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """`relax-sdk train` on the small geometry."""
    mark = uuid.uuid4().hex
    yield lambda *arguments, name="run": run_train(*arguments, run_dir=tmp_path / name, mark=mark)
    for pid in processes_of(mark):
        os.kill(pid, 9)
