"""Whether a server that runs also serves: the state of its processes, and what becomes of probes.

A process is judged by its state in the kernel, since no time-out separates a slow from a stopped
one. A probe that went unanswered is judged by what moved meanwhile: a long prompt or a long queue
is no fault, however long the probe waits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from specpipe.machine.callables import Clock
from specpipe.machine.prometheus import parse_samples, total
from specpipe.runtimes.pair.admission import is_for_load
from specpipe.runtimes.repository_layout import POSTPROCESSING, PREPROCESSING, SPECULATIVE
from specpipe.triton import metrics
from specpipe.triton.server import processes

if TYPE_CHECKING:
    from specpipe.triton.server.options import ServeOptions
    from specpipe.triton.server.served_models import Version

LOOK_INTERVAL_S = 1.0  # a guess: a look reads a few files of /proc

# A break may be the prober's own, as when this machine has no port or no descriptor left for a
# moment, and a restart costs every stream.
_RETRY_S = 1.0

_MIN_BUSY_SHARE = 0.05  # of one core; a model's process that waits takes none
_RECENT_S = 10.0  # a model that computed within this time is at work: a guess
_MAX_BUSY = 10  # time-outs that a model may compute and finish nothing: it may turn in a circle
_MPI_DAEMONS = ("prted", "orted")  # Open MPI 5 and 4: what starts ranks that a rank asks for

# Triton's own counters of requests, by model; one that failed was answered, too.
_ANSWERED = ("nv_inference_request_success", "nv_inference_request_failure")
_PREPROCESSED, _POSTPROCESSED = "preprocessed", "postprocessed"

_FLOW: Mapping[str, tuple[str | None, str]] = {
    PREPROCESSING: (None, _PREPROCESSED),
    SPECULATIVE: (_PREPROCESSED, metrics.STEPS),
    POSTPROCESSING: (metrics.RESPONSES, _POSTPROCESSED),
}
"""By model, as a repository names it: the count of what it is fed, and of what it has finished."""


class Probed(Protocol):
    """What is watched: a server that is ready (server.py)."""

    options: ServeOptions

    def probe(self) -> None:
        """Sends one request; raises what went wrong, after the time-out at the latest."""

    @property
    def version(self) -> Version:
        """What it answers by now."""

    def needed_processes(self, *, is_answering: bool = True) -> NeededProcesses: ...

    def read_metrics(self) -> str | None:
        """Returns the metrics endpoint's page; None where it cannot be read."""


class NeededProcesses:
    """The processes that a server cannot be without, as they were when it got ready.

    Those are tritonserver, the processes of the models that answer, and what MPI started; a process
    that a model starts for itself is the model's own affair.
    """

    def __init__(
        self,
        leader: int,
        *,
        models: Collection[str] | None = None,
        is_whole_server: bool = True,
        uses_mpi: bool = False,
    ) -> None:
        """`leader` is tritonserver, or the mpirun that started it; it leads their session.

        models           those whose processes are needed; None: all
        is_whole_server  False: the models' processes alone
        """
        self._leader = leader
        session = processes.of_session(leader)
        needed = _with_children({leader}, session)
        if uses_mpi:
            daemons = {process.pid for process in session if process.name in _MPI_DAEMONS}
            needed = _with_children(needed | daemons, session)
        self._names = {
            process.pid: processes.model_name(process)
            for process in session
            if process.pid in needed
        }

        def is_needed(process: processes.Process) -> bool:
            if process.pid not in self._names:
                return False
            if process.pid == leader or not processes.runs_model(process):
                # One that ends had no part in what answered: a model that was unloaded.
                is_needed = process.pid == leader or not processes.is_ending(process)
                return is_whole_server and is_needed
            return models is None or self._names[process.pid] in models

        self._needed = [process for process in session if is_needed(process)]
        self._was_stopped: set[int] = set()

    @property
    def pids(self) -> set[int]:
        """The processes that were needed."""
        return {process.pid for process in self._needed}

    def fault(self) -> str | None:
        """Returns what befell one of the processes; None while all are well.

        Stopped counts the second time in a row: a debugger stops a process for moments.
        """
        stopped: set[int] = set()
        for process in self._needed:
            is_now = processes.look(process.pid)
            name = f"{self._names[process.pid]} (pid {process.pid})"
            if is_now is None or is_now.start_ticks != process.start_ticks:
                return f"{name} is gone"
            if is_now.state in processes.DEAD:
                return f"{name} died"
            if is_now.state in processes.STOPPED:
                if process.pid in self._was_stopped:
                    return f"{name} is stopped"
                stopped.add(process.pid)
        self._was_stopped = stopped
        return None

    def cpu_s(self) -> dict[str, float]:
        """Returns the time that each model has computed, with the processes that it started."""
        by_pid = {process.pid: process for process in processes.of_session(self._leader)}
        computed_s: dict[str, float] = {}
        for process in by_pid.values():
            owner = process
            while owner.pid not in self._names and owner.parent in by_pid:
                owner = by_pid[owner.parent]
            name = self._names.get(owner.pid, owner.name)
            computed_s[name] = computed_s.get(name, 0.0) + process.cpu_s
        return computed_s


