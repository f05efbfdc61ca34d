from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specpipe.errors import RequestError
from specpipe.runtimes.tensorrt_llm.llmapi.llm_pair import LlmPair
from specpipe.speculative.request import Chunk, Sampling
from specpipe.triton.loop import PairLoop
from tests.runtimes.table_engine import ids, run
from tests.speculative.table import (
    DRAFT_RULES,
    PieceDetokenizer,
    ScriptedModel,
    TableModel,
    greedy_reference,
    request,
    target_rule,
    wrong_rule,
)
from tests.tensorrt_llm_stand_ins.llm_api import installed, runtime_settings, table_pair
from tests.tensorrt_llm_stand_ins.llm_api_lines import VERSIONS
from tests.waiting import PATIENCE_S, wait_until

MakePair = Callable[..., AbstractContextManager[LlmPair]]


@pytest.fixture
def fake() -> Iterator[ModuleType]:
    with installed() as module:
        yield module


@pytest.fixture(params=["1.3", "1.4"])
def one_engine(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with installed(VERSIONS[request.param]) as module:
        yield module


def maker(fake: ModuleType, tmp_path: Path) -> MakePair:
    """Makes a pair over rules; without any, the draft is always right."""

    def pair(target: Any = None, draft: Any = None, **settings: Any) -> Any:
        target = target or TableModel(target_rule)
        return table_pair(fake, tmp_path, target, draft or target, **settings)

    return pair


@pytest.fixture
def make(fake: ModuleType, tmp_path: Path) -> MakePair:
    return maker(fake, tmp_path)


@pytest.fixture
def make_one_engine(one_engine: ModuleType, tmp_path: Path) -> MakePair:
    return maker(one_engine, tmp_path)


def waiting_at(num_tokens: int, released: threading.Event, rule: Any = target_rule) -> TableModel:
    """A model that waits there, so that a request is still running when a test meddles."""

    def wait(context: Sequence[int]) -> int:
        if len(context) > num_tokens:
            released.wait(2 * PATIENCE_S)
        return int(rule(context))

    return TableModel(wait)


def let_go(released: threading.Event, pair: LlmPair) -> None:
    """Lets what waits go on, once TensorRT-LLM was told to end a request."""
    assert wait_until(lambda: pair._llm._inbox.qsize() > 0 or pair._llm.num_aborted > 0)
    released.set()


@contextmanager
def set_at_the_end(event: threading.Event) -> Iterator[None]:
    """Lets go of what waits for the event, however the test ends."""
    try:
        yield
    finally:
        event.set()


def steps_until(pair: LlmPair, is_enough: Callable[[list[Chunk]], bool]) -> list[Chunk]:
    chunks: list[Chunk] = []
    while not is_enough(chunks):
        chunks += pair.step()
    return chunks


@pytest.mark.parametrize("draft_name", DRAFT_RULES)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
def test_greedy_requests_of_all_sizes_together(
    make: MakePair, draft_name: str, num_draft_tokens: int
) -> None:
    """More requests than max_batch_size, so that some wait."""
    requests = [request(f"{p}-{m}", p, max_tokens=m) for p in (1, 60) for m in (1, 2, 17)]
    draft = TableModel(DRAFT_RULES[draft_name])
    with make(draft=draft, num_draft_tokens=num_draft_tokens) as pair:
        chunks = run(pair, requests)
        assert pair._llm.num_active == 0
    assert {n: ids(c) for n, c in chunks.items()} == {
        r.request_id: greedy_reference(r) for r in requests
    }
    assert all(c[-1].finish_reason == "length" for c in chunks.values())


def test_streams_as_it_goes_and_counts_steps(make: MakePair) -> None:
    """17 tokens, 4 drafted a step, all accepted: 1 over the prompt, then 4, 5, 5, 2."""
    with make() as pair:
        chunks = run(pair, [request()])["r"]
        num_steps = pair.num_steps
    statistics = chunks[-1].statistics
    assert statistics is not None
    assert [len(c.token_ids) for c in chunks] == [1, 4, 5, 5, 2]
    assert num_steps == statistics.num_steps == 5
    assert (statistics.num_input_tokens, statistics.num_output_tokens) == (3, 17)
    # Three steps of four, and one draft token in the last, where two tokens are left.
    assert (statistics.total_draft_tokens, statistics.total_accepted_draft_tokens) == (13, 12)


def test_counts_of_a_draft_that_is_always_wrong(make: MakePair) -> None:
    with make(draft=TableModel(wrong_rule)) as pair:
        statistics = run(pair, [request(max_tokens=4)])["r"][-1].statistics
    assert statistics is not None
    assert (statistics.num_steps, statistics.total_draft_tokens) == (4, 3)
    assert (statistics.acceptance_rate, statistics.draft_status) == (0.0, "decided_by_engine")


def test_without_a_draft_nothing_is_drafted_or_accepted(make: MakePair) -> None:
    with make(num_draft_tokens=0) as pair:
        statistics = run(pair, [request(max_tokens=4)])["r"][-1].statistics
    assert statistics is not None
    assert (statistics.num_steps, statistics.total_draft_tokens) == (4, 0)
    assert (statistics.acceptance_rate, statistics.draft_status) == (0.0, "off_by_config")


def test_counts_of_the_request_metrics_win(make: MakePair, fake: ModuleType) -> None:
    fake.LLM.fills_metrics = True
    with make() as pair:
        statistics = run(pair, [request()])["r"][-1].statistics
    assert statistics is not None
    # The fake's own loop: 4 drafted with the prompt, then 4, 4, 1.
    assert (statistics.total_draft_tokens, statistics.total_accepted_draft_tokens) == (13, 13)
    assert (statistics.acceptance_rate, statistics.draft_status) == (1.0, "drafted")


@pytest.mark.parametrize(
    ("end_ids", "script", "expected"),
    [
        ({2}, [10, 11, 2, 20, 21], [10, 11]),  # stays in TensorRT-LLM's token ids
        ({2, 3}, [10, 11, 3, 20, 21], [10, 11]),  # is cut off there
        ({2, 3}, [3, 20], []),
        ({2}, [2, 20], []),
    ],
)
def test_end_ids_end_a_request(
    make: MakePair, end_ids: set[int], script: list[int], expected: list[int]
) -> None:
    target = ScriptedModel(3, script)
    with make(target) as pair:
        chunks = run(pair, [request(end_token_ids=frozenset(end_ids))])["r"]
        assert wait_until(lambda: pair._llm.num_active == 0)
    assert ids(chunks) == expected
    assert chunks[-1].finish_reason == "stop"
    assert "".join(c.text for c in chunks) == "".join(f"w{i} " for i in expected)
    statistics = chunks[-1].statistics
    assert statistics is not None
    assert statistics.num_output_tokens == len(expected)


def test_end_ids_as_tensorrt_llm_gets_them(make: MakePair) -> None:
    with make() as pair:
        run(pair, [request("a", end_token_ids=frozenset({103, 101, 102})), request("b")])
        with_ids, without = pair._llm.asked
    assert (with_ids.end_id, with_ids.stop_token_ids, with_ids.ignore_eos) == (
        101,
        [102, 103],
        False,
    )
    assert (without.end_id, without.stop_token_ids, without.ignore_eos) == (-1, None, True)


def test_stop_strings_cut_the_text_and_free_the_request(make: MakePair) -> None:
    pieces = {**{i: f"<{i}>" for i in range(104)}, 20: "foo ", 21: "STOP"}
    script = [20, 21, *range(30, 100)]

    released = threading.Event()
    target = waiting_at(30, released, lambda context: script[(len(context) - 3) % len(script)])
    with (
        make(target, detokenizer=lambda p, **_: PieceDetokenizer(pieces)) as pair,
        set_at_the_end(released),
    ):
        chunks = run(pair, [request(max_tokens=400, stop_strings=("STOP",))])["r"]
        let_go(released, pair)
        assert wait_until(lambda: pair._llm.num_aborted == 1)
    assert "".join(c.text for c in chunks) == "foo "
    assert (ids(chunks), chunks[-1].finish_reason) == ([20], "stop")


def test_context_ends_a_request(make: MakePair) -> None:
    with make(max_seq_len=20) as pair:
        chunks = run(pair, [request(max_tokens=20)])["r"]
        assert pair._llm.asked[0].max_tokens == 17
    assert len(ids(chunks)) == 17
    assert chunks[-1].finish_reason == "length"


def test_log_probs_of_greedy_tokens(make: MakePair) -> None:
    with make() as pair:
        r = request(
            return_log_probs=True, end_token_ids=frozenset({2, greedy_reference(request())[9]})
        )
        chunks = run(pair, [r])["r"]
    log_probs = [p for c in chunks for p in c.log_probs]
    assert len(log_probs) == len(ids(chunks)) == 9
    # One logit of 1 among 103 of 0: 1 - log(e + 103).
    assert log_probs == pytest.approx([1 - 4.660781] * 9, abs=1e-5)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=0.7, top_k=8, top_p=0.9), (0.7, 8, 0.9)),
        (Sampling(temperature=1.0), (1.0, None, 1.0)),
        (Sampling(temperature=0.7, top_k=1), (None, None, None)),  # greedy
        (Sampling(seed=5, is_seeded=True), (None, None, None)),
    ],
)
def test_sampling_as_tensorrt_llm_gets_it(
    make: MakePair, sampling: Sampling, expected: tuple[object, ...]
) -> None:
    settings = runtime_settings(acceptance="logits")
    with make(settings=settings) as pair:
        chunks = run(pair, [request(max_tokens=3, sampling=sampling)])["r"]
        asked = pair._llm.asked[0]
    assert (asked.temperature, asked.top_k, asked.top_p) == expected
    assert len(ids(chunks)) == 3
    assert (asked.detokenize, asked.return_perf_metrics, asked.seed) == (False, True, None)


