"""What a prediction gains: tokens a step and a second, on the same answers in one run.

    python benchmarks/prediction.py --config configs/quickstart.yaml --streams 8

The built pair runs in this process. The greedy answers of the target alone come first; then the
same are asked for with the draft, with a prediction in which one line of the answer is changed, and
with that of another answer. All must be those of the target alone.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from command import cpu_name, run_command
from measure import PROMPTS, QUICKSTART, load_pair, load_tokenizer, read_prompts

from specpipe.build.load import load_config
from specpipe.runtimes.pair.pair import Pair
from specpipe.speculative.request import Request, Statistics

Ids = tuple[int, ...]


def main() -> None:
    arguments = parse_arguments()
    config = load_config(arguments.config)
    tokenizer = load_tokenizer(config)
    requests = [
        Request(
            request_id=prompt.name,
            prompt_token_ids=tuple(tokenizer.encode(prompt.prompt)),
            max_tokens=arguments.max_tokens,
            num_draft_tokens=arguments.num_draft_tokens,
        )
        for prompt in read_prompts(arguments.prompts, arguments.limit)
    ]
    pair = load_pair(config, tokenizer)
    plain = [replace(request, num_draft_tokens=0) for request in requests]
    answers, alone = run(pair, plain, arguments.streams)
    rng = random.Random(0)
    changed = [
        tuple(tokenizer.encode_fragment(with_one_line_changed(tokenizer.decode(ids), rng)))
        for ids in answers.values()
    ]
    print(f"{config.name}, {cpu_name()}, {len(requests)} answers, {arguments.streams} at once")
    report("target alone", alone)
    for name, predictions in (
        ("draft", [()] * len(requests)),
        ("one line changed", changed),
        ("another answer's", changed[1:] + changed[:1]),
    ):
        asked = [
            replace(request, prediction_token_ids=prediction)
            for request, prediction in zip(requests, predictions, strict=True)
        ]
        found, figures = run(pair, asked, arguments.streams)
        assert found == answers, f"{name}: other answers than the target alone's"
        report(name, figures)


def with_one_line_changed(text: str, rng: random.Random) -> str:
    """Returns the text with another line in its middle third."""
    lines = text.split("\n")
    lines[rng.randrange(len(lines) // 3, len(lines) - len(lines) // 3)] = "    value = 1"
    return "\n".join(lines)


def run(
    pair: Pair, requests: Sequence[Request], at_once: int
) -> tuple[dict[str, Ids], tuple[float, list[Statistics]]]:
    """Returns the answers by name, the seconds that all took, and what each reports."""
    waiting = list(requests)
    answers: dict[str, Ids] = dict.fromkeys((r.request_id for r in requests), ())
    statistics: dict[str, Statistics] = {}
    num_open = 0
    start = time.perf_counter()
    while len(statistics) < len(requests):
        while waiting and num_open < at_once:
            pair.submit(waiting.pop(0))
            num_open += 1
        for chunk in pair.step():
            answers[chunk.request_id] += chunk.token_ids
            if chunk.statistics is not None:
                statistics[chunk.request_id] = chunk.statistics
                num_open -= 1
    return answers, (time.perf_counter() - start, list(statistics.values()))


def report(name: str, figures: tuple[float, list[Statistics]]) -> None:
    seconds, statistics = figures

    def total(field: str) -> int:
        return sum(getattr(s, field) for s in statistics)

    num_tokens = total("num_output_tokens")
    print(
        f"{name:18} {num_tokens / total('num_steps'):5.2f} tokens a step"
        f" {num_tokens / seconds:7.0f} tokens/s; of the prediction"
        f" {total('accepted_prediction_tokens')} accepted,"
        f" {total('rejected_prediction_tokens')} rejected",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=QUICKSTART, help="of a built pair")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--limit", type=int, default=24, help="prompts; default: 24")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--num-draft-tokens", type=int, help="K; default: as many as pay")
    parser.add_argument("--streams", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
