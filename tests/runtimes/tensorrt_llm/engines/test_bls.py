"""The pair over two engine models: what it asks of them, and what it makes of their answers."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specpipe.errors import FAULT, EngineMismatch, RequestError, RuntimeUnavailable
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.tensorrt_llm.engines import bls
from specpipe.runtimes.tensorrt_llm.engines.bls import BlsPair, TritonModel, load_pair, read_limits
from specpipe.runtimes.tensorrt_llm.engines.call_times import CallTimes
from specpipe.runtimes.tensorrt_llm.engines.engine_calls import (
    BackendTensors,
    DraftTokens,
    EngineCallError,
    EngineModel,
    TargetTokens,
    read_verified,
    step_seed,
)
from specpipe.speculative.noise import Purpose
from specpipe.speculative.request import Chunk, Sampling, Statistics
from specpipe.speculative.warp import softmax, warp
from tests.runtimes.table_engine import ids, run
from tests.runtimes.tensorrt_llm.engines.bls import make_bls_pair, stand_ins
from tests.speculative.table import (
    DRAFT_RULES,
    NoisyModel,
    PieceDetokenizer,
    ScriptedModel,
    TableModel,
    greedy_reference,
    request,
    target_rule,
)
from tests.tensorrt_llm_stand_ins.triton_backend.stand_in import StandInModel
from tests.waiting import PATIENCE_S


def statistics(chunks: Sequence[Chunk]) -> Statistics:
    found = chunks[-1].statistics
    assert found is not None
    return found


class Answers(StandInModel):
    """A draft whose n-th request is answered with n-th entry, and by its model where it is None."""

    def __init__(self, model: StandInModel, answers: Sequence[Sequence[int] | None]) -> None:
        super().__init__(model.name, model.model, model.limits)
        self.answers = list(answers)

    def generate(
        self, request_id: str, tensors: BackendTensors, outputs: Sequence[str]
    ) -> Iterator[BackendTensors]:
        answer = self.answers.pop(0) if self.answers else None
        if answer is None:
            yield from super().generate(request_id, tensors, outputs)
            return
        self.requests.append(tensors)
        yield {
            "output_ids": np.array([[answer]], np.int32).reshape(1, 1, len(answer)),
            "sequence_length": np.array([[len(answer)]], np.int32),
        }


class Hanging(StandInModel):
    """A model that waits before each answer until it may go on."""

    def __init__(self, model: StandInModel) -> None:
        super().__init__(model.name, model.model, model.limits)
        self.go = threading.Semaphore(0)
        self.stopped: list[str] = []

    def generate(
        self, request_id: str, tensors: BackendTensors, outputs: Sequence[str]
    ) -> Iterator[BackendTensors]:
        for response in super().generate(request_id, tensors, outputs):
            self.go.acquire()
            yield response

    def stop(self, request_id: str) -> None:
        self.stopped.append(request_id)
        super().stop(request_id)


def until(pair: BlsPair, condition: Callable[[list[Chunk]], bool]) -> list[Chunk]:
    """Steps until the condition holds of all chunks so far."""
    chunks: list[Chunk] = []
    deadline = time.monotonic() + PATIENCE_S
    while not condition(chunks):
        assert time.monotonic() < deadline, chunks
        chunks += pair.step()
    return chunks


def finish(pair: BlsPair) -> list[Chunk]:
    chunks = []
    while pair.has_work():
        chunks += pair.step()
    return chunks


# What comes out.


@pytest.mark.parametrize("draft_name", DRAFT_RULES)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3, 5, 8])
def test_greedy_requests_of_all_sizes_together(draft_name: str, num_draft_tokens: int) -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(DRAFT_RULES[draft_name]))
    pair = make_bls_pair(draft, target, num_draft_tokens=num_draft_tokens)
    requests = [request(f"{p}-{m}", p, max_tokens=m) for p in (1, 7, 60) for m in (1, 2, 17, 32)]
    chunks = run(pair, requests)
    assert {n: ids(c) for n, c in chunks.items()} == {
        r.request_id: greedy_reference(r) for r in requests
    }
    assert all(c[-1].finish_reason == "length" for c in chunks.values())
    assert draft.running == target.running == {}
    counted = statistics(chunks["7-17"])
    if num_draft_tokens == 3 and draft_name == "self":
        assert (counted.num_steps, counted.total_draft_tokens) == (5, 12)
        assert counted.total_accepted_draft_tokens == 12
    if num_draft_tokens == 3 and draft_name == "wrong":
        assert (counted.num_steps, counted.total_accepted_draft_tokens) == (17, 0)


def test_chunks_come_while_the_request_runs() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    chunks = run(make_bls_pair(draft, target, num_draft_tokens=3), [request()])["r"]
    assert [len(c.token_ids) for c in chunks] == [4, 4, 4, 4, 1]
    assert "".join(c.text for c in chunks) == "".join(f"w{i} " for i in greedy_reference(request()))


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
def test_settings_mean_in_every_round_what_they_mean_in_one_request(num_draft_tokens: int) -> None:
    """min_tokens with several end ids, a penalty over prompt and output, bad words across rounds,
    ids that the tokenizer does not have; the reference draws token by token.
    """
    model = NoisyModel(1)
    for number in range(12):
        sampling = Sampling(
            min_tokens=(0, 1, 7, 30)[number % 4],
            repetition_penalty=(1.0, 1.3)[number % 2],
            bad_words=((), ((5,), (6, 7), (1, 2, 3)))[number // 6],
        )
        r = request(
            prompt_token_ids=(number % 8, 2, 6),
            max_tokens=20,
            sampling=sampling,
            end_token_ids=frozenset({8, 9, 10}),
        )
        draft, target = stand_ins(model, NoisyModel(2, blend=0.4))
        pair = make_bls_pair(
            draft, target, num_draft_tokens=num_draft_tokens, unused_token_ids=((11, 14),)
        )
        chunks = run(pair, [r])["r"]
        output: list[int] = []
        reason = "length"
        while len(output) < 20:
            scores = warp(
                model.logits([*r.prompt_token_ids, *output], 1)[0],
                sampling,
                prompt=r.prompt_token_ids,
                output=output,
                end_token_ids=r.end_token_ids,
            )
            scores[11:] = -np.inf
            if (token_id := int(scores.argmax())) in r.end_token_ids:
                reason = "stop"
                break
            output.append(token_id)
        assert (ids(chunks), chunks[-1].finish_reason) == (output, reason)


# A8: the draft's edges.


def test_a_draft_that_returns_nothing_makes_a_plain_step() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    scripted = Answers(draft, [None, []])
    chunks = run(make_bls_pair(scripted, target, num_draft_tokens=3), [request()])["r"]
    assert ids(chunks) == greedy_reference(request())
    assert [len(c.token_ids) for c in chunks] == [4, 1, 4, 4, 4]
    assert [
        t["draft_input_ids"].size if "draft_input_ids" in t else 0 for t in target.requests
    ] == [
        3,
        0,
        3,
        3,
        3,
    ]


def test_a_draft_that_begins_with_an_end_id_makes_a_plain_step() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    scripted = Answers(draft, [(2, 9, 9), (7, 2, 9)])
    r = request(end_token_ids=frozenset({2, 3}), max_tokens=3)
    chunks = run(make_bls_pair(scripted, target, num_draft_tokens=3), [r])["r"]
    assert ids(chunks) == greedy_reference(r)
    assert "draft_input_ids" not in target.requests[0]
    assert target.requests[1]["draft_input_ids"].tolist() == [[7]]


def test_without_drafting_the_target_runs_in_one_streamed_request() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    pair = make_bls_pair(draft, target, num_draft_tokens=4)
    chunks = run(pair, [request(num_draft_tokens=0)])["r"]
    assert ids(chunks) == greedy_reference(request())
    assert len(chunks) == 17
    assert draft.requests == []
    (asked,) = target.requests
    assert asked["request_output_len"].tolist() == [[17]]
    counted = statistics(chunks)
    assert (counted.acceptance_rate, counted.draft_status) == (0.0, "off_by_request")


def test_a_request_chooses_its_draft_length_up_to_the_engines() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    pair = make_bls_pair(draft, target, num_draft_tokens=4)
    run(pair, [request(num_draft_tokens=2)])
    assert {t["request_output_len"].item() for t in draft.requests} == {2, 1}
    with pytest.raises(RequestError, match="^num_draft_tokens is 5; this pair drafts at most 4 "):
        pair.submit(request(num_draft_tokens=5))


def test_a_draft_with_a_shorter_context_stops_drafting_there() -> None:
    draft, target = stand_ins(
        TableModel(target_rule), TableModel(target_rule), draft_max_seq_len=20
    )
    pair = make_bls_pair(draft, target, num_draft_tokens=4, draft_max_seq_len=20)
    requests = [request("a", 3, max_tokens=60), request("b", 30, max_tokens=20)]
    chunks = run(pair, requests)
    for r in requests:
        assert ids(chunks[r.request_id]) == greedy_reference(r)
    longest = max(
        t["input_lengths"].item() + t["request_output_len"].item() for t in draft.requests
    )
    assert longest == 20


# A9, A12, A14: ends, stop strings, counts.


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
@pytest.mark.parametrize("end_id", [2, 3])
def test_an_end_id_inside_a_block_cuts_everything_there(num_draft_tokens: int, end_id: int) -> None:
    script = [10, 11, end_id, 20, 21]
    draft, target = stand_ins(ScriptedModel(3, script), ScriptedModel(3, script))
    pair = make_bls_pair(draft, target, num_draft_tokens=4)
    r = request(end_token_ids=frozenset({2, 3}), num_draft_tokens=num_draft_tokens)
    chunks = run(pair, [r])["r"]
    assert ids(chunks) == [10, 11]
    assert "".join(c.text for c in chunks) == "w10 w11 "
    assert chunks[-1].finish_reason == "stop"
    assert statistics(chunks).num_output_tokens == 2
    assert target.running == {}


def test_the_last_round_drafts_one_less_than_what_is_left() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    pair = make_bls_pair(draft, target, num_draft_tokens=3)
    chunks = run(pair, [request(max_tokens=6)])["r"]
    assert len(ids(chunks)) == 6
    assert chunks[-1].finish_reason == "length"
    assert [t["request_output_len"].item() for t in draft.requests] == [3, 1]


PIECES = {4: "foo ", 5: "a", 6: ",b", 7: " bar", 8: "\n", 9: " end"}


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
@pytest.mark.parametrize(
    ("stop_strings", "text"),
    [(("\n", "a,b", '"', " end"), "foo "), (("\n",), "foo a,b bar")],
)
def test_stop_strings_are_found_in_the_text_and_never_sent(
    num_draft_tokens: int, stop_strings: tuple[str, ...], text: str
) -> None:
    script = [4, 5, 6, 7, 8, 9]
    draft, target = stand_ins(ScriptedModel(3, script), ScriptedModel(3, script))
    pair = make_bls_pair(
        draft, target, num_draft_tokens=4, detokenizer=lambda prompt, **_: PieceDetokenizer(PIECES)
    )
    r = request(stop_strings=stop_strings, max_tokens=6, num_draft_tokens=num_draft_tokens)
    chunks = run(pair, [r])["r"]
    assert "".join(c.text for c in chunks) == text
    assert chunks[-1].finish_reason == "stop"
    assert not any("stop_words_list" in t for t in [*draft.requests, *target.requests])


@pytest.mark.parametrize("draft_name", DRAFT_RULES)
@pytest.mark.parametrize("drops", ["some", "all", "random"])
@pytest.mark.parametrize("num_draft_tokens", range(9))
def test_a_scheduler_may_drop_draft_tokens(
    draft_name: str, drops: Any, num_draft_tokens: int
) -> None:
    """Of 8 streams; each token comes once, and what was dropped is no evidence on the draft."""
    draft, target = stand_ins(
        TableModel(target_rule), TableModel(DRAFT_RULES[draft_name]), drops=drops
    )
    pair = make_bls_pair(draft, target, num_draft_tokens=num_draft_tokens, max_batch_size=8)
    requests = [request(f"{p}", p, max_tokens=9 + 3 * p) for p in range(1, 9)]
    chunks = run(pair, requests)
    assert {n: ids(c) for n, c in chunks.items()} == {
        r.request_id: greedy_reference(r) for r in requests
    }
    lasts = [c[-1] for c in chunks.values()]
    assert {last.finish_reason for last in lasts} == {"length"}
    for last in lasts:
        assert last.counts is not None and last.statistics is not None
        counted = last.statistics
        assert counted.total_accepted_draft_tokens <= counted.total_draft_tokens
        if drops == "all" and draft_name == "wrong" and num_draft_tokens:
            assert (counted.total_draft_tokens, counted.draft_status) == (0, "not_verified")
            assert last.counts.num_unverified_tokens > 0
        if draft_name == "self":
            assert last.counts.num_unverified_tokens == 0 or drops != "all"


def test_what_was_dropped_is_told_from_what_was_rejected() -> None:
    """Draft tokens 10 to 13, of a target that says 10 to 14, 10 11 9 and 10 11 9 8 7."""
    answers = {
        (10, 11, 12, 13, 14): TargetTokens([10, 11, 12, 13, 14], 4, 0),
        (10, 11, 9): TargetTokens([10, 11, 9], 2, 0),
        (9,): TargetTokens([9], 0, 0),
        (10, 11): TargetTokens([10, 11], 2, 2),
        (10, 11, 9, 8, 7): TargetTokens([10, 11, 9, 8, 7], 2, 2),
        (9, 10, 11): TargetTokens([9, 10, 11], 0, 4),
    }
    for answer, expected in answers.items():
        response = {
            "output_ids": np.array([[answer]], np.int32),
            "sequence_length": np.array([[len(answer)]], np.int32),
        }
        assert read_verified(response, DraftTokens((10, 11, 12, 13))) == expected


def test_a_round_that_was_not_verified_teaches_nothing() -> None:
    """A draft that is always wrong is not given up: nothing was seen of it."""
    draft, target = stand_ins(
        TableModel(target_rule), TableModel(DRAFT_RULES["wrong"]), drops="all"
    )
    pair = make_bls_pair(draft, target, num_draft_tokens=4, adaptive=True)
    chunks = run(pair, [request(max_tokens=100)])["r"]
    assert ids(chunks) == greedy_reference(request(max_tokens=100))
    assert statistics(chunks).draft_status == "not_verified"
    assert statistics(chunks).acceptance_rate == 0.0


def test_counts_are_those_of_all_rounds() -> None:
    """Drafted 4, 4, 2 and none; accepted 4, 1, 0 and none."""
    script = [10, 11, 12, 13, 14, 15, 16, 17, 2]
    draft, target = stand_ins(ScriptedModel(3, script), ScriptedModel(3, script))
    scripted = Answers(draft, [None, (15, 9, 9, 9), (9, 9), ()])
    pair = make_bls_pair(scripted, target, num_draft_tokens=4)
    r = request(max_tokens=10, end_token_ids=frozenset({2}))
    chunks = run(pair, [r])["r"]
    assert chunks[-1].finish_reason == "stop"
    assert statistics(chunks) == Statistics(
        num_input_tokens=3,
        num_output_tokens=8,
        num_steps=4,
        total_draft_tokens=10,
        total_accepted_draft_tokens=5,
        seed_used=0,
        acceptance_rate=0.5,
        draft_status="drafted",
        acceptance_histogram=(1, 1, 0, 0, 1),
    )
    assert pair.num_steps == 4


# What the engines are asked.


def test_a_greedy_round_asks_both_models_this() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    pair = make_bls_pair(draft, target, num_draft_tokens=2, unused_token_ids=((100, 102),))
    r = request(
        max_tokens=3,
        end_token_ids=frozenset({3, 2}),
        sampling=Sampling(repetition_penalty=1.5, bad_words=((7, 8),), min_tokens=50),
    )
    run(pair, [r])
    (to_draft,), (to_target,) = draft.requests, target.requests
    both = {
        "input_ids": [[4, 5, 6]],
        "input_lengths": [[3]],
        "exclude_input_in_output": [[True]],
        "runtime_top_k": [[1]],
        "repetition_penalty": [[1.5]],
        "bad_words_list": [[[7, 8, 100, 101, 2, 3], [2, 3, 4, 5, 6, -1]]],
    }
    assert {n: a.tolist() for n, a in to_draft.items()} == {
        **both,
        "request_output_len": [[2]],
        "end_id": [[2]],
    }
    drafted = to_target["draft_input_ids"].tolist()
    assert {n: a.tolist() for n, a in to_target.items()} == {
        **both,
        "request_output_len": [[3]],
        "end_id": [[-1]],
        "draft_input_ids": drafted,
    }
    assert len(drafted[0]) == 2
    assert to_target["draft_input_ids"].dtype == np.int32


def test_no_request_reaches_over_the_end_of_min_tokens() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    pair = make_bls_pair(draft, target, num_draft_tokens=4)
    settings = {"end_token_ids": frozenset({2}), "sampling": Sampling(min_tokens=7)}
    run(pair, [request(**settings)])
    lengths = [t["request_output_len"].item() for t in target.requests]
    banned = ["bad_words_list" in t for t in target.requests]
    assert lengths == [5, 2, 5, 5]
    assert banned == [True, True, False, False]
    target.requests.clear()
    run(pair, [request(num_draft_tokens=0, **settings)])
    assert [t["request_output_len"].item() for t in target.requests] == [7, 10]


def test_each_engine_request_has_a_seed_of_its_own() -> None:
    draft, target = stand_ins(NoisyModel(1), NoisyModel(2, blend=0.4))
    pair = make_bls_pair(draft, target, num_draft_tokens=2, acceptance="logits", vocab_size=12)
    run(pair, [request(sampling=Sampling(temperature=1.0, seed=7))])
    for model, purpose in ((draft, Purpose.DRAFT), (target, Purpose.TOKEN)):
        assert [t["seed"].item() for t in model.requests] == [
            step_seed(7, t["input_lengths"].item(), purpose) for t in model.requests
        ]
    seeds = [t["seed"].item() for t in [*draft.requests, *target.requests]]
    assert len({*seeds}) == len(seeds) > 10


def test_step_seeds_do_not_change() -> None:
    assert step_seed(0, 0, Purpose.TOKEN) == 0xE169C58D6627E8D5
    assert step_seed(2**64 - 1, 2**33 + 5, Purpose.DRAFT) == 0xE4106DDCB173D2AA


def test_acceptance_by_logits_drafts_from_the_very_distribution_that_is_compared() -> None:
    draft, target = stand_ins(NoisyModel(1), NoisyModel(2, blend=0.4))
    pair = make_bls_pair(
        draft,
        target,
        num_draft_tokens=2,
        acceptance="logits",
        vocab_size=12,
        unused_token_ids=((11, 12),),
    )
    sampling = Sampling(temperature=0.3, top_k=4, top_p=0.9, seed=7, bad_words=((5,),))
    run(pair, [request(sampling=sampling, end_token_ids=frozenset({9}), max_tokens=3)])
    asked = {n: a.tolist() for n, a in draft.requests[0].items()}
    assert {n: v for n, v in asked.items() if n not in ("input_ids", "input_lengths", "seed")} == {
        "request_output_len": [[2]],
        "exclude_input_in_output": [[True]],
        "end_id": [[-1]],
        "runtime_top_k": [[0]],
        "runtime_top_p": [[1.0]],
        "temperature": [[1.0]],
        "return_generation_logits": [[True]],
    }
    to_target = target.requests[0]
    assert to_target["draft_logits"].shape == (1, 2, 12)
    assert to_target["draft_logits"].dtype == np.float32
    assert to_target["runtime_top_k"].item() == 4
    assert to_target["temperature"].item() == pytest.approx(0.3)


def test_a_greedy_request_is_never_accepted_by_logits() -> None:
    draft, target = stand_ins(NoisyModel(1), NoisyModel(2, blend=0.4))
    pair = make_bls_pair(draft, target, num_draft_tokens=2, acceptance="logits", vocab_size=12)
    run(pair, [request()])
    assert not any("return_generation_logits" in t for t in draft.requests)
    assert not any("draft_logits" in t for t in target.requests)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"sampling": Sampling(presence_penalty=0.5)},
            "presence_penalty is not supported by runtime 'tensorrt_llm': TensorRT-LLM would count "
            "the prompt's tokens too; leave it out",
        ),
        (
            {"sampling": Sampling(frequency_penalty=-0.5)},
            "frequency_penalty is not supported by runtime 'tensorrt_llm': TensorRT-LLM would "
            "count the prompt's tokens too; leave it out",
        ),
        (
            {"sampling": Sampling(min_p=0.1)},
            "min_p is not supported by runtime 'tensorrt_llm': TensorRT-LLM's Triton backend does "
            "not have it; leave it out",
        ),
        (
            {"return_log_probs": True},
            "return_log_probs is not supported by runtime 'tensorrt_llm': TensorRT-LLM has none "
            "for verified draft tokens; leave it out",
        ),
        (
            {"sampling": Sampling(temperature=1.0, top_k=1025)},
            "top_k is 1025; runtime 'tensorrt_llm' takes at most 1024",
        ),
    ],
)
def test_what_the_engines_cannot_honour_is_refused_by_name(
    settings: dict[str, Any], message: str
) -> None:
    pair = make_bls_pair(*stand_ins(TableModel(target_rule), TableModel(target_rule)))
    with pytest.raises(RequestError) as caught:
        pair.submit(request(**settings))
    assert str(caught.value) == message
    assert not pair.has_work()


# Sampling.


class Remembering(NoisyModel):
    """Computes the logits of a context once."""

    def __init__(self, seed: int, *, blend: float = 0.0) -> None:
        super().__init__(seed, blend=blend)
        self.known: dict[tuple[int, ...], np.ndarray[Any, Any]] = {}

    def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray[Any, Any]:
        rows = []
        for end in range(len(token_ids) - num_rows + 1, len(token_ids) + 1):
            key = tuple(token_ids[:end])
            if key not in self.known:
                self.known[key] = super().logits(key, 1)[0]
            rows.append(self.known[key])
        return np.stack(rows)


@pytest.mark.parametrize(
    ("acceptance", "drops"),
    [
        ("exact", "none"),
        ("logits", "random"),
        pytest.param("logits", "none", marks=pytest.mark.slow),
        pytest.param("exact", "random", marks=pytest.mark.slow),
    ],
)
def test_sampled_output_has_the_targets_distribution(acceptance: Any, drops: Any) -> None:
    """The first two tokens of 2,000 requests, an end id among them, at a low temperature and with
    truncation.
    """
    target_model, draft_model = Remembering(3), Remembering(4, blend=0.6)
    draft, target = stand_ins(target_model, draft_model, drops=drops)
    pair = make_bls_pair(draft, target, num_draft_tokens=2, acceptance=acceptance, vocab_size=12)
    sampling = Sampling(temperature=0.8, top_k=6)
    prompt, end_id, num_requests = (1, 2, 3), 5, 2000
    counts: Counter[tuple[int, ...]] = Counter()
    num_accepted = 0
    for first in range(0, num_requests, 100):
        requests = [
            request(
                str(number),
                prompt_token_ids=prompt,
                max_tokens=3,
                end_token_ids=frozenset({end_id}),
                sampling=Sampling(temperature=0.8, top_k=6, seed=number * 7919 + 1),
            )
            for number in range(first, first + 100)
        ]
        for chunks in run(pair, requests).values():
            counts[tuple(ids(chunks)[:2])] += 1
            num_accepted += statistics(chunks).total_accepted_draft_tokens

    def probs(context: Sequence[int]) -> np.ndarray[Any, Any]:
        row = target_model.logits(context, 1)[0]
        return softmax(warp(row, sampling, prompt=prompt, output=()))

    expected: dict[tuple[int, ...], float] = {(): float(probs(prompt)[end_id])}
    for a, p in enumerate(probs(prompt)):
        for b, q in enumerate(probs([*prompt, a]) if a != end_id else ()):
            key = (a,) if b == end_id else (a, b)
            expected[key] = expected.get(key, 0.0) + float(p * q)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert num_accepted > num_requests / 4
    assert set(counts) <= {key for key, p in expected.items() if p > 0}
    kept = [(counts[key], p * num_requests) for key, p in expected.items() if p * num_requests >= 8]
    chi_squared = sum((seen - mean) ** 2 / mean for seen, mean in kept)
    # Its mean is the number of cells, its deviation the root of twice that.
    assert chi_squared < len(kept) + 5 * (2 * len(kept)) ** 0.5


def test_with_a_seed_the_same_request_returns_the_same_tokens() -> None:
    def answer(seed: int) -> list[int]:
        draft, target = stand_ins(NoisyModel(1), NoisyModel(2, blend=0.4))
        pair = make_bls_pair(draft, target, num_draft_tokens=3, adaptive=True, vocab_size=12)
        sampling = Sampling(temperature=1.0, seed=seed, is_seeded=True)
        return ids(run(pair, [request(sampling=sampling, max_tokens=30)])["r"])

    assert answer(1) == answer(1) != answer(2)


# Errors, ends from outside, limits.


@pytest.mark.parametrize("name", ["draft", "target"])
def test_an_error_of_a_model_ends_that_request_once(name: str) -> None:
    class Failing(StandInModel):
        def generate(
            self, request_id: str, tensors: BackendTensors, outputs: Sequence[str]
        ) -> Iterator[BackendTensors]:
            if tensors["input_ids"][0, 0] == 9 and len(self.requests) > 4:
                raise EngineCallError(f"the {self.name} model failed: out of KV cache blocks")
            return super().generate(request_id, tensors, outputs)

    models = {
        model.name: Failing(model.name, model.model, model.limits) if model.name == name else model
        for model in stand_ins(TableModel(target_rule), TableModel(target_rule))
    }
    pair = make_bls_pair(models["draft"], models["target"], num_draft_tokens=2)
    bad = request("bad", prompt_token_ids=(9, 9, 9), max_tokens=200)
    chunks = run(pair, [bad, request("good")])
    assert ids(chunks["good"]) == greedy_reference(request())
    assert [c.error for c in chunks["bad"] if c.finish_reason] == [
        f"the {name} model failed: out of KV cache blocks"
    ]
    assert chunks["bad"][-1].finish_reason == "error"


@pytest.mark.parametrize(("answer", "number"), [((), 0), ((4, 5, 6, 7), 4)])
def test_a_target_that_returns_no_token_or_too_many_is_an_error(
    answer: Sequence[int], number: int
) -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    chunks = run(make_bls_pair(draft, Answers(target, [answer]), num_draft_tokens=2), [request()])
    assert chunks["r"][-1].error == (
        f"the target was given 2 draft tokens and returned {number} tokens, expected 1 to 3"
    )


def test_an_exception_while_a_request_runs_is_that_requests_own() -> None:
    class Broken(StandInModel):
        def generate(
            self, request_id: str, tensors: BackendTensors, outputs: Sequence[str]
        ) -> Iterator[BackendTensors]:
            if tensors["input_ids"][0, 0] == 9:
                raise ZeroDivisionError("as asked")
            return super().generate(request_id, tensors, outputs)

    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    pair = make_bls_pair(Broken("draft", draft.model, draft.limits), target)
    chunks = run(pair, [request("bad", prompt_token_ids=(9,)), request("good")])
    assert ids(chunks["good"]) == greedy_reference(request())
    assert (chunks["bad"][-1].finish_reason, chunks["bad"][-1].error) == ("error", FAULT)


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_cancel_answers_at_once_and_stops_the_engine(num_draft_tokens: int) -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    hanging = Hanging(target)
    pair = make_bls_pair(draft, hanging, num_draft_tokens=2)
    pair.submit(request("a", max_tokens=400, num_draft_tokens=num_draft_tokens))
    hanging.go.release()
    until(pair, lambda chunks: bool(chunks))
    while len(hanging.requests) < (2 if num_draft_tokens else 1):
        time.sleep(0.001)
    pair.cancel("a")
    pair.cancel("a")
    pair.cancel("unknown")
    (last,) = until(pair, lambda chunks: bool(chunks))
    assert last.finish_reason == "cancelled"
    assert statistics([last]).num_output_tokens == num_draft_tokens + 1
    hanging.go.release(400)
    assert finish(pair) == []
    assert hanging.stopped and {*hanging.stopped} == {"1"}
    assert hanging.running == draft.running == {}
    assert sum(t["request_output_len"].item() for t in hanging.requests) < 500


def test_a_cancelled_stream_is_stopped_though_the_first_stop_came_too_early() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))

    class Deaf(Hanging):
        def stop(self, request_id: str) -> None:
            self.stopped.append(request_id)
            if len(self.stopped) > 1:
                StandInModel.stop(self, request_id)

    deaf = Deaf(target)
    pair = make_bls_pair(draft, deaf, num_draft_tokens=0)
    pair.submit(request("a", max_tokens=400))
    deaf.go.release()
    until(pair, lambda chunks: bool(chunks))
    (generation,) = deaf.running.values()
    pair.cancel("a")
    deaf.go.release(400)
    finish(pair)
    assert len(generation.output) < 10
    assert deaf.running == {}


def test_a_request_that_ends_by_itself_stops_the_stream_behind_it() -> None:
    script = [10, 11, 2]
    draft, target = stand_ins(ScriptedModel(3, script), ScriptedModel(3, script))
    pair = make_bls_pair(draft, target, num_draft_tokens=0)
    r = request(max_tokens=90, end_token_ids=frozenset({2}))
    seen: list[int] = []
    target_stop = target.stop
    target.stop = lambda name: (seen.append(len(target.running[name].output)), target_stop(name))  # type: ignore
    assert ids(run(pair, [r])["r"]) == [10, 11]
    assert seen == [4]


def test_cancel_in_the_queue() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    hanging = Hanging(target)
    pair = make_bls_pair(draft, hanging, max_batch_size=1)
    pair.submit(request("a"))
    pair.interrupt()
    pair.step()
    pair.submit(request("b"))
    pair.cancel("b")
    (chunk,) = until(pair, lambda chunks: bool(chunks))
    assert (chunk.request_id, chunk.finish_reason) == ("b", "cancelled")
    hanging.go.release(99)
    assert ids(finish(pair)) == greedy_reference(request())


def test_a_full_queue_refuses_and_a_lower_priority_number_goes_first() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    hanging = Hanging(target)
    pair = make_bls_pair(draft, hanging, max_batch_size=1, max_queue_size=3)
    pair.submit(request("a", max_tokens=2))
    pair.interrupt()
    pair.step()
    for name, priority in (("b", 5), ("c", 0), ("d", 5)):
        pair.submit(request(name, priority=priority, max_tokens=2))
    with pytest.raises(RequestError) as caught:
        pair.submit(request("e"))
    assert str(caught.value) == (
        "the queue is full: 3 requests wait (serving.max_queue_size), 1 run; try again later"
    )
    hanging.go.release(99)
    ended = [c.request_id for c in finish(pair) if c.finish_reason]
    assert ended == ["a", "c", "b", "d"]


def test_time_limits_hold_though_an_engine_hangs() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    hanging, now = Hanging(target), [0.0]
    pair = make_bls_pair(
        draft, hanging, max_batch_size=1, clock=lambda: now[0], request_timeout_s=60.0
    )
    pair.submit(request("running", max_tokens=100))
    pair.interrupt()
    pair.step()
    while not hanging.requests:
        time.sleep(0.001)
    pair.submit(request("waiting", timeout_s=5.0))
    now[0] = 6.0
    (chunk,) = until(pair, lambda chunks: bool(chunks))
    assert chunk.error == (
        "the request waited 6.0 s without being started, which is its time limit "
        "(timeout_s or serving.request_timeout_s)"
    )
    now[0] = 61.0
    (chunk,) = until(pair, lambda chunks: bool(chunks))
    assert chunk.error == (
        "the request ran into its time limit (timeout_s or serving.request_timeout_s)"
    )
    assert pair.has_work()  # the slot is taken until the engine lets go
    start = time.monotonic()
    assert pair.step() == []
    assert time.monotonic() - start > 0.5  # it waits, though a deadline is past
    hanging.go.release(99)
    assert finish(pair) == []


def test_interrupt_ends_a_waiting_step_or_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bls, "_MAX_WAIT_S", 2 * PATIENCE_S)
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    hanging = Hanging(target)
    pair = make_bls_pair(draft, hanging)
    pair.submit(request())
    pair.interrupt()
    assert pair.step() == []
    timer = threading.Timer(0.05, pair.interrupt)
    timer.start()
    start = time.monotonic()
    assert pair.step() == []
    assert time.monotonic() - start < PATIENCE_S
    hanging.go.release(99)
    finish(pair)


# Adaptive draft length.


class Timed(StandInModel):
    """A pass of the model takes some time; of a draft, each token does."""

    def __init__(self, model: StandInModel, seconds: float) -> None:
        super().__init__(model.name, model.model, model.limits)
        self.seconds = seconds
        inner = self.model

        class Slow:
            vocab_size = inner.vocab_size

            def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray[Any, Any]:
                time.sleep(seconds)
                return inner.logits(token_ids, num_rows)

        self.model = Slow()


def adaptive_answer(draft_rule: str, draft_s: float, target_s: float) -> Statistics:
    draft, target = stand_ins(TableModel(target_rule), TableModel(DRAFT_RULES[draft_rule]))
    pair = make_bls_pair(
        Timed(draft, draft_s), Timed(target, target_s), adaptive=True, num_draft_tokens=4
    )
    r = request(max_tokens=120)
    chunks = run(pair, [r])["r"]
    assert ids(chunks) == greedy_reference(r)
    return statistics(chunks)


def test_a_cheap_good_draft_is_used_to_the_full() -> None:
    counted = adaptive_answer("self", 0.0, 0.01)
    assert counted.total_accepted_draft_tokens > 60


def test_a_hopeless_draft_is_given_up() -> None:
    counted = adaptive_answer("wrong", 0.0002, 0.003)
    assert counted.total_draft_tokens < 40


def test_a_draft_that_costs_more_than_it_saves_is_bypassed() -> None:
    """It is always right, but slower than the target, as under load. What a busy machine adds to
    a call counts for little against these times.
    """
    counted = adaptive_answer("self", 0.024, 0.006)
    assert counted.total_draft_tokens < 25


def test_call_times_learn_from_rounds_and_relate_them_to_a_plain_step() -> None:
    times = CallTimes(4)
    assert times.costs() is None and not times.lacks_plain_step
    times.observe_draft(4, 0.04)
    times.observe_verify(4, 0.15)
    assert times.costs() is None and times.lacks_plain_step
    times.observe_stream([5.0, 5.1, 5.2])  # too few to tell
    assert times.lacks_plain_step
    times.observe_stream([0.1 * n for n in range(8)])
    costs = times.costs()
    assert costs is not None and not times.lacks_plain_step
    assert costs.draft_step == pytest.approx(0.1)
    assert costs.verify[0] == 0.0
    assert costs.verify[4] == pytest.approx(0.5)
    times.observe_stream([0.05 * n for n in (0, 1, 2, 3, 6, 6, 6, 7)])
    faster = times.costs()
    assert faster is not None and faster.draft_step == pytest.approx(0.2, rel=0.01)
    for _ in range(500):
        times.observe_stream([0.05 * n for n in range(8)])
    hopeful = times.costs()
    assert hopeful is not None and hopeful.draft_step == pytest.approx(0.2 * 0.9995**501)


def test_neither_load_nor_acceptance_changes_the_draft_length_of_a_seeded_request() -> None:
    draft, target = stand_ins(NoisyModel(1), NoisyModel(2, blend=3.0))
    pair = make_bls_pair(draft, target, num_draft_tokens=3, adaptive=True, vocab_size=12)
    sampling = Sampling(temperature=1.0, seed=4, is_seeded=True)
    for number in range(3):
        run(pair, [request(str(number), sampling=sampling, max_tokens=40)])
    drafted = [t["draft_input_ids"].size for t in target.requests if "draft_input_ids" in t]
    assert drafted[:25] == [3] * 25
    num_plain = sum("draft_input_ids" not in t for t in target.requests)
    assert num_plain <= 3  # the last token of each


# Loading, and Triton.


def write_engine(folder: Path, *, vocab_size: int = 100, **build: int) -> Path:
    folder.mkdir()
    limits = {"max_batch_size": 8, "max_seq_len": 128, "max_draft_len": 0, **build}
    config = {"pretrained_config": {"vocab_size": vocab_size}, "build_config": limits}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_limits_are_what_both_engines_hold(tmp_path: Path) -> None:
    draft = write_engine(tmp_path / "draft", vocab_size=90, max_seq_len=64)
    target = write_engine(tmp_path / "target", max_draft_len=5)
    limits = read_limits(draft, target, PairOptions(num_draft_tokens=5, max_seq_len=120))
    assert (limits.max_num_draft_tokens, limits.max_seq_len) == (5, 120)
    assert (limits.draft_max_seq_len, limits.vocab_size) == (63, 90)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_draft_tokens": 6},
            "the target engine was built for max_draft_len 5, the pair is to serve 6; build it "
            "again",
        ),
        (
            {"max_batch_size": 9},
            "the draft engine was built for max_batch_size 8, the pair is to serve 9; build it "
            "again",
        ),
        (
            {"max_seq_len": 500},
            "the target engine was built for max_seq_len 128, the pair is to serve 500; build it "
            "again",
        ),
    ],
)
def test_engines_built_for_less_are_refused(
    tmp_path: Path, options: dict[str, int], message: str
) -> None:
    draft = write_engine(tmp_path / "draft")
    target = write_engine(tmp_path / "target", max_draft_len=5)
    with pytest.raises(EngineMismatch) as caught:
        read_limits(draft, target, PairOptions(**{"max_seq_len": 128, **options}))
    assert str(caught.value) == message


def test_outside_triton_there_is_nothing_to_call(tmp_path: Path) -> None:
    draft = write_engine(tmp_path / "draft")
    target = write_engine(tmp_path / "target", max_draft_len=5)
    options = PairOptions(max_seq_len=128, runtime_settings={"acceptance": "exact"})
    with pytest.raises(RuntimeUnavailable) as caught:
        load_pair(draft, target, options, lambda prompt, **_: PieceDetokenizer({}))
    assert str(caught.value) == (
        "runtime 'tensorrt_llm' runs engines inside Triton only: use `specpipe serve`"
    )


class FakeTriton(ModuleType):
    """The part of `triton_python_backend_utils` that calls models; `answer` is what they say."""

    class TritonModelException(Exception):
        pass

    class Tensor:
        def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
            self._name, self._array = name, array

        def name(self) -> str:
            return self._name

        def as_numpy(self) -> np.ndarray[Any, Any]:
            return self._array

    def __init__(self, answer: Callable[[Any, bool], Any]) -> None:
        super().__init__("triton_python_backend_utils")
        self.InferenceRequest = lambda **fields: SimpleNamespace(
            **fields, exec=lambda decoupled=False: answer(fields, decoupled)
        )


def response(error: str | None = None, **arrays: Any) -> Any:
    return SimpleNamespace(
        has_error=lambda: error is not None,
        error=lambda: SimpleNamespace(message=lambda: error),
        output_tensors=lambda: [FakeTriton.Tensor(n, np.array(a)) for n, a in arrays.items()],
    )


def ask(answer: Callable[[Any, bool], Any], *, is_decoupled: bool) -> list[BackendTensors]:
    model: EngineModel = TritonModel(FakeTriton(answer), "target", is_decoupled=is_decoupled)
    return list(model.generate("3", {"input_ids": np.array([[1]])}, ("output_ids",)))


def test_a_decoupled_model_answers_in_parts_the_last_of_which_may_be_empty() -> None:
    def answer(fields: Any, decoupled: bool) -> Any:
        assert decoupled
        assert (fields["model_name"], fields["request_id"]) == ("target", "3")
        assert fields["requested_output_names"] == ["output_ids"]
        assert [t.name() for t in fields["inputs"]] == ["input_ids"]
        return iter([response(output_ids=[1]), response(output_ids=[2]), response()])

    assert [r["output_ids"].tolist() for r in ask(answer, is_decoupled=True)] == [[1], [2]]


def test_an_ended_iterator_is_kept_until_triton_has_let_go_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Responses(list[Any]):
        """A list that can be watched."""

    watched: list[weakref.ref[Any]] = []

    def answer(*_: Any) -> Any:
        responses = Responses([response(output_ids=[1])])
        watched.append(weakref.ref(responses))
        return responses

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    model = TritonModel(FakeTriton(answer), "target", is_decoupled=True)
    for now[0] in (100.0, 100.9, 101.5):
        list(model.generate("3", {}, ("output_ids",)))
    assert [ref() is not None for ref in watched] == [False, True, True]


def test_a_model_that_is_not_decoupled_answers_once() -> None:
    def answer(fields: Any, decoupled: bool) -> Any:
        assert not decoupled
        return response(output_ids=[1])

    assert len(ask(answer, is_decoupled=False)) == 1


def test_errors_of_triton_and_of_the_model_are_told_apart() -> None:
    with pytest.raises(EngineCallError, match="^the target model failed: Draft tokens length"):
        ask(lambda *_: iter([response("Draft tokens length (9)")]), is_decoupled=True)

    def unavailable(*_: Any) -> Any:
        raise FakeTriton.TritonModelException("model 'target' is not ready")

    with pytest.raises(EngineCallError) as caught:
        ask(unavailable, is_decoupled=True)
    assert str(caught.value) == (
        "the target model could not be called: model 'target' is not ready"
    )


def test_stop_is_a_request_under_the_same_id() -> None:
    asked: list[dict[str, Any]] = []

    def answer(fields: Any, decoupled: bool) -> Any:
        asked.append({t.name(): t.as_numpy().tolist() for t in fields["inputs"]})
        assert fields["request_id"] == "3"
        return iter([response()])

    TritonModel(FakeTriton(answer), "target", is_decoupled=True).stop("3")
    assert asked == [
        {"input_ids": [[0]], "input_lengths": [[1]], "request_output_len": [[1]], "stop": [[True]]}
    ]


# The schedule by load.


def drafted(pair: BlsPair, requests: Sequence[Any], draft: StandInModel) -> list[int]:
    """How many tokens the draft was asked for, request by request."""
    run(pair, requests)
    return [int(tensors["request_output_len"][0][0]) for tensors in draft.requests]


def test_a_schedule_limits_the_draft_length() -> None:
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    pair = make_bls_pair(draft, target, num_draft_tokens=4, schedule=((1, 2),))
    r = request(max_tokens=7)
    assert drafted(pair, [r], draft) == [2, 2]  # 3 tokens a round, and one left


def test_where_the_load_forbids_drafting_the_target_runs_by_itself_for_a_while() -> None:
    """So that drafting can begin when the load falls, nothing is asked for to the very end."""
    draft, target = stand_ins(TableModel(target_rule), TableModel(target_rule))
    pair = make_bls_pair(draft, target, num_draft_tokens=4, schedule=((1, 0),))
    r = request(max_tokens=40)
    chunks = run(pair, [r])["r"]
    assert ids(chunks) == greedy_reference(r)
    assert draft.requests == []
    lengths = [int(tensors["request_output_len"][0][0]) for tensors in target.requests]
    assert lengths == [16, 16, 8]


def test_a_seeded_request_keeps_its_draft_length_at_any_load() -> None:
    sampling = Sampling(temperature=0.8, seed=7, is_seeded=True)
    draft, target = stand_ins(NoisyModel(1), NoisyModel(1))
    pair = make_bls_pair(draft, target, num_draft_tokens=4, vocab_size=12, schedule=((1, 0),))
    assert drafted(pair, [request(max_tokens=3, sampling=sampling, prompt_token_ids=(4, 5))], draft)
