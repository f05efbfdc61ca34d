"""A whole benchmark: sides in turns at each concurrency, and what came of it as one result."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specpipe.errors import ServerError
from specpipe.evaluate.bench import compare, counters, export, gpu
from specpipe.evaluate.bench.load import Load, in_turns, run_load
from specpipe.evaluate.bench.metrics import CountTokens, LatencyLimits, Summary, summarize
from specpipe.evaluate.endpoints.base import Endpoint, Question, TimedAnswer, record
from specpipe.evaluate.prompts import Prompt, PromptSet
from specpipe.machine.callables import Log
from specpipe.machine.prometheus import Sample, Samples
from specpipe.progress import count, logged_phase, phase
from specpipe.speculative.request import GREEDY, Sampling

DEFAULT_MAX_TOKENS = 128  # of an answer, where neither its prompt nor --max-tokens says


@dataclass(frozen=True, kw_only=True)
class BenchSide:
    """One of the two things that are compared, or the only one.

    num_draft_tokens  None: as the server was set up
    metrics_url       where its counters are; None: they are not read
    is_local          whether it runs on this machine, whose GPUs are then watched
    """

    name: str
    endpoint: Endpoint
    num_draft_tokens: int | None = None
    metrics_url: str | None = None
    is_local: bool = False


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """How a benchmark asks; the same for all sides.

    num_warm_up  answers thrown away before each load; one for each stream at least
    seed         draws lengths and the order of the prompts; sampled answers count up from it
    """

    concurrencies: tuple[int, ...] = (1, 4, 8)
    rounds: int = 3
    num_warm_up: int = 0
    sampling: Sampling = GREEDY
    ignores_end: bool = False
    seed: int = 0
    limits: LatencyLimits = LatencyLimits()

    def to_json(self) -> dict[str, Any]:
        sampling = self.sampling
        return {
            "concurrencies": list(self.concurrencies),
            "rounds": self.rounds,
            "num_warm_up": self.num_warm_up,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "ignores_end": self.ignores_end,
            "seed": self.seed,
            "first_output_limit_ms": _milliseconds(self.limits.first_output_s),
            "output_token_limit_ms": _milliseconds(self.limits.output_token_s),
        }


@dataclass
class SideLoads:
    """All loads of one side at one concurrency, with the prompts of their answers."""

    loads: list[Load] = field(default_factory=list)
    prompts: list[tuple[Prompt, ...]] = field(default_factory=list)
    grown: dict[Sample, float] = field(default_factory=dict)
    """How much the server's counters grew in all loads, by name."""
    gpu_use: gpu.GpuUse = field(default_factory=gpu.GpuUse)

    def answers_by_prompt(self) -> dict[str, list[TimedAnswer]]:
        """Returns the answers to each prompt, by its name."""
        answers: dict[str, list[TimedAnswer]] = {}
        for load, prompts in zip(self.loads, self.prompts, strict=True):
            for prompt, answer in zip(prompts, load.answers, strict=True):
                answers.setdefault(prompt.name, []).append(answer)
        return answers


@dataclass(frozen=True)
class Measurements:
    """Everything that was measured, by concurrency and by the name of the side.

    The first side is the baseline of the second.
    """

    sides: tuple[BenchSide, ...]
    by_concurrency: dict[int, dict[str, SideLoads]]

    def summaries(
        self, limits: LatencyLimits, count_tokens: CountTokens | None
    ) -> dict[int, dict[str, Summary]]:
        """Returns what each side came to at each concurrency."""
        return {
            concurrency: {
                name: summarize(measured.loads, limits=limits, count_tokens=count_tokens)
                for name, measured in by_side.items()
            }
            for concurrency, by_side in self.by_concurrency.items()
        }

    def comparisons(self, count_tokens: CountTokens | None) -> list[compare.RateComparison]:
        """Returns the second side against the first at each concurrency where that can be told."""
        if len(self.sides) < 2:
            return []
        baseline, side = self.sides
        comparisons = (
            compare.compare(
                by_side[baseline.name].answers_by_prompt(),
                by_side[side.name].answers_by_prompt(),
                concurrency=concurrency,
                count_tokens=count_tokens,
            )
            for concurrency, by_side in self.by_concurrency.items()
        )
        return [comparison for comparison in comparisons if comparison is not None]


