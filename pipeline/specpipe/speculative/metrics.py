"""Counts of drafting and acceptance, for one request or for many."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class AcceptanceCounts:
    """What the steps of one or many requests drafted and accepted."""

    num_steps: int = 0
    num_undrafted_steps: int = 0
    """Steps that ran without a draft token; they are no evidence for or against the draft."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    """Number of drafted steps by accepted draft tokens."""

    def record(self, *, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Counts one step."""
        self.num_steps += 1
        if not num_draft_tokens:
            self.num_undrafted_steps += 1
            return
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.histogram[num_accepted_tokens] += 1

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens a step emits, the bonus or recovered token included; None before the first
        step.
        """
        return 1 + self.num_accepted_tokens / self.num_steps if self.num_steps else None
