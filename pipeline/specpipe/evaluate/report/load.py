"""Rates and latencies under load, with speculation and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specpipe.evaluate.report import conditions
from specpipe.evaluate.report.artifact import Artifact, Json
from specpipe.evaluate.report.blocks import (
    Block,
    Column,
    Figure,
    Missing,
    Notice,
    Table,
    interval,
    number,
    outdated,
    percent,
)
from specpipe.evaluate.report.charts import Axis, Chart, Panel, Series

_SIDE = 1
"""The colour of the side that is compared with the baseline."""


def blocks(artifact: Artifact) -> Iterator[Block]:
    """Yields the verdict in words, the curves, and what became of the answers."""
    bench = artifact.bench
    if bench is None:
        yield Missing("Speed under load was not measured.", artifact.command("bench"))
        return
    yield from outdated(artifact, bench, "bench")
    if bench["verdict"]:
        yield Notice(bench["verdict"])
    yield from _figures(artifact)
    yield _answers(bench)
    gpus = _gpus(bench)
    if gpus.rows:
        yield gpus


def _answers(bench: Json) -> Table:
    settings = bench["settings"]
    limits = [
        f"{name} at most {settings[key]:g} ms"
        for name, key in (
            ("first token", "first_output_limit_ms"),
            ("output token", "output_token_limit_ms"),
        )
        if settings[key] is not None
    ]
    return Table(
        "Answers",
        (
            Column("concurrency", "streams"),
            Column("side", is_text=True),
            Column("asked", "answers"),
            Column("failed", "answers"),
            Column("cut", "answers"),
            Column("complete", "answers/s"),
            Column("good", "answers/s"),
            Column("accepted", "%"),
            Column("acceptance length", "tokens per step"),
        ),
        [
            [
                str(load["concurrency"]),
                side["name"],
                str(summary["num_answers"]),
                str(summary["num_failed"]),
                str(summary["num_cut"]),
                number(summary["answers_per_s"]),
                number(summary["good_answers_per_s"]),
                percent(acceptance.get("rate")),
                number(acceptance.get("length")),
            ]
            for load in bench["loads"]
            for side in bench["sides"]
            for summary in [load["sides"][side["name"]]]
            for acceptance in [summary["acceptance"] or summary["server_counters"] or {}]
        ],
        note=f"Good: {' and '.join(limits) if limits else 'complete; no limits were given'}. "
        "Failed and cut answers are in no other number.",
    )


def _gpus(bench: Json) -> Table:
    return Table(
        "GPUs during the benchmark",
        (
            Column("concurrency", "streams"),
            Column("side", is_text=True),
            Column("GPU"),
            Column("memory, at most", "MiB"),
            Column("utilisation, mean", "%"),
        ),
        [
            [
                str(load["concurrency"]),
                side["name"],
                str(gpu["gpu"]),
                number(gpu["max_memory_mib"], 0),
                number(gpu["mean_utilization_percent"], 0),
            ]
            for load in bench["loads"]
            for side in bench["sides"]
            for gpu in load["sides"][side["name"]]["gpus"]
        ],
    )


def _figures(artifact: Artifact) -> Iterator[Figure]:
    """Yields rates and latencies over concurrency, a line for each side; and the ratio of two."""
    bench = artifact.bench
    if bench is None or not bench["loads"]:
        return
    under = conditions.of_bench(artifact, bench)
    if any(load["comparison"] is not None for load in bench["loads"]):
        yield _ratio(bench, under)
    yield from (_over_concurrency(bench, measure, under) for measure in _MEASURES)


def _ratio(bench: Json, under: str) -> Figure:
    comparisons = [load["comparison"] for load in bench["loads"] if load["comparison"] is not None]
    has_bounds = all(c["low"] is not None and c["high"] is not None for c in comparisons)
    baseline, side = (s["name"] for s in bench["sides"])
    return Figure(
        slug="ratio",
        title="Speed-up under load",
        caption=f"Tokens per second of a stream, {side} over {baseline}, same prompts in one run; "
        f"bars: 95 % bootstrap interval, drawing prompts, widened to each round by itself. Other "
        f"text: of prompts whose answers were not all alike. {under}",
        chart=Chart(
            x=_concurrency([c["concurrency"] for c in comparisons]),
            y=Axis("speed-up", f"× {baseline}", low=0),
            panels=[
                Panel(
                    [
                        Series(
                            name=side,
                            x=[c["concurrency"] for c in comparisons],
                            y=[c["ratio"] for c in comparisons],
                            bounds=[(c["low"], c["high"]) for c in comparisons]
                            if has_bounds
                            else (),
                            colour=_SIDE,
                        )
                    ]
                )
            ],
            reference=1.0,
        ),
        table=Table(
            "Speed-up under load",
            (
                Column("concurrency", "streams"),
                Column("ratio", "×"),
                Column("95 % interval", "×"),
                Column("compared", "prompts"),
                Column("other text", "prompts"),
                Column("outcome", is_text=True),
            ),
            [
                [
                    str(c["concurrency"]),
                    number(c["ratio"]),
                    interval(c["low"], c["high"]),
                    str(c["num_prompts"]),
                    str(c["num_differing_prompts"]),
                    c["outcome"],
                ]
                for c in comparisons
            ],
        ),
    )


@dataclass(frozen=True)
class _Measure:
    """One thing that is measured at every concurrency.

    lines  what is drawn of it, by name; the first one is drawn through, others dashed
    """

    slug: str
    title: str
    axis: Axis
    about: str
    lines: dict[str, Callable[[Json], float | None]]
    num_digits: int = 1


def _within(key: str, name: str) -> Callable[[Json], float | None]:
    def read(summary: Json) -> float | None:
        distribution = summary[key]
        return None if distribution is None else float(distribution[name])

    return read


_MEASURES = (
    _Measure(
        "throughput",
        "Throughput",
        Axis("output", "tokens/s", low=0),
        "Output tokens per second of all streams together; complete answers alone count.",
        {"": lambda summary: summary["output_tokens_per_s"]},
    ),
    _Measure(
        "first-token",
        "Time to first token",
        Axis("time to first token", "ms", low=0),
        "From the question to the first output; lines: median and 99th percentile.",
        {"p50": _within("first_output_ms", "p50"), "p99": _within("first_output_ms", "p99")},
    ),
    _Measure(
        "output-token",
        "Time per output token",
        Axis("time per output token", "ms", low=0),
        "After the first output; lines: mean over tokens, and 99th percentile over answers.",
        {"mean": _within("output_token_ms", "mean"), "p99": _within("output_token_ms", "p99")},
        num_digits=2,
    ),
    _Measure(
        "gap",
        "Gaps between outputs",
        Axis("gap between outputs", "ms", low=0),
        "What a reader of the stream waits between two pieces, each of which may hold several "
        "tokens; lines: median and 99th percentile.",
        {"p50": _within("gap_ms", "p50"), "p99": _within("gap_ms", "p99")},
        num_digits=2,
    ),
)


def _over_concurrency(bench: Json, measure: _Measure, under: str) -> Figure:
    loads = bench["loads"]
    names = [side["name"] for side in bench["sides"]]
    series = []
    rows = []
    for colour, name in enumerate(names):
        for number_of_line, (line, read) in enumerate(measure.lines.items()):
            points = [(load["concurrency"], read(load["sides"][name])) for load in loads]
            known = [(x, y) for x, y in points if y is not None]
            series.append(
                Series(
                    name=f"{name}, {line}" if line else name,
                    x=[x for x, _ in known],
                    y=[y for _, y in known],
                    colour=colour,
                    style="dashed" if number_of_line else "line",
                )
            )
    for load in loads:
        for name in names:
            values = [read(load["sides"][name]) for read in measure.lines.values()]
            cells = [number(value, measure.num_digits) for value in values]
            rows.append([str(load["concurrency"]), name, *cells])
    return Figure(
        slug=measure.slug,
        title=measure.title,
        caption=f"{measure.about} {under}",
        chart=Chart(
            x=_concurrency([load["concurrency"] for load in loads]),
            y=measure.axis,
            panels=[Panel(series)],
        ),
        table=Table(
            measure.title,
            (
                Column("concurrency", "streams"),
                Column("side", is_text=True),
                *(Column(line or measure.axis.name, measure.axis.unit) for line in measure.lines),
            ),
            rows,
        ),
    )


def _concurrency(values: Sequence[int]) -> Axis:
    ticks = tuple(float(value) for value in values)
    return Axis("concurrency", "streams", ticks=ticks, is_log=len(ticks) > 1)
