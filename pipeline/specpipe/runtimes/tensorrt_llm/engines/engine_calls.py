"""What one request to the Triton model `draft` or `target` says, and what its answer means.

A round is one request to each, and every request is new to its engine: it sees the earlier output
as prompt. So what a client asked for is put anew for each of them:

end ids     The target is told of none (-1), so that it emits an end id like any token, and
            `RequestState` ends the request. Told of it, the engine would stop without emitting it,
            and an answer that is shorter than asked for could mean a rejected draft token just as
            well (TensorRT-LLM, cpp/tensorrt_llm/kernels/speculativeDecoding/
            externalDraftTokensKernels.cu, samplingTopKKernels.cu: the length does not grow at an
            end id). The draft is told of one: what it saves costs no token.
min_tokens  Until then all end ids are banned as bad words, and no request asks for more than what
            is left of it. The engine's own min_tokens bans one end id alone, and without one it
            writes outside its logits (kernels/penaltyKernels.cu).
seed        Each request gets a seed of its own, from the client's seed and the position. With one
            seed for all, every round would draw its first token by the same random number.
stop words  Are searched for in the text, and never sent.
bad words   Are sent as they are: the engine looks for their beginnings in its prompt too, and
            ignores ids that it does not have (kernels/banBadWords.cu). Ids that no tokenizer entry
            uses go with them.

Sampling settings that the engine cannot honour, or not as the other runtimes do, are refused by
name; see `check_request`. What was read: TensorRT-LLM 1.x as of the commits in contract.py,
cpp/tensorrt_llm/{layers,kernels,batch_manager}. None of it was run against TensorRT-LLM.

V is the vocabulary, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specpipe.errors import RequestError, SpecpipeError
from specpipe.runtimes.tensorrt_llm.engines import contract
from specpipe.runtimes.tensorrt_llm.engines.engine_config import AcceptTest
from specpipe.speculative.noise import MASK_32, Purpose, philox
from specpipe.speculative.request import Request

BackendTensors = Mapping[str, npt.NDArray[Any]]

NO_END_ID = -1
"""What TensorRT-LLM's own benchmarks send to ignore end ids."""

MAX_TOP_K = 1024
"""A larger top_k is cut to this, silently (kernels/samplingTopKKernels.h)."""

_OUTPUTS = ("output_ids", "sequence_length")
_LOGITS_OUTPUT = "generation_logits"

_INPUTS = {tensor.name: tensor for tensor in contract.inputs("1.0.0")}
_NUMPY_DTYPES: dict[str, type[Any]] = {
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}


class EngineCallError(SpecpipeError):
    """The Triton model of an engine answered with an error, or with what it must not."""


class EngineModel(Protocol):
    """The Triton model of one engine. Requests of different ids may run at once."""

    def generate(
        self, request_id: str, tensors: BackendTensors, outputs: Sequence[str]
    ) -> Iterator[BackendTensors]:
        """Runs one request; its responses as they come, one unless it streams.

        Raises EngineCallError. To be read to its end.
        """

    def stop(self, request_id: str) -> None:
        """Cancels the request that runs under this id, if one does; its responses end soon."""


@dataclass(frozen=True)
class EngineCall:
    """One request: its input tensors, batch dimension included, and the outputs to ask for."""

    tensors: BackendTensors
    outputs: tuple[str, ...] = _OUTPUTS


@dataclass(frozen=True)
class DraftTokens:
    """What the draft proposes; logits [K, V] when acceptance compares them."""

    token_ids: tuple[int, ...] = ()
    logits: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class TargetTokens:
    """What a target that was given K draft tokens lets out: one token or more, all of them its own.

    Under load TensorRT-LLM's scheduler drops draft tokens, some or all, without a word
    (cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp, fitDraftTokens); with none left the
    target answers as many tokens as it was asked for, by itself. The tokens are what it would have
    answered anyway. Those that begin the draft's are accepted; where not just one more follows, the
    other draft tokens were not verified, or cannot be told from such.
    """

    token_ids: list[int]
    num_accepted: int
    num_unverified: int


