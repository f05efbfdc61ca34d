"""The launcher with a real Triton that dies, hangs and is told to stop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import EngineMismatch, RequestError, ServerError, SpecpipeError
from specpipe.runtimes.launch import Launch
from specpipe.triton.client import Client
from specpipe.triton.server import launcher
from specpipe.triton.server.health import NeededProcesses
from specpipe.triton.server.launcher import ServeOptions
from specpipe.triton.server.served_models import Version
from specpipe.triton.server.versions import Versions
from tests.triton.asking import metrics
from tests.triton.conftest import write_echo_repository
from tests.triton.faulty_pair import Controls
from tests.triton.test_faults import write_faulty_repository
from tests.waiting import PATIENCE_S

WaitUntil = Callable[..., bool]

_SERVE = """
import json
import sys
from pathlib import Path
from specpipe.triton.server.launcher import ServeOptions, serve

options = ServeOptions(http_port=0, grpc_port=0, metrics_port=0, **json.loads(sys.argv[2]))
serve(
    Path(sys.argv[1]),
    options,
    artifacts_dir=Path(sys.argv[3]) if sys.argv[3:] else None,
    report=lambda line: print(line, flush=True),
    log=lambda line: print(line, file=sys.stderr),
    on_ready=lambda server: print("ready", *server.urls, server.metrics_url, flush=True),
)
"""


class Launcher:
    """`serve` in a process of its own."""

    def __init__(
        self,
        repository: Path,
        wait_until: WaitUntil,
        *,
        artifacts_dir: Path | None = None,
        **options: float,
    ) -> None:
        self._wait_until = wait_until
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(repository), json.dumps(options)]
            + ([] if artifacts_dir is None else [str(artifacts_dir)]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.lines: list[str] = []
        self.log: list[str] = []
        for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.log)):
            threading.Thread(target=lines.extend, args=(_stripped(stream),), daemon=True).start()
        if not wait_until(lambda: any(line.startswith("ready") for line in self.lines)):
            self.end()
            pytest.fail("\n".join(self.log))
        (ready,) = [line for line in self.lines if line.startswith("ready")]
        _, self.url, self.grpc_url, self.metrics_url = ready.split()

    def reason(self, *, num_lines: int) -> str:
        """Why it restarted, of what it wrote since it had written so many lines."""

        def told() -> list[str]:
            return [line for line in self.lines[num_lines:] if "restarted" in line]

        assert self._wait_until(lambda: bool(told())), self.lines
        return told()[0].removeprefix("Triton is restarted in 0 s: ")

    def answers_again(self, *, num_lines: int) -> bool:
        """Waits until it says so, and asks."""
        return self._wait_until(
            lambda: any("answers again" in line for line in self.lines[num_lines:])
        ) and answers(self.url)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def triton(self) -> int:
        """The id of Triton's process, and of its group."""
        return _children(self.process.pid)[0]

    def pid(self, name: str) -> int:
        """The id of Triton's process, or of the one that runs a model."""
        if name == "tritonserver":
            return self.triton()
        for child in _children(self.triton()):
            if f"/{name}/1/model.py" in Path(f"/proc/{child}/cmdline").read_text():
                return child
        raise AssertionError(f"no process runs the model {name}")


def _stripped(stream: object) -> Iterator[str]:
    for line in stream:  # type: ignore[attr-defined]
        yield line.rstrip("\n")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def answers(url: str) -> bool:
    try:
        with Client(url, timeout_s=PATIENCE_S) as client:
            return client.generate("a", max_tokens=1).finish_reason == "length"
    except SpecpipeError:
        return False


@pytest.fixture
def echo_launcher(
    echo_repository: Callable[..., Path], wait_until: WaitUntil
) -> Iterator[Launcher]:
    started = Launcher(echo_repository(), wait_until, probe_interval_s=0.3)
    yield started
    started.end()


def test_a_crashed_loop_fails_its_requests_and_the_server_comes_back(
    echo_launcher: Launcher, wait_until: WaitUntil
) -> None:
    with (
        Client(echo_launcher.url) as client,
        pytest.raises(SpecpipeError, match="ZeroDivisionError: as asked"),
    ):
        list(client.stream("<crash 2>", max_tokens=30))
    assert wait_until(lambda: any("restarted" in line for line in echo_launcher.lines))
    assert wait_until(lambda: answers(echo_launcher.url))


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory, wait_until: WaitUntil) -> Iterator[Launcher]:
    """A launcher with the patience that it has by default."""
    folder = write_echo_repository(tmp_path_factory.mktemp("lasting") / "model_repo")
    started = Launcher(folder, wait_until)
    yield started
    started.end()


@pytest.fixture
def lasting(patient: Launcher, wait_until: WaitUntil) -> Launcher:
    """The one whose server every test breaks, once it is mended after the test before."""
    assert wait_until(lambda: answers(patient.url)), patient.log
    return patient


PROCESSES = ("preprocessing", "speculative", "postprocessing", "tritonserver")
BEFALLS = {signal.SIGKILL: "died", signal.SIGSTOP: "is stopped"}


