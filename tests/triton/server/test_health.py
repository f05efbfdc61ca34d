"""What is made of a server's processes and of its probes, by a clock that the tests turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specpipe.errors import RequestError, ServerError
from specpipe.runtimes.pair.admission import OVERDUE
from specpipe.triton.server import processes
from specpipe.triton.server.health import Health, ModelProgress, NeededProcesses
from specpipe.triton.server.options import ServeOptions
from specpipe.triton.server.served_models import Version
from tests.waiting import PATIENCE_S

WaitUntil = Callable[..., bool]

TIMEOUT_S = 30.0
FULL = RequestError("the queue is full: 3 requests wait (serving.max_queue_size), 2 run")

PAGE = """\
# TYPE nv_inference_request_success counter
nv_inference_request_success{{model="preprocessing",version="1"}} {entered}
nv_inference_request_failure{{model="preprocessing",reason="OTHER",version="1"}} {refused}
nv_inference_request_success{{model="postprocessing",version="1"}} {left}
nv_inference_request_success{{model="ensemble",version="1"}} 7
specpipe_loop_steps_total{{model="speculative"}} {steps}
specpipe_responses_total{{model="speculative"}} {responses}
"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Processes(NeededProcesses):
    """Processes that are well, and compute as they are told."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def fault(self) -> str | None:
        return None

    def cpu_s(self) -> dict[str, float]:
        return dict(self.spent)


class Server:
    """A server whose counters a test moves, and whose probe it lets end."""

    options = ServeOptions(probe_interval_s=5, probe_timeout_s=TIMEOUT_S)
    version = Version(Path("model_repo"))

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("entered", "refused", "left", "steps", "responses"), 0)
        self.processes = Processes()
        self.is_readable = True
        self.failure: Exception | None = None
        self.may_end = threading.Event()
        self.num_probes = 0

    def probe(self) -> None:
        self.num_probes += 1
        assert self.may_end.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure

    def needed_processes(self, *, is_answering: bool = True) -> NeededProcesses:
        return self.processes

    def read_metrics(self) -> str | None:
        return PAGE.format(**self.counts) if self.is_readable else None


class Watch:
    """A server, its health and the time."""

    def __init__(self, wait_until: WaitUntil) -> None:
        self.clock, self.server = Clock(), Server()
        self.health = Health(self.server, self.clock)
        self._wait_until = wait_until

    def look_for(self, seconds: float, **moving: int) -> str | None:
        """Looks once a second while counters grow by so much a second."""
        for _ in range(int(seconds)):
            self.clock.now += 1
            for name, step in moving.items():
                self.server.counts[name] += step
            if (reason := self.health.look()) is not None:
                return reason
        return None

    def has_probed(self, num_probes: int) -> bool:
        """A probe has a thread of its own, which may take a moment to begin."""
        return self._wait_until(lambda: self.server.num_probes >= num_probes) and (
            self.server.num_probes == num_probes
        )

    def end_probe(self, failure: Exception | None = None) -> str | None:
        """Lets the probe that is under way end, and looks at what came of it."""
        self.server.failure = failure
        self.server.may_end.set()
        assert self._wait_until(lambda: not self.health._results.empty())
        self.server.may_end.clear()
        return self.health.look()


@pytest.fixture
def watch(wait_until: WaitUntil) -> Iterator[Watch]:
    made = Watch(wait_until)
    yield made
    made.server.may_end.set()


# Probes


def test_an_answered_probe_is_followed_by_the_next(watch: Watch) -> None:
    for count in (1, 2, 3):
        assert watch.look_for(5) is None
        assert watch.has_probed(count)
        assert watch.end_probe() is None


def test_a_probe_that_breaks_twice_is_trouble_within_two_seconds(watch: Watch) -> None:
    failure = RequestError("Stub process 'postprocessing_0_0' is not healthy.")
    watch.look_for(5)
    assert watch.end_probe(failure) is None
    assert watch.look_for(1) is None
    assert watch.end_probe(failure) == f"a request for one token failed: {failure}"


def test_one_break_between_answers_is_none(watch: Watch) -> None:
    for _ in range(3):
        watch.look_for(5)
        assert watch.end_probe(ServerError("http://x does not answer: reset")) is None
        assert watch.look_for(1) is None
        assert watch.end_probe() is None


@pytest.mark.parametrize(
    "refusal",
    [FULL, ServerError(f"the request failed: {OVERDUE}")],
)
def test_a_probe_refused_for_the_load_is_an_answer(watch: Watch, refusal: Exception) -> None:
    for _ in range(20):
        watch.look_for(5, entered=1, steps=3, responses=6, left=6)
        assert watch.end_probe(refusal) is None


def test_a_probe_that_waits_while_steps_go_on_is_none(watch: Watch) -> None:
    """As behind a long prompt, of which no response comes, or in a queue of 600 s."""
    assert watch.look_for(6) is None
    assert watch.look_for(1, entered=1) is None
    assert watch.look_for(600, steps=1) is None
    assert watch.look_for(600, entered=1, steps=1, responses=2, left=2) is None


def test_a_step_that_computes_is_waited_for_but_not_for_ever(watch: Watch) -> None:
    def compute(seconds: int) -> str | None:
        for _ in range(seconds):
            watch.server.processes.spent["speculative"] = watch.clock.now * 0.5
            if (reason := watch.look_for(1)) is not None:
                return reason
        return None

    watch.look_for(5)
    watch.look_for(1, entered=1)
    assert compute(290) is None
    assert compute(20) == (
        "no answer for 301 s: speculative has had work for 300 s, and finished none"
    )


def test_a_loop_that_neither_steps_nor_computes_is_hung(watch: Watch) -> None:
    watch.look_for(5)
    watch.look_for(1, entered=1)
    assert watch.look_for(28) is None
    assert watch.look_for(2) == (
        "no answer for 31 s: speculative has had work for 30 s, and finished none"
    )


def test_requests_that_come_to_a_hung_loop_are_no_progress(watch: Watch) -> None:
    watch.look_for(5)
    assert watch.look_for(60, entered=2) == (
        "no answer for 31 s: speculative has had work for 30 s, and finished none"
    )


def test_a_prompt_that_is_being_tokenized_is_waited_for(watch: Watch) -> None:
    watch.look_for(5)
    for _ in range(60):
        watch.server.processes.spent["preprocessing"] = watch.clock.now * 0.5
        assert watch.look_for(1) is None
    watch.look_for(1, entered=1)
    assert watch.look_for(5, steps=1) is None


def test_a_hung_preprocessing_is_found_while_older_streams_go_on(watch: Watch) -> None:
    watch.look_for(5)
    assert watch.look_for(60, steps=1, responses=2, left=2) == (
        "no answer for 30 s: preprocessing has had work for 30 s, and finished none"
    )


def test_a_hung_postprocessing_is_found_while_steps_go_on(watch: Watch) -> None:
    """Steps, responses and the probe itself are no answers that left."""
    watch.look_for(5)
    assert watch.look_for(60, entered=1, steps=1, responses=2) == (
        "no answer for 31 s: postprocessing has had work for 30 s, and finished none"
    )


def test_a_hung_postprocessing_is_found_behind_a_full_queue(watch: Watch) -> None:
    """The refusals of a full queue do not pass through postprocessing."""
    for _ in range(8):
        reason = watch.look_for(5, entered=1, steps=1, responses=2) or watch.end_probe(FULL)
        if reason is not None:
            break
    assert reason is not None and "postprocessing has had work for" in reason


def test_the_first_response_of_a_long_prompt_is_not_held_against_postprocessing(
    watch: Watch,
) -> None:
    watch.look_for(5)
    watch.look_for(1, entered=1)
    assert watch.look_for(60, steps=1) is None
    assert watch.look_for(1, steps=1, responses=1) is None
    assert watch.look_for(10, steps=1) is None


def test_a_response_that_is_told_after_it_was_delivered_is_not_held_against_postprocessing(
    watch: Watch,
) -> None:
    """The loop reports twice a second, Triton at once; long whole answers follow."""
    watch.look_for(5)
    watch.look_for(1, entered=1, steps=1, left=1)
    watch.look_for(1, steps=1, responses=1)
    assert watch.look_for(120, steps=1) is None


def test_metrics_that_cannot_be_read_are_trouble_only_without_answers(watch: Watch) -> None:
    watch.server.is_readable = False
    for _ in range(20):
        watch.look_for(5)
        assert watch.end_probe() is None
    assert watch.look_for(60) == "no answer for 30 s: the metrics cannot be read either"


def test_silence_of_a_series_of_probes_adds_up(watch: Watch) -> None:
    """A probe that ran into its time-out is followed by others; none of them begins anew."""
    watch.look_for(5)
    watch.look_for(1, entered=1)
    watch.look_for(20, steps=1)
    assert watch.end_probe(ServerError("timed out")) is None
    assert watch.look_for(1) is None
    watch.look_for(1, entered=1)
    assert watch.look_for(40) is not None


def test_counters_of_another_model_are_not_taken_for_ours() -> None:
    clock = Clock()
    progress = ModelProgress(clock)
    counts = {"entered": 1, "refused": 0, "left": 1, "steps": 1, "responses": 1}
    progress.see(PAGE.format(**counts), {})
    progress.begin()
    clock.now += TIMEOUT_S
    page = PAGE.format(**counts).replace('"ensemble",version="1"} 7', '"ensemble",version="1"} 8')
    progress.see(page, {})
    assert progress.hung(TIMEOUT_S) == "preprocessing has had work for 30 s, and finished none"


def test_of_a_version_with_a_number_its_own_models_are_watched() -> None:
    """The old version's counters go on; those of the new one stand still."""
    clock = Clock()
    progress = ModelProgress(clock, lambda model: f"{model}_7")
    page = PAGE.format(entered=1, refused=0, left=1, steps=1, responses=1)
    named = "".join(
        line.replace('",version', '_7",version').replace('speculative"', 'speculative_7"')
        for line in page.splitlines(keepends=True)
    )
    progress.see(named + page, {})
    progress.begin()
    clock.now += TIMEOUT_S
    moved = PAGE.format(entered=2, refused=0, left=2, steps=2, responses=2)
    progress.see(named + moved, {})
    assert progress.hung(TIMEOUT_S) == "preprocessing_7 has had work for 30 s, and finished none"


