"""Attention against a plain reference in float64."""

from __future__ import annotations

import pytest
import torch

from specpipe.runtimes.torch.fused import attention
from specpipe.runtimes.torch.fused.attention import CHUNK
from specpipe.runtimes.torch.fused.programs import ROWS
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

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    # Of the interpreter: NumPy says what is masked afterwards, and what it will not do one day.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]


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
        attention.attention, (rows // group * blocks, num_kv_heads, max_chunks),
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
