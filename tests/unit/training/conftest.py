"""Two gloo ranks in two processes: one spawn serves every test that compares them with one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from tiny_training import two_rank_entry


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("two_ranks")
    context = multiprocessing.spawn(two_rank_entry, args=(str(folder),), nprocs=2, join=False)
    if not context.join(timeout=120) and not context.join(timeout=5):
        for process in context.processes:
            process.kill()
        pytest.fail("the ranks did not finish within 120 s")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
