"""benchmarks/attack/: what it sends in which order, how it judges, and what it does to goals."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attack import __main__ as attack
from benchmarks.attack import faults
from benchmarks.attack.faults import Fault, dishonest_s
from benchmarks.attack.goals import Goal, Phase, Run, goals, telltale
from benchmarks.attack.kinds import KINDS, Hostile, default_names, schedule
from benchmarks.attack.load import Answered, judge, questions
from benchmarks.attack.report import percentile, report, table, wait_beside_s
from benchmarks.attack.send import number, strings
from benchmarks.attack.server import STUBS, TRITON, descendants

ROOT = Path(__file__).parents[1]
HOLES = {"body-of-6-mib", "million-chunks", "brackets-body", "classes-of-text"}


def answered(**changes: Any) -> Answered:
    """A request that was sent at 10 s and answered rightly two seconds later."""
    right = Answered("gRPC stream", "right", 10.0, 12.0, wait_s=1.5, waited_from_s=10.0)
    return replace(right, **changes)


def hostile(kind: str = "dtypes", **changes: Any) -> Hostile:
    return replace(Hostile(kind, 20.0, 21.0, "refused", "dtype is FP32"), **changes)


def fault(**changes: Any) -> Fault:
    """A process that was killed at 30 s, with all goals reached."""
    seen = Fault("postprocessing", "killed", 30.0, 42.0, 4.0, 4.5, 11.0, 4.25)
    return replace(seen, **changes)


def run_of(
    attacked: Answered | None = None,
    sent: Hostile | None = None,
    found: Fault | None = None,
    **changes: Any,
) -> Run:
    """A run without a fault of the server's, but for what is given."""
    memory = {"tritonserver": 50 << 20, "speculative": 300 << 20}
    grown = {"tritonserver": 50 << 20, "speculative": 301 << 20}
    phases = (
        Phase("load", 60.0, [answered()], memory, memory),
        Phase("attack", 60.0, [attacked or answered()], memory, grown, [sent or hostile()]),
        Phase("faults", 60.0, [answered()], memory, memory, faults=[found or fault()]),
    )
    run = Run(7, 48, 4, start_s=8.0, phases=phases, secrets=("5a0fb3c2d1e4",))
    return replace(run, **changes)


def missed(run: Run) -> list[str]:
    return [goal.what for goal in goals(run) if not goal.is_reached]


def test_a_seed_decides_kinds_and_order() -> None:
    names = ("a", "b", "c", "d")
    first = list(itertools.islice(schedule(7, names), 40))
    assert first == list(itertools.islice(schedule(7, names), 40))
    assert first != list(itertools.islice(schedule(8, names), 40))
    rounds = [[name for name, _ in first[start : start + 4]] for start in range(0, 40, 4)]
    assert all(sorted(names_of) == list(names) for names_of in rounds)
    assert len({tuple(names_of) for names_of in rounds}) > 1
    assert len({seed for _, seed in first}) == 40


def test_a_seed_decides_questions() -> None:
    assert questions(7) == questions(7)
    assert questions(7) != questions(8)
    # Each has one right answer: it is greedy, or its seed is given.
    assert all(
        "seed" in question.settings
        for question in questions(7)
        if question.settings.keys() & {"temperature", "top_k"}
    )


def test_a_seed_decides_faults_and_each_process_comes_before_one_comes_again() -> None:
    order = list(faults.order(7))
    assert order == list(faults.order(7))
    assert {name for name, _ in order[:4]} == {TRITON, *STUBS}
    assert len(set(order)) == len(order) == 8


def test_holes_are_asked_for() -> None:
    assert set(default_names(holes=True)) - set(default_names(holes=False)) == HOLES
    assert set(KINDS) == set(default_names(holes=True))


@pytest.mark.parametrize(
    ("text", "is_whole", "ending"),
    [
        ("abc", True, "right"),
        ("ab", True, "wrong"),
        ("abcd", True, "wrong"),
        ("ab", False, "broken off"),
        ("", False, "broken off"),
        ("ac", False, "wrong"),
        ("abcd", False, "wrong"),
    ],
)
def test_an_answer_is_compared_whole_and_a_part_is_its_beginning(
    text: str, is_whole: bool, ending: str
) -> None:
    assert judge("abc", text, is_whole=is_whole) == ending


def test_all_goals_reached() -> None:
    assert missed(run_of()) == []


def test_the_delay_is_the_longest_wait_less_the_longest_without() -> None:
    run = run_of(answered(wait_s=3.25))
    delay = next(goal for goal in goals(run) if goal.what == "delay by hostile requests")
    assert (delay.figure, delay.ceiling) == (1.75, 2.0)
    assert "median +1.75, p99 +1.75, longest +1.75" in report(run)


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (run_of(answered(ending="wrong")), "wrong answers"),
        (run_of(answered(ending="failed")), "answers that failed without a fault"),
        (run_of(answered(wait_s=3.6)), "delay by hostile requests"),
        (run_of(sent=hostile("http-trace", outcome="answered")), "calls let through"),
        (run_of(sent=hostile(text='File "/a/model.py", line 3')), "texts with paths"),
        (run_of(answered(ending="refused", error="queue of 5a0fb3c2d1e4")), "texts with paths"),
        (run_of(found=fault(noticed_s=None)), "postprocessing killed: noticed"),
        (run_of(found=fault(noticed_s=10.5, served_s=12.0)), "postprocessing killed: noticed"),
        (run_of(found=fault(served_s=12.5)), "postprocessing killed: service again"),
        (run_of(found=fault(dishonest_s=10.5)), "postprocessing killed: ready is dishonest"),
    ],
)
def test_a_missed_goal_is_missed(run: Run, what: str) -> None:
    assert any(name.startswith(what) for name in missed(run)), missed(run)
    assert "MISSED" in report(run)


