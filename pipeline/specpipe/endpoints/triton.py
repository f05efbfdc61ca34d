"""A Triton that serves our ensemble or NVIDIA's, over gRPC or HTTP; or our `speculative` itself.

NVIDIA's ensemble lacks what ours added. A question that needs an input which the model does not
declare is refused here: over HTTP Triton would take it for a request parameter and say nothing.
"""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, cast

from specpipe.endpoints.base import CutStream, Piece, Question, Usage, given_settings
from specpipe.errors import RequestError, ServerError, SpecpipeError
from specpipe.speculative.request import FinishReason, Request
from specpipe.triton import serving
from specpipe.triton.client import Client, open_grpc
from specpipe.triton.layout import ENSEMBLE, SPECULATIVE
from specpipe.triton.secret import Signer
from specpipe.triton.serving import Generation
from specpipe.web import fetch, parse_url

_NVIDIAS_COUNTS = {"return_num_input_tokens": True, "return_num_output_tokens": True}
_NVIDIAS_ACCEPTANCE = {"return_perf_metrics": True}
_USAGE = tuple(Usage.__dataclass_fields__)


class Triton:
    """The ensemble of one server; `url` is `http://host:port` or `grpc://host:port`."""

    def __init__(self, url: str, *, model: str = ENSEMBLE, timeout_s: float = 600.0) -> None:
        self.name = url
        self._url, self._model, self._timeout_s = url, model, timeout_s
        self._client = _RawClient(url, model=model, timeout_s=timeout_s)
        self._declared: tuple[frozenset[str], frozenset[str]] | None = None

    def stream(self, question: Question) -> Iterator[Piece]:
        """Yields one piece for each response that has text, and the last one."""
        inputs = self._inputs(question)
        if not self._client.is_decoupled:
            raise RequestError(
                f"{self._model} cannot stream: model_transaction_policy.decoupled is false in its "
                "config.pbtxt"
            )
        has_begun = has_ended = False
        try:
            for values in self._client.responses(inputs):
                if values.get("finish_reason") == "error":
                    has_ended = True
                    raise ServerError(f"the request failed: {values.get('error')}")
                piece = self._piece(values)
                has_ended = has_ended or piece.finish_reason is not None
                has_begun = True
                if piece.has_output or piece.usage is not None or has_ended:
                    yield piece
        except SpecpipeError as exc:
            if has_begun and not has_ended:
                raise CutStream(f"{self._url} broke off: {exc}") from exc
            raise
        if not has_begun:
            raise ServerError(f"{self._url}: {self._model} ended without a response")
        if not has_ended and "finish_reason" in self._outputs:
            raise CutStream(f"{self._url} broke off: the last response has no finish_reason")

    def close(self) -> None:
        self._client.close()

    @property
    def is_nvidias(self) -> bool:
        """True where the model takes no draft length, so that each server has one of its own."""
        return "num_draft_tokens" not in self._declared_tensors()[0]

    @property
    def _outputs(self) -> frozenset[str]:
        return self._declared_tensors()[1]

    def _declared_tensors(self) -> tuple[frozenset[str], frozenset[str]]:
        """The names of the model's inputs and outputs, asked once."""
        if self._declared is None:
            self._declared = _declared_tensors(self._url, self._model, self._timeout_s)
        return self._declared

    def _inputs(self, question: Question) -> dict[str, Any]:
        if question.token_ids is not None:
            raise RequestError(f"{self._model} takes text or messages, no token ids")
        inputs = {"max_tokens": question.max_tokens, **given_settings(question)}
        if question.text is not None:
            inputs["text_input"] = question.text
        if question.messages is not None:
            inputs["messages"] = json.dumps([dict(message) for message in question.messages])
        if question.stop_strings:
            inputs["stop_words"] = list(question.stop_strings)
        if question.ignores_end:
            inputs["end_id"] = -1
        declared, _ = self._declared_tensors()
        for name in inputs:
            if name not in declared:
                raise RequestError(f"{self._url}: {self._model} has no input {name}")
        if self.is_nvidias:
            counted = {**_NVIDIAS_COUNTS, **_NVIDIAS_ACCEPTANCE}
            inputs |= {name: value for name, value in counted.items() if name in declared}
        return {**inputs, "stream": True}

    def _piece(self, values: Mapping[str, Any]) -> Piece:
        usage = {name: values[name] for name in _USAGE if name in values}
        num_tokens = None
        if self.is_nvidias:
            # In a stream each response of TensorRT-LLM's backend counts its own output tokens
            # (triton_backend/inflight_batcher_llm/src/model_instance_state.cc, 1.2).
            num_tokens = usage.pop("num_output_tokens", None)
        text = values.get("text_output", "")
        return Piece(
            text=text if isinstance(text, str) else "".join(text),
            num_tokens=num_tokens,
            finish_reason=cast("FinishReason | None", values.get("finish_reason")),
            usage=Usage(**usage) if usage else None,
        )


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
        self._client = _RawClient(url, model=SPECULATIVE, timeout_s=timeout_s)

    def stream(self, question: Question) -> Iterator[Piece]:
        """Yields one piece for each step that lets something out, with its token ids."""
        has_begun = False
        try:
            for values in self._client.responses(self._inputs(question)):
                finish_reason = cast("FinishReason | None", values.get("finish_reason"))
                if finish_reason == "error":
                    raise ServerError(f"the request failed: {values.get('error')}")
                token_ids = _listed(values.get(serving.OUTPUT_IDS.name, ()))
                usage = {name: values[name] for name in _USAGE if name in values}
                has_begun = True
                yield Piece(
                    text=values.get(serving.TEXT.name, ""),
                    token_ids=token_ids,
                    num_tokens=len(token_ids),
                    finish_reason=finish_reason,
                    usage=Usage(**usage) if usage else None,
                )
                if finish_reason is not None:
                    return
        except SpecpipeError as exc:
            if has_begun and not str(exc).startswith("the request failed"):
                raise CutStream(f"{self._url} broke off: {exc}") from exc
            raise
        raise CutStream(f"{self._url} broke off: the last response has no finish_reason")

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


def _listed(value: Any) -> tuple[int, ...]:
    """Triton writes a tensor of one element as that element."""
    return (value,) if isinstance(value, int) else tuple(value)


class _RawClient(Client):
    """The client, with responses as they come: NVIDIA's are no Completions."""

    def responses(self, inputs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        yield from self._transport.infer(inputs, is_decoupled=self.is_decoupled)


def _declared_tensors(
    url: str, model: str, timeout_s: float
) -> tuple[frozenset[str], frozenset[str]]:
    address = parse_url(url, ("http", "grpc"))
    if address.scheme == "http":
        try:
            metadata = json.loads(
                fetch(
                    f"http://{address}/v2/models/{urllib.parse.quote(model)}", timeout_s=timeout_s
                )
            )
        except (OSError, ValueError) as exc:
            raise ServerError(f"{url} does not tell of {model}: {exc}") from exc
        names = [[tensor["name"] for tensor in metadata[key]] for key in ("inputs", "outputs")]
    else:
        from tritonclient import grpc

        client = open_grpc(address)
        with contextlib.closing(client):
            try:
                found = client.get_model_metadata(model, client_timeout=timeout_s)
            except grpc.InferenceServerException as exc:
                raise ServerError(f"{url} does not tell of {model}: {exc.message()}") from exc
            names = [[tensor.name for tensor in group] for group in (found.inputs, found.outputs)]
    return frozenset(names[0]), frozenset(names[1])
