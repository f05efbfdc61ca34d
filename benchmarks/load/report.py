"""The tables, goals and drawing of what gpu_load.py measured.

    python -m benchmarks.load.report ours.jsonl vllm.jsonl --plot load.png

It needs neither a GPU nor torch. All files are joined: they must be of one kind of GPU. Rates are
means over sets of prompts of medians over rounds; times are medians over all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.gpu.goals import Goal
from benchmarks.load.goals import (
    RATIOS,
    Line,
    Place,
    Rates,
    goals,
    median_of,
    ratio,
)

_OTHERS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "Requests that come by chance; times in ms: median / 99th percentile",
        "Arrivals",
        {
            "share of its capacity": "share",
            "requests/s": "requests_per_second",
            "first token": "first_token",
            "between two chunks": "chunk_gap",
            "a token": "token_gap",
        },
    ),
    (
        "Chats; first tokens, in ms: the mean, and median / 99th percentile",
        "Chats",
        {
            "chats": "streams",
            "all turns": "mean_first_token_ms",
            "first turn": "first_turn",
            "later turns": "later_turns",
            "longest prompt": "longest_prompt",
            "cached tokens": "num_cached",
        },
    ),
    (
        "Streams while long prompts are read; times in ms: median / 99th percentile",
        "Readings",
        {
            "streams": "streams",
            "tokens": "long_tokens",
            "first token of these": "first_token",
            "between two chunks meanwhile": "gap_meanwhile",
            "and otherwise": "gap_otherwise",
        },
    ),
)
_TIMES = (
    ("first token, ms: median / 99th percentile", "first_token"),
    ("between two chunks of an answer, ms: median / 99th percentile", "chunk_gap"),
    ("a token behind the first, ms: median / 99th percentile", "token_gap"),
)


def report(lines: Sequence[Line]) -> str:
    """All of it, as Markdown."""
    rates = Rates(lines)
    told = _machine(lines)
    for length in rates.prompt_lengths():
        first = next(line for line in rates.points if line["prompt_tokens"] == length)
        told += [
            "",
            f"Prompts of {length:,} tokens, {first['max_tokens']} new ones: tokens/s (sets)",
        ]
        told += _table(rates, length, lambda place: _rate(rates, place))
        for title, name in _TIMES:
            told += ["", f"{title}:"]
            told += _table(rates, length, partial(_time, rates, name))
        told += ["", "tokens a pass of the target (draft tokens of it):"]
        told += _table(rates, length, lambda place: _acceptance(rates.lines(place)))
        told += _ratios(rates, length)
    for title, name, columns in _OTHERS:
        told += _others(title, columns, [line for line in rates.others if line["load"] == name])
    return "\n".join([*told, *_goals(goals(rates)), *_faults(lines)])


def _machine(lines: Iterable[Line]) -> list[str]:
    told = []
    for line in lines:
        if "process" in line and "about" in line:
            version = line["about"].get("vllm", "")
            told.append(
                f"{line['process']}{f' ({version})' if version else ''}: {line['gpu']}, "
                f"torch {line['torch']}, ready after {line['start_seconds']:.0f} s"
            )
    return list(dict.fromkeys(told))


def _table(rates: Rates, length: int, cell: Callable[[Place], str]) -> list[str]:
    """A line for each setting and a column for each number of streams."""
    streams = rates.streams(length)
    rows = []
    for side, setting in rates.sides(length):
        cells = [cell(Place(length, side, setting, number)) for number in streams]
        rows.append([f"{side} {setting}", *cells])
    return _markdown(["streams", *map(str, streams)], rows)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["", *(f"| {' | '.join(line)} |" for line in lines)]


def _rate(rates: Rates, place: Place) -> str:
    rate, of_sets = rates.at(place), rates.of_sets(place)
    if rate is None:
        return ""
    each = f" ({' '.join(f'{one:,.0f}' for one in of_sets)})" if len(of_sets) > 1 else ""
    return f"{rate:,.0f}{each}{'*' if any(line['is_cut'] for line in rates.lines(place)) else ''}"


def _time(rates: Rates, name: str, place: Place) -> str:
    return _percentiles(rates.lines(place), name)


def _percentiles(lines: Sequence[Line], name: str) -> str:
    values = [median_of(lines, name, key) for key in ("p50_ms", "p99_ms")]
    return " / ".join("" if value is None else f"{value:.3g}" for value in values).strip(" /")


def _acceptance(lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    length = fmean(line["acceptance_length"] for line in lines)
    drafted = fmean(line["draft_tokens_a_pass"] for line in lines)
    return f"{length:.2f} ({drafted:.2f})" if drafted else f"{length:.2f}"


def _others(title: str, columns: Mapping[str, str], lines: Sequence[Line]) -> list[str]:
    """A line for each place; figures of several rounds are medians."""
    places: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        place = (line["side"], line["setting"], line["streams"], line.get("share"))
        places.setdefault(place, []).append(line)
    rows = [
        [f"{of_place[0]['side']} {of_place[0]['setting']}"]
        + [_cell(of_place, name) for name in columns.values()]
        for of_place in places.values()
    ]
    return ["", f"{title}:", *_markdown(["", *columns], rows)] if rows else []


def _cell(lines: Sequence[Line], name: str) -> str:
    if isinstance(lines[0][name], dict | None):
        return _percentiles(lines, name)
    return f"{median(line[name] for line in lines):.4g}"


def _ratios(rates: Rates, length: int) -> list[str]:
    streams = rates.streams(length)
    rows = []
    for what in RATIOS:
        found = [ratio(rates, what, length, number) for number in streams]
        if any(found):
            cells = ["" if one is None else f"{one[0]:.3f} ({one[1]})" for one in found]
            rows.append([what.what, *cells])
    return ["", "ratios:", *_markdown(["streams", *map(str, streams)], rows)] if rows else []


def _goals(found: Sequence[Goal]) -> list[str]:
    """A line for each goal that has a figure; the others by name."""
    rows = []
    for goal in found:
        if goal.figure is not None and goal.bound is not None:
            wanted = f"{'<=' if goal.is_ceiling else '>='} {goal.bound:g}"
            reached = "reached" if goal.is_reached else "missed"
            note = f" ({goal.note})" if goal.note else ""
            rows.append([goal.what, wanted, f"{_figure(goal.figure)}{note}", reached])
    unknown: dict[str, list[str]] = {}
    for goal in found:
        if goal.figure is None:
            what, _, at = goal.what.partition(" at ")
            unknown.setdefault(what, []).append(at.partition(" ")[0])
    lines = _markdown(["goal", "wanted", "found", ""], rows) if rows else []
    if unknown:
        names = (f"{what} ({' '.join(at)})".removesuffix(" ()") for what, at in unknown.items())
        lines += ["", f"not measured: {'; '.join(names)}"]
    return lines


def _figure(figure: float | int) -> str:
    return str(figure) if isinstance(figure, int) else f"{figure:.3f}"


def _faults(lines: Iterable[Line]) -> list[str]:
    """What failed, was cut, or was answered otherwise than before."""
    told = []
    different: dict[str, int] = {}
    for line in lines:
        name = line.get("process") or f"{line['side']} {line['setting']}, {line['streams']} streams"
        if fault := line.get("error") or line.get("failed"):
            told.append(f"{name}: {fault}")
        if line.get("num_different"):
            setting = f"{line['side']} {line['setting']}"
            different[setting] = different.get(setting, 0) + line["num_different"]
    for setting, number in different.items():
        told.append(f"{setting}: answers that part from the first one of a prompt: {number}")
    if any(line.get("is_cut") for line in lines):
        told.append("*: cut by the time that a point may take")
    return ["", *told] if told else []


def draw(rates: Rates, path: Path) -> None:
    """Draws tokens a second, first tokens and gaps by streams, of the shortest prompts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    length = min(rates.prompt_lengths())
    figure, all_axes = pyplot.subplots(1, 3, figsize=(14, 4.5))
    for number, (side, setting) in enumerate(rates.sides(length)):
        places = [
            place
            for streams in rates.streams(length)
            if (place := Place(length, side, setting, streams)) in rates
        ]
        style: dict[str, Any] = {
            "color": f"C{number % 10}",
            "marker": "o" if side == "ours" else "s",
            "linestyle": "-" if side == "ours" else "--",
        }
        x = [place.streams for place in places]
        label = f"{side} {setting}"
        all_axes[0].plot(x, [rates.at(place) for place in places], label=label, **style)
        for axes, name in zip(all_axes[1:], ("first_token", "token_gap"), strict=True):
            medians = [median_of(rates.lines(place), name, "p50_ms") for place in places]
            axes.plot(x, [nan if value is None else value for value in medians], **style)
    titles = ("tokens/s of all streams", "first token, ms (median)", "a token, ms (median)")
    for axes, title in zip(all_axes, titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("streams")
        axes.set_title(title)
        axes.grid(True, color="#d5dbe1")
    all_axes[0].legend(fontsize=7)
    figure.suptitle(f"prompts of {length} tokens, greedy, streams always busy")
    figure.tight_layout()
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Joins files; raises ValueError for those of several kinds of GPUs."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    gpus = {line["gpu"] for line in lines if "gpu" in line}
    if len(gpus) > 1:
        raise ValueError(f"runs of {' and of '.join(sorted(gpus))} are several tables")
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, help="what gpu_load.py wrote to --out")
    parser.add_argument("--plot", type=Path, help="a PNG file for a drawing")
    arguments = parser.parse_args(argv)
    try:
        lines = read(arguments.runs)
    except ValueError as exc:
        parser.error(str(exc))
    print(report(lines))
    if arguments.plot is not None:
        draw(Rates(lines), arguments.plot)


if __name__ == "__main__":
    main()
