"""What requests to the engines' Triton models cost, for pairs that adapt their draft length."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from specpipe.runtimes.pair.costs import CostTable
from specpipe.speculative.adaptive import StepCosts

MIN_TIMED_TOKENS = 8
"""Tokens of the target alone that tell the time of one."""


class CallTimes:
    """What drafting and verifying cost at the present load, learned from everybody's rounds.

    Any thread. Times are those of whole requests to a model, so the way there and back is in them.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._lock = threading.Lock()
        self._first: dict[str, float] = {}
        self._table: CostTable | None = None

    def costs(self) -> StepCosts | None:
        """Relative to a plain step; None before each kind of request was timed once."""
        with self._lock:
            return None if self._table is None else self._table.at(1)

    @property
    def lacks_plain_step(self) -> bool:
        """True when a plain step is all that is yet to be timed."""
        with self._lock:
            return self._table is None and self._first.keys() == {"draft", "verify"}

    def observe_draft(self, num_draft_tokens: int, seconds: float) -> None:
        """Learns from a request for draft tokens."""
        self._observe("draft", seconds / num_draft_tokens, 1)

    def observe_verify(self, num_draft_tokens: int, seconds: float) -> None:
        """Learns from a verification."""
        self._observe("verify", seconds, 1 + num_draft_tokens)

    def observe_stream(self, arrivals: Sequence[float]) -> None:
        """Learns from when the tokens of the target alone came; the first waited for the prompt.

        Not from each by itself: two that were read late seem to come at once.
        """
        if len(arrivals) >= MIN_TIMED_TOKENS and arrivals[-1] > arrivals[0]:
            self._observe("plain", (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1), 1)

    def _observe(self, kind: str, seconds: float, num_rows: int) -> None:
        with self._lock:
            if self._table is not None:
                self._table.observe("draft" if kind == "draft" else "target", num_rows, seconds)
                if kind == "plain":
                    self._table.favour_draft()
                return
            self._first[kind] = min(seconds, self._first.get(kind, seconds))
            if len(self._first) == 3:
                self._table = CostTable(
                    self._num_draft_tokens,
                    draft={1: self._first["draft"]},
                    target={
                        1: self._first["plain"],
                        1 + self._num_draft_tokens: self._first["verify"],
                    },
                )
