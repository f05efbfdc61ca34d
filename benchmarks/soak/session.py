"""The phases of a soak on one server, under load: what is done in which order.

A phase does its rounds until its time is over, one at least, and each process is killed once before
any is killed again. Whatever becomes of a command, the server is asked which version it serves
before the next one is started.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from benchmarks.attack.faults import Fault, Watch, commit, dishonest_s
from benchmarks.attack.goals import Phase
from benchmarks.attack.load import Load, Question, questions, right_answers
from benchmarks.attack.server import LAUNCHER, STUBS, TRITON, Served
from benchmarks.soak.commands import Command, Outcome, Running
from benchmarks.soak.history import Answers, History
from benchmarks.soak.memory import Growth, Memory
from benchmarks.soak.place import CONTENTS, Place
from specpipe.errors import ServerError, SpecpipeError
from specpipe.triton.server import control

NUM_QUESTIONS = 24
SHARES = {"calm": 0.2, "changes": 0.3, "store away": 0.15, "disk full": 0.15, "kills": 0.2}
"""Of the time, by phase."""

_MAX_FAULT_S = 60.0  # and one normal start more
_SETTLE_S = 120.0
_PAUSE_S = 1.0  # so that the load is back at work
_MOST_PUBLISHED = 8  # before old ones are pruned
_COMMANDS = ("publish", "promote")


@dataclass
class Run:
    """All that was measured.

    start_s          what one normal start took, in seconds
    memory           while nothing changed
    memory_changing  from then on, until the first process was killed
    """

    seed: int
    num_streams: int
    start_s: float
    store: str
    kind_of_full_disk: str
    phases: list[Phase] = field(default_factory=list)
    commands: list[tuple[str, Command]] = field(default_factory=list)
    memory: list[Growth] = field(default_factory=list)
    memory_changing: list[Growth] = field(default_factory=list)
    answers: Answers | None = None


class Session:
    """A server of a place, and what is known of it."""

    def __init__(self, place: Place, seed: int, say: Callable[[str], None]) -> None:
        self._place, self._say = place, say
        self._rng = random.Random(seed)
        self._seed = seed
        self._served = Served(place.host, "--promoted")
        self._history = History()
        self._contents: dict[int, str] = {}
        self._phase = ""
        self._commands: list[tuple[str, Command]] = []
        self._last_number = 0  # published last
        self._usual_s = dict.fromkeys(_COMMANDS, 3.0)

    def run(self, minutes: float, num_streams: int) -> Run:
        """Runs all phases; no process is left, however it ends."""
        try:
            start_s = self._begin()
            self._run = Run(
                self._seed,
                num_streams,
                start_s,
                self._place.store.kind,
                self._place.kind_of_full_disk,
                commands=self._commands,
            )
            asked, expected = self._ask_beforehand()
            answers = Answers(expected, self._contents, self._history)
            self._run.answers = answers
            memory = Memory(self._served)
            begun = {}
            for name, share in SHARES.items():
                begun[name] = time.monotonic()
                load = Load(self._served, asked, answers, self._seed)
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
            self._publish(content)
        self._must(self._promote(1))
        start_s = self._served.start()
        self._settle()
        self._say(f"ready after {start_s:.1f} s")
        return start_s

    def _ask_beforehand(self) -> tuple[list[Question], dict[str, list[str]]]:
        """Returns the questions that the contents answer differently, with their answers."""
        asked = questions(self._seed, NUM_QUESTIONS)
        answers: dict[str, list[str]] = {}
        for number, content in sorted(self._contents.items()):
            if number > 1:
                self._must(self._promote(number))
            self._say(f"asking version {number} each question alone")
            answers[content] = right_answers(self._served, asked)
        differ = [
            index
            for index in range(len(asked))
            if len({one[index] for one in answers.values()}) > 1
        ]
        if not differ:
            raise SpecpipeError("the two contents answer all questions alike")
        self._commands.clear()
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
        self._phase = name
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
            if time.monotonic() > begun + seconds:
                break
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        answered = load.end()
        lasted_s = time.monotonic() - begun
        num_caused = sum(fault.process != LAUNCHER for fault in faults)
        restarts = [line for _, line in self._served.restarts[num_restarts + num_caused :]]
        if not self._served.is_running:
            self._served.start()
            self._settle()
        return Phase(name, lasted_s, answered, {}, {}, faults=faults, restarts=restarts)

    @staticmethod
    def _calm() -> Iterator[None]:
        yield from ()

    def _changes(self) -> Iterator[None]:
        """Publishes the other content, promotes it, and half of the times rolls it back."""
        while True:
            self._publish(self._other_content())
            self._promote()
            time.sleep(_PAUSE_S)
            if self._rng.random() < 0.5:
                self._roll_back()
                time.sleep(_PAUSE_S)
            yield
            self._prune()

    def _outages(self) -> Iterator[None]:
        """The store is away: for the whole of a publish and a promote, and from their middle on."""
        while True:
            self._publish(self._other_content())
            self._place.store.leave()
            self._both("is refused", "store away")
            self._place.store.come_back()
            self._both("either", "store goes away", meanwhile=self._blink)
            self._both()
            yield
            self._promote()
            self._place.store.leave()
            self._roll_back("is refused", "store away")  # it is served, and not recorded there
            self._place.store.come_back()
            self._publish(self._other_content())
            self._promote()
            yield

    def _blink(self) -> None:
        time.sleep(self._rng.uniform(0.3, 0.8) * min(self._usual_s.values()))
        self._place.store.leave()
        time.sleep(self._rng.uniform(0.2, 1.0))
        self._place.store.come_back()

    def _full_disks(self) -> Iterator[None]:
        """The disk is full while a version is published and another one fetched."""
        while True:
            self._publish(self._other_content())
            with self._place.full_disk():
                self._both("is refused", "disk full")
            self._both()
            yield
            self._promote()
            with self._place.full_disk():
                self._roll_back("either", "disk full")
            self._publish(self._other_content())
            self._promote()
            yield

    def _kills(self, faults: list[Fault]) -> Iterator[None]:
        """Every process of the server and every command, each once before any comes again."""
        while True:
            names = [TRITON, *STUBS, LAUNCHER, *_COMMANDS]
            for name in self._rng.sample(names, len(names)):
                self._say(f"{name} is killed")
                if name in _COMMANDS:
                    self._kill_command(name)
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
            process = f"{name}_{self._number()}" if name in STUBS else name
            fault = replace(commit(self._served, process, "killed", limit_s), process=name)
        if fault.served_s is None:
            self._say(f"no service again after {fault.ended_s - fault.started_s:.0f} s")
            self._served.stop()
            self._served.start()
            fault = replace(fault, ended_s=time.monotonic())  # what our restart broke too
        self._settle()
        return fault

    def _kill_launcher(self, limit_s: float) -> Fault:
        """Kills the launcher, and starts it again as a service manager does.

        That ends first what is left of the service: systemd.kill(5), KillMode=control-group.
        """
        watch = Watch(self._served.target)
        watch.begin()
        started_s = time.monotonic()
        self._served.kill()
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

    def _kill_command(self, name: str) -> None:
        """Kills a command in its middle, after which the same works."""
        if name == "publish":
            running = self._place.publish(self._other_content())
        else:
            self._publish(self._other_content())
            running = self._begin_promote(self._last_number)
        self._ended(running.kill_in_the_middle(self._usual_s[name], self._rng))
        if name == "publish":
            self._publish(self._other_content())
        self._promote()

    # Commands

    def _publish(self, content: str) -> Command:
        return self._published(self._place.publish(content).end(), content)

    def _published(self, command: Command, content: str) -> Command:
        if command.works:
            self._last_number = int(command.result["number"])
            self._contents[self._last_number] = content
        return self._ended(command)

    def _begin_promote(self, number: int) -> Running:
        self._history.attempt(number, time.monotonic())
        return self._place.on_host(f"promote {number}")

    def _promote(self, number: int | None = None) -> Command:
        """Promotes a version; None: that which was published last."""
        running = self._begin_promote(self._last_number if number is None else number)
        return self._ended(running.end())

    def _roll_back(self, outcome: Outcome = "works", situation: str = "") -> Command:
        previous = control.ask(self._place.artifacts_dir, "status")["previous"]
        if previous is not None:
            self._history.attempt(previous["number"], time.monotonic())
        return self._ended(self._place.on_host("rollback").end(outcome, situation))

    def _both(
        self,
        outcome: Outcome = "works",
        situation: str = "",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Publishes, and promotes what was published last, both at once."""
        content = self._other_content()
        promoting = self._begin_promote(self._last_number)
        publishing = self._place.publish(content)
        meanwhile()
        self._ended(promoting.end(outcome, situation))
        self._published(publishing.end(outcome, situation), content)

    def _prune(self) -> None:
        """Removes old versions where there are many, as a timer of an operator does."""
        if self._last_number % _MOST_PUBLISHED == 0:
            self._ended(self._place.on_host(f"versions prune --keep {_MOST_PUBLISHED // 2}").end())

    def _ended(self, command: Command) -> Command:
        self._commands.append((self._phase, command))
        if command.fault is not None:
            self._say(f"{command.name} ({command.situation}): {command.fault}: {command.sentence}")
        if command.works and not command.situation and command.name in self._usual_s:
            self._usual_s[command.name] = command.seconds
        if self._served.is_running:
            self._settle()
        return command

    # What is served

    def _settle(self) -> None:
        """Waits for the end of a change that may be under way, and takes in what is served."""
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            status = control.ask(self._place.artifacts_dir, "status")
            if not status["is_changing"]:
                self._history.settle(int(status["number"]), time.monotonic())
                return
            time.sleep(0.1)
        raise ServerError(f"a change of version did not end within {_SETTLE_S:.0f} s")

    def _number(self) -> int:
        return int(control.ask(self._place.artifacts_dir, "status")["number"])

    def _other_content(self) -> str:
        """The content that is not served."""
        return next(one for one in CONTENTS if one != self._contents[self._number()])
