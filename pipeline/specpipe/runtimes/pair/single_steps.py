"""Steps in which the host asks both engines for logits and chooses tokens itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specpipe.runtimes.pair.costs import CostTable, timed
from specpipe.runtimes.pair.drafting import Drafting, RunningSequences
from specpipe.runtimes.pair.engine import Engine, SequenceId
from specpipe.runtimes.pair.sampler import Drafted, RoundResult, Sampler
from specpipe.runtimes.pair.scheduling import Piece, score, uncached


class Verified(NamedTuple):
    """What a step said of one request; num_draft_cached tokens the draft had cached then."""

    running: RunningSequences
    drafted: Drafted
    result: RoundResult
    num_draft_cached: int


@dataclass(frozen=True)
class Stepped:
    """What came of a step; failed: requests that had an unusable row in their prompts."""

    verified: Sequence[Verified]
    failed: Sequence[RunningSequences]


class SingleSteps:
    """The engines and the sampler of a pair."""

    def __init__(
        self,
        draft: Engine,
        target: Engine,
        sampler: Sampler,
        drafting: Drafting,
        costs: CostTable | None,
    ) -> None:
        self._draft, self._target, self._sampler = draft, target, sampler
        self._drafting, self._costs = drafting, costs

    def run(
        self,
        decoding: Sequence[RunningSequences],
        prefill: Sequence[Piece],
        *,
        num_beside: int = 0,
    ) -> Stepped:
        """Runs one forward of the target over all requests, and up to K of the draft before it.

        num_beside  others are in rounds
        """
        # The draft reads along while the target still reads the prompt.
        self._drafting.read_along(
            [(p.running, self._target.length(p.running.target_sequence)) for p in prefill]
        )
        drafted = self._drafting.draft(decoding, num_beside=num_beside)
        batch: list[tuple[SequenceId, Sequence[int]]] = []
        num_logits = []
        for running, draft in zip(decoding, drafted, strict=True):
            unread = uncached(running, self._target)
            batch.append((running.target_sequence, [*unread, *draft.token_ids]))
            num_logits.append(len(draft.token_ids) + 1)
        num_verified = sum(num_logits)
        for piece in prefill:
            batch.append((piece.running.target_sequence, piece.token_ids))
            num_logits.append(len(piece.token_ids) if piece.is_scored else 0)
        num_cached = [self._drafting.num_cached(r) for r in decoding]
        num_rows = len(num_logits) * max(num_logits)
        with timed(self._costs, "target", None if prefill or num_beside else num_rows):
            logits = self._target.forward(batch, num_logits)
            results = self._sampler.verify(logits[:num_verified], drafted) if decoding else []
        parts = zip(decoding, drafted, results, num_cached, strict=True)
        return Stepped(
            [Verified(*part) for part in parts],
            score(prefill, logits[num_verified:], self._sampler),
        )

    def cut_back(self, verified: Verified, num_valid: int) -> None:
        """Forgets what both caches hold beyond the first num_valid tokens."""
        running = verified.running
        self._target.truncate(running.target_sequence, num_valid)
        if running.draft_sequence is not None and verified.num_draft_cached > num_valid:
            self._draft.truncate(running.draft_sequence, num_valid)
