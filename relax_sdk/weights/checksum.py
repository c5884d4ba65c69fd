"""The checksum that both sides of a weight sync compute over a bucket's bytes, where they lie.

The bytes are read as 64-bit words in rows of `ROW_WORDS`; the last row, which may be empty, is padded with zeros. Every
row and every column is summed; each sum, plus a key of its position, goes through a bijective mixer (SplitMix64's:
Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators"), and the mixed values are added, those of
the rows and those of the columns. All of it is integer arithmetic modulo 2^64, so device, kernel and thread count
cannot change the result.

What it detects: any change within a single word, always, since one row sum changes and the mixer is bijective;
swapped, shifted, zeroed or stale words, rows and blocks, other than by a coincidence of about one in 2^64; another
length, always. What it misses by construction: words at the corners of a rectangle of rows and columns that change by
+d, -d, +d, -d. It finds accidents and is no cryptographic hash: whoever wants to can make two inputs agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["ROW_WORDS", "bytes_checksum", "combine_checksums"]

ROW_WORDS = 4096
"""Words of a row: 32 KiB, which keeps both sums of a 512 MiB bucket wide enough for a GPU."""
_ROW_BYTES = 8 * ROW_WORDS
_GROUP = 128
"""Columns are first summed over groups of so many rows: in one step CUDA takes half the data again as scratch."""
_GOLDEN = 0x9E3779B97F4A7C15


def bytes_checksum(data: Tensor) -> str:
    """Checksum of raw bytes, e.g. ``"5f3c...9a-1048576"``: two 64-bit sums in hexadecimal, and the length.

    Reads the data twice, in a fixed number of kernels, with scratch of about a hundredth of its size. Returns when the
    device is done.

    Args:
        data: uint8, [length], contiguous, on any device. It is copied when it does not start at a multiple of 8 bytes.

    Raises:
        ValueError: another dtype, more dimensions, or strided.
    """
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(f"expected contiguous uint8 [length], came {data.dtype} {list(data.shape)}")
    if data.storage_offset() % 8:
        data = data.clone()
    length = data.numel()
    rows = length // _ROW_BYTES
    tail = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device=data.device)
    tail[: length - rows * _ROW_BYTES] = data[rows * _ROW_BYTES :]
    # Words and sums are int64: summing int32 into int64 would make torch convert the whole bucket first.
    body = data[: rows * _ROW_BYTES].view(torch.int64).view(rows, ROW_WORDS)
    last = tail.view(1, _ROW_BYTES).view(torch.int64)
    grouped = rows - rows % _GROUP
    by_column = body[:grouped].view(-1, _GROUP, ROW_WORDS).sum(dim=1).sum(dim=0) + body[grouped:].sum(dim=0) + last[0]
    mixed = _mixed(torch.cat([body.sum(dim=1), last.sum(dim=1), by_column]))
    sums = torch.stack([mixed[: rows + 1].sum(), mixed[rows + 1 :].sum()]).tolist()
    return "".join(f"{value % 2**64:016x}" for value in sums) + f"-{length}"


def combine_checksums(checksums: Sequence[str]) -> str:
    """sha256 over the checksums of a sync's buckets, one per line, in order."""
    return hashlib.sha256("".join(f"{value}\n" for value in checksums).encode()).hexdigest()


def _mixed(values: Tensor) -> Tensor:
    """``mix(value_p + mix(p * golden))`` at every position p = 1, 2, ...: equal values differ by their place."""
    positions = torch.arange(1, values.numel() + 1, dtype=torch.int64, device=values.device)
    return _mix(values + _mix(positions * _signed(_GOLDEN)))


def _mix(values: Tensor) -> Tensor:
    values = (values ^ _shifted(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shifted(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own of int64 repeats the sign bit."""
    return torch.bitwise_and(values >> bits, 2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    """The same 64 bits as torch wants them."""
    return value - 2**64 if value >= 2**63 else value
