"""Each kernel against a plain reference in float64."""

from __future__ import annotations

import pytest
import torch

from specpipe.runtimes.torch.fused import kernels
from specpipe.runtimes.torch.fused_sizes import ROWS
from tests.runtimes.torch.fused.kernel_inputs import (
    DEVICE,
    DTYPES,
    EPSILON,
    PAGE,
    PLAIN,
    TOLERANCE,
    UNUSED,
    error,
    integers,
    launch,
    normed,
    poisoned,
    random,
    squares_of,
    turned,
)

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    # Of the interpreter: NumPy says what is masked afterwards, and what it will not do one day.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]


@pytest.mark.parametrize("has_texts", [False, True])
def test_embed(dtype: torch.dtype, has_texts: bool) -> None:
    table, gain = random(50, 48, dtype=dtype), random(48, dtype=dtype, seed=1)
    hidden, scaled = poisoned(4, 48, dtype=dtype), poisoned(4, 48, dtype=dtype)
    squares, blocks = torch.zeros(1, ROWS, device=DEVICE), integers(*[-1] * 20)
    tokens = integers(7, 3, 49, 0, 11, 5, 6, 8, 21, 13)  # by row, or two texts of five
    launch(
        kernels.embed, (5 if has_texts else 4,), tokens, integers(2, 4, -1, 1),
        integers(0, 1, 0, 1), integers(0, 0, 0, 0), table, gain, hidden, scaled, squares, blocks, 5,
        2.0, 4, 4, C=48, BLOCK_C=32, HAS_TEXTS=has_texts, WIDTH=ROWS, CHUNK=128,
        BLOCK=8,
    )  # fmt: skip
    # One program more than rows lists what attention is to do, of every row by itself here.
    listed = [3, -1, -1, -1, 0x100, 0, 2, -1, 0x101, 0, 4, -1, 0x103, 0, 1, -1, -1, -1, -1, -1]
    assert blocks.tolist() == (listed if has_texts else [-1] * 20)
    rows = [49, 13, 6] if has_texts else [7, 3, 0]
    wanted = 2.0 * table[rows]
    assert torch.equal(hidden[[0, 1, 3]], wanted)
    assert hidden[2].isnan().all()  # a row below position 0 is kept nowhere
    assert error(scaled[[0, 1, 3]], wanted.double() * gain.double()) < TOLERANCE[dtype]
    assert error(squares[0, [0, 1, 3]], wanted.double().square().sum(-1)) < 1e-5


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("block_n", "block_c", "ways", "held"),
    [(16, 32, 1, 0), (32, 64, 1, 0), (16, 16, 1, 48), (16, 32, 2, 0), (16, 32, 2, 64)],
)
def test_rotary_linear(
    dtype: torch.dtype, block_n: int, block_c: int, ways: int, held: int, has_bias: bool
) -> None:
    num_heads, num_kv_heads, head_size, channels, rows = 4, 2, 32, 64, 3
    columns = (num_heads + 2 * num_kv_heads) * head_size
    hidden, gain = random(rows, channels, dtype=dtype), random(channels, dtype=dtype, seed=1)
    weight = random(columns, channels, dtype=dtype, seed=2, scale=0.2)
    bias = random(columns, dtype=dtype, seed=3)
    rotations = random(40, head_size // 2, 2, dtype=torch.float32, seed=4)
    pages = integers(0, 0, 0, 5, 3, 1).view(2, 3)
    keys = poisoned(6, num_kv_heads, PAGE, head_size, dtype=dtype)
    values = keys.clone()
    query = poisoned(rows, num_heads * head_size, dtype=dtype)
    positions = [15, 16, 39]
    launch(
        kernels.rotary_linear, (columns // block_n,),
        (hidden.float() * gain.float()).to(dtype), squares_of(hidden, 2), UNUSED, weight, UNUSED,
        bias, rotations, query, keys, values, pages, integers(*positions), integers(1, 1, 1), rows,
        2, 3, EPSILON,
        C=channels, H=num_heads, H_KV=num_kv_heads, D=head_size, PAGE=PAGE, BLOCK_N=block_n,
        BLOCK_C=block_c, PARTS=4, ROWS=ROWS, WIDTH=ROWS, PREFETCH=block_c, HAS_BIAS=has_bias,
        TURNS=True,
        GROUP=0, KIND=PLAIN, WAYS=ways, HELD=held,
    )  # fmt: skip
    product = normed(hidden, gain) @ weight.double().t() + (bias.double() if has_bias else 0.0)
    heads = product.unflatten(1, (-1, head_size))
    turns = rotations[positions][:, None]
    wanted = turned(heads[:, :num_heads], turns.expand(-1, num_heads, -1, -1))
    assert error(query, wanted.flatten(1)) < TOLERANCE[dtype]
    wanted = turned(heads[:, num_heads:-num_kv_heads], turns.expand(-1, num_kv_heads, -1, -1))
    for row, (page, place) in enumerate([(5, 15), (3, 0), (1, 7)]):
        assert error(keys[page, :, place], wanted[row]) < TOLERANCE[dtype]
        assert error(values[page, :, place], heads[row, -num_kv_heads:]) < TOLERANCE[dtype]
    assert int((~keys.isnan()).sum()) == rows * num_kv_heads * head_size  # and nothing else


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_turn_heads(dtype: torch.dtype, has_norm: bool, rows: int) -> None:
    num_heads, num_kv_heads, head_size = 4, 2, 16
    qkv = random(4, (num_heads + 2 * num_kv_heads) * head_size, dtype=dtype)
    gains = [random(head_size, dtype=dtype, seed=seed) for seed in (1, 2)]
    rotations = random(40, head_size // 2, 2, dtype=torch.float32, seed=4)
    keys = poisoned(6, num_kv_heads, PAGE, head_size, dtype=dtype)
    values = keys.clone()
    query = poisoned(4, num_heads * head_size, dtype=dtype)
    launch(
        kernels.turn_heads, (4 // rows, num_heads + 2 * num_kv_heads),
        qkv, *gains, rotations, query, keys, values, integers(0, 4).view(1, 2),
        integers(3, -1, 17, -1), integers(0, 0, 0, 0), 2, EPSILON,
        H=num_heads, H_KV=num_kv_heads, D=head_size, PAGE=PAGE, ROWS=rows, HAS_NORM=has_norm,
    )  # fmt: skip
    assert query[[1, 3]].isnan().all()
    heads = qkv[[0, 2]].unflatten(1, (-1, head_size)).double()
    raw_values = heads[:, -num_kv_heads:]
    if has_norm:
        heads = torch.cat(
            [normed(heads[:, :num_heads], gains[0]), normed(heads[:, num_heads:], gains[1])], 1
        )
    out = turned(heads, rotations[[3, 17]][:, None].expand(-1, heads.shape[1], -1, -1))
    assert error(query[[0, 2]], out[:, :num_heads].flatten(1)) < TOLERANCE[dtype]
    for row, (page, place) in enumerate([(0, 3), (4, 1)]):
        assert error(keys[page, :, place], out[row, num_heads:-num_kv_heads]) < TOLERANCE[dtype]
        assert torch.equal(values[page, :, place].double(), raw_values[row])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(
    ("block_n", "ways", "held", "tile_rows", "width"),
    [(16, 1, 0, 16, 16), (64, 1, 0, 32, 32), (32, 1, 96, 16, 16), (16, 2, 0, 16, 16),
     (16, 4, 192, 16, 32)],
)  # fmt: skip
def test_add_linear(
    dtype: torch.dtype,
    block_n: int,
    ways: int,
    held: int,
    tile_rows: int,
    width: int,
    splits: int,
    has_bias: bool,
) -> None:
    channels, columns, rows = 192 * splits, 64, width - 11
    x, weight = random(rows, channels, dtype=dtype), random(columns, channels, dtype=dtype, seed=1)
    bias, gain = random(columns, dtype=dtype, seed=2), random(columns, dtype=dtype, seed=3)
    before = random(rows, columns, dtype=dtype, seed=4)
    hidden, scaled = before.clone(), poisoned(rows, columns, dtype=dtype)
    num_blocks, num_parts, row_blocks = columns // block_n, columns // 16, width // tile_rows
    squares = poisoned(num_parts, width, dtype=torch.float32)
    parts = poisoned(splits, width, columns, dtype=torch.float32)
    arrivals = torch.zeros(row_blocks * num_blocks, dtype=torch.int32, device=DEVICE)
    launch(
        kernels.add_linear, (num_blocks, splits, row_blocks),
        x, UNUSED, weight, UNUSED, bias, gain, hidden, scaled, squares, parts, arrivals, rows,
        N=columns, C=channels, BLOCK_N=block_n, BLOCK_C=32, SPLITS=splits,
        SUMMED=16, ROWS=tile_rows, WIDTH=width, WAYS=ways, HELD=held, PREFETCH=32,
        HAS_BIAS=has_bias, GROUP=0, KIND=PLAIN,
    )  # fmt: skip
    assert not arrivals.any()
    product = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
    assert error(hidden, before.double() + product) < TOLERANCE[dtype]
    assert error(scaled, hidden.double() * gain.double()) < TOLERANCE[dtype]
    assert error(squares[:, :rows], squares_of(hidden, num_parts, width)[:, :rows]) < 1e-5


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(
    ("block_n", "ways", "held"), [(16, 1, 0), (64, 1, 0), (16, 2, 0), (16, 2, 64), (16, 8, 96)]
)
def test_gated_linear(
    dtype: torch.dtype, block_n: int, ways: int, held: int, activation: str, has_bias: bool
) -> None:
    channels, columns, rows = 96, 64, 4
    hidden, gain = random(rows, channels, dtype=dtype), random(channels, dtype=dtype, seed=1)
    weight = random(2 * columns, channels, dtype=dtype, seed=2, scale=0.2)
    bias = random(2 * columns, dtype=dtype, seed=3)
    out = poisoned(rows, columns, dtype=dtype)
    launch(
        kernels.gated_linear, (columns // block_n,),
        (hidden.float() * gain.float()).to(dtype), squares_of(hidden, 4), UNUSED, weight, UNUSED,
        bias, out, out, rows, 4, EPSILON, 1.0,
        N=columns, C=channels, BLOCK_N=block_n, BLOCK_C=max(32, 16 * ways), PARTS=4, ROWS=ROWS,
        WIDTH=ROWS, PREFETCH=32, HAS_BIAS=has_bias, ACTIVATION=kernels.ACTIVATIONS[activation],
        HAS_GAIN=False, GROUP=0, KIND=PLAIN, NEXT=PLAIN, WAYS=ways, HELD=held,
    )  # fmt: skip
    product = normed(hidden, gain) @ weight.double().t() + (bias.double() if has_bias else 0.0)
    fc, gate = product.chunk(2, dim=1)
    if activation == "silu":
        wanted = torch.nn.functional.silu(fc) * gate
    else:
        wanted = torch.nn.functional.gelu(fc, approximate="tanh") * gate
    assert error(out, wanted) < 1.5 * TOLERANCE[dtype]
