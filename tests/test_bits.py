"""benchmarks.bits on table models: on a pair that is right, and on some that are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.bits.asked import Material, ask, only
from benchmarks.bits.trial import Outcome, try_pair
from specpipe.runtimes.pair.costs import CostTable
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.room import Room
from specpipe.speculative.guide import Guide
from specpipe.speculative.request import Chunk
from tests.ascii_guides import ASCII, END, VOCAB_SIZE
from tests.runtimes.table_engine import make_pair
from tests.speculative.table import NoisyModel

MATERIAL = Material(
    text=np.random.default_rng(3).integers(5, VOCAB_SIZE, 400).tolist(),
    num_questions=20,
    max_prompt_tokens=70,
    max_tokens=24,
    max_num_draft_tokens=8,
    vocab_size=VOCAB_SIZE,
    end_token_ids=frozenset({END}),
    stop_strings=("w4", "1 w"),
    guides={"words": Guide(type="regex", text="[a-c]{2,4}( [x-z]{1,3}){0,2}")},
)


def pair_of(**options: Any) -> EnginePair:
    target, draft = (NoisyModel(s, vocab_size=VOCAB_SIZE, blend=0.3) for s in (1, 2))
    return make_pair(
        target, draft, guides=ASCII, **{"num_draft_tokens": 8, "max_num_tokens": 40, **options}
    )


def tried(
    pair: EnginePair,
    *,
    number: int = 30,
    tolerance: float | None = None,
    prefixes: Sequence[Sequence[int]] = (),
) -> Outcome:
    asked = ask(5, number, replace(MATERIAL, prefixes=prefixes))
    return try_pair(pair, asked, vocab_size=VOCAB_SIZE, max_waiting=6, tolerance=tolerance)


def disturbed(change: Callable[[int, torch.Tensor], torch.Tensor]) -> EnginePair:
    """A pair whose target's logits depend on how many sequences share a forward."""
    pair = pair_of()
    forward = pair.engines["target"].forward

    def changed(batch: Sequence[Any], num_logits: Sequence[int]) -> torch.Tensor:
        return change(len(batch), forward(batch, num_logits))

    pair.engines["target"].forward = changed  # type: ignore[method-assign]
    return pair


@pytest.mark.parametrize("is_short", [False, True])
def test_requests_that_come_and_go_are_told_what_each_is_alone(
    is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short, too; then draft lengths adapt, and prompts begin alike."""
    if is_short:
        monkeypatch.setattr(Room, "AHEAD", 0)
        costs = CostTable(8, {1: 0.1, 4: 0.1}, {1: 1.0, 36: 1.5})
        memory = {"max_seq_len": 100, "num_pages": 18, "draft_pages": 14}
        pair = pair_of(costs=costs, prompt_lookup=True, **memory)
        outcome = tried(pair, number=60, prefixes=(MATERIAL.text[:20], MATERIAL.text[20:50]))
        counts = outcome.counts()
        assert min(counts["gave way"], counts["found cached"]) > 3
    else:
        outcome = tried(pair_of(), number=60)
    assert outcome.is_right, outcome.report()
    counts = outcome.counts()
    assert counts["requests"] == 60
    assert counts["most at once"] >= 4
    assert min(counts[reason] for reason in ("length", "stop", "cancelled")) >= 4
    assert 0 < counts["accepted"] < counts["draft tokens"]


def test_all_kinds_of_requests_are_asked() -> None:
    kinds = {one.kind.partition(", ")[2] for one in ask(5, 300, MATERIAL)}
    assert kinds == {
        "plain",
        "log-probabilities",
        "prompt scored",
        "prompt scored alone",
        "penalties",
        "bias",
        "bad words",
        "min_tokens",
        "prediction",
        "guide words",
    }


def test_a_request_that_company_changes_is_found_with_its_neighbours() -> None:
    outcome = tried(disturbed(lambda n, logits: logits.roll(1, dims=-1) if n > 3 else logits))
    assert len(outcome.faults) > 3
    assert outcome.of_pair == []
    for fault, where in outcome.faults[:20]:  # those that are asked again
        assert " at " in fault.what
        assert "alone, with its own draft tokens, it is right: it takes company" in where
        assert "    " in where


def test_a_request_that_its_draft_tokens_change_is_found() -> None:
    outcome = tried(
        disturbed(lambda _, logits: logits.roll(1, dims=-1) if len(logits) == 6 else logits)
    )
    assert any("alone, with its own draft tokens, too" in where for _, where in outcome.faults)


def test_one_unit_in_the_last_place_of_a_log_probability_is_a_fault() -> None:
    """The tokens are the same."""

    def nudged(batch_size: int, logits: torch.Tensor) -> torch.Tensor:
        return logits * (1 + 2**-22) if batch_size > 2 else logits

    faults = [fault.what for fault, _ in tried(disturbed(nudged)).faults]
    assert faults
    assert all(what.startswith(("log-probabilities", "likeliest tokens")) for what in faults)
    assert tried(disturbed(nudged), tolerance=1e-4).is_right


def test_a_sequence_that_is_not_freed_is_a_fault_of_the_pair() -> None:
    pair = pair_of()
    draft = pair.engines["draft"]
    kept = []

    def forgetful(sequence: int) -> None:
        kept.append(sequence)
        if len(kept) != 20:  # of a request: room was counted before
            del draft.sequences[sequence]  # type: ignore[attr-defined]

    draft.free = forgetful  # type: ignore[method-assign]
    outcome = tried(pair)
    assert not outcome.faults
    assert outcome.of_pair == [
        "draft: room for Room(shortest=3, longest=3), at the start for Room(shortest=4, longest=4)"
    ]


def test_a_token_that_is_told_twice_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of()
    step = pair.step

    def repeated() -> list[Chunk]:
        found = step()
        is_company = pair.occupancy().num_running > 2
        return [*found, *(c for c in found if is_company and c.finish_reason is None)]

    monkeypatch.setattr(pair, "step", repeated)
    outcome = tried(pair)
    assert "counted" in outcome.report()
    assert outcome.of_pair == []


def test_a_pair_that_hangs_is_told_from_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of()
    step = pair.step
    monkeypatch.setattr(pair, "step", lambda: [] if pair.occupancy().num_running > 3 else step())
    outcome = tried(pair)
    assert outcome.of_pair == ["it has work, and does none"]
    assert "never told to be over" in outcome.report()


def test_a_part_of_the_requests_comes_in_the_same_steps() -> None:
    asked = ask(5, 200, MATERIAL)
    first = next(n for n, one in enumerate(asked) if n > 1 and one.steps_after is None)
    ids = [asked[n].request.request_id for n in (first - 1, first + 1, first + 4)]
    kept = only(asked, ids)
    assert [one.request for one in kept] == [
        asked[n].request for n in (first - 1, first + 1, first + 4)
    ]
    before = sum(one.steps_after or 0 for one in asked[:first])
    between = sum(one.steps_after or 0 for one in asked[first + 2 : first + 5])
    assert [one.steps_after for one in kept] == [before, None, between]
