"""The tables of what benchmarks.attack measured, the goals last."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

from benchmarks.attack.faults import Fault
from benchmarks.attack.goals import (
    MAX_DELAY_S,
    Goal,
    Phase,
    Run,
    goals,
    is_let_through,
)
from benchmarks.attack.kinds import Hostile
from benchmarks.attack.load import Answered
from benchmarks.attack.send import Outcome

_SHARES = {"median": 0.5, "p99": 0.99, "longest": 1.0}


def report(run: Run) -> str:
    """The tables, the goals last."""
    lines = [
        f"seed {run.seed}, {run.num_streams} well-behaved streams, {run.num_hostile} hostile "
        f"clients; one normal start took {run.start_s:.1f} s",
        "",
        *load_table(run.phases),
        *_added_waits(run),
    ]
    for phase in run.phases:
        if phase.hostile:
            limit = run.phases[0].longest_wait_s + MAX_DELAY_S
            lines += ["", *_hostile_table(phase, limit)]
        if phase.faults:
            lines += ["", *fault_table(phase.faults)]
    lines += ["", *_memory_table(run.phases), *_texts(run), "", *goals_table(goals(run))]
    return "\n".join(lines)


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that so large a share of all does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0.0


def load_table(phases: Sequence[Phase]) -> list[str]:
    protocols = sorted({a.protocol for phase in phases for a in phase.answered})
    rows = [["well-behaved clients", *(phase.name for phase in phases)]]
    rows.append(["seconds", *(f"{phase.seconds:.0f}" for phase in phases)])
    for protocol in protocols:
        counts = (sum(a.protocol == protocol for a in phase.answered) for phase in phases)
        rows.append([f"requests, {protocol}", *map(str, counts)])
    for what, endings in (
        ("right", ["right"]),
        ("broken off by the client, right so far", ["broken off"]),
        ("refused with numbers", ["refused"]),
        ("wrong", ["wrong"]),
    ):
        rows.append([what, *(str(phase.num(*endings)) for phase in phases)])
    rows.append(["failed without a fault", *(str(len(phase.failed)) for phase in phases)])
    rows.append(["failed during a fault", *(str(len(phase.excused)) for phase in phases)])
    rows.append(["restarts without a fault", *(str(len(phase.restarts)) for phase in phases)])
    for what, share in _SHARES.items():
        rows.append([f"wait, {what}, s", *(f"{_wait_s(phase, share):.2f}" for phase in phases)])
    return table(rows)


def _added_waits(run: Run) -> list[str]:
    """How much longer the waits were with hostile requests than without."""
    load, attack = run.phase("load"), run.phase("attack")
    if load is None or attack is None:
        return []
    added = (
        f"{what} {_wait_s(attack, share) - _wait_s(load, share):+.2f}"
        for what, share in _SHARES.items()
    )
    return [f"hostile requests add to the wait, s: {', '.join(added)}"]


def _wait_s(phase: Phase, share: float) -> float:
    return percentile(phase.waits_s, share)


def _hostile_table(phase: Phase, limit_s: float) -> list[str]:
    """A line a kind; the wait beside a request is the longest that overlapped it.

    Many kinds are under way at once: a kind delays others if even the least wait beside one of its
    requests is too long, and is then to be tried alone (--kinds).
    """
    by_kind: dict[str, list[Hostile]] = defaultdict(list)
    for hostile in phase.hostile:
        by_kind[hostile.kind].append(hostile)
    outcomes: tuple[Outcome, ...] = ("answered", "refused", "timeout", "reset")
    rows = [["hostile kind", "sent", *outcomes, "longest, s", "wait beside it, s", ""]]
    for kind, sent in sorted(by_kind.items()):
        counts = Counter(hostile.outcome for hostile in sent)
        beside = [wait_beside_s(hostile, phase.answered) for hostile in sent]
        marks = ["let through"] if any(map(is_let_through, sent)) else []
        marks += ["delays"] if min(beside) > limit_s else []
        rows.append(
            [
                kind,
                str(len(sent)),
                *(str(counts[outcome] or "") for outcome in outcomes),
                f"{max(h.ended_s - h.started_s for h in sent):.2f}",
                f"{min(beside):.1f} to {max(beside):.1f}",
                ", ".join(marks),
            ]
        )
    return table(rows)


class Timed(Protocol):
    """What began and ended, by time.monotonic()."""

    @property
    def started_s(self) -> float: ...

    @property
    def ended_s(self) -> float: ...


def wait_beside_s(timed: Timed, answered: Iterable[Answered]) -> float:
    """The longest wait of a well-behaved client that overlapped something else."""
    return max(
        (
            a.wait_s
            for a in answered
            if a.waited_from_s <= timed.ended_s and a.waited_from_s + a.wait_s >= timed.started_s
        ),
        default=0.0,
    )


def fault_table(faults: Sequence[Fault]) -> list[str]:
    rows = [["fault", "not ready, s", "noticed, s", "service again, s", "dishonest, s"]]
    for fault in faults:
        times = (fault.not_ready_s, fault.noticed_s, fault.served_s, fault.dishonest_s)
        rows.append([fault.name, *map(_seconds, times)])
    return table(rows)


def _memory_table(phases: Sequence[Phase]) -> list[str]:
    names = sorted({name for phase in phases for name in (*phase.rss_before, *phase.rss_after)})
    rows = [["resident, MiB (growth per 1,000 requests)", *(phase.name for phase in phases)]]
    for name in names:
        rows.append([name, *(_memory_cell(phase, name) for phase in phases)])
    return table(rows)


def _memory_cell(phase: Phase, name: str) -> str:
    before, after = phase.rss_before.get(name), phase.rss_after.get(name)
    if before is None or after is None:
        return "–"
    figures = f"{before / 2**20:.0f} → {after / 2**20:.0f}"
    if phase.restarts or phase.faults:
        return figures  # of another process
    num = max(1, len(phase.answered) + len(phase.hostile))
    return f"{figures} ({(after - before) / 2**20 / num * 1000:+.1f})"


def _texts(run: Run) -> list[str]:
    """Failures, restarts and telltale texts, the commonest of each kind, cut."""
    lines: list[str] = []
    for phase in run.phases:
        named = Counter(" ".join(a.error.split())[:160] for a in phase.failed)
        lines += [f"{phase.name}: failed {num}×: {text}" for text, num in named.most_common(8)]
        wrong = Counter(a.protocol for a in phase.answered if a.ending == "wrong")
        lines += [f"{phase.name}: wrong {num}×: {protocol}" for protocol, num in wrong.items()]
        during = Counter(" ".join(a.error.split())[:100] for a in phase.excused)
        lines += [f"{phase.name}: during a fault {n}×: {t}" for t, n in during.most_common(8)]
        lines += [f"{phase.name}: {' '.join(line.split())[:200]}" for line in phase.restarts]
    told = Counter((source, what, around) for source, what, around in run.telltales)
    shown: set[tuple[str, str]] = set()
    for (source, what, around), _ in told.most_common():
        if (source, what) not in shown:
            shown.add((source, what))
            lines.append(f"told by {source}: {what}: {around[:200]}")
    return ["", *lines] if lines else []


def goals_table(found: Sequence[Goal]) -> list[str]:
    rows = [["goal", "figure", "at most", ""]]
    for goal in found:
        figure = "never" if goal.figure is None else _figure(goal.figure, goal.unit)
        verdict = "reached" if goal.is_reached else "MISSED"
        rows.append([goal.what, figure, _figure(goal.ceiling, goal.unit), verdict])
    return table(rows)


def _figure(figure: float, unit: str) -> str:
    return f"{figure:.1f} {unit}" if unit else f"{figure:.0f}"


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
