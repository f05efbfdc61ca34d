"""What a draft that proposes in one pass gains beside one that drafts step by step, for one stream.

    python -m benchmarks.parallel_draft --parallel-draft models/python-code/parallel
    python -m benchmarks.parallel_draft --parallel-draft models/python-code/parallel \\
        --device cuda --dtype bfloat16 --sizes 7b+0.4b --formats fp8,awq --requests 24

All sides have the same target and run in this process; a round asks each of them for the same
answers, one after the other, in turns (settings: benchmarks/load/sides.py). Greedy;
no token ends an answer, and the first one does not count. A ratio is the geometric mean over rounds
with its 95 % interval. Best means the fastest K of this run.

The bound is what the passes allow: a draft-verify round emits the acceptance length L and costs a
target pass of K + 1 rows, and K draft passes of one row or one of L + K - 1. Passes are timed in
this run, after 256 tokens or as many as texts have room for; of the prompts and of the host there
is nothing in them.

--formats wants a GPU. It adds the target with its linears in each of them, alone and beside three
drafts: plain, in the same format, and parallel (plain); and what is left of the product of both
gains, that of the format without a draft, and that of the plain draft beside the plain target. Both
formats are made of the plain weights by rounding to nearest, and nothing is calibrated:

fp8  one scale for a linear and one for its input, as format fp8 stores them
awq  INT4 in blocks of up to 128, as int4_awq stores them and with its multiplication of inputs, but
     by ones: it takes the time of AWQ, and is a little less like the plain target than AWQ is

What rounding takes from the acceptance length, L in the table, is missing in that share, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import require_device, run_command
from benchmarks.load.closed_loop import Load
from benchmarks.load.ratio import Ratio
from benchmarks.load.sides import (
    FORMATS,
    Point,
    Process,
    format_of,
    is_parallel,
    num_draft_tokens,
    pair_of,
)
from specpipe.evaluate.prompts import load_prompts
from specpipe.text.tokenizer import Tokenizer

_MODELS = Path(__file__).parents[1] / "models" / "python-code"
_ALONE, _COPIES = "alone", "adaptive"
_STEPS, _PARALLEL = "drafts", "parallel-drafts"
_CPU_GOAL, _CPU_COPY_GOAL, _GPU_GOAL = 1.25, 1.8, 1.1


def _beside(word: str) -> dict[str, tuple[str, str, float]]:
    """Returns the drafts beside a target in a format.

    The pair, that of plain models whose gain its draft is to have, and the goal: a share.
    """
    return {
        "a plain draft": (f"{word}-drafts", _STEPS, 0.82),
        f"an {word.upper()} draft": (f"{word}-{word}draft-drafts", _STEPS, 0.9),
        "a parallel draft": (f"{word}-parallel-drafts", _PARALLEL, 0.9),
    }


def _alone(setting: str) -> str:
    """Returns the setting in which its target runs alone."""
    word = format_of(setting)
    return _ALONE if word is None else f"{word}-{_ALONE}"


@dataclass
class Measured:
    """What a setting came to, round by round."""

    rates: list[float] = field(default_factory=list)
    acceptance_lengths: list[float] = field(default_factory=list)
    num_different: int = 0

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def acceptance_length(self) -> float:
        return statistics.fmean(self.acceptance_lengths)

    def over(self, other: Measured) -> Ratio:
        return Ratio.of([a / b for a, b in zip(self.rates, other.rates, strict=True)])


class Results(dict[str, Measured]):
    """By setting, in the order of a run."""

    def best(self, pair: str) -> str:
        """The fastest of a pair's draft lengths."""
        return max((s for s in self if pair_of(s) == pair and num_draft_tokens(s)), key=self._rate)

    def _rate(self, setting: str) -> float:
        return self[setting].rate


def settings_of(arguments: argparse.Namespace) -> list[str]:
    """All that is measured."""

    def by_length(*pairs: str) -> list[str]:
        return [
            f"{pair}-k{k}"
            for pair in pairs
            for k in (arguments.parallel_k if is_parallel(pair) else arguments.k)
        ]

    settings = [_ALONE, *by_length(_STEPS, _PARALLEL)]
    settings += [f"{pair}-adaptive" for pair in (_STEPS, _PARALLEL)]
    settings += [_COPIES, f"parallel-{_COPIES}"]
    for word in arguments.formats:
        pairs = [pair for pair, _, _ in _beside(word).values()]
        settings += [f"{word}-{_ALONE}", *by_length(*pairs)]
    return settings


def process_of(arguments: argparse.Namespace, settings: Sequence[str], longest: int) -> Process:
    """What benchmarks/load/ours.py is told."""
    target, _, draft = arguments.sizes.partition("+")
    return Process(
        side="ours",
        settings=settings,
        target=str(arguments.target),
        draft=str(arguments.draft),
        parallel=str(arguments.parallel_draft),
        sizes=(draft, target) if target else (),
        loads=[(1, longest)],
        most_drafted=max(*arguments.k, *arguments.parallel_k),
        dtype=arguments.dtype,
        device=arguments.device,
    )


