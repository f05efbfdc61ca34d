"""How fast one GPU answers N streams that are always busy: ours, vLLM and Triton, side by side.

    python -m benchmarks.gpu_load --ours alone,k2,adaptive --vllm alone,ngram-8 --streams 1,8,32 \\
        --inflated /tmp/inflated --out load.jsonl
    python -m benchmarks.load.report load.jsonl --plot load.png

All sides are loaded first, each in a process of its own, vLLM's beside each other and ours while
nothing else runs; a GPU must hold them all. Then they are measured in turns: a load and a set of
prompts on every side, before the next. A small trained pair is inflated (inflate.py): ours in GPU
memory, vLLM's on disk, to the same weights. Greedy, and no token ends an answer.
benchmarks/load/sides.py says what settings there are; those whose speed does not depend on what the
texts are get the first set only.

closed_loop.py says what a closed loop is and what is measured of it. A point has --requests answers
for each stream, --least at least, but no more than can begin in --seconds of its steady part.
Behind the closed loops, in each setting of vLLM and in those of ours that are alone or adaptive:

--poisson 0.5,0.8  requests that come by chance (arrivals.py), so many that they are this share of
                   what the setting had in the last closed loop of most streams
--chats 1,8        so many chats at once (chats.py): first tokens
--beside 8         so many streams while long prompts are read (reading.py): their gaps

No point begins after --until seconds of the whole run: what was measured by then is in --out, a
line of JSON each. What fails gives a line with `error`; its log is on stderr. The exit status is 1
then, and where ours compiled or recorded anything after it was ready.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from benchmarks.command import require_device, run_command
from benchmarks.load.processes import Child
from benchmarks.load.prompts import SETS
from benchmarks.load.report import report
from benchmarks.load.sides import SIDES, Process, check_setting, is_parallel
from benchmarks.load.turns import Run, TimeIsOver, Turns

_MODELS = Path(__file__).parents[1] / "models" / "python-code"
_SPARE = 16
"""Tokens of a text beyond those that are asked for."""


def processes(arguments: argparse.Namespace) -> list[Process]:
    """Returns the processes that are to run; raises ValueError for an unknown setting."""
    found = []
    for side in SIDES:
        settings = list(dict.fromkeys(getattr(arguments, side)))
        for setting in settings:
            check_setting(side, setting)
            if is_parallel(setting):
                _check_parallel(arguments, side, setting)
        together = [[setting] for setting in settings] if side == "vllm" else [settings]
        found += [_process(arguments, side, some) for some in together if some]
    return found


def _check_parallel(arguments: argparse.Namespace, side: str, setting: str) -> None:
    """Refuses what would only be found when a GPU has loaded all the others."""
    if arguments.parallel_draft is None:
        raise ValueError(f"{side} {setting} wants --parallel-draft")
    if side != "vllm":
        return
    of_draft, of_target = (
        json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        for folder in (arguments.parallel_draft, arguments.target)
    )
    if of_draft != of_target:  # SpeculativeConfig.verify_equal_vocab_size_if_draft_model
        raise ValueError(
            f"{side} {setting}: the draft has {of_draft} rows of the vocabulary, the target "
            f"{of_target}, and vLLM takes equal ones only"
        )


def _process(arguments: argparse.Namespace, side: str, settings: list[str]) -> Process:
    folders = {role: folder for role, (folder, _) in _checkpoints(arguments).items()}
    if side == "vllm" and arguments.sizes:
        folders = {role: arguments.inflated / role for role in folders}
    options = {
        "ours": arguments.ours_options,
        "vllm": arguments.vllm_options,
        "triton": {"url": arguments.url},
    }
    return Process(
        side=side,
        settings=settings,
        **{role: str(folder) for role, folder in folders.items()},
        sizes=arguments.sizes,
        positions=arguments.positions,
        loads=list(_loads(arguments)),
        most_drafted=arguments.most_drafted,
        dtype=arguments.dtype,
        device=arguments.device,
        options=options[side],
    )


def _loads(arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yields how many each load has at once, and the tokens of its longest text."""
    for length, streams in arguments.loads.items():
        yield max(streams), length + arguments.max_tokens + _SPARE
    if arguments.chats:
        turn = arguments.message_tokens + arguments.chat_tokens
        yield max(arguments.chats), arguments.system_tokens + arguments.turns * turn + _SPARE
    if arguments.beside:
        longest = max(arguments.long_tokens, min(arguments.loads) + arguments.beside_tokens)
        yield arguments.beside + 1, longest + _SPARE


