"""What follows from the times that gpu.py measures: floors, predictions, goals and a drawing.

It needs neither a GPU nor torch. Times are seconds; a run is the JSON that gpu.py writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Run = Mapping[str, Any]

_MAX_STEP_RATIO = 1.15
_MAX_DRAFT_RATIO = 2.4
_MIN_OF_PREDICTED = 0.9
_MIN_SPEEDUP = {"32b": 2.0}
_MIN_OVER_PEERS = (
    ("vLLM", 1.8, ("vllm",)),
    ("transformers, as it comes", 5.0, ("transformers",)),
    ("transformers at its best", 2.0, ("transformers", "transformers-compiled")),
)
_MIN_HOPELESS = 0.98
_MIN_FP8 = 1.6
_MIN_BUSY = 0.95
_SEVEN_BILLION = "7b"

_UNMEASURED = {"error", "not_run"}
"""What a part has instead of figures."""


def kv_bytes(
    windows: Sequence[int | None],
    *,
    num_kv_heads: int,
    head_size: int,
    num_positions: int,
    element_bytes: int,
) -> int:
    """Bytes of keys and values that a step reads of one sequence; a window for each layer."""
    positions = sum(min(window or num_positions, num_positions) for window in windows)
    return 2 * positions * num_kv_heads * head_size * element_bytes


def steps_speedup(acceptance_length: float, draft: float, verification: float, plain: float,
                  num_draft_tokens: int) -> float:  # fmt: skip
    """The speedup that K draft steps and one verification should give over plain steps."""
    return acceptance_length * plain / (num_draft_tokens * draft + verification)


def covered(intervals: Iterable[tuple[float, float]], start: float, stop: float) -> float:
    """How much of start … stop the intervals cover together."""
    total, reached = 0.0, start
    for first, last in sorted(intervals):
        first, last = max(first, reached), min(last, stop)
        if last > first:
            total += last - first
            reached = last
    return total


@dataclass(frozen=True)
class Goal:
    """One line of the table.

    bound  what the figure must not go below, or above where is_ceiling; None: it is only told
    """

    pair: str
    what: str
    figure: float
    bound: float | None
    is_ceiling: bool = False
    note: str = ""

    @property
    def is_reached(self) -> bool | None:
        if self.bound is None:
            return None
        return self.figure <= self.bound if self.is_ceiling else self.figure >= self.bound


def goals(run: Run) -> list[Goal]:
    """Returns what the run has figures for, in the order of a run."""
    found = _small_goals(_measured(run.get("small")))
    for name, pair in run["pairs"].items():
        found += _step_goals(name, _measured(pair.get("steps")))
        found += _round_goals(name, pair)
        found += _other_goals(name, pair)
        found += _peer_goals(name, pair, run.get("peers", []))
    return found


def _small_goals(small: Any) -> list[Goal]:
    found: list[Goal] = []
    for dtype, of_dtype in dict(small).items():
        bound = 0.0 if dtype == "float32" else None  # ties are no fault in others
        for role in ("draft", "target"):
            engine = of_dtype[role]
            what = f"{role}, {dtype}: best tokens that differ from the plain engine's"
            note = f"of {engine['num_tokens']}; largest error {engine['max_error']:.1e}"
            note += _margins(engine["margins"])
            different = float(engine["num_different"])
            found.append(Goal("small", what, different, bound, is_ceiling=True, note=note))
        rounds = of_dtype["rounds"]
        what = f"rounds, {dtype}: answers that differ from the plain engine's"
        note = f"of {rounds['num_answers']}, K = {rounds['num_draft_tokens']}"
        different = float(rounds["num_different"])
        found.append(Goal("small", what, different, bound, is_ceiling=True, note=note))
    return found


def _step_goals(name: str, steps: Sequence[Run]) -> list[Goal]:
    found: list[Goal] = []
    for model, bound in (("target", _MAX_STEP_RATIO), ("draft", _MAX_DRAFT_RATIO)):
        plain = [step for step in steps if step["model"] == model and step["rows"] == 1]
        first = min((step["context"] for step in plain), default=None)
        found += [
            Goal(
                name,
                f"{model} step after {step['context']:,} tokens, over its floor",
                step["seconds"] / step["floor_seconds"],
                bound if step["context"] == first else None,
                is_ceiling=True,
                note=f"{1e3 * step['seconds']:.2f} ms, floor {1e3 * step['floor_seconds']:.2f}",
            )
            for step in plain
        ]
    return found


def _round_goals(name: str, pair: Run) -> list[Goal]:
    rounds = _measured(pair.get("rounds"))
    if not rounds:
        return []
    found = []
    speculative = [r for r in rounds if r["num_draft_tokens"]]
    if speculative:
        worst = min(speculative, key=lambda r: r["of_steps"])
        found.append(
            Goal(
                name,
                "speedup over what acceptance and steps predict, worst K",
                worst["of_steps"],
                _MIN_OF_PREDICTED,
                note=f"K = {worst['num_draft_tokens']}; of whole rounds {worst['of_rounds']:.2f}",
            )
        )
        best = max(speculative, key=lambda r: r["speedup"])
        found.append(
            Goal(
                name,
                "speculation over target alone, best K",
                best["speedup"],
                _MIN_SPEEDUP.get(_target_of(name)),
                note=f"K = {best['num_draft_tokens']}, {best['tokens_per_second']:.0f} tokens/s, "
                f"acceptance length {best['acceptance_length']:.2f}",
            )
        )
    different = sum(r["num_different"] for r in rounds)
    margins = [margin for r in rounds for margin in r["margins"]]
    found.append(
        Goal(
            name,
            "answers that differ from target alone, all K",
            float(different),
            0.0,
            is_ceiling=True,
            note=f"of {sum(r['num_answers'] for r in speculative)}{_margins(margins)}",
        )
    )
    return found


def _other_goals(name: str, pair: Run) -> list[Goal]:
    found = []
    if own := _measured(pair.get("own")):
        found.append(
            Goal(
                name,
                "acceptance rate of the target as its own draft",
                own["acceptance_rate"],
                1.0,
                note=f"K = {own['num_draft_tokens']}",
            )
        )
    for part, what, bound in (
        ("adaptive", "adaptive K over target alone", None),
        ("hopeless", "adaptive K with a draft of noise, over target alone", _MIN_HOPELESS),
    ):
        if ratio := _measured(pair.get(part)):
            figure = ratio["tokens_per_second"] / ratio["alone_tokens_per_second"]
            note = f"{ratio['tokens_per_second']:.0f} tokens/s"
            found.append(Goal(name, what, figure, bound, note=note))
    if fp8 := _measured(pair.get("fp8")):
        figure = fp8["plain_seconds"] / fp8["seconds"]
        bound = _MIN_FP8 if _target_of(name) == _SEVEN_BILLION else None
        note = f"a step of {1e3 * fp8['seconds']:.2f} ms"
        found.append(Goal(name, "fp8 target over bf16", figure, bound, note=note))
    if busy := _measured(pair.get("busy")):
        note = f"K = {busy['num_draft_tokens']}; by the profiler alone {busy['profiled']:.3f}"
        found.append(Goal(name, "GPU busy in steady decode", busy["busy"], _MIN_BUSY, note=note))
    return found


def _peer_goals(name: str, pair: Run, peers: Sequence[Run]) -> list[Goal]:
    """The best K of either side."""
    rounds = _measured(pair.get("rounds"))
    if _target_of(name) != _SEVEN_BILLION or not rounds:
        return []
    ours = max(r["tokens_per_second"] for r in rounds)
    found = []
    for what, bound, engines in _MIN_OVER_PEERS:
        lines = [line for line in peers if line["engine"] in engines and "error" not in line]
        if lines:
            best = max(lines, key=lambda line: line["tokens_per_second"])
            found.append(
                Goal(
                    name,
                    f"best K over the best of {what}",
                    ours / best["tokens_per_second"],
                    bound,
                    note=f"{ours:.0f} against {best['tokens_per_second']:.0f} tokens/s, "
                    f"{best['engine']} {best['version']}, K = {best['num_draft_tokens']}",
                )
            )
    return found


def _measured(part: Any) -> Any:
    """Returns the figures of a part; nothing where it was left out, failed or cannot be."""
    return [] if isinstance(part, Mapping) and part.keys() & _UNMEASURED else part or []


def _target_of(pair: str) -> str:
    return pair.partition("+")[0]


def _margins(margins: Sequence[float]) -> str:
    if not margins:
        return ""
    return f"; logit margins {', '.join(f'{margin:.3f}' for margin in sorted(margins))}"


def markdown(run: Run) -> str:
    """The run as tables: goals, then rounds by K."""
    machine = run["machine"]
    lines = [
        f"{machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}, "
        f"{machine['dtype']}; a copy moves {run['bytes_per_second'] / 1e12:.2f} TB/s.",
        "",
        "| pair | what | wanted | measured | |",
        "|---|---|---|---|---|",
    ]
    for goal in goals(run):
        sign = "≤" if goal.is_ceiling else "≥"
        wanted = "" if goal.bound is None else f"{sign} {goal.bound:g}"
        verdict = {True: "reached", False: "missed", None: ""}[goal.is_reached]
        note = f" ({goal.note})" if goal.note else ""
        lines.append(
            f"| {goal.pair} | {goal.what} | {wanted} | {_number(goal.figure)}{note} | {verdict} |"
        )
    for name, pair in run["pairs"].items():
        lines += _steps_table(name, _measured(pair.get("steps")))
        lines += _rounds_table(name, _measured(pair.get("rounds")))
    for name, parts in {"small": {"small": run.get("small")}, **run["pairs"]}.items():
        for part, found in parts.items():
            if isinstance(found, Mapping) and found.keys() & _UNMEASURED:
                what = next(found[key] for key in _UNMEASURED if key in found)
                lines += ["", f"{name}, {part}: {what}"]
    return "\n".join(lines)


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


def _number(figure: float) -> str:
    return f"{figure:.0f}" if figure == int(figure) else f"{figure:.3g}"


def draw(run: Run, path: Path) -> None:
    """Draws step time with its floor: against context, against rows, and against bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_context, by_rows, by_size) = pyplot.subplots(1, 3, figsize=(13, 4))
    series = [
        (f"{name} {model}", [step for step in steps if step["model"] == model])
        for name, pair in run["pairs"].items()
        if (steps := _measured(pair.get("steps")))
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
