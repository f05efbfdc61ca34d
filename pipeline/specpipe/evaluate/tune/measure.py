"""What draft lengths gain, measured: a closed loop in this process, in turns with the target alone.

A cell is one round of one draft length at one load: all prompts, each asked once at least.

A step of the pair takes no less than one of the target alone, so that no draft length can gain more
than the tokens that a step gives. What is measured beyond that is a disturbed measurement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specpipe.errors import ServerError
from specpipe.evaluate.bench.load import run_load
from specpipe.evaluate.endpoints.base import Endpoint, Question

_UNSTEADY = 1.3
"""Highest / lowest round from which on a measurement says little: most gains are smaller. A
guess."""

_CLOSE = 1.05
"""A speed-up whose 95% interval is no wider than this factor either way is certain enough. A
guess."""

_FEW_ROUNDS_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles of Student's distribution with 1 to 9 degrees of freedom."""


@dataclass(frozen=True)
class Cell:
    """Tokens of one round, and the seconds that the streams spent on them."""

    concurrency: int
    num_draft_tokens: int
    round_number: int
    num_tokens: int
    stream_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all streams together, which are busy all the time."""
        return self.concurrency * self.num_tokens / self.stream_s

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One draft length at one load against the target alone.

    speed_up         ratio of tokens per second over all rounds
    lowest, highest  that of a single round
    low, high        95% interval, from the rounds' own ratios; None with fewer than two rounds
    tokens_a_step    the most that a speed-up can be; None where it is not known
    """

    concurrency: int
    num_draft_tokens: int
    tokens_per_s: float
    speed_up: float
    lowest: float
    highest: float
    low: float | None = None
    high: float | None = None
    tokens_a_step: float | None = None

    @property
    def is_possible(self) -> bool:
        """Whether acceptance allows the ratio, but for what rounds of a quiet machine differ by."""
        return self.tokens_a_step is None or self.speed_up <= self.tokens_a_step * _CLOSE

    @property
    def is_close(self) -> bool:
        """Whether the ratio is known well enough, whatever it is."""
        return self.low is not None and self.high is not None and self.high / self.low <= _CLOSE**2


def measure_cell(
    endpoint: Endpoint,
    questions: Sequence[Question],
    *,
    concurrency: int,
    num_draft_tokens: int,
    round_number: int,
) -> Cell:
    """Asks the questions with that many streams.

    Raises ServerError when one is not answered, or when there is no speed in the answers.
    """
    repeated = [*questions] * -(-concurrency // len(questions))
    load = run_load(endpoint, repeated, concurrency=concurrency)
    failed = [answer for answer in load.answers if not answer.is_complete]
    if failed:
        raise ServerError(
            f"{len(failed)} of {len(load.answers)} questions failed with {num_draft_tokens} draft "
            f"tokens at concurrency {concurrency}: {failed[0].error}"
        )
    num_tokens = sum(answer.num_output_tokens or 0 for answer in load.answers)
    if not num_tokens:
        raise ServerError(
            "the target ends every answer at once, so no speed can be measured: choose other "
            "prompts with --prompts; a chat model wants them in its chat template, with --chat"
        )
    return Cell(
        concurrency=concurrency,
        num_draft_tokens=num_draft_tokens,
        round_number=round_number,
        num_tokens=num_tokens,
        stream_s=sum(answer.ended_s - answer.started_s for answer in load.answers),
    )


def whole_rounds(cells: Sequence[Cell], wanted: Mapping[int, Sequence[int]]) -> list[Cell]:
    """Returns the cells of whole rounds: those with all the draft lengths that a load wants.

    A round that was interrupted is measured anew: its sides were to run one after the other.
    """
    measured: dict[tuple[int, int], set[int]] = {}
    for cell in cells:
        measured.setdefault((cell.concurrency, cell.round_number), set()).add(cell.num_draft_tokens)
    return [
        cell
        for cell in cells
        if set(wanted.get(cell.concurrency, ())) == measured[cell.concurrency, cell.round_number]
    ]


def compare(
    cells: Sequence[Cell], tokens_a_step: Mapping[int, float] | None = None
) -> list[Measurement]:
    """Returns every draft length against the target alone at the same load; needs whole rounds.

    tokens_a_step  by draft length, the most that its acceptance allows
    """
    measurements = []
    by_side: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        by_side.setdefault((cell.concurrency, cell.num_draft_tokens), []).append(cell)
    for (concurrency, length), side in sorted(by_side.items()):
        if length == 0:
            continue
        alone = {cell.round_number: cell for cell in by_side[concurrency, 0]}
        ratios = [cell.tokens_per_s / alone[cell.round_number].tokens_per_s for cell in side]
        measurements.append(
            Measurement(
                concurrency=concurrency,
                num_draft_tokens=length,
                tokens_per_s=_rate(side),
                speed_up=_rate(side) / _rate(list(alone.values())),
                lowest=min(ratios),
                highest=max(ratios),
                **_interval(ratios),
                tokens_a_step=(tokens_a_step or {}).get(length),
            )
        )
    return measurements


def doubt(rounds: Iterable[tuple[float, float]]) -> str | None:
    """Returns a warning where the lowest and highest round of one measurement are far apart."""
    spread = max((highest / lowest for lowest, highest in rounds), default=1.0)
    if spread < _UNSTEADY:
        return None
    return (
        f"Rounds of one measurement differ by a factor of up to {spread:.1f}: other work disturbed "
        "this machine, and what measured best may be chance. Tune again when it is quiet, or with "
        "more --rounds."
    )


def _interval(ratios: Sequence[float]) -> dict[str, float]:
    """Returns the 95% interval of ratios, whose logarithms scatter alike on both sides."""
    if len(ratios) < 2:
        return {}
    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    width = _student_t(len(logs) - 1) * error
    return {"low": math.exp(mean - width), "high": math.exp(mean + width)}


def _student_t(degrees: int) -> float:
    """Returns Student's 97.5% quantile (Abramowitz and Stegun, 26.7.5, from the tenth on)."""
    if degrees <= len(_FEW_ROUNDS_T):
        return _FEW_ROUNDS_T[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def _rate(cells: Sequence[Cell]) -> float:
    num_tokens = sum(cell.num_tokens for cell in cells)
    return cells[0].concurrency * num_tokens / sum(cell.stream_s for cell in cells)
