"""Requests in rounds of a device that is a table: two rounds are always under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from specpipe.runtimes.pair.costs import CostTable
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.sampler import RoundResult
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.lookup import PromptLookup
from specpipe.speculative.request import Chunk, Request, Sampling
from tests.runtimes.pair.table_rounds import Device, TableRounds, make_pair
from tests.runtimes.table_engine import ids, run
from tests.speculative.table import (
    DRAFT_RULES,
    NoisyModel,
    TableModel,
    greedy_reference,
    request,
    target_rule,
)


def run_beside_others(
    pair: EnginePair, asked: Request, *, joined_at: tuple[int, int]
) -> list[Chunk]:
    """What a request gets, beside which others run for a while from two steps on."""
    pair.submit(asked)
    chunks: list[Chunk] = []
    for step in range(200):
        if step in joined_at:
            pair.submit(request(f"other {step}", 6, max_tokens=2))
        chunks += [chunk for chunk in pair.step() if chunk.request_id == asked.request_id]
    return chunks


@pytest.mark.parametrize("draft_name", DRAFT_RULES)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
def test_a_request_alone_has_the_text_of_the_target(draft_name: str, num_draft_tokens: int) -> None:
    pair, rounds = make_pair(TableModel(DRAFT_RULES[draft_name]), num_draft_tokens=num_draft_tokens)
    for asked in (request("short", 1, max_tokens=1), request("long", 40, max_tokens=50)):
        chunks = run(pair, [asked])[asked.request_id]
        assert ids(chunks) == greedy_reference(asked)
        assert chunks[-1].finish_reason == "length"
    assert rounds.lengths
    assert set(rounds.lengths) <= set(range(num_draft_tokens + 1))
    assert not rounds.texts
    for engine in pair.engines.values():
        assert isinstance(engine, Device)
        assert engine.sequences == {}


def test_a_perfect_draft_needs_few_rounds_and_one_that_is_wrong_as_many_as_tokens() -> None:
    asked = request("r", 3, max_tokens=41)
    for rule, num_steps in (("self", 9), ("wrong", 41)):
        pair, _ = make_pair(TableModel(DRAFT_RULES[rule]), num_draft_tokens=4)
        statistics = run(pair, [asked])["r"][-1].statistics
        assert statistics is not None
        assert statistics.num_steps == num_steps
        assert statistics.num_output_tokens == 41


def test_requests_that_join_and_leave_change_no_text() -> None:
    """All are in one round, but while the prompts of new ones are read."""
    pair, rounds = make_pair(TableModel(DRAFT_RULES["half"]), num_draft_tokens=3)
    asked = [
        request("first", 5, max_tokens=60),
        request("second", 20, max_tokens=10),
        request("third", 40, max_tokens=30),
    ]
    chunks: dict[str, list[Chunk]] = {r.request_id: [] for r in asked}
    for step in range(100):
        if step in (0, 6, 9):
            pair.submit(asked[(0, 6, 9).index(step)])
        for chunk in pair.step():
            chunks[chunk.request_id].append(chunk)
    for r in asked:
        assert ids(chunks[r.request_id]) == greedy_reference(r)
    assert {len(members) for members in rounds.launched} == {1, 2, 3}
    assert not pair.has_work()


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    pair, rounds = make_pair(TableModel(DRAFT_RULES["half"]), num_draft_tokens=3)
    pair.submit(request("r", 5, max_tokens=60))
    for _ in range(5):
        pair.step()
    pair.cancel("r")
    (chunk,) = pair.step()
    assert chunk.finish_reason == "cancelled"
    asked = request("next", 7, max_tokens=20)
    assert ids(run(pair, [asked])["next"]) == greedy_reference(asked)


def test_an_end_id_ends_it_though_rounds_are_under_way() -> None:
    asked = request("r", 3, max_tokens=40)
    text = greedy_reference(asked)
    stop = request("r", 3, max_tokens=40, end_token_ids=frozenset({text[10]}))
    pair, _ = make_pair(TableModel(DRAFT_RULES["self"]), num_draft_tokens=4)
    chunks = run(pair, [stop])["r"]
    assert ids(chunks) == text[: text.index(text[10])]
    assert chunks[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling": Sampling(repetition_penalty=1.2)},
        {"sampling": Sampling(temperature=1.0, min_tokens=3)},
        {"sampling": Sampling(logit_bias=((5, 1.0),))},
        {"return_log_probs": True},
        {"num_top_log_probs": 1},
        {"return_prompt_log_probs": True},
    ],
    ids=["penalized", "min_tokens", "biased", "log_probs", "top_log_probs", "prompt_log_probs"],
)
def test_who_asks_for_more_than_tokens_of_the_scores_is_run_as_ever(
    settings: dict[str, object],
) -> None:
    pair, rounds = make_pair(TableModel(DRAFT_RULES["half"]), num_draft_tokens=3)
    run(pair, [request("r", 3, max_tokens=10, **settings)])
    assert not rounds.launched


def test_who_names_more_draft_tokens_than_rounds_have_gets_them_step_by_step() -> None:
    costs = StepCosts(0.1, [0.05 * k for k in range(9)])
    for asked, options, num_steps in (
        (request("named", 3, max_tokens=26, num_draft_tokens=12), {"costs": costs}, 2),
        (request("fixed", 3, max_tokens=26), {}, 2),
        (request("fewer", 3, max_tokens=26, num_draft_tokens=4), {}, None),
        (request("adaptive", 3, max_tokens=26), {"costs": costs}, None),
    ):
        draft = TableModel(DRAFT_RULES["self"])
        pair, rounds = make_pair(draft, num_draft_tokens=12, **options)
        chunks = run(pair, [asked])[asked.request_id]
        assert ids(chunks) == greedy_reference(asked)
        assert (not rounds.launched) == (num_steps is not None)
        statistics = chunks[-1].statistics
        assert statistics is not None and num_steps in (None, statistics.num_steps)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0, seed=7, is_seeded=True),
        Sampling(temperature=1.0, seed=7),
        Sampling(temperature=1.5, seed=8, top_p=0.7),
    ],
    ids=["greedy", "seeded", "unseeded", "top_p"],
)
def test_text_and_statistics_are_those_of_single_steps(
    sampling: Sampling, num_draft_tokens: int
) -> None:
    """Whoever is in the same rounds."""
    target, draft = NoisyModel(1, blend=0.3), NoisyModel(2, blend=0.3)
    options = {"num_draft_tokens": num_draft_tokens, "target": target}
    pair, rounds = make_pair(draft, **options)  # type: ignore[arg-type]
    without, _ = make_pair(draft, has_rounds=False, **options)  # type: ignore[arg-type]
    asked = request("r", 5, max_tokens=40, sampling=sampling)
    expected = run(without, [asked])["r"]
    assert len(ids(expected)) == 40
    assert run(pair, [asked])["r"][-1].statistics == expected[-1].statistics
    assert rounds.launched
    chunks = run_beside_others(pair, asked, joined_at=(3, 9))
    assert any(len(members) == 2 for members in rounds.launched)
    assert ids(chunks) == ids(expected)
    assert chunks[-1].statistics == expected[-1].statistics


def test_a_text_that_the_draft_cannot_hold_goes_on_without_it() -> None:
    pair, rounds = make_pair(
        TableModel(DRAFT_RULES["half"]), num_draft_tokens=3, draft_max_seq_len=60
    )
    grows = request("grows", 40, max_tokens=60)
    assert ids(run(pair, [grows])["grows"]) == greedy_reference(grows)
    assert rounds.lengths[0] == 3 and rounds.lengths[-1] == 0
    rounds.launched.clear()
    is_long = request("is long", 80, max_tokens=20)
    assert ids(run(pair, [is_long])["is long"]) == greedy_reference(is_long)
    assert set(rounds.lengths) == {0}


def test_rounds_are_of_all_that_fit_and_those_that_waited_go_first() -> None:
    """Eight rows: four members with one draft token, or two with three."""
    pair, rounds = make_pair(
        TableModel(DRAFT_RULES["half"]), num_draft_tokens=3, max_members=4, max_rows=8
    )
    asked = [request(str(k), 3 + k, max_tokens=30, num_draft_tokens=k) for k in (0, 1, 3, 3)]
    asked = [replace(r, request_id=str(number)) for number, r in enumerate(asked)]
    chunks = run(pair, asked)
    assert [ids(chunks[r.request_id]) for r in asked] == [greedy_reference(r) for r in asked]
    early = rounds.launched[:12]
    assert {tuple(sorted(m.num_draft_tokens for m in members)) for members in early} <= {
        (0, 1),
        (3, 3),
        (0, 3),
        (1, 3),
    }
    taken_part = Counter(member.target_sequence for members in early for member in members)
    assert len(taken_part) == 4 and min(taken_part.values()) >= 5


def test_rounds_go_on_beside_those_that_want_more() -> None:
    """A token or more a step for each, and the round that comes next is launched first."""
    pair, rounds = make_pair(TableModel(DRAFT_RULES["half"]), num_draft_tokens=3)
    plain = [request(name, 4, max_tokens=40) for name in "ab"]
    special = request("special", 4, max_tokens=20, return_log_probs=True)
    for asked in (*plain, special):
        pair.submit(asked)
    target = pair.engines["target"]
    assert isinstance(target, Device)
    chunks: dict[str, list[Chunk]] = {name: [] for name in ("a", "b", "special")}
    for step in range(4):
        num_launched, num_forwards = len(rounds.launched), len(target.forwards)
        for chunk in pair.step():
            chunks[chunk.request_id].append(chunk)
        assert len(rounds.launched) - num_launched == (1 if step else 2)
        # Prompts but for their last tokens at first; then the special one's, and its steps.
        expected = [[3, 3], [4 + 3]] if step == 0 else [[1 + 3]]
        assert target.forwards[num_forwards:] == expected
        assert [len(found) for found in chunks.values()] == [step + 1] * 3
    assert all(len(members) == 2 for members in rounds.launched)
    while pair.has_work():
        for chunk in pair.step():
            chunks[chunk.request_id].append(chunk)
    for asked in (*plain, special):
        assert ids(chunks[asked.request_id]) == greedy_reference(asked)


def test_prompts_wait_for_each_other_where_many_decode() -> None:
    """Beside 32 requests, two steps between them; those of a step are read at once."""
    pair, rounds = make_pair(
        TableModel(DRAFT_RULES["self"]),
        num_draft_tokens=0,
        max_batch_size=40,
        max_members=40,
        max_num_tokens=100,
    )
    for number in range(32):
        pair.submit(request(str(number), 2, max_tokens=60))
    pair.step()
    target = pair.engines["target"]
    assert isinstance(target, Device)

    def prompts_read(*names: str) -> list[list[int]]:
        for name in names:
            pair.submit(request(name, 10, max_tokens=50))
        target.forwards.clear()
        pair.step()
        return target.forwards

    assert prompts_read("a") == prompts_read() == []
    assert prompts_read() == [[9]]
    assert prompts_read("b", "c") == []
    assert prompts_read("d") == [[9, 9, 9]]
    assert prompts_read("e") == []
    pair.submit(request("long", 90, max_tokens=50))
    assert prompts_read() == [[9, 89]]
    assert len(rounds.launched[-1]) == 38


def test_no_round_is_launched_past_the_last_token() -> None:
    pair, rounds = make_pair(TableModel(DRAFT_RULES["wrong"]), num_draft_tokens=2)
    run(pair, [request("r", 3, max_tokens=9)])
    # One token a round, and none is wasted.
    assert len(rounds.launched) == 9
    assert not rounds.under_way


def test_a_draft_that_is_always_wrong_is_seldom_tried() -> None:
    costs = StepCosts(draft_step=0.0, verify=[0.0, 0.3, 0.6, 0.9, 1.2])
    pair, rounds = make_pair(TableModel(DRAFT_RULES["wrong"]), costs=costs, num_draft_tokens=4)
    asked = request("r", 3, max_tokens=250)
    assert ids(run(pair, [asked])["r"]) == greedy_reference(asked)
    tried = [number for number, k in enumerate(rounds.lengths) if k]
    assert sum(number >= 50 for number in tried) <= 4
    # Each trial is one round, though the next is launched before it has told.
    assert all(b - a > 1 for a, b in pairwise(tried) if a >= 10)


def test_the_draft_reads_the_prompt_while_rounds_are_under_way() -> None:
    costs = StepCosts(draft_step=0.0, verify=[0.0, 0.1, 0.2, 0.3])
    pair, rounds = make_pair(TableModel(DRAFT_RULES["self"]), costs=costs, num_draft_tokens=3)
    asked = request("r", 14, max_tokens=40)
    pair.submit(asked)
    draft = pair.engines["draft"]
    assert isinstance(draft, Device)
    draft.forwards.clear()
    pair.step()
    assert rounds.lengths == [0, 0]
    assert draft.forwards == [[13]]
    pair.step()
    assert rounds.lengths[2] > 0


class Unusable(TableRounds):
    """The device finds no usable logits in the third round, or another."""

    num_taken, unusable = 0, 3

    def take(self) -> list[RoundResult]:
        results = super().take()
        self.num_taken += 1
        return [RoundResult(None)] * len(results) if self.num_taken == self.unusable else results


def test_an_unusable_round_is_made_again_without_draft_tokens() -> None:
    pair, rounds = make_pair(
        TableModel(DRAFT_RULES["half"]), rounds_type=Unusable, num_draft_tokens=3
    )
    asked = request("r", 3, max_tokens=40)
    assert ids(run(pair, [asked])["r"]) == greedy_reference(asked)
    assert rounds.num_taken > 3  # type: ignore[attr-defined]


def test_an_unusable_round_without_draft_tokens_ends_the_request() -> None:
    pair, _ = make_pair(TableModel(DRAFT_RULES["half"]), rounds_type=Unusable, num_draft_tokens=0)
    chunk = run(pair, [request("r", 3, max_tokens=40)])["r"][-1]
    assert chunk.finish_reason == "error"
    assert chunk.error is not None and "NaN" in chunk.error


def test_occupancy_counts_what_was_taken() -> None:
    pair, _ = make_pair(TableModel(DRAFT_RULES["self"]), num_draft_tokens=3)
    asked: Request = request("r", 5, max_tokens=60)
    pair.submit(asked)
    num_emitted = 0
    for _ in range(4):
        num_emitted += len(ids(pair.step()))
    caches = pair.occupancy().kv_caches
    assert caches["target"].num_tokens == 5 + num_emitted - 1
    assert caches["draft"].num_tokens == caches["target"].num_tokens - 1  # all were accepted


COSTS = StepCosts(draft_step=0.0, verify=[0.0, 0.1, 0.2, 0.3, 0.4])
SEEDED = Sampling(temperature=0.05, seed=3, is_seeded=True)


def lap_rule(context: Sequence[int]) -> int:
    """Text that repeats itself, for a while."""
    return 10 + len(context) % 7 if len(context) < 80 else target_rule(context)


def text_of(rule: Callable[[Sequence[int]], int], asked: Request) -> list[int]:
    text = list(asked.prompt_token_ids)
    for _ in range(asked.max_tokens):
        text.append(rule(text))
    return text[len(asked.prompt_token_ids) :]


def copying_pair(draft_name: str, **options: Any) -> tuple[EnginePair, TableRounds]:
    settings = {"target": TableModel(lap_rule), "prompt_lookup": True, "costs": COSTS, **options}
    return make_pair(TableModel(DRAFT_RULES[draft_name]), num_draft_tokens=4, **settings)


@pytest.mark.parametrize("draft_name", ["self", "wrong"])
def test_where_the_text_repeats_itself_it_is_copied(draft_name: str) -> None:
    pair, rounds = copying_pair(draft_name)
    asked = request("r", 3, max_tokens=150)
    chunks = run(pair, [asked])["r"]
    assert ids(chunks) == text_of(lap_rule, asked)
    # 77 tokens repeat themselves, five of them a round; where they end, it takes some to be seen.
    assert 10 <= rounds.copied.count(4) <= len(rounds.copied) <= 40
    statistics = chunks[-1].statistics
    assert statistics is not None
    assert statistics.total_accepted_draft_tokens >= 4 * 10
    # From 80 tokens on the draft is right, or nothing is but for what is tried.
    if draft_name == "self":
        assert rounds.lengths[-5:-2] == [4, 4, 4]
    else:
        assert sum(rounds.lengths[-20:]) <= 1


def test_nothing_is_copied_unless_that_was_asked_for_and_changes_nothing() -> None:
    for prompt_lookup, sampling, is_copied in (
        (False, Sampling(), False),
        (True, Sampling(), True),
        (True, SEEDED, True),
    ):
        pair, rounds = copying_pair("wrong", prompt_lookup=prompt_lookup)
        asked = request("r", 3, max_tokens=60, sampling=sampling)
        chunks = run(pair, [asked])["r"]
        assert len(ids(chunks)) == 60
        assert bool(rounds.copied) == is_copied
        pair, rounds = copying_pair("wrong", prompt_lookup=prompt_lookup, costs=None)
        assert ids(run(pair, [asked])["r"]) == ids(chunks)
        assert not rounds.copied  # a fixed draft length is that of the draft


@pytest.mark.parametrize("has_rounds", [True, False])
def test_what_is_copied_is_judged_where_nobody_gave_a_seed(has_rounds: bool) -> None:
    """Nearly greedy, so that what is drawn is known: nothing but the target's own token."""
    pair, rounds = copying_pair("wrong", has_rounds=has_rounds)
    asked = request("r", 3, max_tokens=60, sampling=Sampling(temperature=0.01, seed=3))
    chunks = run(pair, [asked])["r"]
    assert ids(chunks) == text_of(lap_rule, asked)
    assert bool(rounds.copied) == has_rounds
    statistics = chunks[-1].statistics
    assert statistics is not None and statistics.total_accepted_draft_tokens >= 30


