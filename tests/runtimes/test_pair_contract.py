"""What every `Pair` does, whatever runs its models: to pass this is to support a runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import RequestError
from specpipe.runtimes.pair.features import FEATURES
from specpipe.runtimes.pair.pair import Pair
from specpipe.speculative.guide import Guide
from specpipe.speculative.log_probs import likeliest, log_softmax
from specpipe.speculative.noise import Floats
from specpipe.speculative.request import Chunk, Request, Sampling
from tests.runtimes.table_engine import ids, make_pair, run
from tests.runtimes.tensorrt.table_library import tensorrt_pair
from tests.runtimes.tensorrt_llm.engines.bls import make_bls_pair, stand_ins
from tests.speculative.table import (
    DRAFT_RULES,
    PieceDetokenizer,
    ScriptedModel,
    TableModel,
    greedy_reference,
    request,
    target_rule,
)
from tests.tensorrt_llm_stand_ins.llm_api import installed, table_pair
from tests.tensorrt_llm_stand_ins.llm_api_lines import VERSIONS

Make = Callable[..., AbstractContextManager[Pair]]
"""Makes a pair from the target's model and the draft's, and PairOptions."""

OUR_OWN_LOOP = pytest.mark.parametrize("make", ["engines", "tensorrt"], indirect=True)

PIECES = {4: "foo ", 5: "a", 6: ",b", 7: " bar", 8: "\n", 9: " end"}


@contextmanager
def engines(
    target: TableModel, draft: TableModel, detokenizer: Any = None, **options: Any
) -> Iterator[Pair]:
    pair = make_pair(target, draft, **options)
    if detokenizer is not None:
        pair._detokenizer = detokenizer
    yield pair


@contextmanager
def bls(target: TableModel, draft: TableModel, **options: Any) -> Iterator[Pair]:
    yield make_bls_pair(*stand_ins(target, draft), **options)


PAIRS = ("engines", "tensorrt", "bls", "bls by logits", "llm 1.2", "llm 1.4")

ASKING: dict[str, dict[str, Any]] = {
    "logit_bias_ids": {"sampling": Sampling(logit_bias=((9, 1.0),))},
    "num_top_log_probs": {"num_top_log_probs": 2},
    "return_prompt_log_probs": {"return_prompt_log_probs": True},
    "guided_decoding_guide": {"guide": Guide(type="json")},
    "prediction": {"prediction_token_ids": (9, 9)},
    "cache_salt": {"cache_salt": "a"},
}
"""What asks for each of FEATURES."""

OF_OUR_OWN_LOOP = {*ASKING} - {"guided_decoding_guide"}
"""And guides, where the pair is given what compiles them; these pairs are not."""

HONOURED = {
    "engines": OF_OUR_OWN_LOOP,
    "tensorrt": OF_OUR_OWN_LOOP,
    "llm 1.2": {"cache_salt"},
    "llm 1.4": {"cache_salt"},
}


@pytest.fixture(params=PAIRS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    if request.param == "engines":
        yield engines
    elif request.param == "tensorrt":
        yield lambda target, draft, **o: tensorrt_pair(tmp_path, target, draft, **o)
    elif request.param.startswith("llm"):
        with installed(VERSIONS[request.param.removeprefix("llm ")]) as fake:
            yield lambda target, draft, **o: table_pair(fake, tmp_path, target, draft, **o)
    else:
        acceptance = "logits" if "logits" in request.param else "exact"
        yield lambda target, draft, **o: bls(target, draft, acceptance=acceptance, **o)


@pytest.fixture
def pair_name(request: pytest.FixtureRequest) -> str:
    name: str = request.node.callspec.params["make"]
    return name


@pytest.mark.parametrize("draft_name", DRAFT_RULES)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
def test_greedy_output_is_that_of_the_target_alone(
    make: Make, draft_name: str, num_draft_tokens: int
) -> None:
    requests = [request(f"{p}-{m}", p, max_tokens=m) for p in (1, 60) for m in (1, 2, 17)]
    draft = TableModel(DRAFT_RULES[draft_name])
    with make(TableModel(target_rule), draft, num_draft_tokens=num_draft_tokens) as pair:
        chunks = run(pair, requests)
        assert not pair.has_work()
        assert pair.num_steps > 0
    for r in requests:
        found = chunks[r.request_id]
        assert ids(found) == greedy_reference(r)
        assert "".join(c.text for c in found) == "".join(f"w{i} " for i in greedy_reference(r))
        # One last chunk, and nothing after it.
        assert [c.finish_reason for c in found if c.finish_reason] == ["length"]
        assert [c for c in found if c.statistics is not None] == [found[-1]]
        statistics = found[-1].statistics
        assert statistics is not None
        assert statistics.num_output_tokens == r.max_tokens
        rate = statistics.total_accepted_draft_tokens / max(statistics.total_draft_tokens, 1)
        assert statistics.acceptance_rate == rate
        if num_draft_tokens == 0:
            assert (statistics.total_draft_tokens, statistics.draft_status) == (0, "off_by_config")


def test_an_end_id_inside_a_block_cuts_everything_there(make: Make) -> None:
    script = [10, 11, 3, 20, 21]
    with make(ScriptedModel(3, script), ScriptedModel(3, script), num_draft_tokens=4) as pair:
        chunks = run(pair, [request(end_token_ids=frozenset({2, 3}))])["r"]
    assert ids(chunks) == [10, 11]
    assert "".join(c.text for c in chunks) == "w10 w11 "
    assert chunks[-1].finish_reason == "stop"


def test_a_stop_string_across_tokens_is_cut_off(make: Make) -> None:
    script = [4, 5, 6, 7, 8, 9]
    with make(
        ScriptedModel(3, script),
        ScriptedModel(3, script),
        num_draft_tokens=4,
        detokenizer=lambda prompt, **_: PieceDetokenizer(PIECES),
    ) as pair:
        r = request(stop_strings=("a,b", "\n"), max_tokens=6)
        chunks = run(pair, [r])["r"]
    assert "".join(c.text for c in chunks) == "foo "
    assert chunks[-1].finish_reason == "stop"


def test_a_cancelled_request_ends_and_the_others_go_on(make: Make) -> None:
    with make(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=1) as pair:
        pair.submit(request("a", max_tokens=400))
        pair.submit(request("b"))
        chunks: list[Chunk] = []
        while not any(c.request_id == "a" for c in chunks):
            chunks += pair.step()
        pair.cancel("a")
        pair.cancel("unknown")
        while pair.has_work():
            chunks += pair.step()
        assert [c.finish_reason for c in chunks if c.request_id == "a"][-1] == "cancelled"
        assert sum(c.finish_reason is not None for c in chunks) == 2
        assert ids([c for c in chunks if c.request_id == "b"]) == greedy_reference(request())
        pair.cancel("a")
        assert not pair.has_work()


def test_what_can_never_run_is_refused_at_once(make: Make) -> None:
    with make(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=2) as pair:
        for settings, message in (
            ({"max_tokens": 501}, "^max_tokens is 501; prompt and output together may have 500 "),
            ({"num_draft_tokens": 3}, "^num_draft_tokens is 3; this pair drafts at most 2 "),
            ({"prompt_token_ids": (4, 104)}, "^token id 104 is outside the vocabulary of 104$"),
        ):
            with pytest.raises(RequestError, match=message):
                pair.submit(Request(**{**vars(request()), **settings}))
        assert not pair.has_work()


def test_interrupt_never_hurts(make: Make) -> None:
    with make(TableModel(target_rule), TableModel(target_rule)) as pair:
        pair.interrupt()
        pair.submit(request())
        chunks: list[Chunk] = []
        while pair.has_work():
            pair.interrupt()
            chunks += pair.step()
    assert ids(chunks) == greedy_reference(request())


def test_what_a_pair_holds_follows_its_requests(make: Make) -> None:
    with make(TableModel(target_rule), TableModel(target_rule), max_batch_size=1) as pair:
        assert (pair.occupancy().num_running, pair.occupancy().num_waiting) == (0, 0)
        for name in "ab":
            pair.submit(request(name, max_tokens=400))
        pair.step()
        assert (pair.occupancy().num_running, pair.occupancy().num_waiting) == (1, 1)
        for name in "ab":
            pair.cancel(name)
        while pair.has_work():
            pair.step()
        assert (pair.occupancy().num_running, pair.occupancy().num_waiting) == (0, 0)


@pytest.mark.parametrize("make", [name for name in PAIRS if name != "llm 1.4"], indirect=True)
def test_the_last_chunk_tells_the_steps_behind_the_statistics(make: Make) -> None:
    """But where TensorRT-LLM counts by itself, which it does for the whole request."""
    with make(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=3) as pair:
        *others, last = run(pair, [request(max_tokens=10)])["r"]
    assert all(chunk.counts is None and chunk.queue_s is None for chunk in others)
    assert last.counts is not None and last.statistics is not None
    assert last.counts.num_steps == last.statistics.num_steps
    assert last.counts.drafted_at.total() == last.statistics.total_draft_tokens
    assert last.counts.accepted_at.total() == last.statistics.total_accepted_draft_tokens
    assert last.queue_s is not None and 0 <= last.queue_s < 10


@pytest.mark.parametrize("name", FEATURES)
def test_what_a_pair_does_not_honour_is_refused_by_the_name_of_the_input(
    make: Make, name: str, pair_name: str
) -> None:
    asking = request(**ASKING[name])
    with make(TableModel(target_rule), TableModel(target_rule)) as pair:
        if name in HONOURED.get(pair_name, ()):
            assert len(ids(run(pair, [asking])["r"])) == 17
            return
        with pytest.raises(
            RequestError, match=f"^{name} is not supported by this pair's runtime; leave it out$"
        ):
            pair.submit(asking)
        assert not pair.has_work()


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_special_tokens_are_a_part_of_the_text_where_that_is_asked_for(
    make: Make, num_draft_tokens: int
) -> None:
    """Every pair has its text from the detokenizer, so that none can pass this over."""

    def detokenizer(prompt: Sequence[int], *, skip_special_tokens: bool) -> PieceDetokenizer:
        return PieceDetokenizer(PIECES | {6: "" if skip_special_tokens else "<b>"})

    script = [4, 6, 5]
    with make(
        ScriptedModel(3, script),
        ScriptedModel(3, script),
        num_draft_tokens=num_draft_tokens,
        detokenizer=detokenizer,
    ) as pair:
        chunks = run(
            pair,
            [
                request("with", skip_special_tokens=False, max_tokens=3),
                request("without", max_tokens=3),
            ],
        )
    texts = {name: "".join(c.text for c in found) for name, found in chunks.items()}
    assert texts == {"with": "foo <b>a", "without": "foo a"}


@OUR_OWN_LOOP
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_bias_moves_what_is_chosen_and_no_log_probability(
    make: Make, num_draft_tokens: int
) -> None:
    """By 2, where the target's own token scores 1 and all others 0: the token is always the one."""
    r = request(sampling=Sampling(logit_bias=((50, 2.0),)), return_log_probs=True, max_tokens=5)
    with make(
        TableModel(target_rule), TableModel(target_rule), num_draft_tokens=num_draft_tokens
    ) as pair:
        chunks = run(pair, [r])["r"]
    assert ids(chunks) == [50] * 5
    expected = [row_of([*r.prompt_token_ids, *[50] * n])[50] for n in range(5)]
    assert [p for c in chunks for p in c.log_probs] == pytest.approx(expected, abs=1e-5)
    statistics = chunks[-1].statistics
    assert statistics is not None
    # The draft is biased alike.
    assert statistics.total_accepted_draft_tokens == statistics.total_draft_tokens
    assert (statistics.total_draft_tokens > 0) == (num_draft_tokens > 0)


