"""The other side of `worker.py`: a process that does work within limits of time and memory.

Standard input is a socket: each line is JSON and is answered by another. The first is the setup,
each that follows is some work.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Work = Callable[[Mapping[str, Any]], Any]
"""Does what a line asks for; its result is JSON-able."""

_SOCKET = 0  # standard input
_ORPHAN_S = 2.0  # how often an idle process looks whether its parent is there
_BLOCK_BYTES = 1 << 16  # most that is read at once: what a pipe holds on Linux (pipe(7))
_MAX_FAULT = 200  # characters of an error, which may repeat what a client sent


class Fault(Exception):
    """Work that cannot be done, in words that fit into a sentence."""


def serve(prepare: Callable[[Mapping[str, Any]], Work]) -> None:
    """Answers until the other end is closed or its process gone; `prepare` gets the setup."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to a group; the parent decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    parent = os.getppid()
    line = _receive(parent)
    if line is None:
        return
    setup = json.loads(line)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _address_space() + setup["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    works: list[Work] = []
    prepare_s = setup.get("setup_seconds", setup["seconds"])
    _send(_within_limits(lambda: works.append(prepare(setup)), setup, prepare_s))
    while works and (line := _receive(parent)) is not None:
        _send(_within_limits(partial(_do, works[0], line), setup, setup["seconds"]))


def _do(work: Work, line: bytes) -> Any:
    return work(json.loads(line))


def _within_limits(work: Callable[[], Any], setup: Mapping[str, Any], seconds: float) -> bytes:
    """Returns the answer of some work; SIGPROF ends the process when that takes too long.

    No handler of Python's would do, as nothing interrupts one multiplication of large numbers.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return _line({"result": work()})
    except Fault as exc:
        return _line(_fault(str(exc)))
    except MemoryError:
        return _line(
            _fault(
                f"it needs more than {setup['memory_bytes']} bytes of memory "
                f"(serving.limits.{setup['limits']}_memory_bytes)"
            )
        )
    except RecursionError:
        return _line(_fault("it is nested too deeply"))
    except Exception as exc:  # what a stranger sent can make a library raise anything
        return _line({**_fault(str(exc) or type(exc).__name__), "kind": "refusal"})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _fault(message: str) -> dict[str, Any]:
    """Returns the answer for an error: its message on one short line."""
    message = " ".join(message[: 2 * _MAX_FAULT].split())
    return {"fault": message if len(message) <= _MAX_FAULT else f"{message[:_MAX_FAULT]}..."}


def _address_space() -> int:
    with open("/proc/self/statm") as file:  # proc(5): the first number counts pages
        return int(file.read().split()[0]) * resource.getpagesize()


def _receive(parent: int) -> bytes | None:
    """Returns the next line; None where no more will come.

    The other end may be held open by a fork of the parent, long after that is gone.
    """
    data = bytearray()
    while not data.endswith(b"\n"):
        if not select.select([_SOCKET], [], [], _ORPHAN_S)[0]:
            if os.getppid() != parent:
                return None
            continue
        block = os.read(_SOCKET, _BLOCK_BYTES)
        if not block:
            return None
        data += block
    return bytes(data)


def _line(answer: Mapping[str, Any]) -> bytes:
    text = json.dumps(answer, ensure_ascii=False)
    return f"{text}\n".encode(errors="surrogatepass")


def _send(line: bytes) -> None:
    unsent = memoryview(line)
    while unsent:
        unsent = unsent[os.write(_SOCKET, unsent) :]
