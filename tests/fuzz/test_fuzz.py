"""What once failed, tried again; and that the fuzzing would see it fail."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from specpipe.errors import RequestError
from tests.fuzz import trial
from tests.fuzz.mutation import mutate
from tests.fuzz.targets import SEEDS, TARGETS
from tests.fuzz.trial import CORPUS, Target, Trial, Use, attempt, bounded_memory

INPUTS = [(path.parent.name, path) for path in sorted(CORPUS.glob("*/*"))]


@pytest.mark.parametrize(("name", "path"), INPUTS, ids=lambda value: getattr(value, "name", value))
def test_what_once_failed_is_accepted_or_refused(name: str, path: Path) -> None:
    with bounded_memory():
        assert attempt(TARGETS[name], path.read_bytes()).fault is None


@pytest.mark.parametrize("name", TARGETS)
def test_fuzzing_starts_from_what_is_accepted(name: str) -> None:
    outcomes = [attempt(TARGETS[name], data) for data in SEEDS[name]]
    assert [outcome.fault for outcome in outcomes] == [None] * len(outcomes)
    assert any(outcome.is_accepted for outcome in outcomes)


def _spin(data: bytes) -> None:
    while True:
        pass


def _refuse(message: str) -> None:
    raise RequestError(message)


def _allocate(data: bytes) -> None:
    bytearray(1 << 30)


@pytest.mark.parametrize(
    ("use", "fault"),
    [
        (lambda data: int(data), "ValueError: "),
        (_spin, "_TooSlow: "),
        (_allocate, "MemoryError: "),
        (lambda data: _refuse(" "), "a message that says nothing"),
        (lambda data: _refuse("ab" * 1001), "a message of 2002 characters"),
        (lambda data: _refuse("a\x1b[31mb"), "a message that cannot be printed"),
        (lambda data: _refuse("\ud800"), "a message that cannot be printed"),
        (lambda data: _refuse(f"what is {'x' * 91}?"), "a message with 90 characters of the input"),
    ],
    ids=range(8),
)
def test_anything_but_a_sentence_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, use: Use, fault: str
) -> None:
    monkeypatch.setattr(trial, "_MAX_CPU_S", 0.2)
    with bounded_memory():
        found = attempt(Target(use), b'"' + b"x" * 200 + b'"').fault
    assert found is not None and found.startswith(fault)


def test_a_sentence_is_none() -> None:
    outcome = attempt(Target(lambda data: _refuse(f"seed is {data.decode()};\n2 is not")), b"1")
    assert (outcome.is_accepted, outcome.fault) == (False, None)


def test_a_finding_is_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CORPUS", tmp_path / "corpus")
    tried = Trial("digits", Target(lambda data: print(int(data))), tmp_path)
    for data in (b"1", b"one", b"x", b"xy"):
        tried.run(data)
    (kept,) = (tmp_path / "corpus" / "digits").iterdir()
    assert kept.read_bytes() == b"x"  # the shortest of those that fail at one place
    assert json.loads((tmp_path / "counts").read_text()) == {
        "inputs": 4,
        "accepted": 1,
        "refused": 0,
        "findings": 1,
    }


def test_each_change_is_one_of_its_seed() -> None:
    changed = [mutate(b'{"a": [1, "b"]}', Random(seed)) for seed in range(300)]
    assert changed == [mutate(b'{"a": [1, "b"]}', Random(seed)) for seed in range(300)]
    assert len(set(changed)) > 250
    assert sum(_is_json(data) for data in changed) > 100


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
