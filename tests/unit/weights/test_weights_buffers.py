"""The send buffer between processes on a CPU, and what it leaves behind: nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_sync import CPU, ask, receiver, write

from relax_sdk.errors import WeightSyncError
from relax_sdk.protocols import BufferHandle
from relax_sdk.weights import OpenBuffer, SendBuffer, buffer_for, buffers, bytes_checksum


def test_another_process_reads_what_is_written() -> None:
    """Twice over, one slot while the other is filled; then the receiver dies with a buffer open."""
    contents = [bytes([seed]) * (1000 + seed) for seed in range(4)]
    with receiver() as (pipe, process):
        with SendBuffer.open(CPU, 2000) as buffer:
            assert ask(pipe, "open", [buffer.handle.model_dump_json()]) == "open"
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


def test_a_buffer_has_no_name_in_any_folder() -> None:
    """So nothing can be left of it, however its owner ends."""
    with SendBuffer.open(CPU, 4096) as buffer:
        path = Path(buffer.handle.address["path"])
        assert str(path.readlink()) == "/memfd:relax-weights (deleted)"
        assert path.stat().st_nlink == 0
        assert path.stat().st_blocks * 512 >= 2 * 4096, "its pages are reserved"


def test_slots_are_aligned_and_apart() -> None:
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


def test_no_descriptor_is_left_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: BaseException) -> None:
        with SendBuffer.open(CPU, 64) as buffer:
            paths.append(Path(buffer.handle.address["path"]))
            raise error

    for error in (ValueError("x"), KeyboardInterrupt()):
        paths: list[Path] = []
        with pytest.raises(type(error)):
            failing(error)
        assert not paths[0].exists()

    def full(_descriptor: int, _start: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(WeightSyncError, match="buffer of 1024 bytes: No space left on device"):
        failing(ValueError("not reached"))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    monkeypatch.setattr(buffers, "_available_bytes", lambda: 1023)
    with pytest.raises(WeightSyncError, match="buffer of 1024 bytes: 1023 bytes are free"):
        failing(ValueError("not reached"))


def test_a_buffer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with SendBuffer.open(CPU, 4096) as buffer:
        handle = buffer.handle
        wrong = handle.model_copy(update={"slots": 4})
        with pytest.raises(WeightSyncError, match="8192 bytes, expected 16384"):
            OpenBuffer.open(wrong, CPU)
        with (tmp_path / "other").open("wb+") as other:
            other.truncate(8192)
            path = f"/proc/{os.getpid()}/fd/{other.fileno()}"
            with pytest.raises(WeightSyncError, match=r"it is .*other of 8192 bytes"):
                OpenBuffer.open(handle.model_copy(update={"address": {"path": path}}), CPU)
    with pytest.raises(WeightSyncError, match="cannot open"):
        OpenBuffer.open(handle, CPU)
    with pytest.raises(WeightSyncError, match="KeyError"):
        OpenBuffer.open(handle.model_copy(update={"address": {}}), CPU)


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
