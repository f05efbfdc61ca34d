from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from specpipe.errors import FAULT, RequestError
from specpipe.runtimes.pair.costs import CostTable
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import KVUse
from specpipe.speculative.decode import decode
from specpipe.speculative.request import Request, Sampling
from tests.runtimes.table_engine import TableEngine, ids, make_pair, run
from tests.speculative.table import (
    DRAFT_RULES,
    NoisyModel,
    TableModel,
    WordDetokenizer,
    greedy_reference,
    new_state,
    request,
    target_rule,
)


def engines(pair: EnginePair) -> tuple[TableEngine, TableEngine]:
    draft, target = pair._draft, pair._target
    assert isinstance(draft, TableEngine) and isinstance(target, TableEngine)
    return draft, target


@pytest.mark.parametrize("draft_name", DRAFT_RULES)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3, 5, 8])
def test_greedy_requests_of_all_sizes_together(draft_name: str, num_draft_tokens: int) -> None:
    """More requests than slots, prompts longer than a step's budget, joining and leaving at any
    step.
    """
    pair = make_pair(
        TableModel(target_rule),
        TableModel(DRAFT_RULES[draft_name]),
        num_draft_tokens=num_draft_tokens,
    )
    requests = [request(f"{p}-{m}", p, max_tokens=m) for p in (1, 7, 60) for m in (1, 2, 17, 32)]
    chunks = run(pair, requests)
    assert {n: ids(c) for n, c in chunks.items()} == {
        r.request_id: greedy_reference(r) for r in requests
    }
    assert all(c[-1].finish_reason == "length" for c in chunks.values())
    for engine in engines(pair):
        assert engine.sequences == {}


def sampled_requests(is_seeded: bool) -> list[Request]:
    rng = random.Random(5)
    requests = []
    for number in range(24):
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_k=rng.choice([0, 1, 3, 8]),
            top_p=rng.choice([1.0, 0.9, 0.5]),
            min_p=rng.choice([0.0, 0.1]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            min_tokens=rng.choice([0, 9]),
            bad_words=rng.choice([(), ((5,), (6, 7), (1, 2, 3))]),
            logit_bias=rng.choice([(), ((3, 4.0), (8, -2.0), (3, -1.0))]),
            seed=rng.getrandbits(64),
            is_seeded=is_seeded,
        )
        requests.append(
            request(
                str(number),
                prompt_token_ids=tuple(rng.choices(range(12), k=rng.choice([1, 5, 40]))),
                max_tokens=rng.choice([1, 12, 30]),
                end_token_ids=frozenset({11}),
                num_draft_tokens=rng.choice([0, 1, 4]),
                sampling=sampling,
                return_log_probs=rng.choice([True, False]),
                num_top_log_probs=rng.choice([0, 3]),
                return_prompt_log_probs=rng.choice([True, False]),
            )
        )
    return requests


@pytest.mark.parametrize("mask_token_id", [None, 3])
@pytest.mark.parametrize("is_seeded", [True, False])
def test_batched_loop_equals_the_specification(is_seeded: bool, mask_token_id: int | None) -> None:
    """Token by token and count by count, for both accept rules and every warper."""
    target, draft = NoisyModel(1), NoisyModel(2, blend=0.4)
    requests = sampled_requests(is_seeded)
    chunks = run(make_pair(target, draft, mask_token_id=mask_token_id), requests)
    for r in requests:
        state = new_state(r, vocab_size=12)
        # float32, as the batched loop gets its logits
        expected = list(
            decode(state, _Rounded(target), _Rounded(draft), mask_token_id=mask_token_id)
        )
        found = chunks[r.request_id]
        assert ids(found) == ids(expected)
        assert found[-1].finish_reason == expected[-1].finish_reason
        assert found[-1].statistics == expected[-1].statistics
        for has_any, name in (
            (r.return_log_probs, "log_probs"),
            (r.num_top_log_probs > 0, "top_log_probs"),
            (r.return_prompt_log_probs, "prompt_log_probs"),
            (r.return_prompt_log_probs and r.num_top_log_probs > 0, "prompt_top_log_probs"),
        ):
            numbers = [np.array(getattr(c, name)).reshape(-1) for c in found]
            expected_numbers = [np.array(getattr(c, name)).reshape(-1) for c in expected]
            np.testing.assert_allclose(
                np.concatenate(numbers), np.concatenate(expected_numbers), atol=1e-5
            )
            has_length = name.startswith("prompt") and len(r.prompt_token_ids) == 1
            assert any(map(len, numbers)) == (has_any and len(ids(found)) > 0 and not has_length)