def test_a_request_may_ask_for_fewer_copied_tokens_or_none() -> None:
    for most, copied in ((2, {2}), (0, set())):
        pair, rounds = copying_pair("wrong")
        run(pair, [request("r", 3, max_tokens=60, num_draft_tokens=most)])
        assert set(rounds.copied) == copied


def test_copies_need_no_room_of_the_draft() -> None:
    pair, rounds = copying_pair("self", draft_max_seq_len=8)
    asked = request("r", 9, max_tokens=60)
    assert ids(run(pair, [asked])["r"]) == text_of(lap_rule, asked)
    assert [k for k in rounds.lengths if k] == rounds.copied
    assert rounds.copied.count(4) > 5


@pytest.mark.parametrize("has_rounds", [True, False])
def test_a_load_without_drafting_copies_and_leaves_the_draft_alone(has_rounds: bool) -> None:
    pair, rounds = copying_pair("self", has_rounds=has_rounds, schedule=((1, 0),))
    asked = request("r", 9, max_tokens=60)
    chunks = run(pair, [asked])["r"]
    assert ids(chunks) == text_of(lap_rule, asked)
    statistics = chunks[-1].statistics
    assert statistics is not None and statistics.total_accepted_draft_tokens >= 30
    draft = pair.engines["draft"]
    assert isinstance(draft, Device)
    assert draft.forwards == []


