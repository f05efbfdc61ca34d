"""Any requests, joining, leaving and ending at any step, get the text that they get alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.request import Chunk, Request, Sampling
from tests.runtimes.pair.table_rounds import Device, make_pair
from tests.runtimes.table_engine import HasLogits, ids, run
from tests.speculative.table import NoisyModel

VOCAB_SIZE = 12
TARGET = NoisyModel(1, blend=0.3)
DRAFTS: Mapping[str, HasLogits] = {
    "near": NoisyModel(2, blend=0.3),
    "noise": NoisyModel(3, blend=30.0),
    "self": TARGET,
}
SEEDED = Sampling(temperature=1.0, seed=7, is_seeded=True)
UNSEEDED = Sampling(temperature=1.0, seed=8)
SPECIAL: list[dict[str, Any]] = [
    {"return_log_probs": True},
    {"return_prompt_log_probs": True},
    {"sampling": Sampling(repetition_penalty=1.3)},
    {"sampling": replace(SEEDED, min_tokens=5)},
    {"prediction_token_ids": tuple(range(12))},
]


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it comes, and how long after that it is cancelled."""

    request: Request
    at: int
    cancelled_after: int | None


@st.composite
def arrivals(draw: st.DrawFn, *, is_fixed: bool) -> list[Arrival]:
    samplings = [Sampling(), SEEDED, replace(SEEDED, top_p=0.7)]
    if is_fixed:  # what is drawn without a seed depends on how much is drafted
        samplings.append(UNSEEDED)
    found = []
    for number in range(draw(st.integers(1, 6))):
        length = draw(st.sampled_from([1, 2, 9, 30]))
        asked: dict[str, Any] = {
            "request_id": str(number),
            "prompt_token_ids": tuple((number + i * i) % VOCAB_SIZE for i in range(length)),
            "max_tokens": draw(st.sampled_from([1, 2, 7, 20])),
            "sampling": draw(st.sampled_from(samplings)),
            "num_draft_tokens": draw(st.sampled_from([None, None, 0, 1, 3])),
            "end_token_ids": frozenset(draw(st.sampled_from([(), (), (3,)]))),
            "stop_strings": draw(st.sampled_from([(), (), ("w5 w",)])),
            "timeout_s": draw(st.sampled_from([None, None, None, 9.0])),
        }
        if draw(st.integers(0, 3)) == 0:
            asked |= draw(st.sampled_from(SPECIAL))
        cancelled_after = draw(st.sampled_from([None, None, None, 0, 1, 4, 9]))
        found.append(Arrival(Request(**asked), draw(st.integers(0, 12)), cancelled_after))
    return found


@st.composite
def pairs(draw: st.DrawFn) -> dict[str, Any]:
    scale = draw(st.sampled_from([0.05, 0.3, 2.0]))
    costs = StepCosts(0.1, [scale * k for k in range(9)], draw(st.sampled_from([None, 1.0])))
    return {
        "costs": draw(st.sampled_from([None, costs])),
        "part_seconds": draw(st.sampled_from([0.0, 0.7, 2.0])),
        "num_draft_tokens": draw(st.sampled_from([0, 1, 3])),
        "max_batch_size": draw(st.integers(1, 5)),
        "max_members": draw(st.integers(1, 5)),
        "max_rows": draw(st.sampled_from([5, 8, 64])),
        "short_prompt": draw(st.sampled_from([0, 9, 30])),
        "draft_max_seq_len": draw(st.sampled_from([20, 500])),
        "max_seq_len": draw(st.sampled_from([35, 300])),
        "prompt_lookup": draw(st.booleans()),
        "schedule": draw(st.sampled_from([(), ((2, 1),), ((3, 0),)])),
    }


@cache
def alone(
    asked: Request, draft: str, num_draft_tokens: int, limits: tuple[int, int]
) -> list[Chunk]:
    """What a request gets of a pair that makes single steps, one after the other."""
    max_seq_len, draft_max_seq_len = limits
    pair, _ = make_pair(
        DRAFTS[draft],
        target=TARGET,
        has_rounds=False,
        num_draft_tokens=num_draft_tokens,
        max_seq_len=max_seq_len,
        draft_max_seq_len=draft_max_seq_len,
    )
    return run(pair, [replace(asked, timeout_s=None)])[asked.request_id]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(st.data(), pairs(), st.sampled_from(sorted(DRAFTS)))
def test_all_get_the_text_that_they_get_alone(
    data: st.DataObject, settings: dict[str, Any], draft: str
) -> None:
    is_fixed = settings["costs"] is None and not settings["schedule"]
    coming = data.draw(arrivals(is_fixed=is_fixed))
    coming = [
        c for c in coming if (c.request.num_draft_tokens or 0) <= settings["num_draft_tokens"]
    ]
    now = [0.0]
    pair, rounds = make_pair(DRAFTS[draft], target=TARGET, clock=lambda: now[0], **settings)
    chunks: dict[str, list[Chunk]] = {c.request.request_id: [] for c in coming}
    for step in range(400):
        now[0] = float(step)
        for arrival in coming:
            if arrival.at == step:
                pair.submit(arrival.request)
            if arrival.cancelled_after is not None and arrival.at + arrival.cancelled_after == step:
                pair.cancel(arrival.request.request_id)
        for chunk in pair.step():
            chunks[chunk.request_id].append(chunk)
    assert not pair.has_work()
    assert not rounds.texts
    for engine in pair.engines.values():
        assert isinstance(engine, Device)
        assert engine.sequences == {}
    limits = settings["max_seq_len"], settings["draft_max_seq_len"]
    for arrival in coming:
        asked = arrival.request
        found = chunks[asked.request_id]
        expected = alone(asked, draft, settings["num_draft_tokens"], limits)
        assert [c.finish_reason is not None for c in found] == [False] * (len(found) - 1) + [True]
        last = found[-1]
        assert last.statistics is not None
        assert last.statistics.num_output_tokens == len(ids(found))
        if last.finish_reason == "cancelled":
            assert arrival.cancelled_after is not None
        elif last.finish_reason == "error":
            assert asked.timeout_s is not None
            assert last.error is not None and "time limit" in last.error
        else:
            assert last.finish_reason == expected[-1].finish_reason
            assert ids(found) == ids(expected)
        assert ids(found) == ids(expected)[: len(ids(found))]
