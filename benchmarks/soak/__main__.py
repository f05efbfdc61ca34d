"""Serves a pair whose versions change under load, while its store, its disk and its processes fail.

    python -m benchmarks.soak --minutes 60 --seed 7
    python -m benchmarks.soak --minutes 1
    python -m benchmarks.soak --minutes 60 --store s3

Two contents are published by turns under ever new numbers, by publishers of their own, into a store
of their own; a host serves them (`specpipe serve --promoted`, a child). Streams in mixed protocols
ask it all the time; in one run follow

calm        nothing else happens, and no client goes away in the middle, as some do later
changes     publish and promote, half of the times rollback, again and again
store away  the store cannot be read while a version is published, promoted, rolled back and served
disk full   nothing can be written meanwhile
kills       SIGKILL for tritonserver, each model's process, the launcher (which is started again, as
            a service manager does), a publish and a promote in the middle

Every whole answer must be that of target-only of one version that was served while it ran; those
were asked beforehand, each question alone and without draft tokens. A phase ends with the round
that is under way when its time is over, and has one round at least, however slow the machine is.
The growth of memory is judged while all is calm, where that lasts for five minutes. A change of
version leaves a little in tritonserver, and so does a gRPC client that goes away: that is printed.

Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from benchmarks.command import run_command
from benchmarks.soak.place import KindOfStore, made
from benchmarks.soak.report import goals, report
from benchmarks.soak.session import Run, Session
from specpipe.errors import SpecpipeError


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # children are ended in order too
    try:
        with made(arguments.store) as place:
            _say("building both contents")
            place.build()
            run = Session(place, arguments.seed, _say).run(arguments.minutes, arguments.streams)
    except SpecpipeError as exc:
        print(f"Error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(report(run))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_as_json(run)))
    return 0 if all(goal.is_reached for goal in goals(run)) else 1


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="under load; default: 60")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--streams", type=int, default=16, help="default: 16")
    parser.add_argument(
        "--store",
        choices=get_args(KindOfStore),
        default="folder",
        help="default: folder. With s3 a command waits a minute for a server that is away",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    arguments = parser.parse_args(argv)
    if arguments.minutes <= 0 or arguments.streams < 1:
        parser.error("--minutes and --streams must be positive")
    return arguments


def _as_json(run: Run) -> dict[str, Any]:
    plain = {one.name: getattr(run, one.name) for one in fields(run) if one.name != "answers"}
    plain["phases"] = [asdict(phase) for phase in run.phases]
    plain["commands"] = [{"phase": phase, **asdict(one)} for phase, one in run.commands]
    for name in ("memory", "memory_changing"):
        plain[name] = [asdict(one) for one in getattr(run, name)]
    plain["answers"] = {
        "by_content": run.answers.by_content,
        "by_number": run.answers.by_number,
        "wrong": run.answers.wrong,
        "examples": run.answers.examples,
    }
    return {**plain, "goals": [asdict(goal) for goal in goals(run)]}


def _say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
