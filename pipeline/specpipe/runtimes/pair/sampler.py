"""What a pair asks of a sampler, and what the two exchange in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specpipe.runtimes.pair.engine import Logits
from specpipe.speculative.request import TopLogProbs
from specpipe.speculative.state import RequestState


@dataclass(frozen=True)
class Drafted:
    """The draft tokens of one request in one step, and what the accept test needs of their rows."""

    state: RequestState
    token_ids: list[int] = field(default_factory=list)
    probs: list[Any] = field(default_factory=list)
    """The probabilities [V] that each token was drawn from; empty for requests verified by
    matching, and for copied tokens, which had no other.
    """
    is_copied: bool = False
    """The tokens are those of a text and not the draft's."""
    is_predicted: bool = False
    """That text is the request's prediction."""
    num_forced: int = 0
    """The first tokens, that the request's guide left no choice of; they have no `probs`."""


@dataclass(frozen=True)
class RoundResult:
    """What one draft-verify round of a request lets out.

    token_ids  accepted draft tokens and the target's own; None where its first row was unusable
    """

    token_ids: Sequence[int] | None
    num_draft_tokens: int = 0
    """Those that were judged: fewer than drafted when a later row was unusable."""
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

    def verify(self, logits: Logits, drafted: Sequence[Drafted]) -> list[RoundResult]:
        """Runs the accept test of each request on its K + 1 rows of logits [sum(K + 1), V]."""

    def score(self, logits: Logits, token_ids: Sequence[int], num_top: int) -> Scored | None:
        """Returns the log-probability of each of N tokens in its row of logits [N, V], and as many
        of the likeliest; None where a row is unusable.
        """
