"""Short prompts, which rounds read beside their members."""

from __future__ import annotations

from typing import Any

from specpipe.runtimes.pair.engine_pair import EnginePair
from tests.runtimes.pair.table_rounds import Device, TableRounds, make_pair
from tests.runtimes.table_engine import ids, run
from tests.speculative.table import DRAFT_RULES, TableModel, greedy_reference, request


def reading_pair(draft_name: str = "half", **options: Any) -> tuple[EnginePair, TableRounds]:
    settings = {"num_draft_tokens": 0, "max_num_tokens": 100, "short_prompt": 20, **options}
    return make_pair(TableModel(DRAFT_RULES[draft_name]), **settings)


def forwards(pair: EnginePair) -> list[list[int]]:
    target = pair.engines["target"]
    assert isinstance(target, Device)
    return target.forwards


def test_a_short_prompt_gives_its_first_token_in_the_round_that_reads_it() -> None:
    pair, rounds = reading_pair()
    first, second = request("first", 20, max_tokens=30), request("second", 7, max_tokens=30)
    pair.submit(first)
    assert len(ids(pair.step())) == 1
    assert rounds.read == [[19], []]
    pair.submit(second)
    pair.step()
    assert rounds.read[2:] == [[6]]
    assert [len(members) for members in rounds.launched] == [1, 1, 2]
    assert forwards(pair) == []
    chunks = [chunk for _ in range(40) for chunk in pair.step()]
    assert ids([c for c in chunks if c.request_id == "second"]) == greedy_reference(second)


def test_a_prompt_that_is_not_short_is_read_by_itself() -> None:
    pair, rounds = reading_pair()
    asked = request("r", 21, max_tokens=5)
    assert ids(run(pair, [asked])["r"]) == greedy_reference(asked)
    assert forwards(pair) == [[20]]
    assert not any(rounds.read)


def test_rounds_read_what_there_is_room_for_in_the_order_of_arrival() -> None:
    """Of 16 rows: members first, and no more than ten tokens."""
    pair, rounds = reading_pair(max_rows=16, max_num_tokens=10)
    asked = [request(name, 13, max_tokens=30) for name in "abc"]
    chunks = run(pair, asked)
    assert [ids(chunks[r.request_id]) for r in asked] == [greedy_reference(r) for r in asked]
    assert rounds.read[:5] == [[10], [2, 8], [4, 6], [6], []]
    assert [len(members) for members in rounds.launched[:4]] == [1, 2, 2, 3]


def test_who_names_a_draft_length_drafts_from_the_first_round_on() -> None:
    pair, rounds = reading_pair("self", num_draft_tokens=3)
    asked = request("r", 10, max_tokens=13)
    assert ids(run(pair, [asked])["r"]) == greedy_reference(asked)
    assert rounds.read[0] == [9]
    assert rounds.lengths[:3] == [3, 3, 3]


def test_where_members_leave_little_room_rounds_between_theirs_only_read() -> None:
    pair, rounds = reading_pair(max_rows=8, max_batch_size=8, max_members=8)
    for number in range(7):
        pair.submit(request(str(number), 1, max_tokens=40))
    pair.step()
    late = request("late", 20, max_tokens=5)
    pair.submit(late)
    rounds.read.clear()
    chunks = [chunk for _ in range(12) for chunk in pair.step()]
    # One beside those seven, eight without them, and so on; what would not fill a round waits.
    assert rounds.read[:6] == [[1], [8], [1], [8], [1], []]
    assert [len(members) for members in rounds.launched[2:6]] == [7, 7, 7, 8]
    assert ids([c for c in chunks if c.request_id == "late"]) == greedy_reference(late)


def test_a_request_that_is_cancelled_while_it_is_read_leaves_nothing_behind() -> None:
    pair, rounds = reading_pair(max_num_tokens=4, max_batch_size=2)
    pair.submit(request("other", 1, max_tokens=3))
    pair.submit(request("r", 20, max_tokens=9))
    pair.step()
    pair.cancel("r")
    chunks = [chunk for _ in range(9) for chunk in pair.step() if chunk.request_id == "r"]
    assert [chunk.finish_reason for chunk in chunks] == ["cancelled"]
    assert sum(sum(read) for read in rounds.read) < 19
    asked = request("next", 9, max_tokens=20)
    assert ids(run(pair, [asked])["next"]) == greedy_reference(asked)
    assert not rounds.texts


def test_a_wider_launch_is_taken_where_half_of_it_is_used() -> None:
    """Eight rows or sixteen, beside six members: with three tokens, a member more, and with five"""
    for length, read in ((4, [[2], [1]]), (6, [[5], []])):
        pair, rounds = reading_pair(max_batch_size=8, max_members=8)
        for number in range(6):
            pair.submit(request(str(number), 1, max_tokens=40))
        pair.step()
        rounds.read.clear()
        pair.submit(request("late", length, max_tokens=5))
        pair.step()
        pair.step()
        assert rounds.read == read


def test_no_text_waits_for_others_to_fill_a_round_for_long() -> None:
    """Beside 40 members two rounds, which read one token each."""
    pair, rounds = reading_pair(max_rows=41, max_batch_size=41, max_members=41)
    for number in range(40):
        pair.submit(request(str(number), 1, max_tokens=40))
    pair.step()
    rounds.read.clear()
    pair.submit(request("late", 20, max_tokens=5))
    for _ in range(4):
        pair.step()
    assert rounds.read == [[1], [1], [17], []]
