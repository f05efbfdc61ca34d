"""What drafting and copying gain: the same prompts, asked in several ways in turns."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from specpipe.errors import ServerError
from specpipe.triton.client import Client, Completion


@dataclass(frozen=True)
class Way:
    """A way of asking: which server, and for how many draft tokens; None: as many as pay."""

    name: str
    client: Client
    num_draft_tokens: int | None = None

    def ask(self, prompt: str, max_tokens: int) -> tuple[Completion, float]:
        """Returns the whole answer, and the seconds that it took."""
        start = time.perf_counter()
        answer = self.client.generate(
            prompt, max_tokens=max_tokens, num_draft_tokens=self.num_draft_tokens
        )
        return answer, time.perf_counter() - start


@dataclass
class Total:
    """The answers of one way in one round, added up.

    seconds        from the question to the whole answer
    first_seconds  of these, those before the second token: the prompt, and what a question costs
    """

    seconds: float = 0.0
    first_seconds: float = 0.0
    num_answers: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    num_accepted_tokens: int = 0

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.seconds

    @property
    def pass_seconds(self) -> float:
        """Seconds of a pass of the target after the first one, with all that belongs to it."""
        return (self.seconds - self.first_seconds) / (self.num_steps - self.num_answers)


@dataclass(frozen=True)
class Gain:
    """What one way came to, beside the first; rate, ratio and pass_time are medians of the rounds.

    rate             output tokens per second
    ratio            the rate by that of the first way
    tokens_per_pass  tokens that a pass of the target emits, as the acceptance length has them
    pass_time        of a pass of the target with all that belongs to it, by that of the first way
    """

    name: str
    rate: float
    ratio: float
    tokens_per_pass: float
    pass_time: float

    @classmethod
    def of(cls, name: str, totals: Sequence[Total], firsts: Sequence[Total]) -> Gain:
        """Returns what a way came to, of its totals by round, and those of the first way."""
        pairs = list(zip(totals, firsts, strict=True))
        num_accepted = sum(total.num_accepted_tokens for total in totals)
        return cls(
            name=name,
            rate=median(total.rate for total in totals),
            ratio=median(total.rate / first.rate for total, first in pairs),
            tokens_per_pass=1 + num_accepted / sum(total.num_steps for total in totals),
            pass_time=median(total.pass_seconds / first.pass_seconds for total, first in pairs),
        )


def that_go_on(way: Way, prompts: Iterable[str], limit: int) -> tuple[list[str], int]:
    """Returns the first prompts that the target does not end at once, and how many it does.

    After those nothing is drafted. Raises ServerError where it ends all of them.
    """
    going_on: list[str] = []
    num_ended = 0
    for prompt in prompts:
        if len(going_on) == limit:
            break
        if way.ask(prompt, 2)[0].finish_reason == "length":
            going_on.append(prompt)
        else:
            num_ended += 1
    if not going_on:
        raise ServerError(f"the target ends all of {num_ended} prompts at once")
    return going_on, num_ended


def compare(
    ways: Sequence[Way], prompts: Sequence[str], *, max_tokens: int, num_rounds: int
) -> list[Gain]:
    """Returns what each way gains over the first, which is to be the target alone.

    A round asks each prompt in all ways, one right after the other, and another one first each
    time, so that what drifts falls on all alike. Raises ServerError where the answers differ.
    """
    for way in ways:
        way.ask(prompts[0], max_tokens)  # a server's first answer is slow
    rounds = [_round(ways, prompts, max_tokens, first) for first in range(num_rounds)]
    by_way = list(zip(*rounds, strict=True))
    return [Gain.of(way.name, by_way[n], by_way[0]) for n, way in enumerate(ways)]


def _round(ways: Sequence[Way], prompts: Sequence[str], max_tokens: int, first: int) -> list[Total]:
    totals = [Total() for _ in ways]
    for number, prompt in enumerate(prompts, start=first):
        order = [(number + place) % len(ways) for place in range(len(ways))]
        texts = {_measure(ways[n], prompt, max_tokens, totals[n]) for n in order}
        if len(texts) > 1:
            raise ServerError(f"speculation changed the answer to {prompt!r}")
    return totals


def _measure(way: Way, prompt: str, max_tokens: int, total: Total) -> str:
    """Adds one answer to a total and returns its text."""
    total.first_seconds += way.ask(prompt, 1)[1]
    answer, seconds = way.ask(prompt, max_tokens)
    assert answer.statistics is not None
    total.seconds += seconds
    total.num_answers += 1
    total.num_output_tokens += answer.statistics.num_output_tokens
    total.num_steps += answer.statistics.num_steps
    total.num_accepted_tokens += answer.statistics.total_accepted_draft_tokens
    return answer.text


def table(gains: Sequence[Gain]) -> Iterator[str]:
    """Yields the lines of a table."""
    width = max(len(gain.name) for gain in gains)
    yield f"{'':{width}}  tokens/s  times alone  tokens a target pass"
    for gain in gains:
        figures = f"{gain.rate:8.0f}  {gain.ratio:11.2f}  {gain.tokens_per_pass:20.2f}"
        yield f"{gain.name:{width}}  {figures}"


def explained(gains: Sequence[Gain]) -> list[str]:
    """Returns what the reader of the table of alone, draft and copying sees, in lines."""
    _, draft, copying = gains
    return textwrap.wrap(
        "The last column is what could be gained if passes took no longer. Here one with the draft "
        f"took {draft.pass_time:.2f} times as long as one of the target alone, one with copying "
        f"{copying.pass_time:.2f} times: in models this small each row more to verify costs time, "
        "and each pass of the draft, so the pair drafts only where that pays. A pair a hundred "
        "times larger waits for its weights from memory, which a pass reads once, for one row as "
        "for several: it can draft in every pass, and gains nearly its last column. Answers of so "
        "small a target repeat themselves, from which copying gains most; a pair copies with "
        "`speculation.prompt_lookup: true` in its YAML.",
        width=100,
    )
