"""What every draft of a tuning is asked, and the pairs that answer it in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from specpipe.errors import ConfigError
from specpipe.evaluate.endpoints.base import Question
from specpipe.evaluate.prompts import Prompt, PromptSet, as_messages, load_prompts
from specpipe.evaluate.tune.acceptance import RoundCounts
from specpipe.evaluate.tune.outcome import TuneOptions
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION
from specpipe.runtimes.runtime import load_runtime
from specpipe.speculative.request import Request, Sampling
from specpipe.triton.repository.contents import load_tokenizer

_NO_TIME_LIMIT_S = 1e9


@dataclass(frozen=True)
class _Case:
    prompt: Prompt
    token_ids: tuple[int, ...]
    max_tokens: int


class TuneWorkload:
    """The prompts as the pair's own repository has them in tokens; others have that tokenizer."""

    def __init__(self, repository: Path, options: TuneOptions, max_draft_len: int) -> None:
        self._options, self._max_draft_len = options, max_draft_len
        self.prompts = _prompts(options)
        self.tokenizer = load_tokenizer(repository)
        self._max_seq_len = read_pair(repository).options.max_seq_len
        self._cases = [self._case(prompt) for prompt in self.prompts.prompts]
        self._sampling = Sampling(temperature=options.temperature)

    @property
    def context(self) -> int:
        """The tokens that a request has in the middle of its answer, of the median one."""
        middles = (len(case.token_ids) + case.max_tokens // 2 for case in self._cases)
        return min(int(median(middles)), self._max_seq_len - self._max_draft_len - 1)

    @property
    def longest_prompt(self) -> tuple[int, ...]:
        return max((case.token_ids for case in self._cases), key=len)

    def requests(self) -> list[Request]:
        return [
            Request(
                request_id=case.prompt.name,
                prompt_token_ids=case.token_ids,
                max_tokens=case.max_tokens,
                sampling=dataclasses.replace(self._sampling, seed=number),
                end_token_ids=self.tokenizer.end_token_ids,
            )
            for number, case in enumerate(self._cases)
        ]

    def questions(self, num_draft_tokens: int) -> list[Question]:
        return [
            Question(
                token_ids=case.token_ids,
                max_tokens=case.max_tokens,
                num_draft_tokens=num_draft_tokens,
                sampling=dataclasses.replace(self._sampling, seed=seed),
            )
            for seed, case in enumerate(self._cases)
        ]

    def by_kind(self, rounds: Mapping[str, RoundCounts]) -> dict[str, list[RoundCounts]]:
        """The rounds of each prompt, by the kind of the prompt."""
        by_kind: dict[str, list[RoundCounts]] = {}
        for case in self._cases:
            by_kind.setdefault(case.prompt.kind, []).append(rounds[case.prompt.name])
        return by_kind

    def load(self, repository: Path) -> EnginePair:
        """The pair with K as asked, drafted by the draft, and for as long as it takes."""
        packaged = read_pair(repository)
        folder = repository / SPECULATIVE / VERSION
        pair = load_runtime(packaged.runtime).load_pair(
            folder / "draft",
            folder / "target",
            dataclasses.replace(
                packaged.options,
                num_draft_tokens=self._max_draft_len,
                adaptive=False,
                schedule=(),
                prompt_lookup=False,
                request_timeout_s=_NO_TIME_LIMIT_S,
            ),
            self.tokenizer.detokenizer,
        )
        assert isinstance(pair, EnginePair)
        return pair

    def _case(self, prompt: Prompt) -> _Case:
        if prompt.messages is not None:
            token_ids = self.tokenizer.encode_messages([dict(m) for m in prompt.messages])
        else:
            assert prompt.text is not None
            token_ids = self.tokenizer.encode(prompt.text)
        room = self._max_seq_len - len(token_ids)
        if room < 1:
            raise ConfigError(
                f"{self.prompts.source}: prompt {prompt.name} has {len(token_ids)} tokens; prompt "
                f"and answer together may have {self._max_seq_len} (engine.max_seq_len)"
            )
        max_tokens = min(prompt.max_tokens or self._options.max_tokens, room)
        return _Case(prompt, tuple(token_ids), max_tokens)


def _prompts(options: TuneOptions) -> PromptSet:
    read = load_prompts(options.prompts, limit=options.limit)
    return PromptSet(read.source, as_messages(read.prompts)) if options.is_chat else read
