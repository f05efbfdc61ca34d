"""The head and the kernels of a round, each against a plain reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specpipe.runtimes.torch.fused import scoring
from specpipe.runtimes.torch.fused.decoder import Rows
from specpipe.runtimes.torch.fused_sizes import RESULT, ROWS
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
from tests.runtimes.torch.fused.toy import toy_config, toy_engines

ONE_HEAD = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1}

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    # Of the interpreter: NumPy says what is masked afterwards, and what it will not do one day.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]


def test_score(dtype: torch.dtype) -> None:
    channels, vocab_size, rows, block_n = 64, 100, 3, 64
    hidden, gain = random(rows, channels, dtype=dtype), random(channels, dtype=dtype, seed=1)
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
        is_unused, logits, best, best_ids, 2, rows, 1, 1, 4, 90, EPSILON,
        V=vocab_size, C=channels, BLOCK_N=block_n, BLOCK_C=32, PARTS=4, ROWS=ROWS, WIDTH=ROWS,
        OUT_WIDTH=ROWS, PICKS=False, PREFETCH=32, HAS_UNUSED=True, WRITES_LOGITS=True, GROUP=0,
        KIND=PLAIN,
    )  # fmt: skip
    assert logits[:2].isnan().all()  # from the third row on
    logits = logits[2:]
    wanted = normed(hidden, gain) @ weight.double().t()
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


@pytest.mark.parametrize(("num_groups", "group", "last"), [(2, 5, 3), (18, 2, 1), (3, 12, 6)])
def test_the_last_rows_of_groups_are_scored_as_all_rows_are(
    dtype: torch.dtype, num_groups: int, group: int, last: int
) -> None:
    """In one tile or two, of as many or fewer rows than those of the layers."""
    num_rows = num_groups * group
    decoder = toy_engines(toy_config(**ONE_HEAD), limits={"max_batch_size": 40})[0].decoder
    every_row = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    rows = Rows(every_row % group, every_row // group, every_row, num_rows, group, is_long=False)
    with torch.inference_mode():
        decoder.layers(rows)
        decoder.score(num_rows, writes_logits=True, width=rows.width)
        is_last = every_row % group >= group - last
        wanted = decoder.logits[:num_rows][is_last].clone()
        decoder.logits.fill_(torch.nan)
        num_scored = num_groups * last
        decoder.score(
            num_scored, writes_logits=True, width=rows.width, group=group, last=last, first_out=1
        )
    assert torch.equal(decoder.logits[1 : 1 + num_scored], wanted)
    assert decoder.logits[[0, 1 + num_scored]].isnan().all()
    best, best_ids = (x[:, :num_scored] for x in decoder.bests(num_scored))
    assert torch.equal(best.max(0).values, wanted.max(-1).values)
    assert torch.equal(best_ids.gather(0, best.argmax(0)[None])[0], wanted.argmax(-1).int())


def scored(*rows: list[tuple[float, int]], width: int = ROWS) -> tuple[Tensor, Tensor]:
    """best and best_ids of two blocks, from (logit, id) of each row's blocks."""
    best = torch.full((2, width), -torch.inf, device=DEVICE)
    ids = torch.zeros(2, width, dtype=torch.int32, device=DEVICE)
    for row, blocks in enumerate(rows):
        for block, (value, token_id) in enumerate(blocks):
            best[block, row], ids[block, row] = value, token_id
    return best, ids


def test_propose_takes_the_lowest_of_equal_ids(dtype: torch.dtype) -> None:
    """Of every second row that is somebody's, behind its position in its text."""
    nothing = [(NAN, 1), (0.0, 2)]
    best, ids = scored([(1.5, 4), (1.5, 90)], nothing, [(1.0, 5), (1.5, 80)], width=32)
    history = torch.arange(100, 130, dtype=torch.int32, device=DEVICE).view(3, 10)
    launch(
        scoring.propose, (3, 1),
        best, ids, integers(5, 6, -1, -1, 0, 1), integers(1, 1, 0, 0, 2, 2), history, 2, 2, 10,
        WIDTH=32, BLOCKS=4,
    )  # fmt: skip
    wanted = torch.arange(100, 130).view(3, 10)
    wanted[1, 7], wanted[2, 2] = 4, 80
    assert history.tolist() == wanted.tolist()


NAN = float("nan")
FIRST = ([(1.0, 7), (0.0, 70)], [(0.0, 8), (1.0, 80)], [(2.0, 9), (1.0, 90)])
"""Rows whose best tokens are 7, 80 and 9."""


@pytest.mark.parametrize(
    ("rows", "drafted", "result", "history"),
    [
        # Both draft tokens are the target's own: they and one more are emitted.
        (FIRST, [7, 80], [3, 2, 7, 80, 9], [7, 80, 9]),
        # The first is not.
        (FIRST, [6, 80], [1, 2, 7], [7, 80]),
        # The second is not.
        (FIRST, [7, 8], [2, 2, 7, 80], [7, 80]),
        # A member of one draft token has no third row.
        (FIRST, [7], [2, 1, 7, 80], [7, 80]),
        # A row with a NaN counts for nothing, nor do those behind it.
        ((FIRST[0], [(NAN, 8), (1.0, 80)], FIRST[2]), [7, 80], [1, 0, 7], [7, 80]),
        (([(NAN, 7), (0.0, 70)], *FIRST[1:]), [7, 80], [0, 0], [7, 80]),
    ],
)
def test_accept(
    dtype: torch.dtype,
    rows: tuple[list[tuple[float, int]], ...],
    drafted: list[int],
    result: list[int],
    history: list[int],
) -> None:
    """Of the third place, behind nobody's and one without draft tokens."""
    nobody = [[(5.0, 3), (5.0, 33)]] * 3
    best, ids = scored(*nobody, *FIRST, *rows, width=32)
    tokens = integers(*range(60)).view(3, 20)
    text = [50, 51, 52, *drafted, 0, 0, 0]
    tokens[1, : len(text)] = integers(*text)
    last = integers(11, 2, 5)
    found = torch.full((3, RESULT), -1, dtype=torch.int32, device=DEVICE)
    launch(
        scoring.accept, (3,),
        best, ids, integers(-1, 2, 1), integers(0, 0, len(drafted)), tokens, last, found, 2, 2, 20,
        ROWS=4, WIDTH=32, BLOCKS=4,
    )  # fmt: skip
    assert found[0].tolist() == [-1] * RESULT
    assert found[1, :3].tolist() == [1, 0, 7]
    assert found[2, : len(result)].tolist() == result
    assert tokens[1, 3 : 3 + len(history)].tolist() == history
    assert tokens[0].tolist() == list(range(20))
    assert tokens[2].tolist() == [*range(40, 46), 7, *range(47, 60)]
    assert last.tolist() == [11, 2 + result[0], 6]
