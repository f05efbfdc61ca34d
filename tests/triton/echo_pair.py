"""A pair that repeats its prompt, two tokens a step: what Triton tests need without weights.

Every token has the log-probability -0.5, and the ids after it are the next likeliest. Words in the
prompt make it misbehave: "<refuse>" and "<late>" at submit, "<fail N>" that request alone after N
steps, "<crash N>" the pair itself, "<slow>" 50 ms a step. "<until FILE>" lets nothing follow the
first chunk until there is such a file.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from specpipe.errors import RequestError
from specpipe.runtimes.pair.pair import DetokenizerFactory, Occupancy, PairOptions
from specpipe.speculative.request import Chunk, Request, RequestLimits, TopLogProbs
from specpipe.speculative.state import RequestState
from specpipe.triton.repository import contents


class EchoPair:
    """`first` is the token of the prompt with which an answer begins, so that versions differ."""

    first = 0

    def __init__(self, options: PairOptions, detokenizer: DetokenizerFactory) -> None:
        self._detokenizer = detokenizer
        self._limits = RequestLimits(
            max_num_draft_tokens=options.num_draft_tokens,
            max_seq_len=options.max_seq_len,
            draft_max_seq_len=options.max_seq_len,
            vocab_size=1 << 20,
        )
        self._running: dict[str, tuple[RequestState, str]] = {}
        self._cancelled: list[str] = []
        self.num_steps = 0

    def submit(self, request: Request) -> str:
        self._limits.check(request)
        decoder = self._detokenizer((), skip_special_tokens=True)
        prompt = decoder.append(request.prompt_token_ids) + decoder.flush()
        if "<refuse>" in prompt:
            raise RequestError("the queue is full (0 requests)")
        if "<late>" in prompt:
            raise RequestError("the request waited 2.0 s without being started")
        detokenizer = self._detokenizer(
            request.text_token_ids, skip_special_tokens=request.skip_special_tokens
        )
        state = RequestState(request, self._limits, detokenizer)
        self._running[request.request_id] = (state, prompt)
        return request.request_id

    def cancel(self, request_id: str) -> None:
        if request_id in self._running and request_id not in self._cancelled:
            self._cancelled.append(request_id)

    def has_work(self) -> bool:
        return bool(self._running)

    def prepare(self, request: Request) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...

    def occupancy(self) -> Occupancy:
        return Occupancy(num_running=len(self._running))

    def step(self) -> list[Chunk]:
        self.num_steps += 1
        chunks = [self._running[id_][0].finish("cancelled") for id_ in self._cancelled]
        for request_id in self._cancelled:
            del self._running[request_id]
        self._cancelled.clear()
        for state, prompt in list(self._running.values()):
            if _is_held(state, prompt):
                time.sleep(0.01)
                continue
            chunks.append(self._step(state, prompt))
            if state.is_finished:
                del self._running[state.request.request_id]
        return chunks

    def _step(self, state: RequestState, prompt: str) -> Chunk:
        if "<slow>" in prompt:
            time.sleep(0.05)
        if _is_due(state, prompt, "crash"):
            raise ZeroDivisionError("as asked")
        if _is_due(state, prompt, "fail"):
            return state.finish("error", "a target row is NaN")
        request = state.request
        if num_unscored := state.num_unscored_tokens:
            scored = _likeliest(request, request.prompt_token_ids[1:])
            state.score_prompt([-0.5] * num_unscored, scored)
        if request.max_tokens == 0:
            return state.finish("length")
        num_draft_tokens = min(state.drafts.next_num_draft_tokens(), 1)
        ids = request.prompt_token_ids
        first = state.num_output_tokens + self.first
        tokens = [ids[(first + i) % len(ids)] for i in range(num_draft_tokens + 1)]
        log_probs = [-0.5] * len(tokens) if request.return_log_probs else ()
        top_log_probs = _likeliest(request, tokens)
        return state.accept(tokens, log_probs, top_log_probs, num_draft_tokens=num_draft_tokens)


def _likeliest(request: Request, token_ids: Sequence[int]) -> list[TopLogProbs]:
    count = request.num_top_log_probs
    return [tuple((i + n, -0.5 - n) for n in range(count)) for i in token_ids if count]


def _is_due(state: RequestState, prompt: str, what: str) -> bool:
    asked = re.search(rf"<{what} (\d+)>", prompt)
    return asked is not None and state.counts.num_steps == int(asked[1])


def _is_held(state: RequestState, prompt: str) -> bool:
    asked = re.search("<until ([^>]+)>", prompt)
    return asked is not None and state.counts.num_steps > 0 and not Path(asked[1]).exists()


class EchoRuntime:
    def load_pair(
        self,
        draft: Path,
        target: Path,
        options: PairOptions,
        detokenizer: DetokenizerFactory,
        guides: object = None,
    ) -> EchoPair:
        return EchoPair(options, detokenizer)


def register(*, first: int = 0) -> None:
    """Makes this process load an EchoPair, whatever runtime pair.json names."""
    EchoPair.first = first
    contents.load_runtime = lambda name: EchoRuntime()  # type: ignore[assignment,return-value]
