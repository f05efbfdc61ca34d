"""Tokens per second of one stream on the same prompts, side by side in one run.

    python benchmarks/generate.py --config configs/quickstart.yaml --threads 2

Compared are transformers' `generate`, its assisted generation with the same draft and K, and its
prompt lookup of as many tokens; the target alone, speculation with K fixed, speculation with the
adaptive K that is served, and that with `speculation.prompt_lookup`. All run in this process,
greedy, in float32 on a CPU; each prompt runs on every side in turn, some rounds, before the next
one, after a warm-up that does not count; the median of the rounds counts. It needs the extras
`torch` and `test` (transformers), and a pair that has been built. Nothing else should keep the
cores busy.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from command import cpu_name, run_command
from measure import (
    PROMPTS,
    QUICKSTART,
    Prompt,
    Run,
    ask,
    load_pair,
    load_tokenizer,
    read_prompts,
)

from specpipe.build.load import load_config
from specpipe.config.sections import PipelineConfig
from specpipe.roles import Role
from specpipe.runtimes.pair.costs import CostTable
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.speculative.adaptive import StepCosts
from specpipe.text.tokenizer import Tokenizer

TRANSFORMERS, ASSISTED = "transformers generate", "transformers assisted"
LOOKED_UP = "transformers prompt lookup"
ALONE, FIXED, ADAPTIVE = "target alone", "speculation, K fixed", "speculation, adaptive K"
LOOKUP = "adaptive K with prompt lookup"
SIDES = (TRANSFORMERS, ASSISTED, LOOKED_UP, ALONE, FIXED, ADAPTIVE, LOOKUP)
RATIOS = (
    (ALONE, TRANSFORMERS),
    (FIXED, ASSISTED),
    (LOOKUP, LOOKED_UP),
    (FIXED, ALONE),
    (ADAPTIVE, ALONE),
    (LOOKUP, ALONE),
)


@dataclass
class Side:
    """How one side answers a prompt, and what it answered so far: the median run of each prompt."""

    ask: Callable[[Sequence[int], int], Run]
    runs: list[Run] = field(default_factory=list)


class RecordingCosts(CostTable):
    """The costs of a pair, which also keep how many rows the target verified in each step."""

    def __init__(self, costs: CostTable) -> None:
        vars(self).update(vars(costs))
        self.num_rows: list[int] = []

    def observe(self, role: Role, num_rows: int, seconds: float) -> None:
        super().observe(role, num_rows, seconds)
        if role == "target":
            self.num_rows.append(num_rows)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = load_config(arguments.config)
    tokenizer = load_tokenizer(config)
    options = {
        "num_draft_tokens": arguments.num_draft_tokens,
        "num_threads": arguments.threads,
    }
    fixed = load_pair(config, tokenizer, adaptive=False, **options)
    adaptive = load_pair(config, tokenizer, adaptive=True, **options)
    assert isinstance(adaptive, EnginePair) and adaptive.costs is not None
    lookup = load_pair(config, tokenizer, adaptive=True, prompt_lookup=True, **options)
    costs_at_start = adaptive.costs.at(1)
    adaptive.costs = recorder = RecordingCosts(adaptive.costs)
    sides = {
        **transformers_sides(config, tokenizer, arguments.num_draft_tokens),
        ALONE: Side(lambda ids, limit: ask(fixed, tokenizer, ids, limit, 0)),
        FIXED: Side(lambda ids, limit: ask(fixed, tokenizer, ids, limit)),
        LOOKUP: Side(lambda ids, limit: ask(lookup, tokenizer, ids, limit)),
        ADAPTIVE: Side(lambda ids, limit: ask(adaptive, tokenizer, ids, limit)),
    }
    prompts = read_prompts(arguments.prompts, arguments.limit)
    for side in sides.values():
        side.ask(tokenizer.encode(prompts[0].prompt), 16)
    num_rows = []
    for prompt in prompts:
        token_ids = tokenizer.encode(prompt.prompt)
        rounds: dict[str, list[Run]] = defaultdict(list)
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                recorder.num_rows.clear()
                rounds[name].append(side.ask(token_ids, arguments.max_tokens))
        num_rows.append(list(recorder.num_rows))  # the adaptive side is the last
        for name, side in sides.items():
            side.runs.append(
                sorted(rounds[name], key=lambda run: run.seconds)[len(rounds[name]) // 2]
            )
    print(
        f"{cpu_name()}, {os.cpu_count()} cores, {arguments.threads} threads; pair {config.name}, "
        f"float32, batch 1, greedy,\nK = {arguments.num_draft_tokens}, {len(prompts)} prompts of "
        f"{arguments.prompts.name}, up to {arguments.max_tokens} tokens, "
        f"median of {arguments.rounds};\n"
        f"torch {torch.__version__}, transformers {transformers.__version__}\n"
    )
    runs = {name: side.runs for name, side in sides.items()}
    print_table(prompts, runs)
    if arguments.per_prompt:
        print_prompts(prompts, runs)
    print_verdict(prompts, runs, costs_at_start, num_rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--limit", type=int, help="use the first prompts only")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--per-prompt", action="store_true", help="also print a line per prompt")
    return parser.parse_args()


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

    def generate(prompt: Sequence[int], max_tokens: int, **settings: Any) -> Run:
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
        TRANSFORMERS: Side(generate),
        ASSISTED: Side(lambda ids, limit: generate(ids, limit, assistant_model=draft)),
        LOOKED_UP: Side(
            lambda ids, limit: generate(ids, limit, prompt_lookup_num_tokens=num_draft_tokens)
        ),
    }


def print_table(prompts: Sequence[Prompt], runs: dict[str, list[Run]]) -> None:
    """Rates, ratios and acceptance lengths by kind of prompt."""
    columns: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        columns[prompt.kind].append(index)
    columns["all"] = list(range(len(prompts)))

    def row(name: str, cells: Sequence[str]) -> None:
        print(f"{name:58}" + "".join(f"{cell:>12}" for cell in cells))

    def chosen(side: str, indices: Sequence[int]) -> list[Run]:
        return [runs[side][i] for i in indices]

    row("tokens/s", list(columns))
    for side in SIDES:
        row(side, [f"{rate(chosen(side, i)):.0f}" for i in columns.values()])
    for side, base in RATIOS:
        ratios = [rate(chosen(side, i)) / rate(chosen(base, i)) for i in columns.values()]
        row(f"{side} / {base}", [f"{ratio:.2f}" for ratio in ratios])
    for side in (FIXED, ADAPTIVE, LOOKUP):
        lengths = [acceptance_length(chosen(side, i)) for i in columns.values()]
        row(f"acceptance length, {side}", [f"{length:.2f}" for length in lengths])


def print_prompts(prompts: Sequence[Prompt], runs: dict[str, list[Run]]) -> None:
    """Rates by prompt."""
    print(f"\n{'tokens/s by prompt':28}" + "".join(f"{side:>31}" for side in SIDES))
    for index, prompt in enumerate(prompts):
        cells = "".join(f"{runs[side][index].rate:31.0f}" for side in SIDES)
        length = acceptance_length([runs[FIXED][index]])
        print(f"{prompt.name[:27]:28}{cells}   acceptance length {length:.2f}")


def print_verdict(
    prompts: Sequence[Prompt],
    runs: dict[str, list[Run]],
    costs: StepCosts,
    num_rows: Sequence[Sequence[int]],
) -> None:
    """The worst prompts, and how much of what acceptance and costs predict was reached."""
    # An answer that ends at its first token says nothing about decoding.
    rows = [i for i, run in enumerate(runs[ALONE]) if len(run.token_ids) > 1]
    print(
        f"\ncosts in plain target steps: a draft step {costs.draft_step:.2f}; "
        f"verifying 1 draft token {costs.verify[1]:.2f}, "
        f"{len(costs.verify) - 1} of them {costs.verify[-1]:.2f}"
    )
    for side in (FIXED, ADAPTIVE):
        verified = num_rows if side == ADAPTIVE else None
        reached = [
            predicted_seconds(runs, side, i, costs, verified and verified[i])
            / runs[side][i].seconds
            for i in rows
        ]
        print(f"{side}: {min(reached):.2f} to {max(reached):.2f} of the predicted rate")
    for side in (ADAPTIVE, LOOKUP):
        ratios = {i: runs[side][i].rate / runs[ALONE][i].rate for i in rows}
        worst = min(ratios, key=ratios.__getitem__)
        print(f"{side} / {ALONE}: {ratios[worst]:.2f} on the worst prompt, {prompts[worst].name}")
    good = [i for i in rows if acceptance_length([runs[FIXED][i]]) >= 2.6]
    if good:
        ratio = rate([runs[FIXED][i] for i in good]) / rate([runs[ALONE][i] for i in good])
        print(f"{FIXED} / {ALONE}: {ratio:.2f} on {len(good)} prompts of acceptance length >= 2.6")
    for side in SIDES:
        names = [
            prompt.name
            for prompt, run, alone in zip(prompts, runs[side], runs[ALONE], strict=True)
            if run.token_ids != alone.token_ids
        ]
        if names:
            print(f"{side} differs from {ALONE} on: {', '.join(names)}")


def predicted_seconds(
    runs: dict[str, list[Run]],
    side: str,
    index: int,
    costs: StepCosts,
    num_rows: Sequence[int] | None,
) -> float:
    """What the steps and draft tokens of a run should take, by the target's time per token.

    num_rows  those that the target verified, step by step; None where K was the same in all
    """
    alone, statistics = runs[ALONE][index], runs[side][index].statistics
    assert statistics is not None
    if num_rows is None:
        mean = statistics.total_draft_tokens / statistics.num_steps
        verify = float(np.interp(mean, range(len(costs.verify)), costs.verify))
        verify *= statistics.num_steps
    else:
        verify = sum(costs.verify[n - 1] for n in num_rows)
    extra = statistics.total_draft_tokens * costs.draft_step + verify
    return alone.seconds / len(alone.token_ids) * (statistics.num_steps + extra)


def rate(runs: Sequence[Run]) -> float:
    """Output tokens per second over all runs."""
    return sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)


def acceptance_length(runs: Sequence[Run]) -> float:
    """Mean tokens that a step of the target emits."""
    counts = [run.statistics for run in runs if run.statistics is not None]
    accepted = sum(c.total_accepted_draft_tokens for c in counts)
    return 1 + accepted / sum(c.num_steps for c in counts)


if __name__ == "__main__":
    run_command(main)
