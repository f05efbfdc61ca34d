"""The hostile kinds of benchmarks.attack by name, in which order they come, and who sends them.

A process of its own sends them, so that the time that it takes to write 5 MB is no wait of a
well-behaved client.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.attack import admin, inner, sizes, values, wire
from benchmarks.attack.kind import Kind
from benchmarks.attack.send import TIMEOUT_S, Outcome, Reply, Target
from specpipe.errors import ServerError

KINDS: dict[str, Kind] = {
    kind.name: kind for module in (sizes, values, inner, wire, admin) for kind in module.KINDS
}
"""By name; those with `is_hole` are known to kill tritonserver 2.51 itself."""

_MAX_PAUSE_S = 0.2


@dataclass(frozen=True)
class Hostile:
    """One hostile request: when it was sent and when it was over, by time.monotonic()."""

    kind: str
    started_s: float
    ended_s: float
    outcome: Outcome
    text: str


def schedule(seed: int, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yields kinds without end, each with the seed of its request.

    Every kind comes once in a round; each round has an order of its own.
    """
    rng = random.Random(seed)
    while True:
        for name in rng.sample(sorted(names), len(names)):
            yield name, rng.getrandbits(32)


def default_names(*, holes: bool) -> tuple[str, ...]:
    """All kinds, with or without those that kill tritonserver itself."""
    return tuple(name for name, kind in KINDS.items() if holes or not kind.is_hole)


class Attack:
    """Some clients in a process of their own that send hostile requests one after the other."""

    def __init__(self, target: Target, names: Sequence[str], seed: int, num_clients: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(target, tuple(names), seed, num_clients, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self._ours.recv()  # it has imported what it needs

    def begin(self) -> None:
        """Lets the clients send."""
        self._ours.send("begin")

    def end(self) -> list[Hostile]:
        """Lets the clients finish what they are at, and returns all that they sent."""
        self._ours.send("end")
        if not self._ours.poll(4 * TIMEOUT_S):
            self.kill()
            raise ServerError("a hostile client did not come to its end")
        sent, faults = self._ours.recv()
        self._process.join(TIMEOUT_S)
        if faults:
            raise ServerError(f"benchmarks.attack itself failed: {faults[0]}")
        return list(sent)

    def kill(self) -> None:
        """Ends the process at once."""
        if self._process.is_alive():
            self._process.kill()


def _run(
    target: Target, names: Sequence[str], seed: int, num_clients: int, pipe: Connection
) -> None:
    """What the process does: waits for its two words, and sends back what came of it."""
    is_over = threading.Event()
    order = schedule(seed, names)
    lock = threading.Lock()
    sent: list[Hostile] = []
    faults: list[str] = []

    def client() -> None:
        while not is_over.is_set() and not faults:
            with lock:
                name, request_seed = next(order)
            rng = random.Random(request_seed)
            try:
                sent.append(send(target, KINDS[name], rng))
            except Exception as exc:  # it would end this client without a word
                faults.append(f"{name}: {exc!r}")
            is_over.wait(rng.uniform(0.0, _MAX_PAUSE_S))

    threads = [threading.Thread(target=client, daemon=True) for _ in range(num_clients)]
    try:
        pipe.send("ready")
        pipe.recv()
        for thread in threads:
            thread.start()
        pipe.recv()
    except (EOFError, KeyboardInterrupt):
        return
    is_over.set()
    deadline = time.monotonic() + 3 * TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    pipe.send((sent, faults))


def send(target: Target, kind: Kind, rng: random.Random) -> Hostile:
    """Sends one request of a kind; an error of the connection is a reset."""
    started_s = time.monotonic()
    try:
        reply = kind.send(target, rng)
    except OSError as exc:
        reply = Reply("reset", repr(exc))
    return Hostile(kind.name, started_s, time.monotonic(), reply.outcome, reply.text)
