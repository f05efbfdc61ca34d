"""`serve --openai` and `gateway`, with Tritons that are killed meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specpipe.triton.server import launcher, processes
from specpipe.triton.server.server import Server

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The quickstart pair, built."""
    folder = tmp_path_factory.mktemp("engines")
    options = ("--config", str(ROOT / "configs" / "quickstart.yaml"), "--set")
    options = (*options, f"output_dir={folder}")
    subprocess.run([sys.executable, "-m", "specpipe", "build", *options], check=True)
    return options


class Command:
    """A command that runs, the URL of its door, and what it says."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specpipe", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(120), self.lines
        (ready,) = [line for line in self.lines if line.startswith("ready: ")]
        self.url = ready.split()[-1]

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip())
                if line.startswith("ready: "):
                    self._ready.set()

    def ask(self, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        body = {"model": "python-code", "prompt": "def add(", "max_tokens": 4, "temperature": 0}
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def running(*words: str) -> Iterator[Command]:
    command = Command(*words)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.wait()
        command._reader.join(20)


def children(pid: int, name: str) -> list[int]:
    """The child processes whose command line has a word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        process = processes.look(int(folder.name))
        is_child = process is not None and process.parent == pid
        if is_child and any(name in word for word in processes.arguments(process.pid)):
            found.append(process.pid)
    return found


def test_the_door_stays_while_triton_is_started_again(
    config: tuple[str, ...], wait_until: Callable[..., bool]
) -> None:
    ports = ("--no-http", "--grpc-port", "0", "--metrics-port", "0")
    with running("serve", *config, *ports, "--openai", "0") as serve:
        assert len(serve.lines[-1].split()) == 4  # ready: gRPC, metrics, the door
        assert serve.ask()[0] == 200
        (door,) = children(serve.process.pid, "specpipe.gateway")
        (triton,) = children(serve.process.pid, "tritonserver")
        os.kill(triton, signal.SIGKILL)
        statuses = set()
        assert wait_until(lambda: statuses.add(serve.ask()[0]) or 503 in statuses)
        assert wait_until(lambda: serve.ask()[0] == 200, seconds=90)
        assert children(serve.process.pid, "specpipe.gateway") == [door]
        assert serve.end() == 0
        assert processes.look(door) is None


def test_others_are_answered_with_keys_alone(config: tuple[str, ...]) -> None:
    words = ("gateway", *config, "--url", "grpc://127.0.0.1:9", "--listen", "0.0.0.0:0")
    refused = subprocess.run(
        [sys.executable, "-m", "specpipe", *words], capture_output=True, text=True
    )
    assert (refused.returncode, refused.stderr) == (
        1,
        "Error: 0.0.0.0 can be reached from elsewhere, and no keys are set: give --keys FILE or "
        "SPECPIPE_API_KEYS, or add --allow-no-keys\n",
    )


def test_a_gateway_goes_on_with_the_server_that_is_left(
    config: tuple[str, ...], wait_until: Callable[..., bool]
) -> None:
    folder = Path(config[-1].removeprefix("output_dir=")) / "python-code" / "model_repo"
    with launcher.running(folder) as one, launcher.running(folder) as other:
        urls = ("--url", one.grpc_url, "--url", other.grpc_url)
        with running("gateway", *config, *urls, "--listen", "0") as gateway:
            before = [gateway.ask() for _ in range(4)]
            assert {status for status, _ in before} == {200}
            kill(one)
            # One at a time; the first that meets the dead server goes to the other.
            after = [gateway.ask() for _ in range(20)]
            assert {status for status, _ in after} == {200}
            texts = {answer["choices"][0]["text"] for _, answer in before + after}
            assert len(texts) == 1
            one.start()  # at the same address
            returned = re.escape(f"{one.grpc_url} answers")
            assert wait_until(lambda: any(re.fullmatch(returned, x) for x in gateway.lines))
            kill(other)
            assert gateway.ask()[0] == 200
            assert gateway.end() == 0
        other.start()


def kill(server: Server) -> None:
    processes.kill_session(server.triton.pid)
    server.kill()
