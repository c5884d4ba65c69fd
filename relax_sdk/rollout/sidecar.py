"""Trajectory sidecars and images on disk.

Layout under ``--artifact-root``::

    <task>/rollout_0000012/group_00000003.safetensors        one group's trajectory
    <task>/rollout_0000012/group_00000003_sample_0001.png    its decoded candidates
    eval/<task>/...                                          the same for held-out evaluation

A sidecar holds three flat namespaces: ``common.*`` (schedule, SDE steps, sample indices, policy version, seed
hash, engine log-probs), ``conditions.*`` (frozen text conditions) and ``tracks.<track>.*`` (candidates' latents).
"""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from relax_sdk.errors import ArtifactError, RecordError
from relax_sdk.files import write_bytes_atomically
from relax_sdk.protocols import Trajectory

__all__ = ["group_path", "prune_stale_artifacts", "read_sidecar", "rollout_folder", "write_image", "write_sidecar"]

_COMMON = ("sigmas", "timesteps", "sde_indices", "sample_indices", "rollout_log_probs")
_ROLLOUT_FOLDER = re.compile(r"rollout_(\d{7,})")


def rollout_folder(root: Path, task: str, rollout_id: int) -> Path:
    """``<root>/<task>/rollout_<id>``; for evaluation the caller passes ``<root>/eval`` as root."""
    return root / task / f"rollout_{rollout_id:07d}"


def group_path(folder: Path, group_index: int) -> Path:
    """The sidecar of a group."""
    return folder / f"group_{group_index:08d}.safetensors"


def write_sidecar(path: Path, trajectory: Trajectory) -> None:
    """Write one group: temporary name, fsync, rename.

    Raises:
        ArtifactError: the disk is full or not writable; nothing partial is left.
    """
    tensors: dict[str, Tensor] = {f"common.{name}": getattr(trajectory, name) for name in _COMMON}
    tensors["common.policy_version"] = torch.tensor(trajectory.policy_version)
    tensors["common.size"] = torch.tensor([trajectory.height, trajectory.width])
    tensors["common.eta"] = torch.tensor(trajectory.eta, dtype=torch.float64)
    tensors["common.sigma_clamp"] = torch.tensor(trajectory.sigma_clamp, dtype=torch.float64)
    tensors["common.seed_hash"] = torch.tensor(list(bytes.fromhex(trajectory.seed_hash)), dtype=torch.uint8)
    tensors |= {f"conditions.{name}": value for name, value in trajectory.conditions.items()}
    tensors[f"tracks.{trajectory.track}.latents"] = trajectory.latents
    tensors[f"tracks.{trajectory.track}.next_latents"] = trajectory.next_latents
    header = {
        "format": "relax-sdk trajectory 1",
        "group_index": str(trajectory.group_index),
        "rollout_id": "" if trajectory.rollout_id is None else str(trajectory.rollout_id),
        "sde_type": trajectory.sde_type,
        "track": trajectory.track,
    }
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_bytes_atomically(path, save(contiguous, metadata=header))


def read_sidecar(path: Path) -> Trajectory:
    """Read a group back; every tensor is checked again by the record.

    Raises:
        ArtifactError: missing, truncated, or not a sidecar of this layout.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            header = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"could not read sidecar: {error}",
            where=str(path),
            expected="storage that the driver and every training rank share (--artifact-root)",
        ) from error
    try:
        track = header["track"]
        height, width = tensors["common.size"].tolist()
        return Trajectory(
            **{name: tensors[f"common.{name}"] for name in _COMMON},
            latents=tensors[f"tracks.{track}.latents"],
            next_latents=tensors[f"tracks.{track}.next_latents"],
            conditions={
                name.removeprefix("conditions."): value
                for name, value in tensors.items()
                if name.startswith("conditions.")
            },
            track=track,
            height=height,
            width=width,
            policy_version=int(tensors["common.policy_version"]),
            group_index=int(header["group_index"]),
            rollout_id=int(header["rollout_id"]) if header["rollout_id"] else None,
            sde_type=header["sde_type"],
            eta=float(tensors["common.eta"]),
            sigma_clamp=float(tensors["common.sigma_clamp"]),
            seed_hash=bytes(tensors["common.seed_hash"].tolist()).hex(),
        )
    except (KeyError, ValueError, RecordError) as error:
        raise ArtifactError(f"not a trajectory sidecar: {error}", where=str(path)) from error


def write_image(folder: Path, group_index: int, slot: int, pixels: Tensor) -> Path:
    """Write one candidate as PNG.

    Args:
        folder: the rollout's folder.
        group_index, slot: the candidate.
        pixels: [3, H, W] uint8.

    Returns:
        The file.

    Raises:
        ArtifactError: it could not be written.
    """
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().cpu().numpy()).save(buffer, format="PNG", compress_level=1)
    path = folder / f"group_{group_index:08d}_sample_{slot:04d}.png"
    write_bytes_atomically(path, buffer.getvalue())
    return path


def prune_stale_artifacts(root: Path, task: str, *, rollout_id: int, keep: int) -> list[Path]:
    """Remove the rollout folders that fall out of retention before rollout ``rollout_id`` begins.

    Args:
        root: the artifact root.
        task: its subfolder.
        rollout_id: the round about to start, which counts as one of the kept.
        keep: ``--artifact-retention-rollouts``; 0 or less keeps everything.

    Returns:
        The removed folders.
    """
    folder = root / task
    if keep <= 0 or not folder.is_dir():
        return []
    stale = []
    for path in sorted(folder.iterdir()):
        match = _ROLLOUT_FOLDER.fullmatch(path.name)
        if match and int(match[1]) <= rollout_id - keep:
            shutil.rmtree(path)
            stale.append(path)
    return stale
