"""Predicted output: draft tokens that are copied from a text that the client expects.

An answer that changes little of a text that the client has, as an edited file does, follows that
text, leaves it, and comes back to it (OpenAI's `prediction`). As in prompt lookup, it takes no
model, so verification is all that a copy costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Both lengths were tried on edits of source files: lines that change, come and go, other names.
LONGEST, SHORTEST = 8, 2
"""Tokens at the end of the output that are looked for, where it has left the prediction; more of
them before fewer.
"""

_DECAY = 0.9  # weight of a token after each later one: a memory of some ten
_PRIOR = (1.5, 0.5)  # copied tokens, right and wrong, that a new request begins with: a guess


class Prediction:
    """What the output of one request is expected to be, and where in it the output stands.

    Whether a copy would have been right is known of every token that was emitted, so no trial is
    needed.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = np.array(token_ids, dtype=np.int64)
        self._next = 0  # the place of the token that is expected; of the one that did not come
        self._is_followed = True
        self._last: list[int] = []  # of the output, up to LONGEST tokens
        self._right, self._wrong = _PRIOR

    @property
    def acceptance_probability(self) -> float:
        """The estimate of a copied token's chance, after right ones."""
        return self._right / (self._right + self._wrong)

    def copy(self, num_tokens: int) -> list[int]:
        """Returns the next tokens, at most num_tokens; none while the output is elsewhere."""
        if not self._is_followed or num_tokens < 1:
            return []
        copied: list[int] = self._tokens[self._next : self._next + num_tokens].tolist()
        return copied

    def extend(self, token_ids: Sequence[int]) -> None:
        """Follows what was emitted, and looks for where the output comes back."""
        for token_id in token_ids:
            self._last = [*self._last[1 - LONGEST :], token_id]
            if self._is_followed:
                self._is_followed = self.copy(1) == [token_id]
                self._right = self._right * _DECAY + self._is_followed
                self._wrong = self._wrong * _DECAY + (not self._is_followed)
                self._next += self._is_followed
            if not self._is_followed:
                self._find()

    def _find(self) -> None:
        """Looks for the last tokens, first behind the place where the output left the text."""
        tokens = self._tokens
        matched = np.zeros(len(tokens), dtype=np.int8)  # at each place
        is_same = np.ones(len(tokens), dtype=bool)
        for back, token_id in enumerate(self._last[::-1][: len(tokens)]):
            is_same[:back] = False
            is_same[back:] &= tokens[: len(tokens) - back] == token_id
            matched += is_same
        most = matched.max(initial=0)
        if most < SHORTEST:
            return
        places = np.flatnonzero(matched == most)
        later = places[places >= self._next]
        self._next = int(later[0] if len(later) else places[-1]) + 1
        self._is_followed = True
