"""The phases of a soak on one server, under load: what is done in which order.

A phase does its rounds until its time is over, one at least, and each process is killed once before
any is killed again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from benchmarks.attack.faults import Fault, Watch, commit, dishonest_s
from benchmarks.attack.goals import Phase
from benchmarks.attack.load import SHARE_LEAVING, Load, Question, questions, right_answers
from benchmarks.attack.server import LAUNCHER, STUBS, TRITON, Served
from benchmarks.soak.commands import Command
from benchmarks.soak.history import Answers
from benchmarks.soak.memory import Growth, Memory, remove_shared
from benchmarks.soak.place import CONTENTS, Place
from benchmarks.soak.releases import COMMANDS, Releases
from specpipe.errors import SpecpipeError

NUM_QUESTIONS = 24
SHARES = {"calm": 0.2, "changes": 0.3, "store away": 0.15, "disk full": 0.15, "kills": 0.2}
"""Of the time, by phase."""

_MAX_FAULT_S = 60.0  # and one normal start more
_PAUSE_S = 1.0  # so that the load is back at work


@dataclass
class Run:
    """All that was measured.

    start_s          what one normal start took, in seconds
    commands         with the phase of each
    memory           while nothing changed
    memory_changing  from then on, until the first process was killed
    left_bytes       of shared memory, by each launcher that was killed with all that it started
    """

    seed: int
    num_streams: int
    start_s: float
    store: str
    kind_of_full_disk: str
    answers: Answers
    commands: list[tuple[str, Command]]
    phases: list[Phase] = field(default_factory=list)
    memory: list[Growth] = field(default_factory=list)
    memory_changing: list[Growth] = field(default_factory=list)
    left_bytes: list[int] = field(default_factory=list)


class Session:
    """A server of a place, and what is done to it."""

    def __init__(self, place: Place, seed: int, say: Callable[[str], None]) -> None:
        self._place, self._say, self._seed = place, say, seed
        self._rng = random.Random(seed)
        self._served = Served(place.host, "--promoted")
        self._releases = Releases(place, self._served, self._rng, say)

    def run(self, minutes: float, num_streams: int) -> Run:
        """Runs all phases; no process is left, however it ends."""
        try:
            start_s = self._begin()
            asked, expected = self._ask_beforehand()
            answers = Answers(expected, self._releases.contents, self._releases.history)
            self._run = Run(
                self._seed,
                num_streams,
                start_s,
                self._place.store.kind,
                self._place.kind_of_full_disk,
                answers,
                self._releases.commands,
            )
            memory = Memory(self._served)
            begun = {}
            for name, share in SHARES.items():
                begun[name] = time.monotonic()
                leaving = 0.0 if name == "calm" else SHARE_LEAVING
                load = Load(self._served, asked, answers, self._seed, share_leaving=leaving)
                self._run.phases.append(self._phase_of(name, share * minutes * 60, load))
            memory.end()
            self._run.memory = memory.between(begun["calm"], begun["changes"])
            self._run.memory_changing = memory.between(begun["changes"], begun["kills"])
        finally:
            self._served.stop()
        return self._run

    # Before the load

    def _begin(self) -> float:
        for content in CONTENTS:
            self._releases.publish(content)
        self._must(self._releases.promote(1))
        start_s = self._served.start()
        self._releases.settle()
        self._say(f"ready after {start_s:.1f} s")
        return start_s

    def _ask_beforehand(self) -> tuple[list[Question], dict[str, list[str]]]:
        """Returns the questions that the contents answer differently, with their answers."""
        asked = questions(self._seed, NUM_QUESTIONS)
        answers: dict[str, list[str]] = {}
        for number, content in sorted(self._releases.contents.items()):
            if number > 1:
                self._must(self._releases.promote(number))
            self._say(f"asking version {number} each question alone")
            answers[content] = right_answers(self._served, asked)
        differ = [
            index
            for index in range(len(asked))
            if len({one[index] for one in answers.values()}) > 1
        ]
        if not differ:
            raise SpecpipeError("the two contents answer all questions alike")
        self._releases.commands.clear()
        return [asked[index] for index in differ], {
            content: [one[index] for index in differ] for content, one in answers.items()
        }

    @staticmethod
    def _must(command: Command) -> None:
        if not command.works:
            raise SpecpipeError(f"specpipe {command.name}: {command.sentence}")

    # A phase

    def _phase_of(self, name: str, seconds: float, load: Load) -> Phase:
        self._say(f"{name}: {seconds:.0f} s")
        self._releases.phase = name
        faults: list[Fault] = []
        rounds: dict[str, Callable[[], Iterator[None]]] = {
            "calm": self._calm,
            "changes": self._changes,
            "store away": self._outages,
            "disk full": self._full_disks,
            "kills": lambda: self._kills(faults),
        }
        num_restarts = len(self._served.restarts)
        begun = time.monotonic()
        load.begin(self._run.num_streams)
        for _ in rounds[name]():
            self._releases.prune()
            if time.monotonic() > begun + seconds:
                break
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        answered = load.end()
        lasted_s = time.monotonic() - begun
        num_caused = sum(fault.process != LAUNCHER for fault in faults)
        restarts = [line for _, line in self._served.restarts[num_restarts + num_caused :]]
        if not self._served.is_running:
            self._served.start()
            self._releases.settle()
        return Phase(name, lasted_s, answered, {}, {}, faults=faults, restarts=restarts)

    @staticmethod
    def _calm() -> Iterator[None]:
        yield from ()

    def _changes(self) -> Iterator[None]:
        """Publishes the other content, promotes it, and half of the times rolls it back."""
        while True:
            self._releases.publish()
            self._releases.promote()
            time.sleep(_PAUSE_S)
            if self._rng.random() < 0.5:
                self._releases.roll_back()
                time.sleep(_PAUSE_S)
            yield

    def _outages(self) -> Iterator[None]:
        """The store is away: for the whole of a publish and a promote, and from their middle on."""
        while True:
            self._releases.publish()
            self._place.store.leave()
            self._releases.both("is refused", "store away")
            self._place.store.come_back()
            self._releases.both("either", "store goes away", meanwhile=self._releases.blink)
            self._releases.both()
            yield
            self._releases.promote()
            self._place.store.leave()
            self._releases.roll_back(
                "is refused", "store away"
            )  # it is served, and not recorded there
            self._place.store.come_back()
            self._releases.publish()
            self._releases.promote()
            yield

    def _full_disks(self) -> Iterator[None]:
        """The disk is full while a version is published and another one fetched."""
        while True:
            self._releases.publish()
            with self._place.full_disk():
                self._releases.both("is refused", "disk full")
            self._releases.both()
            yield
            self._releases.promote()
            with self._place.full_disk():
                self._releases.roll_back("either", "disk full")
            self._releases.publish()
            self._releases.promote()
            yield

    def _kills(self, faults: list[Fault]) -> Iterator[None]:
        """Every process of the server and every command, each once before any comes again."""
        while True:
            names = [TRITON, *STUBS, LAUNCHER, *COMMANDS]
            for name in self._rng.sample(names, len(names)):
                self._say(f"{name} is killed")
                if name in COMMANDS:
                    self._releases.kill(name)
                else:
                    faults.append(self._kill(name))
                yield
                time.sleep(_PAUSE_S)

    def _kill(self, name: str) -> Fault:
        """Kills a process of the server, the one of the version that is served."""
        limit_s = _MAX_FAULT_S + self._run.start_s
        if name == LAUNCHER:
            fault = self._kill_launcher(limit_s)
        else:
            process = f"{name}_{self._releases.number()}" if name in STUBS else name
            fault = replace(commit(self._served, process, "killed", limit_s), process=name)
        if fault.served_s is None:
            self._say(f"no service again after {fault.ended_s - fault.started_s:.0f} s")
            self._served.stop()
            self._served.start()
            fault = replace(fault, ended_s=time.monotonic())  # what our restart broke too
        self._releases.settle()
        return fault

    def _kill_launcher(self, limit_s: float) -> Fault:
        """Kills the launcher, and starts it again as a service manager does.

        That ends first what is left of the service: systemd.kill(5), KillMode=control-group.
        """
        watch = Watch(self._served.target)
        watch.begin()
        launcher = self._served.pid(LAUNCHER)
        started_s = time.monotonic()
        self._served.kill()
        self._run.left_bytes.append(remove_shared(launcher))
        noticed_s = time.monotonic()
        self._served.start()
        while watch.first_answer(noticed_s) is None and time.monotonic() < started_s + limit_s:
            time.sleep(0.05)
        watch.end()
        answered = watch.first_answer(noticed_s)
        return Fault(
            LAUNCHER,
            "killed",
            started_s,
            time.monotonic(),
            noticed_s - started_s,
            None if watch.not_ready_s is None else watch.not_ready_s - started_s,
            None if answered is None else answered[1] - started_s,
            dishonest_s(watch.ready, None if answered is None else answered[0]),
        )
