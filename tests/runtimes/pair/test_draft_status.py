"""A named draft length is drafted whatever it gains; else a word says why drafting was off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import pytest

from specpipe.runtimes.pair.costs import CostTable
from specpipe.runtimes.pair.pair import Pair
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.draft_status import DraftStatus
from specpipe.speculative.request import Chunk, Request
from tests.runtimes.pair import table_rounds, test_streams
from tests.runtimes.table_engine import ids, make_pair, run
from tests.runtimes.tensorrt_llm.engines.bls import make_bls_pair, stand_ins
from tests.runtimes.tensorrt_llm.engines.test_bls import Timed
from tests.speculative.table import DRAFT_RULES, TableModel, greedy_reference, request, target_rule


class FixedCosts(CostTable):
    """Costs that the speed of the test's own engines does not change."""

    def observe(self, role: object, num_rows: int, seconds: float) -> None:
        pass

    def hope(self) -> None:
        pass


TARGET, WRONG = TableModel(target_rule), TableModel(DRAFT_RULES["wrong"])
DEAR = FixedCosts(4, draft={1: 4.0, 4: 4.0}, target={1: 1.0, 20: 4.0})
"""A draft token costs four of the target's: not even a perfect draft pays."""

CHEAP = FixedCosts(4, draft={1: 0.01, 4: 0.01}, target={1: 1.0, 20: 1.0})
DEAR_ROUNDS = StepCosts(draft_step=4.0, verify=[0.0, 1.0, 2.0, 3.0, 4.0])


def engines(draft: TableModel = TARGET, **options: Any) -> Pair:
    return make_pair(TARGET, draft, **{"num_draft_tokens": 4, "costs": DEAR, **options})


def stream(draft: TableModel = TARGET, **options: Any) -> Pair:
    options = {"num_draft_tokens": 4, "costs": DEAR_ROUNDS, **options}
    return table_rounds.make_pair(draft, **options)[0]


def bls(draft: TableModel = TARGET, **options: Any) -> Pair:
    """Adaptive, with a draft that is slower than the target."""
    slow_draft, target = stand_ins(TARGET, draft)
    timed = Timed(slow_draft, 0.004)
    return make_bls_pair(timed, target, **{"num_draft_tokens": 4, "adaptive": True, **options})


def dropping() -> Pair:
    """A target that drops what it is given to verify."""
    draft, target = stand_ins(TARGET, WRONG, drops="all")
    return make_bls_pair(draft, target, num_draft_tokens=4)


def last(pair: Pair, asked: Request) -> Chunk:
    """The last chunk of a request, all of whose text is the target's."""
    chunks = run(pair, [asked])[asked.request_id]
    assert ids(chunks) == greedy_reference(asked)
    return chunks[-1]


def steps(chunk: Chunk) -> Counter[int]:
    """Number of steps by draft tokens."""
    assert chunk.counts is not None
    return chunk.counts.by_draft_length


def told(chunk: Chunk) -> tuple[str | None, int]:
    """The status, and how many tokens were drafted."""
    statistics = chunk.statistics
    assert statistics is not None
    rate = statistics.total_accepted_draft_tokens / max(statistics.total_draft_tokens, 1)
    assert statistics.acceptance_rate == rate
    return statistics.draft_status, statistics.total_draft_tokens


Make = Callable[..., Pair]
RUNTIMES = pytest.mark.parametrize("make", [engines, stream, bls])


@RUNTIMES
def test_a_named_length_is_drafted_in_every_step_though_it_does_not_pay(make: Make) -> None:
    right = last(make(), request(max_tokens=20, num_draft_tokens=4))
    assert steps(right) == {4: 4}
    assert told(right) == ("drafted", 16)
    # Nothing is accepted; the last steps draft what there is yet a use for.
    wrong = last(make(WRONG), request(max_tokens=20, num_draft_tokens=3))
    assert steps(wrong) == {3: 17, 2: 1, 1: 1, 0: 1}
    assert told(wrong) == ("drafted", 3 * 17 + 2 + 1)


@RUNTIMES
def test_a_named_length_is_drafted_at_any_load(make: Make) -> None:
    pair = make(schedule=((1, 0),))
    assert told(last(pair, request(max_tokens=20, num_draft_tokens=4))) == ("drafted", 16)
    assert told(last(pair, request(max_tokens=20))) == ("off_by_schedule", 0)


def test_one_named_length_does_not_let_others_draft() -> None:
    requests = [request("named", max_tokens=20, num_draft_tokens=4), request("free"), request("b")]
    chunks = run(engines(), requests)
    assert {r.request_id: ids(chunks[r.request_id]) for r in requests} == {
        r.request_id: greedy_reference(r) for r in requests
    }
    assert steps(chunks["named"][-1]) == {4: 4}
    assert told(chunks["free"][-1]) == told(chunks["b"][-1]) == ("does_not_pay", 0)


