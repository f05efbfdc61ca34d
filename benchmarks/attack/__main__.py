"""Attacks the served quickstart pair, and says what its well-behaved clients saw of it.

    python -m benchmarks.attack --minutes 4 --seed 7
    python -m benchmarks.attack --kinds huge-prompt-http,many-stop-words --minutes 1
    python -m benchmarks.attack --list

`specpipe serve` runs as a child, launcher included, on free ports of the loopback interface. What
follows on the same server, in one run:

start   one normal start, timed; then each question alone, without draft tokens: the right answers
load    well-behaved streams in mixed protocols, some of which cancel or disconnect; a third of the
        time
attack  the same load, and beside it hostile clients, which send every kind in a seeded order
faults  the same load, while one process after the other is killed (SIGKILL) or stopped (SIGSTOP);
        as many as the last third of the time has room for, one at least

Every answer is compared. A wait is the longest time in which nothing of a request came (first
chunk, gap, end; of a whole answer, all of its time); the delay by hostile requests is the longest
wait under attack less the longest under load. The seed decides what is sent and in which order, not
when. Client, server and models share the cores, and nothing else should keep them busy.

Exit code 1 if a goal is missed. Kinds that are known to kill tritonserver 2.51 by itself are left
out without --holes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.attack.faults import Fault, commit, order
from benchmarks.attack.goals import Phase, Run, goals
from benchmarks.attack.kinds import KINDS, Attack, Hostile, default_names
from benchmarks.attack.load import Load, Question, by_answers, questions, right_answers
from benchmarks.attack.report import report
from benchmarks.attack.server import Served, build
from benchmarks.command import run_command
from benchmarks.measure import QUICKSTART
from specpipe.errors import SpecpipeError

_MAX_FAULT_S = 60.0  # and one normal start more


class Session:
    """A server, its questions with their right answers, and the phases that were run on it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._phase_s = arguments.minutes * 60 / (2 if arguments.kinds else 3)
        self._served = Served(arguments.config)
        self._secrets: set[str] = set()
        self._asked: list[Question] = []
        self._expected: list[str] = []

    def run(self) -> Run:
        """Runs all phases; no process is left, however it ends."""
        arguments = self._arguments
        try:
            start_s = self._served.start()
            _say(f"ready after {start_s:.1f} s; asking each question alone")
            self._asked = questions(arguments.seed)
            self._expected = right_answers(self._served, self._asked)
            phases = [self._phase("load"), self._phase("attack", hostile=True)]
            if not arguments.kinds:
                phases.append(self._phase("faults", faults=True, start_s=start_s))
        finally:
            self._served.stop()
        return Run(
            arguments.seed,
            arguments.streams,
            arguments.hostile,
            start_s,
            phases,
            self._secrets,
        )

    def _phase(
        self, name: str, *, hostile: bool = False, faults: bool = False, start_s: float = 0.0
    ) -> Phase:
        """Runs the load for its time, beside what else the phase has."""
        served, arguments = self._served, self._arguments
        _say(f"{name}: {self._phase_s:.0f} s")
        self._secrets |= served.secrets()
        num_restarts = len(served.restarts)
        with ExitStack() as stack:
            attack = None
            if hostile:
                names = arguments.kinds or default_names(holes=arguments.holes)
                attack = Attack(served.target, names, arguments.seed, arguments.hostile)
                stack.callback(attack.kill)
            rss_before = served.rss()
            load = Load(served, self._asked, by_answers(self._expected), arguments.seed)
            begun = time.monotonic()
            load.begin(arguments.streams)
            committed: list[Fault] = []
            sent: list[Hostile] = []
            if attack is not None:
                attack.begin()
            if faults:
                committed = self._commit_faults(begun + self._phase_s, start_s)
            else:
                time.sleep(self._phase_s)
            if attack is not None:
                sent = attack.end()
            answered = load.end()
            seconds = time.monotonic() - begun
        self._secrets |= served.secrets()
        restarts = [] if faults else [line for _, line in served.restarts[num_restarts:]]
        self._revive()
        return Phase(name, seconds, answered, rss_before, served.rss(), sent, committed, restarts)

    def _commit_faults(self, deadline: float, start_s: float) -> list[Fault]:
        committed: list[Fault] = []
        for process, how in order(self._arguments.seed):
            if committed and time.monotonic() > deadline:
                break
            time.sleep(2.0)  # so that the load is back at work
            _say(f"{process} is {how}")
            fault = commit(self._served, process, how, _MAX_FAULT_S + start_s)
            if fault.served_s is None:
                _say(f"no service again after {fault.ended_s - fault.started_s:.0f} s")
                self._revive(is_broken=True)
                fault = replace(fault, ended_s=time.monotonic())  # what our restart broke too
            committed.append(fault)
        return committed

    def _revive(self, *, is_broken: bool = False) -> None:
        """Starts the server anew where its launcher gave up, so that the run can go on."""
        if is_broken or not self._served.is_running:
            self._served.stop()
            self._served.start()


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.list:
        for name, kind in KINDS.items():
            print(f"{name:26}{'kills tritonserver 2.51' if kind.is_hole else ''}".rstrip())
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # children are ended in order too
    try:
        build(arguments.config)
        run = Session(arguments).run()
    except SpecpipeError as exc:
        print(f"Error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(report(run))
    if arguments.json is not None:
        whole = {**asdict(run), "goals": [asdict(goal) for goal in goals(run)]}
        del whole["secrets"]
        arguments.json.write_text(json.dumps(whole))
    return 0 if all(goal.is_reached for goal in goals(run)) else 1


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--minutes", type=float, default=4.0, help="of all phases; default: 4")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--streams", type=int, default=48, help="well-behaved; default: 48")
    parser.add_argument("--hostile", type=int, default=4, help="hostile clients; default: 4")
    parser.add_argument(
        "--kinds",
        type=lambda text: text.split(","),
        help="hostile kinds, separated by commas; default: all. No process faults then",
    )
    parser.add_argument(
        "--holes", action="store_true", help="kinds that kill tritonserver 2.51 too"
    )
    parser.add_argument("--list", action="store_true", help="print the hostile kinds and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.kinds or ()) - KINDS.keys():
        parser.error(
            f"--kinds: unknown {', '.join(sorted(unknown))}; --list prints those there are"
        )
    if arguments.minutes <= 0 or min(arguments.streams, arguments.hostile) < 1:
        parser.error("--minutes, --streams and --hostile must be positive")
    return arguments


def _say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
