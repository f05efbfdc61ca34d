"""Asking a target for its answers to prompts, into a collection (collection.py).

Questions stand in the order of the prompts, and their answers in that of the questions: what is
written does not depend on which of those that were asked at once came first, nor on where a run was
interrupted.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from specpipe.errors import RequestError, ServerError
from specpipe.evaluate.endpoints.base import Endpoint, Question, TimedAnswer, record
from specpipe.evaluate.prompts import Prompt, as_messages
from specpipe.evaluate.verification.questions import encode
from specpipe.machine.signals import thread_pool
from specpipe.progress import count, phase
from specpipe.speculative.request import Sampling, check_prompt_length
from specpipe.text.tokenizer import Tokenizer
from specpipe.training.collection import Answer, listing_fault
from specpipe.training.collection_writer import CollectionWriter
from specpipe.training.request_lines import iterate_asked

_AHEAD = 8
"""For each stream, answers that may wait for an earlier one: a guess, and what a kill loses."""

_MOST_ALIKE = 32
"""Failures one after another, in the same words, after which the next ones would be no others."""

_DECIMALS = 4
"""Of log-probabilities: 0.00005 is a twentieth of what bfloat16 rounds a logit of 1 by."""


@dataclass(frozen=True, kw_only=True)
class CollectOptions:
    """Which prompts are asked, and how.

    prompts            a set by its name, or a file; of it `limit` prompts at most
    is_chat            whether each prompt is a user's message
    as_text            whether prompts are sent as text and messages, not as token ids
    max_tokens         of an answer, where its prompt does not say
    temperatures       each prompt is asked once at 0, and `num_samples` times at any other
    top_k, top_p       as in `Sampling`
    seed               of which, with a question's id, its own is made
    num_top_log_probs  how many of the likeliest tokens are kept with each token; 0: none
    """

    prompts: str
    limit: int | None = None
    is_chat: bool = False
    as_text: bool = False
    max_tokens: int
    temperatures: tuple[float, ...] = (0.0,)
    num_samples: int = 1
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    num_top_log_probs: int = 0

    def iterate_prompts(self) -> Iterator[Prompt]:
        """Yields the prompts that are asked."""
        return iterate_asked(self.prompts, limit=self.limit)

    @property
    def num_questions(self) -> int:
        """How often a prompt is asked."""
        return sum(self._num_samples(temperature) for temperature in self.temperatures)

    def settings(self) -> dict[str, Any]:
        """Returns all that an interrupted run is to be gone on with."""
        fields = asdict(self)
        return {name: _listed(fields[name]) for name in fields if name not in ("prompts", "limit")}

    def samplings(self, prompt_digest: str) -> Iterator[tuple[str, Sampling]]:
        """Yields the ids of a prompt's questions, and how each is answered."""
        for temperature in self.temperatures:
            for number in range(self._num_samples(temperature)):
                is_greedy = temperature == 0.0
                name = f"{prompt_digest}-t{repr(temperature).removesuffix('.0')}"
                question_id = name if is_greedy else f"{name}-{number}"
                seed = 0 if is_greedy else _seed(self.seed, question_id)
                yield (
                    question_id,
                    Sampling(
                        temperature=temperature,
                        top_k=self.top_k,
                        top_p=self.top_p,
                        seed=seed,
                        is_seeded=not is_greedy,
                    ),
                )

    def _num_samples(self, temperature: float) -> int:
        return 1 if temperature == 0.0 else self.num_samples


@dataclass
class Collected:
    """What came of one run."""

    num_asked: int = 0
    num_failed: int = 0
    first_error: str | None = None

    def fault(self) -> str | None:
        """Returns why the run is to be called a failure, as a sentence; None where it is none."""
        if self.num_failed * 10 <= self.num_asked:
            return None
        return (
            f"{self.num_failed} of {self.num_asked} questions have no answer, the first since: "
            f"{self.first_error}"
        )


