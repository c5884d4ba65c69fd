"""Sidecars, images and retention on disk."""

from __future__ import annotations

import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from relax_sdk.errors import ArtifactError
from relax_sdk.protocols import Trajectory
from relax_sdk.rollout import (
    group_path,
    prune_stale_artifacts,
    read_sidecar,
    rollout_folder,
    write_image,
    write_sidecar,
)


def trajectory(**changes: Any) -> Trajectory:
    generator = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {
        "sigmas": torch.tensor([1.0, 0.8, 0.5, 0.02, 0.0]),
        "timesteps": torch.tensor([1000.0, 800.0, 500.0, 20.0]),
        "sde_indices": torch.tensor([1, 2]),
        "sample_indices": torch.arange(3),
        "rollout_log_probs": torch.randn(3, 2, generator=generator),
        "latents": torch.randn(3, 2, 6, 4, generator=generator),
        "next_latents": torch.randn(3, 2, 6, 4, generator=generator),
        "conditions": {
            "encoder_hidden_states": torch.randn(5, 7, generator=generator).bfloat16(),
            "mask": torch.tensor([True, False]),
            "dotted.name": torch.arange(3),
        },
        "height": 48,
        "width": 32,
        "policy_version": 9,
        "group_index": 4,
        "rollout_id": 12,
        "sde_type": "sde",
        "eta": 0.7,
        "sigma_clamp": 0.8,
        "seed_hash": "ab" * 32,
    }
    return Trajectory(**{**values, **changes})


