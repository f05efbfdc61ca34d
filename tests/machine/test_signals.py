"""What a signal does to a command, whatever runs then: real processes, real signals."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

FOREVER = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2_000_000_000)"  # C, which looks at no signals


def ended(
    body: str,
    *numbers: signal.Signals,
    then: signal.Signals | None = None,
    module: str = "import hashlib, threading, time\nfrom specpipe.machine import signals\n",
) -> tuple[int, str, str]:
    """Runs a command with that body, sends signals once it prints, returns how it ended.

    Then it gets a line of input; `then` is a signal for when it prints again.
    """
    indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
    heeded = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # under nohup, too
    code = f"{heeded}{module}def command():\n{indented}signals.run(command)"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            for number in numbers:
                process.send_signal(number)
            if then is not None:
                assert process.stdout.readline() == "ending\n"
                process.send_signal(then)
            printed, errors = process.communicate("\n", timeout=PATIENCE_S)
        finally:
            process.kill()
    return process.returncode, printed, errors


RUNNING = "print('running', flush=True)\n"


@pytest.mark.parametrize(
    ("number", "code", "errors"),
    [
        (signal.SIGINT, 130, "Interrupted.\n"),
        (signal.SIGTERM, 143, ""),
        (signal.SIGHUP, 129, ""),
    ],
)
def test_a_signal_unwinds_the_stack(number: signal.Signals, code: int, errors: str) -> None:
    body = (
        "try:\n    print('running', flush=True)\n    time.sleep(600)\nfinally:\n    print('done')"
    )
    assert ended(body, number) == (code, "done\n", errors)


def test_a_signal_that_comes_to_another_thread_wakes_the_one_that_waits() -> None:
    """Which thread gets it is the system's to choose; here it is always the other one."""
    body = (
        "def send(): signal.pthread_kill(threading.get_ident(), signal.SIGINT)\n"
        "try:\n    print('running', flush=True)\n    threading.Timer(0.5, send).start()\n"
        "    time.sleep(600)\nfinally:\n    print('done')"
    )
    module = "import signal, threading, time\nfrom specpipe.machine import signals\n"
    assert ended(body, module=module) == (130, "done\n", "Interrupted.\n")


SWALLOWING = {
    "by a library that catches everything": """
while True:
    try:
        while True: time.sleep(0.01)
    except BaseException:
        break
while True: time.sleep(0.01)
""",
    "in a __del__": """
class Dropped:
    def __del__(self): time.sleep(600)
Dropped()
while True: time.sleep(0.01)
""",
    "at the end": """
try: time.sleep(600)
except BaseException: pass
""",
}


@pytest.mark.parametrize("body", SWALLOWING.values(), ids=SWALLOWING)
def test_a_lost_one_is_raised_again(body: str) -> None:
    code, printed, errors = ended(RUNNING + body.strip(), signal.SIGINT)
    assert (code, printed) == (130, "")
    assert errors in ("", "Interrupted.\n")


WAITING = {
    "C that looks at no signals": FOREVER,
    "that C in a thread": f"signals.in_thread(lambda: {FOREVER})",
    "a thread that waits": (
        "with signals.thread_pool(1) as pool: pool.submit(threading.Event().wait).result()"
    ),
    "what is to clean up": "try: time.sleep(600)\nfinally: time.sleep(600)",
    "what defers signals": "with signals.deferred(): time.sleep(600)",
}


@pytest.mark.parametrize("body", WAITING.values(), ids=WAITING)
def test_nothing_is_waited_for_for_long(body: str) -> None:
    sooner = "signals._UNWIND_TIME_S = 0.5\n"
    assert ended(sooner + RUNNING + body, signal.SIGINT)[0] == 130


def test_the_second_signal_ends_at_once() -> None:
    later = "signals._UNWIND_TIME_S = 600.0\n"
    ending = f"time.sleep(2 * signals._SAME_S)\n    print('ending', flush=True)\n    {FOREVER}"
    body = f"{later}try:\n    {RUNNING}    time.sleep(600)\nfinally:\n    {ending}"
    assert ended(body, signal.SIGINT, then=signal.SIGINT) == (130, "", "")


def test_the_same_signal_sent_twice_is_one() -> None:
    """As `timeout` of coreutils sends it: to the process, and to its group."""
    later = "signals._SAME_S = 600.0\n"  # this process, too, may have to wait between the two
    body = f"{later}try:\n    {RUNNING}    time.sleep(600)\nfinally: print('done')"
    assert ended(body, signal.SIGINT, signal.SIGINT) == (130, "done\n", "Interrupted.\n")


def test_what_is_deferred_is_done_first() -> None:
    held = f"    {RUNNING}    input()\n    print('done')"
    body = f"with signals.deferred():\n{held}\nprint('on')"
    assert ended(body, signal.SIGINT) == (130, "done\n", "Interrupted.\n")


def test_what_comes_while_modules_are_imported_is_not_lost() -> None:
    """Handlers are there before the imports that take long; what comes before them is blocked."""
    module = (
        "import specpipe.__main__\nfrom specpipe.machine import signals\n"
        "print('running', flush=True)\ninput()\n"
    )
    assert ended("print('on')", signal.SIGINT, module=module) == (130, "", "Interrupted.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ignored_stays_ignored(number: signal.Signals) -> None:
    """A shell starts background commands so, that Ctrl-C is not for, and nohup those that stay."""
    module = (
        f"import signal\nsignal.signal({int(number)}, signal.SIG_IGN)\n"
        "from specpipe.machine import signals\n"
    )
    assert ended(f"{RUNNING}input()", number, module=module) == (0, "", "")


@pytest.mark.parametrize(
    ("disposition", "expected"), [("SIG_DFL", "2 15 1\n"), ("SIG_IGN", "2 15\n")]
)
def test_a_server_is_not_ended_by_what_is_ignored(disposition: str, expected: str) -> None:
    code = (
        f"import signal\nsignal.signal(signal.SIGHUP, signal.{disposition})\n"
        "from specpipe.machine import signals\nprint(*map(int, signals.ending_signals()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (expected, "")


@pytest.mark.parametrize(
    ("body", "code"), [("", 0), ("raise SystemExit(2)", 2), ("raise ValueError('a bug')", 1)]
)
def test_without_a_signal_a_command_has_its_own_code(body: str, code: int) -> None:
    assert ended(RUNNING + body)[0] == code