@pytest.mark.parametrize("is_seeded", [True, False])
def test_predicted_requests_in_a_batch_equal_the_specification(is_seeded: bool) -> None:
    """Of each, what it said without a prediction, in which every seventh token was changed."""
    target, draft = NoisyModel(1), NoisyModel(2, blend=0.4)
    plain = sampled_requests(is_seeded)
    said = run(make_pair(target, draft), plain)
    requests = []
    for r in plain:
        text = [i if at % 7 else (i + 1) % 12 for at, i in enumerate(ids(said[r.request_id]), 1)]
        requests.append(replace(r, prediction_token_ids=tuple(text)))
    pair = make_pair(target, draft)
    chunks = run(pair, requests)
    accepted = 0
    for r in requests:
        expected = list(decode(new_state(r, vocab_size=12), _Rounded(target), _Rounded(draft)))
        found = chunks[r.request_id]
        assert ids(found) == ids(expected)
        if is_seeded:
            assert ids(found) == ids(said[r.request_id])
        statistics = found[-1].statistics
        assert statistics == expected[-1].statistics
        assert statistics is not None
        accepted += statistics.accepted_prediction_tokens
        assert r.num_draft_tokens or not statistics.accepted_prediction_tokens
    assert accepted > 10


class _Rounded:
    def __init__(self, model: NoisyModel) -> None:
        self.model = model

    def logits(self, token_ids: object, num_rows: int) -> np.ndarray:
        return self.model.logits(token_ids, num_rows).astype(np.float32)  # type: ignore[arg-type]


def test_padding_ids_are_never_proposed_or_emitted() -> None:
    """250 used ids, 256 draft rows and 320 target rows; unused rows have the largest logits."""

    class Heavy(TableModel):
        def logits(self, token_ids: object, num_rows: int) -> np.ndarray:
            rows = super().logits(token_ids, num_rows)  # type: ignore[arg-type]
            rows[:, 252:] = 9.0
            return rows

    for target_rows in (320, 384, 456):
        pair = make_pair(
            Heavy(target_rule, target_rows),
            Heavy(target_rule, 256),
            unused_token_ids=((250, target_rows),),
        )
        sampled = Sampling(temperature=1.0, seed=1)
        chunks = run(pair, [request("g"), request("s", sampling=sampled)])
        assert ids(chunks["g"]) == greedy_reference(request())
        assert chunks["g"][-1].statistics.acceptance_rate == 1.0  # type: ignore[union-attr]
        assert max(ids(chunks["s"])) < 250


def test_long_prompt_does_not_stall_the_others() -> None:
    pair = make_pair(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=0)
    pair.submit(request("short", 1, max_tokens=10))
    pair.submit(request("long", 60, max_tokens=2))
    order = []
    while pair.has_work():
        order.append(sorted(c.request_id for c in pair.step()))
    # 60 tokens at 16 a step: the long prompt is read in the first three steps and starts in the
    # fourth.
    assert order[:5] == [["short"]] * 3 + [["long", "short"]] * 2
    _, target = engines(pair)
    assert target.forwards[:4] == [[1, 16], [1, 16], [1, 16], [1, 12]]


def test_draft_reads_a_long_prompt_along() -> None:
    pair = make_pair(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=2)
    run(pair, [request("long", 40, max_tokens=6)])
    draft, target = engines(pair)
    assert target.forwards == [[16], [16], [8 + 2], [1 + 2]]
    assert draft.forwards == [[16], [16], [8], [1], [2], [1]]


def test_draft_never_reads_the_whole_prompt_ahead() -> None:
    """The second prompt gets 6 of the 16 tokens of a step; the draft could take all of its 10."""
    pair = make_pair(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=2)
    requests = [request(name, 10, max_tokens=5) for name in "ab"]
    chunks = run(pair, requests)
    assert [ids(chunks[name]) for name in "ab"] == [greedy_reference(r) for r in requests]
    draft, target = engines(pair)
    assert target.forwards[0] == [10 + 2, 6]
    assert draft.forwards[0] == [9]


