"""What benchmarks/attack.py found: the goals beside the figures, and the tables."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.attack_faults import Fault
from benchmarks.attack_kinds import KINDS, Hostile
from benchmarks.attack_load import Answered
from benchmarks.attack_send import Outcome

MAX_NOTICED_S = 10.0
MAX_DISHONEST_S = 10.0
MAX_DELAY_S = 2.0

ROOT = Path(__file__).parents[1]
_TELLTALE = {
    "a traceback": re.compile(r"Traceback|\.py\", line|File \"|[\w/]+\.py\(\d+\)|/\d/model\.py"),
    "a path": re.compile(rf"{re.escape(str(ROOT))}|/site-packages|/dev/shm|/tmp/|/usr/lib|/opt/"),
    "a shared memory region": re.compile(r"specpipe_\d+_|triton_python_backend_shm"),
}


@dataclass(frozen=True)
class Phase:
    """One part of a run: what was asked in it, and the memory before and after.

    rss_before, rss_after  resident bytes by process
    restarts               what the launcher told of restarts that no fault of ours caused
    """

    name: str
    seconds: float
    answered: Sequence[Answered]
    rss_before: Mapping[str, int]
    rss_after: Mapping[str, int]
    hostile: Sequence[Hostile] = ()
    faults: Sequence[Fault] = ()
    restarts: Sequence[str] = ()

    def num(self, *endings: str) -> int:
        """How many requests of well-behaved clients ended so."""
        return sum(answered.ending in endings for answered in self.answered)

    @property
    def failed(self) -> list[Answered]:
        """Requests that failed, and not while a fault of ours lasted."""
        return [a for a in self.answered if a.ending == "failed" and not self._is_excused(a)]

    @property
    def num_excused(self) -> int:
        """Requests that failed while a fault of ours lasted."""
        return self.num("failed") - len(self.failed)

    @property
    def longest_wait_s(self) -> float:
        return max((answered.wait_s for answered in self.answered), default=0.0)

    def _is_excused(self, answered: Answered) -> bool:
        return any(
            answered.started_s <= fault.ended_s and answered.ended_s >= fault.started_s
            for fault in self.faults
        )


@dataclass(frozen=True)
class Run:
    """All that was measured. start_s is what one normal start took, in seconds."""

    seed: int
    num_streams: int
    num_hostile: int
    start_s: float
    phases: Sequence[Phase]
    secrets: Collection[str] = field(default=(), repr=False)

    def phase(self, name: str) -> Phase | None:
        return next((phase for phase in self.phases if phase.name == name), None)


@dataclass(frozen=True)
class Goal:
    """A figure beside its goal; None is what never came."""

    what: str
    figure: float | None
    ceiling: float
    unit: str = ""

    @property
    def is_reached(self) -> bool:
        return self.figure is not None and self.figure <= self.ceiling


def goals(run: Run) -> list[Goal]:
    """Every figure that has a goal, for the phases that there were."""
    found = [
        Goal("wrong answers", sum(phase.num("wrong") for phase in run.phases), 0),
        Goal("answers that failed without a fault", sum(len(p.failed) for p in run.phases), 0),
        Goal("restarts without a fault", sum(len(p.restarts) for p in run.phases), 0),
        Goal("texts with paths, tracebacks, regions, secrets", len(telltales(run)), 0),
    ]
    plain, attacked = run.phase("load"), run.phase("attack")
    if plain and attacked:
        delay = attacked.longest_wait_s - plain.longest_wait_s
        found.append(Goal("delay by hostile requests", max(0.0, delay), MAX_DELAY_S, "s"))
        through = [h for h in attacked.hostile if is_let_through(h)]
        found.append(Goal("calls let through that no client may make", len(through), 0))
    for phase in run.phases:
        for fault in phase.faults:
            found += [
                Goal(f"{fault.name}: noticed", fault.noticed_s, MAX_NOTICED_S, "s"),
                Goal(f"{fault.name}: service again after that", fault.back_s, run.start_s, "s"),
                Goal(f"{fault.name}: ready is dishonest", fault.dishonest_s, MAX_DISHONEST_S, "s"),
            ]
    return found


def is_let_through(hostile: Hostile) -> bool:
    """Whether a call that must be refused had an answer."""
    return KINDS[hostile.kind].must_refuse and hostile.outcome == "answered"


def telltales(run: Run) -> list[tuple[str, str, str]]:
    """What was told that must not be: by whom it was asked, what it is, and the text around it."""
    found = []
    for phase in run.phases:
        texts = [(a.protocol, a.error) for a in phase.answered if a.error]
        texts += [(h.kind, h.text) for h in phase.hostile if h.outcome in ("answered", "refused")]
        for source, text in texts:
            if (told := telltale(text, run.secrets)) is not None:
                found.append((source, *told))
    return found


def telltale(text: str, secrets: Collection[str] = ()) -> tuple[str, str] | None:
    """Returns what a text gives away and the text around it; None: nothing."""
    for secret in secrets:
        if secret in text:
            return "a secret", "(not shown)"
    for what, pattern in _TELLTALE.items():
        if found := pattern.search(text):
            return what, " ".join(text[max(0, found.start() - 60) : found.end() + 60].split())
    return None


def report(run: Run) -> str:
    """The tables, the goals last."""
    lines = [
        f"seed {run.seed}, {run.num_streams} well-behaved streams, {run.num_hostile} hostile "
        f"clients; one normal start took {run.start_s:.1f} s",
        "",
        *_load_table(run.phases),
    ]
    for phase in run.phases:
        if phase.hostile:
            limit = run.phases[0].longest_wait_s + MAX_DELAY_S
            lines += ["", *_hostile_table(phase, limit)]
        if phase.faults:
            lines += ["", *_fault_table(phase.faults)]
    lines += ["", *_memory_table(run.phases), *_texts(run), "", *_goals_table(goals(run))]
    return "\n".join(lines)


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that so large a share of all does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0.0


def _load_table(phases: Sequence[Phase]) -> list[str]:
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
    rows.append(["failed during a fault", *(str(phase.num_excused) for phase in phases)])
    rows.append(["restarts without a fault", *(str(len(phase.restarts)) for phase in phases)])
    for what, share in (("median", 0.5), ("p99", 0.99), ("longest", 1.0)):
        waits = (percentile((a.wait_s for a in phase.answered), share) for phase in phases)
        rows.append([f"wait, {what}, s", *(f"{wait:.2f}" for wait in waits)])
    return table(rows)


def _hostile_table(phase: Phase, limit_s: float) -> list[str]:
    """A line a kind. The longest wait beside it is of whoever waited while one was under way."""
    by_kind: dict[str, list[Hostile]] = defaultdict(list)
    for hostile in phase.hostile:
        by_kind[hostile.kind].append(hostile)
    outcomes: tuple[Outcome, ...] = ("answered", "refused", "timeout", "reset")
    rows = [["hostile kind", "sent", *outcomes, "longest, s", "wait beside it, s", ""]]
    for kind, sent in sorted(by_kind.items()):
        counts = Counter(hostile.outcome for hostile in sent)
        beside_s = wait_beside_s(sent, phase.answered)
        marks = ["let through"] if any(map(is_let_through, sent)) else []
        marks += ["delays"] if beside_s > limit_s else []
        rows.append(
            [
                kind,
                str(len(sent)),
                *(str(counts[outcome] or "") for outcome in outcomes),
                f"{max(h.ended_s - h.started_s for h in sent):.2f}",
                f"{beside_s:.2f}",
                ", ".join(marks),
            ]
        )
    return table(rows)


def wait_beside_s(sent: Sequence[Hostile], answered: Sequence[Answered]) -> float:
    """The longest wait of a well-behaved client that overlapped one of the hostile requests."""
    return max(
        (
            a.wait_s
            for a in answered
            if any(
                a.waited_from_s <= h.ended_s and a.waited_from_s + a.wait_s >= h.started_s
                for h in sent
            )
        ),
        default=0.0,
    )


def _fault_table(faults: Sequence[Fault]) -> list[str]:
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
        during = Counter(
            " ".join(a.error.split())[:100]
            for a in phase.answered
            if a.ending == "failed" and a not in phase.failed
        )
        lines += [f"{phase.name}: during a fault {n}×: {t}" for t, n in during.most_common(8)]
        lines += [f"{phase.name}: {' '.join(line.split())[:200]}" for line in phase.restarts]
    told = Counter((source, what, around) for source, what, around in telltales(run))
    shown: set[tuple[str, str]] = set()
    for (source, what, around), _ in told.most_common():
        if (source, what) not in shown:
            shown.add((source, what))
            lines.append(f"told by {source}: {what}: {around[:200]}")
    return ["", *lines] if lines else []


def _goals_table(found: Sequence[Goal]) -> list[str]:
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
