"""Counts of drafting and acceptance, for one request or for many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass
class AcceptanceCounts:
    """What the steps of one or many requests drafted and accepted."""

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_unverified_tokens: int = 0
    """Draft tokens that an engine dropped; they count as neither drafted nor rejected."""
    num_accepted_prediction_tokens: int = 0
    """Draft tokens that were copied from the request's prediction, by what came of them."""
    num_rejected_prediction_tokens: int = 0
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of steps by draft tokens that were judged and those of them accepted."""

    def record(
        self,
        *,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_unverified_tokens: int = 0,
        is_predicted: bool = False,
    ) -> None:
        """Counts one step."""
        self.num_steps += 1
        self.num_unverified_tokens += num_unverified_tokens
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.steps[num_draft_tokens, num_accepted_tokens] += 1
        if is_predicted:
            self.num_accepted_prediction_tokens += num_accepted_tokens
            self.num_rejected_prediction_tokens += num_draft_tokens - num_accepted_tokens

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def histogram(self) -> Counter[int]:
        """Number of drafted steps by accepted draft tokens."""
        return self._added_up(lambda drafted, accepted: (accepted,) if drafted else ())

    @property
    def by_draft_length(self) -> Counter[int]:
        """Number of steps by draft tokens, 0 included."""
        return self._added_up(lambda drafted, accepted: (drafted,))

    @property
    def drafted_at(self) -> Counter[int]:
        """Draft tokens by their position in the step, the first of which is 1."""
        return self._added_up(lambda drafted, accepted: range(1, drafted + 1))

    @property
    def accepted_at(self) -> Counter[int]:
        """Accepted draft tokens by their position in the step."""
        return self._added_up(lambda drafted, accepted: range(1, accepted + 1))

    def _added_up(self, keys: Callable[[int, int], Iterable[int]]) -> Counter[int]:
        """Counts each step under all keys that it has."""
        totals: Counter[int] = Counter()
        for (drafted, accepted), num_steps in self.steps.items():
            for key in keys(drafted, accepted):
                totals[key] += num_steps
        return totals
