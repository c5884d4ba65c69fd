"""The send buffer in device memory, between two processes: contents, checksums, refusals, flat memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from relax_sdk.errors import WeightSyncError
from relax_sdk.weights import OpenBuffer, SendBuffer, bytes_checksum

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "helpers"))

from tiny_sync import ask, receiver

MIB = 2**20
SLOT = 64 * MIB
ROUNDS = 50


def device() -> torch.device:
    return torch.device("cuda", 0)


def filled(buffer: SendBuffer, slot: int, seed: int) -> str:
    """Fill a slot with random bytes; their checksum, computed on the CPU."""
    generator = torch.Generator(device()).manual_seed(seed)
    room = buffer.slot(slot)
    room.copy_(torch.randint(0, 256, room.shape, dtype=torch.uint8, device=device(), generator=generator))
    buffer.flush()
    return bytes_checksum(room.cpu())


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [0, 1, 4099, 32768, 5 * 32768 + 17, 64 * MIB])
def test_the_checksum_is_that_of_the_cpu(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert bytes_checksum(data.to(device())) == bytes_checksum(data)


@pytest.mark.gpu(1)
def test_the_checksum_needs_no_memory_to_speak_of() -> None:
    data = torch.ones(512 * MIB, dtype=torch.uint8, device=device())
    bytes_checksum(data)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    bytes_checksum(data)
    assert torch.cuda.max_memory_allocated() - before < 16 * MIB


@pytest.mark.gpu(1)
def test_another_process_reads_what_is_written_and_memory_stays_flat() -> None:
    free: list[tuple[int, int]] = []
    with receiver("cuda") as (pipe, _):
        for seed in range(ROUNDS):
            with SendBuffer.open(device(), SLOT) as buffer:
                assert ask(pipe, "open", [buffer.handle.model_dump_json()]) == "open"
                for slot in range(2):
                    written = filled(buffer, slot, 2 * seed + slot)
                    assert ask(pipe, "sum", slot, SLOT) == written
                seen_there = ask(pipe, "close")
            free.append((seen_there, torch.cuda.mem_get_info()[0]))
    settled = free[2:]
    for column in (0, 1):
        values = [pair[column] for pair in settled]
        assert max(values) - min(values) < 8 * MIB, values


@pytest.mark.gpu(1)
def test_memory_comes_back_whatever_the_receiver_did() -> None:
    """It never opened the buffer; or it died with the buffer open."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        with SendBuffer.open(device(), SLOT) as buffer:
            assert torch.cuda.memory_allocated() >= before + 2 * SLOT
    assert torch.cuda.memory_allocated() == before
    for _ in range(2):
        with receiver("cuda") as (pipe, process), SendBuffer.open(device(), SLOT) as buffer:
            ask(pipe, "open", [buffer.handle.model_dump_json()])
            pipe.send(("die",))
            process.join(timeout=60)
            filled(buffer, 0, 0)
        assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu(1)
def test_an_error_gives_the_memory_back() -> None:
    before = torch.cuda.memory_allocated()

    def failing() -> None:
        with SendBuffer.open(device(), SLOT):
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        failing()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu(1)
def test_the_buffer_of_another_device_is_refused_by_name() -> None:
    own = str(torch.cuda.get_device_properties(0).uuid)
    with SendBuffer.open(device(), 4096) as buffer:
        assert buffer.handle.device_uuid == own
        other = buffer.handle.model_copy(update={"device_uuid": "00000000-0000-0000-0000-000000000000"})
        with pytest.raises(WeightSyncError) as caught:
            OpenBuffer.open(other, device())
    assert own in str(caught.value)
    assert "00000000-0000" in str(caught.value)
