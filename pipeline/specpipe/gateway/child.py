"""The door as a child of `specpipe serve`: started behind a Triton that answers, watched, drained.

It is started again when it ends or hangs, without a touch to Triton; while Triton is started again
it stays, and refuses. Its socket is the parent's, so that clients that come in between wait, and
nobody else gets the port.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from specpipe.errors import NoAnswer, ServerError
from specpipe.gateway.keys import Keys
from specpipe.gateway.listening import bind, check_open, parse_listen, url_of
from specpipe.gateway.settings import PROBE_KEY_VARIABLE, VARIABLE, GatewaySettings
from specpipe.machine.callables import Log
from specpipe.machine.web import asked
from specpipe.runtimes.pair_file import read_pair
from specpipe.triton.secret import VARIABLE as SECRET_VARIABLE

_START_TIME_S = 120.0  # for the libraries, the tokenizer and one answer, on a busy machine
_LOOK_INTERVAL_S = 0.2
_PROBE_INTERVAL_S = 5.0
_PROBE_TIME_S = 30.0  # after which a door that says nothing at all hangs
_EXIT_TIME_S = 5.0  # beyond the drain
_MOST_PAUSE_S = 30.0

# As for Triton (command.py): no door is left behind with its port.
_WITH_PARENT = (
    "import ctypes, os, runpy, signal; "
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "runpy.run_module('specpipe.gateway', run_name='__main__')"
)


def reserve(settings: GatewaySettings) -> socket.socket:
    """Returns the socket of a door that will be opened; raises where that could not stand there."""
    keys = Keys(settings.keys, os.environ)
    listen = parse_listen(settings.listen)
    check_open(listen, has_keys=keys.are_needed, allow_no_keys=settings.allow_no_keys)
    return bind(listen)


class GatewayChild:
    """One door; `with` it, an answer has gone through, and after it, it is drained and gone."""

    def __init__(
        self,
        settings: GatewaySettings,
        listener: socket.socket,
        *,
        secret: str,
        log: Log,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """listener  a socket that is bound where the door will listen
        secret    that of the server (secret.py)
        """
        self._settings = settings.model_copy(update={"listener": listener.fileno()})
        self._probe_id = read_pair(settings.repository).options.used_token_id
        self._listener, self._log, self._is_interrupted = listener, log, is_interrupted
        self.url = url_of(listener)
        self._secret, self._probe_key = secret, secrets.token_hex(32)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._has_begun = threading.Event()
        self._has_answered = False
        self._watcher = threading.Thread(target=self._watch, name="gateway", daemon=True)

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> GatewayChild:
        # Linux ends a child when the thread that started it does: that is the watcher.
        self._watcher.start()
        self._has_begun.wait()
        try:
            self._wait_for_answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._watcher.join()
        self._listener.close()

    def _wait_for_answer(self) -> None:
        deadline = time.monotonic() + _START_TIME_S
        reason = "nothing came"
        while not self._is_interrupted():
            if self._process is None or self._process.poll() is not None:
                raise ServerError("the door for OpenAI's clients ended as it started; see above")
            try:
                self._ask_model()
                self._has_answered = True
                return
            except ServerError as exc:
                reason = str(exc)
            if time.monotonic() > deadline:
                raise ServerError(f"no answer came through {self.url}: {reason}")
            time.sleep(_LOOK_INTERVAL_S)

    def _ask_model(self) -> None:
        """Sends one request for one token; raises ServerError where no answer comes."""
        body = {"model": self._settings.names[0], "prompt": [self._probe_id], "max_tokens": 1}
        headers = {"Authorization": f"Bearer {self._probe_key}"}
        url = f"{self.url}/v1/completions"
        with asked(url, body, headers, server=self.url, timeout_s=_PROBE_TIME_S) as response:
            said = response.read(1000).decode(errors="replace")
        if response.status != 200:
            raise ServerError(f"{response.status}: {said}")

    def _watch(self) -> None:
        num_failed = 0
        while True:
            started_s = time.monotonic()
            self._start()
            self._has_begun.set()
            fault = self._fault()
            self._stop()
            if fault is None or not self._has_answered:
                return
            if time.monotonic() - started_s > _MOST_PAUSE_S:
                num_failed = 0
            pause_s = min(2.0**num_failed - 1, _MOST_PAUSE_S)
            num_failed += 1
            self._log(f"the door is started again in {pause_s:g} s: {fault}")
            if self._stopping.wait(pause_s):
                return

    def _start(self) -> None:
        environment = {
            **os.environ,
            VARIABLE: self._settings.model_dump_json(),
            PROBE_KEY_VARIABLE: self._probe_key,
            SECRET_VARIABLE: self._secret,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PARENT],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(self._listener.fileno(),),
            start_new_session=True,  # a Ctrl-C of the terminal is the parent's
        )

    def _fault(self) -> str | None:
        """Returns why it has to be started again; None once it is to stop."""
        assert self._process is not None
        next_probe_s = time.monotonic() + _START_TIME_S
        while not self._stopping.wait(_LOOK_INTERVAL_S):
            if (code := self._process.poll()) is not None:
                return f"it ended with exit code {code}"
            if time.monotonic() < next_probe_s:
                continue
            try:
                with asked(f"{self.url}/version", server=self.url, timeout_s=_PROBE_TIME_S) as got:
                    got.read(1000)
            except NoAnswer as exc:
                return str(exc)
            next_probe_s = time.monotonic() + _PROBE_INTERVAL_S
        return None

    def _stop(self) -> None:
        """Has it drain, and ends it where it has not done so in time."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        limit_s = self._settings.drain_timeout_s + _EXIT_TIME_S if self._stopping.is_set() else 0.0
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