def test_a_prompt_that_is_scored_alone_costs_no_draft_and_no_step_beyond_it() -> None:
    pair = make_pair(TableModel(target_rule), TableModel(target_rule))
    draft, target = engines(pair)
    target.max_logits_of_sequence = 7
    (chunk,) = run(pair, [request("r", 20, return_prompt_log_probs=True, max_tokens=0)])["r"]
    assert target.forwards == [[7], [7], [5]]
    assert draft.forwards == []
    assert len(chunk.prompt_log_probs) == 19
    assert draft.sequences == target.sequences == {}


def test_prompts_are_scored_beside_all_that_goes_on() -> None:
    """Rows of logits are shared out: those that decode have theirs, and the others what is left."""
    pair = make_pair(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=3)
    _, target = engines(pair)
    target.max_logits = target.max_logits_of_sequence = 4 * (3 + 1)
    pair.submit(request("decoding", max_tokens=40))
    pair.step()
    for name in "ab":
        pair.submit(request(name, 30, return_prompt_log_probs=True, max_tokens=1))
    pair.step()
    # One that decodes may need 4 of the 16 rows; the first that is scored gets the other 12.
    assert target.forwards[-1] == [4, 12]
    chunks = [chunk for _ in range(30) for chunk in pair.step()]
    assert not pair.has_work()
    assert {c.request_id: len(c.prompt_log_probs) for c in chunks if c.finish_reason} == {
        "decoding": 0,
        "a": 29,
        "b": 29,
    }


def test_all_accepted_feeds_the_last_draft_token_first() -> None:
    pair = make_pair(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=3)
    run(pair, [request(max_tokens=17)])
    draft, _ = engines(pair)
    assert draft.forwards == [[3], [1], [1]] + [[2], [1], [1]] * 3


def test_cancel_frees_both_engines_before_the_next_step() -> None:
    pair = make_pair(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=1)
    pair.submit(request("a", max_tokens=100))
    pair.submit(request("b", max_tokens=4))
    pair.step()
    pair.cancel("a")
    assert [len(e.sequences) for e in engines(pair)] == [1, 1]
    last = {c.request_id: c for c in pair.step() if c.finish_reason}
    assert last["a"].finish_reason == "cancelled"
    assert last["a"].statistics is not None and last["a"].statistics.num_output_tokens == 2
    pair.cancel("a")
    pair.cancel("unknown")
    while pair.has_work():
        pair.step()


def test_cancel_in_the_queue() -> None:
    pair = make_pair(TableModel(target_rule), TableModel(target_rule), max_batch_size=1)
    pair.submit(request("a", max_tokens=8))
    pair.submit(request("b"))
    pair.step()
    pair.cancel("b")
    (chunk,) = [c for c in pair.step() if c.request_id == "b"]
    assert chunk.finish_reason == "cancelled"


def test_full_queue_refuses_with_the_numbers() -> None:
    pair = make_pair(
        TableModel(target_rule), TableModel(target_rule), max_batch_size=1, max_queue_size=2
    )
    pair.submit(request("a"))
    pair.step()
    pair.submit(request("b"))
    pair.submit(request("c"))
    with pytest.raises(RequestError) as caught:
        pair.submit(request("d"))
    assert str(caught.value) == (
        "the queue is full: 2 requests wait (serving.max_queue_size), 1 run; try again later"
    )


def test_lower_priority_number_is_served_first() -> None:
    pair = make_pair(TableModel(target_rule), TableModel(target_rule), max_batch_size=1)
    for name, priority in (("a", 5), ("b", 0), ("c", 5), ("d", 1)):
        pair.submit(request(name, priority=priority, max_tokens=2))
    order = []
    while pair.has_work():
        order += [c.request_id for c in pair.step() if c.finish_reason]
    assert order == ["b", "d", "a", "c"]


def test_time_limit_in_the_queue_and_while_running() -> None:
    now = [0.0]
    pair = make_pair(
        TableModel(target_rule),
        TableModel(target_rule),
        clock=lambda: now[0],
        max_batch_size=1,
        num_draft_tokens=0,
        request_timeout_s=60.0,
    )
    pair.submit(request("running", max_tokens=100))
    pair.submit(request("waiting", timeout_s=5.0))
    pair.step()
    now[0] = 6.0
    errors = {c.request_id: c.error for c in pair.step() if c.finish_reason == "error"}
    assert errors == {
        "waiting": "the request waited 6.0 s without being started, which is its time limit "
        "(timeout_s or serving.request_timeout_s)"
    }
    now[0] = 61.0
    (chunk,) = pair.step()
    assert chunk.finish_reason == "error"
    assert chunk.error is not None and "time limit" in chunk.error
    assert not pair.has_work()


