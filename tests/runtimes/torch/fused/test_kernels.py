"""Each kernel against a plain reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specpipe.runtimes.torch.fused import kernels
from specpipe.runtimes.torch.fused.kernels import CHUNK, ROWS
from specpipe.runtimes.torch.fused.products import KINDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter has no matrix product in bfloat16.
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
EPSILON = 1e-5
PAGE = 16
PLAIN = KINDS["plain"]
UNUSED = torch.full((1,), torch.nan, device=DEVICE)
"""For what a kernel is given only with quantized weights: test_quantized.py."""

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    # Of the interpreter: NumPy says what is masked afterwards, and what it will not do one day.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """What must be written before it is read."""
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())


def launch(kernel: object, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    pdl = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    options = {"launch_pdl": True} if pdl else {}
    kernel[grid](*arguments, **constants, PDL=pdl, **options)  # type: ignore[index]


def squares_of(hidden: Tensor, num_parts: int) -> Tensor:
    """The sums of squares that go with hidden states [R, C], [parts, ROWS]."""
    blocks = hidden.float().square().unflatten(1, (num_parts, -1)).sum(-1)
    out = torch.zeros(num_parts, ROWS, device=DEVICE)
    out[:, : len(hidden)] = blocks.t()
    return out


def normed(hidden: Tensor, gain: Tensor) -> Tensor:
    hidden = hidden.double()
    length = (hidden.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    return hidden / length * gain.double()


def turned(x: Tensor, rotations: Tensor) -> Tensor:
    """Pairs of channels [..., D] turned by rotations [..., D / 2, 2]."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    turns = torch.view_as_complex(rotations.double().contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


