"""Tokens per second of one stream on the same prompts, side by side in one run.

    python benchmarks/generate.py --config configs/quickstart.yaml --threads 2

Compared are transformers' `generate`, its assisted generation with the same draft and K, the
target alone, speculation with K fixed, and speculation with the adaptive K that is served. All run
in this process, greedy, in float32 on a CPU; each prompt runs once on every side before the next
one, after a warm-up that does not count. It needs the extras `torch` and `test` (transformers), and
a pair that has been built. Nothing else should keep the cores busy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from specpipe.config import PipelineConfig, load_config
from specpipe.pipeline import built_repository
from specpipe.runtimes.base import Pair, load_runtime
from specpipe.speculative.request import Request
from specpipe.text import Tokenizer
from specpipe.triton.repository import PairFile

ROOT = Path(__file__).parents[1]
TRANSFORMERS, ASSISTED = "transformers generate", "transformers assisted"
ALONE, FIXED, ADAPTIVE = "target alone", "speculation, K fixed", "speculation, adaptive K"
SIDES = (TRANSFORMERS, ASSISTED, ALONE, FIXED, ADAPTIVE)


@dataclass(frozen=True)
class Run:
    """One prompt on one side."""

    seconds: float
    token_ids: tuple[int, ...]
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def rate(self) -> float:
        """Output tokens per second, the prompt's prefill included."""
        return len(self.token_ids) / self.seconds


@dataclass
class Side:
    """How one side answers a prompt, and what it answered so far."""

    ask: Callable[[Sequence[int], int], Run]
    runs: list[Run] = field(default_factory=list)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = load_config(arguments.config)
    tokenizer = Tokenizer.load(built_repository(config) / "speculative" / "1" / "tokenizer")
    sides = {
        **transformers_sides(config, tokenizer, arguments.num_draft_tokens),
        **specpipe_sides(config, tokenizer, arguments),
    }
    prompts = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    prompts = prompts[: arguments.limit]
    for side in sides.values():
        side.ask(tokenizer.encode(prompts[0]["prompt"]), 16)
    for prompt in prompts:
        token_ids = tokenizer.encode(prompt["prompt"])
        for side in sides.values():
            side.runs.append(side.ask(token_ids, arguments.max_tokens))
    print_report(arguments, config, prompts, {name: side.runs for name, side in sides.items()})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--prompts", type=Path, default=ROOT / "benchmarks" / "prompts.jsonl")
    parser.add_argument("--limit", type=int, help="use the first prompts only")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--per-prompt", action="store_true", help="also print a line per prompt")
    return parser.parse_args()


def specpipe_sides(
    config: PipelineConfig, tokenizer: Tokenizer, arguments: argparse.Namespace
) -> dict[str, Side]:
    """The built pair with K fixed (which also runs the target alone), and adaptive."""
    folder = built_repository(config) / "speculative" / "1"
    pair_file = PairFile.from_json((folder / "pair.json").read_text())

    def load(*, adaptive: bool) -> Pair:
        options = dataclasses.replace(
            pair_file.options,
            adaptive=adaptive,
            num_draft_tokens=arguments.num_draft_tokens,
            num_threads=arguments.threads,
        )
        return load_runtime(pair_file.runtime).load_pair(
            folder / "draft", folder / "target", options, tokenizer.detokenizer
        )

    fixed, adaptive = load(adaptive=False), load(adaptive=True)
    end_token_ids = tokenizer.end_token_ids

    def asks(pair: Pair, num_draft_tokens: int) -> Side:
        return Side(lambda ids, limit: ask_pair(pair, ids, limit, num_draft_tokens, end_token_ids))

    return {
        ALONE: asks(fixed, 0),
        FIXED: asks(fixed, arguments.num_draft_tokens),
        ADAPTIVE: asks(adaptive, arguments.num_draft_tokens),
    }


def ask_pair(
    pair: Pair,
    prompt: Sequence[int],
    max_tokens: int,
    num_draft_tokens: int,
    end_token_ids: frozenset[int],
) -> Run:
    """Runs one request to its end."""
    request = Request(
        request_id="benchmark",
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        num_draft_tokens=num_draft_tokens,
        end_token_ids=end_token_ids,
    )
    token_ids: list[int] = []
    start = time.perf_counter()
    pair.submit(request)
    while pair.has_work():
        for chunk in pair.step():
            token_ids += chunk.token_ids
    seconds = time.perf_counter() - start
    assert chunk.statistics is not None
    return Run(
        seconds,
        tuple(token_ids),
        chunk.statistics.num_steps,
        chunk.statistics.total_draft_tokens,
        chunk.statistics.total_accepted_draft_tokens,
    )


