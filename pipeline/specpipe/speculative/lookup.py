"""Prompt lookup: draft tokens that are copied from the text, where it repeats itself.

What followed the last tokens where they stood before is taken to follow again (Saxena 2023, prompt
lookup decoding; "ngram" in vLLM). It takes no model, so verification is all that it costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LONGEST, SHORTEST = 4, 2
"""Tokens at the end of the text that are looked for; more of them before fewer. Guesses."""

_LEVELS = {0: 0.03, 2: 0.5, 3: 0.65, 4: 0.75, 6: 0.8, 8: 0.82, 12: 0.85, 16: 0.9, 24: 0.95}
"""By how many tokens match at least: the chance of the next, as long as nothing was seen. Guesses
between source files, and what a small model writes without end.
"""
_DOUBT = 4.0  # observations that the guess counts for
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
        matched = np.arange(self._most + MOST_COPIED + 2)
        self._levels = np.array(self._level)[np.minimum(matched, self._most)]
        after = np.arange(MOST_COPIED + 2)
        self._ends = np.arange(self._most + 1)[:, None] + after
        self._chances: npt.NDArray[np.float64] | None = None

    def observe(self, num_matched: int, is_right: bool) -> None:
        """Takes in whether the token that followed was the one that a copy would have had."""
        level = self._level[num_matched if num_matched < self._most else self._most]
        self._right[level] = self._right[level] * _DECAY + is_right
        self._all[level] = self._all[level] * _DECAY + 1.0
        self._chances = None

    def expected_tokens(
        self, num_matched: Sequence[int], num_ahead: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        """Returns the tokens that a step should emit: [texts, copied tokens], none of them first.

        num_ahead  tokens that come before the step and are not known yet; where one of them is not
                   what a copy would have, nothing is expected of copying
        """
        chances = self._all_right()
        matched = np.minimum(num_matched, self._most)
        ahead = np.minimum(num_ahead, MOST_COPIED)
        copied = chances[np.minimum(matched + ahead, self._most), : MOST_COPIED + 1]
        copied[:, 1:] *= chances[matched, ahead][:, None]
        return copied.cumsum(axis=1)

    def _all_right(self) -> npt.NDArray[np.float64]:
        """Chances that some next tokens are all right: [matched, tokens]."""
        if self._chances is None:
            chance = np.array(self._right) / np.array(self._all)
            ends = np.concatenate(
                [[0.0], np.cumsum(np.log(np.maximum(chance, 1e-9)[self._levels]))]
            )
            self._chances = np.exp(ends[self._ends] - ends[: self._most + 1, None])
        return self._chances


class PromptLookup:
    """The text of one request, and what it suggests as the next tokens."""

    def __init__(self, token_ids: Sequence[int], odds: CopyOdds | None = None) -> None:
        """token_ids is the prompt, of one token at least; odds learn from what is emitted."""
        self._tokens = list(token_ids)
        self._odds = odds
        # By its last tokens, where each beginning of the text ends, the latest.
        self._ends: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (num, self._ends_of(num)) for num in range(LONGEST, SHORTEST - 1, -1)
        ]
        self._next = 0
        self.num_matched = 0
        """Tokens at the end of the text that match those before what would be copied next."""
        self._look_up(followed=False)

    def _ends_of(self, num: int) -> dict[tuple[int, ...], int]:
        """Returns where each beginning of the text but the whole ends, by its last num tokens."""
        shifted = (self._tokens[i:] for i in range(num))
        ends = range(num, self.length)
        return dict(zip(zip(*shifted, strict=False), ends, strict=False))

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
        tokens, odds = self._tokens, self._odds
        for token_id in token_ids:
            is_right = tokens[self._next] == token_id
            if odds is not None:
                odds.observe(self.num_matched, is_right)
            tokens.append(token_id)
            self._look_up(followed=is_right)

    def _look_up(self, *, followed: bool) -> None:
        """Finds the latest place before that ends in the most of the last tokens, and enters this
        one.
        """
        last = tuple(self._tokens[-LONGEST:])
        length, num_last = len(self._tokens), len(last)
        num_matched, found = 0, length - 1
        for num, ends in self._ends:
            if num > num_last:
                continue
            key = last[num_last - num :]
            if not num_matched and (end := ends.get(key)) is not None:
                is_longer = followed and num == LONGEST
                num_matched, found = max(num, self.num_matched + 1) if is_longer else num, end
            ends[key] = length
        self.num_matched, self._next = num_matched, found