FLAT = StepCosts(0.0, [0.0, *[0.05] * 8])


def some_laps(context: Sequence[int]) -> int:
    """Texts that begin with an even token repeat themselves."""
    return 10 + len(context) % 7 if context[0] % 2 == 0 else target_rule(context)


def run_several(
    draft_name: str, first_tokens: Sequence[int], **options: Any
) -> tuple[TableRounds, Device]:
    """Runs requests whose prompts begin so side by side, and compares their texts."""
    pair, rounds = copying_pair(draft_name, target=TableModel(some_laps), **options)
    asked = [
        replace(request(str(number), 3, max_tokens=60), prompt_token_ids=(first, 8, 9))
        for number, first in enumerate(first_tokens)
    ]
    chunks = run(pair, asked)
    for r in asked:
        assert ids(chunks[r.request_id]) == text_of(some_laps, r)
    target = pair.engines["target"]
    assert isinstance(target, Device)
    return rounds, target


def test_several_copy_at_once() -> None:
    rounds, _ = run_several("wrong", [2, 4, 6])
    copies = [members for members in rounds.launched if all(m.is_copied for m in members)]
    assert sum(m.num_draft_tokens == 4 for members in copies for m in members) >= 24


def test_some_copy_beside_those_that_draft_or_do_neither() -> None:
    for draft_name, others in (("self", 4), ("wrong", 0)):
        rounds, _ = run_several(draft_name, [2, 3, 5, 7])
        kinds = [
            sorted((m.is_copied, m.num_draft_tokens) for m in members)
            for members in rounds.launched
        ]
        assert kinds.count([*[(False, others)] * 3, (True, 4)]) >= 3