def break_and_watch(lasting: Launcher, name: str, number: signal.Signals) -> None:
    """What befalls a process is noticed by its state, before a probe's time is over, and mended."""
    before, triton, pid = len(lasting.lines), lasting.triton(), lasting.pid(name)
    os.kill(pid, number)
    reasons = [f"{name} (pid {pid}) {BEFALLS[number]}"]
    if number == signal.SIGKILL:  # Triton 2.51 itself has died beside a killed model, seen once
        reasons.append(f"tritonserver (pid {triton}) died")
    assert lasting.reason(num_lines=before) in reasons
    assert lasting.answers_again(num_lines=before)
    assert lasting.triton() != triton
    assert not Path(f"/proc/{triton}").exists()


@pytest.mark.parametrize("name", PROCESSES)
def test_a_killed_process_is_noticed_and_all_are_replaced(lasting: Launcher, name: str) -> None:
    break_and_watch(lasting, name, signal.SIGKILL)


@pytest.mark.parametrize("name", ["speculative", "tritonserver"])  # all of them: below
def test_a_stopped_process_is_noticed_under_load_and_its_streams_end(
    lasting: Launcher, name: str
) -> None:
    begun = threading.Semaphore(0)

    def ask() -> str:
        with Client(lasting.grpc_url) as client:
            stream = client.stream("<slow> a b c", max_tokens=900, end_id=-1)
            next(stream)
            begun.release()
            with pytest.raises(SpecpipeError) as caught:
                list(stream)
            return str(caught.value)

    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(ask) for _ in range(3)]
        for _ in streams:
            assert begun.acquire(timeout=PATIENCE_S)
        break_and_watch(lasting, name, signal.SIGSTOP)
        assert all(stream.result(timeout=PATIENCE_S) for stream in streams)


@pytest.mark.slow
@pytest.mark.parametrize("number", BEFALLS)
def test_what_breaks_again_and_again_is_mended_each_time(
    lasting: Launcher, number: signal.Signals
) -> None:
    for name in PROCESSES * 3:
        break_and_watch(lasting, name, number)


class Busy:
    """A launcher of a pair that a test slows, hangs and fills; its probes wait for 4 s."""

    def __init__(self, launcher: Launcher, controls: Controls) -> None:
        self.launcher, self.controls = launcher, controls

    def restarts(self) -> list[str]:
        return [line for line in self.launcher.lines if "restarted" in line]


@pytest.fixture(scope="module")
def busy(
    tmp_path_factory: pytest.TempPathFactory, quickstart_repository: Path, wait_until: WaitUntil
) -> Iterator[Busy]:
    controls = Controls(tmp_path_factory.mktemp("controls"))
    folder = write_faulty_repository(
        tmp_path_factory.mktemp("busy") / "model_repo",
        quickstart_repository,
        controls,
        max_batch_size=1,
        max_queue_size=1,
        max_num_tokens=16,
    )
    started = Launcher(folder, wait_until, probe_interval_s=0.5, probe_timeout_s=4)
    yield Busy(started, controls)
    started.end()


def test_a_long_prompt_restarts_nothing(busy: Busy) -> None:
    """8,000 tokens at 512 a second, in small: a minute of steps, and no answer of anybody."""
    busy.controls.set(pause=0.25)
    with Client(busy.launcher.grpc_url) as client:
        began = time.monotonic()
        answer = client.generate("x = 1\n" * 200, max_tokens=1)
        took_s = time.monotonic() - began
    busy.controls.set(pause=0)
    assert answer.statistics is not None and answer.statistics.num_input_tokens > 600
    assert took_s > 8  # twice the time-out of the probes that waited behind it
    assert busy.restarts() == []


LONG = {"max_tokens": 300, "end_id": -1, "num_draft_tokens": 0}  # a minute, as slowed below


def test_a_full_queue_restarts_nothing(busy: Busy, wait_until: WaitUntil) -> None:
    def ask(prompt: str) -> str | None:
        with Client(busy.launcher.grpc_url) as client:
            while True:
                try:
                    return client.generate(prompt, **LONG).finish_reason
                except RequestError:  # a probe has the only place in the queue
                    time.sleep(0.05)

    def count(name: str) -> float:
        return metrics(busy.launcher, name)[name]

    refused = "specpipe_refused_requests_total"
    busy.controls.set(pause=0.25)
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, prompt) for prompt in ("a", "b")]
        assert wait_until(lambda: count("specpipe_requests_waiting") == 1)
        before = count(refused)
        assert wait_until(lambda: count(refused) > before + 1)
        busy.controls.set(pause=0)
        assert [answer.result() for answer in answers] == ["length", "length"]
    assert busy.restarts() == []


@pytest.mark.parametrize(
    ("control", "model"), [("hang", "postprocessing"), ("pause", "speculative")]
)
def test_a_model_that_hangs_is_named_and_replaced(busy: Busy, control: str, model: str) -> None:
    before = len(busy.launcher.lines)
    busy.controls.set(**{control: 1000})
    reason = busy.launcher.reason(num_lines=before)
    busy.controls.set(**{control: 0})
    assert re.fullmatch(
        rf"no answer for \d+ s: {model} has had work for \d+ s, and finished none", reason
    )
    assert busy.launcher.answers_again(num_lines=before)


