"""The tables of what benchmarks.soak measured, and its goals beside the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from benchmarks.attack.faults import Fault
from benchmarks.attack.goals import MAX_DISHONEST_S, Goal
from benchmarks.attack.report import fault_table, goals_table, load_table, table, wait_beside_s
from benchmarks.attack.server import LAUNCHER, TRITON
from benchmarks.soak.commands import Command
from benchmarks.soak.history import WRONG
from benchmarks.soak.memory import SHARED, WINDOW
from benchmarks.soak.session import Run

MAX_GROWTH = 0.02
MIN_LIFE_S = 300.0
"""For how long a process must have been looked at for its growth to be judged: it warms up before.
A guess."""

_LASTING = (LAUNCHER, TRITON, SHARED)

_MAX_EXAMPLES = 8


def goals(run: Run) -> list[Goal]:
    """Every figure that has a goal."""
    unanswered = sum(len(p.failed) + p.num("refused") for p in run.phases)
    bad = [command for _, command in run.commands if command.fault is not None]
    found = [
        *(Goal(f"answers {wrong}", run.answers.wrong[wrong], 0) for wrong in WRONG),
        Goal("requests without an answer and without a fault", unanswered, 0),
        Goal("restarts without a fault", sum(len(p.restarts) for p in run.phases), 0),
        Goal("commands that did not end as they should", len(bad), 0),
    ]
    for fault in _faults(run):
        name = f"{fault.name}: ready is dishonest"
        found.append(Goal(name, fault.dishonest_s, MAX_DISHONEST_S, "s"))
    found += [
        Goal(f"{growth.role}: memory grows", growth.growth * 100, MAX_GROWTH * 100, "%")
        for growth in run.memory
        if growth.life_s >= MIN_LIFE_S
    ]
    return found


def report(run: Run) -> str:
    """The tables, the goals last."""
    lines = [
        f"seed {run.seed}, {run.num_streams} streams; one normal start took {run.start_s:.1f} s; "
        f"store: {run.store}; full disk: {run.kind_of_full_disk}",
        "",
        *load_table(run.phases),
        "",
        *_answers(run),
        "",
        *_command_table(run),
        "",
        *_changes(run),
    ]
    if faults := _faults(run):
        lines += ["", *fault_table(faults)]
    if run.left_bytes:
        left = ", ".join(f"{left / 2**20:.1f}" for left in run.left_bytes)
        lines.append(f"shared memory that a killed launcher left, MiB: {left}")
    lines += ["", *_memory_table(run), *_texts(run), "", *goals_table(goals(run))]
    return "\n".join(lines)


def _faults(run: Run) -> list[Fault]:
    return [fault for phase in run.phases for fault in phase.faults]


def _answers(run: Run) -> list[str]:
    contents = ", ".join(f"{n} of content {name}" for name, n in run.answers.by_content.items())
    numbers = ", ".join(f"{n}: {num}" for n, num in sorted(run.answers.by_number.items()))
    return [f"whole answers: {contents}", f"of those that name their version: {numbers}"]


def _command_table(run: Run) -> list[str]:
    """A line for each command in each situation."""
    rows = [["command", "situation", "runs", "worked", "refused", "median, s", "longest, s"]]
    kinds = dict.fromkeys((command.name, command.situation) for _, command in run.commands)
    for name, situation in sorted(kinds):
        some = [c for _, c in run.commands if (c.name, c.situation) == (name, situation)]
        worked = sum(command.works for command in some)
        refused = sum(command.exit_code == 1 for command in some)
        seconds = [command.seconds for command in some]
        counts = map(str, (len(some), worked, refused))
        rows.append([name, situation or "–", *counts, *_two(seconds)])
    return table(rows)


def _changes(run: Run) -> list[str]:
    """What the changes of version that were made cost, and what streams saw of them."""
    rows = [["change of version, s", "number", "median", "longest"]]
    made = [c for _, c in run.commands if _is_change(c)]
    promotes = [c for c in made if c.name == "promote"]
    rollbacks = [c for c in made if c.name == "rollback" and c.result["was_loaded"]]
    for what, seconds in (
        ("promote, until served", [c.result["served_s"] for c in promotes]),
        ("of that, loaded and asked", [c.result["change"]["load_s"] for c in promotes]),
        ("of that, swapped", [c.result["change"]["swap_s"] for c in promotes]),
        ("rollback to what was kept, until served", [c.result["served_s"] for c in rollbacks]),
        ("until the other had no request left", [c.result["duration_s"] for c in rollbacks]),
        ("longest gap in a stream meanwhile", _gaps(run, made)),
        ("longest gap in a stream, calm", _gaps_when_calm(run)),
    ):
        rows.append([what, str(len(seconds)), *_two(seconds)])
    return table(rows)


def _gaps(run: Run, changes: Sequence[Command]) -> list[float]:
    streams = [a for phase in run.phases for a in phase.answered if "stream" in a.protocol]
    return [wait_beside_s(change, streams) for change in changes]


def _gaps_when_calm(run: Run) -> list[float]:
    return [a.wait_s for a in run.phases[0].answered if "stream" in a.protocol]


def _two(seconds: Sequence[float]) -> tuple[str, str]:
    if not seconds:
        return "–", "–"
    return f"{median(seconds):.2f}", f"{max(seconds):.2f}"


def _memory_table(run: Run) -> list[str]:
    """What processes have of their own: calm, and by change of version, of those that stay."""
    rows = [["memory", "processes", "calm: seconds", "mean, MiB", "growth, %", "MiB a change"]]
    by_role = {one.role: one for one in run.memory_changing}
    num_changes = sum(phase != "kills" and _is_change(c) for phase, c in run.commands)
    for one in run.memory:
        is_judged = one.life_s >= MIN_LIFE_S
        changing = by_role.get(one.role)
        by_change = "–"
        if one.role in _LASTING and changing is not None and num_changes:
            grown = changing.growth * changing.mean_bytes / WINDOW
            by_change = f"{grown / num_changes / 2**20:+.2f}"
        rows.append(
            [
                one.role,
                str(one.num_processes),
                f"{one.life_s:.0f}",
                f"{one.mean_bytes / 2**20:.1f}",
                f"{one.growth * 100:+.2f}{'' if is_judged else ' (not judged)'}",
                by_change,
            ]
        )
    return table(rows)


def _is_change(command: Command) -> bool:
    return command.works and command.result.get("change") is not None


def _texts(run: Run) -> list[str]:
    """Failures and sentences, the commonest of each kind, cut."""
    lines = run.answers.examples[:_MAX_EXAMPLES]
    for phase in run.phases:
        for what, some in (("failed", phase.failed), ("during a fault", phase.excused)):
            named = Counter(" ".join(a.error.split())[:120] for a in some)
            lines += [f"{phase.name}: {what} {n}×: {text}" for text, n in named.most_common(4)]
        lines += [f"{phase.name}: {' '.join(line.split())[:200]}" for line in phase.restarts]
    told = Counter(
        (c.name, c.situation or "–", c.fault or "as it should", c.sentence[:200])
        for _, c in run.commands
        if not c.works and c.expected != "is killed"
    )
    lines += [f"{n}× {': '.join(one)}" for one, n in told.most_common()]
    return ["", *lines] if lines else []
