"""What the text of an answer must be: a JSON schema, a regular expression, a grammar, a choice.

What follows an output by its guide is made elsewhere; here is what a loop asks of it. V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

GuideType = Literal["json", "json_schema", "regex", "ebnf_grammar", "choice", "lark"]
"""The first four are those of NVIDIA's `guided_decoding_guide_type`."""

Mask = npt.NDArray[np.int32]
"""The token ids that are allowed, a bit each: of id 0 the lowest of the first word, and so on. Ids
beyond the last word are not.
"""


@dataclass(frozen=True, kw_only=True)
class Guide:
    """A guide as a client sent it.

    text  the schema as JSON, the expression, the grammar (GBNF, or Lark as llguidance reads it), a
          JSON array of texts; "" for `json`, any JSON value
    """

    type: GuideType
    text: str = ""


class Matcher(Protocol):
    """Follows one output by its guide; draft tokens are tried, and taken back as it turns out."""

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow the tokens that were accepted, but an end id."""

    @property
    def fault(self) -> str | None:
        """Why the guide cannot be followed any further; all masks are then empty."""

    def mask(self, draft_token_ids: Sequence[int]) -> Mask | None:
        """Returns what may follow the accepted tokens and these draft tokens.

        None where it does not matter: draft tokens that the guide does not allow, or that are all
        it takes, have none after them that could stand.
        """

    def forced(self, most: int, after: Sequence[int] = ()) -> list[int]:
        """Returns the tokens, at most so many, that the guide leaves no choice of behind the
        accepted tokens and these draft tokens.
        """

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Returns how many of these tokens could follow those that were accepted."""

    def accept(self, token_id: int) -> None:
        """Takes in the next token of the output, which is no end id."""


class Guides(Protocol):
    """Makes matchers for the vocabulary of one pair; any thread may call it."""

    def compile(self, guide: Guide) -> None:
        """Does of `matcher` what takes long; RequestError for a guide that cannot be followed."""

    def matcher(self, guide: Guide, *, end_token_ids: frozenset[int], vocab_size: int) -> Matcher:
        """Returns a matcher at the start of an output.

        end_token_ids are allowed where the guide accepts, and nowhere else; ids from vocab_size on
        are not the pair's.
        """


def allowed_ids(mask: Mask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Returns [V] whether each id is allowed."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size].view(np.bool_)
    return np.pad(bits, (0, vocab_size - len(bits))) if len(bits) < vocab_size else bits
