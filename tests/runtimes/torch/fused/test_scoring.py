"""The head and the kernels of a round, each against a plain reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specpipe.runtimes.torch.fused import scoring
from specpipe.runtimes.torch.fused_sizes import ROWS
from tests.runtimes.torch.fused.kernel_inputs import (
    DEVICE,
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
    squares_of,
)

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    # Of the interpreter: NumPy says what is masked afterwards, and what it will not do one day.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]


def test_score(dtype: torch.dtype) -> None:
    channels, vocab_size, rows, block_n = 64, 100, 3, 64
    hidden, gain = random(rows + 1, channels, dtype=dtype), random(channels, dtype=dtype, seed=1)
    weight = random(vocab_size, channels, dtype=dtype, seed=2)
    weight[60] = weight[30]  # equal logits, in different blocks: the lower id is the best
    is_unused = torch.zeros(vocab_size, dtype=torch.uint8, device=DEVICE)
    is_unused[10:20] = 1
    best = poisoned(2, ROWS, dtype=torch.float32)
    best_ids = torch.full((2, ROWS), -1, dtype=torch.int32, device=DEVICE)
    logits = poisoned(2 + rows, vocab_size, dtype=torch.float32)
    # What stands behind the last sums is nobody's: on a GPU perhaps no memory.
    squares = torch.cat([squares_of(hidden, 4), poisoned(1, ROWS, dtype=torch.float32)])
    launch(
        scoring.score, (2,),
        (hidden.float() * gain.float()).to(dtype), squares, UNUSED, weight, UNUSED,
        is_unused, logits, best, best_ids, 1, 2, rows, 4, 90, EPSILON,
        V=vocab_size, C=channels, BLOCK_N=block_n, BLOCK_C=32, PARTS=4, ROWS=ROWS, WIDTH=ROWS,
        PREFETCH=32, HAS_UNUSED=True, WRITES_LOGITS=True, GROUP=0, KIND=PLAIN,
    )  # fmt: skip
    assert logits[:2].isnan().all()  # from the third row on
    logits = logits[2:]
    wanted = normed(hidden[1:], gain) @ weight.double().t()
    assert error(logits, wanted) < TOLERANCE[dtype]
    assert not best.isnan().any()
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
    launch(scoring.propose, (1,), best, ids, history, integers(6), 2, ROWS=ROWS, BLOCKS=4)
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
        scoring.accept, (1,), best, ids, tokens, positions, found, 2,
        NUM_DRAFT=2, FIRST=4, NUM_POSITIONS=16, ROWS=ROWS, BLOCKS=4,
    )  # fmt: skip
    assert found.tolist()[: len(result)] == result
    assert tokens.tolist()[3 : 3 + len(history)] == history
    num_emitted = result[0]
    assert positions.tolist() == list(range(-2 + num_emitted, 14 + num_emitted))