def measure(arguments: argparse.Namespace, run: Run) -> None:
    """Starts all processes, and measures them in turns until all is done or the time is over."""
    with contextlib.ExitStack() as running:
        children = []
        # Ours time what rounds cost while they load, so nothing else may run then.
        for _, some in groupby(processes(arguments), lambda process: process.side == "ours"):
            loading = [Child(process) for process in some]
            children += loading
            for child in loading:
                running.callback(child.close)
            for child in loading:
                found = child.wait(arguments.start_timeout)
                run.keep({"process": child.process.name, **found})
                run.tell(f"{child.process.name}: {found.get('error', 'loaded')}")
        by_setting = {
            (child.process.side, setting): child
            for child in children
            for setting in child.process.settings
        }
        try:
            for number in range(arguments.rounds):
                Turns(arguments, run, by_setting, number).measure()
        except TimeIsOver:
            run.tell("the time is over")


def inflate(arguments: argparse.Namespace) -> None:
    """Writes the checkpoints that vLLM reads, where they are not there yet."""
    for role, (folder, size) in _checkpoints(arguments).items():
        out = arguments.inflated / role
        if not out.exists():
            script = Path(__file__).with_name("inflate.py")
            command = [sys.executable, script, folder, out, "--size", size]
            if arguments.positions:
                command += ["--positions", str(arguments.positions)]
            subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


def _checkpoints(arguments: argparse.Namespace) -> dict[str, tuple[Path, str]]:
    """Returns the folders that there are, and what each is inflated to; empty: to nothing."""
    draft, target = arguments.sizes or ("", "")
    found = {"draft": (arguments.draft, draft), "target": (arguments.target, target)}
    if arguments.parallel_draft is not None:
        found["parallel"] = (arguments.parallel_draft, draft)
    return found


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    def shares(text: str) -> list[float]:
        return [float(share) for share in text.split(",")]

    def at_streams(text: str) -> tuple[int, list[int]]:
        tokens, _, streams = text.partition("@")
        return int(tokens), numbers(streams)

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
        "--parallel-draft", type=Path, metavar="FOLDER", help="of settings such as parallel-k8"
    )
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
    parser.add_argument(
        "--also",
        type=at_streams,
        action="append",
        default=[],
        metavar="TOKENS@STREAMS",
        help="prompts of another length, of so many streams, in those settings only: 700@8,32",
    )
    parser.add_argument("--sets", type=words, default=list(SETS), help=f"of {','.join(SETS)}")
    parser.add_argument("--num-prompts", type=int, default=32, help="of a set")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--requests", type=int, default=4, help="for each stream")
    parser.add_argument("--least", type=int, default=13, help="requests of a point, at least")
    parser.add_argument("--seconds", type=float, default=30, help="of a steady part, at most")
    parser.add_argument("--poisson", type=shares, default=[], metavar="SHARES")
    parser.add_argument("--arrival-seconds", type=float, default=10, help="of each of them")
    parser.add_argument("--chats", type=numbers, default=[])
    parser.add_argument("--turns", type=int, default=8, help="of a chat")
    parser.add_argument("--system-tokens", type=int, default=2000, help="that chats begin with")
    parser.add_argument("--message-tokens", type=int, default=60, help="of a user's message")
    parser.add_argument("--chat-tokens", type=int, default=64, help="of an answer in a chat")
    parser.add_argument("--beside", type=int, default=0, metavar="STREAMS")
    parser.add_argument("--beside-tokens", type=int, default=1500, help="of their answers")
    parser.add_argument("--pause", type=float, default=0.5, help="before each long prompt")
    parser.add_argument("--long-tokens", type=int, default=8000, help="of a long prompt")
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
    arguments.loads = {arguments.prompt_tokens: arguments.streams, **dict(arguments.also)}
    if unknown := set(arguments.sets) - set(SETS):
        parser.error(f"--sets: unknown {', '.join(sorted(unknown))}; there are {list(SETS)}")
    if arguments.vllm and arguments.sizes and arguments.inflated is None:
        parser.error("--vllm wants --inflated, where its checkpoints are or will be")
    try:
        todo = processes(arguments)
    except ValueError as exc:
        parser.error(str(exc))
    if not todo:
        parser.error("there is nothing to measure: name settings of --ours, --vllm or --triton")
    if arguments.triton and arguments.url is None:
        parser.error("--triton wants --url")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.ours:
        require_device(arguments.device)
    if arguments.vllm:
        require_device("cuda")
    with contextlib.ExitStack() as files:
        out = arguments.out and files.enter_context(arguments.out.open("a", encoding="utf-8"))
        run = Run(out)
        if arguments.vllm and arguments.sizes:
            inflate(arguments)
        measure(arguments, run)
    print(report(run.lines))
    return int(any(line.keys() & {"error", "failed"} or line.get("num_late") for line in run.lines))


if __name__ == "__main__":
    run_command(main)
