"""What a command shows of long work: on a terminal, and where there is none."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from specpipe import progress
from specpipe.cli.group import main
from specpipe.cli.progress import Lines
from specpipe.progress import Unit
from tests.cli.test_group import ROOT
from tests.waiting import PATIENCE_S

QUICKSTART = ("--config", str(ROOT / "configs" / "quickstart.yaml"))
STAGES = ("check", "draft/convert", "target/convert", "draft/build_engine", "target/build_engine")
PLANNED = f"to build: {', '.join(STAGES)}, package (6 of 6)"
FEW_ANSWERS = ("--in-process", "--no-sampling", "--limit=2", "--max-tokens=8")
HIDE_CURSOR = "\x1b[?25l"


@dataclass(frozen=True)
class Shown:
    """What a terminal got, and what it shows in the end."""

    code: int
    stdout: str
    received: str

    @property
    def screen(self) -> list[str]:
        """The lines that stay; knows the sequences that rich draws lines with."""
        lines, row, column = [""], 0, 0
        for code, text in re.findall(
            r"(\x1b\[[0-9;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", self.received
        ):
            if text:
                lines[row] = (
                    lines[row][:column].ljust(column) + text + lines[row][column:][len(text) :]
                )
                column += len(text)
            elif code == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif code == "\r":
                column = 0
            elif code == "\x1b[1A":
                row -= 1
            elif code == "\x1b[2K":
                lines[row] = ""
            else:
                assert code.endswith("m"), code
        return [line for line in lines if line]


def on_terminal(
    command: Sequence[str],
    *,
    columns: int = 100,
    interrupt: Callable[[str], bool] = lambda received: False,
    number: signal.Signals = signal.SIGINT,
    **environment: str,
) -> Shown:
    """Runs a command whose stderr is a terminal, and sends a signal when it shows enough."""
    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    unset = ("NO_COLOR", "COLUMNS", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=ROOT,
        env={**kept, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **environment},
    )
    os.close(stderr)
    received, is_sent = b"", False
    while True:
        try:
            read = os.read(terminal, 1 << 16)
        except OSError:  # Linux says EIO once nobody has the other end
            break
        if not read:
            break
        received += read
        if not is_sent and interrupt(received.decode(errors="replace")):
            process.send_signal(number)
            is_sent = True
    stdout, _ = process.communicate(timeout=PATIENCE_S)
    os.close(terminal)
    return Shown(process.returncode, stdout.decode(), received.decode())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Shown]:
    """The quickstart pair, and what a narrow terminal without colours showed of its build."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("engines")
    command = ("-m", "specpipe", "build", *QUICKSTART, "--set", f"output_dir={folder}")
    return folder, on_terminal(command, columns=40, NO_COLOR="1")


def test_a_terminal_shows_bytes_and_keeps_what_was_done(built: tuple[Path, Shown]) -> None:
    folder, shown = built
    assert (shown.code, shown.stdout) == (0, f"{folder}/python-code/model_repo\n")
    timeless = [re.sub(r"in \d+\.\d s", "in TIME", line) for line in shown.screen]
    assert timeless == [
        PLANNED,
        *(
            line
            for name in (*STAGES, "package")
            for line in (f"{name}: starts", f"{name}: built in TIME")
        ),
    ]
    assert re.search(r"target/conv… \d+\.\d/13\.0 MB \d:\d\d:\d\d", shown.received)
    assert HIDE_CURSOR not in shown.received
    assert set(re.findall(r"\x1b\[([0-9;]*)m", shown.received)) <= {"", "0", "1"}  # no colour


def test_json_has_stdout_for_itself_while_bars_are_drawn(built: tuple[Path, Shown]) -> None:
    sets = ("--set", f"output_dir={built[0]}")
    shown = on_terminal(["-m", "specpipe", "verify", *QUICKSTART, *sets, *FEW_ANSWERS, "--json"])
    assert shown.code == 0
    assert json.loads(shown.stdout)["verdict"] == "identical"
    assert shown.screen[2].startswith("to ask: 2 prompts in 18 ways, 8 tokens at most; 0 tests")
    assert shown.screen[3] == "greedy: target alone"
    assert not [line for line in shown.screen if "━" in line]
    assert re.search(r"\x1b\[32m17/18 sides", shown.received)
    assert re.search(r"\d/(s|min)\x1b\[0m *\x1b\[36m\d:\d\d:\d\d left", shown.received)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, arguments)
    return done.exit_code, done.stderr


