"""The socket of a launcher: who may ask, what, and what becomes of it when the launcher ends."""

from __future__ import annotations

import json
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import ServerError
from specpipe.machine.callables import Log
from specpipe.triton.server import control
from specpipe.triton.server.replacing import Change
from specpipe.triton.server.served_models import Version


class Versions:
    """Stands for those of a launcher; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def status(self) -> dict[str, Any]:
        return {"number": 6}

    def promote(self, version: Version, *, report: Log, **choices: bool) -> Change:
        self.asked.append((version, choices))
        report("loading")
        assert self.may_end.wait(20)
        if not version.repository.is_dir():
            raise ServerError(f"{version} is not served: it is not there")
        return Change(
            number=version.number, previous=6, is_previous_loaded=True, load_s=2.5, swap_s=0.5
        )

    def rollback(self, *, replace: bool, report: Log) -> Change:
        raise ZeroDivisionError


class Listening:
    def __init__(self, folder: Path) -> None:
        self.folder, self.versions, self.reports = folder, Versions(), list[str]()


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    """In a folder with a path longer than that of a socket may be."""
    made = Listening(tmp_path / ("a" * 150))
    with control.listening(made.folder, made.versions, made.reports.append):  # type: ignore[arg-type]
        yield made


def test_a_question_is_answered_with_what_is_told_meanwhile(listening: Listening) -> None:
    told: list[str] = []
    assert control.ask(listening.folder, "status") == {"number": 6}
    assert control.ask(
        listening.folder,
        "promote",
        report=told.append,
        repository=listening.folder,
        number=7,
        replace=True,
    ) == {
        "number": 7,
        "previous": 6,
        "is_previous_loaded": True,
        "load_s": 2.5,
        "swap_s": 0.5,
        "gap_s": 0.0,
        "in_flight": 0,
    }
    assert told == ["loading"]
    choices = {"keep_previous": True, "replace": True}
    assert listening.versions.asked == [(Version(listening.folder, 7), choices)]
    assert listening.reports == []


def test_while_a_change_is_under_way_the_status_is_told(listening: Listening) -> None:
    listening.versions.may_end.clear()
    asked = {"repository": listening.folder, "number": 7}
    change = threading.Thread(
        target=control.ask, args=(listening.folder, "promote"), kwargs=asked, daemon=True
    )
    change.start()
    assert control.ask(listening.folder, "status") == {"number": 6}
    listening.versions.may_end.set()
    change.join(20)
    assert not change.is_alive()


@pytest.mark.parametrize(
    ("action", "arguments", "sentence"),
    [
        ("promote", {"repository": "/x", "number": 0}, "promote: number: .*equal to 1"),
        ("promote", {"repository": "/x", "number": "7"}, "promote: number: .*valid integer"),
        ("promote", {"number": 7}, "promote: repository: Field required"),
        ("promote", {"repository": "/x", "number": 7}, "version 7 is not served: it is not there"),
        ("rollback", {"number": 7}, "rollback: number: Extra inputs"),
        ("rollback", {}, "the request failed inside the server, whose log says how"),
        ("x" * 1000, {}, r"unknown action x{80}…: expected one of status, promote, rollback"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_be_done_is_one_sentence(
    listening: Listening, action: Any, arguments: Mapping[str, Any], sentence: str
) -> None:
    with pytest.raises(ServerError, match=sentence):
        control.ask(listening.folder, action, **arguments)
    assert control.ask(listening.folder, "status") == {"number": 6}


@pytest.mark.parametrize("line", [b"[]", b"{", b"\xff\xfe", b'{"arguments": {}}', b"[" * 100_000])
def test_a_line_that_is_no_question_is_refused(listening: Listening, line: bytes) -> None:
    with control._connected(listening.folder) as lines:
        assert lines is not None
        lines.write(line + b"\n")
        lines.flush()
        news = json.loads(lines.readline())
    assert news["error"].startswith("this is no question: ")
    assert len(news["error"]) < 110


def test_the_socket_is_its_owners_alone_and_goes_with_the_launcher(tmp_path: Path) -> None:
    path = tmp_path / control.NAME
    assert not control.is_served(tmp_path)
    with control.listening(tmp_path, Versions(), print):  # type: ignore[arg-type]
        assert stat.filemode(path.stat().st_mode) == "srw-------"
        assert control.is_served(tmp_path)
    assert not path.exists()
    with pytest.raises(ServerError, match="no `specpipe serve` of .* runs on this machine"):
        control.ask(tmp_path, "status")


def test_the_socket_of_a_killed_launcher_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / control.NAME))
    assert not control.is_served(tmp_path)
    with control.listening(tmp_path, Versions(), print):  # type: ignore[arg-type]
        assert control.ask(tmp_path, "status") == {"number": 6}


def test_of_two_launchers_the_first_is_asked(listening: Listening) -> None:
    reports: list[str] = []
    second = Versions()
    with control.listening(listening.folder, second, reports.append):  # type: ignore[arg-type]
        control.ask(listening.folder, "promote", repository=listening.folder, number=7)
    assert control.ask(listening.folder, "status") == {"number": 6}
    assert (len(listening.versions.asked), len(second.asked)) == (1, 0)
    assert reports == [
        "warning: no other version can be promoted while this server runs: another `specpipe "
        f"serve` of {listening.folder} runs here, which is asked"
    ]


def test_a_folder_that_cannot_be_written_costs_the_socket_alone(tmp_path: Path) -> None:
    reports: list[str] = []
    with control.listening(Path("/proc/self"), Versions(), reports.append):  # type: ignore[arg-type]
        pass
    assert len(reports) == 1 and "/proc/self/serve.sock: " in reports[0]
