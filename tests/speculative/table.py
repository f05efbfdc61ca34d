"""Models and detokenizers that are rules, so that a test can say what is right without running
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from specpipe.speculative.request import Request, RequestLimits
from specpipe.speculative.state import RequestState

VOCAB_SIZE = 104

Rule = Callable[[Sequence[int]], int]


def target_rule(context: Sequence[int]) -> int:
    return 4 + (3 * context[-1] + len(context)) % 97


def wrong_rule(context: Sequence[int]) -> int:
    return 4 + (3 * context[-1] + len(context) + 1) % 97


def half_rule(context: Sequence[int]) -> int:
    return target_rule(context) if len(context) % 2 == 0 else wrong_rule(context)


def random_rule(context: Sequence[int]) -> int:
    return int(np.random.default_rng([len(context), context[-1]]).integers(4, VOCAB_SIZE))


DRAFT_RULES: dict[str, Rule] = {
    "self": target_rule,
    "wrong": wrong_rule,
    "half": half_rule,
    "random": random_rule,
}


class TableModel:
    """Logits are 1 at the id that the rule names and 0 elsewhere."""

    def __init__(self, rule: Rule, vocab_size: int = VOCAB_SIZE) -> None:
        self.rule, self.vocab_size = rule, vocab_size
        self.num_logits_asked: list[int] = []

    def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray:
        self.num_logits_asked.append(num_rows)
        rows = np.zeros((num_rows, self.vocab_size))
        for row in range(num_rows):
            rows[row, self.rule(token_ids[: len(token_ids) - num_rows + row + 1])] = 1.0
        return rows


class ScriptedModel(TableModel):
    """Continues with the script, whatever the context; the id after its end is 5."""

    def __init__(self, prompt_length: int, script: Sequence[int]) -> None:
        super().__init__(lambda c: [*script, *[5] * 99][len(c) - prompt_length])


class NoisyModel:
    """Random logits that depend on the whole context; two of them with near seeds resemble each
    other.
    """

    def __init__(self, seed: int, *, vocab_size: int = 12, blend: float = 0.0) -> None:
        self.seed, self.vocab_size, self.blend = seed, vocab_size, blend

    def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray:
        rows = []
        for end in range(len(token_ids) - num_rows + 1, len(token_ids) + 1):
            key = [*token_ids[max(0, end - 3) : end], end]
            shared = np.random.default_rng(key).normal(size=self.vocab_size)
            own = np.random.default_rng([self.seed, *key]).normal(size=self.vocab_size)
            rows.append(2.0 * (shared + self.blend * own))
        return np.stack(rows)


class WordDetokenizer:
    """One token, one word: id 7 is "w7 "."""

    hidden_tokens: Mapping[int, str] = MappingProxyType({})
    prompt_text = ""

    def settle(self) -> str:
        return ""

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join(f"w{i} " for i in token_ids)

    def flush(self) -> str:
        return ""


class PieceDetokenizer:
    """Text by id from a table."""

    hidden_tokens: Mapping[int, str] = MappingProxyType({})
    prompt_text = ""

    def __init__(self, pieces: dict[int, str]) -> None:
        self.pieces = pieces

    def settle(self) -> str:
        return ""

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in token_ids)

    def flush(self) -> str:
        return ""


def new_state(request: Request, *, max_num_draft_tokens: int = 8, **limits: int) -> RequestState:
    return RequestState(
        request,
        RequestLimits(
            max_num_draft_tokens=max_num_draft_tokens,
            max_seq_len=limits.get("max_seq_len", 1000),
            draft_max_seq_len=limits.get("draft_max_seq_len", 1000),
            vocab_size=limits.get("vocab_size", VOCAB_SIZE),
        ),
        WordDetokenizer(),
    )


def request(name: str = "r", prompt_length: int = 3, **settings: Any) -> Request:
    """A request of 17 tokens after that many words, unless `settings` say otherwise."""
    prompt = tuple(range(4, 4 + prompt_length))
    return Request(**{"request_id": name, "prompt_token_ids": prompt, "max_tokens": 17, **settings})


def greedy_reference(r: Request) -> list[int]:
    """What a target over `target_rule` answers by itself."""
    context = list(r.prompt_token_ids)
    for _ in range(r.max_tokens):
        context.append(target_rule(context))
    return context[len(r.prompt_token_ids) :]
