"""One request: what was asked for, what a step may emit, and the state between steps.

`RequestState` is a pure state machine; every loop (NumPy, torch, BLS) drives it. All that ends or
cuts a request lives here and nowhere else: end ids, stop strings, the token cap, the end of the
context. They cut text, ids, log-probabilities and counts at the same place.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol

from specpipe.errors import FAULT, RequestError, show
from specpipe.speculative.adaptive import DraftLength, StepCosts, promise
from specpipe.speculative.draft_status import PASSING, DraftStatus
from specpipe.speculative.lookup import PromptLookup
from specpipe.speculative.metrics import AcceptanceCounts
from specpipe.speculative.stop_strings import StandIns, StopStrings

_LOGGER = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "cancelled", "error"]

_MAX_COUNT = 2**31 - 1
"""What clients send counts and token ids as, INT32."""


class Detokenizer(Protocol):
    """Turns token ids into text as they come; it has state, so each request has its own."""

    @property
    def hidden_tokens(self) -> Mapping[int, str]:
        """The special tokens by id: text leaves them out, stop strings may name them."""

    @property
    def prompt_text(self) -> str:
        """The text before the output's; final once there is text of the output, or all is over."""

    def append(self, token_ids: Sequence[int]) -> str:
        """Returns the text that became final; "" while a character is incomplete."""

    def settle(self) -> str:
        """Returns what is still held back as if the output ended here, which it need not do."""

    def flush(self) -> str:
        """Returns what is left at the end, as decoding everything at once gives it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen; the defaults are greedy. `warp.py` says what each setting does."""

    temperature: float = 0.0
    """0 is greedy: temperature, top_k, top_p and min_p then have no say."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    """No end id and no stop string ends the request before this many tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear."""
    seed: int = 0
    """Unsigned, 64 bits."""
    is_seeded: bool = False
    """The seed was asked for: the output then equals target-only sampling with that seed."""

    def __post_init__(self) -> None:
        for name, low, high, what in (
            ("temperature", 0.0, math.inf, "0 (greedy) or a positive number"),
            ("top_k", 0, _MAX_COUNT, "0 (off) or a positive count"),
            ("top_p", 0.0, 1.0, "between 0 (exclusive) and 1"),
            ("min_p", 0.0, 1.0, "between 0 and 1"),
            ("repetition_penalty", 0.0, math.inf, "a positive number"),
            ("presence_penalty", -math.inf, math.inf, "a number"),
            ("frequency_penalty", -math.inf, math.inf, "a number"),
            ("min_tokens", 0, _MAX_COUNT, "0 or a positive count"),
            ("seed", 0, 2**64 - 1, "an unsigned 64-bit integer"),
        ):
            value = getattr(self, name)
            is_excluded_zero = value == 0 and name in ("top_p", "repetition_penalty")
            # The range first: a whole number may be too large to be a float.
            if not (low <= value <= high and math.isfinite(value)) or is_excluded_zero:
                raise RequestError(f"{name} is {show(value)}; it must be {what}")
        if () in self.bad_words:
            raise RequestError("bad_words has an empty entry; leave it out")

    @property
    def is_greedy(self) -> bool:
        """True when the highest score is always taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def changes_scores(self) -> bool:
        """True when the scores of a token depend on the tokens before it by more than the model."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_tokens > 0
            or bool(self.bad_words)
        )


GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client asked for, tokenized."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    num_draft_tokens: int | None = None
    """Draft tokens of every step that has use and room for them, whatever they gain; None: as many
    as pay, up to what the pair was packaged with; 0: no speculation.
    """
    end_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    """Sought in the text, and in it and the special tokens that it leaves out."""
    echo: bool = False
    """The text begins with the prompt's."""
    starts_text: bool = False
    """The output is a text of its own, as the answer in a chat is; else the prompt's goes on."""
    return_log_probs: bool = False
    priority: int = 0
    """A lower number is served first; equal ones in order of arrival."""
    timeout_s: float | None = None
    """From submission to the last token; at most the limit that the pair was packaged with."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError("the prompt is empty; send at least one token")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {show(self.max_tokens)}; it must be 1 or more")
        if self.num_draft_tokens is not None and self.num_draft_tokens < 0:
            raise RequestError(
                f"num_draft_tokens is {show(self.num_draft_tokens)}; "
                "it must be 0 (no speculation) or more"
            )
        for token_id in self.end_token_ids:
            if not 0 <= token_id <= _MAX_COUNT:
                raise RequestError(f"end id {show(token_id)} is no token id")
        if "" in self.stop_strings:
            raise RequestError("stop_words has an empty entry; leave it out")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise RequestError(f"timeout_s is {self.timeout_s}; it must be positive")

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """The tokens whose text the output goes on from."""
        return () if self.starts_text else self.prompt_token_ids


def check_prompt_length(num_tokens: int, max_seq_len: int) -> None:
    """Raises RequestError for a prompt that leaves no room for an output."""
    if num_tokens >= max_seq_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens; prompt and output together may have "
            f"{max_seq_len} (engine.max_seq_len)"
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a pair can hold for one request."""

    max_num_draft_tokens: int
    max_seq_len: int
    """Prompt and output tokens together."""
    draft_max_seq_len: int
    """The same for the draft; past it the request goes on without drafting."""
    vocab_size: int

    def check(self, request: Request) -> None:
        """Raises RequestError, with the numbers, for a request that can never run here."""
        check_prompt_length(len(request.prompt_token_ids), self.max_seq_len)
        if request.max_tokens > self.max_seq_len:
            raise RequestError(
                f"max_tokens is {show(request.max_tokens)}; prompt and output together may have "
                f"{self.max_seq_len} (engine.max_seq_len)"
            )
        if (request.num_draft_tokens or 0) > self.max_num_draft_tokens:
            raise RequestError(
                f"num_draft_tokens is {show(request.num_draft_tokens)}; this pair drafts at most "
                f"{self.max_num_draft_tokens} (speculation.num_draft_tokens)"
            )
        for token_id in (
            *request.prompt_token_ids,
            *request.end_token_ids,
            *(i for w in request.sampling.bad_words for i in w),
        ):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"token id {show(token_id)} is outside the vocabulary of {self.vocab_size}"
                )


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What the last response of a request reports."""

    num_input_tokens: int
    num_output_tokens: int
    num_steps: int
    total_draft_tokens: int
    total_accepted_draft_tokens: int
    seed_used: int
    acceptance_rate: float
    """Accepted over drafted tokens; 0.0 when nothing was drafted."""
    draft_status: DraftStatus | None = None
    """Why drafting was on or off; None where the server is older and does not tell."""
    is_lossless: bool = True
    """False where the output may have another distribution than the target's: a runtime that cannot
    keep it, and a config that asked for it all the same.
    """

    def to_json(self) -> dict[str, int | float | str | None]:
        """The fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one step lets one request emit; the last one has a finish_reason and the statistics."""

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """One per token id when the request asked for them: log-softmax of the raw target logits."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    statistics: Statistics | None = None
    counts: AcceptanceCounts | None = field(default=None, compare=False)
    """In the last chunk: the request's steps; None where nobody knows them."""
    queue_s: float | None = field(default=None, compare=False)
    """In the last chunk: from the submission of the request until it was started, or ended without
    having been.
    """


