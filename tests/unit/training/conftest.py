"""Gloo ranks in processes of their own: one spawn serves every test that compares them with one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from tiny_training import four_rank_entry, two_rank_entry


def run_ranks(entry: Callable[..., None], folder: Path, world: int) -> list[dict[str, Any]]:
    """What each rank found; the ranks are processes over gloo."""
    context = multiprocessing.spawn(entry, args=(str(folder),), nprocs=world, join=False)
    deadline = time.monotonic() + 120
    # One `join` returns as soon as any process has ended.
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the ranks did not finish within 120 s")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(two_rank_entry, tmp_path_factory.mktemp("two_ranks"), 2)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks found."""
    return run_ranks(four_rank_entry, tmp_path_factory.mktemp("four_ranks"), 4)
