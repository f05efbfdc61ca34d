"""What follows from the times that benchmarks.gpu measures: floors, predictions, and the goals.

Times are seconds; a run is the JSON that benchmarks.gpu writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Run = Mapping[str, Any]

_MAX_STEP_RATIO = 1.15
_MAX_DRAFT_RATIO = 2.4
_MIN_OF_PREDICTED = 0.9
_MIN_SPEEDUP = {"32b": 2.0}
_MIN_HOPELESS = 0.98
_MIN_FP8 = 1.6
_MIN_BUSY = 0.95
_SEVEN_BILLION = "7b"

SMALL = "small pair"
UNMEASURED = {"error", "not_run"}
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
    """One figure of a pair; those of the same name make a line of the table.

    figure  an int is a count; None: it could not be measured
    bound   what the figure must not go below, or above where is_ceiling; None: it is only told
    """

    pair: str
    what: str
    figure: float | int | None
    bound: float | None
    is_ceiling: bool = False
    note: str = ""

    @property
    def is_reached(self) -> bool | None:
        if self.bound is None or self.figure is None:
            return None
        return self.figure <= self.bound if self.is_ceiling else self.figure >= self.bound


@dataclass(frozen=True)
class _PeerGoal:
    """How much faster than the best of other engines a part is to be.

    engines  without lines of theirs there is no goal
    others   engines whose lines count too, where there is one
    """

    what: str
    part: str
    bound: float
    engines: tuple[str, ...]
    others: tuple[str, ...] = ()


_PEER_GOALS = (
    _PeerGoal("best K over vLLM's best with the pair", "rounds", 1.8, ("vllm",)),
    _PeerGoal(
        "prompt lookup over vLLM's best with n-gram drafts",
        "lookup",
        1.8,
        ("vllm-ngram",),
        others=("vllm",),
    ),
    _PeerGoal("best K over transformers as it comes", "rounds", 5.0, ("transformers",)),
    _PeerGoal(
        "best K over transformers' best",
        "rounds",
        2.0,
        ("transformers", "transformers-compiled"),
    ),
)


def goals(run: Run) -> list[Goal]:
    """Returns what the run has figures for, in the order of a run."""
    found = _small_goals(measured(run.get("small")))
    for name, pair in run["pairs"].items():
        found += _step_goals(name, measured(pair.get("steps")))
        found += _round_goals(name, pair)
        found += _sampled_goals(name, measured(pair.get("sampled")))
        found += _other_goals(name, pair)
        found += _peer_goals(name, pair, run.get("peers", []))
    return found


def _small_goals(small: Any) -> list[Goal]:
    found: list[Goal] = []
    for dtype, of_dtype in dict(small).items():
        bound = 0 if dtype == "float32" else None  # ties are no fault in others
        for role in ("draft", "target"):
            engine = of_dtype[role]
            what = f"{role}, {dtype}: best tokens other than the plain engine's"
            note = f"of {engine['num_tokens']}; logits within {engine['max_error']:.0e}"
            note += _margins(engine["margins"])
            found.append(Goal(SMALL, what, engine["num_different"], bound, True, note))
        rounds = of_dtype["rounds"]
        what = f"rounds, {dtype}: answers other than the plain engine's"
        note = f"of {rounds['num_answers']}; K = {rounds['num_draft_tokens']}"
        found.append(Goal(SMALL, what, rounds["num_different"], bound, True, note))
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
                note=f"{1e3 * step['seconds']:.2f} ms",
            )
            for step in plain
        ]
    return found


def _round_goals(name: str, pair: Run) -> list[Goal]:
    rounds = measured(pair.get("rounds"))
    if not rounds:
        return []
    found = []
    speculative = [r for r in rounds if r["num_draft_tokens"]]
    if speculative:
        worst = min(speculative, key=lambda r: r["of_steps"])
        what = "speedup over what acceptance and steps predict, worst K"
        note = f"K = {worst['num_draft_tokens']}"
        found.append(Goal(name, what, worst["of_steps"], _MIN_OF_PREDICTED, note=note))
    for r in rounds:
        if not r["num_draft_tokens"]:
            found.append(Goal(name, "target alone, tokens/s", r["tokens_per_second"], None))
    if speculative:
        best = max(speculative, key=lambda r: r["speedup"])
        what = "speculation over target alone, best K"
        note = f"K = {best['num_draft_tokens']}, {best['tokens_per_second']:.0f}/s"
        bound = _MIN_SPEEDUP.get(target_of(name))
        found.append(Goal(name, what, best["speedup"], bound, note=note))
    margins = [margin for r in rounds for margin in r["margins"]]
    note = f"of {sum(r['num_answers'] for r in speculative)}{_margins(margins)}"
    different = sum(r["num_different"] for r in rounds)
    found.append(Goal(name, "answers other than target alone's, all K", different, 0, True, note))
    return found


def _sampled_goals(name: str, sampled: Sequence[Run]) -> list[Goal]:
    found = []
    for line in sampled:
        kind = "sampled with a seed" if line["is_seeded"] else "sampled"
        speedup = line["tokens_per_second"] / line["alone_tokens_per_second"]
        note = f"K = {line['num_draft_tokens']}, {line['tokens_per_second']:.0f}/s"
        found.append(Goal(name, f"{kind}: speculation over target alone", speedup, None, note=note))
        of_all = f"of {line['num_answers']}"
        what = f"{kind}: answers other than step by step"
        found.append(Goal(name, what, line["num_different"], None, True, of_all))
        if line["is_seeded"]:
            what = f"{kind}: answers other than target alone's"
            found.append(Goal(name, what, line["num_different_from_alone"], 0, True, of_all))
    return found


def _other_goals(name: str, pair: Run) -> list[Goal]:
    found = []
    if own := measured(pair.get("own")):
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
        ("lookup", "adaptive K with prompt lookup over target alone", None),
        ("hopeless", "adaptive K with a draft of noise, over target alone", _MIN_HOPELESS),
    ):
        if ratio := measured(pair.get(part)):
            figure = ratio["tokens_per_second"] / ratio["alone_tokens_per_second"]
            note = f"{ratio['tokens_per_second']:.0f}/s"
            found.append(Goal(name, what, figure, bound, note=note))
    if adaptive := measured(pair.get("adaptive")):
        for key, what in (("alone_first_token", "target alone"), ("first_token", "adaptive K")):
            milliseconds = 1e3 * adaptive[f"{key}_seconds"]
            found.append(Goal(name, f"first token, {what}, ms", milliseconds, None))
    if lookup := measured(pair.get("lookup")):
        what = "with prompt lookup: answers other than target alone's"
        note = f"of {lookup['num_answers']}{_margins(lookup['margins'])}"
        found.append(Goal(name, what, lookup["num_different"], 0, True, note))
    if fp8 := measured(pair.get("fp8")):
        figure = fp8["plain_seconds"] / fp8["seconds"]
        bound = _MIN_FP8 if target_of(name) == _SEVEN_BILLION else None
        note = f"{1e3 * fp8['seconds']:.2f} ms"
        found.append(Goal(name, "speed of an FP8 target over bfloat16", figure, bound, note=note))
    if busy := measured(pair.get("busy")):
        note = f"K = {busy['num_draft_tokens']}"
        found.append(Goal(name, "GPU busy in steady decode", busy["busy"], _MIN_BUSY, note=note))
    return found


def _peer_goals(name: str, pair: Run, peers: Sequence[Run]) -> list[Goal]:
    """The best of either side, where both had the same prompts."""
    if target_of(name) != _SEVEN_BILLION:
        return []
    rates: dict[str, float] = {}
    if rounds := measured(pair.get("rounds")):
        rates["rounds"] = max(r["tokens_per_second"] for r in rounds)
    if lookup := measured(pair.get("lookup")):
        rates["lookup"] = lookup["tokens_per_second"]
    asked = {key: pair["settings"][key] for key in ("num_prompts", "max_tokens")}
    alike = [
        line
        for line in peers
        if "error" not in line and all(line[key] == value for key, value in asked.items())
    ]
    found = []
    for goal in _PEER_GOALS:
        if goal.part not in rates:
            continue
        if any(line["engine"] in goal.engines for line in alike):
            engines = {*goal.engines, *goal.others}
            theirs = max(line["tokens_per_second"] for line in alike if line["engine"] in engines)
            ours = rates[goal.part]
            note = f"{ours:.0f}/s, {theirs:.0f}/s"
            found.append(Goal(name, goal.what, ours / theirs, goal.bound, note=note))
            continue
        failures = {p["error"] for p in peers if p["engine"] in goal.engines and "error" in p}
        if failures:
            note = ", ".join(sorted(failures))
            found.append(Goal(name, goal.what, None, goal.bound, note=note))
    return found


def measured(part: Any) -> Any:
    """Returns the figures of a part; nothing where it was left out, failed or cannot be."""
    return [] if isinstance(part, Mapping) and part.keys() & UNMEASURED else part or []


def target_of(pair: str) -> str:
    return pair.partition("+")[0]


def _margins(margins: Sequence[float]) -> str:
    if not margins:
        return ""
    return f"; by logits up to {max(margins):.3f} apart"
