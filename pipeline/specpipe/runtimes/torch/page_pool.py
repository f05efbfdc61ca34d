"""Who has which page of a KV cache, without the pages themselves.

A page is free, held by one sequence or more, or cached: full of a prompt that nobody runs any
more, and there until something needs room. Pages of prompts go by keys, which say all that their
keys and values depend on; a prompt that begins alike begins with the same pages.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from specpipe.runtimes.torch.fused_sizes import PAGE

PageKey = bytes
"""Of a page, and through that of the page before it of all the text up to its end."""

_KEY_BYTES = 16
_SALT, _PAGE = b"salt", b"page"
"""What is hashed, so that no salt passes for a page."""


def page_keys(token_ids: Sequence[int], salt: str) -> list[PageKey]:
    """Returns the keys of the pages that the first tokens of a prompt fill.

    salt  is shared by those whose prompts may begin with each other's pages
    """
    text = salt.encode("utf-8", "surrogatepass")
    key = blake2b(text, digest_size=_KEY_BYTES, person=_SALT).digest()
    keys = []
    for start in range(0, len(token_ids) - PAGE + 1, PAGE):
        content = array("i", token_ids[start : start + PAGE]).tobytes()
        key = blake2b(key + content, digest_size=_KEY_BYTES, person=_PAGE).digest()
        keys.append(key)
    return keys


class PagePool:
    """Pages and slots by number; a slot has the pages of one sequence, in the order of its text."""

    def __init__(self, *, num_pages: int, num_slots: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))[::-1]
        self._free_slots = list(range(num_slots))[::-1]
        self._pages: dict[int, list[int]] = {}  # by slot
        self._num_users = [0] * num_pages
        self._by_key: dict[PageKey, int] = {}
        self._keys: dict[int, PageKey] = {}  # by page
        self._cached: OrderedDict[int, None] = OrderedDict()  # first what goes first

    @property
    def num_available(self) -> int:
        """Pages that nobody holds, cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that wait to be found again."""
        return len(self._cached)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def pages(self, slot: int) -> Sequence[int]:
        """Returns the pages of a sequence."""
        return self._pages[slot]

    def can_hold(self, num_pages: int) -> bool:
        """Returns whether a sequence of so many pages finds a slot and pages now."""
        return bool(self._free_slots) and num_pages <= self.num_available

    def allocate(self, num_pages: int) -> int:
        """Takes a slot with so many pages; `can_hold` must say so."""
        slot = self._free_slots.pop()
        self._pages[slot] = [self._take() for _ in range(num_pages)]
        return slot

    def grow(self, slot: int, num_pages: int) -> bool:
        """Gives a sequence that many pages in all; False, and no change, where there are none."""
        pages = self._pages[slot]
        num_missing = num_pages - len(pages)
        if num_missing > self.num_available:
            return False
        pages += [self._take() for _ in range(num_missing)]
        return True

    def free(self, slot: int) -> None:
        """Gives a slot and its pages back; those that have keys stay cached."""
        # The end of a prompt goes first: without what is before it, it is of no use.
        for page in reversed(self._pages.pop(slot)):
            self._leave(page)
        self._free_slots.append(slot)

    def name(self, slot: int, index: int, key: PageKey) -> None:
        """Lets others find a page of a sequence by its key; it is not written any more.

        Where another page has that key already, this one remains its sequence's own.
        """
        page = self._pages[slot][index]
        if key not in self._by_key:
            assert page not in self._keys, "a page has one content"
            self._by_key[key] = page
            self._keys[page] = key

    def share(self, slot: int, keys: Sequence[PageKey]) -> int:
        """Lets a sequence begin with the pages of these keys, as far as they are there.

        Returns how many that are. They take the place of its own first pages, which it gives back.
        """
        shared = []
        for key in keys:
            if (page := self._by_key.get(key)) is None:
                break
            shared.append(page)
        for page in shared:
            self._cached.pop(page, None)
            self._num_users[page] += 1
        pages = self._pages[slot]
        for page in pages[: len(shared)]:
            self._leave(page)
        pages[: len(shared)] = shared
        return len(shared)

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._by_key[self._keys.pop(page)]
        self._num_users[page] = 1
        return page

    def _leave(self, page: int) -> None:
        self._num_users[page] -= 1
        if self._num_users[page]:
            return
        if page in self._keys:
            self._cached[page] = None
        else:
            self._free.append(page)