def raw_header(path: Path) -> dict[str, Any]:
    """The safetensors header as the format defines it: a little-endian length, then JSON."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


def test_paths_of_the_guide(tmp_path: Path) -> None:
    folder = rollout_folder(tmp_path, "t2i", 12)
    assert folder == tmp_path / "t2i" / "rollout_0000012"
    assert group_path(folder, 3) == folder / "group_00000003.safetensors"
    pixels = torch.zeros(3, 2, 2, dtype=torch.uint8)
    assert write_image(folder, 3, 1, pixels) == folder / "group_00000003_sample_0001.png"


@pytest.mark.parametrize("rollout_id", [12, 0, None])
def test_round_trip_is_exact(tmp_path: Path, rollout_id: int | None) -> None:
    want = trajectory(rollout_id=rollout_id, eta=0.1 + 0.2, sigma_clamp=1 / 3)
    path = tmp_path / "new" / "group_00000004.safetensors"
    write_sidecar(path, want)
    got = read_sidecar(path)
    for name in Trajectory.model_fields:
        mine, back = getattr(want, name), getattr(got, name)
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == back.dtype
            assert torch.equal(mine, back), name
        elif name == "conditions":
            assert mine.keys() == back.keys()
            for key in mine:
                assert mine[key].dtype == back[key].dtype
                assert torch.equal(mine[key], back[key])
        else:
            assert mine == back, name
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_views_are_written_whole(tmp_path: Path) -> None:
    """Latents are usually slices of one trajectory tensor."""
    states = torch.randn(3, 5, 6, 4)
    write_sidecar(tmp_path / "a", trajectory(latents=states[:, 1:3], next_latents=states[:, 2:4]))
    got = read_sidecar(tmp_path / "a")
    assert torch.equal(got.latents, states[:, 1:3])
    assert torch.equal(got.next_latents, states[:, 2:4])


def test_the_three_namespaces(tmp_path: Path) -> None:
    write_sidecar(tmp_path / "a", trajectory(conditions={"text": torch.ones(2, 3), "pooled": torch.ones(3)}))
    names = set(raw_header(tmp_path / "a")) - {"__metadata__"}
    assert {
        "common.sigmas",
        "common.timesteps",
        "common.sde_indices",
        "common.sample_indices",
        "common.rollout_log_probs",
        "common.policy_version",
        "conditions.text",
        "conditions.pooled",
        "tracks.image.latents",
        "tracks.image.next_latents",
    } <= names
    assert all(name.split(".")[0] in ("common", "conditions", "tracks") for name in names)
    assert {name for name in names if name.startswith("tracks.")} == {
        "tracks.image.latents",
        "tracks.image.next_latents",
    }


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match="No space left"):
        write_sidecar(tmp_path / "group_00000000.safetensors", trajectory())
    with pytest.raises(ArtifactError, match="No space left"):
        write_image(tmp_path, 0, 0, torch.zeros(3, 2, 2, dtype=torch.uint8))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.safetensors"
    write_sidecar(path, trajectory())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ArtifactError, match="sidecar") as caught:
        read_sidecar(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_names_the_shared_storage(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="artifact-root"):
        read_sidecar(tmp_path / "none.safetensors")


def test_other_safetensors_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match="not a trajectory sidecar"):
        read_sidecar(tmp_path / "model.safetensors")


@pytest.mark.parametrize("gone", ["common.sigmas", "tracks.image.next_latents", "common.policy_version"])
def test_a_sidecar_without_a_part_is_refused(tmp_path: Path, gone: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    write_sidecar(tmp_path / "a", trajectory())
    with safe_open(tmp_path / "a", framework="pt") as handle:
        header = handle.metadata()
        tensors = {name: handle.get_tensor(name) for name in handle.keys() if name != gone}  # noqa: SIM118
    save_file(tensors, tmp_path / "b", metadata=header)
    with pytest.raises(ArtifactError, match=gone.replace(".", r"\.")):
        read_sidecar(tmp_path / "b")


def test_a_nan_on_disk_is_refused(tmp_path: Path) -> None:
    bad = trajectory()
    bad.latents[1, 0, 2, 3] = float("nan")  # after construction: the record itself refuses it
    write_sidecar(tmp_path / "a", bad)
    with pytest.raises(ArtifactError, match="latents"):
        read_sidecar(tmp_path / "a")


@pytest.mark.parametrize(("height", "width"), [(5, 7), (16, 8)])
def test_images_are_pixel_exact(tmp_path: Path, height: int, width: int) -> None:
    pixels = torch.randint(0, 256, (3, height, width), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    path = write_image(tmp_path, 0, 0, pixels)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.mode == "RGB"
        assert image.size == (width, height)
        back = np.asarray(image)
    for row in range(height):
        for column in range(width):
            assert back[row, column].tolist() == pixels[:, row, column].tolist()


def make_folders(root: Path, *numbers: int) -> Path:
    for number in numbers:
        folder = rollout_folder(root, "t2i", number)
        folder.mkdir(parents=True)
        (folder / "group_00000000.safetensors").write_bytes(b"x")
    return root / "t2i"


def test_retention_keeps_the_newest_counting_the_one_that_starts(tmp_path: Path) -> None:
    folder = make_folders(tmp_path, 0, 1, 2, 3, 4, 5)
    removed = prune_stale_artifacts(tmp_path, "t2i", rollout_id=6, keep=3)
    assert [path.name for path in removed] == [f"rollout_000000{number}" for number in range(4)]
    assert sorted(path.name for path in folder.iterdir()) == ["rollout_0000004", "rollout_0000005"]


def test_retention_leaves_later_rounds_and_foreign_files_alone(tmp_path: Path) -> None:
    folder = make_folders(tmp_path, 0, 9)
    (folder / "rollout_notes").mkdir()
    (folder / "rollout_0000000.bak").mkdir()
    make_folders(tmp_path / "eval", 0)
    prune_stale_artifacts(tmp_path, "t2i", rollout_id=5, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["rollout_0000000.bak", "rollout_0000009", "rollout_notes"]
    assert rollout_folder(tmp_path / "eval", "t2i", 0).is_dir()


@pytest.mark.parametrize("keep", [0, -1])
def test_no_retention_keeps_everything(tmp_path: Path, keep: int) -> None:
    folder = make_folders(tmp_path, 0, 1, 2)
    assert prune_stale_artifacts(tmp_path, "t2i", rollout_id=50, keep=keep) == []
    assert len(list(folder.iterdir())) == 3


def test_retention_on_a_fresh_root(tmp_path: Path) -> None:
    assert prune_stale_artifacts(tmp_path / "none", "t2i", rollout_id=5, keep=2) == []
