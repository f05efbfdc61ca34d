"""Attention against a plain reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe.runtimes.torch.fused import attention, decoder
from specpipe.runtimes.torch.fused import engine as fused_engine
from specpipe.runtimes.torch.fused.decoder import Rows
from specpipe.runtimes.torch.fused_sizes import BLOCK, CHUNK, ROWS
from tests.runtimes.torch.fused.kernel_inputs import (
    DEVICE,
    DTYPES,
    PAGE,
    PLAIN,
    TOLERANCE,
    UNUSED,
    error,
    integers,
    launch,
    poisoned,
    random,
)
from tests.runtimes.torch.fused.toy import toy_config, toy_engines

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EVERY_HEAD_SIZE = pytest.mark.parametrize("head_size", [16, 32, 64] if DEVICE == "cuda" else [32])
# Of the interpreter: NumPy says what is masked afterwards, and what it will not do one day.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

NUM_HEADS, NUM_KV_HEADS = 4, 2


@dataclass(frozen=True)
class Cached:
    """Keys and values [pages, H_kv, P, D] of one sequence, and where its pages are."""

    keys: Tensor
    values: Tensor
    table: list[int]

    @staticmethod
    def random(num_positions: int, head_size: int, dtype: torch.dtype) -> Cached:
        num_pages = -(-num_positions // PAGE)
        shape = (num_pages + 1, NUM_KV_HEADS, PAGE, head_size)
        keys, values = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
        table = [(i * 3) % num_pages + 1 if num_pages % 3 else i + 1 for i in range(num_pages)]
        for pool in (keys, values):  # stale, as a page that was another's before
            pool[0] = torch.nan
            pool[table[-1], :, (num_positions - 1) % PAGE + 1 :] = torch.nan
        return Cached(keys, values, table)

    def attended(self, query: Tensor, position: int, window: int) -> Tensor:
        """What the query of one row attends to, as the textbook has it."""
        keys, values = (
            x[self.table].transpose(0, 1).flatten(1, 2).double() for x in (self.keys, self.values)
        )
        seen = slice(max(position - window + 1, 0) if window else 0, position + 1)
        out = []
        for head, q in enumerate(query.unflatten(0, (NUM_HEADS, -1)).double()):
            kv = head % NUM_KV_HEADS
            weights = (keys[kv, seen] @ q * len(q) ** -0.5).softmax(0)
            out.append(weights @ values[kv, seen])
        return torch.cat(out)


def attend(
    query: Tensor,
    cached: Cached,
    positions: Sequence[int],
    *,
    group: int | None = None,
    queries: int = 16,
    window: int = 0,
    takes_blocks: bool = False,
    is_listed: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Launches a kernel for rows of one sequence, or for groups of them that see one text.

    out_dtype  float32: what comes of it before it is rounded
    """
    rows, head_size = len(query), query.shape[1] // NUM_HEADS
    group = group or rows
    out = poisoned(*query.shape, dtype=out_dtype or query.dtype)
    has_blocks = takes_blocks or is_listed
    num_parts = max(positions) // (CHUNK * BLOCK if has_blocks else CHUNK) + 2
    sums = poisoned(rows, NUM_HEADS, num_parts, head_size, dtype=torch.float32)
    states = poisoned(rows, NUM_HEADS, num_parts, 2, dtype=torch.float32)
    arrivals = torch.zeros(rows * NUM_HEADS, dtype=torch.int32, device=DEVICE)
    where, slots = integers(*positions), integers(*[0] * rows)
    inputs = query, cached.keys, cached.values, integers(*cached.table)[None]
    outputs = UNUSED, out, sums, states, arrivals, len(cached.table), num_parts, window
    constants: dict[str, Any] = {
        "H": NUM_HEADS, "H_KV": NUM_KV_HEADS, "D": head_size, "PAGE": PAGE, "CHUNK": CHUNK,
        "BLOCK": BLOCK, "STAGES": 3, "QUERIES": queries, "UNROLL": 4, "HEADS_BY_KV": False,
        "HAS_GAIN": False, "NEXT": PLAIN,
    }  # fmt: skip
    scale = head_size**-0.5
    if is_listed:
        blocks = listed(where, slots, most=queries // (NUM_HEADS // NUM_KV_HEADS))
        launch(
            attention.attention_of_many, (3,), *inputs, blocks, *outputs, scale, 1.0,
            QUERY_BLOCKS=1, **constants,
        )  # fmt: skip
    else:
        query_blocks = -(-group * (NUM_HEADS // NUM_KV_HEADS) // queries)
        launch(
            attention.attention, (rows // group * query_blocks, NUM_KV_HEADS, num_parts),
            *inputs, where, slots, *outputs, scale, group, rows, 1.0,
            ROWS=ROWS, QUERY_BLOCKS=query_blocks, TAKES_BLOCKS=takes_blocks, **constants,
        )  # fmt: skip
    assert not arrivals.any()  # ready for the next launch
    return out


def listed(positions: Tensor, slots: Tensor, *, most: int) -> Tensor:
    """What list_blocks writes for some rows."""
    blocks = integers(*[-1] * (4 + 4 * 5 * len(positions)))
    attention.list_blocks[1,](
        blocks, positions, slots, len(positions), most, WIDTH=ROWS, CHUNK=CHUNK, BLOCK=BLOCK
    )
    return blocks


def test_blocks_are_listed_once_for_neighbouring_rows_of_a_sequence() -> None:
    rows = [
        (7, 0), (8, 0), (9, 0), (10, 0),  # three together, and one
        (10, 0),  # again: not one behind
        (-1, 0), (0, 0),
        (1023, 1), (1024, 1),  # the first of them sees one block, together they are two
        (3070, 2),  # another sequence: two whole blocks, and almost a third
        (-1, 2), (-1, 3), (300, 3),
    ]  # fmt: skip
    positions, slots = (integers(*values) for values in zip(*rows, strict=True))
    (num_blocks, *_), *found = listed(positions, slots, most=3).view(-1, 4).tolist()
    entries = [(x & 255, x >> 8 & 255, x >> 16, slot, last) for x, slot, last, _ in found]
    assert entries[:num_blocks] == [
        (7, 2, 0, 1, 1024), (9, 1, 0, 2, 3070), (9, 1, 1, 2, 3070),
        # Rests of texts, the longest first.
        (9, 1, 2, 2, 3070), (12, 1, 0, 3, 300), (0, 3, 0, 0, 9), (3, 1, 0, 0, 10),
        (4, 1, 0, 0, 10), (6, 1, 0, 0, 0), (7, 2, 1, 1, 1024),
    ]  # fmt: skip
    assert all(block == [-1] * 4 for block in found[num_blocks:])


@EVERY_DTYPE
@pytest.mark.parametrize("is_listed", [False, True])
def test_rows_of_nobody_change_nothing_for_their_neighbours(
    dtype: torch.dtype, is_listed: bool
) -> None:
    positions = (-1, 129, 7, -1, 200, 201, -1, -1)  # pairs; none, one or two are somebody's
    query = random(len(positions), NUM_HEADS * 32, dtype=dtype, seed=2)
    cached = Cached.random(max(positions) + 1, 32, dtype)
    out = attend(query, cached, positions, group=2, is_listed=is_listed)
    for row, position in enumerate(positions):
        if position < 0:
            assert out[row].isnan().all()  # not written
        else:
            assert torch.equal(out[row], attend(query[row][None], cached, (position,))[0])


@EVERY_DTYPE
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("head_size", [32, 64])
@pytest.mark.parametrize("positions", [(5,), (126, 127, 128, 129), tuple(range(250, 259))])
def test_attention(
    dtype: torch.dtype, positions: tuple[int, ...], head_size: int, window: int
) -> None:
    query = random(len(positions), NUM_HEADS * head_size, dtype=dtype, seed=2)
    cached = Cached.random(positions[-1] + 1, head_size, dtype)
    out = attend(query, cached, positions, window=window)
    for row, position in enumerate(positions):
        assert error(out[row], cached.attended(query[row], position, window)) < TOLERANCE[dtype]


@EVERY_DTYPE
@EVERY_HEAD_SIZE
@pytest.mark.parametrize(
    ("positions", "window"),
    [
        ((1022, 1023, 1024, 1025), 0),
        ((1151, 1152), 0),
        (tuple(range(2040, 2049)), 0),
        ((1900, 2400, 2401), 300),  # the last ones see nothing of a block that the first sees
    ],
)
def test_chunks_in_one_program_or_apart_are_the_same_bits(
    dtype: torch.dtype, head_size: int, positions: tuple[int, ...], window: int
) -> None:
    query = random(len(positions), NUM_HEADS * head_size, dtype=dtype, seed=2)
    cached = Cached.random(positions[-1] + 1, head_size, dtype)
    group_size = NUM_HEADS // NUM_KV_HEADS
    queries = attention.queries_of(len(positions) * group_size, head_size, dtype.itemsize)
    # Rounded to bfloat16, sums that differ would be the same but for one in thousands.
    settings: dict[str, Any] = {"window": window, "out_dtype": torch.float32}
    apart, *others = (
        attend(query, cached, positions, queries=queries, **settings, **how)
        for how in ({}, {"takes_blocks": True}, {"is_listed": True})
    )
    for together in others:
        assert torch.equal(apart, together)
    for row, position in (0, positions[0]), (-1, positions[-1]):
        alone = attend(query[row][None], cached, (position,), **settings)
        assert torch.equal(alone[0], apart[row])
        assert error(apart[row], cached.attended(query[row], position, window)) < TOLERANCE[dtype]


def test_decoder_finds_its_parts_in_chunks_and_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy_config(num_layers=1)
    monkeypatch.setattr(decoder, "BLOCK", 2)
    in_chunks, in_blocks, listed = kernels = [
        (attention.attention, False), (attention.attention, True),
        (attention.attention_of_many, None),
    ]  # fmt: skip

    def scored(most_chunks: int, *, group: int, most_warps: int) -> tuple[Tensor, set[Any]]:
        monkeypatch.setattr(decoder, "_MOST_WARPS", most_warps)
        for module in (decoder, fused_engine):
            monkeypatch.setattr(module, "MOST_CHUNKS", most_chunks)
        engine, _ = toy_engines(config, limits={"max_seq_len": 400})
        launch, launched = engine.decoder.launch, set()

        def record(kernel: Any, *arguments: Any, **constants: Any) -> None:
            launch(kernel, *arguments, **constants)
            launched.add((kernel, constants.get("TAKES_BLOCKS")))

        monkeypatch.setattr(engine.decoder, "launch", record)
        with torch.inference_mode():
            for seed, pool in enumerate((engine.cache.keys[0], engine.cache.values[0])):
                pool.copy_(random(*pool.shape, dtype=torch.float32, seed=seed))
            slot = engine.cache.allocate(310)
            rows = Rows(
                integers(300, 301), integers(slot, slot), integers(7, 11), 2, group,
                engine.is_long(302),
            )  # fmt: skip
            engine.decoder.layers(rows)
            engine.decoder.score(2, writes_logits=True)
        return engine.decoder.logits[:2].clone(), launched & {*kernels}

    wanted, launched = scored(4, group=2, most_warps=0)  # one group is divided into chunks always
    assert launched == {in_chunks}
    for most_chunks, group, most_warps, kernel in (
        (2, 2, 0, in_blocks), (4, 1, 16, in_chunks), (4, 1, 15, listed), (2, 1, 15, listed)
    ):  # fmt: skip
        logits, launched = scored(most_chunks, group=group, most_warps=most_warps)
        assert launched == {kernel}
        assert torch.equal(logits, wanted)