class RequestState:
    """A running request. A loop alternates `next_num_draft_tokens` and `accept` until it is
    finished.
    """

    def __init__(
        self,
        request: Request,
        limits: Limits,
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
        self._output = _Output(request, detokenizer.hidden_tokens)
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
        self._output = _Output(self.request, {})
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


class _Output:
    """Text, ids and log-probabilities on their way out, held back while a stop string may be under
    way.

    A token leaves together with the text that it completes, so that a cut takes both. Offsets are
    those of the whole text, so that what is held back costs nothing while it waits.
    """

    def __init__(self, request: Request, hidden_tokens: Mapping[int, str]) -> None:
        self._with_log_probs = request.return_log_probs
        self._hidden_tokens = hidden_tokens
        self._stand_ins = StandIns(request.stop_strings, hidden_tokens)
        self._stop_strings = StopStrings(self._stand_ins.strings)
        self._text = ""  # decoded, not yet taken
        self._num_taken_chars = 0
        self._tokens: deque[_Token] = deque()
        self._num_held_chars = 0
        self._is_cut = self._is_finished = False
        self.num_taken_tokens = 0

    def is_searched(self, token_id: int) -> bool:
        """Says whether a stop string names this special token."""
        return token_id in self._stand_ins.characters

    def append(
        self, token_id: int, log_prob: float | None, text: str, *, before: str, can_stop: bool
    ) -> bool:
        """Adds one token; True when its text completes a stop string, which is then cut off.

        `before` is text of the tokens before it. Where it cannot stop, the text so far can no
        longer become part of a stop string.
        """
        if before:
            self._text += before
            self._tokens[-1] = replace(self._tokens[-1], end=self._num_chars())
            if self._search(before, can_stop=can_stop):
                return True
        text += self._stand_ins.characters.get(token_id, "")
        start = self._num_chars()
        self._text += text
        self._tokens.append(_Token(token_id, log_prob, start, self._num_chars()))
        return self._search(text, can_stop=can_stop)

    def finish(self, text: str, *, can_stop: bool) -> bool:
        """Adds the last text and holds nothing back; True when a stop string was cut off."""
        self._is_finished = True
        if text and not self._is_cut:
            self._text += text
            self._search(text, can_stop=can_stop)
        self._num_held_chars = 0
        return self._is_cut

    def take(self) -> tuple[str, tuple[int, ...], tuple[float, ...]]:
        """What may leave now: text, token ids, log-probabilities."""
        num_chars = len(self._text) - self._num_held_chars
        text, self._text = self._text[:num_chars], self._text[num_chars:]
        self._num_taken_chars += num_chars
        taken = [self._tokens.popleft() for _ in range(self._num_whole_tokens())]
        self.num_taken_tokens += len(taken)
        log_probs = [t.log_prob for t in taken if t.log_prob is not None]
        return (
            self._stand_ins.remove(text),
            tuple(t.token_id for t in taken),
            tuple(log_probs) if self._with_log_probs else (),
        )

    def _num_chars(self) -> int:
        return self._num_taken_chars + len(self._text)

    def _num_whole_tokens(self) -> int:
        """How many tokens have all their text taken.

        A token without text of its own (the start of a character) waits for the one that completes
        it.
        """
        if self._is_finished:
            return len(self._tokens)
        num_whole = 0
        for number, token in enumerate(self._tokens, 1):
            if token.end > self._num_taken_chars:
                break
            if token.has_text:
                num_whole = number
        return num_whole

    def _search(self, text: str, *, can_stop: bool) -> bool:
        if not can_stop:
            self._stop_strings.forget()
            self._num_held_chars = 0
            return False
        end = self._num_chars()
        at = self._stop_strings.find(text)
        if at is None:
            self._num_held_chars = self._stop_strings.num_held_chars
            return False
        cut = end - len(text) + at
        self._text = self._text[: cut - self._num_taken_chars]
        while self._tokens and not self._is_before(self._tokens[-1], cut):
            self._tokens.pop()
        self._is_cut = True
        return True

    def _is_before(self, token: _Token, cut: int) -> bool:
        """Says whether a token begins before a cut; the start of a character goes with its end."""
        if token.has_text:
            return token.start < cut
        return token.token_id in self._hidden_tokens and token.start <= cut


@dataclass(frozen=True)
class _Token:
    token_id: int
    log_prob: float | None
    start: int
    end: int

    @property
    def has_text(self) -> bool:
        return self.end > self.start
