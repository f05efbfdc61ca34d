"""A client for the served ensemble, over HTTP or gRPC, streamed or whole.

Which call a model takes follows from its policy: a decoupled model needs gRPC's stream, one that is
not decoupled gRPC's plain call (and Triton answers the wrong one with 501). The client asks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from specpipe.errors import CutStream, RequestError, ServerError, show
from specpipe.machine.web import parse_url, receive
from specpipe.triton import serving
from specpipe.triton.client.completion import Completion, check_reason, read_completion
from specpipe.triton.client.grpc_transport import GrpcTransport
from specpipe.triton.client.http_transport import HttpTransport
from specpipe.triton.client.transport import Responses, Served, Transport

_JSON_INPUTS = ("messages", "tools", "tool_choice", "chat_template_kwargs")


class Client:
    """Speaks to one model of one server; `url` is `http://host:port` or `grpc://host:port`."""

    def __init__(self, url: str, *, model: str = "ensemble", timeout_s: float = 600.0) -> None:
        address = parse_url(url, ("http", "grpc"))
        self._url, self._model = url, model
        self._transport: Transport = (
            HttpTransport(address, model, timeout_s)
            if address.scheme == "http"
            else GrpcTransport(address, model, timeout_s)
        )
        self._served: Served | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    @property
    def is_decoupled(self) -> bool:
        """The model's `model_transaction_policy.decoupled`, asked once."""
        return self._ask_once().is_decoupled

    def _ask_once(self) -> Served:
        if self._served is None:
            self._served = self._transport.ask_served()
        return self._served

    def generate(self, prompt: str | None = None, **settings: Any) -> Completion:
        """Returns the whole answer. Settings are the inputs by name (serving/tensors.py), of their
        types; what is JSON there may be given as lists and dictionaries.

        Raises RequestError with what is wrong with the request, ServerError when the server does
        not answer, or when a request fails after its first chunk.
        """
        completions = list(self._completions(_inputs(prompt, settings, stream=False)))
        if len(completions) != 1:
            raise ServerError(f"{self._model} sent {len(completions)} responses, expected one")
        return completions[0]

    def stream(self, prompt: str | None = None, **settings: Any) -> Iterator[Completion]:
        """Yields the answer in chunks; closing the iterator early cancels the request.

        Raises what `generate` does, and CutStream where the answer stops before its last chunk.
        """
        inputs = _inputs(prompt, settings, stream=True)
        self.require_streaming()
        return self._completions(inputs)

    def require_streaming(self) -> None:
        """Raises RequestError where the model answers once a request."""
        if not self.is_decoupled:
            raise RequestError(
                f"{self._model} cannot stream: model_transaction_policy.decoupled is false in its "
                "config.pbtxt"
            )

    def responses(self, inputs: Mapping[str, Any]) -> Responses:
        """Yields the outputs of each response by name, as they come; a model may lack ours.

        Raises RequestError for a refusal, CutStream for an answer that began and has no end, and
        ServerError for any other failure. The end is `finish_reason`, where the model has that.
        """
        served = self._ask_once()
        num_received = 0
        finish_reason = None
        arriving = self._transport.infer(inputs, is_decoupled=served.is_decoupled)
        with contextlib.closing(arriving):
            while True:
                is_whole = finish_reason is not None
                try:
                    values = receive(arriving, num_received, self._url, is_whole=is_whole)
                except RequestError as exc:
                    if num_received == 0:
                        raise
                    raise ServerError(f"the request failed: {exc}") from exc
                if values is None:
                    break
                if is_whole:
                    raise ServerError(f"{self._url}: {self._model} went on after its last response")
                num_received += 1
                finish_reason = values.get("finish_reason")
                check_reason(values, num_received, self._url, self._model)
                yield values
        if num_received == 0:
            raise ServerError(f"{self._url}: {self._model} ended without a response")
        if finish_reason is None and served.has_finish_reason:
            raise CutStream.after(num_received, self._url, "the last one has no finish_reason")

    def _completions(self, inputs: Mapping[str, Any]) -> Iterator[Completion]:
        with contextlib.closing(self.responses(inputs)) as responses:
            for values in responses:
                yield read_completion(values, f"{self._url}: {self._model}")


def _inputs(prompt: str | None, settings: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    serving.check_known(settings)
    inputs = {name: _plain(value) for name, value in settings.items() if value is not None}
    if prompt is not None:
        inputs["text_input"] = prompt
    for name in _JSON_INPUTS:
        if name in inputs and not isinstance(inputs[name], str):
            inputs[name] = _as_json(name, inputs[name])
    for name, value in inputs.items():
        serving.check_values(serving.input_tensor(name), value)
    return {**inputs, "stream": stream}


def _plain(value: Any) -> Any:
    """Returns Python's value of one of NumPy's, and of a list of them."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return [_plain(element) for element in value] if isinstance(value, (list, tuple)) else value


def _as_json(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as exc:
        raise RequestError(f"{name} cannot be written as JSON: {show(exc)}") from exc
