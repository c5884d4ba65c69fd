"""Whether every rank sees the folders that the driver writes to: what one writes there, all others read."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_sdk.errors import ConfigError
from relax_sdk.files import write_text_atomically
from relax_sdk.runtime.calls import rank_names, wait_all

__all__ = ["require_shared_folders"]

_WAIT_S = 10.0
_TIMEOUT_S = 120.0


def require_shared_folders(folders: Mapping[str, Path], ranks: Sequence[Any]) -> None:
    """Write a word into each folder and let every rank read it.

    Sidecars go from the driver to the ranks as files, and a path that exists on another node may still be another
    folder there. Found out here it costs seconds, in the first update a whole rollout.

    Args:
        folders: by the flag that names each.
        ranks: handles of `ActorRole`.

    Raises:
        ConfigError: a rank reads nothing, or something else; the ranks are named.
    """
    names = rank_names(len(ranks))
    for flag, folder in folders.items():
        word, path = uuid.uuid4().hex, folder / f".seen-{uuid.uuid4().hex}"
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, word)
        try:
            calls = [rank.reads.remote(str(path), wait_s=_WAIT_S) for rank in ranks]
            found = wait_all(calls, what="start", names=names, timeout_s=_TIMEOUT_S)
        finally:
            path.unlink()
        blind = [name for name, text in zip(names, found, strict=True) if text != word]
        if blind:
            raise ConfigError(
                f"{', '.join(blind)} cannot read what the driver writes to {str(folder)!r}",
                where=flag,
                expected="a folder that all nodes share, such as a network file system",
            )
