"""Chats: each turn's prompt is the text so far and a new message; all begin with one text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.load.loop import Answer, Clock, Loop, Prompt, gap_figures, percentiles


@dataclass(frozen=True)
class Chats:
    """What is asked: chats at once, each of so many turns."""

    streams: int
    turns: int
    max_tokens: int

    def loop(self, prompts: Sequence[Prompt], *, clock: Clock = time.perf_counter) -> ChatLoop:
        return ChatLoop(self, prompts, clock)


class ChatLoop(Loop):
    """The first prompt is what all chats begin with, the others are messages, in turn."""

    def __init__(self, load: Chats, prompts: Sequence[Prompt], clock: Clock) -> None:
        super().__init__(clock)
        self.load = load
        system, *self._messages = prompts
        self._ready: list[tuple[int, Prompt]] = [(i, system) for i in range(load.streams)]
        self._turns = [0] * load.streams
        self._chat_of: list[int] = []

    def ask(self) -> Answer | None:
        if not self._ready:
            return None
        chat, text = self._ready.pop(0)
        number = chat + self.load.streams * self._turns[chat]
        message = self._messages[number % len(self._messages)]
        self._chat_of.append(chat)
        return self._ask([*text, *message], self.load.max_tokens, self._clock())

    def _ended(self, answer: Answer) -> None:
        chat = self._chat_of[answer.number]
        self._turns[chat] += 1
        if self._turns[chat] < self.load.turns:
            self._ready.append((chat, [*answer.prompt, *answer.token_ids]))

    def figures(self) -> dict[str, Any]:
        """Returns first tokens, of all turns and of those behind the first."""
        self._check()
        first: list[float] = []
        later: list[float] = []
        seen: set[int] = set()
        for answer, chat in zip(self.answers, self._chat_of, strict=True):
            (later if chat in seen else first).append(answer.first_token_seconds)
            seen.add(chat)
        return {
            "num_answers": len(self.answers),
            "longest_prompt": max(len(answer.prompt) for answer in self.answers),
            "mean_first_token_ms": 1e3 * fmean([*first, *later]),
            "first_turn": percentiles(first),
            "later_turns": percentiles(later),
            **gap_figures(self.answers, float("-inf"), float("inf")),
        }