def test_time_in_the_queue_ends_when_a_request_is_started() -> None:
    now = [0.0]
    pair = make_pair(
        TableModel(target_rule), TableModel(target_rule), clock=lambda: now[0], max_batch_size=1
    )
    pair.submit(request("a", max_tokens=1))
    now[0] = 2.0
    pair.submit(request("b", max_tokens=1))
    pair.submit(request("c", max_tokens=1))
    waited = {}
    while pair.has_work():
        now[0] += 0.5
        if now[0] == 3.0:
            pair.cancel("c")
        waited |= {chunk.request_id: chunk.queue_s for chunk in pair.step()}
    assert waited == {"a": 2.5, "b": 1.0, "c": 1.0}


def test_cached_tokens_are_those_of_running_sequences() -> None:
    """After a step, all but the last token of a text are cached; the target's own are 1 a step."""
    pair = make_pair(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=2)
    for name, prompt_length in (("a", 3), ("b", 7)):
        pair.submit(request(name, prompt_length, num_draft_tokens=0 if name == "a" else 2))
    pair.step()
    # a: 3 tokens of its prompt. b: 7, and 2 draft tokens that were accepted; the draft has not read
    # the last of them.
    assert pair.occupancy().kv_caches == {"target": KVUse(12, 2000), "draft": KVUse(8, 2000)}


_TINY, _LARGE = 5e-324, 1.7e308

EXTREMES = [
    {"temperature": _TINY},
    {"temperature": _LARGE},
    {"temperature": _LARGE, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 2**31 - 1},
    {"temperature": 1.0, "top_p": _TINY},
    {"temperature": 1.0, "min_p": _TINY},
    {"repetition_penalty": _TINY},
    {"repetition_penalty": _LARGE},
    {"presence_penalty": _LARGE},
    {"presence_penalty": -_LARGE, "frequency_penalty": -_LARGE},
    {"frequency_penalty": _LARGE, "temperature": _TINY},
    {"min_tokens": 2**31 - 1},
    {"seed": 2**64 - 1, "is_seeded": True, "temperature": 1.0},
    {"bad_words": tuple((i,) for i in range(TableModel(target_rule).vocab_size))},
    {"bad_words": ((1,) * 1000,) * 16},
]


@pytest.mark.parametrize("is_seeded", [False, True])
def test_no_setting_that_is_let_in_can_break_a_step(is_seeded: bool) -> None:
    """Each runs to an end of its own, beside one whose output stays what it is."""
    for extreme in EXTREMES:
        sampling = Sampling(**{"is_seeded": is_seeded, **extreme})  # type: ignore[arg-type]
        pair = make_pair(TableModel(target_rule), TableModel(DRAFT_RULES["half"]))
        extreme_request = request(
            "extreme", sampling=sampling, end_token_ids=frozenset({0}), max_tokens=12
        )
        chunks = run(pair, [extreme_request, request("good")])
        assert ids(chunks["good"]) == greedy_reference(request())
        assert chunks["extreme"][-1].finish_reason is not None, extreme


def test_an_exception_in_the_text_of_a_request_fails_that_one_alone() -> None:
    class Failing(WordDetokenizer):
        def append(self, token_ids: Sequence[int]) -> str:
            raise ValueError("as asked")

    pair = make_pair(TableModel(target_rule), TableModel(target_rule))
    pair._detokenizer = lambda prompt, **_: Failing() if prompt == (9,) else WordDetokenizer()
    chunks = run(pair, [request("bad", prompt_token_ids=(9,)), request("good")])
    assert ids(chunks["good"]) == greedy_reference(request())
    (last,) = chunks["bad"]
    assert (last.finish_reason, last.error) == ("error", FAULT)
    for engine in engines(pair):
        assert engine.sequences == {}


def test_nan_of_the_target_fails_that_request_alone() -> None:
    class NanForPromptOfFive(TableModel):
        def logits(self, token_ids: object, num_rows: int) -> np.ndarray:
            rows = super().logits(token_ids, num_rows)  # type: ignore[arg-type]
            return rows * np.nan if token_ids[0] == 99 else rows  # type: ignore[index]

    pair = make_pair(NanForPromptOfFive(target_rule), TableModel(target_rule))
    bad = request("bad", prompt_token_ids=(99, 4))
    scored = replace(bad, request_id="scored", return_prompt_log_probs=True, num_top_log_probs=2)
    chunks = run(pair, [bad, scored, request("good")])
    for (last,) in (chunks["bad"], chunks["scored"]):
        assert last.error == "the target model returned NaN, or no token is allowed here"
    assert ids(chunks["good"]) == greedy_reference(request())


