"""What a benchmark asks: prompts of a set, cut, lengthened and framed as it is to ask them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specpipe.evaluate import prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specpipe.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Which prompts are asked, and how long they and their answers are.

    source                    a set by its name, or a file
    limit                     so many prompts at most, the first; None: all
    input_tokens, max_tokens  a number or a range, as in 128 or 64-256; None: as the prompts say
    is_chat                   whether each prompt is a user's message
    """

    source: str
    limit: int | None = None
    input_tokens: str | None = None
    max_tokens: str | None = None
    is_chat: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns what shapes the questions, as it was given."""
        return {
            "chat": self.is_chat,
            "limit": self.limit,
            "input_tokens": self.input_tokens,
            "max_tokens": self.max_tokens,
        }

    def load(self, tokenizer: Tokenizer | None, *, seed: int) -> prompts.PromptSet:
        """Returns the prompts; `seed` draws lengths, `input_tokens` needs the tokenizer."""
        loaded = prompts.load_prompts(self.source, limit=self.limit)
        chosen: Sequence[prompts.Prompt] = loaded.prompts
        if self.input_tokens is not None:
            assert tokenizer is not None
            lengths = prompts.Lengths.parse(self.input_tokens)
            chosen = prompts.with_lengths(chosen, lengths, tokenizer, seed=seed)
        if self.max_tokens is not None:
            lengths = prompts.Lengths.parse(self.max_tokens)
            chosen = prompts.with_max_tokens(chosen, lengths, seed=seed)
        if self.is_chat:
            chosen = prompts.as_messages(chosen)
        return prompts.PromptSet(loaded.source, tuple(chosen))
