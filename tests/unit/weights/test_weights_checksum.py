"""The bucket checksum against its definition in numpy, and what it must notice."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy
import pytest
import torch

from relax_sdk.weights import bytes_checksum, combine_checksums

ROW = 4096 * 8
SIZES = (0, 1, 7, 8, 9, 4095, ROW - 1, ROW, ROW + 1, 3 * ROW, 64 * ROW, 131 * ROW + 4099)


def some_bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def words(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.int64)


def mixed(value: int) -> int:
    """The 64-bit mixer in whole numbers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def defined(data: torch.Tensor) -> str:
    """Rows and columns of little-endian words, with whole numbers for everything after the sums."""
    content = data.numpy().tobytes()
    padded = content + bytes(-len(content) % ROW if len(content) % ROW or not content else ROW)
    table = numpy.frombuffer(padded or bytes(ROW), dtype="<u8").reshape(-1, 4096)
    totals, position = [0, 0], 0
    for which, axis in enumerate((1, 0)):
        for value in table.sum(axis=axis, dtype=numpy.uint64):
            position += 1
            key = mixed(position * 0x9E3779B97F4A7C15 % 2**64)
            totals[which] += mixed((int(value) + key) % 2**64)
    return "".join(f"{total % 2**64:016x}" for total in totals) + f"-{len(content)}"


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_its_definition_says(size: int) -> None:
    data = some_bytes(size)
    assert bytes_checksum(data) == defined(data)
    extreme = torch.full((size,), 255, dtype=torch.uint8)
    assert bytes_checksum(extreme) == defined(extreme)


@pytest.mark.parametrize("size", [1, 9, ROW, 2 * ROW + 17])
def test_every_bit_counts(size: int) -> None:
    data = some_bytes(size)
    seen = {bytes_checksum(data)}
    places = (
        range(8 * size) if size < 100 else [0, 7, 63, 8 * ROW - 1, 8 * size - 1, *range(5, 8 * size, 8 * size // 50)]
    )
    for place in sorted({*places}):
        touched = data.clone()
        touched[place // 8] ^= 1 << (place % 8)
        seen.add(bytes_checksum(touched))
    assert len(seen) == 1 + len({*places})


def swapped(data: torch.Tensor, first: slice, second: slice) -> torch.Tensor:
    other = data.clone()
    words(other)[first], words(other)[second] = words(data)[second].clone(), words(data)[first].clone()
    return other


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (slice(0, 1), slice(1, 2)),
        (slice(5, 6), slice(5 + 4096, 6 + 4096)),
        (slice(0, 4096), slice(4096, 8192)),
        (slice(0, 4096), slice(3 * 4096, 4 * 4096)),
        (slice(100, 300), slice(9000, 9200)),
        (slice(0, 2 * 4096), slice(2 * 4096, 4 * 4096)),
    ],
    ids=["words of a row", "words of a column", "rows", "distant rows", "blocks", "halves"],
)
def test_swaps_are_noticed(first: slice, second: slice) -> None:
    data = some_bytes(4 * ROW)
    assert bytes_checksum(swapped(data, first, second)) != bytes_checksum(data)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 4096), (7, 4096 * 2 + 9)])
def test_a_swap_of_words_that_differ_in_their_top_bit_alone_is_noticed(first: int, second: int) -> None:
    """A sign in bfloat16. Position weights that are all odd would miss it: their differences are even."""
    data = torch.zeros(3 * ROW, dtype=torch.uint8)
    words(data)[first] = -(2**63)
    other = torch.zeros_like(data)
    words(other)[second] = -(2**63)
    assert bytes_checksum(other) != bytes_checksum(data)


def test_shifted_stale_and_shortened_bytes_are_noticed() -> None:
    data = some_bytes(3 * ROW + 8)
    stale = data.clone()
    stale[ROW : 2 * ROW] = some_bytes(ROW, seed=1)
    zeroed = data.clone()
    zeroed[-8:] = 0
    others = [data.roll(8), data.roll(1), data.roll(ROW), stale, zeroed, data[:-1], data[:-8], data.flip(0)]
    assert len({bytes_checksum(item.clone()) for item in [data, *others]}) == 1 + len(others)
    zeros = torch.zeros(ROW + 16, dtype=torch.uint8)
    assert len({bytes_checksum(zeros[:size]) for size in (1, 8, 16, ROW, ROW + 1, ROW + 16)}) == 6


def test_where_the_bytes_lie_does_not_matter() -> None:
    data = some_bytes(2 * ROW + 5)
    for offset in (1, 3, 8, 512):
        holder = torch.zeros(data.numel() + offset, dtype=torch.uint8)
        holder[offset:] = data
        assert bytes_checksum(holder[offset:]) == bytes_checksum(data)


def test_the_number_of_threads_does_not_matter() -> None:
    data, before = some_bytes(40 * ROW + 3), torch.get_num_threads()
    try:
        sums = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums.add(bytes_checksum(data))
    finally:
        torch.set_num_threads(before)
    assert len(sums) == 1


@pytest.mark.parametrize(
    "data",
    [torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]],
    ids=["floats", "two dimensions", "strided"],
)
def test_anything_but_bytes_in_a_row_is_refused(data: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="uint8"):
        bytes_checksum(data)


def test_checksums_are_combined_in_order() -> None:
    assert combine_checksums(["a", "b"]) == hashlib.sha256(b"a\nb\n").hexdigest()
    assert len({combine_checksums(sums) for sums in ([], ["ab"], ["a", "b"], ["b", "a"], ["a"])}) == 5


def test_the_room_needs_torch_and_pydantic_only() -> None:
    """It is imported inside the server process of an engine."""
    code = (
        "import sys, relax_sdk.weights\n"
        "heavy = ('peft', 'ray', 'pluggy', 'diffusers', 'transformers', 'click', 'yaml', 'safetensors')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
