"""The tables and the drawing of what benchmarks.gpu measured.

    python -m benchmarks.gpu.report gpu-7b.json gpu-32b.json --peers peers.jsonl --plot gpu.png

It needs neither a GPU nor torch. Several runs must be of one machine, and have different pairs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import SMALL, UNMEASURED, Goal, Run, goals, measured, target_of


def report(run: Run) -> str:
    """The summary, and behind it tables of steps, rounds and peers, and what has no figures."""
    lines = summary(run)
    for name, pair in run["pairs"].items():
        lines += _steps_table(name, measured(pair.get("steps")))
        lines += _rounds_table(name, measured(pair.get("rounds")))
    lines += _peers_table(run.get("peers", []))
    for name, parts in {SMALL: {"small": run.get("small")}, **run["pairs"]}.items():
        for part, found in parts.items():
            if isinstance(found, Mapping) and found.keys() & UNMEASURED:
                what = next(found[key] for key in UNMEASURED if key in found)
                lines += ["", f"{name}, {part}: {what}"]
    return "\n".join(lines)


def summary(run: Run) -> list[str]:
    """What was measured on, and every figure beside its goal; docs/results.md has these lines."""
    machine = run["machine"]
    lines = [
        f"{machine['gpu']} (a copy moves {run['bytes_per_second'] / 1e12:.2f} TB/s), "
        f"torch {machine['torch']}, Triton {machine['triton']},",
        f"{machine['dtype']}, one stream, greedy unless said otherwise",
    ]
    for name, pair in run["pairs"].items():
        settings, size = pair["settings"], pair["num_parameters"]
        lines.append(
            f"{name}: {size['target'] / 1e9:.1f} B + {size['draft'] / 1e9:.3f} B parameters; "
            f"prompts: {settings['num_prompts']} of {settings['prompt_tokens']} tokens, "
            f"{settings['max_tokens']} new ones; runs: {settings['runs']}"
        )
    if peers := [line for line in run.get("peers", []) if "error" not in line]:
        versions = sorted({f"{p['engine'].partition('-')[0]} {p['version']}" for p in peers})
        lines.append(f"peers: {', '.join(versions)}")
    found = goals(run)
    for names in (list(run["pairs"]), [SMALL]):
        chosen = [goal for goal in found if goal.pair in names]
        if chosen:
            lines += ["", *_goals_table(names, chosen)]
    return lines


def _goals_table(names: Sequence[str], chosen: Sequence[Goal]) -> list[str]:
    """A line for each thing that was measured, a column for each pair."""
    by_what: dict[str, dict[str, Goal]] = {}
    for goal in chosen:
        by_what.setdefault(goal.what, {})[goal.pair] = goal
    rows = [["", *names, "goal", ""]]
    for what, by_pair in by_what.items():
        cells = [_cell(by_pair.get(name)) for name in names]
        rows.append([what, *cells, *_verdict(list(by_pair.values()), len(names))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _cell(goal: Goal | None) -> str:
    if goal is None:
        return ""
    return f"{_number(goal.figure)} ({goal.note})" if goal.note else _number(goal.figure)


def _verdict(same: Sequence[Goal], num_pairs: int) -> tuple[str, str]:
    """The goal of what was measured, and whether all pairs reached it, or which missed it."""
    bound = [goal for goal in same if goal.bound is not None]
    if not bound:
        return "", ""
    wanted = f"{'<=' if bound[0].is_ceiling else '>='} {bound[0].bound:g}"
    if len(bound) < len(same):
        wanted += f" ({', '.join(target_of(goal.pair) for goal in bound)})"
    if any(goal.figure is None for goal in bound):
        return wanted, "not measured"
    missed = [target_of(goal.pair) for goal in bound if not goal.is_reached]
    if not missed:
        return wanted, "reached"
    return wanted, "missed" if len(missed) == num_pairs else f"missed ({', '.join(missed)})"


def _steps_table(name: str, steps: Sequence[Run]) -> list[str]:
    """Milliseconds, and over the floor, by rows and context."""
    lines: list[str] = []
    contexts = sorted({step["context"] for step in steps})
    for model in ("target", "draft") if steps else ():
        places = {(s["rows"], s["context"]): s for s in steps if s["model"] == model}
        lines += [
            "",
            f"{name}, a step of the {model}, ms (over its floor):",
            "",
            f"| rows | {' | '.join(f'{context:,} tokens' for context in contexts)} |",
            f"|---|{'---|' * len(contexts)}",
        ]
        for rows in sorted({rows for rows, _ in places}):
            cells = (_step_cell(places.get((rows, context))) for context in contexts)
            lines.append(f"| {rows} | {' | '.join(cells)} |")
    return lines


def _step_cell(step: Run | None) -> str:
    if step is None:
        return ""
    return f"{1e3 * step['seconds']:.2f} ({step['seconds'] / step['floor_seconds']:.2f})"


def _rounds_table(name: str, rounds: Sequence[Run]) -> list[str]:
    if not rounds:
        return []
    lines = [
        "",
        f"{name}, by K:",
        "",
        "| K | round, ms | acceptance length | tokens/s | over alone | of rounds | of steps |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['num_draft_tokens']} | {1e3 * r['round_seconds']:.2f} "
        f"| {r['acceptance_length']:.2f} | {r['tokens_per_second']:.1f} | {r['speedup']:.2f} "
        f"| {r['of_rounds']:.2f} | {r['of_steps']:.2f} |"
        for r in rounds
    ]
    return lines


def _peers_table(peers: Sequence[Run]) -> list[str]:
    if not peers:
        return []
    lines = [
        "",
        "Peers, by K:",
        "",
        "| engine | version | K | tokens/s | acceptance length |",
        "|---|---|---|---|---|",
    ]
    for line in peers:
        place = f"| {line['engine']} | {line.get('version', '')} | {line['num_draft_tokens']} |"
        if "error" in line:
            lines.append(f"{place} {line['error']} | |")
        else:
            length = line["acceptance_length"]
            told = "" if length is None else f"{length:.2f}"
            lines.append(f"{place} {line['tokens_per_second']:.1f} | {told} |")
    return lines


def _number(figure: float | int | None) -> str:
    """Three digits or so; below 1 three decimals, as goals there have two."""
    if figure is None:
        return "not measured"
    if isinstance(figure, int):
        return str(figure)
    return f"{figure:.{3 if figure < 1 else 2 if figure < 10 else 0}f}"


def draw(run: Run, path: Path) -> None:
    """Draws step time with its floor: against context, against rows, and against bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_context, by_rows, by_size) = pyplot.subplots(1, 3, figsize=(13, 4))
    series = [
        (f"{name} {model}", [step for step in steps if step["model"] == model])
        for name, pair in run["pairs"].items()
        if (steps := measured(pair.get("steps")))
        for model in ("target", "draft")
    ]
    for number, (label, steps) in enumerate(series):
        color = f"C{number}"
        plain = [step for step in steps if step["rows"] == 1]
        least = min(step["context"] for step in steps)
        short = [step for step in steps if step["context"] == least]
        for axes, chosen, key in ((by_context, plain, "context"), (by_rows, short, "rows")):
            x = [step[key] for step in chosen]
            axes.plot(x, [1e3 * s["seconds"] for s in chosen], "o-", color=color, label=label)
            axes.plot(x, [1e3 * s["floor_seconds"] for s in chosen], ":", color=color)
        one = next(step for step in short if step["rows"] == 1)
        gigabytes = one["bytes"] / 1e9
        by_size.plot(gigabytes, 1e3 * one["seconds"], "o", color=color, label=label)
        by_size.plot(gigabytes, 1e3 * one["floor_seconds"], "_", color=color, markersize=14)
    by_context.set_xlabel("context, tokens (one row)")
    by_rows.set_xlabel("rows (shortest context)")
    by_size.set_xlabel("read by a step, GB (one row, shortest context)")
    for axes in (by_context, by_rows, by_size):
        axes.set_ylabel("step, ms")
        axes.set_yscale("log")
        axes.grid(True, color="#d5dbe1")
    by_context.set_xscale("log")
    by_size.set_xscale("log")
    by_context.legend(fontsize=8)
    figure.suptitle(
        f"{run['machine']['gpu']}, {run['machine']['dtype']}; dotted: bytes read at "
        f"{run['bytes_per_second'] / 1e12:.2f} TB/s"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def merged(runs: Sequence[Run]) -> dict[str, Any]:
    """Several runs of one machine as one; what the first says of it counts."""
    first, *others = runs
    whole = {**first, "pairs": dict(first["pairs"]), "peers": list(first.get("peers", []))}
    for run in others:
        if run["machine"] != first["machine"]:
            raise ValueError(f"runs of {first['machine']} and of {run['machine']} are two tables")
        if twice := whole["pairs"].keys() & run["pairs"].keys():
            raise ValueError(f"two runs have figures for {', '.join(sorted(twice))}")
        whole["pairs"] |= run["pairs"]
        whole["peers"] += run.get("peers", [])
        whole.setdefault("small", run.get("small"))
    return whole


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, help="what benchmarks.gpu wrote to --out")
    parser.add_argument("--peers", type=Path, help="what peers.py printed")
    parser.add_argument("--plot", type=Path, help="a PNG file for a drawing of the steps")
    arguments = parser.parse_args(argv)
    try:
        run = merged([json.loads(path.read_bytes()) for path in arguments.runs])
    except ValueError as exc:
        parser.error(str(exc))
    if arguments.peers is not None:
        run["peers"] += [json.loads(line) for line in arguments.peers.read_text().splitlines()]
    print(report(run))
    if arguments.plot is not None:
        draw(run, arguments.plot)


if __name__ == "__main__":
    main()
