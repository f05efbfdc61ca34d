"""An upstream without a server: it answers as it is told, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specpipe.speculative.request import Statistics
from specpipe.triton.client.completion import Completion

Step = Completion | Exception | float
"""A chunk, a failure, or a pause in seconds."""

Reply = Callable[[Mapping[str, Any]], Iterable[Step]]

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}
"""What an answer of two `pieces` comes to."""


def statistics(num_input_tokens: int, num_output_tokens: int, **counts: int) -> Statistics:
    return Statistics(
        num_input_tokens=num_input_tokens,
        num_output_tokens=num_output_tokens,
        num_steps=num_output_tokens,
        total_draft_tokens=4,
        total_accepted_draft_tokens=2,
        acceptance_rate=0.5,
        seed_used=7,
        **counts,
    )


def pieces(*texts: str, reason: str = "stop", num_input_tokens: int = 3) -> Reply:
    """An answer in those pieces, or of all of them at once; each is one token."""

    def reply(inputs: Mapping[str, Any]) -> Iterable[Step]:
        token_ids = tuple(range(100, 100 + len(texts)))
        parts = [(text, (token_id,)) for text, token_id in zip(texts, token_ids, strict=True)]
        if not inputs["stream"]:
            parts = [("".join(texts), token_ids)]
        for index, (text, ids) in enumerate(parts):
            is_last = index == len(parts) - 1
            num_prompt_log_probs = 0
            if index == 0 and inputs.get("return_prompt_log_probs"):
                num_prompt_log_probs = len(inputs.get("input_ids", "x")) - 1
            yield Completion(
                text=text,
                token_ids=ids if inputs.get("return_token_ids") else (),
                log_probs=(-1.0,) * len(ids) if inputs.get("return_log_probs") else (),
                prompt_log_probs=(-1.0,) * num_prompt_log_probs,
                finish_reason=reason if is_last else None,  # type: ignore[arg-type]
                statistics=statistics(num_input_tokens, len(texts)) if is_last else None,
            )

    return reply


@dataclass
class FakeUpstream:
    reply: Reply = field(default_factory=lambda: pieces("Hel", "lo"))
    asked: list[dict[str, Any]] = field(default_factory=list)
    sticky_keys: list[str] = field(default_factory=list)
    num_closed: int = 0
    """Answers that were closed before their end."""
    is_well: bool = True

    async def answer(
        self, inputs: Mapping[str, Any], *, sticky_key: str = ""
    ) -> AsyncGenerator[Completion, None]:
        self.asked.append(dict(inputs))
        self.sticky_keys.append(sticky_key)
        is_over = False
        try:
            for step in self.reply(inputs):
                if isinstance(step, Exception):
                    is_over = True
                    raise step
                # Waiting is what every server makes us do.
                await asyncio.sleep(step if isinstance(step, float) else 0)
                if isinstance(step, Completion):
                    yield step
            is_over = True
        finally:
            self.num_closed += not is_over

    async def is_ready(self) -> bool:
        return self.is_well

    async def close(self) -> None:
        pass
