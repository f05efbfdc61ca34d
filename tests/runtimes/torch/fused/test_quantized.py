"""Quantized weights: each kernel against float64, and whole engines against the emulated ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe.checkpoints.unified import load_unified
from specpipe.runtimes.torch.engine import TorchEngine, TorchEngineSpec
from specpipe.runtimes.torch.engine import load_weights as load_tensors
from specpipe.runtimes.torch.fused import attention, kernels, prompt_kernels, scoring
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.linear import UNPACKED, Kind, Linear, int4_block, packed
from specpipe.runtimes.torch.fused.products import KINDS
from specpipe.runtimes.torch.fused.tiles import (
    Tiles,
    add_tiles,
    gated_tiles,
    linear_tiles,
    wide_tiles,
)
from specpipe.runtimes.torch.fused.weights import load_weights, unsupported
from specpipe.runtimes.torch.fused_sizes import ROWS, WIDTHS
from specpipe.runtimes.torch.kernel_choice import Kernel
from specpipe.runtimes.torch.layout import write_weights
from tests.quantization.checkpoints import quantized_checkpoint
from tests.runtimes.torch.engines import build_engine
from tests.runtimes.torch.fused.kernel_inputs import (
    DEVICE,
    DTYPES,
    EPSILON,
    TOLERANCE,
    UNUSED,
    error,
    integers,
    launch,
    poisoned,
    random,
    squares_of,
)
from tests.runtimes.torch.fused.test_tiles import EVERY_SHAPE, Shape
from tests.runtimes.torch.fused.toy import toy_config, toy_weights
from tests.runtimes.torch.test_engine import difference

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def interpreter_rounds_to_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter loses what rounds up to a power of 2, subnormals, and saturation."""
    if DEVICE == "cuda":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def exact(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target == tl.float8e4nv:
            codes = torch.from_numpy(x).float().clamp(-448, 448).to(torch.float8_e4m3fn)
            return codes.view(torch.uint8).numpy()
        if source == tl.float8e4nv:
            return torch.from_numpy(x).view(torch.float8_e4m3fn).half().numpy().view("uint16")
        return convert(x, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", exact)


Case = tuple[Kind, int]
"""A kind and how many channels share a scale; 0: all."""

CASES: list[Case] = [
    ("fp8", 0),
    ("fp8_per_token", 0),
    ("int8", 0),
    ("int4", 0),
    ("int4", 32),  # two groups in a block of packed numbers
    ("int4", 128),  # two blocks in a group
]
EVERY_CASE = pytest.mark.parametrize(("kind", "group"), CASES)
INPUT_SCALE = 0.01
BLOCK_N = [32, 64] if DEVICE == "cuda" else [32]
"""Of which the second is another matrix instruction."""


def tolerance(dtype: torch.dtype, kind: Kind) -> float:
    """What Hopper's instruction for e4m3 loses of a sum, products.py, is more than float32 does."""
    if DEVICE == "cuda" and kind in ("fp8", "fp8_per_token"):
        return max(1e-3, TOLERANCE[dtype])
    return TOLERANCE[dtype]


def linear_of(
    kind: Kind, group: int, num_columns: int, num_channels: int, *, block: int = 0
) -> tuple[Linear, Tensor]:
    """A random linear without bias, and its matrix in float64 [N, C]."""
    num_groups = num_channels // group if group else 1
    scale = 0.01 + random(num_groups, num_columns, dtype=torch.float32, seed=1).abs() / 100
    if kind in ("fp8", "fp8_per_token"):
        weight = random(num_columns, num_channels, dtype=torch.float32, scale=4.0)
        codes = weight = weight.to(torch.float8_e4m3fn)
        block = 0
    else:
        most = 127 if kind == "int8" else 7
        weight = random(num_columns, num_channels, dtype=torch.float32, scale=most / 2)
        codes = weight = weight.round().clamp(-most - 1, most).to(torch.int8)
        if kind == "int4":
            block = block or int4_block(num_channels, group)
            weight = packed(codes, block)
        else:
            block = 0
    rows = scale.t().double().repeat_interleave(num_channels // num_groups, 1)
    matrix = codes.double() * rows
    input_scale = 1.0
    if kind == "fp8":
        input_scale = INPUT_SCALE
        scale = scale * INPUT_SCALE
    if not group:
        scale = scale[0]
    return Linear(weight, None, kind, scale, input_scale, block=block), matrix


def rounded(x: Tensor, kind: Kind) -> Tensor:
    """What a linear of a kind multiplies by, of inputs [R, C]; float64."""
    if kind == "fp8":
        scale = torch.full((len(x), 1), INPUT_SCALE, dtype=torch.float64, device=x.device)
    elif kind == "fp8_per_token":
        scale = x.double().abs().amax(1, keepdim=True) / 448
    else:
        return x.double()
    codes = (x.double() / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return codes.double() * scale


def normed(scaled: Tensor, hidden: Tensor) -> Tensor:
    length = (hidden.double().square().mean(-1, keepdim=True) + EPSILON).sqrt()
    return scaled.double() / length


def as_kernels_take(
    x: Tensor, linear: Linear, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs of a linear [R, C], rounded if they have to be, and their scales by row.

    hidden  the states that x is without its RMSNorm; None: it has none
    """
    if not linear.rounds:
        return x, UNUSED
    channels, num_parts = x.shape[1], 3
    squares = UNUSED
    if hidden is not None:
        squares = poisoned(4, ROWS, dtype=torch.float32)
        squares[:3] = squares_of(torch.nn.functional.pad(hidden, (0, -channels % 3)), num_parts)
    out = poisoned(*x.shape, dtype=torch.float8_e4m3fn)
    row_scales = poisoned(ROWS, dtype=torch.float32)
    launch(
        kernels.round_input, (len(x),),
        x, squares, out, row_scales, num_parts, EPSILON, linear.input_scale,
        C=channels, BLOCK_C=1 << (channels - 1).bit_length(), PARTS=4, WIDTH=ROWS,
        HAS_NORM=hidden is not None, KIND=KINDS[linear.kind],
    )  # fmt: skip
    return out, row_scales


@EVERY_DTYPE
@pytest.mark.parametrize("kind", ["fp8", "fp8_per_token"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_round_input(dtype: torch.dtype, kind: Kind, has_norm: bool) -> None:
    channels = 96
    hidden = random(3, channels, dtype=dtype)
    hidden[1, 7] = 60.0  # with the static scale it is beyond 448
    hidden[2] = 0.0
    linear, _ = linear_of(kind, 0, 16, channels)
    found, row_scales = as_kernels_take(hidden, linear, hidden if has_norm else None)
    wanted = rounded(normed(hidden, hidden) if has_norm else hidden, kind)
    wanted[2] = 0.0
    if kind == "fp8":
        scale = torch.full((3, 1), INPUT_SCALE, device=DEVICE)
        assert row_scales.isnan().all()
    else:
        scale = row_scales[:3, None]
    # In bfloat16 some numbers lie between two of e4m3, and 448 / peak is rounded before it is used.
    most = 2e-3 if dtype == torch.bfloat16 and kind == "fp8_per_token" else 1e-6
    assert error(found.float() * scale, wanted) < most
    assert not found[2].float().any()


def test_int4_numbers_are_packed_by_halves_of_a_block() -> None:
    codes = (torch.arange(2 * 64).reshape(2, 64) % 16 - 8).to(torch.int8)
    bytes_ = packed(codes, 32)
    assert bytes_.shape == (2, 32)
    assert bytes_[0, 0] == 0 | 0 << 4  # channels 0 and 16, both -8
    assert bytes_[0, 16] == 0 | 0 << 4
    assert bytes_[0, 5] == 5 | 5 << 4
    assert bytes_[1, 16 + 15] == 15 | 15 << 4


@pytest.mark.parametrize(
    ("num_channels", "group", "block"),
    [(4096, 0, 256), (4096, 128, 256), (4096, 32, 64), (896, 128, 128), (96, 32, 32)],
)
def test_no_half_of_an_int4_block_lies_in_two_groups(
    num_channels: int, group: int, block: int
) -> None:
    assert int4_block(num_channels, group) == block


@EVERY_DTYPE
@EVERY_CASE
def test_rotary_linear(dtype: torch.dtype, kind: Kind, group: int) -> None:
    """Its product; test_kernels.py has what comes behind it."""
    channels, columns, rows = 256, 64, 3
    hidden, gain = random(rows, channels, dtype=dtype), random(channels, dtype=dtype, seed=1)
    linear, matrix = linear_of(kind, group, columns, channels)
    scaled = (hidden.float() * gain.float()).to(dtype)
    out = poisoned(rows, columns, dtype=dtype)
    x, row_scales = as_kernels_take(scaled, linear, hidden)
    launch(
        kernels.rotary_linear, (columns // 32,),
        x, squares_of(hidden, 2), row_scales, linear.weight, linear.scale, gain, UNUSED, out,
        UNUSED, UNUSED, integers(0).view(1, 1), integers(0, 1, 2), integers(0, 0, 0), rows, 2, 1,
        EPSILON,
        C=channels, H=2, H_KV=1, D=16, PAGE=16, BLOCK_N=32, BLOCK_C=linear.block or 128, PARTS=2,
        ROWS=ROWS, WIDTH=ROWS, PREFETCH=64, HAS_BIAS=False, TURNS=False, GROUP=group,
        KIND=KINDS[kind],
    )  # fmt: skip
    assert error(out, rounded(normed(scaled, hidden), kind) @ matrix.t()) < TOLERANCE[dtype]


@EVERY_DTYPE
@EVERY_CASE
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("block_n", BLOCK_N)
def test_add_linear(dtype: torch.dtype, kind: Kind, group: int, splits: int, block_n: int) -> None:
    channels, columns, rows = 256, 64, 5
    x, gain = random(rows, channels, dtype=dtype), random(columns, dtype=dtype, seed=3)
    block = min(int4_block(channels, group), channels // splits)
    linear, matrix = linear_of(kind, group, columns, channels, block=block)
    bias, before = random(columns, dtype=dtype, seed=5), random(rows, columns, dtype=dtype, seed=6)
    hidden, scaled = before.clone(), poisoned(rows, columns, dtype=dtype)
    num_blocks = columns // block_n
    squares = poisoned(num_blocks, ROWS, dtype=torch.float32)
    parts = poisoned(splits, columns, ROWS, dtype=torch.float32)
    arrivals = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    inputs, row_scales = as_kernels_take(x, linear)
    launch(
        kernels.add_linear, (num_blocks, splits),
        inputs, row_scales, linear.weight, linear.scale, bias, gain, hidden, scaled, squares,
        parts, arrivals, rows,
        N=columns, C=channels, BLOCK_N=block_n, BLOCK_C=block if kind == "int4" else 128,
        SPLITS=splits, SUMMED=block_n, ROWS=ROWS, WIDTH=ROWS, PREFETCH=64, HAS_BIAS=True,
        GROUP=group, KIND=KINDS[kind],
    )  # fmt: skip
    product = rounded(x, kind) @ matrix.t() + bias.double()
    assert error(hidden, before.double() + product) < tolerance(dtype, kind)
    assert error(scaled, hidden.double() * gain.double()) < TOLERANCE[dtype]


@EVERY_DTYPE
@EVERY_CASE
@pytest.mark.parametrize("following", ["plain", "fp8"])
@pytest.mark.parametrize("block_n", BLOCK_N)
def test_gated_linear(
    dtype: torch.dtype, kind: Kind, group: int, following: Kind, block_n: int
) -> None:
    channels, columns, rows = 256, 64, 4
    hidden, gain = random(rows, channels, dtype=dtype), random(channels, dtype=dtype, seed=1)
    linear, matrix = linear_of(kind, group, 2 * columns, channels)
    assert linear.scale is not None
    linear = replace(linear, scale=linear.scale / 16)
    scaled = (hidden.float() * gain.float()).to(dtype)
    out_gain = random(columns, dtype=dtype, seed=7)
    out_dtype = torch.float8_e4m3fn if following == "fp8" else dtype
    out = poisoned(rows, columns, dtype=out_dtype)
    x, row_scales = as_kernels_take(scaled, linear, hidden)
    launch(
        kernels.gated_linear, (columns // block_n,),
        x, squares_of(hidden, 4), row_scales, linear.weight, linear.scale, UNUSED, out_gain, out,
        rows, 4, EPSILON, INPUT_SCALE,
        N=columns, C=channels, BLOCK_N=block_n, BLOCK_C=linear.block or 128, PARTS=4, ROWS=ROWS,
        WIDTH=ROWS, PREFETCH=64, HAS_BIAS=False, ACTIVATION=kernels.ACTIVATIONS["silu"],
        HAS_GAIN=True, GROUP=group, KIND=KINDS[kind], NEXT=KINDS[following],
    )  # fmt: skip
    fc, gate = (rounded(normed(scaled, hidden), kind) @ matrix.t() / 16).chunk(2, dim=1)
    wanted = torch.nn.functional.silu(fc) * gate * out_gain.double()
    if following == "fp8":
        codes = (wanted / INPUT_SCALE).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        same = (codes.float() == out.float()).double().mean()
        if dtype == torch.bfloat16:
            assert same > 0.9
        else:
            assert same == 1 if tolerance(dtype, kind) == TOLERANCE[dtype] else same > 0.97
    else:
        assert error(out, wanted) < 2 * tolerance(dtype, kind)


@EVERY_DTYPE
@EVERY_CASE
def test_score(dtype: torch.dtype, kind: Kind, group: int) -> None:
    """Of the last row of every two."""
    channels, vocab_size, rows = 256, 100, 3
    hidden, gain = random(2 * rows, channels, dtype=dtype), random(channels, dtype=dtype, seed=1)
    linear, matrix = linear_of(kind, group, vocab_size, channels)
    scaled = (hidden.float() * gain.float()).to(dtype)
    best, logits = poisoned(2, ROWS, dtype=torch.float32), poisoned(rows, 100, dtype=torch.float32)
    best_ids = torch.full((2, ROWS), -1, dtype=torch.int32, device=DEVICE)
    x, row_scales = as_kernels_take(scaled, linear, hidden)
    launch(
        scoring.score, (2,),
        x, squares_of(hidden, 4), row_scales, linear.weight, linear.scale, UNUSED, logits, best,
        best_ids, 0, rows, 2, 1, 4, vocab_size, EPSILON,
        V=vocab_size, C=channels, BLOCK_N=64, BLOCK_C=linear.block or 128, PARTS=4, ROWS=ROWS,
        WIDTH=ROWS, OUT_WIDTH=ROWS, PICKS=True, PREFETCH=64, HAS_UNUSED=False, WRITES_LOGITS=True,
        GROUP=group, KIND=KINDS[kind],
    )  # fmt: skip
    wanted = rounded(normed(scaled, hidden)[1::2], kind) @ matrix.t()
    assert error(logits, wanted) < tolerance(dtype, kind)


@EVERY_DTYPE
@pytest.mark.parametrize("following", ["plain", "fp8"])
@pytest.mark.parametrize("heads_by_kv", [False, True])
def test_attention_readies_what_it_writes(
    dtype: torch.dtype, following: Kind, heads_by_kv: bool
) -> None:
    num_heads, num_kv_heads, head_size, rows = 4, 2, 16, 2
    size = num_heads * head_size
    query = random(rows, size, dtype=dtype)
    keys = random(1, num_kv_heads, 16, head_size, dtype=dtype, seed=1)
    values = random(1, num_kv_heads, 16, head_size, dtype=dtype, seed=2)
    gain = random(size, dtype=dtype, seed=3)
    out = poisoned(rows, size, dtype=torch.float8_e4m3fn if following == "fp8" else dtype)
    arrivals = torch.zeros(rows * num_heads, dtype=torch.int32, device=DEVICE)
    launch(
        attention.attention, (1, num_kv_heads, 1),
        query, keys, values, integers(0).view(1, 1), integers(8, 9), integers(0, 0), gain, out,
        poisoned(rows, num_heads, 1, head_size, dtype=torch.float32),
        poisoned(rows, num_heads, 1, 2, dtype=torch.float32), arrivals, 1, 1, 0,
        head_size**-0.5, rows, rows, INPUT_SCALE,
        H=num_heads, H_KV=num_kv_heads, D=head_size, PAGE=16, ROWS=ROWS, CHUNK=128, BLOCK=8,
        TAKES_BLOCKS=False, STAGES=1, QUERIES=16, QUERY_BLOCKS=1, UNROLL=1,
        HEADS_BY_KV=heads_by_kv, HAS_GAIN=True, NEXT=KINDS[following],
    )  # fmt: skip
    wanted = torch.empty(rows, num_heads, head_size, dtype=torch.float64, device=DEVICE)
    for row, position in enumerate((8, 9)):
        for head in range(num_heads):
            kv_head, place = head % num_kv_heads, head
            if heads_by_kv:
                place = kv_head * (num_heads // num_kv_heads) + head // num_kv_heads
            k, v = (x[0, kv_head, : position + 1].double() for x in (keys, values))
            q = query[row].unflatten(0, (num_heads, head_size))[head].double()
            wanted[row, place] = (k @ q * head_size**-0.5).softmax(0) @ v
    wanted = wanted.flatten(1) * gain.double()
    if following == "fp8":
        codes = (wanted / INPUT_SCALE).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        same = (codes.float() == out.float()).double().mean()
        assert same == 1 if dtype == torch.float32 else same > 0.9
    else:
        assert error(out, wanted) < 2 * TOLERANCE[dtype]


FORMATS: dict[str, Kernel] = {
    "fp8": "fp8",
    "fp8_pc_pt": "fp8",
    "w4a8_awq": "fp8",
    "int8_wo": "int8",
    "int4_wo": "int4",
    "int4_awq": "int4",
}
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 64}
TEXT = [5, 9, 61, 33, 2, 17, 40, 8, 23, 50, 11, 30, 7, 44]


def built(
    work: Path, format: str, dtype: torch.dtype, **overrides: int
) -> tuple[FusedEngine, TorchEngine]:
    """An engine for kernels, and one of float32 that emulates the same checkpoint."""
    settings = {"awq_block_size": 32, "quantize_lm_head": format != "int8_wo"}
    quantized_checkpoint(work, "qwen2", format, settings=settings, **SHAPE, **overrides)
    folder = build_engine(work / "hf", work, dtype="float32")
    path = work / "kernels.safetensors"
    write_weights(path, load_unified(work / "checkpoint"), "bfloat16", FORMATS[format])
    tensors = {
        # The interpreter has no bfloat16.
        name: tensor.to(dtype) if tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in load_tensors(path, torch.device(DEVICE)).items()
    }
    spec = replace(TorchEngineSpec.read(folder), device=torch.device(DEVICE), dtype=dtype)
    assert unsupported(spec.model, tensors.get) is None
    with torch.inference_mode():
        fused = FusedEngine(spec, load_weights(spec.model, tensors.get), short_prompt=0)
    return fused, TorchEngine.load(folder)


def run(engine: FusedEngine | TorchEngine, *pieces: int) -> Tensor:
    """Logits of TEXT from its 11th token on, which ends a prompt; then of pieces of the rest."""
    sequence = engine.allocate(prompt_length=11, max_tokens=len(TEXT))
    found = [engine.forward([(sequence, TEXT[:11])], [1])]
    start = 11
    for piece in pieces:
        found.append(engine.forward([(sequence, TEXT[start : start + piece])], [piece]))
        start += piece
    return torch.cat(found).cpu()


@EVERY_DTYPE
@pytest.mark.parametrize(
    "format",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("w4a8_awq", "int4_wo") else [])
        for name in FORMATS
    ],
)
def test_an_engine_computes_what_the_emulation_does(
    format: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    fused, plain = built(tmp_path, format, dtype)
    kind = "fp8_per_token" if format == "fp8_pc_pt" else FORMATS[format]
    (layer, _), head = fused.decoder.weights.layers, fused.decoder.weights.head
    linears = (layer.qkv, layer.dense, layer.mlp_in, layer.mlp_out)
    assert {linear.kind for linear in linears} == {kind}
    assert head.kind == ("plain" if format == "int8_wo" else kind)
    most = 1e-5
    if dtype == torch.bfloat16:
        most = 0.15 if FORMATS[format] == "fp8" else 0.05  # as test_quantized_kernels.py has
    elif tolerance(dtype, kind) > TOLERANCE[dtype]:
        most = 0.03  # some numbers are rounded to the next of e4m3
    assert difference(run(fused, 2), run(plain, 2)) < most


@EVERY_DTYPE
def test_rows_are_rounded_by_themselves(dtype: torch.dtype, tmp_path: Path) -> None:
    fused, _ = built(tmp_path, "fp8_pc_pt", dtype, num_hidden_layers=1)
    assert torch.equal(run(fused, 2), run(fused, 1, 1))


# Constants, and what was written before the input that is rounded: programs.begin_between.
READ_BEFORE_THE_WAIT = {
    "round_input": set(),
    "rotary_linear": {"scale_ptr", "rotations_ptr", "positions_ptr", "slots_ptr", "pages_ptr"},
    "add_linear": {"scale_ptr", "gain_ptr", "hidden_ptr"},
    "gated_linear": {"scale_ptr"},
    "score": {"scale_ptr"},
}


def matrices(shape: Shape, kind: Kind, group: int) -> list[tuple[int, int, Tiles]]:
    """Columns, channels and tiles of each matrix of a layer."""
    hidden, inter = shape.hidden, shape.intermediate
    queries = shape.num_heads * shape.head_size
    columns = queries + 2 * shape.num_kv_heads * shape.head_size
    found = []
    for num_columns, num_channels, tiles_of in [
        (columns, hidden, partial(linear_tiles, most=min(shape.head_size, 64))),
        (hidden, queries, add_tiles),
        (inter, hidden, gated_tiles),
        (hidden, inter, add_tiles),
    ]:
        block = int4_block(num_channels, group) if kind == "int4" else 0
        tiles = tiles_of(num_columns, num_channels, kind=kind, block=block)
        found.append((num_columns, num_channels, tiles))
    return found


@pytest.mark.parametrize("kind", ["fp8", "fp8_per_token", "int8", "int4"])
@EVERY_SHAPE
def test_tiles_divide_every_known_matrix(shape: Shape, kind: Kind) -> None:
    for num_columns, num_channels, tiles in matrices(shape, kind, 0):
        assert num_columns % tiles.block_n == 0
        assert num_channels % (tiles.splits * tiles.block_c) == 0
        assert 0 < tiles.prefetch <= num_channels // tiles.splits


@pytest.mark.parametrize(("kind", "group"), [("int8", 0), ("int4", 0), ("int4", 32)])
@EVERY_SHAPE
def test_integers_have_one_matrix_instruction_at_every_width(
    shape: Shape, kind: Kind, group: int
) -> None:
    """Not Hopper's, of 64 columns and 4 warps, which adds up other channels at once: tiles.py."""
    for num_columns, _, narrow in matrices(shape, kind, group):
        wide = [wide_tiles(narrow, width, num_columns, kind=kind) for width in WIDTHS[1:]]
        assert all(tiles.block_n < 64 or tiles.num_warps < 4 for tiles in (narrow, *wide))


def test_the_tiles_that_were_timed() -> None:
    """Those of 7 B on an H100: queries, keys and values; gate and up; both ways back."""
    assert linear_tiles(6144, 4096, most=64, kind="fp8") == Tiles(64, 256, 1, 4, 6, 512)
    assert gated_tiles(14336, 4096, kind="fp8") == Tiles(64, 256, 1, 4, 4, 128)
    assert add_tiles(4096, 4096, kind="fp8") == Tiles(64, 256, 4, 4, 4, 512)
    assert add_tiles(4096, 14336, kind="fp8") == Tiles(64, 256, 4, 4, 4, 512)
    assert gated_tiles(14336, 4096, kind="int8") == Tiles(32, 256, 1, 4, 4, 512)
    assert add_tiles(4096, 14336, kind="int8") == Tiles(32, 256, 2, 4, 4, 512)
    int4 = {"kind": "int4", "block": 256}
    assert gated_tiles(14336, 4096, **int4) == Tiles(32, 256, 1, 2, 4, 512)
    assert gated_tiles(29184, 5120, **int4) == Tiles(64, 256, 1, 2, 4, 512)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["7b", "0.5b"])
@EVERY_CASE
def test_weights_are_copied_16_bytes_at_a_time(
    model: str, kind: Kind, group: int, tmp_path: Path
) -> None:
    """Which is so only for the right matrix instruction: tiles.py."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtimes.torch.fused.compile_quantized"]
        + [model, kind, str(group)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for kernel in json.loads(done.stdout):
        is_rounding = kernel["name"] == "round_input"
        read = "x_ptr" if is_rounding else "weight_ptr"
        used = {(how, size) for name, how, size in kernel["accesses"] if name == read}
        assert used == {("load" if is_rounding else "copy", 16)}, kernel["name"]
        assert kernel["shared_bytes"] <= 227 << 10, kernel["name"]
        early = {name for name, _, _ in kernel["early"]}
        assert early <= READ_BEFORE_THE_WAIT[kernel["name"]], kernel["name"]


def halves(scale_of_gate: float, input_scale_of_gate: float) -> dict[str, Tensor]:
    """An engine in FP8 whose gate and up projections have scales of their own."""
    config = toy_config(num_layers=1)
    tensors = toy_weights(config)
    fc, gate = tensors.pop("layers.0.mlp_in.weight").t().to(torch.float8_e4m3fn).chunk(2)
    for name, weight, scale, input_scale in (
        ("mlp_fc", fc, 0.5, 0.25),
        ("mlp_gate", gate, scale_of_gate, input_scale_of_gate),
    ):
        tensors[f"layers.0.{name}.weight"] = weight
        tensors[f"layers.0.{name}.weight_scale"] = torch.tensor([scale], device=DEVICE)
        tensors[f"layers.0.{name}.input_scale"] = torch.tensor([input_scale], device=DEVICE)
    return tensors


IN_FP8 = {"layers.0.mlp_in": "fp8", "layers.0.mlp_fc": "fp8", "layers.0.mlp_gate": "fp8"}


def test_halves_with_one_input_scale_are_joined() -> None:
    config = toy_config(num_layers=1, formats=IN_FP8)
    tensors = halves(4.0, 0.25)
    assert unsupported(config, tensors.get) is None
    linear = load_weights(config, tensors.get).layers[0].mlp_in
    size = config.intermediate_size
    assert linear.num_columns == 2 * size
    assert linear.input_scale == 0.25
    assert linear.scale is not None
    assert linear.scale.tolist() == [0.125] * size + [1.0] * size
    assert torch.equal(linear.weight[size:].float(), tensors["layers.0.mlp_gate.weight"].float())


@pytest.mark.parametrize(
    ("formats", "tensors", "reason"),
    [
        (IN_FP8, None, "linears in fp8"),
        ({"head": "int8_sq", "layers.0.qkv": "nvfp4"}, {}, "linears in int8_sq, nvfp4"),
        ({"head": "int4_gptq"}, {}, "linears in int4_gptq"),
        (
            {"head": "fp8"},
            {"head.weight": torch.zeros(32, 64)},
            "head in fp8, which is emulated",
        ),
        (
            IN_FP8,
            halves(0.5, 0.125),
            "layers.0.mlp_fc and mlp_gate, which do not round their input alike",
        ),
        ({"head": "int8_wo"}, {"head.weight": torch.zeros(32, 64)}, None),
    ],
)
def test_what_is_not_done_is_named(
    formats: dict[str, str], tensors: dict[str, Tensor] | None, reason: str | None
) -> None:
    config = toy_config(num_layers=1, formats=formats)
    assert unsupported(config, None if tensors is None else tensors.get) == reason


@EVERY_DTYPE
@EVERY_CASE
def test_prompts_are_multiplied_alike(dtype: torch.dtype, kind: Kind, group: int) -> None:
    num_columns, num_channels, num_rows = 32, 128 if group < 128 else 512, 21
    linear, matrix = linear_of(kind, group, num_columns, num_channels)
    x = random(32, num_channels, dtype=dtype, seed=7)
    taken, row_scales = x, UNUSED
    if linear.rounds:
        row_scales = poisoned(32, dtype=torch.float32)
        taken = poisoned(*x.shape, dtype=torch.float8_e4m3fn)
        launch(
            kernels.round_input, (32,), x, UNUSED, taken, row_scales, 0, 0.0, linear.input_scale,
            C=num_channels, BLOCK_C=num_channels, PARTS=1, WIDTH=32, HAS_NORM=False,
            KIND=KINDS[kind],
        )  # fmt: skip
    weight, product = linear.weight, kind
    if kind in UNPACKED:
        block = linear.block or 64
        weight = poisoned(num_columns, num_channels, dtype=dtype)
        launch(
            prompt_kernels.unpack, (2, num_channels // block), linear.weight, linear.scale, weight,
            N=num_columns, C=num_channels, BLOCK_N=16, BLOCK=block, GROUP=group, KIND=KINDS[kind],
        )  # fmt: skip
        product = "plain" if group else "int8"
    out = poisoned(32, num_columns, dtype=dtype)
    launch(
        prompt_kernels.linear, (1, 1),
        taken, row_scales, weight, linear.scale, UNUSED, out, integers(num_rows),
        N=num_columns, C=num_channels, BLOCK_N=32, BLOCK_C=64, ROWS=32, HAS_BIAS=False, ADDS=False,
        KIND=KINDS[product],
    )  # fmt: skip
    wanted = rounded(x, kind) @ matrix.t()
    assert error(out[:num_rows], wanted[:num_rows]) < tolerance(dtype, kind)
    assert out[num_rows:].isnan().all()
