"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from specpipe.speculative.stop_strings import StopStrings


def whole_and_held(text: str, strings: list[str]) -> tuple[int | None, int]:
    """The earliest start of what ends in the text, and the longest end that begins a string."""
    starts = [text.find(string) for string in strings if string in text]
    held = max((n for s in strings for n in range(len(s)) if text.endswith(s[:n])), default=0)
    return min(starts, default=None), held


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=5),
    st.lists(st.text("abc", max_size=6), max_size=8),
)
def test_it_finds_what_a_search_of_the_whole_text_finds(
    strings: list[str], pieces: list[str]
) -> None:
    search = StopStrings(strings)
    for number, piece in enumerate(pieces):
        before = "".join(pieces[:number])
        at = search.find(piece)
        start, held = whole_and_held(before + piece, strings)
        assert (None if at is None else len(before) + at) == start
        if at is not None:
            return
        assert search.num_held_chars == held


def test_forgotten_text_is_no_part_of_a_stop_string() -> None:
    search = StopStrings(["abc"])
    assert search.find("ab") is None
    search.forget()
    assert (search.find("c"), search.num_held_chars) == (None, 0)
    assert search.find("abc") == 0


def test_many_long_strings_that_the_text_nearly_is_take_linear_time() -> None:
    """The search of the whole text by each string took 46 s here."""
    text = "".join(a + b for a, b in itertools.islice(itertools.product("abcd" * 13, "xyz"), 650))
    strings = [f"{text[n:]}{n}" for n in range(301)]
    start_s = time.process_time()
    search = StopStrings(strings)
    for _ in range(4):
        for char in text:
            assert search.find(char) is None
    assert time.process_time() - start_s < 15