def test_nan_that_a_draft_token_brings_into_every_row_does_no_harm() -> None:
    class PoisonedByWrongTokens(TableModel):
        def logits(self, token_ids: object, num_rows: int) -> np.ndarray:
            rows = super().logits(token_ids, num_rows)  # type: ignore[arg-type]
            context = list(token_ids)  # type: ignore[call-overload]
            drafts = [target_rule(context[:i]) != context[i] for i in range(3, len(context))]
            return rows * np.nan if any(drafts) else rows

    pair = make_pair(
        PoisonedByWrongTokens(target_rule), TableModel(DRAFT_RULES["half"]), num_draft_tokens=3
    )
    chunks = run(pair, [request()])["r"]
    assert ids(chunks) == greedy_reference(request())
    # A draft of three is never right in all; the last step has room for one, which is.
    statistics = chunks[-1].statistics
    assert statistics is not None and statistics.total_draft_tokens == 1


def test_nan_of_the_draft_means_no_draft() -> None:
    class AlwaysNan(TableModel):
        def logits(self, token_ids: object, num_rows: int) -> np.ndarray:
            return super().logits(token_ids, num_rows) * np.nan  # type: ignore[arg-type]

    chunks = run(make_pair(TableModel(target_rule), AlwaysNan(target_rule)), [request()])["r"]
    assert ids(chunks) == greedy_reference(request())
    statistics = chunks[-1].statistics
    assert statistics is not None
    assert (statistics.acceptance_rate, statistics.draft_status) == (0.0, "draft_failed")


def test_draft_with_a_shorter_context() -> None:
    pair = make_pair(
        TableModel(target_rule), TableModel(target_rule), draft_max_seq_len=20, num_draft_tokens=4
    )
    requests = [request("a", 3, max_tokens=60), request("b", 30, max_tokens=20)]
    chunks = run(pair, requests)
    for r in requests:
        assert ids(chunks[r.request_id]) == greedy_reference(r)


def test_hopeless_draft_is_given_up() -> None:
    costs = CostTable(num_draft_tokens=4, draft={1: 0.2, 4: 0.2}, target={1: 1.0, 20: 1.2})
    pair = make_pair(
        TableModel(target_rule), TableModel(DRAFT_RULES["wrong"]), costs=costs, num_draft_tokens=4
    )
    r = request(max_tokens=400)
    chunks = run(pair, [r])["r"]
    assert ids(chunks) == greedy_reference(r)
    statistics = chunks[-1].statistics
    assert statistics is not None and statistics.total_draft_tokens < 25


class FixedCosts(CostTable):
    """Costs that the speed of the test's own engines does not change."""

    def observe(self, role: object, num_rows: int, seconds: float) -> None:
        pass


def test_a_batch_drafts_no_further_than_pays_for_all() -> None:
    """One good draft among four: it would pay alone, but three others would wait for it."""
    costs = FixedCosts(4, draft={1: 0.5, 4: 0.5}, target={1: 1.0, 4: 1.0, 5: 1.1, 20: 3.0})
    target = TableModel(target_rule)
    alone = make_pair(target, TableModel(target_rule), costs=costs, num_draft_tokens=4)
    chunks = run(alone, [request("a", max_tokens=40)])["a"]
    assert chunks[-1].statistics is not None and chunks[-1].statistics.total_draft_tokens > 20
    requests = [
        request("a", max_tokens=40),
        *(request(name, max_tokens=60, num_draft_tokens=0) for name in "bcd"),
    ]
    pair = make_pair(target, TableModel(target_rule), costs=costs, num_draft_tokens=4)
    together = run(pair, requests)
    for r in requests:
        assert ids(together[r.request_id]) == greedy_reference(r)
    statistics = together["a"][-1].statistics
    assert statistics is not None and statistics.total_draft_tokens == 0


