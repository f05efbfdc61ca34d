"""One request while it runs: its tokens, its draft length, its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from specpipe.errors import FAULT
from specpipe.speculative.adaptive import DraftLength, StepCosts, promise
from specpipe.speculative.draft_status import PASSING, DraftStatus
from specpipe.speculative.lookup import PromptLookup
from specpipe.speculative.metrics import AcceptanceCounts
from specpipe.speculative.output import Output
from specpipe.speculative.request import (
    Chunk,
    Detokenizer,
    FinishReason,
    Request,
    RequestLimits,
    Statistics,
)

_LOGGER = logging.getLogger(__name__)


class RequestState:
    """A running request. A loop alternates `next_num_draft_tokens` and `accept` until it is
    finished.
    """

    def __init__(
        self,
        request: Request,
        limits: RequestLimits,
        detokenizer: Detokenizer,
        *,
        draft_length: DraftLength | None = None,
        has_lookup: bool = False,
        queue_s: float | None = None,
    ) -> None:
        """draft_length adapts the draft length to acceptance and costs; None keeps it fixed.

        has_lookup  whether draft tokens may be copied from the text, where it does not matter to
                    what is emitted how they were found
        queue_s     how long the request has waited, for its last chunk
        """
        limits.check(request)
        self.request = request
        self.token_ids: list[int] = list(request.prompt_token_ids)
        """Prompt and every token that was accepted; the next step continues it."""
        self.counts = AcceptanceCounts()
        self.finish_reason: FinishReason | None = None
        self._limits = limits
        self._detokenizer = detokenizer
        self._draft_length = draft_length
        self._queue_s = queue_s
        wanted = request.num_draft_tokens
        self._max_num_draft_tokens = limits.max_num_draft_tokens if wanted is None else wanted
        sampling = request.sampling
        self._lookup: PromptLookup | None = None
        if has_lookup and self.is_speculative and (sampling.is_greedy or sampling.is_seeded):
            self._lookup = PromptLookup(request.prompt_token_ids)
        self._draft_status: DraftStatus = "not_started"
        if not self.is_speculative:
            is_configured = limits.max_num_draft_tokens > 0
            self._draft_status = "off_by_request" if is_configured else "off_by_config"
        self._output = Output(request, detokenizer.hidden_tokens)
        self._echoes = request.echo

    @property
    def is_finished(self) -> bool:
        """True after the last chunk."""
        return self.finish_reason is not None

    @property
    def num_output_tokens(self) -> int:
        """Accepted tokens, those whose text is still held back included."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The accepted tokens."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def is_speculative(self) -> bool:
        """False for a request that will never draft."""
        return self._max_num_draft_tokens > 0

    @property
    def names_draft_length(self) -> bool:
        """True for a request that is drafted as it says, neither less by acceptance nor by load."""
        return self.request.num_draft_tokens is not None

    def next_num_draft_tokens(
        self, costs: StepCosts | None = None, *, most: int | None = None, num_ahead: int = 0
    ) -> int:
        """How many tokens to draft in the next step; 0 makes it a plain one-token step.

        Never more than could be emitted beside the target's own token, nor than the draft's context
        holds. Costs, and `most`, what the load allows, are for requests that name no draft length.
        num_ahead says how many tokens there may be by then that were not yet accepted here.
        """
        limit = self._draft_limit(most, num_ahead)
        if limit < 1:
            self._note(self._why_no_draft(most, num_ahead))
            return 0
        if self.names_draft_length or self._draft_length is None or costs is None:
            return limit
        chosen = self._draft_length.choose(limit, costs)
        if not chosen:
            self._note("does_not_pay")
        return chosen

    def skip_draft(self, reason: DraftStatus, *, most: int | None = None) -> None:
        """Tells the request why a step drafts nothing, unless it has a reason of its own."""
        self._note(self._why_no_draft(most) or reason)

    def next_num_copied_tokens(
        self, copying: StepCosts, drafting: StepCosts | None, *, most: int | None = None
    ) -> int:
        """How many draft tokens to copy from the text in the next step; 0: it is not to copy any.

        So it is where drafting promises more, and where the request cannot copy. drafting is None
        while there is no draft. Neither its context nor `most` limits what is copied: both are of
        the draft. A named draft length is copied in full, or drafted.
        """
        if self._lookup is None or self._draft_length is None:
            return 0
        self._lookup.extend(self.token_ids[self._lookup.length :])
        limit, draft_limit = self._token_limit(), self._draft_limit(most)
        if self.names_draft_length:
            drafted = copied = 0.0
            if drafting is not None and draft_limit > 0:
                a = self._draft_length.acceptance_probability
                drafted = promise(a, draft_limit, drafting)
            if limit > 0:
                copied = promise(self._lookup.acceptance_probability, limit, copying)
            return limit if copied > drafted else 0
        promised = 1.0
        if drafting is not None:
            promised = self._draft_length.promise(draft_limit, drafting)
        return self._lookup.choose(limit, copying, instead_of=promised)

    def copy(self, num_tokens: int) -> list[int]:
        """Returns as many draft tokens as `next_num_copied_tokens` said, copied from the text."""
        assert self._lookup is not None
        return self._lookup.copy(num_tokens)

    def _token_limit(self, num_ahead: int = 0) -> int:
        """The most draft tokens that the request has a use for; less than 1: none."""
        return min(self._max_num_draft_tokens, self._num_tokens_left() - num_ahead - 1)

    def _draft_limit(self, most: int | None, num_ahead: int = 0) -> int:
        """The same, of those that the draft has room for and the load allows."""
        limit = min(self._token_limit(num_ahead), self._draft_room(num_ahead))
        return limit if most is None or self.names_draft_length else min(limit, most)

    def _draft_room(self, num_ahead: int = 0) -> int:
        """The most draft tokens that the draft's context has room for."""
        return self._limits.draft_max_seq_len - len(self.token_ids) - num_ahead + 1

    def _why_no_draft(self, most: int | None, num_ahead: int = 0) -> DraftStatus | None:
        """What leaves no draft token to `_draft_limit`; None where there is one."""
        if self._token_limit(num_ahead) < 1:
            return "too_short"
        if self._draft_room(num_ahead) < 1:
            return "no_room"
        return None if self._draft_limit(most, num_ahead) > 0 else "off_by_schedule"

    def _note(self, status: DraftStatus | None) -> None:
        """Keeps what the last step says of drafting, unless it is of that step alone."""
        is_passing = status in PASSING and self._draft_status != "not_started"
        if status is not None and self.is_speculative and not is_passing:
            self._draft_status = status

    @property
    def is_draft_on_trial(self) -> bool:
        """True when the last draft length was chosen to see whether drafting pays again."""
        return self._draft_length is not None and self._draft_length.is_trial

    def expected_tokens(self, num_draft_tokens: int) -> float:
        """What a step with that many draft tokens should emit; only for an adaptive request."""
        assert self._draft_length is not None
        return self._draft_length.expected_tokens(num_draft_tokens)

    def accept(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float] = (),
        *,
        num_draft_tokens: int,
        is_copied: bool = False,
    ) -> Chunk:
        """Takes in what one step verified: accepted draft tokens, then the target's own token.

        log_probs has one entry per token when the request asked for them. is_copied says that the
        draft tokens were not the draft's. Returns what may be emitted now, which is empty while a
        character is incomplete or a stop string may be under way.
        """
        assert not self.is_finished
        num_accepted = len(token_ids) - 1
        assert 0 <= num_accepted <= num_draft_tokens
        if num_draft_tokens:
            is_trial = self.is_draft_on_trial and not is_copied
            self._note("does_not_pay" if is_trial else "drafted")
        if self._draft_length is not None:
            if is_copied:
                self._draft_length.observe_others(len(token_ids))
            else:
                self._draft_length.observe(
                    num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted
                )
        try:
            for row, token_id in enumerate(token_ids):
                self._append(token_id, log_probs[row] if log_probs else None)
                if self.finish_reason is not None:
                    # What was drafted past the end was never judged.
                    num_draft_tokens = min(num_draft_tokens, row + 1)
                    num_accepted = min(num_accepted, row + 1)
                    break
        except Exception:
            return self._fail()
        self.counts.record(num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted)
        return self._chunk()

    def finish(self, reason: FinishReason, error: str | None = None) -> Chunk:
        """Ends the request from outside: cancelled, timed out, or failed. Text held back is
        emitted.
        """
        assert not self.is_finished
        try:
            self._end(reason)
        except Exception:
            return self._fail()
        return self._chunk(error)

    def _fail(self) -> Chunk:
        """Ends the request after an exception that is its own: its text cannot be made. The others
        of its batch go on.
        """
        _LOGGER.exception("request %s failed", self.request.request_id)
        self._output = Output(self.request, {})
        self.finish_reason = "error"
        return self._chunk(FAULT)

    def _append(self, token_id: int, log_prob: float | None) -> None:
        can_stop = self.num_output_tokens >= self.request.sampling.min_tokens
        if token_id in self.request.end_token_ids and can_stop:
            self._end("stop")
            return
        self.token_ids.append(token_id)
        text = self._detokenizer.append([token_id])
        # A token that a stop string names stands after all of the text before it.
        before = self._detokenizer.settle() if self._output.is_searched(token_id) else ""
        if self._output.append(token_id, log_prob, text, before=before, can_stop=can_stop):
            self._end("stop")
        elif self._num_tokens_left() == 0:
            self._end("length")

    def _num_tokens_left(self) -> int:
        return min(
            self.request.max_tokens - self.num_output_tokens,
            self._limits.max_seq_len - len(self.token_ids),
        )

    def _end(self, reason: FinishReason) -> None:
        can_stop = self.num_output_tokens > self.request.sampling.min_tokens
        stopped = self._output.finish(self._detokenizer.flush(), can_stop=can_stop)
        self.finish_reason = "stop" if stopped and reason == "length" else reason

    def _chunk(self, error: str | None = None) -> Chunk:
        text, token_ids, log_probs = self._output.take()
        if self._echoes and (text or self.is_finished):
            self._echoes = False
            text = self._detokenizer.prompt_text + text
        return Chunk(
            request_id=self.request.request_id,
            text=text,
            token_ids=token_ids,
            log_probs=log_probs,
            finish_reason=self.finish_reason,
            error=error,
            statistics=self._statistics() if self.is_finished else None,
            counts=self.counts if self.is_finished else None,
            queue_s=self._queue_s if self.is_finished else None,
        )

    def _statistics(self) -> Statistics:
        return Statistics(
            num_input_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=self._output.num_taken_tokens,
            num_steps=self.counts.num_steps,
            total_draft_tokens=self.counts.num_draft_tokens,
            total_accepted_draft_tokens=self.counts.num_accepted_tokens,
            seed_used=self.request.sampling.seed,
            acceptance_rate=self.counts.acceptance_rate or 0.0,
            draft_status=self._draft_status,
        )