def transformers_sides(
    config: PipelineConfig, tokenizer: Tokenizer, num_draft_tokens: int
) -> dict[str, Side]:
    """transformers on the checkpoints that the pair was built from."""
    target, draft = (
        transformers.AutoModelForCausalLM.from_pretrained(
            config.base_dir / checkpoint.checkpoint, dtype=torch.float32
        ).eval()
        for checkpoint in (config.target, config.draft)
    )
    draft.generation_config.num_assistant_tokens = num_draft_tokens
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0

    def ask(prompt: Sequence[int], max_tokens: int, **settings: Any) -> Run:
        ids = torch.tensor([list(prompt)])
        start = time.perf_counter()
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            **settings,
        )
        seconds = time.perf_counter() - start
        new = output[0, len(prompt) :].tolist()
        if new and new[-1] in tokenizer.end_token_ids:
            new.pop()
        return Run(seconds, tuple(new))

    return {
        TRANSFORMERS: Side(ask),
        ASSISTED: Side(lambda ids, limit: ask(ids, limit, assistant_model=draft)),
    }


def print_report(
    arguments: argparse.Namespace,
    config: PipelineConfig,
    prompts: Sequence[dict[str, str]],
    runs: dict[str, list[Run]],
) -> None:
    print(f"machine: {cpu_name()}, {os.cpu_count()} cores, {arguments.threads} threads")
    print(
        f"pair: {config.name}, float32, batch 1, K = {arguments.num_draft_tokens}, greedy, "
        f"{len(prompts)} prompts of {arguments.prompts.name}, up to {arguments.max_tokens} tokens; "
        f"torch {torch.__version__}, transformers {transformers.__version__}\n"
    )
    kinds: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        kinds[prompt["kind"]].append(index)
    columns = {**kinds, "all": list(range(len(prompts)))}
    print(f"{'tokens/s':24}" + "".join(f"{kind:>12}" for kind in columns))
    for side in SIDES:
        cells = (f"{rate([runs[side][i] for i in rows]):12.0f}" for rows in columns.values())
        print(f"{side:24}" + "".join(cells))
    print()
    for side, base in (
        (ALONE, TRANSFORMERS),
        (FIXED, ASSISTED),
        (FIXED, ALONE),
        (ADAPTIVE, ALONE),
    ):
        cells = (
            f"{rate([runs[side][i] for i in rows]) / rate([runs[base][i] for i in rows]):12.2f}"
            for rows in columns.values()
        )
        print(f"{side} / {base}\n{'':24}" + "".join(cells))
    print()
    for side in (FIXED, ADAPTIVE):
        cells = (
            f"{acceptance_length([runs[side][i] for i in rows]):12.2f}" for rows in columns.values()
        )
        print(f"acceptance length, {side}\n{'':24}" + "".join(cells))
    if arguments.per_prompt:
        print_prompts(prompts, runs)
    # An answer that ends at its first token says nothing about decoding.
    ratios = [
        a.rate / b.rate
        for a, b in zip(runs[ADAPTIVE], runs[ALONE], strict=True)
        if len(b.token_ids) > 1
    ]
    print(f"\nworst prompt, {ADAPTIVE} / {ALONE}: {min(ratios):.2f}")
    print_differences(prompts, runs)


def print_prompts(prompts: Sequence[dict[str, str]], runs: dict[str, list[Run]]) -> None:
    print(f"\n{'tokens/s by prompt':28}" + "".join(f"{side[:22]:>24}" for side in SIDES))
    for index, prompt in enumerate(prompts):
        cells = "".join(f"{runs[side][index].rate:24.0f}" for side in SIDES)
        length = acceptance_length([runs[FIXED][index]])
        print(f"{prompt['name'][:27]:28}{cells}   acceptance length {length:.2f}")


def print_differences(prompts: Sequence[dict[str, str]], runs: dict[str, list[Run]]) -> None:
    """Says where an answer is not that of the target alone."""
    for side in SIDES:
        names = [
            prompt["name"]
            for prompt, run, alone in zip(prompts, runs[side], runs[ALONE], strict=True)
            if run.token_ids != alone.token_ids
        ]
        if names:
            print(f"{side} differs from {ALONE} on: {', '.join(names)}")


def rate(runs: Sequence[Run]) -> float:
    """Output tokens per second over all runs."""
    return sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)


def acceptance_length(runs: Sequence[Run]) -> float:
    """Mean tokens that a step of the target emits."""
    return 1 + sum(run.num_accepted_tokens for run in runs) / sum(run.num_steps for run in runs)


def cpu_name() -> str:
    """The processor's name where Linux tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
