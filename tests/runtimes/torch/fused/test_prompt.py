"""Prompts: their kernels against plain references, and what does not change a row's bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe.runtimes.torch.fused import compilation, prompt_kernels
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.linear import ROUNDED, Kind
from specpipe.runtimes.torch.fused.prompt import Piece, PromptRows
from specpipe.runtimes.torch.fused.prompt_attention import prompt_attention
from specpipe.runtimes.torch.fused.tiles import prompt_tiles
from specpipe.runtimes.torch.fused_sizes import PROMPT_WIDTHS
from tests.runtimes.torch.fused.kernel_inputs import (
    DTYPES,
    EPSILON,
    PLAIN,
    TOLERANCE,
    UNUSED,
    error,
    integers,
    launch,
    normed,
    poisoned,
    random,
)
from tests.runtimes.torch.fused.test_rows import SHAPES, random_engine
from tests.runtimes.torch.fused.test_tiles import EVERY_SHAPE, Shape
from tests.runtimes.torch.fused.toy import toy_config, toy_engines

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
PAGE = 32


@EVERY_DTYPE
def test_norm_rows(dtype: torch.dtype) -> None:
    hidden, gain = random(11, 48, dtype=dtype), random(48, dtype=dtype, seed=1)
    out = poisoned(11, 48, dtype=dtype)
    launch(
        prompt_kernels.norm_rows, (3,), hidden, gain, out, integers(6), EPSILON, 1.0,
        C=48, BLOCK_C=64, ROWS=4, NEXT=PLAIN,
    )  # fmt: skip
    assert error(out[:6], normed(hidden[:6], gain)) < TOLERANCE[dtype]
    assert out[6:].isnan().all()


@EVERY_DTYPE
@pytest.mark.parametrize(("num_columns", "adds"), [(64, True), (80, False)])
def test_linear(dtype: torch.dtype, num_columns: int, adds: bool) -> None:
    """80 columns are three blocks of 32, of which the last overlaps."""
    x, weight = random(64, 96, dtype=dtype), random(num_columns, 96, dtype=dtype, seed=1)
    bias, before = random(num_columns, dtype=dtype, seed=2), random(64, num_columns, dtype=dtype)
    out = before.clone()
    launch(
        prompt_kernels.linear, (2, -(-num_columns // 32)),
        x, UNUSED, weight, UNUSED, bias, out, integers(41),
        N=num_columns, C=96, BLOCK_N=32, BLOCK_C=32, ROWS=32, HAS_BIAS=True, ADDS=adds, KIND=PLAIN,
    )  # fmt: skip
    wanted = x.double() @ weight.double().t() + bias.double()
    if adds:
        wanted += before.double()
    assert error(out[:41], wanted[:41]) < TOLERANCE[dtype]
    assert torch.equal(out[41:], before[41:])


@EVERY_DTYPE
@pytest.mark.parametrize("window", [None, 40])
def test_attention_of_tiles_of_several_sequences(dtype: torch.dtype, window: int | None) -> None:
    """Tiles of 8 rows: of a text that begins, of one far on, of nobody, of one row."""
    num_heads, num_kv_heads, head_size = 6, 2, 32
    firsts = {0: (0, 0, 8), 1: (1, 90, 5), 3: (1, 127, 1)}  # tile: slot, position, rows
    positions, slots = [-1] * 32, [0] * 32
    for tile, (slot, first, count) in firsts.items():
        positions[8 * tile : 8 * tile + count] = range(first, first + count)
        slots[8 * tile : 8 * tile + 8] = [slot] * 8
    query = random(32, num_heads * head_size, dtype=dtype, seed=2)
    keys = random(6, num_kv_heads, PAGE, head_size, dtype=dtype)
    values = random(6, num_kv_heads, PAGE, head_size, dtype=dtype, seed=1)
    table = [[5, 0, 0, 0], [3, 1, 4, 2]]
    for pool in (keys, values):  # stale, as a page that was another's before
        pool[5, :, 8:] = torch.nan
    out = poisoned(*query.shape, dtype=dtype)
    launch(
        prompt_attention, (4, num_kv_heads),
        query, keys, values, integers(*sum(table, [])).view(2, 4), integers(*positions),
        integers(*slots), UNUSED, out, 4, window or 0, 0.3, 1.0,
        H=num_heads, H_KV=num_kv_heads, D=head_size, PAGE=PAGE, ROWS=8, QUERIES=32, STAGES=2,
        HAS_WINDOW=window is not None, HEADS_BY_KV=False, HAS_GAIN=False, NEXT=PLAIN,
    )  # fmt: skip
    for row, position in enumerate(positions):
        if position < 0:
            assert out[row].isnan().all()
            continue
        seen = slice(0 if window is None else max(position - window + 1, 0), position + 1)
        heads = []
        for head, q in enumerate(query[row].unflatten(0, (num_heads, -1)).double()):
            k, v = (
                pool[table[slots[row]], head % num_kv_heads].flatten(0, 1)[seen].double()
                for pool in (keys, values)
            )
            heads.append((k @ q * 0.3).softmax(0) @ v)
        assert error(out[row], torch.cat(heads)) < TOLERANCE[dtype]


def test_pieces_fill_launches_in_tiles_of_their_own() -> None:
    pieces = [
        Piece(slot=3, position=10, token_ids=[1, 2, 3], scored_from=12, logit=7),
        Piece(slot=1, position=0, token_ids=[4, 5, 6, 7, 8, 9], scored_from=99, logit=8),
    ]
    first, second = PromptRows.packed(pieces, most=8, tile_rows=4)
    assert first == PromptRows(
        positions=[10, 11, 12, -1, 0, 1, 2, 3],
        slots=[3, 3, 3, 3, 1, 1, 1, 1],
        tokens=[1, 2, 3, 0, 4, 5, 6, 7],
        scored=[2],
        logits=[7],
    )
    assert second == PromptRows([4, 5, -1, -1], [1] * 4, [8, 9, 0, 0])


@EVERY_SHAPE
@pytest.mark.parametrize("rounds", [False, True])
def test_tiles_divide_every_known_matrix(shape: Shape, rounds: bool) -> None:
    queries = shape.num_heads * shape.head_size
    columns = queries + 2 * shape.num_kv_heads * shape.head_size
    for num_matrices, num_columns, num_channels in [
        (1, columns, shape.hidden), (1, shape.hidden, queries),
        (2, shape.intermediate, shape.hidden), (1, shape.hidden, shape.intermediate),
    ]:  # fmt: skip
        found = [
            prompt_tiles(num_columns, num_channels, w, num_matrices=num_matrices, rounds=rounds)
            for w in PROMPT_WIDTHS
        ]
        for width, tiles in zip(PROMPT_WIDTHS, found, strict=True):
            assert width % tiles.rows == 0
            assert num_columns % tiles.block_n == 0
            assert num_channels % tiles.block_c == 0
            assert (tiles.splits, tiles.ways, tiles.held) == (1, 1, 0)
        if rounds:  # blocks are added by themselves
            assert len({tiles.block_c for tiles in found}) == 1


def cached(engine: FusedEngine, sequence: int) -> Tensor:
    """Keys and values of all positions of a sequence, [pools, positions, H_kv, D]."""
    pages = engine.cache.table[engine.slot(sequence)].long()
    pools = [*engine.cache.keys, *engine.cache.values]
    length = engine.length(sequence)
    return torch.stack([pool[pages].transpose(1, 2).flatten(0, 1)[:length] for pool in pools])


def test_a_prompt_is_the_same_however_it_is_cut_and_whatever_is_beside_it() -> None:
    """Bit for bit: keys and values, and how its tokens are scored."""
    config = toy_config(num_heads=2, num_kv_heads=1, windows=(20, None))
    engine, _ = toy_engines(config, limits={"max_seq_len": 80})
    text, other = (torch.arange(74) % 61 + 1).tolist(), (torch.arange(40) % 64).tolist()

    def read(cuts: Sequence[int], *, is_alone: bool) -> tuple[Tensor, Tensor]:
        sequence, neighbour = (
            engine.allocate(prompt_length=length, max_tokens=80) for length in (75, 60)
        )
        logits, start = [], 0
        for cut in cuts:
            batch, counts = [(sequence, text[start : start + cut])], [min(cut, 2)]
            if not is_alone:
                batch.insert(0, (neighbour, other[start // 2 : start // 2 + 7]))
                counts.insert(0, 0)
            logits.append(engine.forward(batch, counts))
            start += cut
        found = cached(engine, sequence)
        engine.free(sequence)
        engine.free(neighbour)
        return found, logits[-1]

    wanted = read([74], is_alone=True)
    assert wanted[1].shape == (2, 64)
    for found in (read([30, 44], is_alone=False), read([1, 73], is_alone=True)):
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])


@torch.inference_mode()
def test_a_scored_prompt_needs_no_kernel_that_is_not_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rows go through all of the last layer: of a single one nothing else does."""
    launched: set[object] = set()
    launch = compilation.launch

    def noted(kernel: Any, grid: Any, arguments: Any, options: dict[str, Any]) -> None:
        launched.add((kernel, *sorted(options.items())))
        launch(kernel, grid, arguments, options)

    monkeypatch.setattr(compilation, "launch", noted)
    one_layer = toy_config(num_layers=1, num_heads=1, num_kv_heads=1)
    engine, _ = toy_engines(one_layer, limits={"max_seq_len": 200})
    for recording in engine.recordings(engine.max_seq_len):
        recording.launch()
    prepared = launched.copy()
    prompt = [3, 17, 8, 41] * 40
    sequence = engine.allocate(prompt_length=len(prompt), max_tokens=len(prompt))
    engine.forward([(sequence, prompt)], [len(prompt)])
    assert launched == prepared


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize(
    ("shape", "kind", "group"),
    [
        ("large", "plain", 0), ("uneven", "plain", 0), ("small", "plain", 0), ("large", "fp8", 0),
        ("small", "fp8_per_token", 0), ("large", "int8", 0), ("large", "int4", 128),
    ],
)  # fmt: skip
def test_bits_of_prompts_in_launches_of_every_width(shape: str, kind: Kind, group: int) -> None:
    """And near those of the kernels of decoding, which read the same text row by row."""
    config = toy_config(**SHAPES[shape], num_layers=3)
    engine = random_engine(config, kind, group, torch.bfloat16, max_batch_size=3, max_seq_len=1100)
    text, other = (torch.randint(0, 4096, (length,)).tolist() for length in (700, 300))

    def read(cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
        sequence, neighbour = (
            engine.allocate(prompt_length=length, max_tokens=710) for length in (701, 301)
        )
        start = 0
        for cut in cuts:
            batch = [(neighbour, other[:cut]), (sequence, text[start : start + cut])]
            logits = engine.forward(batch[start == 0 :], [0, min(cut, 40)][start == 0 :])
            engine.truncate(neighbour, 0)
            start += cut
        found = cached(engine, sequence)
        engine.free(sequence)
        engine.free(neighbour)
        return found, logits

    wanted = read([700])
    assert all(x.isfinite().all() for x in wanted)
    for cuts in ([1, 699], [33, 60, 167, 440], [650, 50]):
        found = read(cuts)
        assert torch.equal(found[0], wanted[0]), cuts
        assert torch.equal(found[1], wanted[1]), cuts
    decoded = engine.allocate(prompt_length=1, max_tokens=100)
    engine.forward([(decoded, text[:60])], [0])
    for first in (0, config.num_layers):  # keys and values of layer 0, before what is chaotic
        of_prompt = wanted[0][first, :60]
        assert error(of_prompt, cached(engine, decoded)[first]) < (
            0.03 if kind in ROUNDED else 0.01
        )
