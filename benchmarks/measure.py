"""What the benchmarks of this folder share: the built pair, the prompts, one request in process."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specpipe.build.repositories import built_repository
from specpipe.config.sections import PipelineConfig
from specpipe.runtimes.pair.pair import Pair
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.runtime import load_runtime
from specpipe.speculative.request import Request, Statistics
from specpipe.text.tokenizer import Tokenizer
from specpipe.triton import repository

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
PROMPTS = ROOT / "benchmarks" / "prompts.jsonl"


@dataclass(frozen=True)
class Prompt:
    """A line of a prompts file."""

    name: str
    kind: str
    prompt: str


@dataclass(frozen=True)
class Run:
    """One answer."""

    seconds: float
    token_ids: tuple[int, ...]
    statistics: Statistics | None = None

    @property
    def rate(self) -> float:
        """Output tokens per second, the prompt's prefill included."""
        return len(self.token_ids) / self.seconds


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Reads a JSON Lines file of prompts."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines][:limit]


def load_tokenizer(config: PipelineConfig) -> Tokenizer:
    """The tokenizer of a built pair."""
    return repository.load_tokenizer(built_repository(config))


def load_pair(config: PipelineConfig, tokenizer: Tokenizer, **options: int | bool) -> Pair:
    """A built pair in this process; options replace those that it was packaged with."""
    folder = built_repository(config) / "speculative" / "1"
    pair_file = PairFile.read(folder / "pair.json")
    return load_runtime(pair_file.runtime).load_pair(
        folder / "draft",
        folder / "target",
        dataclasses.replace(pair_file.options, **options),  # type: ignore[arg-type]
        tokenizer.detokenizer,
    )


def ask(
    pair: Pair,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    max_tokens: int,
    num_draft_tokens: int | None = None,
) -> Run:
    """Runs one greedy request to its end."""
    request = Request(
        request_id="benchmark",
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        num_draft_tokens=num_draft_tokens,
        end_token_ids=tokenizer.end_token_ids,
    )
    token_ids: list[int] = []
    start = time.perf_counter()
    pair.submit(request)
    while pair.has_work():
        for chunk in pair.step():
            token_ids += chunk.token_ids
    return Run(time.perf_counter() - start, tuple(token_ids), chunk.statistics)