def measure(
    arguments: argparse.Namespace, tell: Callable[[str], None]
) -> tuple[Results, dict[str, float | None]]:
    """Runs all settings in turns; returns what they came to, and the bound of each."""
    import torch

    from benchmarks.load import ours
    from benchmarks.load.worker import Measurements

    if arguments.device == "cpu":
        torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer.load(arguments.target)
    prompts = [
        tokenizer.encode(prompt.text)
        for prompt in load_prompts(arguments.prompts).prompts
        if prompt.text is not None
    ][: arguments.requests]
    longest = max(map(len, prompts)) + arguments.max_tokens
    settings = settings_of(arguments)
    side = ours.load(process_of(arguments, settings, longest))
    # A target in another format has other answers.
    of_weights = {_alone(setting): Measurements(side) for setting in settings}
    load = Load(1, len(prompts) + 1, arguments.max_tokens)
    results = Results({setting: Measured() for setting in settings})
    for number in range(arguments.rounds):
        for setting in settings[:: 1 if number % 2 == 0 else -1]:
            found = of_weights[_alone(setting)].measure(Point(setting, load, prompts))
            measured = results[setting]
            measured.rates.append(found["tokens_per_second"])
            measured.acceptance_lengths.append(found["acceptance_length"])
            measured.num_different += found["num_different"]
            tell(f"round {number + 1}, {setting}: {found['tokens_per_second']:.0f} tokens/s")
    bounds = {setting: _bound(side.pairs, setting, results[setting]) for setting in settings}
    return results, bounds


def _bound(pairs: Mapping[str, Any], setting: str, measured: Measured) -> float | None:
    """What the timed passes allow over the same target alone; None where K is not fixed."""
    from benchmarks.load.ours import pass_seconds

    k = num_draft_tokens(setting)
    if not k:
        return None
    engines, length = pairs[pair_of(setting)].engines, measured.acceptance_length
    if is_parallel(setting):
        drafting = pass_seconds(engines["draft"], round(length + k - 1), num_scored=k)
    else:
        drafting = k * pass_seconds(engines["draft"], 1)
    target = engines["target"]
    return length * pass_seconds(target, 1) / (drafting + pass_seconds(target, k + 1))


def report(results: Results, bounds: Mapping[str, float | None]) -> list[str]:
    """The table: a line for each setting."""
    lines = [f"{'setting':34}{'tokens/s':>9}   over alone               L    bound"]
    for setting, measured in results.items():
        alone = results[_alone(setting)]
        bound = bounds[setting]
        lines.append(
            f"{setting:34}{measured.rate:9.1f}   {measured.over(alone)!s:22}"
            f"{measured.acceptance_length:5.2f}{'' if bound is None else f'{bound:9.3f}'}"
            + (f"   {measured.num_different} answers differ" if measured.num_different else "")
        )
    return lines


def goals(results: Results, *, is_gpu: bool) -> list[tuple[str, float, float]]:
    """What is to be reached: its name, the figure and the least that it must be."""
    alone, steps = results[_ALONE], results[results.best(_STEPS)]
    fastest = max(
        (results[results.best(_PARALLEL)], results[f"{_PARALLEL}-adaptive"]), key=lambda m: m.rate
    )
    copying = results[f"parallel-{_COPIES}"]
    if not is_gpu:
        return [
            ("parallel over the target alone", fastest.over(alone).mean, _CPU_GOAL),
            ("with copying over the target alone", copying.over(alone).mean, _CPU_COPY_GOAL),
        ]
    best = results[results.best(_PARALLEL)]
    found = [("parallel over the best K of steps", best.over(steps).mean, _GPU_GOAL)]
    for word in FORMATS:
        if f"{word}-{_ALONE}" not in results:
            continue
        of_format = results[f"{word}-{_ALONE}"].over(alone).mean
        for name, (pair, plain, goal) in _beside(word).items():
            product = of_format * results[results.best(plain)].over(alone).mean
            both = results[results.best(pair)].over(alone).mean
            what = f"{word.upper()} beside {name}: share of the product {product:.2f}"
            found.append((what, both / product, goal))
    return found


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    require_device(arguments.device)
    results, bounds = measure(arguments, lambda line: print(line, file=sys.stderr, flush=True))
    where = f"{os.cpu_count()} cores, {arguments.threads} threads"
    if arguments.device != "cpu":
        import torch

        where = torch.cuda.get_device_name()
    print(
        f"{where}; {arguments.sizes or arguments.target}, {arguments.dtype}, "
        f"{arguments.requests} prompts of {arguments.prompts}, {arguments.max_tokens} tokens each, "
        f"{arguments.rounds} rounds\n"
    )
    print("\n".join(report(results, bounds)) + "\n")
    is_reached = True
    for name, figure, least in goals(results, is_gpu=arguments.device != "cpu"):
        is_reached &= figure >= least
        print(f"{name}: {figure:.3f}; goal: {least}{'' if figure >= least else ', not reached'}")
    if arguments.out is not None:
        figures = {
            setting: {**vars(measured), "bound": bounds[setting]}
            for setting, measured in results.items()
        }
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return int(not is_reached)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    known = ",".join(FORMATS)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parallel_draft",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", type=Path, default=_MODELS / "target")
    parser.add_argument("--draft", type=Path, default=_MODELS / "draft", help="drafts step by step")
    parser.add_argument("--parallel-draft", type=Path, required=True, help="proposes in one pass")
    parser.add_argument(
        "--sizes", default="", metavar="TARGET+DRAFT", help="as inflate.py has them"
    )
    parser.add_argument("--k", type=numbers, default=[1, 2, 3, 4], help="of the draft")
    parser.add_argument("--parallel-k", type=numbers, default=[2, 3, 4, 5, 6, 7, 8])
    parser.add_argument(
        "--formats", type=words, default=[], help=f"of the target, beside each draft: {known}"
    )
    parser.add_argument("--prompts", default="code", help="a built-in set, or a file of prompts")
    parser.add_argument("--requests", type=int, default=12, help="prompts of the set")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4, help="two at least")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.formats) - set(FORMATS):
        parser.error(f"--formats: unknown {', '.join(sorted(unknown))}; there are {known}")
    if arguments.rounds < 2:
        parser.error("--rounds must be 2 at least: an interval is told")
    if arguments.formats and arguments.device == "cpu":
        parser.error("--formats wants --device cuda")
    return arguments


if __name__ == "__main__":
    run_command(main)
