"""How each matrix is divided among programs: by its shape alone, never by the number of rows.

The rules were found by timing 368 tiles of the matrices of 7 B and 0.4 B models on an H100
(benchmarks/notes.md). What they come to: a program streams its weights fastest in blocks of 8
to 16 KB, of which a few are under way, and all programs should be on the chip at once.

Quantized weights are unpacked in registers, and instructions run short before bandwidth does: their
tiles let few warps unpack the same numbers. 64 columns go with 2 warps, since 4 would make another
matrix instruction of them, for which blocks of bytes are copied 8 at a time and not 16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specpipe.runtimes.torch.fused.linear import Kind
from specpipe.runtimes.torch.fused.programs import ROWS

MIN_BLOCK = 16
"""Channels that one matrix instruction takes: what every size must be divisible by."""

_LINE = 128
"""Bytes that memory is read by."""

_FEW_COLUMNS = 2048
"""Fewer are not enough programs for a whole chip, however they are divided."""


@dataclass(frozen=True)
class Tiles:
    """Of one kernel: programs take block_n columns, block_c channels at a time.

    splits      parts that the channels are divided into, each a program of its own
    num_stages  blocks that are on their way from memory at once
    prefetch    channels of each row that are called into the cache ahead of time
    """

    block_n: int
    block_c: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 0

    def fitting(self, shared_bytes: int, *, element_bytes: int, num_matrices: int = 1) -> Tiles:
        """The same with fewer blocks under way, where those exceed a chip's shared memory.

        num_matrices  that a program reads side by side
        """
        block = (num_matrices * self.block_n + ROWS) * self.block_c * element_bytes
        return replace(self, num_stages=max(1, min(self.num_stages, shared_bytes // block)))


def linear_tiles(
    num_columns: int, num_channels: int, *, most: int, kind: Kind = "plain", block: int = 0
) -> Tiles:
    """Tiles of a product with a matrix [num_columns, num_channels]; `most` columns in one.

    block  channels that are packed together, of kind int4
    """
    if kind != "plain":
        wanted = Tiles(min(most, 64), 128, num_warps=2)
        if num_columns <= 8 * _FEW_COLUMNS:
            wanted = Tiles(min(most, 32), 256, num_warps=4)
        return _quantized(wanted, num_columns, num_channels, kind, block)
    if num_columns > 8 * _FEW_COLUMNS:
        return _tiles(num_columns, num_channels, min(most, 64), 128, num_stages=4)
    return _tiles(num_columns, num_channels, 16, 512, num_stages=3)


def gated_tiles(
    num_columns: int, num_channels: int, *, kind: Kind = "plain", block: int = 0
) -> Tiles:
    """Tiles of gate and up projection, [num_columns, num_channels] each."""
    if kind != "plain":
        block_n = 64 if num_columns > 4 * _FEW_COLUMNS else 32
        return _quantized(Tiles(block_n, 128, num_warps=2), num_columns, num_channels, kind, block)
    if num_columns > 4 * _FEW_COLUMNS:
        return _tiles(num_columns, num_channels, 64, 128, num_stages=4)
    return _tiles(num_columns, num_channels, 16, 128, num_stages=6)


def add_tiles(
    num_columns: int, num_channels: int, *, kind: Kind = "plain", block: int = 0
) -> Tiles:
    """Tiles of a projection back to the hidden states."""
    if kind != "plain":
        splits = 4 if num_columns < _FEW_COLUMNS or kind == "int4" else 1
        wanted = Tiles(32, 256, splits, num_stages=6)
        return _quantized(wanted, num_columns, num_channels, kind, block)
    if num_columns >= _FEW_COLUMNS:
        return _tiles(num_columns, num_channels, 32, 256, num_stages=6)
    if num_channels < _FEW_COLUMNS:
        return _tiles(num_columns, num_channels, 16, 256, num_stages=6)
    return _tiles(num_columns, num_channels, 64, 64, num_stages=6, splits=4)


def _quantized(wanted: Tiles, num_columns: int, num_channels: int, kind: Kind, block: int) -> Tiles:
    """Makes tiles no larger than wanted that divide the matrix; of int4, one block at a time."""
    splits = wanted.splits
    # A part is made of whole lines of memory, where the matrix is.
    line = block or largest_divisor(num_channels, _LINE)
    while num_channels % (splits * line):
        splits //= 2
    block_n = largest_divisor(num_columns, wanted.block_n)
    block_c = block or largest_divisor(num_channels // splits, wanted.block_c)
    num_warps = 2 if kind == "int4" else wanted.num_warps
    return replace(
        wanted, block_n=block_n, block_c=block_c, splits=splits, num_warps=num_warps,
        prefetch=min(num_channels // splits, 2 * block_c),
    )  # fmt: skip


def _tiles(
    num_columns: int, num_channels: int, block_n: int, block_c: int, *, num_stages: int,
    splits: int = 1,
) -> Tiles:  # fmt: skip
    """Makes tiles no larger than wanted that divide the matrix."""
    while num_channels % (splits * MIN_BLOCK):
        splits //= 2
    block_n = largest_divisor(num_columns, block_n)
    channels = num_channels // splits
    block_c = largest_divisor(channels, block_c)
    # Kernels count in powers of 2.
    most = 1 << (channels.bit_length() - 1)
    prefetch = min(most, 4 * block_c if num_columns < 8192 else block_c)
    return Tiles(block_n, block_c, splits, 2 if block_n == 16 else 4, num_stages, prefetch)


def largest_divisor(size: int, most: int) -> int:
    """Returns the largest power of 2 up to `most` that divides size."""
    return min(size & -size, most)
