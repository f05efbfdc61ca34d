"""How each matrix is divided among programs: by its shape alone, never by the number of rows.

The rules were found by timing some 900 tiles of the matrices of 0.4 B to 32 B models on an H100,
and 570 of those of 0.4 B and 7 B on an H200 (benchmarks/notes.md). What they come to: a program
streams its weights fastest in blocks of 8 to 16 KB, of which a few are under way, and all programs
should be on the chip at once.

Integers are unpacked in registers, and instructions run short before bandwidth does: their tiles
let few warps unpack the same numbers. 64 columns go with 2 warps, since 4 would make another matrix
instruction of them, for which blocks of bytes are copied 8 at a time and not 16. In FP8 it is that
instruction which takes numbers as they are: Hopper's wgmma, of 64 columns and 4 warps.

Launches of more than 16 rows have tiles of their own for speed alone: wide_tiles. Those were timed
on an H200, with weights in bfloat16, int8 and int4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specpipe.runtimes.torch.fused.linear import ROUNDED, UNPACKED, Kind
from specpipe.runtimes.torch.fused_sizes import (
    PROMPT_WIDTHS,
    ROWS,
    power_of_2_above,
    power_of_2_below,
)

MIN_BLOCK = 16
"""Channels that one matrix instruction takes: what every size must be divisible by."""

_LINE = 128
"""Bytes that memory is read by."""

_FEW_CHANNELS = 1024
"""So many or fewer, of 16 or 32 columns, are loaded at once."""

_FEW_COLUMNS = 2048
"""Fewer are not enough programs for a whole chip, however they are divided."""

_PROCESSORS = 132
"""Of an H100, on which all of this was timed."""


@dataclass(frozen=True)
class Tiles:
    """Of one kernel: programs take block_n columns, block_c channels at a time.

    splits      parts that the channels are divided into, each a program of its own
    num_stages  blocks that are on their way from memory at once
    prefetch    channels of each row that are called into the cache ahead of time
    ways        parts of a block that are multiplied side by side, each by a warp of its own
    held        channels of each row that are brought into the chip ahead of time
    rows        that a program multiplies; a wide launch may have several programs for its rows
    summed      columns whose squares make one sum; 0: block_n
    """

    block_n: int
    block_c: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 0
    ways: int = 1
    held: int = 0
    rows: int = ROWS
    summed: int = 0

    def fitting(
        self,
        shared_bytes: int,
        *,
        element_bytes: int,
        input_bytes: int | None = None,
        num_matrices: int = 1,
    ) -> Tiles:
        """The same with fewer blocks under way, where those exceed a chip's shared memory.

        No channels are held where they would take more than half of it; and a program has fewer
        rows where it could not have two blocks.

        input_bytes   of a number that is multiplied by one of the matrix; None: as many
        num_matrices  that a program reads side by side
        """
        weights = num_matrices * self.block_n * element_bytes
        row = input_bytes or element_bytes
        held, ways, num_warps, rows = self.held, self.ways, self.num_warps, self.rows
        # Kernels count in powers of 2.
        held_channels = ways * power_of_2_above(held // ways) if held else 0
        held_bytes = held_channels * (weights + rows * row)
        if held_bytes > shared_bytes // 2:
            held, held_bytes = 0, 0
            ways = num_warps = self.block_c // MIN_BLOCK
        while rows > ROWS and 2 * self.block_c * (weights + rows * row) > shared_bytes:
            rows //= 2
        most = (shared_bytes - held_bytes) // (self.block_c * (weights + rows * row))
        num_stages = max(1, min(self.num_stages, most))
        return replace(
            self, num_stages=num_stages, held=held, ways=ways, num_warps=num_warps, rows=rows
        )


def linear_tiles(
    num_columns: int, num_channels: int, *, most: int, kind: Kind = "plain", block: int = 0
) -> Tiles:
    """Tiles of a product with a matrix [num_columns, num_channels]; `most` columns in one.

    block  channels that are packed together, of kind int4
    """
    if kind in ROUNDED:
        wanted = Tiles(min(most, 64), 256, num_stages=6)
        return _quantized(wanted, num_columns, num_channels, kind)
    if kind != "plain":
        wanted = Tiles(min(most, 64), 128, num_warps=2)
        if num_columns <= 8 * _FEW_COLUMNS:
            wanted = Tiles(min(most, 32), 256, num_warps=4)
        return _quantized(wanted, num_columns, num_channels, kind, block)
    if num_columns > 8 * _FEW_COLUMNS:
        return _tiles(num_columns, num_channels, min(most, 64), 128, num_stages=4)
    if _is_enough(num_columns // 64):
        return _tiles(num_columns, num_channels, min(most, 64), 128, num_stages=6)
    return _tiles(num_columns, num_channels, 16, 512, num_stages=3)


def qkv_tiles(
    num_columns: int, num_channels: int, *, most: int, kind: Kind = "plain", block: int = 0
) -> Tiles:
    """Tiles of queries, keys and values; `most` columns in one."""
    if kind == "plain" and num_channels <= _FEW_CHANNELS:
        return _held(largest_divisor(num_columns, min(most, 32)), num_channels, num_warps=4)
    return linear_tiles(num_columns, num_channels, most=most, kind=kind, block=block)


def gated_tiles(
    num_columns: int, num_channels: int, *, kind: Kind = "plain", block: int = 0
) -> Tiles:
    """Tiles of gate and up projection, [num_columns, num_channels] each."""
    if kind in ROUNDED:
        return _quantized(Tiles(64, 256, prefetch=_LINE), num_columns, num_channels, kind)
    if kind != "plain":
        block_n = 64 if kind == "int4" and num_columns > 8 * _FEW_COLUMNS else 32
        return _quantized(Tiles(block_n, 256), num_columns, num_channels, kind, block)
    if num_columns > 4 * _FEW_COLUMNS:
        return _tiles(num_columns, num_channels, 64, 128, num_stages=4)
    if _is_enough(num_columns // 64):
        return _tiles(num_columns, num_channels, 64, 64, num_stages=8)
    return _tiles(num_columns, num_channels, 16, 128, num_stages=6)


def add_tiles(
    num_columns: int, num_channels: int, *, kind: Kind = "plain", block: int = 0
) -> Tiles:
    """Tiles of a projection back to the hidden states."""
    if kind in ROUNDED:
        wanted = Tiles(64, 256, splits=4)
        return _quantized(wanted, num_columns, num_channels, kind)
    if kind != "plain":
        splits = 4 if num_columns < _FEW_COLUMNS or kind == "int4" else 2
        wanted = Tiles(32, 256, splits, num_stages=4 if kind == "int8" else 6)
        return _quantized(wanted, num_columns, num_channels, kind, block)
    if num_columns >= _FEW_COLUMNS:
        if _is_uneven(num_columns // 32):
            return _tiles(num_columns, num_channels, 32, 128, num_stages=6, splits=4)
        # As fast as whole channels for one row, and there are more programs where rows are many.
        return _tiles(num_columns, num_channels, 64, 128, num_stages=6, splits=2)
    if num_channels <= _FEW_CHANNELS:
        return _held(largest_divisor(num_columns, 32), num_channels, num_warps=8)
    if num_channels < _FEW_COLUMNS:
        return _tiles(num_columns, num_channels, 16, 256, num_stages=6)
    return _tiles(num_columns, num_channels, 64, 64, num_stages=12, splits=4)


def wide_tiles(
    narrow: Tiles, width: int, num_columns: int, *, most: int = 64, kind: Kind = "plain"
) -> Tiles:
    """Tiles of a launch of more rows than those of `narrow`: the same bits, at another speed.

    The bits of a product follow from the order in which its channels are added, so splits, ways and
    held stay as they are, and so do blocks that are added by themselves (FP8) or packed (int4).
    Hopper's two matrix instructions add alike: tests show it. Where each warp has channels of its
    own, or all are held, a program has no room for more rows, and there are more programs.

    Integers stay with the narrow tiles' instruction, mma.sync. For it the compiler gives a thread 4
    channels that lie together, as bytes do in a register, so that one instruction adds 0, 1, 4, 5,
    8, 9, … of 32 channels and the next 2, 3, 6, 7, …; Hopper's wgmma would add 0 to 15, then the
    others. A program has 64 rows at most: more would leave no registers for what is unpacked.
    """
    if narrow.ways > 1 or narrow.held:
        return narrow
    block_c = narrow.block_c
    if kind in UNPACKED:
        return replace(
            narrow, block_c=min(block_c, 128) if kind == "int8" else block_c,
            num_warps=4 if narrow.block_n < 64 else 2, num_stages=3, rows=min(width, 64),
        )  # fmt: skip
    block_n = max(narrow.block_n, largest_divisor(num_columns, most))
    if kind == "plain":
        block_c = min(block_c, 64 if width > 32 or block_n > 64 else 128)
    return replace(
        narrow, block_n=block_n, block_c=block_c, num_warps=4 if width < 128 else 8,
        num_stages=6 if width < 256 else 4, prefetch=min(narrow.prefetch, 4 * block_c), rows=width,
        summed=narrow.block_n,
    )  # fmt: skip


_PROMPT_TILES = (
    (1.0, Tiles(128, 64, num_warps=8, num_stages=4, rows=256)),
    (0.9, Tiles(128, 64, num_warps=8, num_stages=4, rows=128)),
    (0.74, Tiles(64, 64, num_warps=4, num_stages=4, rows=128)),
    (0.6, Tiles(64, 64, num_warps=4, num_stages=6, rows=64)),
)
"""Of prompts, and how fast they multiply where they keep all processors busy."""


def prompt_tiles(
    num_columns: int, num_channels: int, width: int, *, num_matrices: int = 1, rounds: bool = False,
    element_bytes: int = 2, is_known: bool = True,
) -> Tiles:  # fmt: skip
    """Tiles of a product with the rows of prompts, of which a launch has `width` or fewer.

    All channels are added one after the other, so tiles change only how fast it goes: large ones
    are faster, as far as they keep all processors busy. In FP8 blocks of channels are added by
    themselves; they are of one size.

    num_matrices  that a program multiplies by: of gate and up projection both
    rounds        whether inputs are FP8
    element_bytes of what is multiplied. Nobody waits for float32, which has one size of tiles
    is_known      whether tiles of several sizes give the same bits on this chip
    """
    if element_bytes == 4:
        block_n, block_c = largest_divisor(num_columns, 32), largest_divisor(num_channels, 32)
        return Tiles(block_n, block_c, num_stages=2, rows=64)
    block_c = largest_divisor(num_channels, 128 if rounds else 64)
    most = 128 * 128 if rounds else 128 * 256  # sums; in FP8 there are two of each
    candidates = [
        (speed, replace(tiles, block_n=largest_divisor(num_columns, tiles.block_n)))
        for speed, tiles in _PROMPT_TILES
        if tiles.rows <= width
        and num_matrices * tiles.rows <= 256
        and tiles.block_n * tiles.rows <= most
        and (is_known or tiles.rows == PROMPT_WIDTHS[0])
    ]

    def speed_of(candidate: tuple[float, Tiles]) -> float:
        speed, tiles = candidate
        num_programs = width // tiles.rows * num_columns // tiles.block_n
        return speed * num_programs / (-(-num_programs // _PROCESSORS) * _PROCESSORS)

    _, best = max(candidates if is_known else candidates[:1], key=speed_of)
    return replace(best, block_c=block_c)


def _is_enough(num_programs: int) -> bool:
    """Says whether so many keep the memory busy: on an H200 76 do."""
    return num_programs > _PROCESSORS // 2


def _is_uneven(num_programs: int) -> bool:
    """Says whether some processors would have far more to do than others."""
    rounds = -(-num_programs // _PROCESSORS)
    return rounds * _PROCESSORS > 1.2 * num_programs


def _quantized(
    wanted: Tiles, num_columns: int, num_channels: int, kind: Kind, block: int = 0
) -> Tiles:
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
        prefetch=min(num_channels // splits, wanted.prefetch or 2 * block_c),
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
    prefetch = min(power_of_2_below(channels), 4 * block_c if num_columns < 8192 else block_c)
    return Tiles(block_n, block_c, splits, 2 if block_n == 16 else 4, num_stages, prefetch)


def _held(block_n: int, num_channels: int, *, num_warps: int, splits: int = 1) -> Tiles:
    """Makes tiles that hold all channels of a part while the kernel before still runs.

    Each warp multiplies a share of them: 1,024 channels are 64 matrix instructions, which would
    take a µs if each waited for the sums of the one before.
    """
    most = min(num_warps, num_channels // MIN_BLOCK)
    ways = largest_divisor(num_channels // 8, most)  # of whole 16 bytes each
    block_c = largest_divisor(num_channels, ways * MIN_BLOCK)
    return Tiles(block_n, block_c, splits, num_warps=ways, ways=ways, held=num_channels)


def largest_divisor(size: int, most: int) -> int:
    """Returns the largest power of 2 up to `most` that divides size."""
    return min(size & -size, power_of_2_below(most))
