"""Drafts that propose all of their tokens in one pass, by tables that know what a mask is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from specpipe.runtimes.pair.costs import CostTable, measure_costs
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.sampler import Drafted
from specpipe.speculative.noise import Floats
from specpipe.speculative.request import Sampling
from specpipe.speculative.warp import softmax
from tests.runtimes.table_engine import TableEngine, ids, make_pair, run
from tests.speculative.table import (
    DRAFT_RULES,
    NoisyModel,
    Rule,
    TableModel,
    greedy_reference,
    request,
    target_rule,
)

MASK = 2  # which no rule names


def in_parallel(rule: Rule) -> Rule:
    """What the rule would say behind its own answers, of which masks stand for those it lacks."""

    def parallel_rule(context: Sequence[int]) -> int:
        text = list(context)
        num_masks = 0
        while text[-1] == MASK:
            text.pop()
            num_masks += 1
        assert MASK not in text, "a token sees a mask of an earlier round"
        for _ in range(num_masks):
            text.append(rule(text))
        return rule(text)

    return parallel_rule


def parallel_pair(rule: Rule = target_rule, **options: object) -> EnginePair:
    return make_pair(
        TableModel(target_rule),
        TableModel(in_parallel(rule)),
        mask_token_id=MASK,
        **options,  # type: ignore[arg-type]
    )


def draft_of(pair: EnginePair) -> TableEngine:
    engine = pair._draft
    assert isinstance(engine, TableEngine)
    return engine


@pytest.mark.parametrize("draft_name", DRAFT_RULES)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
def test_greedy_output_is_that_of_the_target_alone(draft_name: str, num_draft_tokens: int) -> None:
    """More requests than slots, prompts longer than a step's budget, joining and leaving at any
    step.
    """
    pair = parallel_pair(DRAFT_RULES[draft_name], num_draft_tokens=num_draft_tokens)
    requests = [request(f"{p}-{m}", p, max_tokens=m) for p in (1, 7, 60) for m in (1, 2, 17, 32)]
    chunks = run(pair, requests)
    assert {n: ids(c) for n, c in chunks.items()} == {
        r.request_id: greedy_reference(r) for r in requests
    }
    assert draft_of(pair).sequences == {}


def test_a_round_runs_the_draft_once_over_what_it_has_not_read_and_masks() -> None:
    pair = parallel_pair(num_draft_tokens=3)
    chunks = run(pair, [request(max_tokens=17)])["r"]
    # All are accepted: of each round four tokens are unread, and two masks stand behind them.
    assert draft_of(pair).forwards == [[3 + 2]] + [[4 + 2]] * 3
    statistics = chunks[-1].statistics
    assert statistics is not None
    assert (statistics.num_steps, statistics.acceptance_rate) == (5, 1.0)


def test_the_last_positions_of_the_draft_get_fewer_masks() -> None:
    """The engine refuses a position beyond its end; the text goes on without a draft."""
    pair = parallel_pair(num_draft_tokens=8, draft_max_seq_len=20)
    r = request(max_tokens=40)
    chunks = run(pair, [r])["r"]
    assert ids(chunks) == greedy_reference(r)
    # 3 + 9 are read with all masks; the last six of 20 positions hold masks, and then two.
    assert draft_of(pair).forwards == [[3 + 7], [9 + 7]]


def test_long_texts_leave_room_for_fewer_masks_in_a_forward() -> None:
    pair = parallel_pair(num_draft_tokens=8, max_num_tokens=16)
    r = request(prompt_length=14, max_tokens=30)
    assert ids(run(pair, [r])["r"]) == greedy_reference(r)
    assert draft_of(pair).forwards[0] == [14 + 2]


def test_a_row_with_a_nan_ends_the_draft_there() -> None:
    class Poisoned(TableModel):
        def logits(self, token_ids: Sequence[int], num_rows: int) -> Floats:
            rows = super().logits(token_ids, num_rows)
            if len(token_ids) > 30:
                rows[-1] = np.nan  # of the last mask
            if len(token_ids) > 60:
                rows[:] = np.nan
            return rows

    pair = make_pair(
        TableModel(target_rule),
        Poisoned(in_parallel(target_rule)),
        mask_token_id=MASK,
        num_draft_tokens=3,
    )
    r = request(max_tokens=90)
    chunks = run(pair, [r])["r"]
    assert ids(chunks) == greedy_reference(r)
    assert chunks[-1].statistics is not None
    assert chunks[-1].statistics.draft_status == "draft_failed"
    histogram = chunks[-1].statistics.acceptance_histogram
    assert histogram is not None and histogram[2] > 5 and len(histogram) == 4


def test_a_cancelled_request_frees_its_sequence_and_the_others_go_on() -> None:
    pair = parallel_pair(num_draft_tokens=3, max_batch_size=2)
    requests = [request(name, max_tokens=20) for name in "abc"]
    for r in requests:
        pair.submit(r)
    chunks = pair.step()
    pair.cancel("a")
    while pair.has_work():
        chunks += pair.step()
    assert {c.request_id: c.finish_reason for c in chunks if c.finish_reason} == {
        "a": "cancelled",
        "b": "length",
        "c": "length",
    }
    for r in requests[1:]:
        assert ids([c for c in chunks if c.request_id == r.request_id]) == greedy_reference(r)
    assert draft_of(pair).sequences == {}


def test_requests_of_all_draft_lengths_share_a_forward() -> None:
    pair = parallel_pair(num_draft_tokens=8)
    requests = [request(str(k), max_tokens=30, num_draft_tokens=k) for k in (0, 1, 4, 8)]
    chunks = run(pair, requests)
    assert all(ids(chunks[r.request_id]) == greedy_reference(r) for r in requests)
    assert draft_of(pair).forwards[0] == [3, 3 + 3, 3 + 7]


@pytest.mark.parametrize("draft_pages", [30, 12])
def test_masks_never_enter_what_prompts_share(draft_pages: int) -> None:
    """Pages of 8; a prompt that ends at a page's end, and others that begin as it does."""
    pair = parallel_pair(
        num_draft_tokens=8,
        max_seq_len=200,
        max_num_tokens=64,
        num_pages=60,
        draft_pages=draft_pages,
    )
    for _ in range(2):
        requests = [request(str(n), n, max_tokens=20) for n in (16, 17, 30, 48)]
        chunks = run(pair, requests)
        assert all(ids(chunks[r.request_id]) == greedy_reference(r) for r in requests)
    pages = draft_of(pair).paged
    assert pages is not None and pages.cached
    assert all(MASK not in key for key in pages.cached)


