"""A Triton that serves our ensemble or NVIDIA's, over gRPC or HTTP; or our `speculative` itself.

NVIDIA's ensemble lacks what ours added. A question that needs an input which the model does not
declare is refused here: over HTTP Triton would take it for a request parameter and say nothing.
"""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from specpipe.errors import RequestError, ServerError
from specpipe.evaluate.endpoints.base import Piece, Question, Usage, given_settings, read_piece
from specpipe.machine.web import fetch, parse_url, to_words
from specpipe.runtimes.repository_layout import ENSEMBLE, SPECULATIVE
from specpipe.speculative.request import Request
from specpipe.triton import serving
from specpipe.triton.client import Client
from specpipe.triton.client.completion import read_completion
from specpipe.triton.client.grpc_transport import last_cause, open_grpc
from specpipe.triton.secret import Signer
from specpipe.triton.serving.requests import Generation

_NVIDIAS_COUNTS = {"return_num_input_tokens": True, "return_num_output_tokens": True}
_NVIDIAS_ACCEPTANCE = {"return_perf_metrics": True}
_RETURN_IDS = "return_token_ids"
_USAGE = tuple(Usage.__dataclass_fields__)
_HISTOGRAM = "acceptance_histogram"  # the only one of them that is a list


class Triton:
    """The ensemble of one server; `url` is `http://host:port` or `grpc://host:port`.

    The id that ends an answer is not among those that the ensemble sends.
    """

    def __init__(self, url: str, *, model: str = ENSEMBLE, timeout_s: float = 600.0) -> None:
        self.name = url
        self._url, self._model, self._timeout_s = url, model, timeout_s
        self._client = Client(url, model=model, timeout_s=timeout_s)
        self._declared: frozenset[str] | None = None

    def stream(self, question: Question) -> Iterator[Piece]:
        """Yields one piece for each response that has text, and the last one."""
        inputs = self._inputs(question)
        self._client.require_streaming()
        for values in self._client.responses(inputs):
            piece = self._piece(values, has_ids=_RETURN_IDS in inputs)
            if piece.has_output or piece.usage is not None or piece.finish_reason is not None:
                yield piece

    def close(self) -> None:
        self._client.close()

    @property
    def takes_token_ids(self) -> bool:
        """Whether a prompt may be token ids, which NVIDIA's ensemble does not take."""
        return "input_ids" in self._declared_inputs()

    @property
    def is_nvidias(self) -> bool:
        """Whether the model takes no draft length, so that each server has one of its own."""
        return "num_draft_tokens" not in self._declared_inputs()

    def _declared_inputs(self) -> frozenset[str]:
        """Returns the names of the model's inputs, which are asked for once."""
        if self._declared is None:
            self._declared = _declared_inputs(self._url, self._model, self._timeout_s)
        return self._declared

    def _inputs(self, question: Question) -> dict[str, Any]:
        inputs = {"max_tokens": question.max_tokens, **given_settings(question)}
        if question.text is not None:
            inputs["text_input"] = question.text
        if question.messages is not None:
            inputs["messages"] = json.dumps([dict(message) for message in question.messages])
        if question.stop_strings:
            inputs["stop_words"] = list(question.stop_strings)
        if question.ignores_end:
            inputs["end_id"] = -1
        if question.token_ids is not None:
            inputs["input_ids"] = list(question.token_ids)
        if question.num_top_log_probs:
            inputs["num_top_log_probs"] = question.num_top_log_probs
        declared = self._declared_inputs()
        for name in inputs:
            if name not in declared:
                raise RequestError(f"{self._url}: {self._model} has no input {name}")
        if question.returns_ids and _RETURN_IDS in declared:
            inputs[_RETURN_IDS] = True
        if self.is_nvidias:
            counted = {**_NVIDIAS_COUNTS, **_NVIDIAS_ACCEPTANCE}
            inputs |= {name: value for name, value in counted.items() if name in declared}
        return {**inputs, "stream": True}

    def _piece(self, values: Mapping[str, Any], *, has_ids: bool) -> Piece:
        usage = _reported(values)
        num_tokens = None
        if self.is_nvidias:
            # In a stream each response of TensorRT-LLM's backend counts its own output tokens
            # (triton_backend/inflight_batcher_llm/src/model_instance_state.cc, 1.2).
            num_tokens = usage.pop("num_output_tokens", None)
        text = values.get("text_output", "")
        if isinstance(text, list) and all(isinstance(part, str) for part in text):
            text = "".join(text)
        fields = {
            "text": text,
            "num_tokens": num_tokens,
            "finish_reason": values.get("finish_reason"),
            "usage": usage or None,
        }
        if has_ids:
            completion = read_completion(values, self._url)
            token_ids, top_log_probs = completion.token_ids, completion.top_log_probs
            fields |= {"token_ids": token_ids, "top_log_probs": top_log_probs}
            fields["num_tokens"] = len(token_ids)
        return read_piece(fields, self._url)


