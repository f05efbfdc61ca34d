"""Process faults: one process killed or stopped, and what is seen of it.

A fault lasts from the signal until a request that was sent after it was noticed has its answer:
where a model has several processes, others may go on answering before that. Meanwhile the server's
readiness is asked four times a second, and a request for one token is sent twice a second, whatever
became of those before. Readiness is dishonest while it says 200 and the fault lasts, until the
first request is sent that gets its answer.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.attack.load import TIMEOUT_S
from benchmarks.attack.send import Target
from benchmarks.attack.server import STUBS, TRITON, Served

_POLL_S = 0.25
_PROBE_S = 0.5
_MAX_PROBES = 40  # that wait at once
_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@dataclass(frozen=True)
class Fault:
    """What was done to a process, and seconds from then on; None is what did not come in time.

    started_s    by time.monotonic()
    noticed_s    until the launcher told that it restarts Triton
    not_ready_s  until readiness was refused
    served_s     until a request that was sent after it was noticed had its answer
    dishonest_s  how long readiness said 200 meanwhile
    """

    process: str
    how: str
    started_s: float
    ended_s: float
    noticed_s: float | None
    not_ready_s: float | None
    served_s: float | None
    dishonest_s: float

    @property
    def name(self) -> str:
        return f"{self.process} {self.how}"

    @property
    def back_s(self) -> float | None:
        """From when it was noticed until service again."""
        if self.noticed_s is None or self.served_s is None:
            return None
        return max(0.0, self.served_s - self.noticed_s)


def order(seed: int) -> Iterator[tuple[str, str]]:
    """Yields each process killed or stopped: each process once before any comes again."""
    rng = random.Random(seed)
    names = rng.sample((TRITON, *STUBS), 4)
    ways = rng.sample(sorted(_SIGNALS), 2)
    for turn in range(2):
        for index, name in enumerate(names):
            yield name, ways[(index + turn) % 2]


def commit(served: Served, process: str, how: str, limit_s: float) -> Fault:
    """Kills or stops a process, and watches until service again or the limit, in seconds."""
    num_before = len(served.restarts)
    watch = Watch(served.target)
    os.kill(served.pid(process), _SIGNALS[how])
    started_s = time.monotonic()
    watch.begin()
    while time.monotonic() < started_s + limit_s and served.is_running:
        noticed = served.restarts[num_before:]
        if noticed and watch.first_answer(noticed[0][0]) is not None:
            break
        time.sleep(0.05)
    watch.end()
    noticed = served.restarts[num_before:]
    answered = watch.first_answer(started_s)
    again = watch.first_answer(noticed[0][0]) if noticed else answered
    return Fault(
        process,
        how,
        started_s,
        time.monotonic(),
        noticed[0][0] - started_s if noticed else None,
        None if watch.not_ready_s is None else watch.not_ready_s - started_s,
        None if again is None else again[1] - started_s,
        dishonest_s(watch.ready, None if answered is None else answered[0]),
    )


def dishonest_s(ready: list[tuple[float, bool]], until_s: float | None) -> float:
    """Seconds in which the last poll had said 200, up to the first request that was answered.

    ready is (time, whether it said 200) in order; without an answered request all polls count.
    """
    total = 0.0
    for (start, is_ready), (end, _) in zip(ready, ready[1:], strict=False):
        stop = end if until_s is None else min(end, until_s)
        if is_ready and stop > start:
            total += stop - start
    return total


class Watch:
    """Asks for readiness and for one token until it is told to end."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._num_waiting = 0
        self.ready: list[tuple[float, bool]] = []
        self.not_ready_s: float | None = None
        self._answers: list[tuple[float, float]] = []  # when asked, and when answered

    def begin(self) -> None:
        for target in (self._poll, self._probe):
            threading.Thread(target=target, daemon=True).start()

    def end(self) -> None:
        self._is_over.set()

    def first_answer(self, since_s: float) -> tuple[float, float] | None:
        """When the first request that was sent since then, and answered, was asked and answered."""
        with self._lock:
            return min((one for one in self._answers if one[0] >= since_s), default=None)

    def _poll(self) -> None:
        while not self._is_over.is_set():
            now = time.monotonic()
            is_ready = self._http("GET", "/v2/health/ready", None, 1.0)
            if not is_ready and self.not_ready_s is None:
                self.not_ready_s = now
            self.ready.append((now, is_ready))
            self._is_over.wait(max(0.0, now + _POLL_S - time.monotonic()))

    def _probe(self) -> None:
        while not self._is_over.is_set():
            if self._num_waiting < _MAX_PROBES:
                with self._lock:
                    self._num_waiting += 1
                threading.Thread(target=self._ask, daemon=True).start()
            self._is_over.wait(_PROBE_S)

    def _ask(self) -> None:
        asked_s = time.monotonic()
        inputs = {"text_input": "Hello", "max_tokens": 1, "priority": -1}
        answered = self._http("POST", "/v2/models/ensemble/generate", json.dumps(inputs), TIMEOUT_S)
        with self._lock:
            self._num_waiting -= 1
            if answered:
                self._answers.append((asked_s, time.monotonic()))

    def _http(self, method: str, path: str, body: str | None, timeout_s: float) -> bool:
        connection = http.client.HTTPConnection(
            self._target.host, self._target.http_port, timeout=timeout_s
        )
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            response.read()
            return response.status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
