"""benchmarks/soak/: whose answer a text is, what a command ended in, and what memory grows by."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attack.faults import Fault
from benchmarks.attack.goals import Phase
from benchmarks.attack.load import Answered, Piece, Received
from benchmarks.soak import __main__ as soak
from benchmarks.soak.commands import Command
from benchmarks.soak.history import Answers, History
from benchmarks.soak.memory import Growth, growth, growths
from benchmarks.soak.report import goals, report
from benchmarks.soak.session import Run

ROOT = Path(__file__).parents[1]
EXPECTED = {"A": ["one two three"], "B": ["one four five"]}
CONTENTS = {1: "A", 2: "B", 3: "A"}


def received(*texts: str, version: str = "", is_whole: bool = True, at: float = 10.0) -> Received:
    pieces = [Piece(text, version) for text in texts]
    return Received(0, "gRPC stream", at, pieces, is_whole)


def answers_of(history: History) -> Answers:
    return Answers(EXPECTED, CONTENTS, history)


@pytest.fixture
def history() -> History:
    """Version 1 until 20 s, version 2 from a promote that was begun at 15 s."""
    history = History()
    history.settle(1, 0.0)
    history.attempt(2, 15.0)
    history.settle(2, 20.0)
    return history


def test_a_version_may_answer_what_was_sent_before_its_end(history: History) -> None:
    assert [history.since(at) for at in (10.0, 20.0, 20.1)] == [{1, 2}, {1, 2}, {2}]
    history.attempt(1, 30.0)
    assert history.since(30.0) == {1, 2}
    history.settle(2, 31.0)  # the promote was refused
    assert history.since(31.1) == {2}
    history.settle(1, 40.0)
    assert history.since(40.1) == {1}


@pytest.mark.parametrize(
    ("came", "wrong"),
    [
        (received("one ", "two three"), None),
        (received("one ", "two three", version="1"), None),
        (received("one four", " five", version="2"), None),
        (received("one", is_whole=False), None),
        (received("one ", "two", " three", " three"), "with a repeated chunk"),
        (received("one ", "one ", "fo", is_whole=False), "with a repeated chunk"),
        (received("one ", "two five"), "of no version"),
        (received("one two"), "of no version"),
        (received("one two three", version="2"), "that name another version"),
        (received("one two three", version="3"), "of a version that was not served"),
        (received("one two three", at=21.0), "of a version that was not served"),
        (received("one t", is_whole=False, at=21.0), "of a version that was not served"),
    ],
)
def test_an_answer_is_that_of_one_version_that_was_served(
    history: History, came: Received, wrong: str | None
) -> None:
    answers = answers_of(history)
    ending = answers(came)
    assert list(answers.wrong) == ([] if wrong is None else [wrong])
    assert ending == ("wrong" if wrong else "right" if came.is_whole else "broken off")


def test_an_answer_of_two_versions_is_wrong(history: History) -> None:
    answers = answers_of(history)
    came = received("one ", "two three")
    mixed = replace(came, pieces=[Piece("one ", "2"), Piece("two three", "1")])
    assert answers(mixed) == "wrong"
    assert answers.wrong == {"that name several versions": 1}


def test_right_answers_are_counted_by_content_and_by_the_version_that_they_name(
    history: History,
) -> None:
    answers = answers_of(history)
    for came in (
        received("one two three"),
        received("one two three", version="1"),
        received("one four five", version="2"),
        received("one", version="2", is_whole=False),
    ):
        answers(came)
    assert (answers.by_content, answers.by_number) == ({"A": 2, "B": 1}, {1: 1, 2: 1})


def test_growth_is_the_slope_over_the_last_four_fifths() -> None:
    # 0 to 19 s is warming up; from then on 1 byte a second, from 1,000 on.
    samples = [(float(at), at * 50 if at < 20 else 980 + at) for at in range(101)]
    mean, share = growth(samples)
    assert (mean, share) == (pytest.approx(1040.0), pytest.approx(80 / 1040))
    assert growth([(0.0, 7), (1.0, 7), (2.0, 7), (3.0, 7)]) == (7, 0.0)
    assert growth([(0.0, 5), (1.0, 9)])[1] == 0.0


def test_of_a_role_the_process_that_lived_longest_counts() -> None:
    short = [(float(at), 100 + at * at) for at in range(5)]
    long = [(float(at), 200) for at in range(50, 60)]
    found = growths({("speculative", 7): short, ("speculative", 8): long, ("launcher", 1): short})
    assert [(one.role, one.num_processes, one.life_s) for one in found] == [
        ("launcher", 1, 4.0),
        ("speculative", 2, 9.0),
    ]
    assert (found[1].mean_bytes, found[1].growth) == (200, 0.0)


SENTENCE = "version 3 is here\nError: the store is away: bring it back\n"


def command(**changes: Any) -> Command:
    result = {"served_s": 3.0, "change": {"load_s": 2.0, "swap_s": 0.2}, "was_loaded": False}
    works = Command("promote", "", "works", 10.0, 14.0, 0, "version 3 answers", result)
    return replace(works, **changes)


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        (command(), None),
        (command(exit_code=1, told=SENTENCE, expected="is refused"), None),
        (command(exit_code=1, told=SENTENCE, expected="either"), None),
        (command(expected="either"), None),
        (command(exit_code=-9, told="", expected="is killed"), None),
        (command(exit_code=1, told=SENTENCE), "it was refused"),
        (command(expected="is refused"), "it worked"),
        (command(exit_code=-9, told=""), "exit code -9, no sentence at the end"),
        (command(exit_code=2, told=SENTENCE), "exit code 2, with a sentence"),
        (
            command(exit_code=1, told=f"Traceback (most\n{SENTENCE}", expected="either"),
            "exit code 1, a traceback",
        ),
        (
            command(exit_code=1, told=f"{SENTENCE}Error: more", expected="either"),
            "exit code 1, no sentence at the end",
        ),
    ],
)
def test_a_command_works_or_ends_in_one_sentence(ended: Command, fault: str | None) -> None:
    assert ended.fault == fault


def run_of(**changes: Any) -> Run:
    """A run in which all goals are reached, but for what is given."""
    right = Answered("gRPC stream", "right", 10.0, 12.0, wait_s=1.5, waited_from_s=10.0)
    during = replace(right, ending="failed", started_s=29.0, ended_s=31.0, error="reset")
    killed = Fault("launcher", "killed", 30.0, 42.0, 0.5, 0.25, 8.0, 0.25)
    phases = [
        Phase("calm", 60.0, [right], {}, {}),
        Phase("kills", 60.0, [right, during], {}, {}, faults=[killed]),
    ]
    answers, commands = answers_of(History()), [("changes", command())]
    run = Run(7, 16, 5.0, "a folder", "a small disk", answers, commands, phases)
    run.memory = [Growth("launcher", 1, 900.0, 50e6, 0.015), Growth("short", 3, 9.0, 50e6, 0.9)]
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def missed(run: Run) -> list[str]:
    assert ("MISSED" in report(run)) == any(not goal.is_reached for goal in goals(run))
    return [goal.what for goal in goals(run) if not goal.is_reached]


def test_all_goals_reached() -> None:
    assert missed(run_of()) == []
    assert "+90.00 (not judged)" in report(run_of())


def test_a_missed_goal_is_missed() -> None:
    right = Answered("gRPC stream", "right", 10.0, 12.0, wait_s=1.5, waited_from_s=10.0)
    dishonest = Fault("launcher", "killed", 30.0, 52.0, 0.5, 11.0, 20.0, 10.5)
    wrong = answers_of(History())
    wrong.wrong["of no version"] += 1
    for run, what in (
        (run_of(answers=wrong), "answers of no version"),
        (
            run_of(phases=[Phase("calm", 1.0, [replace(right, ending="failed")], {}, {})]),
            "requests without an answer and without a fault",
        ),
        (
            run_of(phases=[Phase("calm", 1.0, [replace(right, ending="refused")], {}, {})]),
            "requests without an answer and without a fault",
        ),
        (
            run_of(phases=[Phase("calm", 1.0, [right], {}, {}, restarts=["Triton is restarted"])]),
            "restarts without a fault",
        ),
        (
            run_of(phases=[Phase("kills", 1.0, [right], {}, {}, faults=[dishonest])]),
            "launcher killed: ready is dishonest",
        ),
        (
            run_of(commands=[("changes", command(exit_code=1, told=SENTENCE))]),
            "commands that did not end as they should",
        ),
        (
            run_of(memory=[Growth("launcher", 1, 900.0, 50e6, 0.021)]),
            "launcher: memory grows",
        ),
    ):
        assert missed(run) == [what]


def test_what_is_no_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        soak.main(["--minutes", "0"])
    assert "--minutes and --streams must be positive" in capsys.readouterr().err


@pytest.mark.slow
def test_a_soak_of_a_minute(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    words = ["--minutes", "1", "--streams", "8", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert [phase["name"] for phase in found["phases"]] == [
        *("calm", "changes", "store away", "disk full", "kills"),
    ]
    assert set(found["answers"]["by_content"]) == {"A", "B"}
    situations = {(one["name"], one["situation"]) for one in found["commands"]}
    assert situations >= {
        (name, situation)
        for name in ("publish", "promote")
        for situation in ("", "store away", "store goes away", "disk full")
    }
