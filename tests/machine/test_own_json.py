"""Files that specpipe wrote and something else came over: every reader says what and where."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specpipe.errors import RepositoryError
from specpipe.evaluate.nightly.record import read_last_good
from specpipe.evaluate.results import read_result
from specpipe.evaluate.verification import record
from specpipe.machine.manifest import parse_manifest
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile

PAIR = json.loads(PairFile("torch", PairOptions()).to_json())
OPTIONS = PAIR["options"]


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def vast(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def holding(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


DAMAGES = [
    (folder, "it is not a file"),
    (loop, "Too many levels of symbolic links"),
    (endless, "it is not a file"),
    (pipe, "it is not a file"),
    (vast, "it has 1099511627776 bytes, expected at most 268435456"),
    (holding(b""), "Expecting value: line 1 column 1 (char 0)"),
    (holding(b'{"format": 1, "kind": "ver'), "Unterminated string starting at"),
    (holding(b"[1]"), "it holds no JSON object"),
    (holding(b"\xff\xfe"), "byte 0 is not UTF-8"),
    (holding(b"[" * 100_000), "it is nested too deeply"),
    (holding(b'{"a":' + b"9" * 5000 + b"}"), "Exceeds the limit (4300 digits)"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_file_is_told_by_every_reader(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    path = tmp_path / "verification.json"
    damage(path)
    assert parse_manifest(path) is None
    for read in (PairFile.read, read_last_good, lambda path: read_result(path, "verify")):
        if damage is loop and read is read_last_good:
            continue  # a link that leads nowhere is no last good run
        with pytest.raises(RepositoryError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path} cannot be read ({reason}")
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({**PAIR, "runtime": "vllm"}, "runtime is 'vllm', expected one of torch, tensorrt, tensor"),
        ({**PAIR, "runtime": "x" * 10**6}, "runtime is 'xxxxxxxx"),
        ({**PAIR, "runtime": ["torch"]}, "runtime: Input should be a valid string"),
        ({}, "runtime: Field required"),
        ({"runtime": "torch"}, "options: Field required"),
        ({**PAIR, "options": []}, "options: Input should be a dictionary or an instance of Pair"),
        ({**PAIR, "options": {**OPTIONS, "faster": 1}}, "options.faster: Unexpected keyword"),
        ({**PAIR, "options": {**OPTIONS, "max_batch_size": "x"}}, "options.max_batch_size: Input"),
        ({**PAIR, "options": {**OPTIONS, "max_seq_len": 2.5}}, "options.max_seq_len: Input"),
        ({**PAIR, "options": {**OPTIONS, "schedule": [[1]]}}, "options.schedule.0.1: Field requ"),
        ({**PAIR, "options": {**OPTIONS, "x" * 10**6: 1}}, "options.xxxxxxxxx"),
    ],
)
def test_a_pair_file_that_says_something_else_is_refused(
    tmp_path: Path, data: object, reason: str
) -> None:
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(data))
    with pytest.raises(RepositoryError) as caught:
        PairFile.read(path)
    assert str(caught.value).startswith(f"{path} cannot be read ({reason}")
    assert str(caught.value).endswith("): build again")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"repository": None}, ""),
        ({"repository": {}}, "it has no files"),
        ({"repository": {"files": {"a": {"size": "x"}}}}, "a.size: Input should be a valid int"),
        ({"verdict": "y" * 10**6}, "its verdict is 'yyyy"),
        ({"format": "z" * 10**6}, ""),
    ],
)
def test_a_verification_of_another_form_is_refused(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    whole = {"format": 1, "kind": "verify", "reason": None, "verdict": "tie"}
    data = {**whole, "repository": {"files": {}}, **change}
    (tmp_path / "verification.json").write_text(json.dumps(data))
    with pytest.raises(RepositoryError) as caught:
        record.read(tmp_path)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 500
