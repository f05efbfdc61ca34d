"""Who has which page: what holds whatever sequences do, and what goes first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe.runtimes.torch.page_pool import PageKey, PagePool, page_keys

NUM_PAGES, NUM_SLOTS = 6, 3

Text = tuple[int, ...]
"""A prompt, as one number a page."""


def keys_of(text: Text) -> list[PageKey]:
    return [bytes(text[: i + 1]) for i in range(len(text))]


class Sequences:
    """Sequences that read prompts into the pages of a pool, and what they wrote where."""

    def __init__(self) -> None:
        self.pool = PagePool(num_pages=NUM_PAGES, num_slots=NUM_SLOTS)
        self.texts: dict[int, Text] = {}
        self.num_read: dict[int, int] = {}
        self.contents: dict[int, PageKey] = {}

    def start(self, text: Text) -> None:
        """Begins a sequence with one page, or with what is there of its prompt."""
        if self.pool.can_hold(1):
            slot = self.pool.allocate(1)
            self.texts[slot] = text
            self.num_read[slot] = self.pool.share(slot, keys_of(text))

    def read(self, slot: int) -> None:
        """Reads a page more of a prompt, if there is one, where others can find it."""
        index, text = self.num_read[slot], self.texts[slot]
        if index == len(text):
            return
        before = list(self.pool.pages(slot))
        if not self.pool.grow(slot, index + 1):
            assert self.pool.num_available == 0
            assert self.pool.pages(slot) == before
            return
        page = self.pool.pages(slot)[index]
        assert [page in self.pool.pages(other) for other in self.texts].count(True) == 1
        self.contents[page] = keys_of(text)[index]
        self.pool.name(slot, index, keys_of(text)[index])
        self.num_read[slot] += 1

    def end(self, slot: int) -> None:
        self.pool.free(slot)
        del self.texts[slot], self.num_read[slot]

    def check(self) -> None:
        held = {page for slot in self.texts for page in self.pool.pages(slot)}
        assert self.pool.num_available == NUM_PAGES - len(held)
        assert self.pool.num_free_slots == NUM_SLOTS - len(self.texts)
        for slot, text in self.texts.items():
            read = self.pool.pages(slot)[: self.num_read[slot]]
            assert [self.contents[page] for page in read] == keys_of(text)[: len(read)]


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
STEPS = st.lists(
    st.one_of(TEXTS, st.tuples(st.sampled_from(["read", "end"]), st.integers(0, NUM_SLOTS - 1))),
    min_size=20,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_sequence_finds_in_its_pages_what_its_prompt_says(
    steps: list[tuple[object, int]],
) -> None:
    sequences = Sequences()
    for step in steps:
        match step:
            case ("read", slot) if slot in sequences.texts:
                sequences.read(slot)
            case ("end", slot) if slot in sequences.texts:
                sequences.end(slot)
            case (int(), *_):
                sequences.start(step)  # type: ignore[arg-type]
        sequences.check()
    for slot in list(sequences.texts):
        sequences.end(slot)
    sequences.check()


def read_whole(sequences: Sequences, text: Text) -> int:
    sequences.start(text)
    slot = list(sequences.texts)[-1]
    for _ in text:
        sequences.read(slot)
    return slot


def num_cached(sequences: Sequences, *texts: Text) -> list[int]:
    """How many pages are there of prompts that are not begun; this moves none of them."""
    by_key = sequences.pool._by_key
    return [sum(key in by_key for key in keys_of(text)) for text in texts]


def test_what_was_left_first_goes_first_and_of_a_prompt_its_end() -> None:
    """And a page that is found again counts as left when its new user leaves it."""
    sequences = Sequences()
    slots = [read_whole(sequences, text) for text in [(0, 0), (1, 1), (0, 1)]]
    for slot in slots:
        sequences.end(slot)
    # (0, 1) shares the first page of (0, 0): of the six pages one is free
    texts = (0, 0), (1, 1), (0, 1)
    assert num_cached(sequences, *texts) == [2, 2, 2]
    expected = [[1, 2, 2], [1, 1, 2], [1, 0, 2], [1, 0, 1], [0, 0, 0]]
    slot = sequences.pool.allocate(1)
    for num_pages, left in enumerate(expected, 2):
        assert sequences.pool.grow(slot, num_pages)
        assert num_cached(sequences, *texts) == left
    assert not sequences.pool.grow(slot, 7)


def test_cached_pages_are_room_for_a_new_sequence() -> None:
    sequences = Sequences()
    sequences.end(read_whole(sequences, (0, 0, 0, 0)))
    assert sequences.pool.can_hold(6)
    assert not sequences.pool.can_hold(7)
    assert sorted(sequences.pool.pages(sequences.pool.allocate(6))) == [0, 1, 2, 3, 4, 5]


def test_keys_are_of_all_that_comes_before_and_of_the_salt() -> None:
    text = list(range(200))
    keys = page_keys(text, "a")
    assert len(keys) == 3  # of 64 tokens each; the last 8 fill none
    assert page_keys(text[:191], "a") == keys[:2]
    other = page_keys([7, *text[1:]], "a") + page_keys(text, "b") + page_keys(text, "")
    assert len({*keys, *other}) == 12
    assert page_keys([*text[:64], 7, *text[65:]], "a")[0] == keys[0]
