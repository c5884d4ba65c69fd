"""Tests that need CUDA devices are left out, and counted as left out, where there are fewer."""

from __future__ import annotations

import pytest
import torch
from run_fixtures import mark, train

__all__ = ["mark", "train"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    there = torch.cuda.device_count()
    wanting = [item for item in items if (gpu := item.get_closest_marker("gpu")) and gpu.args[0] > there]
    if wanting:
        config.hook.pytest_deselected(items=wanting)
        items[:] = [item for item in items if item not in wanting]
