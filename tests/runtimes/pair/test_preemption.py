"""Requests for which there is too little memory: they give way, go on later, and nobody notices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.preemption import TargetMemory
from specpipe.runtimes.pair.room import Room
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.request import Chunk, Request, Sampling
from tests.runtimes.pair.table_rounds import Device, make_pair
from tests.runtimes.table_engine import ids, run
from tests.speculative.table import NoisyModel

PAGE = 4
MAX_SEQ_LEN = 64
MOST_STILL = 20
"""Steps in which the oldest request may be told nothing: it is read, beside others."""


class Remembered(NoisyModel):
    """The same numbers, worked out once."""

    def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray:
        stops = range(len(token_ids) - num_rows + 1, len(token_ids) + 1)
        return np.stack([self.row(tuple(token_ids[max(0, n - 3) : n]), n) for n in stops])

    @cache  # noqa: B019
    def row(self, last: tuple[int, ...], length: int) -> np.ndarray:
        filled = [0] * (length - len(last)) + list(last)
        return super().logits(filled, 1)[0]


TARGET, DRAFT = Remembered(1, blend=0.3), Remembered(2, blend=0.3)
COSTS = StepCosts(0.1, [0.05 * k for k in range(9)])
SEEDED = Sampling(temperature=1.0, seed=7, is_seeded=True)


def question(rng: random.Random) -> dict[str, Any]:
    """What a request asks for; its prompt begins as others do."""
    start, length = rng.randrange(2), rng.choice([1, 2, 9, 9, 30])
    settings: dict[str, Any] = {
        "prompt_token_ids": tuple((start + i * i) % 12 for i in range(length)),
        "max_tokens": rng.choice([1, 8, 20]),
        "sampling": rng.choice([Sampling(), Sampling(), SEEDED, replace(SEEDED, top_p=0.7)]),
        "end_token_ids": frozenset(rng.choice([(), (), (), (3,)])),
        "num_draft_tokens": rng.choice([None, None, 0, 1, 3]),
    }
    special: list[dict[str, Any]] = [
        {"return_log_probs": True},
        {"return_prompt_log_probs": True, "return_log_probs": True},
        {"sampling": Sampling(repetition_penalty=1.3)},
        {"sampling": replace(SEEDED, min_tokens=5)},
        {"prediction_token_ids": tuple(range(12))},
    ]
    return settings | (rng.choice(special) if rng.random() < 0.3 else {})


QUESTIONS = [question(random.Random(seed)) for seed in range(40)]


@cache
def alone(number: int) -> list[Chunk]:
    """What a pair without pages says to a question that makes single steps, and has it alone."""
    pair, _ = make_pair(
        DRAFT, target=TARGET, has_rounds=False, num_draft_tokens=3, max_seq_len=MAX_SEQ_LEN
    )
    asked = {**QUESTIONS[number], "num_draft_tokens": 0}
    return run(pair, [Request(request_id="alone", **asked)])["alone"]


@dataclass
class Asked:
    """A question to the pair, and what it was told."""

    request: Request
    number: int
    chunks: list[Chunk] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def is_over(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].finish_reason is not None


def ask_many(pair: EnginePair, rng: random.Random, number: int) -> list[Asked]:
    """Lets so many requests come and go, up to 20 at a time; the oldest always goes on."""
    asked: dict[str, Asked] = {}
    live: list[Asked] = []
    num_still = 0
    while len(asked) < number or pair.has_work():
        while len(asked) < number and len(live) < 20 and rng.random() < 0.5:
            n = rng.randrange(len(QUESTIONS))
            salt = rng.choice(["", "", "b"])
            request = Request(request_id=str(len(asked)), cache_salt=salt, **QUESTIONS[n])
            pair.submit(request)
            live.append(Asked(request, n))
            asked[request.request_id] = live[-1]
        if live and rng.random() < 0.03:
            one = rng.choice(live)
            one.is_cancelled = True
            pair.cancel(one.request.request_id)
        for chunk in pair.step():
            one = asked[chunk.request_id]
            assert not one.is_over
            one.chunks.append(chunk)
            if live and one is live[0]:
                num_still = 0
        num_still += 1
        if live and live[0].is_over:
            num_still = 0
        live = [one for one in live if not one.is_over]
        assert num_still <= MOST_STILL
    return list(asked.values())


def check(asked: Sequence[Asked]) -> None:
    """Each was told what it is told alone, or if it was cancelled the beginning of that."""
    for one in asked:
        expected, last = alone(one.number), one.chunks[-1]
        assert last.statistics is not None
        assert last.statistics.num_output_tokens == len(ids(one.chunks))
        if last.finish_reason == "cancelled":
            assert one.is_cancelled
            assert ids(one.chunks) == ids(expected)[: len(ids(one.chunks))]
            continue
        assert last.finish_reason == expected[-1].finish_reason
        for name in ("token_ids", "log_probs", "prompt_log_probs"):
            found, wanted = (
                [x for c in chunks for x in getattr(c, name)] for chunks in (one.chunks, expected)
            )
            assert found == pytest.approx(wanted), (one.request, name)
        assert "".join(c.text for c in one.chunks) == "".join(c.text for c in expected)


def check_room(pair: EnginePair) -> None:
    """All pages are back."""
    for engine in pair.engines.values():
        assert isinstance(engine, Device) and engine.paged is not None
        assert engine.sequences == {} == engine.texts
        assert engine.paged.num_held_tokens == 0
        num_free = PAGE * len(engine.paged.free_pages)
        assert num_free + engine.paged.num_cached_tokens == engine.paged.capacity_tokens


def short_pair(num_pages: int, draft_pages: int, **options: Any) -> EnginePair:
    pair, _ = make_pair(
        DRAFT,
        target=TARGET,
        page=PAGE,
        num_pages=num_pages,
        draft_pages=draft_pages,
        num_draft_tokens=3,
        max_seq_len=MAX_SEQ_LEN,
        max_batch_size=8,
        max_members=8,
        **{"max_num_tokens": 8, **options},
    )
    return pair


@pytest.fixture(autouse=True, scope="module")
def _little_ahead() -> Iterator[None]:
    """Requests start when there is hardly room for them, and soon have to give way; and they wait
    for what others read, however little it is.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Room, "AHEAD", 0)
        patched.setattr(TargetMemory, "LEAST_SHARED", 2 * PAGE)
        yield


