"""Room for sequences: whether a request finds any, how it gets more, and who gives way.

An engine without pages has to give a sequence all that it may ever need from the beginning. Where
it has pages a sequence takes them as it grows: many more requests run, and now and then too many.
"""

from __future__ import annotations

from specpipe.runtimes.pair.engine import Engine, SequenceId
from specpipe.runtimes.pair.pair import KVUse
from specpipe.speculative.request import Request


class Room:
    """The memory of one engine; a request may have max_seq_len tokens in it."""

    AHEAD = 16
    """Tokens that a request, and each of those that run, should find room for when it starts: else
    it would soon give way again. Simulated: benchmarks/notes.md, "Room to start".
    """

    def __init__(self, engine: Engine, *, max_seq_len: int, reuses: bool) -> None:
        self._engine, self._max_seq_len, self._reuses = engine, max_seq_len, reuses
        self._refused: Request | None = None
        self._num_free_then = 0
        self.num_reused_tokens = 0
        """Tokens of prompts that were found cached, so far."""

    def holds(self, request: Request, num_tokens: int, *, num_beside: int) -> bool:
        """Returns whether a request finds room for a sequence that begins with so many tokens, of
        which none need be cached.

        num_beside  positions that others are about to take
        """
        return self._holds(self._first(request, num_tokens), num_beside)

    def holds_any(self, *, num_beside: int) -> bool:
        """Returns whether `holds` is true of any request."""
        return self._holds(self._max_seq_len, num_beside)

    def _holds(self, num_first: int, num_beside: int) -> bool:
        return self._engine.can_admit(num_first) and self._leaves(num_beside, num_first)

    def make(
        self, request: Request, num_tokens: int, *, num_beside: int, reuses: bool = True
    ) -> SequenceId | None:
        """Makes the sequence of a request whose text has so many tokens, or returns None.

        It begins with what is cached of the prompt, unless reuses says that it has to be read.
        """
        engine, pages = self._engine, self._engine.pages
        num_first = self._first(request, num_tokens)
        if not engine.can_admit(1 if pages else num_first):
            return None
        prompt = request.prompt_token_ids
        if pages is None:
            return engine.allocate(prompt_length=len(prompt), max_tokens=num_first)
        num_free = pages.capacity_tokens - pages.num_held_tokens - num_beside
        if request is self._refused and num_free <= self._num_free_then:
            return None  # soon said: it is asked before each step
        # So that what is cached of the prompt is found before it has to make room for it.
        sequence = engine.allocate(prompt_length=len(prompt), max_tokens=1)
        num_reused = 0
        if reuses and self._reuses:
            num_reused = pages.reuse(sequence, prompt[: self._max_seq_len], request.cache_salt)
        is_enough = self._leaves(num_beside, num_first - num_reused)
        if is_enough and pages.grow(sequence, num_first):
            self.num_reused_tokens += num_reused
            return sequence
        engine.free(sequence)
        self._refused, self._num_free_then = request, num_free
        return None

    def grow(self, sequence: SequenceId, num_tokens: int) -> bool:
        """Lets a sequence have so many tokens; False where there is no room for them."""
        pages = self._engine.pages
        return pages is None or pages.grow(sequence, num_tokens)

    def use(self, num_tokens: int) -> KVUse:
        """Returns how full the engine is; num_tokens: those that its sequences have cached."""
        pages = self._engine.pages
        if pages is None:
            return KVUse(num_tokens, self._engine.max_batch_size * self._engine.max_seq_len)
        return KVUse(
            pages.num_held_tokens,
            pages.capacity_tokens,
            num_cached_tokens=pages.num_cached_tokens,
            num_reused_tokens=self.num_reused_tokens,
        )

    def _leaves(self, num_beside: int, num_taken: int) -> bool:
        """Returns whether others find so many positions, when so many are taken."""
        pages = self._engine.pages
        if pages is None or not num_beside:
            return True
        return pages.capacity_tokens - pages.num_held_tokens - num_taken >= num_beside

    def _first(self, request: Request, num_tokens: int) -> int:
        """Returns the tokens that a sequence has room for from the beginning."""
        if self._engine.pages is None:
            return self._most(request)
        return min(num_tokens + self.AHEAD, self._most(request))

    def _most(self, request: Request) -> int:
        """Returns the most tokens that the engine may have to hold for a request."""
        return min(len(request.prompt_token_ids) + request.max_tokens, self._max_seq_len)