_IS_KEPT = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # under nohup a server stays


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(
            signal.SIGHUP, marks=[pytest.mark.slow, pytest.mark.skipif(_IS_KEPT, reason="nohup")]
        ),
    ],
)
def test_a_signal_lets_a_running_stream_finish_then_everything_is_gone(
    echo_launcher: Launcher, number: signal.Signals, wait_until: WaitUntil, tmp_path: Path
) -> None:
    group, go = echo_launcher.triton(), tmp_path / "go"
    with Client(echo_launcher.url) as client:
        stream = client.stream(f"<until {go}> a b c", max_tokens=60)
        next(stream)
        echo_launcher.process.send_signal(number)
        stopping = "stopping: running requests have 30 s to finish"
        assert wait_until(lambda: echo_launcher.lines[-1:] == [stopping])
        go.touch()
        *_, last = stream
    assert last.finish_reason == "length"
    assert last.statistics is not None and last.statistics.num_output_tokens == 60
    assert echo_launcher.process.wait(PATIENCE_S) == 0
    assert echo_launcher.lines[-1] == stopping
    assert not Path(f"/proc/{group}").exists()
    assert not list(Path("/dev/shm").glob(f"specpipe_{echo_launcher.process.pid}_*"))


def test_a_killed_launcher_takes_triton_along(
    echo_launcher: Launcher, wait_until: WaitUntil
) -> None:
    group = echo_launcher.triton()
    echo_launcher.process.kill()
    assert wait_until(lambda: not Path(f"/proc/{group}").exists())


class Runtime:
    """A runtime that refuses to launch, or launches with a note."""

    def __init__(self, *, fits: bool) -> None:
        self.fits = fits
        self.asked: list[object] = []

    def launch(self, repository: Path, **choices: object) -> Launch:
        self.asked.append((repository, choices))
        if not self.fits:
            raise EngineMismatch("target: built with TensorRT 10.8.0.43, here is 10.10.0.31")
        return Launch(notes=("draft: the TensorRT here is unknown",))


def test_nothing_is_started_for_engines_that_do_not_fit(
    echo_repository: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, runtime, reports = echo_repository(), Runtime(fits=False), list[str]()
    monkeypatch.setattr(launcher, "load_runtime", lambda name: runtime)
    monkeypatch.setattr(launcher, "Server", lambda *_, **__: pytest.fail("a server was made"))
    with pytest.raises(EngineMismatch, match="10.8.0.43"):
        launcher.serve(
            folder,
            ServeOptions(),
            report=reports.append,
            mpi_mode="leader",
            allow_unknown_engine_facts=True,
            build_command="specpipe build --config x.yaml",
        )
    assert reports == []
    choices = {
        "mode": "leader",
        "allow_unknown_facts": True,
        "build_command": "specpipe build --config x.yaml",
    }
    assert runtime.asked == [(folder, choices)]


def test_what_was_allowed_is_written_into_the_log(
    echo_repository: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []

    def no_server(*_: object, launch: Launch, **__: object) -> None:
        raise ServerError("not here")

    monkeypatch.setattr(launcher, "load_runtime", lambda name: Runtime(fits=True))
    monkeypatch.setattr(launcher.known_holes, "find_version", lambda *_: "2.71.0")
    monkeypatch.setattr(launcher, "Server", no_server)
    with pytest.raises(ServerError, match="not here"):
        launcher.serve(echo_repository(), ServeOptions(), report=reports.append)
    assert reports == ["warning: draft: the TensorRT here is unknown"]


class Gone(NeededProcesses):
    def fault(self) -> str:
        return "tritonserver (pid 1) is gone"


class DyingServer:
    """A server that is gone and does not come back."""

    options = ServeOptions(probe_interval_s=5, max_restarts=3)
    version = Version(Path("model_repo"))

    def needed_processes(self, *, is_answering: bool = True) -> NeededProcesses:
        return Gone(os.getpid())

    def kill(self) -> None: ...

    def start(self, is_interrupted: Callable[[], bool]) -> None:
        raise ServerError("Triton did not start: no memory")


class NoSignals:
    """Signals that never come; remembers what was waited for."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        return False

    def received(self) -> bool:
        return False


def test_restarts_pause_longer_each_time_and_end() -> None:
    signals, reports = NoSignals(), []
    with pytest.raises(ServerError, match="again and again, last: Triton did not start: no memory"):
        dying: Any = DyingServer()
        versions = Versions(dying, lambda repository: Launch(), reports.append)
        versions.watch()
        launcher._supervise(dying, versions, signals, reports.append)  # type: ignore[arg-type]
    assert signals.waited == [1, 0, 1, 3]
    assert reports == [
        "Triton is restarted in 0 s: tritonserver (pid 1) is gone",
        "Triton is restarted in 1 s: Triton did not start: no memory",
        "Triton is restarted in 3 s: Triton did not start: no memory",
    ]