def _with_children(pids: set[int], session: Iterable[processes.Process]) -> set[int]:
    return pids | {process.pid for process in session if process.parent in pids}


class ModelProgress:
    """Since when which model has work, and finished none.

    Work comes to preprocessing with each probe, and to each later model from the one before it.
    """

    def __init__(
        self, clock: Clock = time.monotonic, name: Callable[[str], str] = lambda model: model
    ) -> None:
        """name  returns what a model of the repository is called here"""
        self._clock, self._name = clock, name
        self._counts: dict[str, float | None] = {}
        self._cpu_s: dict[str, float] = {}
        self._seen_s = self._read_s = clock()
        self._computed_s: dict[str, float] = {}
        self._waiting_since: dict[str, float] = {}

    def begin(self) -> None:
        """Takes in that a probe is sent."""
        self._waiting_since.setdefault(PREPROCESSING, self._clock())

    def see(self, page: str | None, cpu_s: Mapping[str, float]) -> None:
        """Takes in the metrics' page, and the time that each model has computed."""
        now = self._clock()
        for model, spent in cpu_s.items():
            if spent - self._cpu_s.get(model, 0.0) > _MIN_BUSY_SHARE * (now - self._seen_s):
                self._computed_s[model] = now
        self._cpu_s, self._seen_s = dict(cpu_s), now
        if page is None:
            return
        counts = self._read_counts(page)
        moved = {name for name, count in counts.items() if count != self._counts.get(name)}
        for model, (fed, finished) in _FLOW.items():
            if finished in moved:
                self._waiting_since.pop(model, None)
            elif fed in moved and not (model == POSTPROCESSING and _are_all_delivered(counts)):
                self._waiting_since.setdefault(model, now)
        self._counts, self._read_s = counts, now

    def hung(self, timeout_s: float) -> str | None:
        """Returns which model has had work for timeout_s and does nothing; None where all do.

        One that computes is at work, up to a limit.
        """
        now = self._clock()
        if now - self._read_s >= timeout_s:
            return "the metrics cannot be read either"
        for model, since in self._waiting_since.items():
            name = self._name(model)
            computed_ago_s = now - self._computed_s.get(name, since)
            is_busy = computed_ago_s < min(timeout_s, _RECENT_S)
            waiting_s = now - since
            if waiting_s >= (_MAX_BUSY if is_busy else 1) * timeout_s:
                return f"{name} has had work for {waiting_s:.0f} s, and finished none"
        return None

    def _read_counts(self, page: str) -> dict[str, float | None]:
        """Returns the counts of `_FLOW`; None where there is no such counter yet."""
        samples = parse_samples(page)
        counts = {
            count: total(samples, count, model=self._name(SPECULATIVE))
            for count in (metrics.STEPS, metrics.RESPONSES)
        }
        for key, model in ((_PREPROCESSED, PREPROCESSING), (_POSTPROCESSED, POSTPROCESSING)):
            counts[key] = total(samples, *_ANSWERED, model=self._name(model))
        return counts


