"""One output, followed by its guide: masks of draft rows and target rows, and what is forced."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from llguidance import LLMatcher

from specpipe.speculative.guide import Mask
from specpipe.text.guides.grammar import reason_of

_WORD_BITS = 32


class GuideMatcher:
    """A `Matcher` over llguidance's.

    That is ahead of the output by draft tokens, which a mask for the target finds as the draft left
    them: no mask is computed twice, and what was not accepted is rolled back.
    """

    def __init__(
        self, prototype: LLMatcher, *, end_id: int, end_token_ids: Collection[int], vocab_size: int
    ) -> None:
        """prototype is at the start, and stays there; its only end token is end_id."""
        self._prototype, self._matcher = prototype, prototype.deep_copy()
        self._end_id, self._end_token_ids, self._vocab_size = end_id, end_token_ids, vocab_size
        self._accepted: list[int] = []
        self._ahead: list[int] = []
        self._masks: dict[int, Mask | None] = {}  # by number of draft tokens ahead
        self.is_over = False
        self.fault: str | None = None

    def mask(self, draft_token_ids: Sequence[int]) -> Mask | None:
        if not self._go_to(draft_token_ids):
            return None
        depth = len(draft_token_ids)
        if depth not in self._masks:
            self._go_back(depth)
            self._masks[depth] = self._compute()
        return self._masks[depth]

    def forced(self, most: int, after: Sequence[int] = ()) -> list[int]:
        token_ids: list[int] = []
        while len(token_ids) < most:
            mask = self.mask([*after, *token_ids])
            only = None if mask is None else _only_id(mask)
            if only is None or only in self._end_token_ids:
                break
            token_ids.append(only)
        return token_ids

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        self._go_back(0)
        return 0 if self.fault else self._matcher.validate_tokens(list(token_ids))

    def accept(self, token_id: int) -> None:
        self._accepted.append(token_id)
        if self._ahead[:1] == [token_id]:
            del self._ahead[0]
            self._masks = {depth - 1: m for depth, m in self._masks.items() if depth}
        else:
            self._go_back(0)
            self._masks = {}
            self._matcher.consume_token(token_id)
        if self._matcher.is_error():
            self._start_again()
        self.is_over = not self._ahead and self.fault is None and self._matcher.is_stopped()

    def _go_to(self, draft_token_ids: Sequence[int]) -> bool:
        """Has the matcher consume draft tokens; False where it takes one of them no more."""
        num_shared = 0
        for ahead, token_id in zip(self._ahead, draft_token_ids, strict=False):
            if ahead != token_id:
                break
            num_shared += 1
        if num_shared == len(draft_token_ids):
            return True
        self._go_back(num_shared)
        for token_id in draft_token_ids[num_shared:]:
            if self.fault or self._matcher.validate_tokens([token_id]) == 0:
                return False
            self._matcher.consume_token(token_id)
            self._ahead.append(token_id)
        return True

    def _go_back(self, depth: int) -> None:
        """Takes back all draft tokens but the first `depth`."""
        num_back = len(self._ahead) - depth
        if num_back <= 0:
            return
        del self._ahead[depth:]
        self._masks = {d: mask for d, mask in self._masks.items() if d <= depth}
        if not self._matcher.rollback(num_back):
            self._start_again()

    def _compute(self) -> Mask | None:
        """Returns the mask where the matcher stands."""
        if self.fault is None and not self._matcher.is_error() and self._matcher.is_stopped():
            return None
        num_words = -(-(self._end_id + 1) // _WORD_BITS)
        mask = np.zeros(num_words, dtype=np.int32)
        if self.fault is None:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self.fault is not None or self._matcher.is_error():
            # Out of bounds: behind draft tokens the output may never get there.
            mask[:] = 0
            self._start_again()
            return mask
        is_accepting = _has(mask, self._end_id)
        for token_id in (self._end_id, *self._end_token_ids):
            _set(mask, token_id, is_accepting and token_id != self._end_id)
        self._cut(mask)
        return mask

    def _cut(self, mask: Mask) -> None:
        """Leaves out what is not the pair's."""
        first, bit = divmod(self._vocab_size, _WORD_BITS)
        if first < len(mask):
            mask[first] &= (1 << bit) - 1
            mask[first + 1 :] = 0

    def _start_again(self) -> None:
        """Replaces llguidance's matcher, which never leaves an error, by one that stands there."""
        reason = reason_of(self._matcher)
        self._matcher = self._prototype.deep_copy()
        self._matcher.consume_tokens([*self._accepted, *self._ahead])
        if self._matcher.is_error() or not self._ahead:
            self.fault = reason


def _only_id(mask: Mask) -> int | None:
    """Returns the one id that a mask allows; None where it allows none or several."""
    places = np.flatnonzero(mask)
    if len(places) != 1:
        return None
    bits = int(mask[places[0]]) & 0xFFFFFFFF
    return None if bits & (bits - 1) else int(places[0]) * _WORD_BITS + bits.bit_length() - 1


def _has(mask: Mask, token_id: int) -> bool:
    return bool(int(mask[token_id // _WORD_BITS]) >> (token_id % _WORD_BITS) & 1)


def _set(mask: Mask, token_id: int, is_allowed: bool) -> None:
    place, bit = divmod(token_id, _WORD_BITS)
    if place >= len(mask):
        return
    words = mask.view(np.uint32)
    one = np.uint32(1 << bit)
    words[place] = words[place] | one if is_allowed else words[place] & ~one
