"""Servers of several ranks: the command lines, and who gets which signal.

The fake mpirun does with processes what Open MPI 5.0's does: each rank in a process group of its
own, all in one session; SIGTERM is passed on, and SIGKILL follows half a second later. Where a real
one is named by the environment variable SPECPIPE_TEST_MPIRUN, the tests run with that as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import ServerError
from specpipe.runtimes.launch import Launch
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile
from specpipe.triton.client import Client
from specpipe.triton.server import processes
from specpipe.triton.server.command import server_command, server_environment
from specpipe.triton.server.installation import TritonBinary, find_tritonserver
from specpipe.triton.server.options import ServeOptions
from specpipe.triton.server.server import Server
from specpipe.triton.server.workspace import Workspace

FAKE_MPIRUN = """#!<python>
import os, signal, subprocess, sys, time

options = ["--allow-run-as-root", "--bind-to", "none"]
assert sys.argv[1:4] == options, sys.argv
sections, section = [], []
for word in sys.argv[4:] + [":"]:
    if word == ":":
        assert section[:2] == ["-n", "1"], section
        sections.append(section[2:])
        section = []
    else:
        section.append(word)
ranks = [
    subprocess.Popen(
        command, env=dict(os.environ, OMPI_COMM_WORLD_RANK=str(rank)), preexec_fn=os.setpgrp
    )
    for rank, command in enumerate(sections)
]


def end(*_):
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, number)
        time.sleep(0.5)
    os._exit(1)


signal.signal(signal.SIGTERM, end)
while any(rank.poll() is None for rank in ranks):
    time.sleep(0.02)
"""

# Rank 0 serves HTTP and metrics and ends at its SIGTERM a second later, when it has "drained"; the
# others wait for that, as ranks do that stay in the initialization of a model.
FAKE_TRITON = """#!<python>
import http.server, json, os, pathlib, signal, sys, threading, time

folder = pathlib.Path("<folder>")
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
record = {
    "argv": sys.argv[1:],
    "cwd": os.getcwd(),
    "environment": {k: v for k, v in os.environ.items() if k.startswith("TRTLLM_")},
    "pid": os.getpid(),
}
(folder / f"rank{rank}.partial").write_text(json.dumps(record))
(folder / f"rank{rank}.partial").rename(folder / f"rank{rank}.json")
if rank:
    while not (folder / "drained").exists():
        time.sleep(0.05)
    sys.exit(0)


def drain(*_):
    (folder / "got-sigterm").touch()
    threading.Timer(1.0, done).start()


