"""Requests with a guide, in the batched loop and in its specification."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from specpipe.errors import RequestError
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.speculative.decode import decode
from specpipe.speculative.guide import Guide, Guides
from specpipe.speculative.request import Chunk, Request, RequestLimits, Sampling
from specpipe.speculative.state import RequestState
from specpipe.text.guides import grammar
from specpipe.text.guides.guides import Guides as TextGuides
from tests.ascii_guides import ASCII, END, VOCAB_SIZE, Ascii
from tests.runtimes.table_engine import ids, make_pair, run
from tests.speculative.table import NoisyModel, WordDetokenizer, request

TARGET, DRAFT = (NoisyModel(s, vocab_size=VOCAB_SIZE, blend=0.3) for s in (1, 2))
ENDS = frozenset({END})
OBJECT = Guide(
    type="json_schema",
    text='{"type": "object", "properties": {"name": {"enum": ["ab", "cd"]}, "n": {"type": '
    '"integer", "minimum": 0, "maximum": 99}}, "required": ["name", "n"], '
    '"additionalProperties": false}',
)
WORDS = Guide(type="regex", text="[a-c]{2,4}( [x-z]{1,3}){0,2}")


def pair_of(**options: object) -> EnginePair:
    return make_pair(TARGET, DRAFT, guides=ASCII, **options)  # type: ignore[arg-type]


def guided(name: str = "r", guide: Guide = OBJECT, **settings: object) -> Request:
    return request(name, **{"guide": guide, "end_token_ids": ENDS, "max_tokens": 60, **settings})


def specified(r: Request, guides: Guides = ASCII, mask_token_id: int | None = None) -> list[Chunk]:
    """What the specification answers."""
    assert r.guide is not None
    limits = RequestLimits(
        max_num_draft_tokens=8, max_seq_len=500, draft_max_seq_len=500, vocab_size=VOCAB_SIZE
    )
    matcher = guides.matcher(r.guide, end_token_ids=r.end_token_ids, vocab_size=VOCAB_SIZE)
    state = RequestState(r, limits, WordDetokenizer(), matcher=matcher)
    return list(decode(state, TARGET, DRAFT, mask_token_id=mask_token_id))


def text(chunks: list[Chunk]) -> str:
    return bytes(ids(chunks)).decode()


@pytest.mark.parametrize(
    ("num_draft_tokens", "mask_token_id"), [(0, None), (3, None), (8, None), (3, 7), (8, ord("a"))]
)
def test_guided_requests_of_all_kinds_are_those_of_the_specification(
    num_draft_tokens: int, mask_token_id: int | None
) -> None:
    """Greedy, seeded and unseeded, with penalties, beside others that have no guide."""
    requests = []
    for number in range(12):
        sampling = Sampling(
            temperature=0.0 if number % 3 == 0 else 1.1,
            is_seeded=number % 3 == 1,
            seed=number,
            top_k=(0, 5)[number % 2],
            repetition_penalty=(1.0, 1.3)[number % 2],
        )
        settings = {
            "sampling": sampling,
            "num_draft_tokens": num_draft_tokens,
            "return_log_probs": number % 4 == 0,
        }
        requests.append(guided(f"g{number}", (OBJECT, WORDS)[number % 2], **settings))
        if number % 5 == 0:
            requests.append(request(f"free{number}", sampling=sampling, max_tokens=9))
    pair = pair_of(num_draft_tokens=8, mask_token_id=mask_token_id, max_num_tokens=32)
    chunks = run(pair, requests)
    for r in requests:
        if r.guide is None:
            assert len(ids(chunks[r.request_id])) == 9
            continue
        expected = specified(r, mask_token_id=mask_token_id)
        found = chunks[r.request_id]
        assert ids(found) == ids(expected)
        assert found[-1].finish_reason == expected[-1].finish_reason == "stop"
        assert found[-1].statistics == expected[-1].statistics
        log_probs = [p for c in found for p in c.log_probs]
        assert log_probs == pytest.approx([p for c in expected for p in c.log_probs], abs=1e-5)


def test_forced_tokens_are_draft_tokens_that_no_draft_step_gave() -> None:
    def asked(num_draft_tokens: int) -> tuple[str, int, int, int]:
        pair = pair_of(num_draft_tokens=8)
        chunks = run(pair, [guided(num_draft_tokens=num_draft_tokens)])["r"]
        statistics = chunks[-1].statistics
        assert statistics is not None
        num_forwards = len(pair._draft.forwards)  # type: ignore[attr-defined]
        return text(chunks), statistics.num_steps, statistics.total_draft_tokens, num_forwards

    plain, steps, drafted, forwards = asked(0)
    assert (steps, drafted, forwards) == (len(plain), 0, 0)
    short = asked(4)
    assert short[0] == plain
    assert short[1] <= len(plain) // 3
    only_forced = Guide(type="choice", text='["always the same"]')
    pair = pair_of(num_draft_tokens=4)
    last = run(pair, [guided(guide=only_forced)])["r"][-1]
    assert last.statistics is not None
    assert (last.statistics.num_steps, last.statistics.total_accepted_draft_tokens) == (3, 12)
    assert pair._draft.forwards == []  # type: ignore[attr-defined]


def test_an_unseeded_answer_has_the_masked_distribution_of_the_target() -> None:
    """Of rejection sampling, with draft tokens that a guide masks, forces and does not allow."""
    guide = Guide(type="regex", text="x[a-d]")
    r = guided(guide=guide, max_tokens=2, num_draft_tokens=2)
    letters = [ord(c) for c in "abcd"]
    scores = TARGET.logits([*r.prompt_token_ids, ord("x")], 1)[0][letters]
    expected = np.exp(scores) / np.exp(scores).sum()
    num_answers = 300
    requests = [
        replace(r, request_id=str(i), sampling=Sampling(temperature=1.0, seed=i))
        for i in range(num_answers)
    ]
    pair = pair_of(num_draft_tokens=2, max_queue_size=num_answers)
    counts = Counter(text(found) for found in run(pair, requests).values())
    assert set(counts) <= {"xa", "xb", "xc", "xd"}
    for letter, probability in zip("abcd", expected, strict=True):
        deviation = (num_answers * probability * (1 - probability)) ** 0.5
        assert abs(counts[f"x{letter}"] - num_answers * probability) < 5 * deviation + 1


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
@pytest.mark.parametrize(
    ("ends", "guide", "expected"),
    [
        (frozenset(), OBJECT, None),  # ignore_eos: over where the grammar can take no more
        (frozenset({END, ord("}")}), OBJECT, None),  # an end id that the grammar would take
        (frozenset({ord("b")}), Guide(type="regex", text="ab*"), "a"),
    ],
    ids=["none", "another", "allowed"],
)
def test_an_end_id_ends_where_the_guide_accepts_and_nowhere_else(
    num_draft_tokens: int, ends: frozenset[int], guide: Guide, expected: str | None
) -> None:
    bias = Sampling(logit_bias=((ord("b"), 50.0),))
    r = guided(guide=guide, end_token_ids=ends, sampling=bias, num_draft_tokens=num_draft_tokens)
    found = run(pair_of(num_draft_tokens=8), [r])["r"]
    if ord("}") in ends:
        # Not accepting before it, so that no token is left: the answer says so.
        assert found[-1].finish_reason == "error"
        return
    assert found[-1].finish_reason == "stop"
    whole = text(found)
    assert whole == expected if expected else whole.endswith("}")


def test_a_cut_answer_is_the_beginning_of_one_and_ends_by_length() -> None:
    whole = run(pair_of(num_draft_tokens=4), [guided(max_tokens=60)])["r"]
    cut = run(pair_of(num_draft_tokens=4), [guided(max_tokens=15)])["r"]
    assert cut[-1].finish_reason == "length"
    assert ids(cut) == ids(whole)[:15]


def test_copied_tokens_are_cut_where_the_guide_does_not_allow_them() -> None:
    prediction = tuple(b'{"name": "zz", "n": 5}')
    plain = run(pair_of(), [guided(num_draft_tokens=0)])["r"]
    r = guided(num_draft_tokens=8, prediction_token_ids=prediction)
    pair = pair_of(num_draft_tokens=8)
    pair._honours.add("prediction")
    assert ids(run(pair, [r])["r"]) == ids(plain)


def test_a_guide_that_outgrows_its_bounds_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each letter more doubles the states that a lexer has to keep apart."""
    limits = grammar.LLParserLimits(max_lexer_states=30, verbose_errors=False)
    monkeypatch.setattr(grammar, "LIMITS", limits)
    guides = TextGuides(Ascii(), ASCII._limits)
    hard = Guide(type="regex", text="[ab]*a[ab]{12}c")
    for num_draft_tokens in (0, 4):
        pair = make_pair(TARGET, DRAFT, guides=guides, num_draft_tokens=4)
        settings = {"num_draft_tokens": num_draft_tokens}
        found = run(pair, [guided("hard", hard, **settings), guided("easy", WORDS, **settings)])
        assert found["hard"][-1].finish_reason == "error"
        assert str(found["hard"][-1].error).startswith("guided_decoding_guide: ")
        assert found["easy"][-1].finish_reason == "stop"


def test_a_guide_that_does_not_compile_is_refused_when_it_is_submitted() -> None:
    pair = pair_of()
    with pytest.raises(RequestError, match="^guided_decoding_guide: .*unclosed group$"):
        pair.submit(guided(guide=Guide(type="regex", text="(a+")))
    assert not pair.has_work()