@pytest.mark.parametrize("has_rounds", [True, False])
def test_a_named_length_is_copied_or_drafted(has_rounds: bool) -> None:
    for draft in ("self", "wrong"):
        pair, rounds = test_streams.copying_pair(
            draft, has_rounds=has_rounds, costs=DEAR_ROUNDS, draft_max_seq_len=40
        )
        asked = request(max_tokens=60, num_draft_tokens=4)
        chunks = run(pair, [asked])["r"]
        assert ids(chunks) == test_streams.text_of(test_streams.lap_rule, asked)
        # Also beyond what the draft can hold.
        assert set(steps(chunks[-1])) - {4} <= set(range(4))
        assert sum(n for k, n in steps(chunks[-1]).items() if k < 4) <= 4
        assert told(chunks[-1])[0] == "drafted"
        assert set(rounds.copied) == ({4} if has_rounds else set())


class Nan(TableModel):
    def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray:
        return super().logits(token_ids, num_rows) * np.nan


class NanAfterWrongTokens(TableModel):
    """Every row is NaN when a token of the text is not the target's, as a draft token may be."""

    def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray:
        rows = super().logits(token_ids, num_rows)
        is_wrong = any(target_rule(token_ids[:i]) != token_ids[i] for i in range(3, len(token_ids)))
        return rows * np.nan if is_wrong else rows


def cancelled_in_the_queue() -> Chunk:
    pair = engines(max_batch_size=1)
    for name in "ab":
        pair.submit(request(name))
    pair.step()
    pair.cancel("b")
    return next(chunk for chunk in pair.step() if chunk.request_id == "b")


def at_the_second_place() -> Chunk:
    """Of two requests, where the draft's KV cache holds one sequence."""
    pair = make_pair(TARGET, TARGET, num_draft_tokens=4)
    draft = pair.engines["draft"]
    draft.max_batch_size = 1
    return run(pair, [request("a", max_tokens=60), request("b", max_tokens=8)])["b"][-1]


def timed_first() -> Chunk:
    """Before it is known what pays, three kinds of call are timed; the plain one is the last."""
    pair = bls()
    run(pair, [request("a", max_tokens=12)])
    return run(pair, [request("b", max_tokens=10)])["b"][-1]


CAUSES: list[tuple[str, int, Callable[[], Chunk]]] = [
    ("drafted", 13, lambda: last(engines(costs=None), request())),
    ("drafted", 13, lambda: last(engines(costs=CHEAP), request())),
    ("off_by_request", 0, lambda: last(engines(), request(num_draft_tokens=0))),
    ("off_by_config", 0, lambda: last(engines(num_draft_tokens=0), request())),
    ("off_by_config", 0, lambda: last(engines(num_draft_tokens=0), request(num_draft_tokens=0))),
    ("off_by_schedule", 0, lambda: last(engines(costs=None, schedule=((1, 0),)), request())),
    ("does_not_pay", 0, lambda: last(engines(), request())),
    ("does_not_pay", 0, lambda: last(stream(), request())),
    ("no_room", 0, lambda: last(engines(costs=None, draft_max_seq_len=8), request("r", 9))),
    ("no_room", 0, lambda: last(stream(draft_max_seq_len=8), request("r", 9))),
    ("no_room", 0, at_the_second_place),
    ("draft_failed", 0, lambda: last(engines(Nan(target_rule), costs=None), request())),
    ("not_verified", 0, lambda: last(dropping(), request())),
    ("too_short", 0, lambda: last(engines(costs=None), request(max_tokens=1))),
    ("too_short", 0, lambda: last(bls(), request(max_tokens=1))),
    ("not_ready", 0, lambda: last(stream(costs=test_streams.COSTS), request(max_tokens=2))),
    ("not_ready", 0, timed_first),
    ("not_started", 0, cancelled_in_the_queue),
]


@pytest.mark.parametrize(("status", "num_drafted", "cause"), CAUSES)
def test_a_word_says_why(status: str, num_drafted: int, cause: Callable[[], Chunk]) -> None:
    assert told(cause()) == (status, num_drafted)


def test_the_word_of_a_draft_that_stopped_says_why_it_stopped() -> None:
    hopeless = FixedCosts(4, draft={1: 0.2, 4: 0.2}, target={1: 1.0, 20: 1.2})
    status, num_drafted = told(last(engines(WRONG, costs=hopeless), request(max_tokens=100)))
    assert status == "does_not_pay" and 0 < num_drafted < 25
    status, num_drafted = told(
        last(engines(costs=None, draft_max_seq_len=12), request("r", 3, max_tokens=40))
    )
    assert status == "no_room" and num_drafted > 0


def test_a_draft_that_spoils_the_target_has_failed() -> None:
    pair = make_pair(NanAfterWrongTokens(target_rule), WRONG, num_draft_tokens=2)
    assert told(last(pair, request())) == ("draft_failed", 0)


def test_a_draft_that_sees_the_end_at_once_proposes_nothing() -> None:
    asked = request(max_tokens=2, end_token_ids=frozenset({greedy_reference(request())[0]}))
    draft, target = stand_ins(TARGET, TARGET)
    pair = make_bls_pair(draft, target, num_draft_tokens=3)
    assert told(run(pair, [asked])["r"][-1]) == ("nothing_proposed", 0)


def test_every_word_has_a_cause_here() -> None:
    elsewhere = {"nothing_proposed", "decided_by_engine"}  # above, and in test_llm_pair.py
    assert {status for status, _, _ in CAUSES} | elsewhere == set(get_args(DraftStatus))