@pytest.mark.parametrize("by_position", [False, True])
def test_embed(dtype: torch.dtype, by_position: bool) -> None:
    table, gain = random(50, 48, dtype=dtype), random(48, dtype=dtype, seed=1)
    hidden, scaled = poisoned(4, 48, dtype=dtype), poisoned(4, 48, dtype=dtype)
    squares = torch.zeros(1, ROWS, device=DEVICE)
    tokens = integers(7, 3, 49, 0, 11)
    launch(
        kernels.embed, (4,), tokens, integers(2, 4, -1, 1), table, gain, hidden, scaled, squares,
        UNUSED, 2.0, C=48, BLOCK_C=32, ROWS=ROWS, BY_POSITION=by_position, NEXT=PLAIN,
    )  # fmt: skip
    rows = [49, 11, 3] if by_position else [7, 3, 0]
    wanted = 2.0 * table[rows]
    assert torch.equal(hidden[[0, 1, 3]], wanted)
    assert hidden[2].isnan().all()  # a row below position 0 is kept nowhere
    assert error(scaled[[0, 1, 3]], wanted.double() * gain.double()) < TOLERANCE[dtype]
    assert error(squares[0, [0, 1, 3]], wanted.double().square().sum(-1)) < 1e-5


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("block_n", "block_c"), [(16, 32), (32, 64)])
def test_rotary_linear(dtype: torch.dtype, block_n: int, block_c: int, has_bias: bool) -> None:
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
        2, 3, EPSILON, 1.0,
        C=channels, H=num_heads, H_KV=num_kv_heads, D=head_size, PAGE=PAGE, BLOCK_N=block_n,
        BLOCK_C=block_c, PARTS=4, ROWS=ROWS, PREFETCH=block_c, HAS_BIAS=has_bias, TURNS=True,
        GROUP=0, KIND=PLAIN,
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
def test_turn_heads(dtype: torch.dtype, has_norm: bool) -> None:
    num_heads, num_kv_heads, head_size = 4, 2, 16
    qkv = random(2, (num_heads + 2 * num_kv_heads) * head_size, dtype=dtype)
    gains = [random(head_size, dtype=dtype, seed=seed) for seed in (1, 2)]
    rotations = random(40, head_size // 2, 2, dtype=torch.float32, seed=4)
    keys = poisoned(6, num_kv_heads, PAGE, head_size, dtype=dtype)
    values = keys.clone()
    query = poisoned(2, num_heads * head_size, dtype=dtype)
    launch(
        kernels.turn_heads, (2, num_heads + 2 * num_kv_heads),
        qkv, *gains, rotations, query, keys, values, integers(0, 4).view(1, 2),
        integers(3, 17), integers(0, 0), 2, EPSILON,
        H=num_heads, H_KV=num_kv_heads, D=head_size, PAGE=PAGE, HAS_NORM=has_norm,
    )  # fmt: skip
    heads = qkv.unflatten(1, (-1, head_size)).double()
    raw_values = heads[:, -num_kv_heads:]
    if has_norm:
        heads = torch.cat(
            [normed(heads[:, :num_heads], gains[0]), normed(heads[:, num_heads:], gains[1])], 1
        )
    out = turned(heads, rotations[[3, 17]][:, None].expand(-1, heads.shape[1], -1, -1))
    assert error(query, out[:, :num_heads].flatten(1)) < TOLERANCE[dtype]
    for row, (page, place) in enumerate([(0, 3), (4, 1)]):
        assert error(keys[page, :, place], out[row, num_heads:-num_kv_heads]) < TOLERANCE[dtype]
        assert torch.equal(values[page, :, place].double(), raw_values[row])


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("head_size", [32, 64])
@pytest.mark.parametrize(
    ("positions", "group", "queries"),
    [((5,), 1, 16), ((126, 127, 128, 129), 4, 16), (tuple(range(250, 259)), 9, 16)],
)
def test_attention(
    dtype: torch.dtype,
    positions: tuple[int, ...],
    group: int,
    queries: int,
    head_size: int,
    window: int,
) -> None:
    num_heads, num_kv_heads, rows = 4, 2, len(positions)
    num_pages = -(-(positions[-1] + 1) // PAGE)
    keys = random(num_pages + 1, num_kv_heads, PAGE, head_size, dtype=dtype)
    values = random(num_pages + 1, num_kv_heads, PAGE, head_size, dtype=dtype, seed=1)
    table = [(i * 3) % num_pages + 1 if num_pages % 3 else i + 1 for i in range(num_pages)]
    query = random(rows, num_heads * head_size, dtype=dtype, seed=2)
    flat_keys, flat_values = (x[table].transpose(0, 1).flatten(1, 2) for x in (keys, values))
    last = positions[-1]
    for pool in (keys, values):  # stale, as a page that was another's before
        pool[0] = torch.nan
        pool[table[-1], :, last % PAGE + 1 :] = torch.nan
    out = poisoned(rows, num_heads * head_size, dtype=dtype)
    max_chunks = last // CHUNK + 2
    sums = poisoned(rows, num_heads, max_chunks, head_size, dtype=torch.float32)
    states = poisoned(rows, num_heads, max_chunks, 2, dtype=torch.float32)
    arrivals = torch.zeros(rows * num_heads, dtype=torch.int32, device=DEVICE)
    blocks = -(-group * (num_heads // num_kv_heads) // queries)
    launch(
        kernels.attention, (rows // group * blocks, num_kv_heads, max_chunks),
        query, keys, values, integers(*table)[None], integers(*positions), integers(*[0] * rows),
        UNUSED, out, UNUSED, sums, states, arrivals, num_pages, max_chunks, window, head_size**-0.5,
        group, rows, 1.0,
        H=num_heads, H_KV=num_kv_heads, D=head_size, PAGE=PAGE, ROWS=ROWS, CHUNK=CHUNK,
        QUERIES=queries, QUERY_BLOCKS=blocks, UNROLL=2, HEADS_BY_KV=False, HAS_GAIN=False,
        NEXT=PLAIN,
    )  # fmt: skip
    assert not arrivals.any()  # ready for the next launch
    for row, position in enumerate(positions):
        for head in range(num_heads):
            kv = head % num_kv_heads
            first = max(position - window + 1, 0) if window else 0
            seen = slice(first, position + 1)
            q = query[row].unflatten(0, (num_heads, head_size))[head].double()
            weights = (flat_keys[kv, seen].double() @ q * head_size**-0.5).softmax(0)
            wanted = weights @ flat_values[kv, seen].double()
            found = out[row].unflatten(0, (num_heads, head_size))[head]
            assert error(found, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("block_n", [16, 64])
def test_add_linear(dtype: torch.dtype, block_n: int, splits: int, has_bias: bool) -> None:
    channels, columns, rows = 128, 64, 5
    x, weight = random(rows, channels, dtype=dtype), random(columns, channels, dtype=dtype, seed=1)
    bias, gain = random(columns, dtype=dtype, seed=2), random(columns, dtype=dtype, seed=3)
    before = random(rows, columns, dtype=dtype, seed=4)
    hidden, scaled = before.clone(), poisoned(rows, columns, dtype=dtype)
    num_parts = columns // block_n
    squares = poisoned(num_parts, ROWS, dtype=torch.float32)
    parts = poisoned(splits, columns, ROWS, dtype=torch.float32)
    arrivals = torch.zeros(num_parts, dtype=torch.int32, device=DEVICE)
    launch(
        kernels.add_linear, (num_parts, splits),
        x, UNUSED, weight, UNUSED, bias, gain, hidden, scaled, squares, UNUSED, parts, arrivals,
        rows, 0,
        N=columns, C=channels, BLOCK_N=block_n, BLOCK_C=32, SPLITS=splits, X_PEAKS=1, ROWS=ROWS,
        PREFETCH=32, HAS_BIAS=has_bias, GROUP=0, KIND=PLAIN, NEXT=PLAIN,
    )  # fmt: skip
    assert not arrivals.any()
    product = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
    assert error(hidden, before.double() + product) < TOLERANCE[dtype]
    assert error(scaled, hidden.double() * gain.double()) < TOLERANCE[dtype]
    assert error(squares[:, :rows], squares_of(hidden, num_parts)[:, :rows]) < 1e-5


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("block_n", [16, 64])
def test_gated_linear(dtype: torch.dtype, block_n: int, activation: str, has_bias: bool) -> None:
    channels, columns, rows = 64, 64, 4
    hidden, gain = random(rows, channels, dtype=dtype), random(channels, dtype=dtype, seed=1)
    weight = random(2 * columns, channels, dtype=dtype, seed=2, scale=0.2)
    bias = random(2 * columns, dtype=dtype, seed=3)
    out = poisoned(rows, columns, dtype=dtype)
    launch(
        kernels.gated_linear, (columns // block_n,),
        (hidden.float() * gain.float()).to(dtype), squares_of(hidden, 4), UNUSED, weight, UNUSED,
        bias, UNUSED, out, UNUSED, rows, 4, EPSILON, 1.0, 1.0,
        N=columns, C=channels, BLOCK_N=block_n, BLOCK_C=32, PARTS=4, ROWS=ROWS, PREFETCH=32,
        HAS_BIAS=has_bias, ACTIVATION=kernels.ACTIVATIONS[activation], HAS_GAIN=False, GROUP=0,
        KIND=PLAIN, NEXT=PLAIN,
    )  # fmt: skip
    product = normed(hidden, gain) @ weight.double().t() + (bias.double() if has_bias else 0.0)
    fc, gate = product.chunk(2, dim=1)
    if activation == "silu":
        wanted = torch.nn.functional.silu(fc) * gate
    else:
        wanted = torch.nn.functional.gelu(fc, approximate="tanh") * gate
    assert error(out, wanted) < 1.5 * TOLERANCE[dtype]


def test_score(dtype: torch.dtype) -> None:
    channels, vocab_size, rows, block_n = 64, 100, 3, 64
    hidden, gain = random(rows + 1, channels, dtype=dtype), random(channels, dtype=dtype, seed=1)
    weight = random(vocab_size, channels, dtype=dtype, seed=2)
    weight[60] = weight[30]  # equal logits, in different blocks: the lower id is the best
    is_unused = torch.zeros(vocab_size, dtype=torch.uint8, device=DEVICE)
    is_unused[10:20] = 1
    best = poisoned(2, ROWS, dtype=torch.float32)
    best_ids = torch.full((2, ROWS), -1, dtype=torch.int32, device=DEVICE)
    logits = poisoned(rows, vocab_size, dtype=torch.float32)
    launch(
        kernels.score, (2,),
        (hidden.float() * gain.float()).to(dtype), squares_of(hidden, 4), UNUSED, weight, UNUSED,
        is_unused, logits, best, best_ids, 1, rows, 4, 90, EPSILON, 1.0,
        V=vocab_size, C=channels, BLOCK_N=block_n, BLOCK_C=32, PARTS=4, ROWS=ROWS, PREFETCH=32,
        HAS_UNUSED=True, WRITES_LOGITS=True, GROUP=0, KIND=PLAIN,
    )  # fmt: skip
    wanted = normed(hidden[1:], gain) @ weight.double().t()
    assert error(logits, wanted) < TOLERANCE[dtype]
    usable = logits.clone()
    usable[:, 10:20] = -torch.inf
    usable[:, 90:] = -torch.inf
    for block, columns in enumerate((slice(0, 64), slice(36, 100))):
        top = usable[:, columns].max(-1).values
        assert torch.equal(best[block, :rows], top)
        is_top = usable[:, columns] == top[:, None]
        first = is_top.int().argmax(-1) + columns.start
        assert best_ids[block, :rows].tolist() == first.tolist()


def scored(*rows: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    """best and best_ids of two blocks, from (logit, id) of each row's blocks."""
    best = torch.full((2, ROWS), -torch.inf, device=DEVICE)
    ids = torch.zeros(2, ROWS, dtype=torch.int32, device=DEVICE)
    for row, blocks in enumerate(rows):
        for block, (value, token_id) in enumerate(blocks):
            best[block, row], ids[block, row] = value, token_id
    return best, ids


def test_propose_takes_the_lowest_of_equal_ids(dtype: torch.dtype) -> None:
    best, ids = scored([(1.5, 4), (1.5, 90)])
    history = integers(*range(100, 110))
    launch(kernels.propose, (1,), best, ids, history, integers(6), 2, ROWS=ROWS, BLOCKS=4)
    assert history.tolist() == [100, 101, 102, 103, 104, 105, 106, 4, 108, 109]


NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "drafted", "result", "history"),
    [
        # Both draft tokens are the target's own: they and one more are emitted.
        ([[(1.0, 7), (0.0, 70)], [(0.0, 8), (1.0, 80)], [(2.0, 9), (1.0, 90)]], [7, 80],
         [3, 2, 7, 80, 9], [7, 80, 9]),
        # The first is not.
        ([[(1.0, 7), (0.0, 70)], [(0.0, 8), (1.0, 80)], [(2.0, 9), (1.0, 90)]], [6, 80],
         [1, 2, 7], [7, 80]),
        # The second is not.
        ([[(1.0, 7), (0.0, 70)], [(0.0, 8), (1.0, 80)], [(2.0, 9), (1.0, 90)]], [7, 8],
         [2, 2, 7, 80], [7, 80]),
        # A row with a NaN counts for nothing, nor do those behind it.
        ([[(1.0, 7), (0.0, 70)], [(NAN, 8), (1.0, 80)], [(2.0, 9), (1.0, 90)]], [7, 80],
         [1, 0, 7], [7, 80]),
        ([[(NAN, 7), (0.0, 70)], [(0.0, 8), (1.0, 80)], [(2.0, 9), (1.0, 90)]], [7, 80],
         [0, 0], [7, 80]),
    ],
)  # fmt: skip
def test_accept(
    dtype: torch.dtype,
    rows: list[list[tuple[float, int]]],
    drafted: list[int],
    result: list[int],
    history: list[int],
) -> None:
    best, ids = scored(*rows)
    tokens = integers(50, 51, 52, *drafted, 0, 0, 0)
    positions = torch.arange(-2, 14, dtype=torch.int32, device=DEVICE)  # 2 stands at FIRST
    found = integers(*[-1] * (2 + ROWS))
    launch(
        kernels.accept, (1,), best, ids, tokens, positions, found, 2,
        NUM_DRAFT=2, FIRST=4, NUM_POSITIONS=16, ROWS=ROWS, BLOCKS=4,
    )  # fmt: skip
    assert found.tolist()[: len(result)] == result
    assert tokens.tolist()[3 : 3 + len(history)] == history
    num_emitted = result[0]
    assert positions.tolist() == list(range(-2 + num_emitted, 14 + num_emitted))
