"""Fixtures for whole runs, shared by the tests on a CPU and on CUDA."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import Run, processes_of, run_train

__all__ = ["mark", "plain", "train", "two_ranks"]


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


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of two rollouts, for whoever only reads it or compares with it."""
    return _finished(tmp_path_factory, "--artifact-retention-rollouts", "1")


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same with two ranks and two engines."""
    return _finished(tmp_path_factory, "--resource", '{"actor": [1, 2], "rollout": [1, 2]}')


def _finished(folders: pytest.TempPathFactory, *arguments: str) -> Run:
    mark = uuid.uuid4().hex
    run = run_train(*arguments, run_dir=folders.mktemp("finished") / "run", mark=mark)
    assert run.code == 0, run.stderr
    assert processes_of(mark) == []
    return run
