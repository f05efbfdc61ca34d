"""What a served pair gains from adaptive draft lengths and from several streams, on a CPU.

    python benchmarks/cpu_load.py --config configs/quickstart.yaml --rounds 10

The built pair is served by a Triton that this script starts. A round asks all prompts at each load
by the target alone and with as many draft tokens as pay, one right after the other, the first of
them in turns; so what drifts falls on all alike. A ratio is that of the two rates of each round:
their geometric mean with its 95 % interval over rounds (load/ratio.py). That of a prompt is by the
seconds that its answers took. Client and server share the cores, and nothing else should keep them
busy.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from command import cpu_name, run_command
from load.ratio import Ratio
from measure import PROMPTS, QUICKSTART

from specpipe.build.load import load_config
from specpipe.build.repositories import built_repository
from specpipe.evaluate.bench.metrics import summarize
from specpipe.evaluate.bench.run import BenchSettings, SideLoads, measure
from specpipe.evaluate.bench.sides import WITH, WITHOUT, open_side, without_and_with
from specpipe.evaluate.prompts import load_prompts
from specpipe.evaluate.serving import served

_LEAST, _LEAST_OF_WORST, _LEAST_GAIN = 0.98, 0.95, 2.5


def main() -> int:
    arguments = parse_arguments()
    config = load_config(arguments.config)
    prompts = load_prompts(arguments.prompts, limit=arguments.limit)
    rounds = []
    with served(built_repository(config)) as server:
        side = open_side(server.grpc_url, model=None, metrics_url=None)
        for number in range(arguments.rounds):
            settings = BenchSettings(concurrencies=arguments.streams, rounds=1, seed=number)
            sides = without_and_with(side)[:: 1 if number % 2 == 0 else -1]
            rounds.append(measure(sides, prompts, settings, report=_quiet).by_concurrency)
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
        side.endpoint.close()
    print(
        f"{cpu_name()}, {os.cpu_count()} cores; pair {config.name}, greedy, streamed over gRPC;\n"
        f"{len(prompts.prompts)} prompts of {arguments.prompts.name}, {arguments.rounds} rounds\n"
    )
    print(f"{'streams':8}{'alone':>9}{'adaptive':>10}   adaptive / alone       of the worst prompt")
    is_reached = True
    rates: dict[int, list[float]] = {}
    for streams in arguments.streams:
        pairs = [(by_load[streams][WITHOUT], by_load[streams][WITH]) for by_load in rounds]
        alone, rates[streams] = ([_rate(x) for x in each] for each in zip(*pairs, strict=True))
        ratio = Ratio.of([b / a for a, b in zip(alone, rates[streams], strict=True)])
        name, worst = _worst(pairs)
        is_reached &= ratio.high >= _LEAST and worst.high >= _LEAST_OF_WORST
        print(
            f"{streams:7} {np.median(alone):9.0f}{np.median(rates[streams]):10.0f}   {ratio!s:22}"
            f" {worst} {name}"
        )
    print(f"\ngoals: an interval's upper end >= {_LEAST}, of the worst prompt {_LEAST_OF_WORST}")
    fewest, most = min(rates), max(rates)
    if fewest < most:
        gain = Ratio.of([b / a for a, b in zip(rates[fewest], rates[most], strict=True)])
        is_reached &= gain.mean >= _LEAST_GAIN
        print(f"{most} streams / {fewest}: {gain}; goal: {_LEAST_GAIN}")
    print("all reached" if is_reached else "not all reached")
    return int(not is_reached)


def _rate(loads: SideLoads) -> float:
    rate = summarize(loads.loads).output_tokens_per_s
    assert rate is not None
    return rate


def _worst(pairs: Sequence[tuple[SideLoads, SideLoads]]) -> tuple[str, Ratio]:
    """Returns the prompt whose interval ends lowest: that of alone's seconds over adaptive's."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for alone, adaptive in pairs:
        after = adaptive.answers_by_prompt()
        for name, (answer,) in alone.answers_by_prompt().items():
            if (answer.num_output_tokens or 0) < 2:
                continue  # says nothing of decoding
            seconds = [x.ended_s - x.started_s for x in (answer, after[name][0])]
            ratios[name].append(seconds[0] / seconds[1])
    found = {name: Ratio.of(of_prompt) for name, of_prompt in ratios.items()}
    return min(found.items(), key=lambda one: one[1].high)


def _quiet(line: str) -> None:
    """Takes what `measure` reports: a line for each load."""


def parse_arguments() -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in text.split(","))

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--limit", type=int, help="use the first prompts only")
    parser.add_argument("--streams", type=numbers, default=(1, 4, 8))
    parser.add_argument("--rounds", type=int, default=10, help="two at least")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
