"""The state machine by itself: what ends a request, and that a cut takes text, ids and counts
alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpipe.errors import RequestError
from specpipe.speculative.request import Chunk, Request, RequestLimits, Sampling
from specpipe.speculative.state import RequestState
from tests.speculative.table import PieceDetokenizer

LIMITS = RequestLimits(
    max_num_draft_tokens=8, max_seq_len=1000, draft_max_seq_len=1000, vocab_size=300
)

WORDS = {
    10: "foo",
    11: " ",
    12: "a,b",
    13: " bar",
    14: "\n",
    15: " end",
    16: "",
    17: 'say "',
    18: "x",
}


def run(
    token_ids: Sequence[int],
    *,
    split: Sequence[int] = (),
    log_probs: bool = False,
    pieces: dict[int, str] = WORDS,
    **settings: object,
) -> list[Chunk]:
    """Feeds token_ids in blocks of the given sizes (then one by one) until the request ends."""
    arguments: dict[str, object] = {
        "request_id": "r",
        "prompt_token_ids": (1,),
        "max_tokens": len(token_ids),
        "return_log_probs": log_probs,
        **settings,
    }
    request = Request(**arguments)  # type: ignore[arg-type]
    state = RequestState(request, LIMITS, PieceDetokenizer(pieces))
    chunks, rest, sizes = [], list(token_ids), [*split, *[1] * len(token_ids)]
    for size in sizes:
        block, rest = rest[:size], rest[size:]
        probs = [-float(i) for i in block]
        tops = [((i, -float(i)), (1, -99.0)) for i in block]
        chunks.append(state.accept(block, probs, tops, num_draft_tokens=len(block) - 1))
        if state.is_finished:
            return chunks
    raise AssertionError("not finished")


def text(chunks: list[Chunk]) -> str:
    return "".join(c.text for c in chunks)


def ids(chunks: list[Chunk]) -> list[int]:
    return [i for c in chunks for i in c.token_ids]


FOO_A_B_BAR_END = [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("split", [(), (6,), (2, 4), (3, 3), (1, 5)])
def test_stop_strings_as_people_write_them(split: tuple[int, ...]) -> None:
    stops = ("\n", "a,b", '"', " end")
    chunks = run(FOO_A_B_BAR_END, split=split, stop_strings=stops)
    assert text(chunks) == "foo "
    assert ids(chunks) == [10, 11]
    assert chunks[-1].finish_reason == "stop"
    statistics = chunks[-1].statistics
    assert statistics is not None and statistics.num_output_tokens == 2


@pytest.mark.parametrize("split", [(), (6,), (2, 4)])
def test_log_probabilities_leave_and_are_cut_with_their_tokens(split: tuple[int, ...]) -> None:
    chunks = run(
        FOO_A_B_BAR_END, split=split, stop_strings=("\n",), log_probs=True, num_top_log_probs=2
    )
    for chunk in chunks:
        assert chunk.log_probs == tuple(-float(i) for i in chunk.token_ids)
        assert chunk.top_log_probs == tuple(((i, -float(i)), (1, -99.0)) for i in chunk.token_ids)
    assert ids(chunks) == [10, 11, 12, 13]


def test_log_probabilities_of_a_prompt_come_whole_with_the_first_chunk_that_shows_something() -> (
    None
):
    top = (((5, -1.0),), ((6, -2.0),))
    for num_known, expected in ((1, ((), ())), (2, ((-0.5, -0.25), top))):
        request = Request(
            request_id="r",
            prompt_token_ids=(1, 2, 3),
            max_tokens=9,
            return_prompt_log_probs=True,
            num_top_log_probs=1,
            stop_strings=("foo!",),
        )
        state = RequestState(request, LIMITS, PieceDetokenizer(WORDS))
        for log_prob, likeliest in list(zip((-0.5, -0.25), top, strict=True))[:num_known]:
            state.score_prompt([log_prob], [likeliest])
        held = state.accept([10], num_draft_tokens=0)
        assert (held.text, held.token_ids, held.prompt_log_probs) == ("", (), ())
        chunks = [state.accept([11], num_draft_tokens=0), state.finish("cancelled")]
        found = [(c.prompt_log_probs, c.prompt_top_log_probs) for c in chunks]
        assert found == [expected, ((), ())]


@pytest.mark.parametrize("split", [(), (6,), (2, 4)])
def test_newline_alone_as_stop_string(split: tuple[int, ...]) -> None:
    chunks = run(FOO_A_B_BAR_END, split=split, stop_strings=("\n",))
    assert text(chunks) == "foo a,b bar"
    assert ids(chunks) == [10, 11, 12, 13]


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="^stop_words has an empty entry; leave it out$"):
        run([10], stop_strings=("",))


def test_stop_string_across_tokens_is_held_back_and_cut() -> None:
    chunks = run([10, 12, 13], stop_strings=("o a,b", "oa,b"))
    assert [c.text for c in chunks] == ["fo", ""]
    # The token "foo" is needed to say "fo".
    assert [c.token_ids for c in chunks] == [(), (10,)]


def test_text_that_only_looked_like_a_stop_string_is_released() -> None:
    chunks = run([10, 11, 13], stop_strings=("oops", " b!"))
    assert [c.text for c in chunks] == ["f", "oo", "  bar"]
    assert ids(chunks) == [10, 11, 13]


def test_held_text_is_released_at_the_token_cap() -> None:
    chunks = run([10, 11], stop_strings=(" end",))
    assert [c.text for c in chunks] == ["foo", " "]
    assert chunks[-1].finish_reason == "length"


def test_end_id_releases_held_text_and_is_not_shown() -> None:
    chunks = run([10, 11, 2, 10], stop_strings=(" end",), end_token_ids=frozenset({2}))
    assert text(chunks) == "foo "
    assert ids(chunks) == [10, 11]
    assert chunks[-1].finish_reason == "stop"


def test_end_id_is_kept_with_its_log_prob_where_that_is_asked_for() -> None:
    ends = frozenset({2})
    chunks = run([10, 11, 2, 10], end_token_ids=ends, keeps_end=True, log_probs=True)
    assert (text(chunks), ids(chunks)) == ("foo ", [10, 11, 2])
    assert chunks[-1].log_probs[-1] == -2.0
    chunks = run([10, 2], stop_strings=("oo",), end_token_ids=ends, keeps_end=True)
    assert (text(chunks), ids(chunks)) == ("f", [10])


def test_earliest_stop_string_wins_in_one_block() -> None:
    chunks = run([10, 12, 13, 18], split=(4,), stop_strings=("bar", "a,"))
    assert text(chunks) == "foo"
    assert ids(chunks) == [10]


def test_stop_strings_wait_for_min_tokens() -> None:
    for split in ((), (4,), (2, 2)):
        chunks = run(
            [14, 10, 14, 18], split=split, stop_strings=("\n",), sampling=Sampling(min_tokens=2)
        )
        assert text(chunks) == "\nfoo"
        assert ids(chunks) == [14, 10]


def test_log_probs_are_cut_with_the_ids() -> None:
    chunks = run(FOO_A_B_BAR_END, split=(6,), stop_strings=("\n",), log_probs=True)
    assert [c.log_probs for c in chunks] == [(-10.0, -11.0, -12.0, -13.0)]


def test_no_log_probs_unless_asked() -> None:
    assert all(c.log_probs == () for c in run([10, 11], split=(2,)))


def test_drafts_past_the_end_are_not_counted() -> None:
    (chunk,) = run([10, 11, 14, 10, 10], split=(5,), stop_strings=("\n",))
    assert chunk.statistics is not None
    assert chunk.statistics.total_draft_tokens == 3
    assert chunk.statistics.total_accepted_draft_tokens == 3
    assert chunk.statistics.num_output_tokens == 2


def test_start_of_a_character_waits_for_its_end() -> None:
    class Bytes(PieceDetokenizer):
        def flush(self) -> str:
            return "\ufffd"

    def chunks(token_ids: list[int], stop: tuple[str, ...]) -> list[Chunk]:
        request = Request(
            request_id="r", prompt_token_ids=(1,), max_tokens=len(token_ids), stop_strings=stop
        )
        state = RequestState(request, LIMITS, Bytes({10: "", 11: "é", 12: "x"}))
        return [state.accept([i], num_draft_tokens=0) for i in token_ids if not state.is_finished]

    assert [(c.text, c.token_ids) for c in chunks([12, 10, 11, 12], ("é",))] == [
        ("x", (12,)),
        ("", ()),
        ("", ()),
    ]
    assert [(c.text, c.token_ids) for c in chunks([12, 10], ())] == [
        ("x", (12,)),
        ("\ufffd", (10,)),
    ]


def test_cancel_releases_held_text() -> None:
    request = Request(request_id="r", prompt_token_ids=(1,), max_tokens=9, stop_strings=(" end",))
    state = RequestState(request, LIMITS, PieceDetokenizer(WORDS))
    state.accept([11], num_draft_tokens=0)
    chunk = state.finish("cancelled")
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == (" ", (11,), "cancelled")
    assert chunk.statistics is not None and chunk.statistics.num_output_tokens == 1


class Failing:
    """Cannot make text of token 13, nor end a text that 12 began."""

    hidden_tokens: Mapping[int, str] = {}
    prompt_text = ""

    def __init__(self) -> None:
        self._is_open = False

    def settle(self) -> str:
        return ""

    def append(self, token_ids: Sequence[int]) -> str:
        self._is_open = 12 in token_ids
        return {10: "foo", 12: ""}[token_ids[0]]

    def flush(self) -> str:
        if self._is_open:
            raise ValueError("as asked")
        return ""


@pytest.mark.parametrize("token_ids", [[10, 13], [10, 12]])
def test_an_exception_in_its_text_ends_the_request(token_ids: list[int]) -> None:
    request = Request(request_id="r", prompt_token_ids=(1,), max_tokens=2)
    state = RequestState(request, LIMITS, Failing())
    assert state.accept(token_ids[:1], num_draft_tokens=0).text == "foo"
    last = state.accept(token_ids[1:], num_draft_tokens=0)
    assert (last.text, last.finish_reason, last.error) == (
        "",
        "error",
        "the request failed inside the server, whose log says how",
    )
    assert state.is_finished


def test_an_exception_in_its_text_ends_a_cancelled_request() -> None:
    request = Request(request_id="r", prompt_token_ids=(1,), max_tokens=9)
    state = RequestState(request, LIMITS, Failing())
    state.accept([12], num_draft_tokens=0)
    assert state.finish("cancelled").finish_reason == "error"


@given(
    token_ids=st.lists(st.sampled_from([10, 11, 12, 13, 14, 15, 18]), min_size=1, max_size=25),
    split=st.lists(st.integers(1, 6), max_size=25),
    stops=st.lists(st.text("fo a,b\nend", min_size=1, max_size=4), max_size=4),
)
def test_blocks_do_not_change_what_comes_out(
    token_ids: list[int], split: list[int], stops: list[str]
) -> None:
    whole = "".join(WORDS[i] for i in token_ids)
    starts = []
    for end in range(len(token_ids) + 1):  # the stop string whose last token comes first wins
        so_far = "".join(WORDS[i] for i in token_ids[:end])
        starts = [so_far.find(s) for s in stops if s in so_far]
        if starts:
            break
    expected = whole[: min(starts)] if starts else whole
    settings = {"stop_strings": tuple(stops), "log_probs": True}
    blocks = run(token_ids, split=split, **settings)  # type: ignore[arg-type]
    ones = run(token_ids, **settings)  # type: ignore[arg-type]
    assert text(blocks) == text(ones) == expected
    assert ids(blocks) == ids(ones)
    assert "".join(WORDS[i] for i in ids(blocks)).startswith(expected)
    assert len("".join(WORDS[i] for i in ids(blocks)[:-1])) < len(expected) or not ids(blocks)
    assert [p for c in blocks for p in c.log_probs] == [-float(i) for i in ids(blocks)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_token_ids": ()}, "the prompt is empty; send at least one token"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
        (
            {"max_tokens": -1, "return_prompt_log_probs": True},
            "max_tokens is -1; it must be 0 or more",
        ),
        ({"num_top_log_probs": 21}, "num_top_log_probs is 21; it must be between 0 and 20"),
        (
            {"num_draft_tokens": -1},
            "num_draft_tokens is -1; it must be 0 (no speculation) or more",
        ),
        (
            {"num_draft_tokens": 9},
            "num_draft_tokens is 9; this pair drafts at most 8 (speculation.num_draft_tokens)",
        ),
        (
            {"prompt_token_ids": (1,) * 1000},
            "the prompt has 1000 tokens; prompt and output together may have 1000 "
            "(engine.max_seq_len)",
        ),
        (
            {"max_tokens": 1001},
            "max_tokens is 1001; prompt and output together may have 1000 (engine.max_seq_len)",
        ),
        ({"prompt_token_ids": (1, 300)}, "token id 300 is outside the vocabulary of 300"),
        ({"prediction_token_ids": (1, 300)}, "token id 300 is outside the vocabulary of 300"),
        (
            {"sampling": Sampling(logit_bias=((1, 2.0), (-1, 2.0)))},
            "token id -1 is outside the vocabulary of 300",
        ),
        ({"timeout_s": 0.0}, "timeout_s is 0.0; it must be positive"),
    ],
)
def test_requests_that_can_never_run_are_refused(settings: dict[str, object], message: str) -> None:
    arguments = {"request_id": "r", "prompt_token_ids": (1,), "max_tokens": 9, **settings}
    with pytest.raises(RequestError) as caught:
        LIMITS.check(Request(**arguments))  # type: ignore[arg-type]
    assert str(caught.value) == message


TURN, END, GAP = 40, 41, 42
SPECIAL = {TURN: "<turn>", END: "<end>", GAP: "<turn>x"}


class Special(PieceDetokenizer):
    """Special tokens beside WORDS; 30 and 31 are the bytes of é, held back until another piece."""

    hidden_tokens = SPECIAL

    def __init__(self) -> None:
        super().__init__({**WORDS, **dict.fromkeys(SPECIAL, ""), 30: "", 31: ""})
        self._held = ""

    def append(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            self._held += "é" if token_id == 31 else ""
            piece = super().append([token_id])
            if piece:
                text, self._held = text + self._held + piece, ""
        return text

    def settle(self) -> str:
        held, self._held = self._held, ""
        return held

    flush = settle


def run_special(
    token_ids: Sequence[int], *stops: str, size: int = 1, **settings: object
) -> tuple[str, list[int], str | None]:
    arguments: dict[str, object] = {
        "request_id": "r",
        "prompt_token_ids": (1,),
        "max_tokens": len(token_ids),
        "stop_strings": stops,
        "return_log_probs": True,
        **settings,
    }
    state = RequestState(Request(**arguments), LIMITS, Special())  # type: ignore[arg-type]
    chunks = []
    for at in range(0, len(token_ids), size):
        block = token_ids[at : at + size]
        chunks.append(state.accept(block, [-1.0] * len(block), num_draft_tokens=len(block) - 1))
        if state.is_finished:
            break
    last = chunks[-1]
    assert last.statistics is not None
    assert last.statistics.num_output_tokens == len(ids(chunks)) == len(log_probs_of(chunks))
    return text(chunks), ids(chunks), last.finish_reason


def log_probs_of(chunks: list[Chunk]) -> list[float]:
    return [p for chunk in chunks for p in chunk.log_probs]


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize(
    ("token_ids", "stops", "expected"),
    [
        # Case S3: text before it kept, the token in neither text nor ids.
        ([10, TURN, 18, 18], ["<turn>"], ("foo", [10], "stop")),
        ([TURN, 18, 18], ["<turn>"], ("", [], "stop")),
        ([10, TURN, 18, 18], ["<end>", "<turn>"], ("foo", [10], "stop")),
        # Special tokens that no stop string names are left out as ever, before and after.
        ([10, END, 18], ["<turn>"], ("foox", [10, END, 18], "length")),
        ([10, END, TURN, 18], ["<turn>"], ("foo", [10, END], "stop")),
        ([18, 10, END, TURN, 18], ["foo<turn>"], ("x", [18], "stop")),
        # Text before and after, in one stop string.
        ([18, 10, TURN, 18], ["foo<turn>"], ("x", [18], "stop")),
        ([18, TURN, 18, 10], ["foo<turn>"], ("xxfoo", [18, TURN, 18, 10], "length")),
        ([10, TURN, 14, 18], ["<turn>\n"], ("foo", [10], "stop")),
        ([10, TURN, 18, 14], ["<turn>\n"], ("foox\n", [10, TURN, 18, 14], "length")),
        ([10, TURN, END, 18], ["<turn><end>"], ("foo", [10], "stop")),
        ([10, TURN, 10, 18], ["o<turn>f"], ("fo", [10], "stop")),
        ([10, TURN], ["<turn>\n"], ("foo", [10, TURN], "length")),
        # The longer name wins where one is the start of another.
        ([10, GAP, 18], ["<turn>x"], ("foo", [10], "stop")),
        ([10, GAP, 18], ["<turn>"], ("foox", [10, GAP, 18], "length")),
        # A name that is written letter by letter is text.
        ([10, 18], ["ox<turn>"], ("foox", [10, 18], "length")),
        # What was held back comes before it.
        ([10, 30, 31, TURN, 18], ["<turn>"], ("fooé", [10, 30, 31], "stop")),
        ([10, 30, 31, TURN, 18], ["é<turn>"], ("foo", [10], "stop")),
        ([10, 30, 31, TURN, 14], ["<turn>\n"], ("fooé", [10, 30, 31], "stop")),
        ([10, 30, 31, TURN, 18], ["<turn>\n"], ("fooéx", [10, 30, 31, TURN, 18], "length")),
    ],
)
def test_a_stop_string_names_special_tokens(
    token_ids: list[int], stops: list[str], expected: tuple[str, list[int], str], size: int
) -> None:
    assert run_special(token_ids, *stops, size=size) == expected


def test_special_tokens_stop_nothing_before_min_tokens() -> None:
    assert run_special([TURN, 10, TURN, 18], "<turn>", sampling=Sampling(min_tokens=2)) == (
        "foo",
        [TURN, 10],
        "stop",
    )


def test_an_end_id_is_no_less_one_when_a_stop_string_names_it() -> None:
    ended = run_special([10, END, 18], "<end>", end_token_ids=frozenset({END}))
    assert ended == run_special([10, END, 18], "<end>") == ("foo", [10], "stop")


def test_a_name_that_the_model_writes_itself_stops_too() -> None:
    pieces = {1: "a<", 2: "turn", 3: ">", 4: "b"}
    detokenizer = PieceDetokenizer(pieces)
    detokenizer.hidden_tokens = SPECIAL
    request = Request(request_id="r", prompt_token_ids=(1,), max_tokens=4, stop_strings=("<turn>",))
    state = RequestState(request, LIMITS, detokenizer)
    chunk = state.accept([1, 2, 3, 4], num_draft_tokens=3)
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("a", (1,), "stop")


def test_an_end_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="^token id 300 is outside the vocabulary of 300$"):
        run([10], end_token_ids=frozenset({300}))