def done():
    (folder / "drained").touch()
    os._exit(0)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.endswith("/config"):
            body = json.dumps({"model_transaction_policy": {"decoupled": True}})
        elif self.path == "/metrics":
            body = "specpipe_requests_in_flight 0\\nspecpipe_steps_total 1\\n"
        else:
            body = "{}"
        self.answer(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(json.dumps({"text_output": "x", "finish_reason": "length"}))

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


signal.signal(signal.SIGTERM, drain)
ports = {a.partition("=")[0]: a.partition("=")[2] for a in sys.argv[1:]}
for name in ("--http-port", "--metrics-port"):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(ports[name])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    time.sleep(1)
"""

BINARY = TritonBinary(Path("/opt/tritonserver/bin/tritonserver"))
OPTIONS = ServeOptions(http_port=1, grpc_port=2, metrics_port=3)


def script(path: Path, text: str, **values: str) -> Path:
    for name, value in {"python": sys.executable, **values}.items():
        text = text.replace(f"<{name}>", value)
    path.write_text(text)
    path.chmod(0o755)
    return path


REAL_MPIRUN = os.environ.get("SPECPIPE_TEST_MPIRUN")


@pytest.fixture(params=["fake", "real"] if REAL_MPIRUN else ["fake"])
def mpirun(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts an mpirun on PATH."""
    if request.param == "fake":
        folder = tmp_path / "bin"
        folder.mkdir()
        path = script(folder / "mpirun", FAKE_MPIRUN)
    else:
        assert REAL_MPIRUN is not None
        path = Path(REAL_MPIRUN)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


@pytest.fixture
def fake_triton(tmp_path: Path) -> TritonBinary:
    return TritonBinary(script(tmp_path / "tritonserver", FAKE_TRITON, folder=str(tmp_path)))


def ranks_of(folder: Path, wait_until: Callable[..., bool]) -> list[dict[str, Any]]:
    """What the two fake Tritons wrote about themselves."""
    paths = [folder / f"rank{rank}.json" for rank in (0, 1)]
    assert wait_until(lambda: all(path.exists() for path in paths))
    return [json.loads(path.read_text()) for path in paths]


def words(launch: Launch, options: ServeOptions = OPTIONS) -> list[str]:
    """The command without what this test's machine decides."""
    command = server_command(
        BINARY,
        Path("/repo"),
        options,
        launch,
        shared_memory_prefix="shm_",
        backends=None,
        admin_key="secret",
    )
    assert command[:2] == [sys.executable, "-c"]
    return command[3:]


RESTRICTED = "shared-memory,model-repository,trace,logging,statistics:specpipe-admin-key=secret"
HTTP = [
    "--http-address=127.0.0.1",
    "--http-port=1",
    f"--http-restricted-api={RESTRICTED}",
]
COMMON = [
    "/opt/tritonserver/bin/tritonserver",
    "--model-repository=/repo",
    "--disable-auto-complete-config",
    "--model-control-mode=explicit",
    "--strict-readiness=false",
    *HTTP,
    "--grpc-address=127.0.0.1",
    "--grpc-port=2",
    f"--grpc-restricted-protocol={RESTRICTED}",
    "--metrics-address=127.0.0.1",
    "--metrics-port=3",
    "--exit-timeout-secs=30",
]


def test_one_process_needs_no_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    shared = "--backend-config=python,shm-region-prefix-name=shm_0_"
    assert words(Launch()) == [*COMMON, shared, "--load-model=*"]


def test_without_http_nothing_listens_for_it() -> None:
    options = replace(OPTIONS, allow_http=False)
    expected = [word for word in COMMON if word not in HTTP]
    expected.insert(expected.index("--grpc-address=127.0.0.1"), "--allow-http=false")
    expected += ["--backend-config=python,shm-region-prefix-name=shm_0_", "--load-model=*"]
    assert words(Launch(), options) == expected


def test_leader_mode_has_a_section_for_each_rank(mpirun: Path) -> None:
    launch = Launch(world_size=3, rank_models=("draft", "target"))
    named = ["--load-model=draft", "--load-model=target"]
    assert words(launch) == [
        *(str(mpirun), "--allow-run-as-root", "--bind-to", "none"),
        *("-n", "1", *COMMON, "--backend-config=python,shm-region-prefix-name=shm_0_"),
        "--load-model=*",
        *(":", "-n", "1", *COMMON, "--backend-config=python,shm-region-prefix-name=shm_1_"),
        *named,
        *(":", "-n", "1", *COMMON, "--backend-config=python,shm-region-prefix-name=shm_2_"),
        *named,
    ]


def test_orchestrator_mode_has_one_section(mpirun: Path) -> None:
    launch = Launch(is_orchestrator=True, arguments=("--enable-peer-access=false",))
    assert words(launch) == [
        *(str(mpirun), "--allow-run-as-root", "--bind-to", "none"),
        *("-n", "1", *COMMON, "--backend-config=python,shm-region-prefix-name=shm_0_"),
        *("--enable-peer-access=false", "--load-model=*"),
    ]


def test_without_mpirun_the_sentence_says_where_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ServerError) as caught:
        words(Launch(world_size=2))
    assert str(caught.value) == (
        "engines of several ranks are started with mpirun, which is not on PATH: serve inside the "
        "image that the engines were built in"
    )


def test_the_environment_of_a_launch_wins() -> None:
    launch = Launch(environment={"TRTLLM_ORCHESTRATOR": "1"})
    keys = {"SPECPIPE_API_KEYS": "secret", "SPECPIPE_ADMIN_KEY": "secret"}  # not for models
    inherited = {"TRTLLM_ORCHESTRATOR": "0", "PATH": "/usr/bin", **keys}
    with contextlib.closing(Workspace(BINARY)) as workspace:
        environment = server_environment(BINARY, launch, inherited, workspace)
    assert environment == {
        "TRTLLM_ORCHESTRATOR": "1",
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{workspace.python_dir}:{Path(sys.executable).parent}:/usr/bin:{os.defpath}",
        "LD_LIBRARY_PATH": str(workspace.library_dir),
    }