def check_request(request: Request) -> None:
    """Raises RequestError for a sampling setting that the engines cannot honour.

    presence_penalty and frequency_penalty: the engine counts the prompt's tokens too, and subtracts
    after the temperature (kernels/penaltyKernels.cu), so that they would mean something else than
    everywhere else. repetition_penalty counts the prompt everywhere, and a factor is the same
    before and after the temperature.
    min_p: no input of the Triton backend has it.
    return_log_probs: of verified draft tokens the engine keeps none (layers/
    externalDraftTokensLayer.cpp).
    """
    sampling = request.sampling
    counts_prompt = "TensorRT-LLM would count the prompt's tokens too"
    for name, is_asked_for, reason in (
        ("presence_penalty", sampling.presence_penalty != 0.0, counts_prompt),
        ("frequency_penalty", sampling.frequency_penalty != 0.0, counts_prompt),
        ("min_p", sampling.min_p > 0.0, "TensorRT-LLM's Triton backend does not have it"),
        (
            "return_log_probs",
            request.return_log_probs,
            "TensorRT-LLM has none for verified draft tokens",
        ),
    ):
        if is_asked_for:
            raise RequestError(
                f"{name} is not supported by runtime 'tensorrt_llm': {reason}; leave it out"
            )
    if sampling.top_k > MAX_TOP_K:
        raise RequestError(
            f"top_k is {sampling.top_k}; runtime 'tensorrt_llm' takes at most {MAX_TOP_K}"
        )