def measure(
    sides: Sequence[BenchSide], prompts: PromptSet, settings: BenchSettings, *, report: Log
) -> Measurements:
    """Asks all prompts on all sides, in turns, at each concurrency.

    Raises ServerError when a side cannot answer the first prompt at all.
    """
    if len(sides) > 1:
        compare.require_scipy()
    for side in sides:
        _check(side, prompts.prompts[0], settings)
    by_concurrency = {
        concurrency: {side.name: SideLoads() for side in sides}
        for concurrency in settings.concurrencies
    }
    num_loads = len(by_concurrency) * settings.rounds * len(sides)
    report(f"to measure: {num_loads} loads of {len(prompts.prompts)} answers each, and warm-ups")
    with phase("bench"), count(num_loads, "loads") as done:
        for concurrency, measured in by_concurrency.items():
            for number, side in enumerate(in_turns(sides, settings.rounds)):
                round_number = number // len(sides)
                name = f"concurrency {concurrency}, round {round_number + 1}: {side.name}"
                ordered = _order(prompts.prompts, settings.seed + round_number)
                with logged_phase(name, report):
                    _add_load(measured[side.name], side, ordered, concurrency, settings, report)
                done.advance()
    return Measurements(tuple(sides), by_concurrency)


def result(
    measurements: Measurements, settings: BenchSettings, *, count_tokens: CountTokens | None
) -> dict[str, Any]:
    """Returns the JSON of a benchmark, without its header."""
    sides = measurements.sides
    summaries = measurements.summaries(settings.limits, count_tokens)
    comparisons = {c.concurrency: c for c in measurements.comparisons(count_tokens)}
    return {
        "sides": [
            {
                "name": side.name,
                "endpoint": side.endpoint.name,
                "num_draft_tokens": side.num_draft_tokens,
            }
            for side in sides
        ],
        "loads": [
            {
                "concurrency": concurrency,
                "sides": {
                    name: {
                        **summary.to_json(),
                        "server_counters": counters.acceptance(by_side[name].grown),
                        "gpus": by_side[name].gpu_use.to_json(),
                    }
                    for name, summary in summaries[concurrency].items()
                },
                "comparison": comparisons[concurrency].to_json()
                if concurrency in comparisons
                else None,
            }
            for concurrency, by_side in measurements.by_concurrency.items()
        ],
        "verdict": None
        if len(sides) < 2
        else compare.verdict(
            list(comparisons.values()), side=sides[1].name, baseline=sides[0].name
        ),
    }


def write_records(
    folder: Path, measurements: Measurements, *, count_tokens: CountTokens | None
) -> None:
    """Writes the answers as aiperf's records, one file for each side and concurrency."""
    for concurrency, by_side in measurements.by_concurrency.items():
        for number, side in enumerate(measurements.sides):
            export.write_records(
                folder / f"side{number}-concurrency{concurrency}" / "profile_export.jsonl",
                by_side[side.name].loads,
                count_tokens=count_tokens,
            )


def _check(side: BenchSide, prompt: Prompt, settings: BenchSettings) -> None:
    question = replace(_question(side, prompt, settings, 0), max_tokens=1)
    answer = record(side.endpoint, question)
    if not answer.is_complete:
        raise ServerError(f"{side.name}: {answer.error}")


def _add_load(
    measured: SideLoads,
    side: BenchSide,
    prompts: Sequence[tuple[int, Prompt]],
    concurrency: int,
    settings: BenchSettings,
    report: Log,
) -> None:
    def read() -> Samples:
        url = side.metrics_url
        return counters.read_settled(url, report=report) if url else {}

    questions = [_question(side, prompt, settings, number) for number, prompt in prompts]
    before = read()
    with gpu.watched(measured.gpu_use, where=side.is_local):
        load = run_load(
            side.endpoint, questions, concurrency=concurrency, num_warm_up=settings.num_warm_up
        )
    grown = counters.gained(before, read())
    if late_work := counters.late_work(grown):
        report(f"warning: {side.name}: {late_work}, which the times have in them")
    for sample, value in grown.items():
        measured.grown[sample] = measured.grown.get(sample, 0.0) + value
    measured.loads.append(load)
    measured.prompts.append(tuple(prompt for _, prompt in prompts))


def _question(side: BenchSide, prompt: Prompt, settings: BenchSettings, number: int) -> Question:
    """Returns a question that is the same on every side and in every round, but for its K."""
    sampling = settings.sampling
    if not sampling.is_greedy:
        sampling = replace(sampling, seed=settings.seed + number, is_seeded=True)
    return Question(
        text=prompt.text,
        messages=prompt.messages,
        max_tokens=prompt.max_tokens or DEFAULT_MAX_TOKENS,
        num_draft_tokens=side.num_draft_tokens,
        sampling=sampling,
        ignores_end=settings.ignores_end,
    )


def _order(prompts: Sequence[Prompt], seed: int) -> list[tuple[int, Prompt]]:
    """Returns the prompts with their numbers, in another order each round."""
    numbered = list(enumerate(prompts))
    random.Random(seed).shuffle(numbered)
    return numbered


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
