"""The launcher with a real Triton that dies, hangs and is told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specpipe.errors import EngineMismatch, RequestError, ServerError, SpecpipeError
from specpipe.runtimes.base import Launch
from specpipe.triton import launcher
from specpipe.triton.client import Client
from specpipe.triton.launcher import ServeOptions

WaitUntil = Callable[..., bool]

_SERVE = """
import sys
from pathlib import Path
from specpipe.triton.launcher import ServeOptions, serve

options = ServeOptions(
    http_port=0, grpc_port=0, metrics_port=0, probe_interval_s=0.3, probe_timeout_s=1.5
)
serve(
    Path(sys.argv[1]),
    options,
    report=lambda line: print(line, flush=True),
    log=lambda line: print(line, file=sys.stderr),
    on_ready=lambda server: print("ready", server.http_url, flush=True),
)
"""


class Launcher:
    """`serve` in a process of its own."""

    def __init__(self, repository: Path, wait_until: WaitUntil) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(repository)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.lines: list[str] = []
        self.log: list[str] = []
        for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.log)):
            threading.Thread(target=lines.extend, args=(_stripped(stream),), daemon=True).start()
        assert wait_until(lambda: bool(self.lines)), self.log
        self.url = self.lines[0].removeprefix("ready ")

    def triton(self) -> int:
        """The id of Triton's process, and of its group."""
        return _children(self.process.pid)[0]

    def stub(self) -> int:
        """The id of the process of the model `speculative`."""
        for child in _children(self.triton()):
            if "speculative" in Path(f"/proc/{child}/cmdline").read_text():
                return child
        raise AssertionError("no process runs the model speculative")


def _stripped(stream: object) -> Iterator[str]:
    for line in stream:  # type: ignore[attr-defined]
        yield line.rstrip("\n")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def answers(url: str) -> bool:
    try:
        with Client(url, timeout_s=1) as client:
            return client.generate("a", max_tokens=1).text == "a"
    except SpecpipeError:
        return False


@pytest.fixture
def echo_launcher(
    echo_repository: Callable[..., Path], wait_until: WaitUntil
) -> Iterator[Launcher]:
    started = Launcher(echo_repository(), wait_until)
    yield started
    if started.process.poll() is None:
        started.process.kill()
    started.process.wait()
    for stream in (started.process.stdout, started.process.stderr):
        assert stream is not None
        stream.close()


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


def test_a_killed_model_process_is_noticed_and_the_group_replaced(
    echo_launcher: Launcher, wait_until: WaitUntil
) -> None:
    group = echo_launcher.triton()
    os.kill(echo_launcher.stub(), signal.SIGKILL)
    assert wait_until(lambda: any("restarted" in line for line in echo_launcher.lines))
    assert wait_until(lambda: answers(echo_launcher.url))
    assert echo_launcher.triton() != group
    assert not Path(f"/proc/{group}").exists()


def test_a_hung_model_process_is_noticed(echo_launcher: Launcher, wait_until: WaitUntil) -> None:
    os.kill(echo_launcher.stub(), signal.SIGSTOP)
    assert wait_until(lambda: any("restarted" in line for line in echo_launcher.lines))
    assert wait_until(lambda: answers(echo_launcher.url))


def test_sigterm_lets_a_running_stream_finish_then_everything_is_gone(
    echo_launcher: Launcher, wait_until: WaitUntil
) -> None:
    group = echo_launcher.triton()
    with Client(echo_launcher.url) as client:
        stream = client.stream("<slow> a b c", max_tokens=60)
        text = next(stream).text
        echo_launcher.process.send_signal(signal.SIGTERM)
        last = None
        for last in stream:
            text += last.text
    assert last is not None and last.finish_reason == "length"
    assert last.statistics is not None and last.statistics.num_output_tokens == 60
    assert echo_launcher.process.wait(20) == 0
    assert echo_launcher.lines[-1] == "stopping: running requests have 30 s to finish"
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
    monkeypatch.setattr(launcher, "Server", no_server)
    with pytest.raises(ServerError, match="not here"):
        launcher.serve(echo_repository(), ServeOptions(), report=reports.append)
    assert reports == ["warning: draft: the TensorRT here is unknown"]


class BusyServer:
    """A server whose probe fails; its loop makes progress or not."""

    is_running = True

    def __init__(self, *, makes_progress: bool) -> None:
        self._makes_progress = makes_progress

    def probe(self) -> None:
        raise RequestError("the queue is full (128 requests)")

    def makes_progress(self) -> bool:
        return self._makes_progress


def test_a_busy_server_is_not_a_hung_one() -> None:
    busy, hung = BusyServer(makes_progress=True), BusyServer(makes_progress=False)
    assert launcher._trouble(busy) is None  # type: ignore[arg-type]
    assert launcher._trouble(hung) == (  # type: ignore[arg-type]
        "a request for one token failed: the queue is full (128 requests)"
    )


class DyingServer:
    """A server that is gone and does not come back."""

    is_running = False
    options = ServeOptions(probe_interval_s=5, max_restarts=3)

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
        launcher._supervise(DyingServer(), signals, reports.append)  # type: ignore[arg-type]
    assert signals.waited == [5, 0, 1, 3]
    assert reports == [
        "Triton is restarted in 0 s: it exited",
        "Triton is restarted in 1 s: Triton did not start: no memory",
        "Triton is restarted in 3 s: Triton did not start: no memory",
    ]