@OUR_OWN_LOOP
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 8])
@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_log_probabilities_are_those_of_the_targets_raw_logits(
    make: Make, num_draft_tokens: int, max_tokens: int
) -> None:
    """For every draft length, beside others, of output and prompt, which is read in pieces."""
    sampling = Sampling(temperature=0.5, repetition_penalty=1.5, seed=1, is_seeded=True)
    asking: dict[str, Any] = {
        "sampling": sampling,
        "return_log_probs": True,
        "num_top_log_probs": 3,
        "return_prompt_log_probs": True,
        "max_tokens": max_tokens,
    }
    requests = [request(f"r{n}", n, **asking) for n in (1, 2, 40)]
    others = [request("plain", 60), request("short", 5, max_tokens=30)]
    target = TableModel(target_rule)
    with make(target, TableModel(DRAFT_RULES["half"]), num_draft_tokens=num_draft_tokens) as pair:
        chunks = run(pair, [requests[0], others[0], *requests[1:], others[1]])
    assert all(ids(chunks[r.request_id]) == greedy_reference(r) for r in others)
    for r in requests:
        first, *later = chunks[r.request_id]
        text = [*r.prompt_token_ids, *ids([first, *later])]
        rows = [row_of(text[:n]) for n in range(1, len(text))]
        own = [float(row[i]) for row, i in zip(rows, text[1:], strict=True)]
        num_scored = len(r.prompt_token_ids) - 1
        assert list(first.prompt_log_probs) == pytest.approx(own[:num_scored], abs=1e-5)
        found = [p for c in [first, *later] for p in c.log_probs]
        assert found == pytest.approx(own[num_scored:], abs=1e-5)
        found_top = [*first.prompt_top_log_probs]
        found_top += [top for c in [first, *later] for top in c.top_log_probs]
        for top, row in zip(found_top, rows, strict=True):
            # Of the many that score 0, the two with the lowest ids.
            assert [i for i, _ in top] == [i for i, _ in likeliest(row, 3)]
            assert [p for _, p in top] == pytest.approx([p for _, p in likeliest(row, 3)], abs=1e-5)
        assert not any(c.prompt_log_probs or c.prompt_top_log_probs for c in later)
        last = [first, *later][-1]
        assert (last.finish_reason, len(ids([first, *later]))) == ("length", max_tokens)
        assert last.statistics is not None
        if max_tokens == 0:
            assert last.statistics.num_steps == last.statistics.total_draft_tokens == 0


def row_of(text: Sequence[int]) -> Floats:
    return log_softmax(TableModel(target_rule).logits(text, 1)[0])
