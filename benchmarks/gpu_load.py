"""How fast one GPU answers N streams that are always busy: ours, vLLM and Triton, side by side.

    python -m benchmarks.gpu_load --ours alone,k2,adaptive --vllm alone,ngram-8 --streams 1,8,32 \\
        --inflated /tmp/inflated --out load.jsonl
    python -m benchmarks.load.report load.jsonl --plot load.png

All sides are loaded first, each in a process of its own; a GPU must hold them all. Then they are
measured in turns: a load and a set of prompts on every side, before the next. A small trained pair
is inflated (inflate.py): ours in GPU memory, vLLM's on disk, to the same weights. Greedy, and no
token ends an answer. benchmarks/load/sides.py says what settings there are; those whose speed does
not depend on what the texts are get the first set only.

closed_loop.py says what a closed loop is and what is measured of it. A point has --requests answers
for each stream, --least at least, but no more than can begin in --seconds of its steady part. None
begins after --until seconds of the whole run: what was measured by then is in --out, a line of JSON
each. What fails gives a line with `error`; its log is on stderr. The exit status is 1 then, and
where ours compiled or recorded anything after it was ready.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks.load.closed_loop import Load
from benchmarks.load.processes import Child
from benchmarks.load.prompts import SETS, prompt_set
from benchmarks.load.report import report
from benchmarks.load.sides import SIDES, Point, Process, depends_on_text, kind_of
from specpipe.text.tokenizer import Tokenizer

_MODELS = Path(__file__).parents[1] / "models" / "python-code"


@dataclass(frozen=True)
class Plan:
    """A process, and the settings that it is measured in."""

    process: Process
    settings: list[str]


def plans(arguments: argparse.Namespace) -> list[Plan]:
    """Returns the processes that are to run."""
    found: dict[tuple[str, str], list[str]] = {}
    for side in SIDES:
        for setting in getattr(arguments, side):
            found.setdefault((side, kind_of(side, setting)), []).append(setting)
    return [Plan(_process(arguments, *key), settings) for key, settings in found.items()]


def _process(arguments: argparse.Namespace, side: str, kind: str) -> Process:
    draft, target = arguments.draft, arguments.target
    if side == "vllm" and arguments.sizes:
        draft, target = arguments.inflated / "draft", arguments.inflated / "target"
    options = {
        "ours": arguments.ours_options,
        "vllm": arguments.vllm_options,
        "triton": {"url": arguments.url},
    }
    return Process(
        side=side,
        kind=kind,
        target=str(target),
        draft=str(draft),
        sizes=arguments.sizes,
        positions=arguments.positions,
        max_streams=max(arguments.streams),
        max_length=arguments.prompt_tokens + arguments.max_tokens + 16,
        most_drafted=arguments.most_drafted,
        dtype=arguments.dtype,
        device=arguments.device,
        options=options[side],
    )


class Run:
    """What was measured so far: in memory, and line by line in a file."""

    def __init__(self, out: TextIO | None) -> None:
        self.lines: list[dict[str, Any]] = []
        self._out = out
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def tell(self, what: str) -> None:
        print(f"{self.seconds:6.1f} s  {what}", file=sys.stderr, flush=True)

    def keep(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if self._out is not None:
            print(json.dumps(line), file=self._out, flush=True)


def measure(arguments: argparse.Namespace, run: Run) -> None:
    """Starts all processes, and measures them in turns until all is done or the time is over."""
    todo = plans(arguments)
    with contextlib.ExitStack() as running:
        children = [Child(plan.process) for plan in todo]
        for child in children:
            running.callback(child.close)
        for child in children:
            found = child.wait(arguments.start_timeout)
            process = child.process
            run.keep({"process": process.name, **found})
            run.tell(f"{process.name}: {found.get('error', 'loaded')}")
        by_setting = {
            (plan.process.side, setting): child
            for plan, child in zip(todo, children, strict=True)
            for setting in plan.settings
        }
        for number in range(arguments.rounds):
            _round(arguments, run, number, by_setting)


def _round(
    arguments: argparse.Namespace,
    run: Run,
    number: int,
    by_setting: dict[tuple[str, str], Child],
) -> None:
    sides = list(by_setting) if number % 2 == 0 else list(reversed(by_setting))
    prompts = _prompts(arguments)
    for name in arguments.sets:
        for streams in arguments.streams:
            for side, setting in sides:
                child = by_setting[side, setting]
                is_same = name != arguments.sets[0] and not depends_on_text(setting)
                if is_same or not child.is_alive:
                    continue
                if run.seconds > arguments.until:
                    run.tell("the time is over")
                    return
                load = _load(arguments, streams)
                found = child.measure(
                    Point(setting, load, prompts[name]), load.seconds + arguments.point_timeout
                )
                place = {
                    "side": side,
                    "setting": setting,
                    "set": name,
                    "prompt_tokens": arguments.prompt_tokens,
                    "max_tokens": arguments.max_tokens,
                    "streams": streams,
                    "round": number,
                }
                run.keep({**place, **found})
                rate = found.get("error") or f"{found['tokens_per_second']:.0f} tokens/s"
                run.tell(f"{side} {setting} at {streams}, {name}: {rate}")


def _load(arguments: argparse.Namespace, streams: int) -> Load:
    num_requests = max(arguments.requests * streams, arguments.least)
    return Load(streams, num_requests, arguments.max_tokens, arguments.seconds)


def _prompts(arguments: argparse.Namespace) -> dict[str, list[list[int]]]:
    tokenizer = Tokenizer.load(arguments.target)
    return {
        name: prompt_set(
            tokenizer, name, number=arguments.num_prompts, length=arguments.prompt_tokens
        )
        for name in arguments.sets
    }


def inflate(arguments: argparse.Namespace) -> None:
    """Writes the checkpoints that vLLM reads, where they are not there yet."""
    for role, size in zip(("draft", "target"), arguments.sizes, strict=True):
        out = arguments.inflated / role
        if not out.exists():
            script = Path(__file__).with_name("inflate.py")
            command = [sys.executable, script, getattr(arguments, role), out, "--size", size]
            if arguments.positions:
                command += ["--positions", str(arguments.positions)]
            subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    def sizes(text: str) -> tuple[str, ...]:
        target, _, draft = text.partition("+")
        return (draft, target) if text else ()

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for side in SIDES:
        parser.add_argument(
            f"--{side}", type=words, default=[], metavar="SETTINGS", help="separated by commas"
        )
    parser.add_argument("--url", help="of Triton's gRPC, which --triton wants")
    parser.add_argument("--draft", type=Path, default=_MODELS / "draft", help="the small one")
    parser.add_argument("--target", type=Path, default=_MODELS / "target", help="the small one")
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=("0.4b", "7b"),
        metavar="TARGET+DRAFT",
        help="as inflate.py has them; default: 7b+0.4b; empty: checkpoints as they are",
    )
    parser.add_argument("--positions", type=int, default=0, help="of the inflated ones, for more")
    parser.add_argument("--inflated", type=Path, help="the folder of vLLM's; made where it is not")
    parser.add_argument("--streams", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--sets", type=words, default=list(SETS), help=f"of {','.join(SETS)}")
    parser.add_argument("--num-prompts", type=int, default=32, help="of a set")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--requests", type=int, default=4, help="for each stream")
    parser.add_argument("--least", type=int, default=13, help="requests of a point, at least")
    parser.add_argument("--seconds", type=float, default=30, help="of a steady part, at most")
    parser.add_argument("--rounds", type=int, default=1, help="of all points, in turns")
    parser.add_argument("--until", type=float, default=float("inf"), help="no point begins after")
    parser.add_argument("--start-timeout", type=float, default=400, help="seconds of each process")
    parser.add_argument("--point-timeout", type=float, default=120, help="behind the steady part")
    parser.add_argument("--most-drafted", type=int, default=4, help="draft tokens of ours")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", help="of ours")
    parser.add_argument("--ours-options", type=json.loads, default={}, help="max_num_tokens: JSON")
    parser.add_argument("--vllm-options", type=json.loads, default={}, help="of vllm.LLM, as JSON")
    parser.add_argument("--out", type=Path, help="a file to which lines of JSON are added")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.sets) - set(SETS):
        parser.error(f"--sets: unknown {', '.join(sorted(unknown))}; there are {list(SETS)}")
    if arguments.vllm and arguments.sizes and arguments.inflated is None:
        parser.error("--vllm wants --inflated, where its checkpoints are or will be")
    try:
        todo = plans(arguments)
    except ValueError as exc:
        parser.error(str(exc))
    if not todo:
        parser.error("there is nothing to measure: name settings of --ours, --vllm or --triton")
    if arguments.triton and arguments.url is None:
        parser.error("--triton wants --url")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    with contextlib.ExitStack() as files:
        out = arguments.out and files.enter_context(arguments.out.open("a", encoding="utf-8"))
        run = Run(out)
        if arguments.vllm and arguments.sizes:
            inflate(arguments)
        measure(arguments, run)
    print(report(run.lines))
    return int(any("error" in line or line.get("num_late") for line in run.lines))


if __name__ == "__main__":
    sys.exit(main())