def test_two_equal_runs_log_equal_bytes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    logs = []
    for name in ("first", "second"):
        sets = ("--set", f"output_dir={tmp_path / name}")
        logs.append(
            (run("build", *QUICKSTART, *sets), run("verify", *QUICKSTART, *sets, *FEW_ANSWERS))
        )
    assert logs[0] == logs[1]
    (code, log), (verified, asked) = logs[0]
    assert (code, verified) == (0, 0)
    assert log.splitlines() == [
        PLANNED,
        *(line for name in (*STAGES, "package") for line in (f"{name}: starts", f"{name}: built")),
    ]
    assert "\x1b" not in asked and "\r" not in asked


WORK = """
import time
from specpipe.cli.progress import StderrDisplay, log
from specpipe.machine import signals
from specpipe.progress import count, phase, shown

def work():
    with shown(StderrDisplay()):
        with phase("target/convert"), count(40 * 10**9, "bytes") as copied:
            for gigabytes in range(1, 40):
                copied.advance(10**9)
            log("half [bold]done[/bold]")
            time.sleep({seconds})

signals.run(work)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_in_the_middle_of_a_bar_leaves_the_terminal_whole(number: signal.Signals) -> None:
    """What is killed cannot erase its bar; its cursor is there all the same."""
    shown = on_terminal(
        ["-c", WORK.format(seconds=600)],
        interrupt=lambda received: "39.0/40.0 GB" in received,
        number=number,
    )
    told = {
        signal.SIGINT: (130, ["half [bold]done[/bold]", "Interrupted."]),
        signal.SIGTERM: (143, ["half [bold]done[/bold]"]),
    }
    if number == signal.SIGKILL:
        assert shown.code == -signal.SIGKILL
    else:
        assert (shown.code, shown.screen) == told[number]
    assert HIDE_CURSOR not in shown.received


def test_a_terminal_that_cannot_draw_gets_lines() -> None:
    shown = on_terminal(["-c", WORK.format(seconds=0)], TERM="dumb")
    lines = [f"target/convert: {done} of 40 GB" for done in range(4, 40, 4)]
    assert (shown.code, shown.received.split("\r\n")) == (0, [*lines, "half [bold]done[/bold]", ""])


@pytest.mark.parametrize(
    ("total", "unit", "amounts", "lines"),
    [
        (9 * 10**9, "bytes", [10**9] * 9, ["x: 4 of 9 GB", "x: 8 of 9 GB"]),
        (9 * 10**9, "bytes", [3 * 10**9] * 3, ["x: 4 of 9 GB"]),
        (None, "bytes", [4 * 10**9, 5 * 10**9], ["x", "x: 4 GB", "x: 8 GB"]),
        (3, "layers", [1, 1, 1], ["x: 1 of 3 layers", "x: 2 of 3 layers"]),
        (2500, "answers", [1] * 2500, ["x: 1000 of 2500 answers", "x: 2000 of 2500 answers"]),
        (14, "sides", [1] * 14, []),
    ],
)
def test_lines_come_at_fixed_amounts(
    total: int | None,
    unit: Unit,
    amounts: list[int],
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.shown(Lines()), progress.phase("x"), progress.count(total, unit) as counter:
        for amount in amounts:
            counter.advance(amount)
    assert capsys.readouterr().err.splitlines() == lines


def test_a_total_that_comes_later_is_told_where_it_is_final(
    capsys: pytest.CaptureFixture[str],
) -> None:
    phase = "target/build_engine"
    with progress.shown(Lines()), progress.phase(phase), progress.count(None, "steps") as counter:
        counter.expect(3)
        for _ in range(3):
            counter.advance()
    assert capsys.readouterr().err.splitlines() == [
        f"{phase}: {done} of 3 steps" for done in (1, 2)
    ]
