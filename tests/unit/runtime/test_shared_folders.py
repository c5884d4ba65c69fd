"""A rank that does not see the driver's folder, or sees another one at its path, is found before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_sdk.errors import ConfigError
from relax_sdk.runtime import shared_folders
from relax_sdk.runtime.actor_role import ActorRole
from relax_sdk.runtime.shared_folders import require_shared_folders


class Rank:
    """Reads as a rank does, from where its node has the folder mounted."""

    def __init__(self, at: Path | None = None, here: Path | None = None) -> None:
        self.at, self.here = at, here
        self.reads = self

    def remote(self, path: str, *, wait_s: float) -> str:
        seen = path if self.at is None or self.here is None else path.replace(str(self.here), str(self.at))
        role: Any = ActorRole.__new__(ActorRole)
        text: str = role.reads(seen, wait_s=0.0)
        return text


@pytest.fixture(autouse=True)
def _answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folders, "wait_all", lambda calls, **_: list(calls))


def test_a_shared_folder_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    folders = {"--run-dir": tmp_path / "run", "--artifact-root": tmp_path / "artifacts"}
    require_shared_folders(folders, [Rank(), Rank()])
    assert [list(folder.iterdir()) for folder in folders.values()] == [[], []]


def test_the_ranks_that_do_not_see_it_are_named(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    here = tmp_path / "run"
    with pytest.raises(ConfigError, match="actor rank 1, actor rank 2 cannot read") as caught:
        require_shared_folders(
            {"--run-dir": here}, [Rank(), Rank(tmp_path / "elsewhere", here), Rank(Path("/no"), here)]
        )
    assert "--run-dir" in str(caught.value)
    assert list(here.iterdir()) == []


def test_another_file_at_the_same_path_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActorRole, "reads", lambda *_args, **_kwargs: "the word of another run")
    with pytest.raises(ConfigError, match="actor rank 0 cannot read"):
        require_shared_folders({"--artifact-root": tmp_path}, [Rank()])
