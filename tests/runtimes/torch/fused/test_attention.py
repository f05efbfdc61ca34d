"""Attention against a plain reference in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe.runtimes.torch.fused import attention, decoder
from specpipe.runtimes.torch.fused import engine as fused_engine
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
    positions: tuple[int, ...],
    *,
    queries: int = 16,
    window: int = 0,
    takes_blocks: bool = False,
) -> Tensor:
    """Launches the kernel for rows of one sequence."""
    rows, head_size = len(query), query.shape[1] // NUM_HEADS
    out = poisoned(*query.shape, dtype=query.dtype)
    num_parts = positions[-1] // (CHUNK * BLOCK if takes_blocks else CHUNK) + 2
    sums = poisoned(rows, NUM_HEADS, num_parts, head_size, dtype=torch.float32)
    states = poisoned(rows, NUM_HEADS, num_parts, 2, dtype=torch.float32)
    arrivals = torch.zeros(rows * NUM_HEADS, dtype=torch.int32, device=DEVICE)
    blocks = -(-rows * (NUM_HEADS // NUM_KV_HEADS) // queries)
    launch(
        attention.attention, (blocks, NUM_KV_HEADS, num_parts),
        query, cached.keys, cached.values, integers(*cached.table)[None], integers(*positions),
        integers(*[0] * rows), UNUSED, out, sums, states, arrivals,
        len(cached.table), num_parts, window, head_size**-0.5, rows, rows, 1.0,
        H=NUM_HEADS, H_KV=NUM_KV_HEADS, D=head_size, PAGE=PAGE, ROWS=ROWS, CHUNK=CHUNK,
        BLOCK=BLOCK, TAKES_BLOCKS=takes_blocks, STAGES=3, QUERIES=queries,
        QUERY_BLOCKS=blocks, UNROLL=4, HEADS_BY_KV=False, HAS_GAIN=False, NEXT=PLAIN,
    )  # fmt: skip
    assert not arrivals.any()  # ready for the next launch
    return out


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
    dtype: torch.dtype, positions: tuple[int, ...], window: int
) -> None:
    query = random(len(positions), NUM_HEADS * 32, dtype=dtype, seed=2)
    cached = Cached.random(positions[-1] + 1, 32, dtype)
    # As the decoder has them: one size for float32, two for bfloat16.
    queries = 32 if dtype == torch.bfloat16 and len(positions) > 8 else 16
    apart, together = (
        attend(query, cached, positions, queries=queries, window=window, takes_blocks=takes_blocks)
        for takes_blocks in (False, True)
    )
    assert torch.equal(apart, together)
    for row, position in (0, positions[0]), (-1, positions[-1]):
        alone = attend(query[row][None], cached, (position,), window=window)
        assert torch.equal(alone[0], apart[row])
        assert error(apart[row], cached.attended(query[row], position, window)) < TOLERANCE[dtype]


def test_decoder_finds_its_parts_in_chunks_and_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy_config(num_layers=1)
    monkeypatch.setattr(decoder, "BLOCK", 2)

    def scored(most_chunks: int) -> tuple[Tensor, set[bool]]:
        for module in (decoder, fused_engine):
            monkeypatch.setattr(module, "MOST_CHUNKS", most_chunks)
        engine, _ = toy_engines(config, limits={"max_seq_len": 400})
        launch, takes_blocks = engine.decoder.launch, set()

        def record(kernel: Any, *arguments: Any, **constants: Any) -> None:
            launch(kernel, *arguments, **constants)
            if kernel is attention.attention:
                takes_blocks.add(constants["TAKES_BLOCKS"])

        monkeypatch.setattr(engine.decoder, "launch", record)
        with torch.inference_mode():
            for seed, pool in enumerate((engine.cache.keys[0], engine.cache.values[0])):
                pool.copy_(random(*pool.shape, dtype=torch.float32, seed=seed))
        sequence = engine.allocate(prompt_length=300, max_tokens=310)
        engine.skip(sequence, 300)
        return engine.forward([(sequence, [7, 11])], [2]), takes_blocks

    (apart, in_chunks), (together, in_blocks) = scored(4), scored(2)
    assert (in_chunks, in_blocks) == ({False}, {True})
    assert torch.equal(apart, together)
