"""A benchmark as a reader sees it: a table of its figures, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specpipe.evaluate.bench.metrics import Distribution, Summary
from specpipe.machine.columns import aligned

_COLUMNS = (
    "streams",
    "side",
    "tokens/s",
    "TTFT p50",
    "p99",
    "TPOT mean",
    "p99",
    "gap p99",
    "good/s",
    "accepted",
    "per step",
    "failed, cut",
)


def lines(
    summaries: Mapping[int, Mapping[str, Summary]], result: dict[str, Any], *, is_one_server: bool
) -> Iterator[str]:
    """Yields the summaries of all sides as a table, and what a result says, as paragraphs."""
    yield from _table(summaries)
    for paragraph in _conclusions(result, is_one_server=is_one_server):
        yield f"\n{paragraph}"


def _table(summaries: Mapping[int, Mapping[str, Summary]]) -> Iterator[str]:
    """Yields the lines of a table by concurrency and side."""
    rows = [
        (str(concurrency), name, *_cells(summary))
        for concurrency, by_side in summaries.items()
        for name, summary in by_side.items()
    ]
    texts = (_COLUMNS.index("side"), _COLUMNS.index("failed, cut"))
    yield from aligned([_COLUMNS, *rows], texts=texts)
    yield (
        "times in ms; good/s: complete answers, within the limits if there are any; accepted: of "
        "the draft tokens; per step: tokens that a step emits"
    )


def _conclusions(result: dict[str, Any], *, is_one_server: bool) -> Iterator[str]:
    """Yields what the figures of a benchmark say, a paragraph each."""
    if failures := list(_failures(result)):
        yield "\n".join(["why answers failed or were cut:", *failures])
    if by_position := list(_by_position(result)):
        yield "\n".join(["accepted by position of the draft token:", *by_position])
    if result["verdict"]:
        yield result["verdict"]
    comparisons = [load["comparison"] for load in result["loads"] if load["comparison"]]
    differing = [
        (c["num_differing_prompts"], c["num_prompts"], c["concurrency"]) for c in comparisons
    ]
    if is_one_server and any(number for number, _, _ in differing):
        counts = ", ".join(f"{number} of {of} at {streams}" for number, of, streams in differing)
        yield (
            f"Prompts whose text was not always the same, by concurrency: {counts}. "
            "`specpipe verify` says which are numerical ties and which are faults."
        )


def _failures(result: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each load, side and error that answers ended with."""
    for load in result["loads"]:
        for name, side in load["sides"].items():
            for error, count in side["errors"].items():
                yield f"{load['concurrency']:7}  {name}: {count} of {side['num_answers']}: {error}"


def _by_position(result: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each load and side whose acceptance by position is known."""
    for load in result["loads"]:
        for name, side in load["sides"].items():
            sources = (side["acceptance"], side["server_counters"])
            rates = next((s["per_position"] for s in sources if s and s["per_position"]), None)
            if rates:
                shown = "  ".join(f"{rate:.2f}" for rate in rates)
                yield f"{load['concurrency']:7}  {name}: {shown}"


def _cells(summary: Summary) -> list[str]:
    acceptance = summary.acceptance
    return [
        _number(summary.output_tokens_per_s, 1),
        _milliseconds(summary.first_output_s, "p50", 1),
        _milliseconds(summary.first_output_s, "p99", 1),
        _milliseconds(summary.output_token_s, "mean", 2),
        _milliseconds(summary.output_token_s, "p99", 2),
        _milliseconds(summary.gap_s, "p99", 1),
        _number(summary.good_answers_per_s, 2),
        _number(None if acceptance is None else acceptance.rate, 2),
        _number(None if acceptance is None else acceptance.length, 2),
        f"{summary.num_failed}, {summary.num_cut} of {summary.num_answers}",
    ]


def _milliseconds(seconds: Distribution | None, name: str, num_digits: int) -> str:
    return _number(None if seconds is None else 1e3 * getattr(seconds, name), num_digits)


def _number(value: float | None, num_digits: int) -> str:
    return "-" if value is None else f"{value:.{num_digits}f}"
