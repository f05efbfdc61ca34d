"""A pair in this process, without Triton; one thread steps it for all that ask."""

from __future__ import annotations

import dataclasses
import queue
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specpipe.errors import CutStream, RequestError, ServerError
from specpipe.evaluate.endpoints.base import Piece, Question, Usage
from specpipe.runtimes.pair.pair import Pair
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION
from specpipe.runtimes.runtime import load_runtime
from specpipe.speculative.request import Chunk, Request
from specpipe.triton.loop import PairLoop
from specpipe.triton.repository.contents import load_tokenizer
from specpipe.triton.serving.request_tokenizer import RequestTokenizer


class InProcess:
    """Questions for a pair; it is closed with this endpoint."""

    name = "in process"

    def __init__(self, pair: Pair, tokenizer: RequestTokenizer) -> None:
        self._tokenizer = tokenizer
        # A fault of the pair fails what was asked, and not this process.
        self._loop = PairLoop(pair, on_fault=lambda: None)

    @classmethod
    def load(cls, repository: Path, **options: Any) -> InProcess:
        """Loads the pair of a built repository; options replace those that it was packaged with."""
        folder = repository / SPECULATIVE / VERSION
        tokenizer = load_tokenizer(repository)
        packaged = read_pair(repository)
        pair = load_runtime(packaged.runtime).load_pair(
            folder / "draft",
            folder / "target",
            dataclasses.replace(packaged.options, **options),
            tokenizer.detokenizer,
            tokenizer.guides,
        )
        return cls(pair, tokenizer)

    def stream(self, question: Question) -> Iterator[Piece]:
        """Yields one piece for each step that lets something out, with its token ids."""
        arrived: queue.SimpleQueue[Chunk | RequestError] = queue.SimpleQueue()
        request = self._request(question)
        self._loop.submit(request, on_chunk=arrived.put, on_refusal=arrived.put)
        is_open = True
        try:
            while is_open:
                chunk = arrived.get()
                is_open = isinstance(chunk, Chunk) and chunk.finish_reason is None
                if isinstance(chunk, RequestError):
                    raise chunk
                if chunk.finish_reason == "error":
                    raise ServerError(f"the request failed: {chunk.error}")
                if chunk.finish_reason == "cancelled":
                    raise CutStream("the pair was closed before the end of the answer")
                if chunk.text or chunk.token_ids or not is_open:
                    yield _piece(chunk)
        finally:
            if is_open:
                self._loop.cancel(request.request_id)

    def close(self) -> None:
        """Ends the loop and the pair; questions that are still open end as cancelled."""
        self._loop.close()

    def _request(self, question: Question) -> Request:
        return Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=self._prompt(question),
            max_tokens=question.max_tokens,
            sampling=question.sampling,
            num_draft_tokens=question.num_draft_tokens,
            end_token_ids=frozenset() if question.ignores_end else self._tokenizer.end_token_ids,
            keeps_end=question.returns_ids,
            stop_strings=question.stop_strings,
            num_top_log_probs=question.num_top_log_probs,
            starts_text=question.starts_text or question.messages is not None,
        )

    def _prompt(self, question: Question) -> tuple[int, ...]:
        if question.token_ids is not None:
            return question.token_ids
        if question.messages is not None:
            messages = [dict(message) for message in question.messages]
            return tuple(self._tokenizer.encode_messages(messages))
        assert question.text is not None
        return tuple(self._tokenizer.encode(question.text))


def _piece(chunk: Chunk) -> Piece:
    return Piece(
        text=chunk.text,
        token_ids=chunk.token_ids,
        top_log_probs=chunk.top_log_probs,
        num_tokens=len(chunk.token_ids),
        finish_reason=chunk.finish_reason,
        usage=None if chunk.statistics is None else Usage.from_statistics(chunk.statistics),
    )
