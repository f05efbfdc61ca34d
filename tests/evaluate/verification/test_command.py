"""Case A7 as a user sees it: recorded streams, what is printed of them, and the exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specpipe.cli.verify import verify
from specpipe.config.sections import PipelineConfig
from specpipe.evaluate.verification import run
from specpipe.evaluate.verification.asking import Case, SideAnswers, VerifySide
from specpipe.evaluate.verification.exact import judge
from specpipe.evaluate.verification.gate import GateResult
from specpipe.evaluate.verification.outcome import Findings, Verification
from specpipe.evaluate.verification.verdict import Stream, TieThreshold
from specpipe.speculative.request import GREEDY
from tests.evaluate.verification.conftest import QUICKSTART
from tests.evaluate.verification.table import RowScorer
from tests.waiting import PATIENCE_S, wait_until

SHARED = tuple(range(10, 19))
CASES = [Case(name="p", token_ids=(5,), max_tokens=12)]
THRESHOLD = TieThreshold(dtype="bfloat16")


def findings(
    expected: tuple[int, ...],
    found: tuple[int, ...],
    logits: dict[int, float],
    **settings: Any,
) -> Findings:
    """Two streams, compared by the target's logits where they part."""
    sides = [
        VerifySide(name=name, kind=kind, num_draft_tokens=k, at_once=1)
        for name, kind, k in (("target alone", "reference", 0), ("K = 4", "speculation", 4))
    ]
    alone, speculative = (
        SideAnswers(side=side, streams=(Stream(ids, "length"),), num_draft_tokens=2 * number)
        for number, (side, ids) in enumerate(zip(sides, (expected, found), strict=True))
    )
    judged = judge(
        "greedy",
        alone,
        speculative,
        CASES,
        scorer=RowScorer(logits),
        sampling=GREEDY,
        threshold=THRESHOLD,
        end_token_ids=frozenset({2}),
    )
    return Findings(sides=(judged,), tests=(), threshold=THRESHOLD, **{"gate": None, **settings})


def ask(monkeypatch: pytest.MonkeyPatch, found: Findings) -> Result:
    monkeypatch.setattr(
        run, "verify", lambda *_, **__: Verification(found, Path("verification.json"))
    )
    return CliRunner().invoke(verify, ["--config", str(QUICKSTART), "--no-sampling"])


@pytest.mark.parametrize("second", [7.8125, 7.78125])
def test_case_a7_a_and_b_ties_pass_unless_strict(
    monkeypatch: pytest.MonkeyPatch, second: float
) -> None:
    """They go on apart for two more tokens, which are no further differences."""
    recorded = ((*SHARED, 40, 50, 51), (*SHARED, 41, 60, 61), {40: 7.8125, 41: second})
    done = ask(monkeypatch, findings(*recorded))
    assert done.exit_code == 0
    steps = (7.8125 - second) / 0.03125
    assert done.stdout.splitlines() == [
        "greedy, K = 4  0 of 1 identical, 1 tie; 0.00 of 2 draft tokens accepted",
        f"tie: greedy, p: position 9: 41 instead of 40, margin {7.8125 - second:.6g} = {steps:.3g} "
        "units in the last place (threshold 0.0312), 1 time",
        "a tie is a margin of at most one unit in the last place of bfloat16, or 0: what 99.9 % of "
        "the target's own logit differences move by between block shapes",
        "verdict: tie (verification.json)",
    ]
    strict = ask(monkeypatch, findings(*recorded, is_strict=True))
    assert strict.exit_code == 1
    assert strict.stderr == (
        "Error: verification failed: 1 numerical tie, and --strict allows none\n"
    )


def test_case_a7_c_a_wide_margin_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings((*SHARED[:4], 40, 50, 51), (*SHARED[:4], 41, 60, 61), {40: 9.5, 41: 6.0})
    done = ask(monkeypatch, found)
    assert done.exit_code == 1
    reason = (
        "position 4: 41 instead of 40, margin 3.5 = 56 units in the last place (threshold 0.0625)"
    )
    assert f"fault: greedy, K = 4, p: {reason}" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "verdict: fault (verification.json)"
    assert done.stderr == f"Error: verification failed: greedy, K = 4: prompt p: {reason}\n"


def test_case_a7_d_a_stream_that_just_ends_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    done = ask(monkeypatch, findings(SHARED, SHARED[:5], {}))
    assert done.exit_code == 1
    assert done.stderr == (
        "Error: verification failed: greedy, K = 4: prompt p: a stream just ends at position 5, "
        "without an end id\n"
    )


def test_what_the_gate_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = GateResult(
        source="gate.jsonl",
        digest="0" * 64,
        num_prompts=3,
        num_right=2,
        num_right_target_alone=3,
        num_failed=0,
        lost=("france",),
    )
    done = ask(monkeypatch, findings(SHARED, SHARED, {}, gate=gate))
    assert done.exit_code == 1
    assert "gate: 2 of 3 answers right, without speculation 3; lost with it: france" in (
        done.stdout.splitlines()
    )


@pytest.mark.parametrize(
    ("number", "returncode"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
def test_one_that_is_ended_leaves_no_folder(
    copied: Callable[..., PipelineConfig], number: signal.Signals, returncode: int
) -> None:
    config = copied()
    command = [sys.executable, "-m", "specpipe", "verify"]
    command += ["--config", str(QUICKSTART), "--set", f"output_dir={config.artifacts_dir.parent}"]
    process = subprocess.Popen([*command, "--in-process", "--no-sampling"])
    assert wait_until(lambda: any(config.artifacts_dir.glob(".verify-*")))
    process.send_signal(number)
    assert process.wait(timeout=PATIENCE_S) == returncode
    assert not list(config.artifacts_dir.glob(".verify-*"))
