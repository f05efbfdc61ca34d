"""The guides of one tokenizer: checked where requests come in, compiled where they run."""

from __future__ import annotations

import dataclasses
from functools import cached_property, lru_cache
from typing import Protocol

from llguidance import LLMatcher, LLTokenizer

from specpipe.checkpoints.limits import FileLimits
from specpipe.errors import RequestError, show
from specpipe.speculative.guide import Guide
from specpipe.text.guides import grammar
from specpipe.text.guides.matcher import GuideMatcher
from specpipe.text.guides.vocabulary import SPECIAL, make_tokenizer
from specpipe.text.worker import Worker

FIELD = "guided_decoding_guide"
"""The ensemble's input."""

_VOCABULARY_S = 30.0  # of the processor, at most, until a process can check
_CACHED = 128  # guides that are kept compiled, and as many that are known to be right


class Spelling(Protocol):
    """What guides need of a tokenizer; `specpipe.text.tokenizer.Tokenizer` has it."""

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    @property
    def spells_tokens(self) -> bool: ...

    def tokens(self) -> dict[int, str]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode_fragment(self, text: str) -> list[int]: ...


class Guides:
    """Checks, compiles and follows guides; threads may share it.

    What takes long, the vocabulary and the process that checks, is made when first needed.
    """

    def __init__(self, tokenizer: Spelling, limits: FileLimits) -> None:
        self._spelling, self._limits = tokenizer, limits
        self._checked = lru_cache(maxsize=_CACHED)(self._check)
        self._compiled = lru_cache(maxsize=_CACHED)(self._compile)

    def check(self, guide: Guide, field: str = FIELD) -> None:
        """Raises RequestError, which begins with the field, for a guide that cannot be followed.

        It is compiled in a process with limits of time and memory; of a schema, the path to what is
        at fault is named. Nothing is fetched, wherever a `$ref` points.
        """
        num_bytes = len(guide.text.encode(errors="surrogatepass"))
        most = self._limits.max_guide_bytes
        if num_bytes > most:
            raise RequestError(
                f"{field} has {num_bytes} bytes, expected at most {most} "
                "(serving.limits.max_guide_bytes)"
            )
        self._check_spelling(field)
        if fault := self._checked(guide):
            raise RequestError(f"{field}: {fault}")

    def compile(self, guide: Guide) -> None:
        """Makes the next `matcher` of this guide cheap; raises RequestError as `check` does."""
        self._check_spelling(FIELD)
        self._compiled(guide)

    def matcher(
        self, guide: Guide, *, end_token_ids: frozenset[int], vocab_size: int
    ) -> GuideMatcher:
        """Returns a matcher at the start of an output."""
        return GuideMatcher(
            self._compiled(guide),
            end_id=len(self._vocabulary) - 1,
            end_token_ids=end_token_ids,
            vocab_size=vocab_size,
        )

    def _check_spelling(self, field: str) -> None:
        if not self._spelling.spells_tokens:
            raise RequestError(f"{field}: the bytes of this model's tokens depend on other tokens")

    def _check(self, guide: Guide) -> str | None:
        answer = self._worker.ask(dataclasses.asdict(guide))
        if answer.fault is not None:
            return answer.fault
        if answer.result is None:
            return None
        path, reason = show(answer.result["path"]), answer.result["reason"]
        return f"{path}: {reason}" if path else str(reason)

    def _compile(self, guide: Guide) -> LLMatcher:
        try:
            return grammar.compiled(guide, self._tokenizer)
        except grammar.GuideFault as exc:
            raise RequestError(f"{FIELD}: {exc}") from exc

    @cached_property
    def _worker(self) -> Worker:
        return Worker(
            "specpipe.text.guides.checker",
            {
                "limits": "guide",
                "setup_seconds": _VOCABULARY_S,
                "seconds": self._limits.guide_seconds,
                "memory_bytes": self._limits.guide_memory_bytes,
                "tokens": [token.decode("latin-1") for token in self._small_vocabulary()],
            },
        )

    def _small_vocabulary(self) -> list[bytes]:
        """Special tokens at their ids, since grammars may name those, and bytes for all others.

        Whether a guide compiles depends on no more, and a process is ready much sooner.
        """
        special = self._spelling.special_token_ids
        data = iter([bytes([byte]) for byte in range(256)])
        tokens = [
            token if i in special else next(data, b"")
            for i, token in enumerate(self._vocabulary[:-1])
        ]
        return [*tokens, *data, self._vocabulary[-1]]

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return make_tokenizer(self._vocabulary, self._spelling.encode_fragment)

    @cached_property
    def _vocabulary(self) -> list[bytes]:
        """The bytes of every token, and of one more that ends a text.

        Which ids end an answer is for each request to say.
        """
        spelling = self._spelling
        num_ids = max(spelling.tokens(), default=-1) + 1
        return [
            *(
                (SPECIAL if i in spelling.special_token_ids else b"") + spelling.token_bytes(i)
                for i in range(num_ids)
            ),
            SPECIAL + b"<end>",
        ]
