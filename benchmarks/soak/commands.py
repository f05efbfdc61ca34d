"""`specpipe publish`, `promote` and the others, as processes of their own, and how each ended.

A command works, or ends in one sentence with exit code 1 and without a traceback. What it should
do, its situation tells: `either` where a store or a disk comes and goes while it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.attack.server import SPECPIPE

Outcome = Literal["works", "is refused", "either", "is killed"]

_LIMIT_S = 300.0


@dataclass(frozen=True)
class Command:
    """What became of a command; times by time.monotonic().

    situation  what was the matter with what is around it; "": nothing
    expected   what it should have done
    result     what it printed as JSON; {} where it did not work
    """

    name: str
    situation: str
    expected: Outcome
    started_s: float
    ended_s: float
    exit_code: int
    told: str
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s

    @property
    def works(self) -> bool:
        return self.exit_code == 0

    @property
    def fault(self) -> str | None:
        """What it did that it should not have; None: it ended as it should."""
        if self.expected == "is killed":
            return None
        if self.works:
            return "it worked" if self.expected == "is refused" else None
        if (wrong := _no_sentence(self.told)) is not None or self.exit_code != 1:
            return f"exit code {self.exit_code}, {wrong or 'with a sentence'}"
        return "it was refused" if self.expected == "works" else None

    @property
    def sentence(self) -> str:
        """The last line that it told people."""
        return (self.told.strip().splitlines() or [""])[-1]


def _no_sentence(told: str) -> str | None:
    lines = told.strip().splitlines()
    if "Traceback" in told:
        return "a traceback"
    if sum(line.startswith("Error: ") for line in lines) != 1 or not lines[-1].startswith("Error"):
        return "no sentence at the end"
    return None


class Running:
    """A command that runs.

    max_file_bytes  the longest file that it may write: a stand-in for a full disk
    """

    def __init__(self, config: Path, words: str, *, max_file_bytes: int | None = None) -> None:
        self._name = words.split()[0]
        self._started_s = time.monotonic()
        self.process = subprocess.Popen(
            [*SPECPIPE, *words.split(), "--config", str(config), "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if max_file_bytes is not None:
            limit = (max_file_bytes, max_file_bytes)
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, limit)
        self._printed, self._told, self._ended_s = "", "", 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Waits for its end on a thread, so that the time of that is right, whoever asks when."""
        try:
            self._printed, self._told = self.process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._printed, self._told = self.process.communicate()
            self._told += f"\nno end within {_LIMIT_S:.0f} s"
        self._ended_s = time.monotonic()

    def end(self, expected: Outcome = "works", situation: str = "") -> Command:
        """Waits for its end."""
        self._reader.join()
        result = json.loads(self._printed) if self.process.returncode == 0 else {}
        return Command(
            self._name,
            situation,
            expected,
            self._started_s,
            self._ended_s,
            self.process.returncode,
            self._told,
            result,
        )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill_in_the_middle(self, usual_s: float, rng: random.Random) -> Command:
        """Kills it somewhere in the later part of the time that it usually takes."""
        until = self._started_s + rng.uniform(0.3, 0.95) * usual_s
        self._reader.join(max(0.0, until - time.monotonic()))
        self.kill()
        return self.end("is killed", "SIGKILL")