def excess(pair: EnginePair, target: NoisyModel, number: int = 300) -> float:
    """How far the first two tokens of answers are from the target's distribution, at the two ids
    that are furthest off, in the deviations that chance has there.
    """
    r = request(max_tokens=3, num_draft_tokens=2)
    requests = [
        replace(r, request_id=str(i), sampling=Sampling(temperature=1.0, seed=i))
        for i in range(number)
    ]
    counts = Counter(tuple(ids(found)[:2]) for found in run(pair, requests).values())
    expected = np.empty((12, 12))
    for first, probability in enumerate(softmax(target.logits(r.prompt_token_ids, 1)[0])):
        second = softmax(target.logits([*r.prompt_token_ids, first], 1)[0])
        expected[first] = number * probability * second
    deviations = np.sqrt(expected * (1.0 - expected / number))
    seen = np.array([[counts[first, second] for second in range(12)] for first in range(12)])
    return float(((np.abs(seen - expected) - 1.0) / deviations).max())


def test_unseeded_answers_have_the_distribution_of_the_target() -> None:
    """Whatever the draft's rows say; and rows that are not those drawn from are found."""
    target, draft = NoisyModel(1), NoisyModel(2, blend=0.7)

    def pair_of() -> EnginePair:
        return make_pair(target, draft, mask_token_id=3, num_draft_tokens=2, max_queue_size=300)

    assert excess(pair_of(), target) < 5.0
    faulty = pair_of()
    sampler = faulty._drafting._sampler
    draw: Callable[..., list[bool]] = sampler.draft

    def of_another_row(logits: object, drafted: Sequence[Drafted]) -> list[bool]:
        has_token = draw(logits, drafted)
        for d in drafted:
            d.probs.update(dict.fromkeys(d.probs, d.probs[0]))
        return has_token

    sampler.draft = of_another_row  # type: ignore[method-assign]
    assert excess(faulty, target) > 6.0


def test_a_parallel_draft_length_costs_one_pass() -> None:
    rows = {1: 1.0, 2: 1.0, 9: 1.4}
    target = {1: 4.0, 9: 5.0, 36: 9.0}
    parallel = CostTable(8, rows, target, is_parallel=True).at(1)
    in_steps = CostTable(8, rows, target).at(1)
    assert parallel.time(1) == pytest.approx(in_steps.time(1))
    assert parallel.time(8) == pytest.approx(1.0 + 1.4 / 4.0 + 0.25)
    assert in_steps.time(8) == pytest.approx(1.0 + 8 * 1.0 / 4.0 + 0.25)
    assert parallel.copying.time(8) == in_steps.copying.time(8) == pytest.approx(1.25)


def test_costs_of_a_pass_are_measured_and_decide() -> None:
    draft, target = TableEngine(TableModel(target_rule)), TableEngine(TableModel(target_rule))
    costs = measure_costs(draft, target, max_batch_size=4, num_draft_tokens=3, is_parallel=True)
    assert draft.sequences == {}
    assert {tuple(f) for f in draft.forwards} == {(n,) * b for n in (1, 2, 4) for b in (1, 4)}
    assert costs.step_seconds([3, 3]) == costs.seconds("target", 8) + costs.seconds("draft", 8)


def test_all_requests_of_a_batch_draft_as_many_tokens_as_verification_allows() -> None:
    class Fixed(CostTable):
        def observe(self, *_: object) -> None:
            pass

    pair = parallel_pair(
        num_draft_tokens=8,
        max_num_tokens=64,
        costs=Fixed(8, {2: 0.5, 36: 0.6}, {1: 1.0, 36: 1.3}, is_parallel=True),
    )
    requests = [request(str(n), max_tokens=60) for n in range(4)]
    chunks = run(pair, requests)
    assert all(ids(chunks[r.request_id]) == greedy_reference(r) for r in requests)
    # Masks cost next to nothing, so that all are asked for once all are seen to be accepted.
    assert [9 + 7] * 4 in draft_of(pair).forwards
