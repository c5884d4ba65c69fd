"""Whole files or none."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_sdk.errors import ArtifactError
from relax_sdk.files import write_bytes_atomically, write_text_atomically


def test_writes_exactly_these_bytes_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a.bin"
    data = bytes(range(256)) * 100
    write_bytes_atomically(path, data)
    assert path.read_bytes() == data
    assert [entry.name for entry in path.parent.iterdir()] == ["a.bin"]
    write_bytes_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_text_is_utf8(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "a.txt", "圆 ü\n")
    assert (tmp_path / "a.txt").read_bytes() == "圆 ü\n".encode()


def test_the_bytes_are_on_disk_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, order = tmp_path / "a.bin", []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        order.append(("fsync", os.fstat(descriptor).st_size, path.exists()))
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        order.append(("rename", self.stat().st_size, path.exists()))
        assert self.parent == path.parent, "a rename is atomic only within one file system"
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_bytes_atomically(path, b"12345")
    assert order == [("fsync", 5, False), ("rename", 5, False)]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_ends_early_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def fail(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    expected = ArtifactError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        write_bytes_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
        assert str(path) in str(caught.value)


def test_a_full_disk_for_real(tmp_path: Path) -> None:
    """A file size limit makes the kernel refuse the write half way, as a full disk does."""
    program = """
import resource, signal, sys
from pathlib import Path
from relax_sdk.errors import ArtifactError
from relax_sdk.files import write_bytes_atomically
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_bytes_atomically(Path(sys.argv[1]) / "a.bin", b"x" * 100_000)
except ArtifactError as error:
    sys.exit(77)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=_environment(), timeout=60)
    assert ended.returncode == 77
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_an_artifact_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("not a folder")
    with pytest.raises(ArtifactError, match=r"a\.bin"):
        write_bytes_atomically(tmp_path / "root" / "a.bin", b"x")
    with pytest.raises(ArtifactError, match=r"a\.bin"):
        write_bytes_atomically(tmp_path / "root" / "deeper" / "a.bin", b"x")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
