"""How much of prompts is read between two rounds."""

from __future__ import annotations

import pytest

from specpipe.runtimes.pair.costs import PromptCosts, settled
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pace import Pace
from specpipe.speculative.adaptive import StepCosts
from tests.runtimes.pair.table_rounds import Device, TableRounds, make_pair
from tests.runtimes.table_engine import ids
from tests.speculative.table import DRAFT_RULES, TableModel, greedy_reference, request

ROUND = StepCosts(0.0, [0.0] * 9, seconds=1.0)
DRAFT_COSTS = PromptCosts({4: 0.3, 8: 0.5, 16: 2.0})


class Watched(Device):
    """Notes by how many rounds each part of a prompt was preceded."""

    rounds: TableRounds

    def go_on(self) -> None:
        self.read_after.append(len(self.rounds.launched))
        super().go_on()


def watched_pair(part_seconds: float, **settings: object) -> tuple[EnginePair, Watched]:
    pair, rounds = make_pair(
        TableModel(DRAFT_RULES["wrong"]), costs=ROUND, part_seconds=part_seconds, **settings
    )
    target = rounds.target
    target.__class__ = Watched
    assert isinstance(target, Watched)
    target.rounds, target.read_after = rounds, []
    return pair, target


@pytest.mark.parametrize(
    ("part_seconds", "parts"), [(0.3, 3), (0.5, 2), (0.9, 1)], ids=["a launch", "2 of 3", "one"]
)
def test_a_long_prompt_goes_between_rounds_in_parts(part_seconds: float, parts: int) -> None:
    pair, target = watched_pair(part_seconds)
    short, long = request("short", 1, max_tokens=90), request("long", 60, max_tokens=3)
    pair.submit(short)
    for _ in range(4):
        pair.step()
    pair.submit(long)
    chunks = {"short": [], "long": []}
    while pair.has_work():
        for chunk in pair.step():
            chunks[chunk.request_id].append(chunk)
    between = [target.read_after.count(number) for number in sorted(set(target.read_after))]
    assert sum(between) == 3 * 4  # launches of 16 tokens
    assert set(between[:-1]) == {parts}


def test_a_step_has_the_end_of_a_launch_or_the_drafts_part_of_the_next() -> None:
    """Each alone is all that requests should wait for."""
    pair, target = watched_pair(0.4, num_draft_tokens=2, draft_prompt_costs=PromptCosts({16: 0.9}))
    draft = pair.engines["draft"]
    read_by_draft: list[int] = []
    forward = draft.forward

    def noted(batch: list[tuple[int, list[int]]], num_logits: list[int]) -> object:
        read_by_draft.extend(len(tokens) for _, tokens in batch if len(tokens) > 4)
        return forward(batch, num_logits)

    draft.forward = noted  # type: ignore[method-assign]
    pair.submit(request("short", 1, max_tokens=90))
    for _ in range(4):
        pair.step()
    long = request("long", 60, max_tokens=3, num_draft_tokens=2)  # so the draft reads along
    pair.submit(long)
    seconds = []
    chunks = []
    while pair.has_work():
        before = len(target.read_after), len(read_by_draft)
        chunks += [chunk for chunk in pair.step() if chunk.request_id == "long"]
        num_parts = len(target.read_after) - before[0]
        seconds.append(0.4 * num_parts + 0.9 * (len(read_by_draft) - before[1]))
    assert ids(chunks) == greedy_reference(long)
    assert read_by_draft == [16, 16, 16, 11]
    assert max(seconds) <= 1.2


def test_all_is_read_at_once_while_nobody_decodes() -> None:
    pair, target = watched_pair(5.0)
    pair.submit(request("r", 30, max_tokens=3))
    pair.step()
    assert target.read_after == [0, 0, 0]


