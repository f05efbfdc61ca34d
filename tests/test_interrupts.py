"""Ctrl-C in the phases of real commands: 130 within seconds, and nothing is left of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from specpipe.build import execution, planning
from specpipe.build.load import load_config  # noqa: E402
from tests.quiet import Quiet  # noqa: E402

MODELS = Path(__file__).parents[1] / "models" / "python-code"
SECONDS = 60.0  # to end in, on a busy machine; a command that hangs ends after 5 by itself
LONGEST_S = 120.0

YAML = """
name: pair
draft: {checkpoint: draft}
target: {checkpoint: target}
engine: {max_batch_size: 4, max_seq_len: 256}
nightly: {num_prompts: 2, max_tokens: 8, rounds: 1}
"""

CONFIG = ("--config", "pair.yaml")
ANY_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
COMMANDS = {
    "build": ("build", *CONFIG, "--set=engine.max_seq_len=128"),
    "serve": ("serve", *CONFIG, *ANY_PORTS),
    "verify": ("verify", *CONFIG, "--limit=2", "--max-tokens=8", "--no-sampling"),
    "verify --in-process": (
        *("verify", *CONFIG, "--in-process"),
        *("--limit=2", "--max-tokens=8", "--no-sampling"),
    ),
    "bench": ("bench", *CONFIG, "--limit=2"),
    "tune": ("tune", *CONFIG, "--limit=2", "--max-tokens=8"),
    "nightly --in-process": ("nightly", "pair.yaml", "--in-process"),
    "nightly": ("nightly", "pair.yaml"),
    "report": ("report", "engines/pair"),
    "check": ("check", *CONFIG),
    "inspect": ("inspect", "engines/pair", "--verify"),
    "doctor": ("doctor",),
    "quickstart": ("quickstart",),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupts")
    shutil.copytree(MODELS, folder, dirs_exist_ok=True)
    (folder / "pair.yaml").write_text(YAML)
    execution.run(planning.plan(load_config(folder / "pair.yaml")), Quiet())
    return folder


@pytest.fixture
def folder(built: Path) -> Iterator[Path]:
    """The pair's, for a command that is to leave nothing in it."""
    before = set(built.rglob("*"))
    yield built
    left = {path for path in set(built.rglob("*")) - before if path.suffix != ".lock"}
    assert [path for path in left if path.name.startswith(".")] == []


class Command:
    """A command in a session of its own, as a terminal has it in the foreground."""

    def __init__(self, name: str, folder: Path, temporary: Path) -> None:
        temporary.mkdir(exist_ok=True)
        self._temporary = temporary
        self._log = temporary.with_suffix(".log")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "specpipe", *COMMANDS[name]],
                cwd=folder,
                env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self) -> str:
        return self._log.read_text()

    def has_ended(self, *, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.process.poll() is not None

    def assert_interrupted(self, number: signal.Signals = signal.SIGINT) -> None:
        os.killpg(self.process.pid, number)
        in_time = self.has_ended(within_s=SECONDS)
        running = self._processes()
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert in_time, self.log()
        assert self.process.returncode == 128 + number, self.log()
        assert "Traceback" not in self.log()
        assert "Exception ignored" not in self.log()
        assert running == []
        assert list(self._temporary.iterdir()) == []
        assert list(Path("/dev/shm").glob(f"specpipe_{self.process.pid}_*")) == []

    def _processes(self) -> list[int]:
        """Those that inherited its environment, in whatever session."""
        mark = f"TMPDIR={self._temporary}".encode()
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environ.read_bytes().split(b"\0"):
                    found.append(int(environ.parent.name))
            except OSError:  # gone meanwhile, or dead
                continue
        return found


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("build", "draft/build_engine: "),
        ("serve", "warning: known holes"),
        ("verify --in-process", "greedy: K = "),
        ("tune", "timing steps"),
    ],
)
def test_ctrl_c_ends_a_command_and_leaves_nothing(
    folder: Path, tmp_path: Path, name: str, phase: str
) -> None:
    command = Command(name, folder, tmp_path / "temporary")
    while phase not in command.log():
        assert not command.has_ended(within_s=0.02), command.log()
    command.assert_interrupted()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "serve"])
def test_a_signal_at_any_moment(
    folder: Path, tmp_path: Path, name: str, number: signal.Signals
) -> None:
    """Every moment 1.3 times as late as the one before, until the command is quicker."""
    after_s = 0.1
    while after_s < LONGEST_S:
        command = Command(name, folder, tmp_path / f"temporary-{after_s:.2f}")
        if command.has_ended(within_s=after_s):
            assert command.process.returncode in (0, 1), command.log()  # a night may be slow
            break
        command.assert_interrupted(number)
        after_s *= 1.3
