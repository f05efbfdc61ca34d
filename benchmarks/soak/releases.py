"""What the publishers and the host of a soak are told to do, and which version is served of it.

Whatever becomes of a command, the server is asked which version it serves before the next one is
started.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.attack.server import Served
from benchmarks.soak.commands import Command, Outcome, Running
from benchmarks.soak.history import History
from benchmarks.soak.place import CONTENTS, Place
from specpipe.errors import ServerError
from specpipe.machine.artifacts import Artifacts
from specpipe.stores.promoted import read_promotion
from specpipe.triton.server import control

COMMANDS = ("publish", "promote")

_SETTLE_S = 120.0
_MOST_PUBLISHED = 8  # before old ones are pruned


class Releases:
    """The versions of a place, and the commands that change them.

    served    what may run meanwhile, and then is asked
    history   which version answered when
    contents  the content of each number that was published
    commands  what was run since `phase` was set, with that
    """

    def __init__(
        self, place: Place, served: Served, rng: random.Random, say: Callable[[str], None]
    ) -> None:
        self._place, self._served, self._rng, self._say = place, served, rng, say
        self._last_number = 0  # published last
        self._last_pruned = 0  # the last number when old versions were pruned
        self._usual_s = dict.fromkeys(COMMANDS, 3.0)
        self.history = History()
        self.contents: dict[int, str] = {}
        self.phase = ""
        self.commands: list[tuple[str, Command]] = []

    def publish(self, content: str | None = None) -> Command:
        """Publishes a content; None: that which is not served."""
        content = self.other_content() if content is None else content
        return self._published(self._place.publish(content).end(), content)

    def _published(self, command: Command, content: str) -> Command:
        if command.works:
            self._last_number = int(command.result["number"])
            self.contents[self._last_number] = content
        return self._ended(command)

    def _begin_promote(self, number: int) -> Running:
        self.history.attempt(number, time.monotonic())
        return self._place.on_host(f"promote {number}")

    def promote(self, number: int | None = None) -> Command:
        """Promotes a version; None: that which was published last."""
        running = self._begin_promote(self._last_number if number is None else number)
        return self._ended(running.end())

    def roll_back(self, outcome: Outcome = "works", situation: str = "") -> Command:
        # What a host has on disk of it may be older than what its server knows: a full disk.
        previous = control.ask(self._place.artifacts_dir, "status")["previous"]
        recorded = read_promotion(Artifacts(self._place.artifacts_dir).promoted)
        for number in {
            None if previous is None else previous["number"],
            None if recorded is None else recorded.previous,
        } - {None}:
            self.history.attempt(number, time.monotonic())
        return self._ended(self._place.on_host("rollback").end(outcome, situation))

    def both(
        self,
        outcome: Outcome = "works",
        situation: str = "",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Publishes, and promotes what was published last, both at once."""
        content = self.other_content()
        promoting = self._begin_promote(self._last_number)
        publishing = self._place.publish(content)
        meanwhile()
        self._ended(promoting.end(outcome, situation))
        self._published(publishing.end(outcome, situation), content)

    def kill(self, name: str) -> None:
        """Kills a command in its middle, after which the same works."""
        if name == "publish":
            running = self._place.publish(self.other_content())
        else:
            self.publish()
            running = self._begin_promote(self._last_number)
        self._ended(running.kill_in_the_middle(self._usual_s[name], self._rng))
        if name == "publish":
            self.publish()
        self.promote()

    def blink(self) -> None:
        """Takes the store away for a moment, in the middle of a command that was just started."""
        time.sleep(self._rng.uniform(0.3, 0.8) * min(self._usual_s.values()))
        self._place.store.leave()
        time.sleep(self._rng.uniform(0.2, 1.0))
        self._place.store.come_back()

    def prune(self) -> None:
        """Removes old versions where there are many, as a timer of an operator does."""
        if self._last_number >= self._last_pruned + _MOST_PUBLISHED:
            self._last_pruned = self._last_number
            self._ended(self._place.on_host(f"versions prune --keep {_MOST_PUBLISHED // 2}").end())

    def _ended(self, command: Command) -> Command:
        self.commands.append((self.phase, command))
        if command.fault is not None:
            self._say(f"{command.name} ({command.situation}): {command.fault}: {command.sentence}")
        if command.works and not command.situation and command.name in self._usual_s:
            self._usual_s[command.name] = command.seconds
        if self._served.is_running:
            self.settle()
        return command

    # What is served

    def settle(self) -> None:
        """Waits for the end of a change that may be under way, and takes in what is served."""
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            status = control.ask(self._place.artifacts_dir, "status")
            if not status["is_changing"]:
                self.history.settle(int(status["number"]), time.monotonic())
                return
            time.sleep(0.1)
        raise ServerError(f"a change of version did not end within {_SETTLE_S:.0f} s")

    def number(self) -> int:
        return int(control.ask(self._place.artifacts_dir, "status")["number"])

    def other_content(self) -> str:
        """The content that is not served."""
        return next(one for one in CONTENTS if one != self.contents[self.number()])
