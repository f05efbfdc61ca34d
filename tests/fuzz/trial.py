"""What may become of an input: accepted, or refused in a sentence; anything else is a fault."""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from specpipe.errors import SpecpipeError

CORPUS = Path(__file__).parent / "corpus"
MAX_BYTES = 1 << 16  # of an input
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where files are made and changed thousands of times."""

_MAX_CPU_S = 3.0  # for what takes a hundredth of it
_MAX_MEMORY = 512 << 20  # in address space, beyond what the process has when it begins
_MAX_MESSAGE = 2000

VALUE, SENTENCE = 90, 1010
"""Characters of an input that a message may repeat: `show` cuts a value at 80, and quotes may stand
around it; `to_sentence` cuts a server's own words at 1000.
"""

Use = Callable[[bytes], None]


class _TooSlow(BaseException):
    """No Exception, so that nothing on the way takes it for its own."""


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Makes what would take too much memory raise MemoryError; children are not meant."""
    with open("/proc/self/statm") as file:  # proc(5): the first number counts pages
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + _MAX_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@dataclass(frozen=True)
class Target:
    """What reads an input, and how much of that its messages may repeat."""

    use: Use
    max_echo: int = VALUE


@dataclass(frozen=True)
class Outcome:
    """fault is None for what is accepted or refused as it should be; place is in the code."""

    is_accepted: bool = False
    fault: str | None = None
    place: str = ""


def attempt(target: Target, data: bytes) -> Outcome:
    """Tries one input within the time that one may take."""

    def stop(*_: object) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_S)
    try:
        target.use(data)
    except SpecpipeError as exc:
        fault = _message_fault(str(exc), data, target.max_echo)
        return Outcome(fault=fault, place=_place(exc))
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        shown = f"{type(exc).__name__}: {ascii(str(exc))[:200]}"
        return Outcome(fault=shown, place=f"{type(exc).__name__} {_place(exc)}")
    else:
        return Outcome(is_accepted=True)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _message_fault(message: str, data: bytes, max_echo: int) -> str | None:
    if not message.strip() or "Traceback" in message:
        return f"a message that says nothing: {message[:200]!r}"
    if len(message) > _MAX_MESSAGE:
        return f"a message of {len(message)} characters: {ascii(message[:200])}"
    if not all(character.isprintable() or character == "\n" for character in message):
        return f"a message that cannot be printed: {ascii(message[:200])}"
    text = data.decode(errors="replace")
    for start in range(len(message) - max_echo):
        if message[start : start + max_echo + 1] in text:
            return f"a message with {max_echo} characters of the input: {ascii(message[:300])}"
    return None


def _place(exc: BaseException) -> str:
    """The last line of specpipe's, or of the targets', that an exception came through."""
    frames = traceback.extract_tb(exc.__traceback__)
    ours = [frame for frame in frames if "/specpipe/" in frame.filename] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""


@dataclass
class Counts:
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    findings: int = 0


class Trial:
    """The inputs of one target: counts them, and keeps the shortest for each place that fails."""

    def __init__(self, name: str, target: Target, folder: Path) -> None:
        """folder gets the input that is tried, for when the process dies of it, and the counts."""
        self.counts = Counts()
        self.places: dict[str, bytes] = {}
        self._name, self._target, self._folder = name, target, folder
        self._written = 0.0

    def run(self, data: bytes) -> Outcome:
        (self._folder / "input").write_bytes(data)
        outcome = attempt(self._target, data)
        self.counts.inputs += 1
        self.counts.accepted += outcome.is_accepted
        self.counts.refused += outcome.fault is None and not outcome.is_accepted
        if outcome.fault is not None:
            self._keep(outcome, data)
        if outcome.fault is not None or time.monotonic() - self._written > 0.2:
            self.write()
        return outcome

    def write(self) -> None:
        (self._folder / "counts").write_text(json.dumps(asdict(self.counts)))
        self._written = time.monotonic()

    def _keep(self, outcome: Outcome, data: bytes) -> None:
        known = self.places.get(outcome.place)
        if known is not None and len(known) <= len(data):
            return
        if known is None:
            self.counts.findings += 1
            print(f"{self._name}: {outcome.fault} ({outcome.place})", flush=True)
        else:
            corpus_file(self._name, known).unlink()
        self.places[outcome.place] = data
        keep(self._name, data)


def corpus_file(name: str, data: bytes) -> Path:
    return CORPUS / name / hashlib.sha256(data).hexdigest()[:12]


def keep(name: str, data: bytes) -> Path:
    """Puts an input into the corpus."""
    path = corpus_file(name, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def inputs_of(name: str) -> list[bytes]:
    """What the corpus has for a target."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
