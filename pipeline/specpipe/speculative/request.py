"""One request: what was asked for, what a step may emit, and the state between steps.

`RequestState` is a pure state machine; every loop (NumPy, torch, BLS) drives it. All that ends or
cuts a request lives here and nowhere else: end ids, stop strings, the token cap, the end of the
context. They cut text, ids, log-probabilities and counts at the same place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Literal, Protocol

from specpipe.errors import RequestError, show
from specpipe.speculative.draft_status import DraftStatus
from specpipe.speculative.guide import Guide
from specpipe.speculative.metrics import AcceptanceCounts

FinishReason = Literal["stop", "length", "cancelled", "error"]

TopLogProbs = tuple[tuple[int, float], ...]
"""The likeliest tokens of one position, each with its log-probability, likeliest first."""

_MAX_COUNT = 2**31 - 1
"""The greatest INT32, the type in which clients send counts and token ids."""

MAX_SALT = 256
"""Characters of `cache_salt`."""

MAX_TOP_LOG_PROBS = 20
"""The most that OpenAI's API gives: https://platform.openai.com/docs/api-reference/chat/create,
`top_logprobs`.
"""


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
    """0 is greedy: temperature, top_k, top_p and min_p then have no effect."""
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
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and what is added to the score of each, after penalties and before temperature; an
    id that is named twice gets both.
    """
    seed: int = 0
    """Unsigned, 64 bits."""
    is_seeded: bool = False
    """The seed was asked for: the output then equals target-only sampling with that seed."""

    def __post_init__(self) -> None:
        for name, low, high, expected in (
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
                raise RequestError(f"{name} is {show(value)}; it must be {expected}")
        if () in self.bad_words:
            raise RequestError("bad_words has an empty entry; leave it out")
        for token_id, bias in self.logit_bias:
            if not math.isfinite(bias):
                raise RequestError(
                    f"logit_bias of token id {show(token_id)} is {bias}; it must be a finite number"
                )

    @property
    def is_greedy(self) -> bool:
        """Whether the highest score is always taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def changes_scores(self) -> bool:
        """Whether scores are more than the model's own: penalties, biases, bans."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_tokens > 0
            or bool(self.bad_words)
            or bool(self.logit_bias)
        )

    @cached_property
    def biases(self) -> Mapping[int, float]:
        """What is added to the score of each token id that logit_bias names."""
        biases: dict[int, float] = {}
        for token_id, bias in self.logit_bias:
            biases[token_id] = biases.get(token_id, 0.0) + bias
        return biases


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
    keeps_end: bool = False
    """The end id that ends the output is its last token."""
    stop_strings: tuple[str, ...] = ()
    """Sought in the text, and in it and the special tokens that it leaves out."""
    echo: bool = False
    """The text begins with the prompt's."""
    starts_text: bool = False
    """The output is a text of its own, as the answer in a chat is; else the prompt's goes on."""
    return_log_probs: bool = False
    num_top_log_probs: int = 0
    """How many of the likeliest tokens come with each token, and their log-probabilities."""
    return_prompt_log_probs: bool = False
    """Whether the prompt's tokens, but the first, have log-probabilities, and the likeliest tokens
    instead of each; max_tokens may then be 0.
    """
    guide: Guide | None = None
    """What the text must be."""
    prediction_token_ids: tuple[int, ...] = ()
    """A text that the output may be much like, from which draft tokens are copied."""
    skip_special_tokens: bool = True
    """Special tokens have no part in the text."""
    priority: int = 0
    """A lower number is served first; equal ones in order of arrival."""
    timeout_s: float | None = None
    """From submission to the last token; at most the limit that the pair was packaged with."""
    cache_salt: str = ""
    """What was read of a prompt is shared with requests of the same salt alone."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError("the prompt is empty; send at least one token")
        least = 0 if self.return_prompt_log_probs else 1
        if self.max_tokens < least:
            raise RequestError(f"max_tokens is {show(self.max_tokens)}; it must be {least} or more")
        if not 0 <= self.num_top_log_probs <= MAX_TOP_LOG_PROBS:
            raise RequestError(
                f"num_top_log_probs is {show(self.num_top_log_probs)}; it must be between 0 and "
                f"{MAX_TOP_LOG_PROBS}"
            )
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
        if len(self.cache_salt) > MAX_SALT:
            raise RequestError(
                f"cache_salt has {len(self.cache_salt)} characters; it may have {MAX_SALT}"
            )

    @property
    def has_log_probs(self) -> bool:
        """Whether any come with the output's tokens: their own, or those of the likeliest."""
        return self.return_log_probs or self.num_top_log_probs > 0

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
class RequestLimits:
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
            *request.prediction_token_ids,
            *request.end_token_ids,
            *(i for i, _ in request.sampling.logit_bias),
            *(i for w in request.sampling.bad_words for i in w),
        ):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"token id {show(token_id)} is outside the vocabulary of {self.vocab_size}"
                )

    def num_tokens_left(self, request: Request, num_tokens: int) -> int:
        """The tokens that a request whose prompt and output have num_tokens may still emit."""
        num_output_tokens = num_tokens - len(request.prompt_token_ids)
        return min(request.max_tokens - num_output_tokens, self.max_seq_len - num_tokens)


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
    """Why drafting was on or off; None where the server is older and does not say."""
    is_lossless: bool = True
    """False where the output may have another distribution than the target's: a runtime that cannot
    keep it, and a config that asked for it all the same.
    """
    accepted_prediction_tokens: int = 0
    """Draft tokens that were copied from the request's prediction and accepted; they are among the
    accepted draft tokens, too.
    """
    rejected_prediction_tokens: int = 0
    """Those that were verified and not accepted."""
    acceptance_histogram: tuple[int, ...] | None = None
    """Steps with a draft token by how many of them were accepted: 0, 1, …; None where that is not
    known.
    """
    num_cached_input_tokens: int = 0
    """Tokens of the prompt that were not read, as others that begin alike had been."""
    num_preemptions: int = 0
    """Times that the request gave way to others for want of memory, and was computed again."""

    def to_json(self) -> dict[str, int | float | str | tuple[int, ...] | None]:
        """Returns the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(kw_only=True, slots=True)  # frozen, it would take four times as long to make
class Chunk:
    """What one step lets one request emit; the last one has a finish_reason and the statistics."""

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """One per token id when the request asked for them: log-softmax of the raw target logits."""
    top_log_probs: tuple[TopLogProbs, ...] = ()
    """One per token id, likewise."""
    prompt_log_probs: tuple[float, ...] = ()
    """In the first chunk: of each token of the prompt but the first."""
    prompt_top_log_probs: tuple[TopLogProbs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    statistics: Statistics | None = None
    counts: AcceptanceCounts | None = field(default=None, compare=False)
    """In the last chunk: the request's steps; None where they are unknown."""
    queue_s: float | None = field(default=None, compare=False)
    """In the last chunk: from the submission of the request until it was started, or ended without
    having been.
    """


def join_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Returns what chunks of one request say, in their order, as one: the end is the last one's."""
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(chain.from_iterable(c.token_ids for c in chunks)),
        log_probs=tuple(chain.from_iterable(c.log_probs for c in chunks)),
        top_log_probs=tuple(chain.from_iterable(c.top_log_probs for c in chunks)),
        prompt_log_probs=tuple(chain.from_iterable(c.prompt_log_probs for c in chunks)),
        prompt_top_log_probs=tuple(chain.from_iterable(c.prompt_top_log_probs for c in chunks)),
    )