def test_a_server_that_answers_by_no_version_is_not_asked_until_it_does_again(
    watch: Watch,
) -> None:
    watch.health.begin(is_answering=False)
    assert watch.look_for(100) is None
    assert watch.server.num_probes == 0
    watch.health.condemn("version 7 could not be loaded again")
    assert watch.look_for(1) == "version 7 could not be loaded again"
    watch.health.begin()
    assert watch.look_for(5) is None
    assert watch.has_probed(1)


def test_what_befell_a_probe_of_another_version_is_forgotten(watch: Watch) -> None:
    """A probe under way does not count for the version that is served since: no retry follows."""
    watch.look_for(5)
    watch.health.begin()
    watch.server.failure = ServerError("gone")
    watch.server.may_end.set()
    assert watch.look_for(4) is None
    assert watch.has_probed(1)


# Processes


@pytest.fixture
def family(wait_until: WaitUntil) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A process that leads a session, its child, and a child of that."""
    code = (
        "import subprocess, sys, time; depth = int(sys.argv[1])\n"
        # Kept: a Popen that is dropped reaps its child where that has died already.
        "if depth: child = subprocess.Popen("
        "[sys.executable, '-c', sys.argv[2], str(depth - 1), sys.argv[2]])\n"
        "time.sleep(600)"
    )
    leader = subprocess.Popen([sys.executable, "-c", code, "2", code], start_new_session=True)

    def children(pid: int) -> list[int]:
        return [p.pid for p in processes.of_session(leader.pid) if p.parent == pid]

    try:
        assert wait_until(lambda: bool(children(leader.pid)))
        (first,) = children(leader.pid)
        assert wait_until(lambda: bool(children(first)))
        (second,) = children(first)
        yield leader, first, second
    finally:
        processes.kill_session(leader.pid)
        leader.wait()


def test_a_process_that_is_stopped_counts_when_it_still_is(
    family: tuple[subprocess.Popen[str], int, int], wait_until: WaitUntil
) -> None:
    leader, child, _ = family
    needed = NeededProcesses(leader.pid)
    os.kill(child, signal.SIGSTOP)
    assert wait_until(lambda: state(child) == "T")
    assert needed.fault() is None
    os.kill(child, signal.SIGCONT)
    assert wait_until(lambda: state(child) == "S")
    assert needed.fault() is None
    for pid in (child, leader.pid):
        os.kill(pid, signal.SIGSTOP)
        assert wait_until(lambda pid=pid: state(pid) == "T")
        assert needed.fault() is None
        assert needed.fault() == f"{processes.look(pid).name} (pid {pid}) is stopped"  # type: ignore[union-attr]
        os.kill(pid, signal.SIGCONT)
        assert wait_until(lambda pid=pid: state(pid) == "S")
        assert needed.fault() is None


def test_a_dead_child_counts_and_the_childs_own_child_does_not(
    family: tuple[subprocess.Popen[str], int, int], wait_until: WaitUntil
) -> None:
    leader, child, grandchild = family
    needed = NeededProcesses(leader.pid)
    of_mpi = NeededProcesses(leader.pid, uses_mpi=True)
    os.kill(grandchild, signal.SIGKILL)
    assert wait_until(lambda: state(grandchild) == "Z")
    assert needed.fault() is None
    died = of_mpi.fault()
    assert died is not None and died.endswith(f"(pid {grandchild}) died")
    os.kill(child, signal.SIGKILL)
    assert wait_until(lambda: state(child) == "Z")
    died = needed.fault()
    assert died is not None and died.endswith(f"(pid {child}) died")


def test_a_child_that_is_ending_is_not_needed(wait_until: WaitUntil) -> None:
    """As the process of a version that is unloaded while another one begins to be watched: its
    arguments go before it does. Here it never had any.
    """
    code = (
        "import subprocess; child = subprocess.Popen([''], executable='/bin/cat', stdin=-1)\n"
        "input(); child.stdin.close(); child.wait(); input()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=-1, start_new_session=True) as leader:
        try:
            assert wait_until(lambda: "cat" in names_of(leader.pid))
            needed = NeededProcesses(leader.pid)
            assert needed.pids == {leader.pid}
            assert leader.stdin is not None
            leader.stdin.write(b"\n")
            leader.stdin.flush()
            assert wait_until(lambda: "cat" not in names_of(leader.pid))
            assert needed.fault() is None
        finally:
            processes.kill_session(leader.pid)


def names_of(session: int) -> list[str]:
    return [process.name for process in processes.of_session(session)]


def test_a_leader_that_is_gone_is_named(family: tuple[subprocess.Popen[str], int, int]) -> None:
    leader, _, _ = family
    needed = NeededProcesses(leader.pid)
    leader.kill()
    leader.wait()
    gone = needed.fault()
    assert gone is not None and gone.endswith(f"(pid {leader.pid}) is gone")


def test_a_later_process_with_the_same_id_is_another_one() -> None:
    needed = NeededProcesses(os.getsid(0))
    needed._needed = [
        processes.Process(os.getpid(), "python", 1, os.getsid(0), "S", start_ticks=1, cpu_s=0)
    ]
    needed._names = {os.getpid(): "postprocessing"}
    assert needed.fault() == f"postprocessing (pid {os.getpid()}) is gone"


def state(pid: int) -> str | None:
    found = processes.look(pid)
    return None if found is None else found.state