def test_a_batch_copies_no_further_than_pays_for_all() -> None:
    """Copied tokens take no draft step, but each makes the target score as many for the others."""
    target, wrong = TableModel(target_rule), TableModel(DRAFT_RULES["wrong"])
    requests = [
        request("a", max_tokens=40, prediction_token_ids=tuple(greedy_reference(request()))),
        *(request(name, max_tokens=60, num_draft_tokens=0) for name in "bcd"),
    ]
    for verify_5_for_4, copies in ((1.3, True), (3.0, False)):
        costs = FixedCosts(
            4, draft={1: 9.0, 4: 9.0}, target={1: 1.0, 4: 1.0, 5: 1.1, 20: verify_5_for_4}
        )
        pair = make_pair(target, wrong, costs=costs, num_draft_tokens=4)
        chunks = run(pair, requests)
        for r in requests:
            assert ids(chunks[r.request_id]) == greedy_reference(r)
        statistics = chunks["a"][-1].statistics
        assert statistics is not None
        assert (statistics.accepted_prediction_tokens > 10) == copies
        assert statistics.total_draft_tokens == statistics.accepted_prediction_tokens


def test_a_copied_text_is_read_by_the_draft_when_that_is_to_go_on() -> None:
    """The prediction ends; the draft, which has read none of what was copied, takes over."""
    said = greedy_reference(request(max_tokens=40))
    r = request(max_tokens=40, num_draft_tokens=4, prediction_token_ids=tuple(said[:25]))
    pair = make_pair(
        TableModel(target_rule), TableModel(target_rule), num_draft_tokens=4, max_num_tokens=64
    )
    chunks = run(pair, [r])["r"]
    assert ids(chunks) == said
    draft, target = engines(pair)
    assert target.forwards == [[3 + 4], *[[1 + 4]] * 7]
    # Nothing for five steps; then all of the text, and a token for each of three more.
    assert draft.forwards[:4] == [[28], [1], [1], [1]]
    assert len(draft.forwards) == 4 * 3


SCHEDULE = ((1, 3), (2, 1), (4, 0))


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_a_schedule_limits_the_draft_length_by_load(is_adaptive: bool) -> None:
    """A cheap and perfect draft would always draft 4; one request joins after the other."""
    costs = FixedCosts(4, draft={1: 0.01, 4: 0.01}, target={1: 1.0, 20: 1.0})
    pair = make_pair(
        TableModel(target_rule),
        TableModel(target_rule),
        costs=costs if is_adaptive else None,
        num_draft_tokens=4,
        schedule=SCHEDULE,
    )
    for name in "abcd":
        pair.submit(request(name, max_tokens=60))
        pair.step()
    pair.step()
    for name in "bcd":
        pair.cancel(name)
    pair.step()
    _, target = engines(pair)
    # The last token, or a prompt of three, and 3 draft tokens, then 1, then none, and 3 again.
    assert target.forwards == [
        [3 + 3],
        [1 + 1, 3 + 1],
        [1 + 1, 1 + 1, 3 + 1],
        [1, 1, 1, 3],
        [1, 1, 1, 1],
        [1 + 3],
    ]


def test_a_scheduled_request_is_still_the_targets_own() -> None:
    requests = [request(str(n), n + 1, max_tokens=5 + 7 * n) for n in range(6)]
    pair = make_pair(
        TableModel(target_rule),
        TableModel(DRAFT_RULES["half"]),
        num_draft_tokens=4,
        schedule=SCHEDULE,
    )
    chunks = run(pair, requests)
    assert {n: ids(c) for n, c in chunks.items()} == {
        r.request_id: greedy_reference(r) for r in requests
    }


def test_a_schedule_is_for_requests_that_name_no_draft_length() -> None:
    pair = make_pair(
        TableModel(target_rule), TableModel(target_rule), num_draft_tokens=4, schedule=SCHEDULE
    )
    pair.submit(request("a", max_tokens=60, num_draft_tokens=2))
    pair.step()
    pair.submit(request("b", max_tokens=60, num_draft_tokens=0))
    pair.step()
    _, target = engines(pair)
    assert target.forwards == [[3 + 2], [1 + 2, 3]]


def test_a_draft_that_the_load_forbids_is_not_hoped_for() -> None:
    """Its time stays what was measured, for when the load has fallen."""
    costs = FixedCosts(4, draft={1: 0.5, 4: 0.5}, target={1: 1.0, 20: 1.0})
    pair = make_pair(
        TableModel(target_rule),
        TableModel(target_rule),
        costs=costs,
        num_draft_tokens=4,
        schedule=((1, 0),),
    )
    run(pair, [request(max_tokens=100)])
    assert costs.seconds("draft", 1) == 0.5
