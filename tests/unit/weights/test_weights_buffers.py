"""The send buffer between processes on a CPU, and what it leaves on the disk: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_sync import CPU, ask, receiver, write

from relax_sdk.errors import WeightSyncError
from relax_sdk.protocols import BufferHandle
from relax_sdk.weights import OpenBuffer, SendBuffer, buffer_for, buffers, bytes_checksum


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Stand in for shared memory and the temporary directory."""
    made = tmp_path / "shm", tmp_path / "tmp"
    for folder in made:
        folder.mkdir()
    monkeypatch.setattr(buffers, "_SHARED_MEMORY", made[0])
    monkeypatch.setattr(tempfile, "tempdir", str(made[1]))
    return made


def left(folders: tuple[Path, Path]) -> list[Path]:
    return [path for folder in folders for path in folder.iterdir()]


def test_another_process_reads_what_is_written(folders: tuple[Path, Path]) -> None:
    """Twice over, one slot while the other is filled; then the receiver dies with a buffer open."""
    contents = [bytes([seed]) * (1000 + seed) for seed in range(4)]
    with receiver() as (pipe, process):
        with SendBuffer.open(CPU, 2000) as buffer:
            assert ask(pipe, "open", [buffer.handle.model_dump_json()]) == "open"
            buffer.unlink()
            assert left(folders) == []
            for index, content in enumerate(contents):
                write(buffer, index % 2, content)
                buffer.flush()
                came = ask(pipe, "sum", index % 2, len(content))
                assert came == bytes_checksum(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            ask(pipe, "close")
        with SendBuffer.open(CPU, 2000) as buffer:
            ask(pipe, "open", [buffer.handle.model_dump_json()])
            pipe.send(("die",))
            process.join(timeout=30)
            assert process.exitcode == 9
            write(buffer, 0, b"still writable")
            assert len(left(folders)) == 1
    assert left(folders) == []


def test_a_killed_sender_leaves_no_file_once_it_is_unlinked(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys, tempfile, torch\nfrom relax_sdk.weights import SendBuffer, buffers\n"
        "buffers._SHARED_MEMORY = pathlib.Path(sys.argv[1])\n"
        "with SendBuffer.open(torch.device('cpu'), 4096) as buffer:\n"
        "    print(len(os.listdir(sys.argv[1])), flush=True)\n"
        "    buffer.unlink()\n    buffer.slot(1).fill_(3)\n    print(flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
    assert list(tmp_path.iterdir()) == []


def test_slots_are_aligned_and_apart(folders: tuple[Path, Path]) -> None:
    with SendBuffer.open(CPU, 1000, slots=3) as buffer:
        assert (buffer.handle.kind, buffer.handle.slots, buffer.handle.slot_bytes) == ("file", 3, 1024)
        opened = OpenBuffer.open(BufferHandle.model_validate_json(buffer.handle.model_dump_json()), CPU)
        for index in range(3):
            buffer.slot(index).fill_(index + 1)
        for index in range(3):
            assert opened.slot(index).unique().tolist() == [index + 1]
            assert opened.slot(index).numel() == 1024
        for index in (3, -1):
            for end in (buffer, opened):
                with pytest.raises(WeightSyncError, match=f"slot {index}"):
                    end.slot(index)
        opened.close()
        opened.close()
        with pytest.raises(WeightSyncError, match="closed"):
            opened.slot(0)
    with pytest.raises(WeightSyncError, match="closed"):
        buffer.slot(0)
    assert left(folders) == []


def test_no_file_is_left_by_an_error(folders: tuple[Path, Path]) -> None:
    def failing(error: BaseException) -> None:
        with SendBuffer.open(CPU, 64):
            assert len(left(folders)) == 1
            raise error

    for error in (ValueError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            failing(error)
        assert left(folders) == []


@pytest.mark.parametrize("failing", ["posix_fallocate", "disk_usage"])
def test_without_room_in_shared_memory_another_folder_serves(
    folders: tuple[Path, Path], failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is only sized, not reserved, would kill the process when it is written."""
    full = {folders[0]}

    if failing == "posix_fallocate":
        calls: list[int] = []
        reserve = os.posix_fallocate

        def first_is_full(descriptor: int, start: int, size: int) -> None:
            calls.append(size)
            if len(calls) == 1:
                raise OSError(28, "No space left on device")
            reserve(descriptor, start, size)

        monkeypatch.setattr(os, "posix_fallocate", first_is_full)
    else:
        usage = buffers.shutil.disk_usage
        little = usage(folders[0])._replace(free=100)
        monkeypatch.setattr(buffers.shutil, "disk_usage", lambda path: little if path in full else usage(path))
    with SendBuffer.open(CPU, 4096) as buffer:
        assert Path(buffer.handle.address["path"]).parent == folders[1]
        assert Path(buffer.handle.address["path"]).stat().st_blocks * 512 >= 2 * 4096, "its blocks are reserved"
        assert len(left(folders)) == 1
    full.add(folders[1])
    if failing == "disk_usage":
        with pytest.raises(WeightSyncError, match="100 bytes free") as caught, SendBuffer.open(CPU, 4096):
            pass
        assert str(folders[0]) in str(caught.value)
        assert str(folders[1]) in str(caught.value)
    assert left(folders) == []


def test_a_buffer_that_is_not_there_is_refused_and_not_created(folders: tuple[Path, Path]) -> None:
    with SendBuffer.open(CPU, 4096) as buffer:
        handle = buffer.handle
        wrong = handle.model_copy(update={"slots": 4})
        with pytest.raises(WeightSyncError, match="8192 bytes, expected 16384"):
            OpenBuffer.open(wrong, CPU)
    with pytest.raises(WeightSyncError, match="cannot open"):
        OpenBuffer.open(handle, CPU)
    with pytest.raises(WeightSyncError, match="KeyError"):
        OpenBuffer.open(handle.model_copy(update={"address": {}}), CPU)
    assert left(folders) == []


# --- choosing by device; the devices are made up, the UUIDs are as drivers print them --------------------------------

UUIDS = ("0dbf9d7c-7a1c-44f9-be1c-5b1e6a0a3f11", "ffb25a6e-2a4d-4d40-93b6-5a1f2d8e9c22")


def handle(uuid: str = "", kind: Any = "cuda_ipc") -> BufferHandle:
    return BufferHandle(kind=kind, device_uuid=uuid, slot_bytes=512, address={"path": "nowhere"})


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CUDA devices; the receiver's only visible one, number 0, is the sender's second."""

    class Properties:
        uuid = UUIDS[1]

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("spelling", ["{}", "GPU-{}", "MIG-{}", "gpu-{}"])
def test_the_buffer_of_the_receivers_own_device_is_taken(spelling: str) -> None:
    for change in (str, str.upper):
        offered = [handle(spelling.format(change(uuid))) for uuid in UUIDS]
        assert buffer_for(offered, torch.device("cuda", 0)) is offered[1]


@pytest.mark.usefixtures("devices")
def test_without_a_buffer_of_its_device_a_receiver_refuses() -> None:
    device = torch.device("cuda", 0)
    for offered in ([handle(UUIDS[0])], [handle(kind="file")], [handle(UUIDS[1]), handle(UUIDS[1])]):
        with pytest.raises(WeightSyncError) as caught:
            buffer_for(offered, device)
        assert UUIDS[1] in str(caught.value)
        assert offered[0].device_uuid in str(caught.value)
    with pytest.raises(WeightSyncError) as caught:
        OpenBuffer.open(handle(UUIDS[0]), device)
    assert all(uuid in str(caught.value) for uuid in UUIDS)


def test_kinds_are_not_mixed() -> None:
    one = handle(kind="file")
    assert buffer_for([one], CPU) is one
    for offered in ([handle(UUIDS[0])], [one, one]):
        with pytest.raises(WeightSyncError, match=r"a receiver on a CPU"):
            buffer_for(offered, CPU)
    with pytest.raises(WeightSyncError, match="cannot open cuda_ipc"):
        OpenBuffer.open(handle(UUIDS[0]), CPU)
    with pytest.raises(WeightSyncError, match="cannot open file"):
        OpenBuffer.open(one, torch.device("cuda", 0))
