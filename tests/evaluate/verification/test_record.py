"""What may be served after a verification, and after a change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specpipe.evaluate.results import header
from specpipe.evaluate.verification import record


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """engines/pair with a repository of two files."""
    model = tmp_path / "pair" / "model_repo" / "speculative" / "1"
    model.mkdir(parents=True)
    (model / "model.py").write_text("code")
    (model.parent / "config.pbtxt").write_text("name: 'speculative'")
    return tmp_path / "pair"


def verified(artifacts: Path, verdict: str = "identical", reason: str | None = None) -> None:
    data: dict[str, Any] = {
        **header("verify", pair="pair", settings={}),
        "verdict": verdict,
        "reason": reason,
    }
    record.write(artifacts, data, record.record_repository(artifacts))


def test_what_was_never_verified_may_be_served(artifacts: Path) -> None:
    assert record.verification_fault(artifacts) is None
    assert record.read(artifacts) is None
    assert record.changes(artifacts) == []


@pytest.mark.parametrize("verdict", ["identical", "tie"])
def test_what_passed_may_be_served(artifacts: Path, verdict: str) -> None:
    verified(artifacts, verdict)
    assert record.verification_fault(artifacts) is None


def test_a_fault_is_refused_with_its_reason(artifacts: Path) -> None:
    verified(artifacts, "fault", "greedy, K = 4: prompt p: position 3")
    assert record.verification_fault(artifacts) == (
        "pair did not pass its verification: greedy, K = 4: prompt p: position 3"
    )


def test_ties_that_strict_did_not_allow_are_refused(artifacts: Path) -> None:
    verified(artifacts, "tie", "2 numerical ties, and --strict allows none")
    assert record.verification_fault(artifacts) == (
        "pair did not pass its verification: 2 numerical ties, and --strict allows none"
    )


def test_a_changed_file_is_refused(artifacts: Path) -> None:
    verified(artifacts)
    (artifacts / "model_repo" / "speculative" / "1" / "model.py").write_text("other code")
    assert record.verification_fault(artifacts) == (
        "pair was changed since it was verified (speculative/1/model.py changed): run `specpipe "
        "verify` again"
    )


def test_a_change_of_equal_length_is_found(artifacts: Path) -> None:
    verified(artifacts)
    (artifacts / "model_repo" / "speculative" / "1" / "model.py").write_text("edoc")
    assert record.changes(artifacts) == ["speculative/1/model.py changed"]


def test_all_changes_are_counted(artifacts: Path) -> None:
    verified(artifacts, "fault", "something")
    model = artifacts / "model_repo" / "speculative"
    (model / "config.pbtxt").unlink()
    (model / "1" / "pair.json").write_text("{}")
    assert record.verification_fault(artifacts) == (
        "pair was changed since it was verified (speculative/config.pbtxt is gone and 1 more): run "
        "`specpipe verify` again"
    )


def test_a_file_that_was_only_touched_or_moved_is_no_change(artifacts: Path) -> None:
    verified(artifacts)
    os.utime(artifacts / "model_repo" / "speculative" / "1" / "model.py")
    moved = artifacts.rename(artifacts.with_name("moved"))
    assert record.verification_fault(moved) is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: "{", "cannot be read"),
        (lambda data: json.dumps({**data, "kind": "bench"}), "is of kind 'bench' and format 1"),
        (
            lambda data: json.dumps({**data, "verdict": "fine"}),
            "is not what `specpipe verify` writes (its verdict is 'fine'): run it again",
        ),
        (
            lambda data: json.dumps({k: v for k, v in data.items() if k != "repository"}),
            "is not what `specpipe verify` writes (it has no repository): run it again",
        ),
    ],
)
def test_a_damaged_result_is_no_permission(artifacts: Path, damage: Any, message: str) -> None:
    verified(artifacts)
    path = artifacts / "verification.json"
    path.write_text(damage(json.loads(path.read_text())))
    refusal = record.verification_fault(artifacts)
    assert refusal is not None and refusal.startswith(str(path)) and message in refusal


def test_the_digest_follows_names_and_contents(artifacts: Path) -> None:
    first = record.repository_digest(record.record_repository(artifacts))
    assert first == record.repository_digest(record.record_repository(artifacts))
    (artifacts / "model_repo" / "speculative" / "1" / "model.py").write_text("other code")
    second = record.repository_digest(record.record_repository(artifacts))
    assert first != second
    assert len(first) == 64
