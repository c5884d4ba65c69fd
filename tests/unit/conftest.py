"""What several rooms' tests share: `helpers/` becomes importable, and one gloo process group of a single rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Spawned ranks get this path too, so that they can import the same helpers.
sys.path.insert(0, str(Path(__file__).parent / "helpers"))


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """World size 1, in this process, without a port."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