def _are_all_delivered(counts: Mapping[str, float | None]) -> bool:
    """Returns whether postprocessing has answered whatever was handed to it.

    What was handed on is reported up to half a second later (loop.py), so the last answer may come
    first.
    """
    handed_on, answered = counts[metrics.RESPONSES], counts[_POSTPROCESSED]
    return handed_on is not None and answered is not None and handed_on <= answered


class Health:
    """Watches a server from the moment that it is ready, until it has to be replaced."""

    def __init__(self, server: Probed, clock: Clock = time.monotonic) -> None:
        self._server, self._clock = server, clock
        self._lock = threading.Lock()
        self._verdict: str | None = None
        self.begin()

    def condemn(self, reason: str) -> None:
        """Has the server replaced."""
        self._verdict = reason

    def begin(self, *, is_answering: bool = True) -> None:
        """Begins anew: the server was started again, or answers by another version.

        is_answering  False: it has none for now; its own process is watched alone
        """
        with self._lock:
            server, clock = self._server, self._clock
            self._verdict = None
            self._is_answering = is_answering
            self._processes = server.needed_processes(is_answering=is_answering)
            self._progress = ModelProgress(clock, server.version.name)
            self._results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
            self._next_probe_s = clock() + server.options.probe_interval_s
            self._probing_since: float | None = None
            self._unanswered_since: float | None = None
            self._is_retry = False

    def look(self) -> str | None:
        """Returns why the server has to be replaced; None while it serves. Waits for nothing."""
        with self._lock:
            return self._look()

    def _look(self) -> str | None:
        reason = self._verdict or self._processes.fault()
        if reason is not None or not self._is_answering:
            return reason
        if self._probing_since is not None:
            try:
                return self._judge(self._results.get_nowait())
            except queue.Empty:
                self._see()
                return self._hung()
        if self._clock() >= self._next_probe_s:
            self._begin_probe()
        elif self._unanswered_since is not None:
            self._see()
        return None

    def _begin_probe(self) -> None:
        self._see()
        self._progress.begin()
        self._probing_since = self._clock()
        if self._unanswered_since is None:
            self._unanswered_since = self._probing_since
        threading.Thread(
            target=self._probe, args=(self._results,), name="triton-probe", daemon=True
        ).start()

    def _judge(self, failure: Exception | None) -> str | None:
        assert self._probing_since is not None
        now = self._clock()
        is_late = now - self._probing_since >= self._server.options.probe_timeout_s
        self._probing_since = None
        self._next_probe_s = now + self._server.options.probe_interval_s
        is_retry, self._is_retry = self._is_retry, False
        if failure is None:
            self._unanswered_since = None
            return None
        if is_late or is_for_load(str(failure)):
            self._see()
            return self._hung()
        if is_retry:
            return f"a request for one token failed: {failure}"
        self._is_retry = True
        self._next_probe_s = now + _RETRY_S
        return None

    def _hung(self) -> str | None:
        assert self._unanswered_since is not None
        waited_s = self._clock() - self._unanswered_since
        timeout_s = self._server.options.probe_timeout_s
        reason = self._progress.hung(timeout_s) if waited_s >= timeout_s else None
        return None if reason is None else f"no answer for {waited_s:.0f} s: {reason}"

    def _see(self) -> None:
        self._progress.see(self._server.read_metrics(), self._processes.cpu_s())

    def _probe(self, results: queue.SimpleQueue[Exception | None]) -> None:
        try:
            self._server.probe()
        except Exception as exc:
            results.put(exc)
        else:
            results.put(None)
