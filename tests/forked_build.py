"""Runs `specpipe` in forks of a process that has imported all that it needs, and disturbs it.

A fork takes a tenth of the time of a new process, which is what makes a sweep over every file
operation of a build possible. `Forks` is the tests' side; this module, run, is the other.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[1]

_NEEDED = (
    "specpipe.cli.group",
    "specpipe.build.planning",
    "specpipe.runtimes.torch.layout",
    "specpipe.triton.repository.lint",
    "specpipe.triton.repository.contents",
)
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate")


@dataclass(frozen=True)
class Fault:
    """What happens to a command.

    signum, at      the signal that it gets just before its change number `at` to the disk, from 1
    max_file_bytes  no file may grow longer
    uid             the user that it runs as
    only_renames    the file system cannot let two folders change places
    """

    signum: int | None = None
    at: int = 0
    max_file_bytes: int | None = None
    uid: int | None = None
    only_renames: bool = False


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, or minus the number of the signal that killed it.

    num_changes counts what it did to the disk, a file opened for writing as one; None where it was
    killed.
    """

    code: int
    log: str
    num_changes: int | None

    @property
    def stage(self) -> str | None:
        """The stage that was running at the end; None between two of them."""
        started, finished = None, set()
        for line in self.log.splitlines():
            name, colon, what = line.partition(": ")
            if colon and what == "built":
                finished.add(name)
            elif colon and name not in ("Error", "Traceback", "to build"):
                started = name
        return None if started in finished else started


class Forks:
    """A process that has everything imported, to fork from."""

    def __enter__(self) -> Forks:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_build"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.communicate()

    def run(self, *arguments: str, fault: Fault | None = None) -> Ended:
        """Runs `specpipe` with these arguments and waits for its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"arguments": arguments, "fault": asdict(fault or Fault())}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return Ended(**json.loads(self._process.stdout.readline()))


def _serve() -> None:
    for module in _NEEDED:
        __import__(module)
    for line in sys.stdin:
        request = json.loads(line)
        # Pipes, since a limit on the size of files would be one on the log as well.
        log, log_end = os.pipe()
        count, count_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(log_end, 1)
            os.dup2(log_end, 2)
            _run(request["arguments"], Fault(**request["fault"]), count_end)
        os.close(log_end)
        os.close(count_end)
        with open(log) as log_file, open(count) as count_file:
            text, num_changes = log_file.read(), count_file.read()
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        ended = Ended(code, text, int(num_changes) if num_changes else None)
        print(json.dumps(asdict(ended)), flush=True)


def _run(arguments: Sequence[str], fault: Fault, count_end: int) -> None:
    from specpipe.build import cache
    from specpipe.cli.group import main

    if fault.only_renames:
        cache.exchange = lambda first, second: False
    num_changes = 0

    def count(event: str, details: tuple[Any, ...]) -> None:
        nonlocal num_changes
        if event in _CHANGES or (event == "open" and details[2] & (os.O_WRONLY | os.O_RDWR)):
            num_changes += 1
            if num_changes == fault.at and fault.signum is not None:
                os.kill(os.getpid(), fault.signum)

    if fault.max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.max_file_bytes, fault.max_file_bytes))
    if fault.uid is not None:
        os.setgroups([])
        os.setgid(fault.uid)
        os.setuid(fault.uid)
    code = 1
    try:
        sys.addaudithook(count)
        main(list(arguments))
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os.write(count_end, str(num_changes).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
