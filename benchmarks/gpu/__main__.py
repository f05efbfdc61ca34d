"""How fast runtime torch is on one GPU, for one greedy stream: every figure in one run.

    python -m benchmarks.gpu --pairs 7b+0.4b 32b+0.5b --out gpu.json --plot gpu.png

A small trained pair is inflated in the GPU's memory to each size (inflate.py): its acceptance is
that of the small pair, its time and memory that of the large one. Every floor is bytes read over
the bandwidth that a large copy had in the same run. Parts, all unless --parts names some:

small     the small pair in float32 and bfloat16: fused kernels against the plain engine
steps     one step of target and of draft, by context and by rows
rounds    draft-verify rounds by K: their time, answers to real prompts, what was predicted, and
          whether every answer is that of the target alone
sampled   answers at temperature 0.8, with and without a seed, and whether they are those of the
          same engines run step by step
adaptive  K as it is chosen where nobody sets it, against the target alone
lookup    adaptive where draft tokens may be copied from the text itself, against the target alone
busy      how much of the time kernels cover in steady decode
hopeless  adaptive with a draft whose weights are noise, against the target alone
own       the target as its own draft: every draft token should be accepted
fp8       a step of the target with its linears in FP8, against bfloat16

Answers go through the pair that Triton serves, and their times have the prefill in them. Where
peers.py reads the same --prompts (source_prompts.py), --peers takes its lines in. A part that fails
is told and does not stop the others; the exit status is 1 then. Tables go to stdout, progress to
stderr, all figures to --out after each part; report.py makes the tables again, also of several
runs, where one pair is to be measured otherwise than another.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import require_device, run_command
from benchmarks.gpu.models import Source
from benchmarks.gpu.pair import PairBenchmark, Settings, free_memory
from benchmarks.gpu.report import draw, report
from benchmarks.gpu.small import small
from benchmarks.gpu.timing import Clock, bytes_per_second
from benchmarks.inflate import size_of
from benchmarks.source_prompts import source_prompts
from specpipe.text.tokenizer import Tokenizer

_MODELS = Path(__file__).parents[2] / "models" / "python-code"
_PARTS = (
    "small",
    "steps",
    "rounds",
    "sampled",
    "adaptive",
    "lookup",
    "busy",
    "hopeless",
    "own",
    "fp8",
)
_DEFAULTS = Settings([1_000, 8_000, 32_000], [*range(1, 10)], [*range(9)], 192, 128, 5, 3, 20)
_QUICK = replace(_DEFAULTS, rows=[1, 2, 5, 9], num_prompts=2, runs=1, times=10)


class Recorder:
    """Runs parts one after the other; what they found is on disk as soon as it is known."""

    def __init__(self, path: Path | None, parts: Sequence[str], run: dict[str, Any]) -> None:
        self.run = run
        self.has_failed = False
        self._path, self._parts = path, parts
        self._start = time.perf_counter()

    def tell(self, what: str) -> None:
        print(f"{time.perf_counter() - self._start:6.1f} s  {what}", file=sys.stderr, flush=True)

    def part(self, name: str, into: dict[str, Any], measure: Callable[[], Any]) -> None:
        if name not in self._parts:
            return
        self.tell(name)
        try:
            into[name] = measure()
        except Exception as exc:  # the others still tell something, and the GPU is there now
            traceback.print_exc()
            into[name] = {"error": f"{type(exc).__name__}: {exc}"}
            self.has_failed = True
        self.save()

    def save(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self.run, indent=1) + "\n", encoding="utf-8")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--draft", type=Path, default=_MODELS / "draft", help="the small one")
    parser.add_argument("--target", type=Path, default=_MODELS / "target", help="the small one")
    parser.add_argument(
        "--pairs",
        nargs="*",
        default=["7b+0.4b"],
        metavar="TARGET+DRAFT",
        help="sizes as inflate.py has them; default: 7b+0.4b",
    )
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(_PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer rows, prompts and repetitions")
    parser.add_argument("--contexts", type=numbers)
    parser.add_argument("--rows", type=numbers)
    parser.add_argument("--num-draft-tokens", type=numbers)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--runs", type=int, help="of all prompts, for each K")
    parser.add_argument("--times", type=int, help="that a step or a round is timed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    parser.add_argument("--plot", type=Path, help="a PNG file for a drawing of the steps")
    parser.add_argument("--prompts", type=Path, help="a JSON list of lists of ids; default: anew")
    parser.add_argument("--peers", type=Path, help="what peers.py printed")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.parts) - set(_PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; there are {list(_PARTS)}")
    return arguments


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The defaults, but for what the command line has."""
    given = {name: getattr(arguments, name) for name in asdict(_DEFAULTS)}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(_QUICK if arguments.quick else _DEFAULTS, **given)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    require_device(arguments.device, interprets=True)
    import triton  # which installations for a CPU have not

    settings = settings_of(arguments)
    device = torch.device(arguments.device)
    dtype = getattr(torch, arguments.dtype)
    tokenizer = Tokenizer.load(arguments.target)
    prompts = source_prompts(tokenizer, settings.num_prompts, settings.prompt_tokens)
    if arguments.prompts is not None:
        prompts = json.loads(arguments.prompts.read_bytes())[: settings.num_prompts]
        longest = max(map(len, prompts))
        settings = replace(settings, num_prompts=len(prompts), prompt_tokens=longest)
    run: dict[str, Any] = {
        "machine": {
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "dtype": arguments.dtype,
        },
        "bytes_per_second": bytes_per_second(Clock(device)),
        "pairs": {},
    }
    if arguments.peers is not None:
        lines = arguments.peers.read_text(encoding="utf-8").splitlines()
        run["peers"] = [json.loads(line) for line in lines]
    free_memory()
    recorder = Recorder(arguments.out, arguments.parts, run)
    folders = {"draft": arguments.draft, "target": arguments.target}
    sources = {role: Source(folder, None, device, dtype) for role, folder in folders.items()}
    recorder.part("small", run, lambda: small(sources, settings, tokenizer, prompts))
    free_memory()
    for name in arguments.pairs:
        target_size, _, draft_size = name.partition("+")
        recorder.tell(f"{name}: making the weights")
        benchmark = PairBenchmark(
            replace(sources["draft"], size=size_of(draft_size)),
            replace(sources["target"], size=size_of(target_size)),
            settings,
            tokenizer=tokenizer,
            prompts=prompts,
            bandwidth=run["bytes_per_second"],
        )
        found = run["pairs"][name] = {
            "num_parameters": benchmark.num_parameters,
            "settings": asdict(settings),
        }
        for part in _PARTS[1:]:
            recorder.part(part, found, getattr(benchmark, part))
        benchmark.close()
    recorder.save()
    recorder.tell("done")
    print(report(run))
    if arguments.plot is not None:
        draw(run, arguments.plot)
    return int(recorder.has_failed)


if __name__ == "__main__":
    run_command(main)
