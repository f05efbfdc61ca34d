"""The socket by which the commands of this machine ask a `specpipe serve` that runs.

    with control.listening(artifacts_dir, versions, report): ...       # the launcher
    status = control.ask(artifacts_dir, "status")                      # a command
    change = control.ask(artifacts_dir, "promote", report=print,
                         repository=folder, number=7, keep_previous=True, replace=False)
    change = control.ask(artifacts_dir, "rollback", report=print, replace=False)
    control.is_served(artifacts_dir)

`repository` is the folder of the Triton repository (`versions/7/model_repo`), which lies where the
launcher finds it; what it is, and who signed it, is the command's to check. `status` returns what
`Versions.status` does, the others the fields of a `Change`. Both may be asked of a pair that is
served as it was built. Each call raises ServerError with the launcher's sentence, and where no
launcher of the pair runs; `is_served` tells that before.

The socket lies in the pair's folder of artifacts and is its owner's alone (0600; root may, too).
Of two launchers of one pair on one machine the first one is asked; the second says so, and is asked
by nobody. The socket of a launcher that was killed is replaced by the next.

A question is one line of JSON: {"action": "promote", "arguments": {...}}. The answer is a line
{"progress": "a sentence"} as often as there is news, and a last {"result": {...}} or
{"error": "a sentence"}. A client that goes away changes nothing: what it asked goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specpipe.errors import FAULT, ServerError, SpecpipeError, show, to_sentence
from specpipe.machine.callables import Log
from specpipe.machine.own_json import reason
from specpipe.triton.server.served_models import Version

if TYPE_CHECKING:
    from specpipe.triton.server.versions import Versions

Action = Literal["status", "promote", "rollback"]

NAME = "serve.sock"
"""The socket's file in the pair's folder."""

_MAX_LINE_BYTES = 1 << 20
_QUESTION_TIME_S = 10.0  # to send one line
_BACKLOG = 8


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Nothing(_Arguments):
    pass


class _Promote(_Arguments):
    repository: str
    number: int = Field(ge=1)
    keep_previous: bool = True
    replace: bool = False


class _Rollback(_Arguments):
    replace: bool = False


def ask(
    artifacts_dir: Path,
    action: Action,
    *,
    report: Log = lambda line: None,
    **arguments: Any,
) -> dict[str, Any]:
    """Asks the launcher of a pair and returns its result; `report` takes what it tells meanwhile.

    Waits as long as the launcher does, which has limits of its own.
    """
    plain = {key: str(v) if isinstance(v, Path) else v for key, v in arguments.items()}
    question = json.dumps({"action": action, "arguments": plain})
    with _connected(artifacts_dir) as lines:
        if lines is None:
            raise ServerError(
                f"no `specpipe serve` of {artifacts_dir} runs on this machine: start it, or ask on "
                "the machine that serves"
            )
        try:
            lines.write(f"{question}\n".encode())
            lines.flush()
            while line := lines.readline(_MAX_LINE_BYTES):
                news = json.loads(line)
                if "result" in news:
                    return dict(news["result"])
                if "error" in news:
                    raise ServerError(str(news["error"]))
                report(str(news["progress"]))
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise ServerError(f"`specpipe serve` did not answer: {reason(exc)}") from exc
    raise ServerError("`specpipe serve` ended before it had answered")


def is_served(artifacts_dir: Path) -> bool:
    """Returns whether a launcher of the pair runs here that can be asked."""
    with _connected(artifacts_dir) as lines:
        return lines is not None


@contextlib.contextmanager
def listening(artifacts_dir: Path, versions: Versions, report: Log) -> Iterator[None]:
    """Answers questions while a `with` block lasts; without a socket `report` says why."""
    try:
        listener = _listen(artifacts_dir)
    except ServerError as exc:
        report(f"warning: no other version can be promoted while this server runs: {exc}")
        yield
        return
    thread = threading.Thread(
        target=_accept, args=(listener, versions), name="control", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError), _short_path(artifacts_dir) as path:
            os.unlink(path)
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _listen(artifacts_dir: Path) -> socket.socket:
    try:
        artifacts_dir.mkdir(parents=True, exist_ok=True)
        with _short_path(artifacts_dir, is_alone=True) as path:
            if is_served(artifacts_dir):
                raise ServerError(
                    f"another `specpipe serve` of {artifacts_dir} runs here, which is asked"
                )
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            with contextlib.ExitStack() as stack:
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                # Before `bind`, so that the file never has other rights (Linux, af_unix.c).
                os.fchmod(listener.fileno(), 0o600)
                listener.bind(path)
                listener.listen(_BACKLOG)
                stack.pop_all()
            return listener
    except OSError as exc:
        raise ServerError(f"{artifacts_dir / NAME}: {exc.strerror}") from exc


@contextlib.contextmanager
def _connected(artifacts_dir: Path) -> Iterator[BinaryIO | None]:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            with _short_path(artifacts_dir) as path:
                client.connect(path)
        except OSError as exc:
            if isinstance(exc, PermissionError):
                raise ServerError(f"{artifacts_dir / NAME} is another user's") from exc
            yield None
            return
        with client.makefile("rwb") as lines:
            yield cast(BinaryIO, lines)


@contextlib.contextmanager
def _short_path(artifacts_dir: Path, *, is_alone: bool = False) -> Iterator[str]:
    """Yields a path of the socket that is short, as it must be: 107 bytes (unix(7))."""
    folder = os.open(artifacts_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if is_alone:
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield f"/proc/self/fd/{folder}/{NAME}"
    finally:
        os.close(folder)


def _accept(listener: socket.socket, versions: Versions) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # it was closed
            return
        threading.Thread(
            target=_answer, args=(connection, versions), name="control-answer", daemon=True
        ).start()


def _answer(connection: socket.socket, versions: Versions) -> None:
    def send(news: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nobody waits any more
            connection.sendall(f"{json.dumps(news)}\n".encode())

    with connection:
        connection.settimeout(_QUESTION_TIME_S)
        try:
            with connection.makefile("rb") as lines:
                line = lines.readline(_MAX_LINE_BYTES)
            if line:
                send({"result": _act(line, versions, lambda text: send({"progress": text}))})
        except SpecpipeError as exc:
            send({"error": to_sentence(" ".join(str(exc).split()))})
        except OSError:  # it sent nothing in time
            pass
        except Exception:
            send({"error": FAULT})
            raise


def _act(line: bytes, versions: Versions, report: Log) -> Mapping[str, Any]:
    try:
        question = json.loads(line)
        action, arguments = question["action"], question.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ServerError(f"this is no question: {show(line.decode(errors='replace'))}") from None
    try:
        match action:
            case "status":
                _Nothing.model_validate(arguments)
                return versions.status()
            case "promote":
                asked = _Promote.model_validate(arguments)
                change = versions.promote(
                    Version(Path(asked.repository).resolve(), asked.number),
                    keep_previous=asked.keep_previous,
                    replace=asked.replace,
                    report=report,
                )
            case "rollback":
                replace = _Rollback.model_validate(arguments).replace
                change = versions.rollback(replace=replace, report=report)
            case _:
                known = ", ".join(get_args(Action))
                raise ServerError(f"unknown action {show(action)}: expected one of {known}")
    except ValidationError as exc:
        raise ServerError(f"{action}: {reason(exc)}") from exc
    return dataclasses.asdict(change)
