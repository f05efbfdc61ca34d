"""What a pair asks of a sampler, and what the two exchange in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from specpipe.runtimes.pair.engine import Logits
from specpipe.speculative.request import TopLogProbs
from specpipe.speculative.state import RequestState


@dataclass(eq=False)  # frozen, it would take twice as long to make
class Drafted:
    """The draft tokens of one request in one step, and what the accept test needs of their rows."""

    state: RequestState
    token_ids: list[int] = field(default_factory=list)
    probs: dict[int, Any] = field(default_factory=dict)
    """The probabilities [V] that a token was drawn from, by its place; none for requests verified
    by matching, and for copied and forced tokens, which had no other.
    """
    is_copied: bool = False
    """The tokens are those of a text and not the draft's."""
    is_predicted: bool = False
    """That text is the request's prediction."""
    forced: set[int] = field(default_factory=set)
    """The places of tokens that the request's guide left no choice of."""

    @property
    def num_drawn(self) -> int:
        """Tokens that the draft gave."""
        return len(self.token_ids) - len(self.forced)

    def add_forced(self) -> list[int]:
        """Adds and returns what the guide forces behind the tokens that are there."""
        token_ids = self.state.drafts.forced(self.token_ids)
        first = len(self.token_ids)
        self.forced.update(range(first, first + len(token_ids)))
        self.token_ids.extend(token_ids)
        return token_ids


class RoundResult(NamedTuple):
    """What one draft-verify round of a request lets out.

    token_ids         accepted draft tokens and the target's own; None where its first row was
                      unusable
    num_draft_tokens  those that were judged: fewer than drafted when a later row was unusable
    """

    token_ids: Sequence[int] | None
    num_draft_tokens: int = 0
    log_probs: Sequence[float] = ()
    top_log_probs: Sequence[TopLogProbs] = ()


@dataclass(frozen=True)
class Scored:
    """What a model says of tokens that are given."""

    log_probs: Sequence[float]
    top_log_probs: Sequence[TopLogProbs] = ()


class Sampler(Protocol):
    """Chooses tokens from logits, for many requests at once."""

    def draft(self, logits: Logits, drafted: Sequence[Drafted]) -> list[bool]:
        """Adds one draft token to each request from its row of logits [B, V].

        Returns for each whether it got one: with a NaN it drafts no further in this step.
        """

    def draft_in_pass(
        self, logits: Logits, drafted: Sequence[Drafted], lengths: Sequence[int]
    ) -> None:
        """Adds up to lengths[i] draft tokens to each request, from as many of the rows of logits
        [sum(lengths), V], one after the other.

        A token that a guide forces between them takes the place of one, whose row is left out.
        With a NaN a request drafts no further.
        """

    def verify(self, logits: Logits, drafted: Sequence[Drafted]) -> list[RoundResult]:
        """Runs the accept test of each request on its K + 1 rows of logits [sum(K + 1), V]."""

    def score(self, logits: Logits, token_ids: Sequence[int], num_top: int) -> Scored | None:
        """Returns the log-probability of each of N tokens in its row of logits [N, V], and as many
        of the likeliest; None where a row is unusable.
        """