def test_five_hundred_requests_with_too_little_memory() -> None:
    pair = short_pair(20, 16, costs=COSTS)
    asked = ask_many(pair, random.Random(1), 500)
    check(asked)
    check_room(pair)
    statistics = [s for one in asked if (s := one.chunks[-1].statistics)]
    occupancy = pair.occupancy()
    assert occupancy.preempted.num_requests == sum(s.num_preemptions for s in statistics) > 50
    assert occupancy.preempted.num_tokens > 100
    num_reused = sum(s.num_cached_input_tokens for s in statistics)
    assert occupancy.kv_caches["target"].num_reused_tokens >= num_reused > 500
    assert occupancy.kv_caches["draft"].num_reused_tokens > 100
    assert {s.draft_status for s in statistics} >= {"drafted", "no_room"}


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(st.data())
def test_whatever_memory_there_is_all_get_the_text_that_they_get_alone(data: st.DataObject) -> None:
    options: Mapping[str, Any] = {
        "costs": data.draw(st.sampled_from([None, COSTS])),
        "has_rounds": data.draw(st.booleans()),
        "prefix_reuse": data.draw(st.booleans()),
        "num_pages": data.draw(st.integers(19, 25)),
        "draft_pages": data.draw(st.integers(5, 50)),
    }
    pair = short_pair(**options)
    check(ask_many(pair, random.Random(data.draw(st.integers(0, 99))), 25))
    check_room(pair)


TEXT = tuple(i * i % 12 for i in range(40))


def asked_with(name: str, prompt: tuple[int, ...] = TEXT, **settings: Any) -> Request:
    settings = {"max_tokens": 2, "num_draft_tokens": 0, **settings}
    return Request(request_id=name, prompt_token_ids=prompt, **settings)


def test_who_begins_as_another_does_waits_for_what_that_one_reads() -> None:
    pair = short_pair(60, 60)
    again = [asked_with(str(n), (*TEXT, n)) for n in range(3)]
    for request in [asked_with("first"), *again, asked_with("other", (7, 3))]:
        pair.submit(request)
    chunks = pair.step()
    occupancy = pair.occupancy()
    assert (occupancy.num_running, occupancy.num_waiting) == (2, 3)  # the other one need not
    while pair.has_work():
        chunks += pair.step()
    found = {c.request_id: c.statistics.num_cached_input_tokens for c in chunks if c.statistics}
    assert found["first"] == found["other"] == 0
    assert all(found[str(n)] >= 40 - 2 * PAGE for n in range(3))
    check_room(pair)


@pytest.mark.parametrize(
    "settings",
    [{"cache_salt": "b"}, {"return_prompt_log_probs": True}, {"priority": -1}],
    ids=str,
)
def test_who_cannot_use_it_or_goes_first_waits_for_nobody(settings: dict[str, Any]) -> None:
    pair = short_pair(60, 60)
    pair.submit(asked_with("first"))
    pair.step()
    pair.submit(asked_with("second", **settings))
    pair.step()
    assert pair.occupancy().num_waiting == 0


def test_who_waits_for_one_that_is_cancelled_reads_for_itself() -> None:
    pair = short_pair(60, 60)
    pair.submit(asked_with("first"))
    pair.submit(asked_with("second"))
    pair.step()
    assert pair.occupancy().num_waiting == 1
    pair.cancel("first")
    chunks = [c for _ in range(30) for c in pair.step() if c.request_id == "second"]
    assert ids(chunks) == ids(run(short_pair(60, 60), [asked_with("alone")])["alone"])
    check_room(pair)


def test_a_prompt_that_is_scored_gives_way_in_its_middle() -> None:
    pair = short_pair(25, 50, max_num_tokens=4)
    growing = [
        Request(request_id=str(n), prompt_token_ids=(1, 2, n), max_tokens=30, num_draft_tokens=0)
        for n in range(3)
    ]
    asked: dict[str, Any] = {
        "prompt_token_ids": tuple(i * i % 12 for i in range(50)),
        "max_tokens": 3,
        "return_prompt_log_probs": True,
        "num_top_log_probs": 2,
    }
    last = run(pair, [*growing, Request(request_id="scored", **asked)])["scored"]
    alone_pair, _ = make_pair(DRAFT, target=TARGET, has_rounds=False)
    expected = run(alone_pair, [Request(request_id="scored", num_draft_tokens=0, **asked)])
    for name in ("token_ids", "prompt_log_probs", "prompt_top_log_probs"):
        found, wanted = (
            [x for c in chunks for x in getattr(c, name)] for chunks in (last, expected["scored"])
        )
        assert found == wanted
    assert last[-1].statistics is not None and last[-1].statistics.num_preemptions > 0