def test_never_served_again_misses_its_goal() -> None:
    assert missed(run_of(found=fault(served_s=None))) == [
        "postprocessing killed: service again after that"
    ]
    assert not Goal("", None, 10.0).is_reached


def test_a_restart_that_nobody_caused_is_a_miss() -> None:
    phase = Phase("load", 1.0, [answered()], {}, {}, restarts=("Triton is restarted in 0 s: x",))
    assert missed(run_of(phases=(phase,))) == ["restarts without a fault"]


def test_failures_during_a_fault_are_counted_apart() -> None:
    during = answered(ending="failed", started_s=29.0, ended_s=31.0, error="reset", wait_s=60.0)
    after = answered(ending="failed", started_s=50.0, ended_s=51.0, error="reset")
    phase = Phase("faults", 60.0, [during, after, answered()], {}, {}, faults=[fault()])
    assert (phase.excused, phase.failed) == ([during], [after])
    assert phase.longest_wait_s == 1.5
    assert "faults: during a fault 1×: reset" in report(run_of(phases=(phase,)))


@pytest.mark.parametrize(
    ("until_s", "expected"),
    # 200 from 0 to 2, refused from 2 to 5, 200 from 5 to 6
    [(None, 3.0), (5.5, 2.5), (1.0, 1.0), (0.0, 0.0)],
)
def test_dishonest_seconds(until_s: float | None, expected: float) -> None:
    polls = [(0.0, True), (1.0, True), (2.0, False), (4.0, False), (5.0, True), (6.0, False)]
    assert dishonest_s(polls, until_s) == expected


def test_only_waits_at_the_same_time_are_beside_a_hostile_request() -> None:
    waits = [
        answered(wait_s=9.0, waited_from_s=5.0),  # over at 14
        answered(wait_s=3.0, waited_from_s=19.0),
        answered(wait_s=2.0, waited_from_s=20.5),
        answered(wait_s=8.0, waited_from_s=21.5),
    ]
    assert wait_beside_s(hostile(), waits) == 3.0
    assert wait_beside_s(hostile(), waits[:1]) == 0.0


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("Traceback (most recent call last):", "a traceback"),
        ("At: /srv/serving.py(397): _decode_utf8", "a traceback"),
        ("cannot open /dev/shm/x", "a path"),
        ("unable to map specpipe_81_7f00_0_3", "a shared memory region"),
        ("expecting 5a0fb3c2d1e4", "a secret"),
        ("text_input is not UTF-8: invalid start byte", None),
        ("use specpipe_requests_total / 2", None),
    ],
)
def test_telltale(text: str, what: str | None) -> None:
    told = telltale(text, ["5a0fb3c2d1e4"])
    assert (None if told is None else told[0]) == what
    assert "5a0fb3c2d1e4" not in str(told)


def test_tables_line_up() -> None:
    assert table([["a", "bcd"], ["ef", "g"]]) == ["a   bcd", "ef  g"]


def test_percentile() -> None:
    values = [float(value) for value in range(1, 101)]
    random.Random(0).shuffle(values)
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert percentile([], 0.5) == 0.0


def test_tensors_as_triton_reads_them() -> None:
    two = strings("stop_words", [b"ab", b""])
    assert (two.shape, two.raw) == ((1, 2), b"\2\0\0\0ab\0\0\0\0")
    assert number("max_tokens", -1).raw == b"\xff\xff\xff\xff"


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        attack.main(["--kinds", "dtypes,no-such-kind"])
    assert "--kinds: unknown no-such-kind; --list prints" in capsys.readouterr().err


def test_list_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert attack.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(KINDS)


COMMAND = [sys.executable, "-m", "benchmarks.attack", "--streams", "6", "--minutes"]


@pytest.mark.slow
def test_a_short_attack_with_a_kind_that_hurts_nobody(tmp_path: Path) -> None:
    words = [*COMMAND, "0.2", "--kinds", "float-values,short-connections"]
    out = tmp_path / "run.json"
    done = subprocess.run(
        [*words, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    found = json.loads(out.read_text())
    assert [phase["name"] for phase in found["phases"]] == ["load", "attack"]
    assert all(len(phase["answered"]) > 10 for phase in found["phases"])
    assert {sent["kind"] for sent in found["phases"][1]["hostile"]} == {
        "float-values",
        "short-connections",
    }
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_ctrl_c_leaves_no_process() -> None:
    with subprocess.Popen(
        [*COMMAND, "5"], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("... load"):
                break
        time.sleep(2)
        ours = descendants(process.pid)
        assert len(ours) >= 6  # itself, the launcher, tritonserver and three models
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    deadline = time.monotonic() + 20  # what was killed is gone when its new parent has noticed
    while (
        left := [i for i in ours if Path(f"/proc/{i}").exists()]
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
