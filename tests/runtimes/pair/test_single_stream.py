"""A request that runs alone, in rounds of a device that is a table: two are always under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from specpipe.runtimes.pair.costs import CostTable
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.sampler import Drafted, RoundResult
from specpipe.runtimes.pair.torch_sampler import TorchSampler
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.lookup import PromptLookup
from specpipe.speculative.request import Chunk, Request, Sampling
from tests.runtimes.table_engine import HasLogits, TableEngine, ids, run
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


class Device(TableEngine):
    """An engine whose tokens a round may have cached: then `skip` finds them in the text."""

    text: Sequence[int] = ()

    def skip(self, sequence: int, num_tokens: int) -> None:
        length = self.length(sequence)
        assert length + num_tokens <= len(self.text)
        self.sequences[sequence] += self.text[length : length + num_tokens]


class TableRounds:
    """Rounds that are made when they are launched, so the device is ahead of what was taken."""

    def __init__(self, draft: Device, target: Device, costs: StepCosts | None) -> None:
        self._draft, self._target = draft, target
        self.costs = costs
        self.copy_costs = None if costs is None else StepCosts(0.0, [0.01 * n for n in range(9)])
        self.launched: list[int] = []
        self.copied: list[int] = []
        self.num_dropped = 0
        self._text: list[int] = []
        self._under_way: deque[RoundResult] = deque()
        self._num_read = 0

    def begin(
        self,
        token_ids: Sequence[int],
        *,
        target_sequence: int,
        draft_sequence: int | None,
        sampling: Sampling,
    ) -> None:
        assert not self._under_way
        assert self._target.length(target_sequence) == len(token_ids) - 1
        self._has_draft = draft_sequence is not None
        if draft_sequence is not None:
            self._draft_sequence, self._num_to_read = draft_sequence, len(token_ids) - 2
        self._text, self._sampling = list(token_ids), sampling
        self._target.text = self._draft.text = self._text

    def launch(self, num_draft_tokens: int, *, num_positions: int, is_copied: bool = False) -> None:
        assert len(self._under_way) < 2
        is_drafting = num_draft_tokens > 0 and not is_copied
        assert self._has_draft or not is_drafting
        if is_drafting:
            assert self._draft.length(self._draft_sequence) >= self._num_to_read
        text = self._text
        asked = Request(
            request_id="r", prompt_token_ids=tuple(text), max_tokens=99, sampling=self._sampling
        )
        sampler = TorchSampler(self._target.vocab_size)
        drafted = Drafted(new_state(asked))

        def logits(model: HasLogits, num_rows: int) -> torch.Tensor:
            rows = model.logits([*text, *drafted.token_ids], num_rows)
            return torch.from_numpy(rows).float()

        if is_copied:
            drafted.token_ids.extend(PromptLookup(text).copy(num_draft_tokens))
        for _ in range(num_draft_tokens if is_drafting else 0):
            sampler.draft(logits(self._draft.model, 1), [drafted])
        (outcome,) = sampler.verify(logits(self._target.model, num_draft_tokens + 1), [drafted])
        assert outcome.token_ids is not None
        text += outcome.token_ids
        assert len(text) <= num_positions
        self.launched.append(num_draft_tokens)
        if is_copied:
            self.copied.append(num_draft_tokens)
        self._under_way.append(RoundResult(list(outcome.token_ids), num_draft_tokens))

    def take(self) -> RoundResult:
        return self._under_way.popleft()

    def drop(self) -> None:
        self.num_dropped += len(self._under_way)
        self._under_way.clear()


def make_pair(
    draft: HasLogits,
    *,
    target: HasLogits | None = None,
    costs: StepCosts | None = None,
    rounds_type: type[TableRounds] = TableRounds,
    has_rounds: bool = True,
    draft_max_seq_len: int = 500,
    **options: object,
) -> tuple[EnginePair, TableRounds]:
    engines = (
        Device(draft, max_seq_len=draft_max_seq_len),
        Device(target or TableModel(target_rule)),
    )
    rounds = rounds_type(*engines, costs)
    settings = {"max_batch_size": 4, "max_seq_len": 300, "max_num_tokens": 16, **options}
    table = CostTable(8, {1: 1.0, 4: 1.0}, {1: 4.0, 36: 4.0}) if costs else None
    pair = EnginePair(
        *engines,
        TorchSampler(engines[0].vocab_size),
        PairOptions(adaptive=costs is not None, **settings),  # type: ignore[arg-type]
        lambda prompt, **_: WordDetokenizer(),
        costs=table,
        rounds=rounds if has_rounds else None,
    )
    return pair, rounds


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
    assert rounds.launched
    assert set(rounds.launched) <= set(range(num_draft_tokens + 1))
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
    """The stream is left when a second request comes, and begun again when it has gone."""
    pair, rounds = make_pair(TableModel(DRAFT_RULES["half"]), num_draft_tokens=3)
    first, second = request("first", 5, max_tokens=60), request("second", 20, max_tokens=10)
    pair.submit(first)
    chunks = {"first": [], "second": []}  # type: ignore[var-annotated]
    for step in range(200):
        if step == 6:
            assert rounds.launched
            pair.submit(second)
        for chunk in pair.step():
            chunks[chunk.request_id].append(chunk)
    assert ids(chunks["first"]) == greedy_reference(first)
    assert ids(chunks["second"]) == greedy_reference(second)
    assert rounds.num_dropped
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
    """However often the stream is left and begun again."""
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
    assert rounds.num_dropped
    assert ids(chunks) == ids(expected)
    assert chunks[-1].statistics == expected[-1].statistics


def test_a_text_that_the_draft_cannot_hold_goes_on_without_it() -> None:
    pair, rounds = make_pair(
        TableModel(DRAFT_RULES["half"]), num_draft_tokens=3, draft_max_seq_len=60
    )
    grows = request("grows", 40, max_tokens=60)
    assert ids(run(pair, [grows])["grows"]) == greedy_reference(grows)
    assert rounds.launched[0] == 3 and rounds.launched[-1] == 0
    rounds.launched.clear()
    is_long = request("is long", 80, max_tokens=20)
    assert ids(run(pair, [is_long])["is long"]) == greedy_reference(is_long)
    assert set(rounds.launched) == {0}


def test_no_round_is_launched_past_the_last_token() -> None:
    pair, rounds = make_pair(TableModel(DRAFT_RULES["wrong"]), num_draft_tokens=2)
    run(pair, [request("r", 3, max_tokens=9)])
    # The first token comes with the prompt; the other eight are one a round, and none is wasted.
    assert len(rounds.launched) == 8
    assert rounds.num_dropped == 0


def test_a_draft_that_is_always_wrong_is_seldom_tried() -> None:
    costs = StepCosts(draft_step=0.0, verify=[0.0, 0.3, 0.6, 0.9, 1.2])
    pair, rounds = make_pair(TableModel(DRAFT_RULES["wrong"]), costs=costs, num_draft_tokens=4)
    asked = request("r", 3, max_tokens=250)
    assert ids(run(pair, [asked])["r"]) == greedy_reference(asked)
    tried = [number for number, k in enumerate(rounds.launched) if k]
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
    assert pair.costs is not None
    (first,) = pair.step()
    assert len(first.token_ids) == 1
    assert draft.forwards == []
    assert pair.costs.seconds("draft", 1) == 1.0  # it was not too slow, and need not be faster
    pair.step()
    assert rounds.launched == [0, 0]
    assert draft.forwards == [[14]]
    pair.step()
    assert rounds.launched[2] > 0


class Unusable(TableRounds):
    """The device finds no usable logits in the third round, or in all from there on."""

    num_bad = 1

    def take(self) -> RoundResult:
        verified = super().take()
        if len(self.launched) > 3 and self.num_bad:
            self.num_bad -= 1
            return RoundResult(None, 0)
        return verified


def test_an_unusable_round_is_made_again_without_draft_tokens() -> None:
    pair, rounds = make_pair(
        TableModel(DRAFT_RULES["half"]), rounds_type=Unusable, num_draft_tokens=3
    )
    asked = request("r", 3, max_tokens=40)
    assert ids(run(pair, [asked])["r"]) == greedy_reference(asked)
    assert rounds.num_dropped


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
    assert 10 <= rounds.copied.count(4) <= len(rounds.copied) <= 24
    statistics = chunks[-1].statistics
    assert statistics is not None
    assert statistics.total_accepted_draft_tokens >= 4 * 10
    # From 80 tokens on the draft is right, or nothing is.
    assert rounds.launched[-5:-2] == ([4, 4, 4] if draft_name == "self" else [0, 0, 0])


def test_nothing_is_copied_unless_that_was_asked_for_and_changes_nothing() -> None:
    for prompt_lookup, sampling, is_copied in (
        (False, Sampling(), False),
        (True, Sampling(), True),
        (True, SEEDED, True),
        (True, Sampling(temperature=0.05, seed=3), False),  # the accept test wants probabilities
    ):
        pair, rounds = copying_pair("wrong", prompt_lookup=prompt_lookup)
        asked = request("r", 3, max_tokens=60, sampling=sampling)
        chunks = run(pair, [asked])["r"]
        assert len(ids(chunks)) == 60
        assert bool(rounds.copied) == is_copied
        pair, rounds = copying_pair("wrong", prompt_lookup=prompt_lookup, costs=None)
        assert ids(run(pair, [asked])["r"]) == ids(chunks)
        assert not rounds.copied  # a fixed draft length is that of the draft


def test_a_request_may_ask_for_fewer_copied_tokens_or_none() -> None:
    for most, copied in ((2, {2}), (0, set())):
        pair, rounds = copying_pair("wrong")
        run(pair, [request("r", 3, max_tokens=60, num_draft_tokens=most)])
        assert set(rounds.copied) == copied


def test_copies_need_no_room_of_the_draft() -> None:
    pair, rounds = copying_pair("self", draft_max_seq_len=8)
    asked = request("r", 9, max_tokens=60)
    assert ids(run(pair, [asked])["r"]) == text_of(lap_rule, asked)
    assert [k for k in rounds.launched if k] == rounds.copied
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
    asked = request("r", 1, max_tokens=40)
    assert ids(run(pair, [asked])["r"]) == [10] * 40
    assert rounds.num_dropped and rounds.copied
