"""Prompt lookup: draft tokens that are copied from the text, where it repeats itself.

What followed the last tokens where they stood before is taken to follow again (Saxena 2023, prompt
lookup decoding; "ngram" in vLLM). It takes no model, so verification is all that it costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LONGEST, SHORTEST = 4, 2
"""Tokens at the end of the text that are looked for; more of them before fewer. Guesses."""

_DECAY = 0.7  # weight of a token after each later one: texts begin and end to repeat themselves
_PRIOR = (0.25, 0.75)  # copied tokens, right and wrong, that a new request begins with: a guess


class PromptLookup:
    """The text of one request, what it suggests as the next tokens, and how often that was right.

    Whether a copy would have been right is known of every token that was emitted, so no trial is
    needed.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        """token_ids is the prompt, of one token at least."""
        self._tokens = np.array(token_ids, dtype=np.int32)
        self.length = len(token_ids)
        """Tokens of the text so far."""
        self._right, self._wrong = _PRIOR

    @property
    def acceptance_probability(self) -> float:
        """The estimate of a copied token's chance, after right ones."""
        return self._right / (self._right + self._wrong)

    def copy(self, num_tokens: int) -> list[int]:
        """Returns the tokens that followed the latest place that ends as the text does.

        Where fewer than num_tokens stand between that place and the end of the text, they are
        repeated. Without such a place the last token is.
        """
        distance = self._distance()
        after = self.length - distance + np.arange(num_tokens) % distance
        copied: list[int] = self._tokens[after].tolist()
        return copied

    def _distance(self) -> int:
        """Returns how far back the latest place is that ends in the most of the last tokens."""
        tokens, last = self._tokens[: self.length], self.length - 1
        matched = np.zeros(last, dtype=np.int8)  # at each earlier place
        is_same = np.ones(last, dtype=bool)
        for back in range(min(LONGEST, last)):
            is_same[:back] = False
            is_same[back:] &= tokens[: last - back] == tokens[last - back]
            matched += is_same
        if matched.max(initial=0) < SHORTEST:
            return 1
        return int(matched[::-1].argmax()) + 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds what was emitted, and remembers how far a copy was right, or would have been."""
        num_new = len(token_ids)
        if not num_new:
            return
        pairs = zip(self.copy(num_new), token_ids, strict=True)
        num_right = next((i for i, (copied, real) in enumerate(pairs) if copied != real), num_new)
        decay = _DECAY**num_new
        self._right = self._right * decay + num_right
        self._wrong = self._wrong * decay + (num_right < num_new)
        length = self.length + num_new
        if length > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * length)
        self._tokens[self.length : length] = token_ids
        self.length = length