def test_who_is_cancelled_while_it_is_read_leaves_the_others_alone() -> None:
    pair, _ = watched_pair(1.0)
    short, beside = request("short", 1, max_tokens=40), request("beside", 7, max_tokens=9)
    pair.submit(short)
    pair.step()
    pair.submit(request("gone", 6, max_tokens=5))
    pair.submit(beside)
    pair.step()
    pair.cancel("gone")
    chunks = {"short": [], "beside": [], "gone": []}
    while pair.has_work():
        for chunk in pair.step():
            chunks[chunk.request_id].append(chunk)
    assert ids(chunks["beside"]) == greedy_reference(beside)
    assert [c.finish_reason for c in chunks["gone"]] == ["cancelled"]


def spent(pace: Pace, seconds: float) -> int:
    """How many parts of so many seconds are read in a step."""
    count = 0
    while pace.allows(seconds):
        pace.spend(seconds)
        count += 1
    return count


def test_prompts_get_more_of_the_time_as_more_of_them_wait() -> None:
    for num_reading, num_decoding, parts in ((1, 8, 12), (2, 8, 22), (5, 8, 52), (2, 80, 13)):
        pace = Pace()
        pace.begin(1.0, num_reading=num_reading, num_decoding=num_decoding)
        assert spent(pace, 0.0999) == parts


def test_a_part_that_is_longer_than_the_bound_is_read_in_every_second_step() -> None:
    pace = Pace()
    parts = []
    for _ in range(4):
        pace.begin(1.0, num_reading=1, num_decoding=8)
        parts.append(spent(pace, 5.0))
    assert parts == [1, 0, 1, 0]


def test_what_the_draft_reads_is_taken_from_the_next_step() -> None:
    pace = Pace(DRAFT_COSTS)
    assert pace.most_drafts_tokens(100, 0) == 100  # nobody waits
    pace.begin(1.0, num_reading=1, num_decoding=8)
    assert pace.most_drafts_tokens(100, 0) == 8
    assert pace.most_drafts_tokens(5, 0) == 5
    pace.spend_on_draft(8, 0)
    pace.begin(1.0, num_reading=1, num_decoding=8)
    assert spent(pace, 0.39) == 3
    pace.spend_on_draft(8, 0)
    pace.begin(1.0, num_reading=1, num_decoding=8)
    assert spent(pace, 0.39) == 1  # what the draft took is not left


def test_the_draft_reads_little_behind_a_prompt_of_the_same_step() -> None:
    pace = Pace(PromptCosts({4: 0.2, 8: 0.3, 16: 0.7}, per_look=0.001))
    pace.begin(1.0, num_reading=1, num_decoding=8)
    assert pace.most_drafts_tokens(100, 0) == 16
    assert pace.most_drafts_tokens(100, 100) == 8  # 1.1 s, of which 0.8 look back
    pace.spend(1.1)
    assert pace.most_drafts_tokens(100, 0) == 8
    assert pace.most_drafts_tokens(100, 1000) == 4  # it goes on, if slowly


def test_prompt_costs_are_of_whole_launches() -> None:
    costs = PromptCosts({128: 7.0, 1024: 24.0}, per_look=0.001)
    assert [costs.seconds(n) for n in (1, 128, 129, 1024, 1100)] == [7.0, 7.0, 24.0, 24.0, 31.0]
    assert costs.seconds(128, num_looks=1000) == 8.0
    assert [costs.most_within(31.0, start) for start in (0, 6, 8, 900)] == [1024, 1024, 128, 128]


@pytest.mark.parametrize(
    ("times", "expected", "num_taken"),
    [([3.0, 3.01, 1.0], 3.0, 2), ([9.0, 3.0, 3.05, 1.0], 3.0, 3), ([5.0, 4.0, 3.0], 3.0, 3)],
)
def test_a_time_is_settled_when_two_agree(
    times: list[float], expected: float, num_taken: int
) -> None:
    left = iter(times)
    assert settled(left) == expected
    assert len(list(left)) == len(times) - num_taken
