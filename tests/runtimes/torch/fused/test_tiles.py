from __future__ import annotations

from typing import NamedTuple

import pytest

from specpipe.runtimes.torch.fused.tiles import (
    Tiles,
    add_tiles,
    gated_tiles,
    largest_divisor,
    qkv_tiles,
    wide_tiles,
)
from specpipe.runtimes.torch.fused_sizes import ROWS, WIDTHS

HOPPER, ADA = 200 << 10, 99 << 10
"""Bytes of shared memory that a program may take; Hopper has 227 KB, of which some are left."""


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int


SHAPES = {
    "Llama 3.2 1B": Shape(2048, 8192, 32, 8, 64, 128256),
    "Llama 3.2 3B": Shape(3072, 8192, 24, 8, 128, 128256),
    "Llama 3.1 8B": Shape(4096, 14336, 32, 8, 128, 128256),
    "Llama 3.1 70B": Shape(8192, 28672, 64, 8, 128, 128256),
    "Qwen2.5 0.5B": Shape(896, 4864, 14, 2, 64, 151936),
    "Qwen2.5 1.5B": Shape(1536, 8960, 12, 2, 128, 151936),
    "Qwen2.5 3B": Shape(2048, 11008, 16, 2, 128, 151936),
    "Qwen2.5 7B": Shape(3584, 18944, 28, 4, 128, 152064),
    "Qwen2.5 14B": Shape(5120, 13824, 40, 8, 128, 152064),
    "Qwen2.5 32B": Shape(5120, 27648, 40, 8, 128, 152064),
    "Qwen2.5 72B": Shape(8192, 29568, 64, 8, 128, 152064),
    "Qwen3 0.6B": Shape(1024, 3072, 16, 8, 128, 151936),
    "Qwen3 1.7B": Shape(2048, 6144, 16, 8, 128, 151936),
    "Qwen3 4B": Shape(2560, 9728, 32, 8, 128, 151936),
    "Qwen3 8B": Shape(4096, 12288, 32, 8, 128, 151936),
    "Qwen3 14B": Shape(5120, 17408, 40, 8, 128, 151936),
    "Qwen3 32B": Shape(5120, 25600, 64, 8, 128, 151936),
    "Mistral 7B": Shape(4096, 14336, 32, 8, 128, 32768),
    "Mistral Small 24B": Shape(5120, 32768, 32, 8, 128, 131072),
    "Phi-4 mini": Shape(3072, 8192, 24, 8, 128, 200064),
    "SmolLM2 135M": Shape(576, 1536, 9, 3, 64, 49152),
    "SmolLM2 360M": Shape(960, 2560, 15, 5, 64, 49152),
    "TinyLlama 1.1B": Shape(2048, 5632, 32, 4, 64, 32000),
    "inflated 7B": Shape(4096, 14336, 64, 16, 64, 4096),
    "inflated 0.4B": Shape(896, 4864, 16, 4, 64, 4096),
    "the smallest": Shape(32, 32, 1, 1, 16, 64),
    "odd multiples": Shape(96, 352, 3, 1, 32, 1000),
}


class Matrix(NamedTuple):
    """num_matrices of them, [num_columns, num_channels] each, in one kernel."""

    num_columns: int
    num_channels: int
    tiles: Tiles
    num_matrices: int = 1


def matrices(shape: Shape) -> dict[str, Matrix]:
    hidden, inter = shape.hidden, shape.intermediate
    queries = shape.num_heads * shape.head_size
    columns = queries + 2 * shape.num_kv_heads * shape.head_size
    most = min(shape.head_size, 64)
    return {
        "qkv": Matrix(columns, hidden, qkv_tiles(columns, hidden, most=most)),
        "dense": Matrix(hidden, queries, add_tiles(hidden, queries)),
        "mlp_in": Matrix(inter, hidden, gated_tiles(inter, hidden), 2),
        "mlp_out": Matrix(hidden, inter, add_tiles(hidden, inter)),
    }


EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def is_power_of_2(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


@EVERY_SHAPE
def test_tiles_divide_every_known_matrix(shape: Shape) -> None:
    for name, (num_columns, num_channels, tiles, _) in matrices(shape).items():
        assert num_columns % tiles.block_n == 0, name
        assert num_channels % (tiles.splits * tiles.block_c) == 0, name
        assert tiles.block_n >= 16 and is_power_of_2(tiles.block_n), name
        assert tiles.block_c >= 16 and is_power_of_2(tiles.block_c), name


@EVERY_SHAPE
def test_what_is_read_ahead_of_time_is_within_a_part_of_the_channels(shape: Shape) -> None:
    for name, (_, num_channels, tiles, _) in matrices(shape).items():
        assert 0 < tiles.held + tiles.prefetch <= num_channels // tiles.splits, name


@EVERY_SHAPE
def test_each_warp_has_enough_channels_for_a_matrix_instruction(shape: Shape) -> None:
    for name, (_, _, tiles, _) in matrices(shape).items():
        assert tiles.ways in (1, tiles.num_warps), name
        assert is_power_of_2(tiles.ways) and tiles.ways <= 8, name
        assert (tiles.held or tiles.block_c) // tiles.ways >= 16, name
        assert tiles.held % tiles.ways == 0, name


@EVERY_SHAPE
def test_a_part_is_held_whole_or_not_at_all(shape: Shape) -> None:
    for name, (_, num_channels, tiles, _) in matrices(shape).items():
        assert tiles.held in (0, num_channels // tiles.splits), name
        assert tiles.held <= 1024, name


@EVERY_SHAPE
def test_columns_of_a_program_are_those_of_one_head(shape: Shape) -> None:
    assert shape.head_size % matrices(shape)["qkv"].tiles.block_n == 0


def shared_bytes(matrix: Matrix, tiles: Tiles, element_bytes: int) -> int:
    """Of blocks of weights, and of all rows' channels, each num_stages times; or of all held."""
    channels = tiles.num_stages * tiles.block_c
    if tiles.held:
        each = tiles.held // tiles.ways
        channels = tiles.ways * next(1 << n for n in range(20) if 1 << n >= each)
    return (matrix.num_matrices * tiles.block_n + ROWS) * channels * element_bytes


@pytest.mark.parametrize("element_bytes", [2, 4], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("limit", [HOPPER, ADA], ids=["Hopper", "Ada"])
@EVERY_SHAPE
def test_blocks_under_way_fit_in_shared_memory(
    shape: Shape, limit: int, element_bytes: int
) -> None:
    for name, matrix in matrices(shape).items():
        tiles = matrix.tiles.fitting(
            limit, element_bytes=element_bytes, num_matrices=matrix.num_matrices
        )
        assert tiles.num_stages >= 1, name
        assert shared_bytes(matrix, tiles, element_bytes) <= limit, name


@EVERY_SHAPE
def test_hopper_holds_all_blocks_in_bfloat16(shape: Shape) -> None:
    for name, (_, _, tiles, num_matrices) in matrices(shape).items():
        assert tiles.fitting(HOPPER, element_bytes=2, num_matrices=num_matrices) == tiles, name


def test_fewer_blocks_are_under_way_where_there_is_no_room() -> None:
    tiles = add_tiles(4096, 4096)
    assert tiles.num_stages == 6
    # (64 + 16) rows of 128 channels are 20 KB in bfloat16 and 40 KB in float32.
    assert tiles.fitting(HOPPER, element_bytes=4) == Tiles(64, 128, 2, 4, 5, 512)
    assert tiles.fitting(ADA, element_bytes=2) == Tiles(64, 128, 2, 4, 4, 512)
    assert tiles.fitting(ADA, element_bytes=4) == Tiles(64, 128, 2, 4, 2, 512)
    assert tiles.fitting(1024, element_bytes=4) == Tiles(64, 128, 2, 4, 1, 512)


@EVERY_SHAPE
@pytest.mark.parametrize("limit", [HOPPER, ADA], ids=["Hopper", "Ada"])
def test_wide_tiles_add_up_as_narrow_ones_do(shape: Shape, limit: int) -> None:
    most = {"qkv": min(shape.head_size, 64)}
    for name, matrix in matrices(shape).items():
        sizes = {"element_bytes": 2, "num_matrices": matrix.num_matrices}
        narrow = matrix.tiles.fitting(limit, **sizes)
        for width in WIDTHS[1:]:
            wide = wide_tiles(narrow, width, matrix.num_columns, most=most.get(name, 64))
            wide = wide.fitting(limit, **sizes)
            of_a_sum = [(t.splits, t.ways, t.held, t.summed or t.block_n) for t in (narrow, wide)]
            assert of_a_sum[0] == of_a_sum[1], name
            assert width % wide.rows == 0, name
            assert matrix.num_columns % wide.block_n == wide.block_n % narrow.block_n == 0, name
            assert matrix.num_channels % (wide.splits * wide.block_c) == 0, name
            block = matrix.num_matrices * wide.block_n + wide.rows
            if not wide.held:
                assert wide.num_stages * wide.block_c * block * 2 <= limit, name


def test_blocks_that_are_added_by_themselves_are_as_long_in_wide_launches() -> None:
    for kind, block in (("fp8", 0), ("int4", 256)):
        narrow = add_tiles(4096, 14336, kind=kind, block=block)
        assert wide_tiles(narrow, 128, 4096, kind=kind).block_c == narrow.block_c == 256


def test_nothing_is_held_where_it_takes_more_than_half_of_the_room() -> None:
    tiles = add_tiles(896, 896)
    assert tiles == Tiles(32, 128, 1, 8, 4, 0, 8, 896)
    # (32 + 16) rows, of 8 · 128 channels: 96 KB in bfloat16, 192 KB in float32.
    assert tiles.fitting(HOPPER, element_bytes=2) == tiles
    assert tiles.fitting(HOPPER, element_bytes=4) == Tiles(32, 128, 1, 8, 4, 0, 8, 0)
    assert tiles.fitting(ADA, element_bytes=2) == Tiles(32, 128, 1, 8, 4, 0, 8, 0)


def test_the_tiles_that_were_timed() -> None:
    assert {name: m.tiles for name, m in matrices(SHAPES["inflated 7B"]).items()} == {
        "qkv": Tiles(64, 128, 1, 4, 6, 512),
        "dense": Tiles(64, 128, 2, 4, 6, 512),
        "mlp_in": Tiles(64, 128, 1, 4, 4, 128),
        "mlp_out": Tiles(64, 128, 2, 4, 6, 512),
    }
    assert {name: m.tiles for name, m in matrices(SHAPES["inflated 0.4B"]).items()} == {
        "qkv": Tiles(32, 64, 1, 4, 4, 0, 4, 896),
        "dense": Tiles(32, 128, 1, 8, 4, 0, 8, 1024),
        "mlp_in": Tiles(64, 64, 1, 4, 8, 256),
        "mlp_out": Tiles(64, 64, 4, 4, 12, 256),
    }


def test_columns_that_fill_some_processors_twice_are_divided_further() -> None:
    """128 programs fill an H100's 132 processors once, 160 do not twice."""
    assert add_tiles(4096, 4096).splits == 2
    assert add_tiles(5120, 4096) == Tiles(32, 128, 4, 4, 6, 512)
    assert add_tiles(5120, 29184) == Tiles(32, 128, 4, 4, 6, 512)
    assert add_tiles(8192, 28672).splits == 2


def test_parts_of_channels_that_do_not_divide_become_fewer() -> None:
    # 5200 = 2 · 2600, and 2600 is not divisible by 16.
    assert add_tiles(5120, 5200).splits == 1
    assert add_tiles(5120, 5200).block_c == 16


@pytest.mark.parametrize(
    ("size", "most", "divisor"), [(4864, 64, 64), (96, 64, 32), (80, 512, 16), (7, 8, 1)]
)
def test_largest_divisor(size: int, most: int, divisor: int) -> None:
    assert largest_divisor(size, most) == divisor
