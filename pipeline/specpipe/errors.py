"""Every failure that specpipe expects.

SpecpipeError
├── ConfigError           the YAML: file, key path, value, what was expected
├── CheckpointError       missing, truncated, or not the architecture that its config.json names
├── PairingError          draft and target cannot be paired: vocabulary, tokenizer, special tokens
├── RuntimeUnavailable    the library or GPU that a runtime needs is not here
├── TrainingError         a loss that is no number, or a state that cannot be written
├── EngineBuildError      the builder refused; ends with its last log lines
├── EngineMismatch        built for another GPU, runtime version or rank count
├── RepositoryError       the Triton repository would not load
├── StoreError            a store that cannot be reached, refuses, or holds what it should not
├── SignatureError        not signed, by nobody who is trusted, or changed since
├── RequestError          one request that cannot be served: the field, its value, the limit
└── ServerError           Triton did not start, died, or answered with an error
    ├── NoAnswer          a server that cannot be reached, or whose connection broke
    └── CutStream         an answer that began and came to no end

A message says what failed, where, and what to do about it. `cli/group.py` prints it and exits 1.
What a stranger sent stands in it as `show` writes it.
"""

from __future__ import annotations

FAULT = "the request failed inside the server, whose log says how"
"""The message that a client gets for an unexpected exception."""

MOST_SHOWN = 80
"""Characters of a stranger's value in a message."""

_LONGEST_SENTENCE = 1000  # characters; a library's message may hold a whole file


def show(value: object) -> str:
    """Writes a stranger's value into a message: on one line, printable, and cut."""
    if isinstance(value, int):  # Python writes out no whole number of more than 4300 digits
        return str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
    return _printable(str(value), MOST_SHOWN)


def is_utf8(text: str) -> bool:
    """Returns whether a text can be written in UTF-8, which half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def plural(number: int, noun: str) -> str:
    """Returns a number with its noun, which has an s in the plural: `1 tie`, `1,200 ties`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def to_sentence(error: BaseException | str) -> str:
    """Returns a message as a client may see it, whatever a library put into it: one line, cut.

    What the system refused is said as `PATH: reason`, without the number of it; an empty message as
    one that gives no reason.
    """
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        name = (
            error.filename if isinstance(error.filename, (int, type(None))) else str(error.filename)
        )
        text = error.strerror if name is None else f"{name}: {error.strerror}"
    return _printable(text, _LONGEST_SENTENCE) if text.strip() else "no reason was given"


def _printable(text: str, most: int) -> str:
    start = text[:most]
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in start)
    return line if len(text) <= most and len(line) <= most else f"{line[:most]}…"


class SpecpipeError(Exception):
    """Base of every failure that a user, a file or a machine can cause."""


class ConfigError(SpecpipeError):
    """The YAML says something that cannot be built."""


class CheckpointError(SpecpipeError):
    """A checkpoint is missing, incomplete, or of a kind that is not supported."""


class PairingError(SpecpipeError):
    """Draft and target do not share one vocabulary."""


class RuntimeUnavailable(SpecpipeError):
    """The library or the GPU that a runtime needs is not here."""


class TrainingError(SpecpipeError):
    """A training went wrong while it ran: its numbers, or the disk."""


class EngineBuildError(SpecpipeError):
    """A builder refused its input or failed."""


class EngineMismatch(SpecpipeError):
    """An engine was built for something else than what would run it."""


class RepositoryError(SpecpipeError):
    """A Triton repository that would not load, or would not serve correctly."""


class StoreError(SpecpipeError):
    """A store cannot be reached, refuses, or holds something else than it should."""


class SignatureError(SpecpipeError):
    """What is signed by nobody who is trusted, is expired or revoked, or was changed since."""


class RequestError(SpecpipeError):
    """A request that cannot be served; names the field, the value and the limit."""


class ServerError(SpecpipeError):
    """Triton did not start, died, or answered with an error."""


class NoAnswer(ServerError):
    """A server cannot be reached, or its connection broke; `reason` says how, in plain words."""

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(f"{server} does not answer: {reason}")
        self.reason = reason


class CutStream(ServerError):
    """An answer began and stopped coming, without an end and without an error."""

    @classmethod
    def after(cls, num_received: int, server: str, reason: str) -> CutStream:
        """Returns the error for an answer of which some responses came."""
        came = f"{num_received} response{'' if num_received == 1 else 's'}"
        return cls(
            f"{server} broke off: {reason}, after {came} and without the end of the answer; ask "
            "again, or see the server's log"
        )
