"""The slots and rectangles of an engine, as its runner sees them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specpipe.runtimes.tensorrt.engine import TensorRTEngine
from specpipe.runtimes.tensorrt.engine_config import TensorRTEngineSpec
from tests.runtimes.tensorrt.table_library import write_engine

VOCAB_SIZE = 1000
CAPACITY = 56  # 40 tokens, and twice the 5 of a step with 4 draft tokens, rounded up


class Recorder:
    """A runner that keeps what it is asked; a row's logits are all its token's id.

    `nan_ids` are those whose row is NaN. Each run overwrites the logits of the last.
    """

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.nan_ids: set[int] = set()
        self._logits = np.zeros((64, VOCAB_SIZE), np.float32)

    def run(
        self,
        first_slot: int,
        input_ids: NDArray[np.int32],
        write_indices: NDArray[np.int32],
        logits_indices: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        for array in (input_ids, write_indices, logits_indices):
            assert array.dtype == np.int32 and array.flags.c_contiguous
        self.calls.append(
            (first_slot, input_ids.tolist(), write_indices.tolist(), logits_indices.tolist())
        )
        self._logits[:] = -1.0
        scored = input_ids.reshape(-1)[logits_indices]
        self._logits[: len(scored)] = scored[:, None]
        self._logits[: len(scored)][np.isin(scored, list(self.nan_ids))] = np.nan
        return self._logits[: len(scored)]

    def clear(self, slot: int, start: int, stop: int) -> None:
        self.calls.append(("clear", slot, start, stop))

    def close(self) -> None:
        self.calls.append("close")

    def taken(self) -> list[Any]:
        """What was asked since this was called last."""
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def engine(recorder: Recorder, tmp_path: Path) -> TensorRTEngine:
    """Four slots, up to 4 draft tokens, prompts in chunks of up to 12 tokens."""
    folder = write_engine(
        tmp_path / "engine",
        vocab_size=VOCAB_SIZE,
        max_batch_size=4,
        max_seq_len=40,
        max_draft_len=4,
        max_num_tokens=12,
    )
    return TensorRTEngine(TensorRTEngineSpec.read(folder), recorder)


def start(engine: TensorRTEngine, token_ids: Sequence[int] = ()) -> int:
    """Makes a sequence and lets it read tokens."""
    sequence = engine.allocate(prompt_length=len(token_ids), max_tokens=40)
    if token_ids:
        engine.forward([(sequence, token_ids)], [0])
    return sequence


def best(logits: torch.Tensor) -> list[float]:
    assert logits.dtype == torch.float32 and logits.shape[1] == VOCAB_SIZE
    return logits[:, -1].tolist()


def test_a_sequence_gets_the_lowest_free_slot_made_empty(
    engine: TensorRTEngine, recorder: Recorder
) -> None:
    sequences = [start(engine) for _ in range(4)]
    assert recorder.taken() == [("clear", slot, 0, CAPACITY) for slot in range(4)]
    assert not engine.can_admit(1)
    for index in (2, 1):
        engine.free(sequences[index])
    assert engine.can_admit(40)
    assert not engine.can_admit(41)
    start(engine)
    assert recorder.taken() == [("clear", 1, 0, CAPACITY)]


def test_sequences_of_different_lengths_are_one_rectangle(
    engine: TensorRTEngine, recorder: Recorder
) -> None:
    a, b, c = start(engine, [10, 11]), start(engine, [20]), start(engine, [30, 31, 32])
    recorder.taken()
    logits = engine.forward([(c, [33]), (a, [12, 13, 14]), (b, [21, 22])], [1, 2, 0])
    assert recorder.taken() == [
        (0, [[12, 13, 14], [21, 22, 22], [33, 33, 33]], [2, 1, 3], [6, 1, 2])
    ]
    assert best(logits) == [33.0, 13.0, 14.0]
    assert [engine.length(s) for s in (a, b, c)] == [5, 3, 4]


def test_slots_between_get_padding_where_their_next_tokens_will_come(
    engine: TensorRTEngine, recorder: Recorder
) -> None:
    a, b, c, d = (start(engine, [10 * n, 10 * n + 1]) for n in range(1, 5))
    engine.free(b)
    recorder.taken()
    # Slot 1 is free; slot 2 runs and sits out.
    engine.forward([(a, [12, 13]), (d, [42])], [2, 1])
    assert recorder.taken() == [
        (0, [[12, 13], [0, 0], [31, 31], [42, 42]], [2, 0, 2, 2], [0, 1, 6])
    ]
    engine.forward([(c, [32])], [1])
    assert recorder.taken() == [(2, [[32]], [2], [0])]


def test_longer_pieces_run_alone_and_results_keep_the_order(
    engine: TensorRTEngine, recorder: Recorder
) -> None:
    a, b, c, d = (start(engine) for _ in range(4))
    recorder.taken()
    long, longer = list(range(100, 106)), list(range(200, 212))
    logits = engine.forward([(d, [40]), (c, longer), (b, [20, 21]), (a, long)], [1, 0, 2, 3])
    assert recorder.taken() == [
        (2, [longer], [0], [0]),
        (0, [long], [0], [3, 4, 5]),
        (1, [[20, 21], [211, 211], [40, 40]], [0, 12, 0], [4, 0, 1]),
    ]
    assert best(logits) == [40.0, 20.0, 21.0, 103.0, 104.0, 105.0]


def test_a_piece_longer_than_a_run_is_cut(engine: TensorRTEngine, recorder: Recorder) -> None:
    """The last piece of a prompt comes with draft tokens behind it: max_num_tokens + K."""
    sequence = start(engine)
    recorder.taken()
    tokens = list(range(100, 116))
    logits = engine.forward([(sequence, tokens)], [5])
    assert recorder.taken() == [
        (0, [tokens[:11]], [0], [0]),
        (0, [tokens[11:]], [11], [0, 1, 2, 3, 4]),
    ]
    assert best(logits) == [111.0, 112.0, 113.0, 114.0, 115.0]
    engine.forward(
        [
            (sequence, tokens),
        ],
        [0],
    )
    assert recorder.taken() == [
        (0, [tokens[:12]], [16], [0]),
        (0, [tokens[12:]], [28], [0]),
    ]
    assert engine.length(sequence) == 32


def test_logits_that_nobody_asks_for_are_not_returned(
    engine: TensorRTEngine, recorder: Recorder
) -> None:
    a, b = start(engine), start(engine)
    logits = engine.forward([(a, [1]), (b, [2])], [0, 0])
    assert logits.shape == (0, VOCAB_SIZE)
    assert recorder.taken()[-1] == (0, [[1], [2]], [0, 0], [0])


def test_truncated_tokens_are_written_over(engine: TensorRTEngine, recorder: Recorder) -> None:
    sequence = start(engine, [10, 11, 12, 13])
    engine.truncate(sequence, 2)
    engine.truncate(sequence, 3)  # there are only two
    assert engine.length(sequence) == 2
    recorder.taken()
    engine.forward([(sequence, [14])], [1])
    assert recorder.taken() == [(0, [[14]], [2], [0])]


def test_skipped_tokens_count(engine: TensorRTEngine, recorder: Recorder) -> None:
    sequence = start(engine)
    engine.skip(sequence, 30)
    engine.forward([(sequence, [14])], [1])
    assert recorder.taken()[-1] == (0, [[14]], [30], [0])


def test_nan_is_not_left_behind_what_is_truncated(
    engine: TensorRTEngine, recorder: Recorder
) -> None:
    recorder.nan_ids = {66}
    a, b = start(engine, [10]), start(engine, [20])
    engine.forward([(a, [11, 12]), (b, [21, 66, 22])], [2, 3])
    recorder.taken()
    engine.truncate(a, 2)
    engine.truncate(b, 2)
    assert recorder.taken() == [("clear", 1, 2, CAPACITY)]
    engine.forward([(b, [22, 23])], [2])
    recorder.taken()
    engine.truncate(b, 3)
    assert recorder.taken() == []


@pytest.mark.parametrize(
    ("length", "token_ids", "num_logits", "message"),
    [
        (0, [], 0, "0 tokens after 0: expected 1 to 45"),
        (43, [1, 2, 3], 0, "3 tokens after 43: expected 1 to 2"),
        (0, [1, 2], 3, "3 rows of logits of 2 tokens: expected at most 2"),
        (0, [1] * 9, 6, "6 rows of logits of 9 tokens: expected at most 5"),
    ],
)
def test_what_has_no_room_is_refused_before_anything_runs(
    engine: TensorRTEngine,
    recorder: Recorder,
    length: int,
    token_ids: list[int],
    num_logits: int,
    message: str,
) -> None:
    fine, sequence = start(engine), start(engine)
    engine.skip(sequence, length)
    recorder.taken()
    with pytest.raises(ValueError, match=f"^{message}$"):
        engine.forward([(fine, [1]), (sequence, token_ids)], [1, num_logits])
    assert recorder.taken() == []
    assert (engine.length(fine), engine.length(sequence)) == (0, length)


def test_the_last_step_of_the_longest_text_fits(engine: TensorRTEngine, recorder: Recorder) -> None:
    """Its slot is padded as far as any can be: 45 tokens, and 5 that another sequence brings."""
    a, b, c = (start(engine) for _ in range(3))
    engine.skip(b, 45)
    engine.forward([(a, [1] * 5), (c, [1])], [5, 1])
    _, input_ids, write_indices, _ = recorder.taken()[-1]
    assert max(write_indices) + len(input_ids[0]) == 50
    assert CAPACITY >= 50


def test_masks_run_beside_what_other_sequences_read(recorder: Recorder, tmp_path: Path) -> None:
    """Of a draft that proposes in one pass: five tokens and three masks are one rectangle."""
    folder = write_engine(
        tmp_path / "draft",
        vocab_size=VOCAB_SIZE,
        max_seq_len=40,
        max_draft_len=4,
        max_num_tokens=12,
        mask_token_id=999,
    )
    spec = TensorRTEngineSpec.read(folder)
    kv_cache_bytes = 4 * len(spec.cache_names) * spec.slot_bytes
    assert spec.memory.kv_cache_bytes == kv_cache_bytes and spec.capacity >= 40 + 2 * 8
    engine = TensorRTEngine(spec, recorder)
    assert (engine.max_logits, engine.max_logits_of_sequence) == (20, 5)
    a, b = start(engine), start(engine)
    recorder.taken()
    masks = [999] * 3
    logits = engine.forward([(a, [1, 2, 3, 4, 5, *masks]), (b, [7, *masks])], [4, 4])
    assert best(logits) == [5, *masks, 7, *masks]
    engine.truncate(a, 5)
    engine.truncate(b, 1)
    assert best(engine.forward([(a, [6]), (b, [8])], [1, 1])) == [6, 8]
    assert recorder.taken() == [
        (0, [[1, 2, 3, 4, 5, *masks], [7, *masks, *[999] * 4]], [0, 0], [4, 5, 6, 7, 8, 9, 10, 11]),
        (0, [[6], [8]], [5, 1], [0, 1]),
    ]
    # A text that is further behind is read by itself.
    engine.forward([(a, [*range(6), *masks]), (b, [1])], [4, 1])
    assert [len(ids[0]) for _, ids, *_ in recorder.taken()] == [9, 1]