class Speculative:
    """Our `speculative` itself, without the ensemble: token ids in, token ids out, over HTTP.

    `secret` is the server's, `end_token_ids` are the checkpoint's, which preprocessing knows else.
    """

    def __init__(
        self,
        url: str,
        *,
        secret: str,
        end_token_ids: frozenset[int] = frozenset(),
        timeout_s: float = 600.0,
    ) -> None:
        if not url.startswith("http://"):
            raise ServerError(f"{url!r} is not http://HOST:PORT: token ids travel over HTTP only")
        self.name = f"{url} {SPECULATIVE}"
        self._url, self._end_token_ids, self._signer = url, end_token_ids, Signer(secret)
        self._client = Client(url, model=SPECULATIVE, timeout_s=timeout_s)

    def stream(self, question: Question) -> Iterator[Piece]:
        """Yields one piece for each step that lets something out, with its token ids."""
        for values in self._client.responses(self._inputs(question)):
            token_ids = _listed(values.get(serving.OUTPUT_IDS.name, ()))
            fields = {
                "text": values.get(serving.TEXT.name, ""),
                "token_ids": token_ids,
                "num_tokens": len(token_ids),
                "finish_reason": values.get("finish_reason"),
                "usage": _reported(values) or None,
            }
            yield read_piece(fields, self._url)

    def close(self) -> None:
        self._client.close()

    def _inputs(self, question: Question) -> dict[str, Any]:
        if question.token_ids is None:
            raise RequestError(f"{SPECULATIVE} takes token ids, no text and no messages")
        generation = Generation(
            request=Request(
                request_id="",
                prompt_token_ids=question.token_ids,
                max_tokens=question.max_tokens,
                sampling=question.sampling,
                num_draft_tokens=question.num_draft_tokens,
                end_token_ids=frozenset() if question.ignores_end else self._end_token_ids,
                stop_strings=question.stop_strings,
                starts_text=question.starts_text,
            ),
            stream=True,
            return_token_ids=True,
        )
        tensors = generation.to_tensors(self._signer)
        inputs = {name: array.reshape(-1).tolist() for name, array in tensors.items()}
        for tensor in (serving.REQUEST, serving.SIGNATURE):
            (inputs[tensor.name],) = inputs[tensor.name]
        return {**inputs, "stream": True}


def _reported(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a response reports of its whole answer."""
    usage = {name: values[name] for name in _USAGE if name in values}
    if _HISTOGRAM in usage:
        usage[_HISTOGRAM] = _listed(usage[_HISTOGRAM])
    return usage


def _listed(value: Any) -> tuple[int, ...]:
    """Returns the elements of a tensor; Triton writes one of a single element as that element."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _declared_inputs(url: str, model: str, timeout_s: float) -> frozenset[str]:
    address = parse_url(url, ("http", "grpc"))
    if address.scheme == "http":
        path = f"/v2/models/{urllib.parse.quote(model)}"
        try:
            metadata = json.loads(fetch(f"http://{address}{path}", timeout_s=timeout_s))
            return frozenset(tensor["name"] for tensor in metadata["inputs"])
        except OSError as exc:
            raise ServerError(f"{url} does not describe {model}: {to_words(exc)}") from exc
        except (KeyError, RecursionError, TypeError, ValueError) as exc:
            raise ServerError(
                f"{url} does not describe {model}: its answer is no metadata"
            ) from exc
    from tritonclient import grpc

    client = open_grpc(address)
    with contextlib.closing(client):
        try:
            metadata = client.get_model_metadata(model, client_timeout=timeout_s)
        except grpc.InferenceServerException as exc:
            reason = last_cause(exc.message())
            raise ServerError(f"{url} does not describe {model}: {reason}") from exc
    return frozenset(tensor.name for tensor in metadata.inputs)