@dataclass(frozen=True, kw_only=True)
class EngineCalls:
    """Writes the engine requests of one client's request.

    Acceptance by logits: the engine takes a draft token with probability min(1, p / q), where p is
    the target's probability under the request's sampling, and q the softmax of the logits that come
    with the draft token, else it samples from max(0, p - q) (layers/externalDraftTokensLayer.cpp).
    That keeps the target's distribution if the draft token was drawn from just that q: so the draft
    then samples at temperature 1 from all tokens, whatever the request says. Otherwise it drafts
    greedily: the target's own choice is most often its likeliest token.
    """

    request: Request
    acceptance: AcceptTest = "exact"
    unused_token_ids: tuple[int, ...] = ()

    @property
    def compares_logits(self) -> bool:
        """True when acceptance needs the draft's logits; a greedy target's choice is one token."""
        return self.acceptance == "logits" and not self.request.sampling.is_greedy

    def num_banned_end(self, num_output_tokens: int) -> int | None:
        """How many tokens may not be an end id, which one engine request may ask for at most.

        None when there is nothing to ban.
        """
        left = self.request.sampling.min_tokens - num_output_tokens
        return left if left > 0 and self.request.end_token_ids else None

    def draft(self, token_ids: Sequence[int], num_draft_tokens: int) -> EngineCall:
        """Asks the draft to continue token_ids."""
        call = _prompt(token_ids, num_draft_tokens)
        if not self.compares_logits:
            end_id = min(self.request.end_token_ids, default=NO_END_ID)
            call["end_id"] = _array("end_id", [end_id])
            call["runtime_top_k"] = _array("runtime_top_k", [1])
            return EngineCall(call | self._changed_scores(token_ids))
        call["end_id"] = _array("end_id", [NO_END_ID])
        call |= _random(
            top_k=0, top_p=1.0, temperature=1.0, seed=self._seed(token_ids, Purpose.DRAFT)
        )
        call["return_generation_logits"] = _array("return_generation_logits", [True])
        return EngineCall(call, (*_OUTPUTS, _LOGITS_OUTPUT))

    def read_draft(self, response: BackendTensors, num_draft_tokens: int) -> DraftTokens:
        """The draft tokens of the draft's response.

        Those that were drafted greedily end before an end id: after it there is nothing to draft,
        and the target emits it as its own token, if it does. Random ones are all proposed: to leave
        some out for what they are would change the distribution.
        """
        token_ids = read_tokens(response)[:num_draft_tokens]
        if self.compares_logits:
            logits = response.get(_LOGITS_OUTPUT)
            if logits is None:
                raise EngineCallError("the draft returned no generation_logits")
            rows = logits.reshape(-1, logits.shape[-1])
            return DraftTokens(tuple(token_ids), rows[: len(token_ids)])
        ends = self.request.end_token_ids
        num_kept = next((n for n, i in enumerate(token_ids) if i in ends), len(token_ids))
        return DraftTokens(tuple(token_ids[:num_kept]))

    def verify(self, token_ids: Sequence[int], drafted: DraftTokens) -> EngineCall:
        """Asks the target to verify draft tokens after token_ids; there must be some."""
        assert drafted.token_ids
        call = self._target(token_ids, len(drafted.token_ids) + 1)
        call["draft_input_ids"] = _array("draft_input_ids", drafted.token_ids)
        if drafted.logits is not None:
            call["draft_logits"] = drafted.logits[None]
        return EngineCall(call)

    def plain(self, token_ids: Sequence[int], num_tokens: int) -> EngineCall:
        """Asks the target to continue token_ids by itself, and to stream."""
        call = self._target(token_ids, num_tokens)
        call["streaming"] = _array("streaming", [True])
        return EngineCall(call)

    def _target(self, token_ids: Sequence[int], num_tokens: int) -> dict[str, npt.NDArray[Any]]:
        sampling = self.request.sampling
        call = {
            **_prompt(token_ids, num_tokens),
            "end_id": _array("end_id", [NO_END_ID]),
            **self._changed_scores(token_ids),
        }
        if sampling.is_greedy:
            call["runtime_top_k"] = _array("runtime_top_k", [1])
        else:
            call |= _random(
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                temperature=sampling.temperature,
                seed=self._seed(token_ids, Purpose.TOKEN),
            )
        return call

    def _changed_scores(self, token_ids: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """The penalty, and what is banned."""
        sampling = self.request.sampling
        call = {}
        if sampling.repetition_penalty != 1.0:
            call["repetition_penalty"] = _array("repetition_penalty", [sampling.repetition_penalty])
        words = [*sampling.bad_words, *((i,) for i in self.unused_token_ids)]
        num_output_tokens = len(token_ids) - len(self.request.prompt_token_ids)
        if self.num_banned_end(num_output_tokens) is not None:
            words += [(i,) for i in sorted(self.request.end_token_ids)]
        if words:
            call["bad_words_list"] = _word_list(words)
        return call

    def _seed(self, token_ids: Sequence[int], purpose: Purpose) -> int:
        return step_seed(self.request.sampling.seed, len(token_ids), purpose)


def step_seed(seed: int, position: int, purpose: Purpose) -> int:
    """The seed, of 64 bits, of an engine request whose first token has this position."""
    counter = np.array([[0], [position & MASK_32], [position >> 32], [purpose]], np.uint64)
    key = np.array([[seed & MASK_32], [seed >> 32]], np.uint64)
    low, high = philox(counter, key)[:2, 0].tolist()
    return int(low | high << 32)


def stop_tensors() -> BackendTensors:
    """The inputs of a request that cancels; those that the model demands are not looked at."""
    values = {"input_ids": 0, "input_lengths": 1, "request_output_len": 1, "stop": True}
    return {name: _array(name, [value]) for name, value in values.items()}


def read_tokens(response: BackendTensors) -> list[int]:
    """The token ids of one response."""
    try:
        num_tokens = int(response["sequence_length"].reshape(-1)[0])
        token_ids: list[int] = response["output_ids"].reshape(-1)[:num_tokens].tolist()
    except (KeyError, IndexError) as exc:
        raise EngineCallError("a response has no output_ids and sequence_length") from exc
    return token_ids


def read_verified(response: BackendTensors, drafted: DraftTokens) -> TargetTokens:
    """Returns what the target lets out; EngineCallError where that cannot be the answer."""
    token_ids = read_tokens(response)
    num_drafted = len(drafted.token_ids)
    if not 0 < len(token_ids) <= num_drafted + 1:
        raise EngineCallError(
            f"the target was given {num_drafted} draft tokens and returned {len(token_ids)} "
            f"tokens, expected 1 to {num_drafted + 1}"
        )
    pairs = zip(token_ids, drafted.token_ids, strict=False)
    num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    is_verified = len(token_ids) == num_accepted + 1
    return TargetTokens(token_ids, num_accepted, 0 if is_verified else num_drafted - num_accepted)


def _prompt(token_ids: Sequence[int], num_tokens: int) -> dict[str, npt.NDArray[Any]]:
    return {
        "input_ids": _array("input_ids", token_ids),
        "input_lengths": _array("input_lengths", [len(token_ids)]),
        "request_output_len": _array("request_output_len", [num_tokens]),
        "exclude_input_in_output": _array("exclude_input_in_output", [True]),
    }


def _random(
    *, top_k: int, top_p: float, temperature: float, seed: int
) -> dict[str, npt.NDArray[Any]]:
    """Sampling; top_k and top_p always, since without either the engine takes the likeliest."""
    return {
        "runtime_top_k": _array("runtime_top_k", [top_k]),
        "runtime_top_p": _array("runtime_top_p", [top_p]),
        "temperature": _array("temperature", [temperature]),
        "seed": _array("seed", [seed]),
    }


def _array(name: str, values: Sequence[Any]) -> npt.NDArray[Any]:
    """The values as the tensor of that name, a batch of one."""
    return np.array([values], _NUMPY_DTYPES[_INPUTS[name].dtype])


def _word_list(words: Sequence[tuple[int, ...]]) -> npt.NDArray[Any]:
    """Words as [1, 2, N]: their ids one after the other, and where each ends, padded with -1."""
    token_ids = [i for word in words for i in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return _array("bad_words_list", [token_ids, ends + [-1] * (len(token_ids) - len(ends))])