def collect(
    endpoint: Endpoint,
    tokenizer: Tokenizer,
    options: CollectOptions,
    writer: CollectionWriter,
    *,
    num_prompts: int,
    concurrency: int,
    max_seq_len: int | None = None,
) -> Collected:
    """Asks what the collection has no answer to yet, and adds the answers.

    num_prompts  those of the file, for how far it is
    max_seq_len  prompt and answer together, where that is known

    Raises ServerError where nothing comes any more; what came is kept then, too.
    """
    num_questions = num_prompts * options.num_questions
    with phase("collect"), count(num_questions, "answers") as progress:
        run = _Run(tokenizer, options, writer, max_seq_len)
        for case, answer in _in_order(endpoint, run.cases(), concurrency):
            run.take(case, answer)
            progress.expect(num_questions - run.num_skipped)
            progress.advance()
    writer.complete(run.num_prompts)
    return run.collected


class _Case(NamedTuple):
    """A question, and what its answer is kept with."""

    id: str
    prompt: Prompt
    token_ids: tuple[int, ...]
    group: str
    question: Question


class _Run:
    """What is asked in one run, and what comes of it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: CollectOptions,
        writer: CollectionWriter,
        max_seq_len: int | None,
    ) -> None:
        self._tokenizer, self._options, self._writer = tokenizer, options, writer
        self._max_seq_len = max_seq_len
        self._digests: set[str] = set()
        self._num_alike, self._last_error = 0, ""
        self.collected = Collected()
        self.num_skipped = 0
        """Questions that need not, or cannot, be asked."""

    @property
    def num_prompts(self) -> int:
        """Prompts so far that differ."""
        return len(self._digests)

    def cases(self) -> Iterator[_Case]:
        """Yields what is still to be asked, prompt by prompt."""
        options = self._options
        for prompt in options.iterate_prompts():
            if options.is_chat:
                (prompt,) = as_messages((prompt,))
            try:
                token_ids = encode(prompt, self._tokenizer)
                if self._max_seq_len is not None:
                    check_prompt_length(len(token_ids), self._max_seq_len)
            except RequestError as exc:
                self._fail(prompt.name, prompt, str(exc))
                self.num_skipped += options.num_questions
                continue
            digest = _digest(token_ids)
            is_known = digest in self._digests
            self._digests.add(digest)
            for question_id, sampling in options.samplings(digest):
                if is_known or self._writer.is_asked(question_id):
                    self.num_skipped += 1
                    continue
                question = self._question(prompt, token_ids, sampling)
                yield _Case(question_id, prompt, token_ids, prompt.group or digest, question)

    def take(self, case: _Case, timed: TimedAnswer) -> None:
        """Adds an answer to the collection, or notes why there is none."""
        try:
            answer = self._answer(case, timed)
        except ServerError as exc:
            self._fail(case.id, case.prompt, str(exc))
            self._num_alike = self._num_alike + 1 if str(exc) == self._last_error else 1
            self._last_error = str(exc)
            if self._num_alike >= _MOST_ALIKE:
                raise ServerError(
                    f"the last {_MOST_ALIKE} questions failed alike, so no more are asked: {exc}"
                ) from None
            return
        self._num_alike = 0
        self.collected.num_asked += 1
        if answer is None:
            self._writer.add_empty(case.id)
        else:
            self._writer.add(answer)

    def _question(self, prompt: Prompt, token_ids: tuple[int, ...], sampling: Sampling) -> Question:
        options = self._options
        max_tokens = prompt.max_tokens or options.max_tokens
        if self._max_seq_len is not None:
            max_tokens = min(max_tokens, self._max_seq_len - len(token_ids))
        as_text = options.as_text
        return Question(
            text=prompt.text if as_text else None,
            messages=prompt.messages if as_text else None,
            token_ids=None if as_text else token_ids,
            starts_text=prompt.messages is not None,
            max_tokens=max_tokens,
            sampling=sampling,
            returns_ids=True,
            num_top_log_probs=options.num_top_log_probs,
        )

    def _answer(self, case: _Case, timed: TimedAnswer) -> Answer | None:
        """Returns what is kept; None for no token, ServerError for what is no answer."""
        if timed.error is not None:
            raise ServerError(timed.error)
        token_ids = timed.token_ids
        is_from_text = token_ids is None
        if token_ids is None:
            token_ids = tuple(self._tokenizer.encode_fragment(timed.text))
        if not token_ids:
            return None
        prompt_ids = _served_prompt(case, timed)
        for what, ids in (("answer", token_ids), ("prompt that was read", prompt_ids)):
            unknown = next((i for i in ids if not self._tokenizer.is_used(i)), None)
            if unknown is not None:
                raise ServerError(
                    f"the {what} has token id {unknown}, which is none of the tokenizer's: another "
                    "model answers"
                )
        sampling = case.question.sampling
        drawn = {} if sampling.is_greedy else {"seed": sampling.seed}
        default = Sampling()
        changed = {
            name: value
            for name in ("top_k", "top_p")
            if (value := getattr(sampling, name)) != getattr(default, name)
        }
        return Answer(
            id=case.id,
            prompt_token_ids=prompt_ids,
            token_ids=token_ids,
            finish_reason=timed.finish_reason,
            sampling={"temperature": sampling.temperature, **changed, **drawn},
            group=case.group,
            top_log_probs=self._top_log_probs(timed, len(token_ids)),
            is_from_text=is_from_text,
        )

    def _top_log_probs(
        self, timed: TimedAnswer, num_tokens: int
    ) -> tuple[tuple[tuple[int, float], ...], ...]:
        most, found = self._options.num_top_log_probs, timed.top_log_probs
        if not most:
            return ()
        if len(found) != num_tokens:
            raise ServerError(
                f"the answer has {num_tokens} tokens, and log-probabilities of {len(found)}: this "
                "server cannot be asked for --top-log-probs"
            )
        kept = tuple(
            tuple(
                (token_id, round(log_prob, _DECIMALS))
                for token_id, log_prob in row[:most]
                if log_prob != -math.inf  # of what cannot come, which is as good as not listed
            )
            for row in found
        )
        if (fault := listing_fault(kept)) is not None:
            raise ServerError(f"the log-probabilities of the answer {fault}")
        return kept

    def _fail(self, question_id: str, prompt: Prompt, error: str) -> None:
        self._writer.fail(question_id, prompt.name, error)
        collected = self.collected
        collected.num_asked += 1
        collected.num_failed += 1
        collected.first_error = collected.first_error or error


def _served_prompt(case: _Case, timed: TimedAnswer) -> tuple[int, ...]:
    """Returns the prompt's ids as they were read; ServerError where those are not known."""
    told = timed.prompt_token_ids
    if told is not None:
        return told
    count = timed.usage.num_input_tokens if timed.usage is not None else None
    if count in (None, len(case.token_ids)):
        return case.token_ids
    raise ServerError(
        f"the server read {count} tokens of a prompt of {len(case.token_ids)}: its chat template, "
        "special tokens or tokenizer are not those of the target"
    )


def _in_order(
    endpoint: Endpoint, cases: Iterator[_Case], concurrency: int
) -> Iterator[tuple[_Case, TimedAnswer]]:
    """Yields answers in the order of their questions, of which so many are open at a time."""
    with thread_pool(concurrency) as pool:
        waiting: deque[tuple[_Case, Future[TimedAnswer]]] = deque()
        for case in cases:
            waiting.append((case, pool.submit(record, endpoint, case.question)))
            while waiting and (len(waiting) >= _AHEAD * concurrency or waiting[0][1].done()):
                first, answer = waiting.popleft()
                yield first, answer.result()
        for case, answer in waiting:
            yield case, answer.result()


def _digest(token_ids: tuple[int, ...]) -> str:
    """Returns 96 bits of the SHA-256 over a prompt's ids: two of a million are alike by chance
    once in 10^17.
    """
    return hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:24]


def _seed(seed: int, question_id: str) -> int:
    """Returns the seed of one question, in 63 bits, which every server takes."""
    digest = hashlib.sha256(f"{seed} {question_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _listed(value: Any) -> Any:
    """Returns a value as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value
