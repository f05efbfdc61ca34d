"""Ctrl-C, SIGTERM and SIGHUP end a command within seconds, and leave nothing half-made.

The first signal is raised in the main thread and unwinds the stack, so that whatever a `with` or a
`finally` holds is given back. An exception that comes at any moment can get lost, though: in a
library that catches everything, in a `__del__`, and in C++ that returns after minutes. So it is
raised again until the stack unwinds; a command that has not ended after a while is ended by a
thread of its own; and once a signal came, no command ends with another exit code than that of it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any, NoReturn, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a command; the last one comes when its terminal closes."""

_UNWIND_TIME_S = 5.0  # then the process ends, whatever it waits for
_REPEAT_S = 0.25  # between two attempts to raise what got lost: a guess
_SAME_S = 0.2  # `timeout` of coreutils sends a signal to the process and to its group

_Result = TypeVar("_Result")


def ending_signals() -> tuple[signal.Signals, ...]:
    """Returns what ends a server: those above, but SIGHUP where it is ignored, as under nohup."""
    is_kept = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return SIGNALS if is_kept else SIGNALS[:2]


def run(command: Callable[[], object]) -> NoReturn:
    """Runs a whole command and ends the process; 130 after Ctrl-C, 143 after SIGTERM, 129 after
    SIGHUP.

    Signals that were blocked until then come now; a second one ends the process at once. What
    is no longer waited for is left behind: threads whose question is still open after a signal,
    and always the second that large libraries take to end, in which Python handles no signals.
    """
    with raised() as ending:
        code: Any = None
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            command()
        except SystemExit as exc:
            code = exc.code
        except BaseException as exc:
            if ending.number is None:
                raise
            if isinstance(exc, KeyboardInterrupt):
                print("Interrupted.", file=sys.stderr)
        ending.num_deferring += 1
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        atexit._run_exitfuncs()
        os._exit((code or 0) if ending.number is None else 128 + ending.number)


@contextlib.contextmanager
def raised() -> Iterator[Interruption]:
    """Raises KeyboardInterrupt for Ctrl-C meanwhile, SystemExit (143, 129) for SIGTERM and SIGHUP.

    No signal gets lost. For the main thread, which alone may handle signals. One that is ignored,
    as Ctrl-C is in a command that a shell runs in the background, SIGHUP under nohup, stays so.
    """
    global _ending
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in (*handled, signal.SIGALRM)}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    earlier, ending = _ending, Interruption(sys.unraisablehook)
    watcher = threading.Thread(target=ending.watch, args=(reader,), name="signals", daemon=True)
    hook, sys.unraisablehook, _ending = sys.unraisablehook, ending.report_unraisable, ending
    with deferred():
        # Python's own handler writes the number there at once, whatever the main thread does.
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in handled:
            signal.signal(number, ending.handle)
        signal.signal(signal.SIGALRM, ending.repeat)
        watcher.start()
    try:
        yield ending
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(writer)
        watcher.join()
        os.close(reader)
        sys.unraisablehook, _ending = hook, earlier


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Raises what comes meanwhile at its end: for cleaning up, and other work that is soon done."""
    ending = _ending
    if ending is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    ending.num_deferring += 1
    try:
        yield
    finally:
        ending.num_deferring -= 1
        ending.raise_again()


def in_thread(call: Callable[[], _Result]) -> _Result:
    """Calls what may run in C++ for minutes; a signal leaves it behind, in a thread of its own."""
    result: Future[_Result] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as exc:
            result.set_exception(exc)

    threading.Thread(target=run, name="library", daemon=True).start()
    return result.result()


@contextlib.contextmanager
def thread_pool(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yields a pool for what may be left undone: a failure or a signal leaves it running."""
    pool = ThreadPoolExecutor(num_threads)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


class Interruption:
    """Which signal came first, and what is done about it; see `raised`."""

    def __init__(self, report: Callable[[Any], object]) -> None:
        self.number: int | None = None
        self.num_deferring = 0
        self._report = report
        self._error: BaseException | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number = number
            is_ctrl_c = number == signal.SIGINT
            self._error = KeyboardInterrupt() if is_ctrl_c else SystemExit(128 + number)
            signal.setitimer(signal.ITIMER_REAL, _REPEAT_S, _REPEAT_S)
            self.raise_again()

    def repeat(self, number: int, frame: FrameType | None) -> None:
        self.raise_again()

    def raise_again(self) -> None:
        """Raises it unless it is on its way already: what runs now runs in a `finally` of it."""
        handled = sys.exc_info()[1]
        while handled is not None and handled is not self._error:
            handled = handled.__context__
        if self._error is not None and handled is None and self.num_deferring == 0:
            raise self._error

    def report_unraisable(self, unraisable: Any) -> None:
        """Prints no traceback for what got lost where nothing can be raised: it is raised again."""
        if self._error is None or unraisable.exc_value is not self._error:
            self._report(unraisable)

    def watch(self, reader: int) -> None:
        """Ends the process at the second signal, or when it does not end by itself after one."""
        main = threading.main_thread().ident
        assert main is not None  # since it runs
        number, began = 0, 0.0
        while True:
            left_s = max(began + _UNWIND_TIME_S - time.monotonic(), 0.0) if number else None
            is_unheard = left_s is not None and self.number is None
            wait_s = min(left_s, _REPEAT_S) if left_s is not None and is_unheard else left_s
            if not select.select([reader], [], [], wait_s)[0]:
                if wait_s == left_s:
                    break
                # It came to another thread, or just before the main one began to wait, which
                # would handle it after that.
                signal.pthread_kill(main, signal.SIGALRM)
                continue
            received = os.read(reader, 1)
            if not received:
                return
            # A program with a handler of its own, as the launcher, decides by itself.
            if received[0] not in SIGNALS or signal.getsignal(received[0]) != self.handle:
                continue
            if not number:
                number, began = received[0], time.monotonic()
            elif time.monotonic() - began > _SAME_S:
                break
        os._exit(128 + number)


_ending: Interruption | None = None