@pytest.mark.parametrize(
    ("sampling", "num_draft_tokens", "is_lossless"),
    [
        (Sampling(), 4, True),
        (Sampling(temperature=0.7), 4, False),
        (Sampling(temperature=0.7), 0, True),
    ],
)
def test_the_last_response_says_where_the_distribution_is_not_the_targets(
    make: MakePair, sampling: Sampling, num_draft_tokens: int, is_lossless: bool
) -> None:
    settings = runtime_settings(acceptance="logits")
    with make(settings=settings, num_draft_tokens=num_draft_tokens) as pair:
        last = run(pair, [request(max_tokens=3, sampling=sampling)])["r"][-1]
    assert last.statistics is not None and last.statistics.is_lossless is is_lossless


SAMPLED = Sampling(temperature=0.7)


@pytest.mark.parametrize(
    ("changes", "settings", "expected"),
    [
        ({"num_draft_tokens": 2}, {}, "num_draft_tokens is 2: .* drafts 4 tokens in every step"),
        ({"num_draft_tokens": 0}, {}, "num_draft_tokens is 0: "),
        ({"sampling": Sampling(repetition_penalty=1.2)}, {}, r"repetition_penalty is 1\.2: "),
        ({"sampling": Sampling(presence_penalty=0.5)}, {}, r"presence_penalty is 0\.5: "),
        ({"sampling": Sampling(frequency_penalty=0.5)}, {}, r"frequency_penalty is 0\.5: "),
        ({"sampling": Sampling(min_tokens=2)}, {}, "min_tokens is 2: .*1.2.1 does not apply it"),
        ({"sampling": Sampling(bad_words=((5,),))}, {}, "bad_words is given: "),
        (
            {"sampling": Sampling(temperature=0.7, seed=3, is_seeded=True)},
            {"acceptance": "logits"},
            "seed: .* one generator",
        ),
        (
            {"sampling": Sampling(temperature=0.7, min_p=0.1)},
            {"acceptance": "logits"},
            r"min_p is 0\.1: ",
        ),
        (
            {"sampling": SAMPLED, "return_log_probs": True},
            {"acceptance": "logits"},
            "return_log_probs: .* greedy tokens only",
        ),
        ({"sampling": SAMPLED}, {}, r"temperature is 0\.7: .*\.acceptance to logits"),
        (
            {"sampling": SAMPLED},
            {"acceptance": "logits", "target_vocab_size": 128},
            r"temperature is 0\.7: .* as many embedding rows",
        ),
        (
            {"sampling": SAMPLED},
            {"acceptance": "logits", "tensorrt_llm": "1.0.0"},
            r"temperature is 0\.7: the pytorch backend of TensorRT-LLM 1\.0\.0 does not apply it",
        ),
        ({"max_tokens": 501}, {}, "max_tokens is 501; prompt and output together may have 500"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    make: MakePair, changes: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    with make(settings=runtime_settings(**settings)) as pair:
        with pytest.raises(RequestError, match=f"^{expected}"):
            pair.submit(request(**changes))
        assert not pair.has_work()
        assert pair._llm.asked == []


def test_sampling_without_a_draft_needs_no_leave(make: MakePair) -> None:
    with make(num_draft_tokens=0) as pair:
        assert len(ids(run(pair, [request(max_tokens=3, sampling=SAMPLED)])["r"])) == 3


def test_as_many_draft_tokens_as_there_are_may_be_asked_for(make: MakePair) -> None:
    with make() as pair:
        assert ids(run(pair, [request(num_draft_tokens=4)])["r"]) == greedy_reference(request())


def test_cancelling_frees_a_running_and_a_waiting_request(make: MakePair) -> None:
    released = threading.Event()
    with make(waiting_at(30, released), max_batch_size=1) as pair, set_at_the_end(released):
        pair.submit(request("runs", max_tokens=400))
        pair.submit(request("waits", max_tokens=400))
        chunks = steps_until(pair, lambda chunks: len(chunks) >= 2)
        assert pair._llm.num_active == 1
        pair.cancel("waits")
        pair.cancel("runs")
        pair.cancel("nobody")
        chunks += steps_until(pair, lambda _: not pair.has_work())
        let_go(released, pair)
        assert wait_until(lambda: pair._llm.num_aborted == 1)
        assert pair._llm.num_active == 0
        assert len(pair._llm.asked) == 1
    ends = {c.request_id: c.finish_reason for c in chunks if c.finish_reason}
    assert ends == {"waits": "cancelled", "runs": "cancelled"}


def test_cancelling_before_tensorrt_llm_has_the_request(make: MakePair) -> None:
    with make() as pair:
        blocked = threading.Event()
        pair._loop.call_soon_threadsafe(blocked.wait, PATIENCE_S)
        pair.submit(request(max_tokens=400))
        pair._admit()
        pair.cancel("r")
        blocked.set()
        (chunk,) = pair.step()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), pair._loop).result()
        assert (chunk.finish_reason, pair._llm.asked) == ("cancelled", [])


def test_a_salt_is_handed_on_where_there_is_one(make: MakePair) -> None:
    with make() as pair:
        run(pair, [request("a", cache_salt="tenant"), request("b")])
        assert sorted(pair._llm.salts, key=str) == [None, "tenant"]


def test_a_lower_priority_number_goes_first(make: MakePair) -> None:
    with make(max_batch_size=1) as pair:
        requests = [request("a", priority=1), request("b", priority=0), request("c", priority=0)]
        for r in requests:
            pair.submit(r)
        ends = [c.request_id for c in steps_until(pair, lambda _: not pair.has_work())]
    assert list(dict.fromkeys(ends)) == ["b", "c", "a"]


def test_a_full_queue_refuses_with_the_numbers(make: MakePair) -> None:
    with make(max_batch_size=1, max_queue_size=1) as pair:
        pair.submit(request("a", max_tokens=400))
        pair.step()
        pair.submit(request("b"))
        with pytest.raises(
            RequestError, match=r"^the queue is full: 1 requests wait \(.*\), 1 run; try again"
        ):
            pair.submit(request("c"))


def test_deadlines_end_running_and_waiting_requests(make: MakePair) -> None:
    """The models are stuck: `step` waits no longer than the next deadline."""
    released = threading.Event()
    target = TableModel(lambda context: 5 if released.wait(2 * PATIENCE_S) else 6)
    with make(target, max_batch_size=1) as pair, set_at_the_end(released):
        pair.submit(request("runs", timeout_s=1.0))
        pair.submit(request("waits", timeout_s=0.5))
        started = time.monotonic()
        chunks = steps_until(pair, lambda _: not pair.has_work())
        assert time.monotonic() - started < PATIENCE_S
        released.set()
        assert wait_until(lambda: pair._llm.num_active == 0)
    errors = {c.request_id: (c.finish_reason, c.error) for c in chunks}
    assert errors["runs"] == (
        "error",
        "the request ran into its time limit (timeout_s or serving.request_timeout_s)",
    )
    assert errors["waits"][0] == "error"
    assert "without being started" in str(errors["waits"][1])


def test_interrupt_wakes_a_step_that_waits(make: MakePair) -> None:
    released = threading.Event()
    target = TableModel(lambda context: 5 if released.wait(2 * PATIENCE_S) else 6)
    with make(target) as pair, set_at_the_end(released):
        pair.submit(request())
        timer = threading.Timer(0.05, pair.interrupt)
        timer.start()
        started = time.monotonic()
        assert pair.step() == []
        assert time.monotonic() - started < PATIENCE_S
        timer.join()


def test_a_request_that_tensorrt_llm_refuses_fails_alone(make: MakePair) -> None:
    with make() as pair:
        pair._llm.arguments["enable_chunked_prefill"] = False
        chunks = run(pair, [request("long", 65), request("short")])
    assert [c.finish_reason for c in chunks["long"]] == ["error"]
    assert chunks["long"][0].error == (
        "TensorRT-LLM refuses the request: The sum of prompt length (65), query length (0) should "
        "not exceed max_num_tokens (64)"
    )
    assert ids(chunks["short"]) == greedy_reference(request())


def test_a_request_that_fails_in_tensorrt_llm_fails_alone(make: MakePair) -> None:
    released = threading.Event()
    with make(waiting_at(30, released)) as pair, set_at_the_end(released):
        pair.submit(request("a", max_tokens=400))
        pair.submit(request("b"))
        chunks = pair.step()
        output = pair._running[0].output
        output._send(RuntimeError("CUDA error"))
        chunks += steps_until(pair, lambda new: any(c.finish_reason == "error" for c in new))
        let_go(released, pair)  # the other one, too
        chunks += steps_until(pair, lambda _: not pair.has_work())
        assert wait_until(lambda: pair._llm.num_aborted == 1)
    (failed,) = [c for c in chunks if c.finish_reason == "error"]
    assert (failed.request_id, failed.error) == (
        "a",
        "TensorRT-LLM failed: RuntimeError: CUDA error",
    )
    assert ids([c for c in chunks if c.request_id == "b"]) == greedy_reference(request())


def test_an_end_that_nobody_asked_for_is_an_error(make: MakePair, fake: ModuleType) -> None:
    released = threading.Event()
    with make(waiting_at(30, released)) as pair, set_at_the_end(released):
        pair.submit(request(max_tokens=400))
        pair.step()
        pair._running[0].output.abort()
        released.set()
        chunks = steps_until(pair, lambda _: not pair.has_work())
    assert chunks[-1].error == "TensorRT-LLM ended the request: cancelled"


def test_a_tensorrt_llm_that_is_gone_is_a_fault_of_the_pair(make: MakePair) -> None:
    with make() as pair:
        pair._llm._is_shut_down = True
        pair.submit(request())
        with pytest.raises(RuntimeError, match="takes no more requests: LLM is shutting down"):
            pair.step()


def test_ids_without_a_tokenizer_entry_are_never_emitted(make: MakePair) -> None:
    target = ScriptedModel(3, [20, 21, 100, 22])
    with make(target, unused_token_ids=((98, 104),)) as pair:
        chunks = run(pair, [request()])["r"]
    assert chunks[-1].finish_reason == "error"
    assert chunks[-1].error == "the target gave token id 100, which no tokenizer entry uses"
    assert 100 not in ids(chunks)


def test_the_loop_drives_it_from_many_threads(make: MakePair) -> None:
    """Requests and cancels arrive while steps wait; each request gets one last chunk."""
    ends: dict[str, list[Chunk]] = {}
    released, cancelled = threading.Event(), threading.Semaphore(0)
    target = waiting_at(30, released)  # so that what is cancelled does not come to its end before
    with make(target) as pair, set_at_the_end(released):
        loop = PairLoop(pair, on_fault=lambda: None)

        def ask(number: int) -> None:
            name = f"r{number}"
            ends[name] = []
            done = threading.Event()

            def on_chunk(chunk: Chunk) -> None:
                ends[name].append(chunk)
                if chunk.finish_reason is not None:
                    done.set()

            max_tokens = 400 if number % 4 == 0 else 17
            loop.submit(
                request(name, max_tokens=max_tokens), on_chunk=on_chunk, on_refusal=pytest.fail
            )
            if number % 4 == 0:
                loop.cancel(name)
            assert done.wait(PATIENCE_S)
            if number % 4 == 0:
                cancelled.release()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for _ in threads[::4]:
            assert cancelled.acquire(timeout=PATIENCE_S)
        released.set()
        for thread in threads:
            thread.join()
        loop.close()
        assert wait_until(lambda: pair._llm.num_active == 0)
    reasons = {name: chunks[-1].finish_reason for name, chunks in ends.items()}
    assert reasons == {f"r{n}": "cancelled" if n % 4 == 0 else "length" for n in range(16)}
    expected = greedy_reference(request())
    assert all(ids(chunks) == expected for n, chunks in ends.items() if int(n[1:]) % 4)


def test_a_request_of_a_release_that_gives_no_usable_log_probs_fails(
    make: MakePair, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probability of another token would be a wrong answer."""
    monkeypatch.setattr(fake, "Logprob", lambda log_prob, rank: None)
    with make() as pair:
        (chunk,) = run(pair, [request(return_log_probs=True)])["r"]
    assert chunk.finish_reason == "error"
    assert str(chunk.error).startswith("TensorRT-LLM failed: AttributeError: ")


# Where the draft runs in the target's engine: 1.3 and 1.4.


@pytest.mark.parametrize("acceptance", ["exact", "logits"])
def test_sampling_with_a_draft_is_lossless_unless_it_accepts_by_logits(
    make_one_engine: MakePair, one_engine: ModuleType, acceptance: str
) -> None:
    settings = runtime_settings(tensorrt_llm=one_engine.__version__, acceptance=acceptance)
    sampling = Sampling(temperature=0.7, top_k=8, top_p=0.9)
    with make_one_engine(settings=settings) as pair:
        last = run(pair, [request(max_tokens=3, sampling=sampling)])["r"][-1]
        greedy = run(pair, [request("g", max_tokens=3)])["g"][-1]
        asked, _ = pair._llm.asked
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.7, 8, 0.9)
    assert last.statistics is not None and greedy.statistics is not None
    assert (last.statistics.is_lossless, greedy.statistics.is_lossless) == (
        acceptance == "exact",
        True,
    )


@pytest.mark.parametrize(("acceptance", "is_refused"), [("exact", False), ("logits", True)])
def test_vocabularies_of_other_sizes_are_a_matter_of_logits_only(
    make_one_engine: MakePair, one_engine: ModuleType, acceptance: str, is_refused: bool
) -> None:
    settings = runtime_settings(
        tensorrt_llm=one_engine.__version__, acceptance=acceptance, target_vocab_size=128
    )
    with make_one_engine(settings=settings) as pair:
        if is_refused:
            with pytest.raises(RequestError, match="as many embedding rows"):
                pair.submit(request(sampling=SAMPLED))
            return
        assert len(ids(run(pair, [request(max_tokens=3, sampling=SAMPLED)])["r"])) == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"return_log_probs": True}, "return_log_probs: .* no log-probabilities with a draft"),
        ({"sampling": Sampling(repetition_penalty=1.2)}, r"repetition_penalty is 1\.2: "),
        ({"sampling": Sampling(min_tokens=2)}, "min_tokens is 2: "),
        ({"sampling": Sampling(bad_words=((5,),))}, "bad_words is given: "),
        ({"sampling": Sampling(temperature=0.7, min_p=0.1)}, r"min_p is 0\.1: "),
        ({"sampling": Sampling(temperature=0.7, seed=3, is_seeded=True)}, "seed: .*one generator"),
        ({"num_draft_tokens": 2}, "num_draft_tokens is 2: .* drafts 4 tokens in every step"),
    ],
)
def test_what_one_engine_cannot_honour_is_refused_by_name(
    make_one_engine: MakePair, changes: dict[str, Any], expected: str
) -> None:
    with make_one_engine() as pair:
        with pytest.raises(RequestError, match=f"^{expected}"):
            pair.submit(request(**changes))
        assert pair._llm.asked == []


def test_log_probs_without_a_draft(make_one_engine: MakePair) -> None:
    with make_one_engine(num_draft_tokens=0) as pair:
        chunks = run(pair, [request(return_log_probs=True, max_tokens=5)])["r"]
    assert sum(len(chunk.log_probs) for chunk in chunks) == 5


@pytest.mark.parametrize("name", ["logprobs", "min_p", "repetition_penalty"])
def test_a_refusal_of_tensorrt_llm_s_own_is_the_request_s_error(
    make_one_engine: MakePair, name: str
) -> None:
    """Were it not refused before."""
    with make_one_engine() as pair:
        params = pair._new_sampling_params

        def with_more(given: Any) -> Any:
            asked = params(given)
            setattr(asked, name, 2)
            return asked

        pair._new_sampling_params = with_more  # type: ignore[method-assign]
        last = run(pair, [request()])["r"][-1]
    assert last.finish_reason == "error" and last.error is not None
    assert last.error.startswith("TensorRT-LLM ") and "speculative decoding" in last.error


PENALTIES = (
    Sampling(repetition_penalty=1.3),
    Sampling(presence_penalty=0.5, frequency_penalty=0.25),
    Sampling(temperature=0.7, frequency_penalty=0.5),
)


@pytest.mark.parametrize("sampling", PENALTIES)
def test_penalties_are_given_on_where_they_are_enabled(
    make_one_engine: MakePair, one_engine: ModuleType, sampling: Sampling
) -> None:
    """The prompt counts for repetition alone, as it does elsewhere."""
    settings = runtime_settings(tensorrt_llm=one_engine.__version__, enable_penalty=True)
    with make_one_engine(settings=settings, speculative_config={"enable_penalty": True}) as pair:
        chunks = run(pair, [request(max_tokens=5, sampling=sampling), request("plain")])
        (asked, plain) = pair._llm.asked
    assert len(ids(chunks["r"])) == 5
    assert (
        asked.repetition_penalty,
        asked.presence_penalty,
        asked.frequency_penalty,
        asked.prompt_ignore_length,
    ) == (
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        len(request().prompt_token_ids),
    )
    assert (plain.repetition_penalty, plain.prompt_ignore_length) == (None, None)


def test_counts_are_tensorrt_llm_s_own_under_a_schedule(make_one_engine: MakePair) -> None:
    """Alone a request drafts 4 tokens a step, and beside two others, which begin with it, 2."""
    speculative = {"draft_len_schedule": {1: 4, 4: 2}}
    begun = threading.Event()
    with make_one_engine(schedule=((2, 2),), speculative_config=speculative) as pair:
        alone = run(pair, [request()])["r"][-1].statistics
        with set_at_the_end(begun):
            pair._llm._inbox.put(begun.wait)
            for name in "abc":
                pair.submit(request(name))
            pair._admit()
            assert wait_until(lambda: pair._llm._inbox.qsize() == 3)
        chunks = steps_until(pair, lambda _: not pair.has_work())
    assert alone is not None
    assert (alone.total_draft_tokens, alone.draft_status) == (13, "drafted")
    for name in "abc":
        own = [chunk for chunk in chunks if chunk.request_id == name]
        last = own[-1].statistics
        assert last is not None
        assert ids(own) == greedy_reference(request())
        assert last.total_draft_tokens == last.total_accepted_draft_tokens
        assert last.draft_status == "drafted"
        assert last.num_steps > alone.num_steps


def test_counts_that_are_inferred_follow_the_schedule(
    make_one_engine: MakePair, one_engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the metrics are zeros all the same; a draft that is always wrong."""
    begun, released = threading.Event(), threading.Event()
    monkeypatch.setattr(one_engine.LLM, "fills_metrics", False)
    with (
        make_one_engine(
            # What one gave may come after all of the other, so that one waits in its middle.
            target=waiting_at(len(request().prompt_token_ids) + 8, released),
            draft=TableModel(wrong_rule),
            schedule=((1, 4), (2, 1)),
            speculative_config={"draft_len_schedule": {1: 4, 4: 1}},
        ) as pair,
        set_at_the_end(released),
    ):
        with set_at_the_end(begun):
            pair._llm._inbox.put(begun.wait)
            for name, max_tokens in (("a", 6), ("b", 24)):
                pair.submit(request(name, max_tokens=max_tokens))
            pair._admit()
            assert wait_until(lambda: pair._llm._inbox.qsize() == 2)
        chunks = steps_until(pair, lambda chunks: any(c.statistics for c in chunks))
        released.set()
    (last,) = (chunk.statistics for chunk in chunks if chunk.statistics is not None)
    assert (last.total_draft_tokens, last.draft_status) == (4, "decided_by_engine")
