"""What benchmarks.attack measured, and its goals beside the figures."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchmarks.attack.faults import Fault
from benchmarks.attack.kinds import KINDS, Hostile
from benchmarks.attack.load import Answered

MAX_NOTICED_S = 10.0
MAX_DISHONEST_S = 10.0
MAX_DELAY_S = 2.0

ROOT = Path(__file__).parents[2]
_TELLTALE = {
    "a traceback": re.compile(r"Traceback|\.py\", line|File \"|\.py\(\d+\)|/\d/model\.py"),
    "a path": re.compile(rf"{re.escape(str(ROOT))}|/site-packages|/dev/shm|/tmp/|/usr/lib|/opt/"),
    "a shared memory region": re.compile(r"specpipe_\d+_|triton_python_backend_shm"),
}


_TOLD = ("answered", "refused")  # the other texts are the client's own


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

    @cached_property
    def failed(self) -> list[Answered]:
        """Requests that failed, and not while a fault of ours lasted."""
        return [a for a in self.answered if a.ending == "failed" and not self._is_excused(a)]

    @cached_property
    def excused(self) -> list[Answered]:
        """Requests that failed while a fault of ours lasted."""
        return [a for a in self.answered if a.ending == "failed" and self._is_excused(a)]

    @cached_property
    def waits_s(self) -> list[float]:
        """The wait of every request, but for those that failed while a fault of ours lasted."""
        excused = set(map(id, self.excused))
        return [a.wait_s for a in self.answered if id(a) not in excused]

    @property
    def longest_wait_s(self) -> float:
        return max(self.waits_s, default=0.0)

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

    @cached_property
    def telltales(self) -> list[tuple[str, str, str]]:
        """What was told that must not be: who asked, what it is, and the text around it."""
        found = []
        for phase in self.phases:
            texts = [(a.protocol, a.error) for a in phase.answered if a.error]
            texts += [(h.kind, h.text) for h in phase.hostile if h.outcome in _TOLD]
            for source, text in texts:
                if (told := telltale(text, self.secrets)) is not None:
                    found.append((source, *told))
        return found

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
        Goal("texts with paths, tracebacks, regions, secrets", len(run.telltales), 0),
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


def telltale(text: str, secrets: Collection[str] = ()) -> tuple[str, str] | None:
    """Returns what a text gives away and the text around it; None: nothing."""
    for secret in secrets:
        if secret in text:
            return "a secret", "(not shown)"
    for what, pattern in _TELLTALE.items():
        if found := pattern.search(text):
            return what, " ".join(text[max(0, found.start() - 60) : found.end() + 60].split())
    return None
