"""Whole files or none: every file is written to a temporary name, flushed to disk, and renamed.

A reader therefore never sees half a file, whatever kills the writer.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from relax_sdk.errors import ArtifactError

__all__ = ["write_bytes_atomically", "write_text_atomically"]


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``: ``<name>.<pid>.tmp``, fsync, rename. Parent folders are created.

    Raises:
        ArtifactError: the file could not be written (a full disk, no permission); the temporary file is removed.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ArtifactError(
            f"could not write {path.name}: {error.strerror or error}",
            where=str(path),
            next_step="free space or choose another folder, then start again",
        ) from error
    finally:
        # Also on Ctrl-C: whatever ends the write, no partial file stays.
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text_atomically(path: Path, text: str) -> None:
    """`write_bytes_atomically` for UTF-8 text."""
    write_bytes_atomically(path, text.encode())
