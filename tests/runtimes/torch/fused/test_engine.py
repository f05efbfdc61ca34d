"""The engine on fused kernels against the plain one, and the contract that both keep."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe.runtimes.pair.engine import Engine
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused_sizes import pages_to_share
from specpipe.runtimes.torch.rotary import Rotary
from tests.runtimes.torch.fused.toy import toy_config, toy_engines

# The same facts as for the plain engine, with the fixture `engine` of this file.
from tests.runtimes.torch.test_engine import (  # noqa: F401
    test_sequences_with_a_gap_between_them_run_together,
    test_slots_limit_admission_and_come_back,
    test_truncated_tokens_leave_no_trace,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

TOLERANCE = 1e-5  # float32, relative to the largest logit

Step = Sequence[tuple[int, int, int]]
"""Of several sequences: which, how many tokens it gets, and how many of them are scored."""

SMALL = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
"""What is enough where the arithmetic is not in question."""

MODELS: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "plain": ({}, {}),
    "one kv head, biases": ({"num_heads": 3, "num_kv_heads": 1}, {"has_bias": True}),
    "norms of heads, gelu": (
        {"num_heads": 2, "has_qk_norm": True, "activation": "gelu_pytorch_tanh"},
        {"is_tied": True},
    ),
    "window, scales, partial rope": (
        {
            "windows": (6, None),
            "attention_scale": 0.3,
            "embedding_scale": 1.7,
            "rotary": Rotary(16, 8, 1e4),
        },
        {},
    ),
}


def texts(count: int, length: int, vocab_size: int = 64) -> list[list[int]]:
    draw = random.Random(1)
    return [draw.choices(range(vocab_size), k=length) for _ in range(count)]


def largest_difference(
    settings: dict[str, Any],
    shapes: dict[str, bool],
    steps: Sequence[Step],
    *,
    text_length: int = 100,
    prompt_length: int = 9,
    limits: dict[str, int] | None = None,
    longest_recorded: int | None = None,
) -> float:
    """Runs steps on both engines; the largest difference, relative to the largest logit."""
    fused, plain = toy_engines(toy_config(**settings), limits=limits, **shapes)
    if longest_recorded is not None:
        fused.recordings(longest_recorded)
    engines: tuple[Engine, ...] = fused, plain
    contents = texts(3, text_length)
    sequences = [
        [engine.allocate(prompt_length=prompt_length, max_tokens=text_length) for _ in contents]
        for engine in engines
    ]
    worst = 0.0
    for step in steps:
        logits: list[Tensor] = []
        for engine, ids in zip(engines, sequences, strict=True):
            batch = []
            for index, count, _ in step:
                start = engine.length(ids[index])
                batch.append((ids[index], contents[index][start : start + count]))
            logits.append(engine.forward(batch, [scored for _, _, scored in step]))
        found, expected = logits
        assert found.shape == expected.shape and found.dtype == torch.float32
        if len(found):
            difference = (found - expected).abs().max() / expected.abs().max()
            assert difference == difference
            worst = max(worst, float(difference))
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_the_plain_engine(name: str) -> None:
    """Of 2 tokens of a prompt that are scored, and 2 through the kernels of decoding."""
    settings, shapes = MODELS[name]
    assert largest_difference(settings, shapes, [[(0, 10, 4)]]) <= TOLERANCE


def test_prompts_in_pieces_and_several_sequences_in_a_batch() -> None:
    steps: list[Step] = [
        [(1, 11, 0)],
        [(0, 1, 1), (1, 10, 0), (2, 4, 2)],
        [(2, 3, 3), (1, 3, 1), (0, 22, 4)],  # that of 0 ends with 2 tokens behind its prompt
    ]
    assert largest_difference(SMALL, {}, steps, prompt_length=22) <= TOLERANCE


def test_prompts_of_several_launches() -> None:
    """Of 128 rows, as those were recorded: 64 of two sequences each, and 5 of two."""
    steps: list[Step] = [[(0, 69, 0), (1, 69, 0)], [(1, 2, 1), (0, 1, 1)]]
    limits = {"max_seq_len": 200}
    worst = largest_difference(
        SMALL, {}, steps, prompt_length=70, limits=limits, longest_recorded=100
    )
    assert worst <= TOLERANCE


@pytest.mark.parametrize(
    "limits",
    [{"max_batch_size": 3, "max_draft_len": 4}, {"max_batch_size": 4, "max_draft_len": 5}],
    ids=["two launches", "a wide one"],
)
def test_more_rows_than_a_narrow_launch_has(limits: dict[str, int]) -> None:
    steps: list[Step] = [[(1, 9, 9), (0, 9, 8)]]
    assert largest_difference(SMALL, {}, steps, limits=limits) <= TOLERANCE


@pytest.mark.slow
def test_attention_over_several_chunks_and_pages() -> None:
    """Rows 127 to 131 of the layer with a window see the end of chunk 0, both, and 1 alone."""
    settings = {"windows": (4, None), "num_heads": 1, "num_kv_heads": 1}
    steps: list[Step] = [[(0, 127, 0)], [(0, 5, 5)]]
    limits = {"max_seq_len": 150}
    worst = largest_difference(
        settings, {}, steps, text_length=132, prompt_length=128, limits=limits
    )
    assert worst <= TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [{"windows": (6, 6)}, {"has_qk_norm": True}, {"attention_scale": 0.3}],
    ids=["window", "qk norm", "scale"],
)
def test_each_feature_shows_in_the_logits(changes: dict[str, Any]) -> None:
    """The comparison with the plain engine would notice if one were dropped."""
    text = texts(1, 20)[0]
    logits = []
    for settings in ({}, changes):
        _, plain = toy_engines(toy_config(**settings))
        sequence = plain.allocate(prompt_length=9, max_tokens=20)
        logits.append(plain.forward([(sequence, text)], [1]))
    difference = (logits[0] - logits[1]).abs().max() / logits[0].abs().max()
    assert difference > 100 * TOLERANCE


def test_a_row_is_the_same_whatever_runs_beside_it() -> None:
    """Bit for bit, which makes verification lossless in any dtype."""
    fused, _ = toy_engines(toy_config(**SMALL))
    first, second = texts(2, 8)
    one, other = (fused.allocate(prompt_length=9, max_tokens=20) for _ in range(2))
    alone = [fused.forward([(one, [token])], [1]) for token in first[:2]]
    fused.truncate(one, 0)
    with torch.inference_mode():
        for recording in fused.recordings(longest_prompt=0):
            recording.launch()  # of rows that are nobody's
    together = fused.forward([(other, second[:2]), (one, first[:3])], [0, 3])
    assert torch.equal(together[:2], torch.cat(alone))


@pytest.fixture(scope="module")
def toy() -> FusedEngine:
    """Token 7 of this model is not a number."""
    fused, _ = toy_engines(toy_config(**SMALL), limits={"max_batch_size": 4, "max_seq_len": 320})
    with torch.inference_mode():
        fused.decoder.weights.embedding[7] = torch.nan
    return fused


@pytest.fixture
def engine(toy: FusedEngine) -> FusedEngine:
    """All sequences of an earlier test are gone; what they wrote is not."""
    for sequence in list(toy._sequences):
        toy.free(sequence)
    return toy


def test_only_the_last_logits_asked_for_come_back(engine: FusedEngine) -> None:
    first, second = (engine.allocate(prompt_length=9, max_tokens=20) for _ in range(2))
    everything = engine.forward([(first, [10, 11, 12]), (second, [20, 21])], [3, 2])
    for sequence in (first, second):
        engine.truncate(sequence, 0)
    some = engine.forward([(second, [20, 21]), (first, [10, 11, 12])], [0, 2])
    assert torch.equal(some, everything[1:3])
    nothing = engine.forward([(first, [1]), (second, [2])], [0, 0])
    assert nothing.shape == (0, 64)
    assert [engine.length(first), engine.length(second)] == [4, 3]


def test_a_nan_stays_in_its_row_and_ends_with_its_token(engine: FusedEngine) -> None:
    healthy, sick = (engine.allocate(prompt_length=1, max_tokens=20) for _ in range(2))
    logits = engine.forward([(healthy, [14]), (sick, [13, 7, 15])], [1, 3])
    assert torch.isfinite(logits).all(dim=1).tolist() == [True, True, False, False]
    engine.truncate(sick, 1)
    logits = engine.forward([(healthy, [15]), (sick, [13])], [1, 1])
    assert torch.isfinite(logits).all()
    engine.forward([(sick, [7])], [0])
    engine.free(sick)
    successor = engine.allocate(prompt_length=1, max_tokens=20)
    logits = engine.forward([(healthy, [14]), (successor, [18])], [1, 1])
    assert torch.isfinite(logits).all()


def test_more_tokens_than_a_sequence_can_have_are_refused(engine: FusedEngine) -> None:
    sequence = engine.allocate(prompt_length=9, max_tokens=320)
    # Draft tokens and one more have their own room, in the rounds that are under way too.
    assert engine.capacity == 335
    engine.skip(sequence, 334)
    with pytest.raises(ValueError, match="2 tokens after 334: expected 1 to 1"):
        engine.forward([(sequence, [1, 2])], [1])
    with pytest.raises(ValueError, match="0 tokens after 334: expected 1 to 1"):
        engine.forward([(sequence, [])], [0])


def test_a_short_sequence_holds_no_more_pages_than_it_needs(engine: FusedEngine) -> None:
    engine.allocate(prompt_length=9, max_tokens=40)  # and 15: one page of 24
    assert engine.cache.can_hold(23 * 64)
    assert not engine.cache.can_hold(23 * 64 + 1)


def test_what_is_reused_and_what_is_read_page_by_page_has_the_same_bits(
    engine: FusedEngine,
) -> None:
    """As a sequence that has all its pages from the beginning, and reads all of its prompt."""
    text = [token + (token == 7) for token in texts(1, 84)[0]]
    sequence = engine.allocate(prompt_length=81, max_tokens=320)
    expected = engine.forward([(sequence, text)], [4])

    grown = engine.allocate(prompt_length=81, max_tokens=1)
    assert engine.reuse(grown, text, "a") == 0  # the first was not asked, so nothing of it is there
    for size in (40, 40):
        start = engine.length(grown)
        assert engine.grow(grown, start + size)
        engine.forward([(grown, text[start : start + size])], [0])
    assert engine.grow(grown, len(text))
    assert torch.equal(engine.forward([(grown, text[80:])], [4]), expected)

    reusing = engine.allocate(prompt_length=81, max_tokens=1)
    assert engine.reuse(reusing, text, "b") == 0
    assert engine.reuse(reusing, text, "a") == 64
    assert engine.grow(reusing, len(text))
    engine.free(sequence)
    engine.free(grown)
    assert torch.equal(engine.forward([(reusing, text[64:])], [4]), expected)
    assert engine.num_held_tokens == 2 * 64
    engine.free(reusing)
    assert engine.num_held_tokens == 0
    assert engine.num_cached_tokens == 64


def test_others_begin_with_full_pages_that_no_round_reads_again() -> None:
    """With 15 positions for rounds behind them, of what the kernels of prompts read."""
    assert [pages_to_share(num, 4) for num in (0, 78, 79, 142, 143)] == [0, 0, 1, 1, 2]


def test_rows_of_nobody_are_never_looked_at() -> None:
    """Beside a prompt, in pages that held what would show."""
    fused, plain = toy_engines(toy_config(**SMALL))
    for recording in fused.recordings(longest_prompt=100):
        recording.launch()
    with torch.inference_mode():
        for pool in (*fused.cache.keys, *fused.cache.values):
            pool.fill_(torch.nan)
    (text,) = texts(1, 23)
    pieces = [(text[:17], 0), (text[17:18], 1), (text[18:], 5)]
    logits = []
    for engine in (fused, plain):
        sequence = engine.allocate(prompt_length=18, max_tokens=40)
        rows = [engine.forward([(sequence, piece)], [count]) for piece, count in pieces]
        logits.append(torch.cat(rows))
    found, wanted = logits
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


def test_prompts_that_are_read_in_parts_have_the_same_keys_and_values() -> None:
    """With rows of decoding between two parts, and beside a prompt whose sequence is freed then."""
    config = toy_config(**{**SMALL, "num_layers": 2})
    fused, _ = toy_engines(config, limits={"max_batch_size": 4, "max_seq_len": 60})
    first, second, gone = texts(3, 60)
    alone, beside, read, freed = (
        fused.allocate(prompt_length=length, max_tokens=60) for length in (40, 2, 40, 40)
    )
    expected = fused.forward([(alone, first[:41])], [1])
    fused.forward([(beside, second[:1])], [0])
    fused.begin([(freed, gone[:30]), (read, first[:35])])
    for _ in range(2):
        assert (fused.length(read), fused.seconds_of_next) == (0, 0.0)
        fused.go_on()
        fused.forward([(beside, second[1:2])], [1])
        if freed in fused._sequences:
            fused.free(freed)
            fused.free(alone)
    assert (fused.length(read), fused.seconds_of_next) == (35, None)
    fused.begin([(read, first[35:38])])
    # What reads on ends that first.
    assert torch.equal(fused.forward([(read, first[38:41])], [1]), expected)