def test_who_copies_may_have_the_rows_that_others_leave() -> None:
    """Of twelve rows four requests have three each, or one of them six."""
    rounds, _ = run_several("wrong", [2, 3, 5, 7], max_rows=12, copy_costs=FLAT)
    assert rounds.copied.count(4) >= 8
    assert rounds.num_packed >= 8


def test_several_copy_in_single_steps() -> None:
    _, target = run_several("wrong", [2, 4, 6], has_rounds=False)
    assert len(target.forwards) <= 40


def test_where_copies_could_not_pay_texts_are_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed: list[int] = []
    monkeypatch.setattr(PromptLookup, "extend", lambda self, new: followed.extend(new))
    dear = StepCosts(0.0, [3.0 * k for k in range(9)])
    for has_rounds in (True, False):
        rounds, _ = run_several(
            "wrong",
            [2, 4],
            has_rounds=has_rounds,
            copy_costs=dear,
            table=CostTable(8, {1: 1.0, 4: 1.0}, {1: 4.0, 2: 4.0, 36: 400.0}),
        )
        assert not rounds.copied and not followed


@pytest.mark.parametrize("has_rounds", [True, False])
def test_requests_that_join_change_no_text_that_is_copied(has_rounds: bool) -> None:
    pair, rounds = copying_pair("half", has_rounds=has_rounds)
    asked = request("r", 5, max_tokens=120)
    chunks = run_beside_others(pair, asked, joined_at=(12, 20))
    assert ids(chunks) == text_of(lap_rule, asked)
    assert bool(rounds.copied) == has_rounds


def test_single_steps_copy_without_the_draft() -> None:
    pair, _ = copying_pair("wrong", has_rounds=False)
    asked = request("r", 3, max_tokens=60)
    chunks = run(pair, [asked])["r"]
    assert ids(chunks) == text_of(lap_rule, asked)
    draft, target = pair.engines["draft"], pair.engines["target"]
    assert isinstance(draft, Device) and isinstance(target, Device)
    assert len(target.forwards) <= 30
    assert len(draft.forwards) <= 15
    statistics = chunks[-1].statistics
    assert statistics is not None and statistics.total_accepted_draft_tokens >= 30


def test_an_unusable_round_of_copies_is_made_again_without_them() -> None:
    pair, rounds = copying_pair(
        "wrong", target=TableModel(lambda context: 10), rounds_type=Unusable
    )
    rounds.unusable = 8  # type: ignore[attr-defined]
    asked = request("r", 1, max_tokens=40)
    assert ids(run(pair, [asked])["r"]) == [10] * 40
    assert rounds.launched[7][0].is_copied
