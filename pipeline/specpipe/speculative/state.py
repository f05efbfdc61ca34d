"""One request while it runs: its tokens, its draft length, its end."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from specpipe.errors import FAULT
from specpipe.speculative.adaptive import DraftLength
from specpipe.speculative.draft_choice import DraftChoice
from specpipe.speculative.guide import Matcher
from specpipe.speculative.lookup import CopyOdds
from specpipe.speculative.metrics import AcceptanceCounts
from specpipe.speculative.output import Output
from specpipe.speculative.request import (
    Chunk,
    Detokenizer,
    FinishReason,
    Request,
    RequestLimits,
    Statistics,
    TopLogProbs,
)

_LOGGER = logging.getLogger(__name__)


class RequestState:
    """A running request. A loop asks `drafts` and calls `accept` in turn, until it is
    finished.
    """

    def __init__(
        self,
        request: Request,
        limits: RequestLimits,
        detokenizer: Detokenizer,
        *,
        draft_length: DraftLength | None = None,
        copy_odds: CopyOdds | None = None,
        matcher: Matcher | None = None,
        queue_s: float | None = None,
    ) -> None:
        """draft_length and copy_odds are DraftChoice's.

        matcher  follows the output by the request's guide
        queue_s  how long the request has waited, for its last chunk
        """
        limits.check(request)
        self.request = request
        self.token_ids: list[int] = list(request.prompt_token_ids)
        """Prompt and every token that was accepted; the next step continues it."""
        self.counts = AcceptanceCounts()
        self.finish_reason: FinishReason | None = None
        self.num_cached_input_tokens = 0
        """Tokens of the prompt that were cached when the request came."""
        self.num_preemptions = 0
        """Times that it gave way to others for want of memory."""
        self._detokenizer = detokenizer
        self._queue_s = queue_s
        self.matcher = matcher
        self.drafts = DraftChoice(
            request,
            limits,
            self.token_ids,
            draft_length=draft_length,
            copy_odds=copy_odds,
            matcher=matcher,
        )
        """What the next step drafts."""
        self._output = Output(request, detokenizer.hidden_tokens)
        self._echoes = request.echo
        self._prompt_log_probs: list[float] = []
        self._prompt_top_log_probs: list[TopLogProbs] = []
        self._is_first = True
        num_prompt_tokens = len(self.token_ids)
        self._end_token_ids = request.end_token_ids
        self._least_length = num_prompt_tokens + request.sampling.min_tokens
        self._end_length = num_prompt_tokens + limits.num_tokens_left(request, num_prompt_tokens)

    @property
    def is_finished(self) -> bool:
        """True after the last chunk."""
        return self.finish_reason is not None

    @property
    def num_output_tokens(self) -> int:
        """Accepted tokens, those whose text is still held back included."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still be emitted."""
        return self._end_length - len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The accepted tokens."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_unscored_tokens(self) -> int:
        """Tokens of the prompt whose log-probabilities are asked for and not known yet."""
        if not self.request.return_prompt_log_probs:
            return 0
        return len(self.request.prompt_token_ids) - 1 - len(self._prompt_log_probs)

    def score_prompt(
        self, log_probs: Sequence[float], top_log_probs: Sequence[TopLogProbs] = ()
    ) -> None:
        """Takes in the log-probabilities of the next tokens of the prompt, from the second on.

        top_log_probs  the likeliest tokens instead of each, where they are asked for
        """
        assert len(log_probs) <= self.num_unscored_tokens
        self._prompt_log_probs += log_probs
        self._prompt_top_log_probs += top_log_probs

    def accept(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float] = (),
        top_log_probs: Sequence[TopLogProbs] = (),
        *,
        num_draft_tokens: int,
        num_accepted: int | None = None,
        num_unverified: int = 0,
        is_copied: bool = False,
        is_predicted: bool = False,
        forced: Collection[int] = (),
    ) -> Chunk:
        """Takes in what one step verified: accepted draft tokens, then the target's own token.

        log_probs       one for each token when the request asked for them; so top_log_probs
        num_accepted    where the target went on by itself, or stopped short; None: all but its own
        num_unverified  draft tokens besides num_draft_tokens that it was given and did not judge;
                        a step that has some says nothing about the draft
        is_copied       whether the draft tokens were not the draft's
        is_predicted    whether they were the prediction's
        forced          the places of draft tokens that the guide left no choice of

        Returns what may be emitted now, which is empty while a character is incomplete or a stop
        string may be under way.
        """
        assert not self.is_finished
        num_accepted = len(token_ids) - 1 if num_accepted is None else num_accepted
        assert 0 <= num_accepted <= min(num_draft_tokens, len(token_ids))
        if num_unverified:
            self.drafts.skip("not_verified")
        else:
            self.drafts.observe(num_draft_tokens, num_accepted, is_copied=is_copied, forced=forced)
        try:
            for row, token_id in enumerate(token_ids):
                self._append(
                    token_id,
                    log_probs[row] if log_probs else None,
                    top_log_probs[row] if top_log_probs else (),
                )
                if self.finish_reason is not None:
                    # What was drafted past the end was never judged.
                    num_draft_tokens = min(num_draft_tokens, row + 1)
                    num_accepted = min(num_accepted, row + 1)
                    break
        except Exception:
            return self._fail()
        self.counts.record(
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted,
            num_unverified_tokens=num_unverified,
            is_predicted=is_predicted,
        )
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

    def _append(self, token_id: int, log_prob: float | None, top: TopLogProbs) -> None:
        output = self._output
        can_stop = len(self.token_ids) >= self._least_length
        if can_stop and token_id in self._end_token_ids:
            self._end("stop")
            if self.request.keeps_end:
                output.append_end(token_id, log_prob, top)
            return
        self.token_ids.append(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)
        text = self._detokenizer.append((token_id,))
        # A token that a stop string names stands after all of the text before it.
        before = self._detokenizer.settle() if token_id in output.searched_tokens else ""
        is_cut = output.append(token_id, log_prob, text, top=top, before=before, can_stop=can_stop)
        if is_cut or (self.matcher is not None and self.matcher.is_over):
            self._end("stop")
        elif len(self.token_ids) >= self._end_length:
            self._end("length")

    def _end(self, reason: FinishReason) -> None:
        can_stop = self.num_output_tokens > self.request.sampling.min_tokens
        stopped = self._output.finish(self._detokenizer.flush(), can_stop=can_stop)
        self.finish_reason = "stop" if stopped and reason == "length" else reason

    def _chunk(self, error: str | None = None) -> Chunk:
        chunk, is_finished = self._output.take(), self.finish_reason is not None
        if self._echoes and (chunk.text or is_finished):
            self._echoes = False
            chunk.text = self._detokenizer.prompt_text + chunk.text
        # A chunk with nothing to show is not sent; a prompt that was not read to its end has none.
        if self._is_first and (chunk.text or chunk.token_ids or is_finished):
            self._is_first = False
            if not self.num_unscored_tokens:
                chunk.prompt_log_probs = tuple(self._prompt_log_probs)
                chunk.prompt_top_log_probs = tuple(self._prompt_top_log_probs)
        if is_finished:
            chunk.finish_reason, chunk.error = self.finish_reason, error
            chunk.statistics, chunk.counts = self._statistics(), self.counts
            chunk.queue_s = self._queue_s
        return chunk

    def _statistics(self) -> Statistics:
        histogram = self.counts.histogram
        return Statistics(
            num_input_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=self._output.num_taken_tokens,
            num_cached_input_tokens=self.num_cached_input_tokens,
            num_preemptions=self.num_preemptions,
            num_steps=self.counts.num_steps,
            total_draft_tokens=self.counts.num_draft_tokens,
            total_accepted_draft_tokens=self.counts.num_accepted_tokens,
            seed_used=self.request.sampling.seed,
            acceptance_rate=self.counts.acceptance_rate or 0.0,
            draft_status=self.drafts.status,
            accepted_prediction_tokens=self.counts.num_accepted_prediction_tokens,
            rejected_prediction_tokens=self.counts.num_rejected_prediction_tokens,
            acceptance_histogram=tuple(histogram[n] for n in range(max(histogram, default=0) + 1)),
        )
