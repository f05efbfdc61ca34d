"""Prompt lookup: draft tokens that are copied from the text, where it repeats itself.

What followed the last tokens where they stood before is taken to follow again (Saxena 2023, prompt
lookup decoding; "ngram" in vLLM). It takes no model, so verification is all that it costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LONGEST, SHORTEST = 4, 1
"""Tokens at the end of the text that are looked for; more of them before fewer. Guesses; for each
number `PromptLookup` has a table of its own.
"""

_LEVELS = {0: 0.03, 1: 0.3, 2: 0.5, 3: 0.65, 4: 0.75, 6: 0.8, 8: 0.82, 12: 0.85, 16: 0.9, 24: 0.95}
"""By how many tokens match at least: the chance of the next, as long as nothing was seen. Guesses
between source files, and what a small model writes without end.
"""
_AFTER_MISS = 0.2
"""The chance of a token after one that was not what a copy would have had. A guess."""
_DOUBT = 4.0  # observations that a guess counts for
_DECAY = 0.998  # weight of an observation of a level after each later one
MOST_COPIED = 32
"""Tokens of a copy at most: no draft is longer."""


class CopyOdds:
    """How likely copied tokens are right, by how many tokens before them match: of all requests of
    a pair.

    Whether a copy would have been right is known of every token that was emitted, so no trial is
    needed; and a request need not find out by itself what others have.
    """

    def __init__(self) -> None:
        levels = list(_LEVELS)
        self._most = levels[-1]
        self._level = [sum(m >= level for level in levels) - 1 for m in range(self._most + 1)]
        self._right = [_DOUBT * chance for chance in _LEVELS.values()]
        self._all = [_DOUBT] * len(levels)
        self._right_after_miss, self._all_after_miss = _DOUBT * _AFTER_MISS, _DOUBT
        matched = np.arange(self._most + MOST_COPIED + 2)
        self._levels = np.array(self._level)[np.minimum(matched, self._most)]
        self._sums: npt.NDArray[np.float64] | None = None

    def observe(self, num_matched: int, is_right: bool, *, follows: bool = True) -> None:
        """Takes in whether the token that followed was the one that a copy would have had.

        follows  whether the token before it was, too
        """
        level = self._level[num_matched if num_matched < self._most else self._most]
        self._right[level] = self._right[level] * _DECAY + is_right
        self._all[level] = self._all[level] * _DECAY + 1.0
        if not follows:
            self._right_after_miss = self._right_after_miss * _DECAY + is_right
            self._all_after_miss = self._all_after_miss * _DECAY + 1.0
        self._sums = None

    def expected_tokens(
        self, num_matched: Sequence[int], num_ahead: Sequence[int], most: int = MOST_COPIED
    ) -> npt.NDArray[np.float64]:
        """Returns the tokens that a step should emit: [texts, copied tokens], none of them first.

        num_ahead  tokens that come before the step and are not known yet; where one of them is not
                   what a copy would have, the step comes behind one that is not
        most       copied tokens, up to MOST_COPIED
        """
        sums = self._log_sums()
        matched = np.minimum(num_matched, self._most)
        ahead = matched + np.minimum(num_ahead, MOST_COPIED)
        first = np.minimum(ahead, self._most)[:, None]
        copied: npt.NDArray[np.float64] = np.exp(sums[first + np.arange(most + 1)] - sums[first])
        are_right = np.exp(sums[ahead] - sums[matched])[:, None]
        two = sums[SHORTEST + 1 : SHORTEST + 1 + most]  # what matches after the first of a copy
        after_miss = self._right_after_miss / self._all_after_miss * np.exp(two - two[:1])
        copied[:, 1:] = are_right * copied[:, 1:] + (1.0 - are_right) * after_miss
        return copied.cumsum(axis=1)

    def _log_sums(self) -> npt.NDArray[np.float64]:
        """Sums of the logarithms of chances, up to each number of tokens that match."""
        if self._sums is None:
            chance = np.array(self._right) / np.array(self._all)
            logs = np.log(np.maximum(chance, 1e-9)[self._levels])
            self._sums = np.concatenate([[0.0], np.cumsum(logs)])
        return self._sums


_TOKEN_BITS = 32
_FOUR, _THREE, _TWO = ((1 << _TOKEN_BITS * num) - 1 for num in (LONGEST, 3, 2))
"""Masks of so many tokens."""


class PromptLookup:
    """The text of one request, and what it suggests as the next tokens."""

    def __init__(self, token_ids: Sequence[int], odds: CopyOdds | None = None) -> None:
        """token_ids is the prompt, of one token at least; odds learn from what is emitted."""
        self._tokens: list[int] = []
        self._odds = odds
        self._last = _FOUR  # its last tokens, in one number; before it stand four that are no ids
        # By the last four, three, two tokens and one: where each beginning of the text ends, the
        # latest.
        self._fours: dict[int, int] = {}
        self._threes: dict[int, int] = {}
        self._twos: dict[int, int] = {}
        self._ones: dict[int, int] = {}
        self._next = 0
        self.num_matched = 0
        """Tokens at the end of the text that match those before what would be copied next."""
        for token_id in token_ids:
            self._append(token_id, follows=False)
        self._follows = True  # of a prompt nobody knows

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return len(self._tokens)

    def copy(self, num_tokens: int) -> list[int]:
        """Returns the tokens that followed the latest place that ends as the text does.

        Where fewer than num_tokens stand between that place and the end of the text, they are
        repeated. Without such a place the last token is.
        """
        distance = self.length - self._next
        return [self._tokens[self._next + i % distance] for i in range(num_tokens)]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds what was emitted; the odds learn whether copies would have been right."""
        for token_id in token_ids:
            is_right = self._tokens[self._next] == token_id
            if self._odds is not None:
                self._odds.observe(self.num_matched, is_right, follows=self._follows)
            self._append(token_id, follows=is_right)
            self._follows = is_right

    def _append(self, token_id: int, *, follows: bool) -> None:
        """Adds a token, and finds the latest place that ends in the most of the last ones.

        follows  whether it is what would have been copied
        """
        self._tokens.append(token_id)
        length = len(self._tokens)
        four = self._last = (self._last << _TOKEN_BITS | token_id) & _FOUR
        three, two = four & _THREE, four & _TWO
        if (end := self._fours.get(four)) is not None:
            self.num_matched = max(LONGEST, self.num_matched + 1) if follows else LONGEST
        elif (end := self._threes.get(three)) is not None:
            self.num_matched = 3
        elif (end := self._twos.get(two)) is not None:
            self.num_matched = 2
        elif (end := self._ones.get(token_id)) is not None:
            self.num_matched = 1
        else:
            self.num_matched, end = 0, length - 1
        self._next = end
        self._fours[four] = self._threes[three] = self._twos[two] = self._ones[token_id] = length