def write_pair_file(repository: Path) -> Path:
    """All that the fake needs of a repository."""
    folder = repository / "speculative" / "1"
    folder.mkdir(parents=True)
    (folder / "pair.json").write_text(PairFile("torch", PairOptions()).to_json())
    return repository


def test_ranks_start_in_the_repository_and_end_together(
    mpirun: Path, fake_triton: TritonBinary, tmp_path: Path, wait_until: Callable[..., bool]
) -> None:
    repository = write_pair_file(tmp_path / "model_repo")
    launch = Launch(
        world_size=2, rank_models=("draft", "target"), environment={"TRTLLM_ORCHESTRATOR": "0"}
    )
    ports = ServeOptions(http_port=0, grpc_port=0, metrics_port=0)
    server = Server(repository, ports, launch=launch, binary=fake_triton)
    server.start()
    try:
        ranks = ranks_of(tmp_path, wait_until)
        assert [rank["cwd"] for rank in ranks] == [str(server.models_folder)] * 2
        assert [rank["environment"] for rank in ranks] == [{"TRTLLM_ORCHESTRATOR": "0"}] * 2
        assert "--load-model=target" not in ranks[0]["argv"]
        assert ranks[1]["argv"][-2:] == ["--load-model=draft", "--load-model=target"]
        assert server.triton.triton_pid() == ranks[0]["pid"]
    finally:
        server.stop()
    # A SIGTERM to mpirun would have killed rank 0 before it had drained.
    assert (tmp_path / "drained").exists()
    assert [Path(f"/proc/{rank['pid']}").exists() for rank in ranks] == [False, False]


def test_kill_reaches_ranks_in_groups_of_their_own(
    mpirun: Path, fake_triton: TritonBinary, tmp_path: Path, wait_until: Callable[..., bool]
) -> None:
    ports = ServeOptions(http_port=0, grpc_port=0, metrics_port=0)
    launch = Launch(world_size=2, rank_models=("draft", "target"))
    repository = write_pair_file(tmp_path / "model_repo")
    server = Server(repository, ports, launch=launch, binary=fake_triton)
    server.start()
    pids = [rank["pid"] for rank in ranks_of(tmp_path, wait_until)]
    assert os.getpgid(pids[0]) != os.getpgid(pids[1])
    server.kill()
    assert [_is_running(pid) for pid in pids] == [False, False]
    assert not (tmp_path / "got-sigterm").exists()


def test_the_real_triton_under_mpirun(
    mpirun: Path, echo_repository: Callable[..., Path], tmp_path: Path
) -> None:
    """An orchestrator's only server, less the engines: it answers, drains a stream, is gone."""
    launch = Launch(is_orchestrator=True, arguments=("--pinned-memory-pool-byte-size=0",))
    ports = ServeOptions(http_port=0, grpc_port=0, metrics_port=0)
    server = Server(echo_repository(), ports, launch=launch, binary=find_tritonserver())
    server.start()
    pid = server.triton.triton_pid()
    session = os.getsid(pid)
    try:
        assert processes.arguments(pid)[0].endswith("tritonserver")
        assert not server.triton.has_lost_model()
        assert server.needed_processes().cpu_s().keys() == {
            "mpirun",
            "tritonserver",
            "preprocessing",
            "speculative",
            "postprocessing",
            "plain",
        }
        go = tmp_path / "go"
        with Client(server.grpc_url) as client:
            stream = client.stream(f"<until {go}> a b c", max_tokens=60)
            next(stream)
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            stopping.join(1.0)
            assert stopping.is_alive()
            go.touch()
            last = list(stream)[-1]
            stopping.join()
        assert last.finish_reason == "length"
        assert last.statistics is not None and last.statistics.num_output_tokens == 60
    finally:
        server.kill()
    assert processes.session_pids(session) == []


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
