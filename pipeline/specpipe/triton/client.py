"""A client for the served ensemble, over HTTP or gRPC, streamed or whole.

Which call a model takes follows from its policy: a decoupled model needs gRPC's stream, one that is
not decoupled gRPC's plain call (and Triton answers the wrong one with 501). The client asks.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from specpipe.errors import RequestError, ServerError
from specpipe.speculative.request import FinishReason, Statistics
from specpipe.triton import serving
from specpipe.web import Address, is_here, parse_url

Responses = Iterator[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A response: a whole answer, or one chunk of a streamed one; the last has the statistics."""

    text: str
    finish_reason: FinishReason | None = None
    statistics: Statistics | None = None
    log_probs: tuple[float, ...] = ()


class Client:
    """Speaks to one model of one server; `url` is `http://host:port` or `grpc://host:port`."""

    def __init__(self, url: str, *, model: str = "ensemble", timeout_s: float = 600.0) -> None:
        address = parse_url(url, ("http", "grpc"))
        self._model = model
        transport: type[_Http] | type[_Grpc] = _Http if address.scheme == "http" else _Grpc
        self._transport: _Transport = transport(address, model, timeout_s)
        self._is_decoupled: bool | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    @property
    def is_decoupled(self) -> bool:
        """The model's `model_transaction_policy.decoupled`, asked once."""
        if self._is_decoupled is None:
            self._is_decoupled = self._transport.is_decoupled()
        return self._is_decoupled

    def generate(self, prompt: str | None = None, **settings: Any) -> Completion:
        """Returns the whole answer. Settings are the ensemble's inputs by name (serving.py).

        Raises RequestError with what the server says against the request, ServerError when it does
        not answer, or when a request fails after its first chunk.
        """
        responses = list(self._responses(_inputs(prompt, settings, stream=False)))
        if len(responses) != 1:
            raise ServerError(f"{self._model} sent {len(responses)} responses, expected one")
        return responses[0]

    def stream(self, prompt: str | None = None, **settings: Any) -> Iterator[Completion]:
        """Yields the answer in chunks; closing the iterator early cancels the request."""
        inputs = _inputs(prompt, settings, stream=True)
        if not self.is_decoupled:
            raise RequestError(
                f"{self._model} cannot stream: model_transaction_policy.decoupled is false in its "
                "config.pbtxt"
            )
        return self._responses(inputs)

    def _responses(self, inputs: Mapping[str, Any]) -> Iterator[Completion]:
        responses = self._transport.infer(inputs, is_decoupled=self.is_decoupled)
        with contextlib.closing(cast("_Closable", responses)):
            for values in responses:
                if values.get("finish_reason") == "error":
                    raise ServerError(f"the request failed: {values.get('error')}")
                yield Completion(
                    text=values.get("text_output", ""),
                    finish_reason=values.get("finish_reason"),
                    statistics=serving.parse_statistics(values),
                    log_probs=_floats(values.get("output_log_probs", ())),
                )


class _Closable(Protocol):
    def close(self) -> None: ...


def _inputs(prompt: str | None, settings: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    serving.refuse_unknown(settings)
    inputs = {name: value for name, value in settings.items() if value is not None}
    if prompt is not None:
        inputs["text_input"] = prompt
    if "messages" in inputs and not isinstance(inputs["messages"], str):
        inputs["messages"] = json.dumps(inputs["messages"])
    return {**inputs, "stream": stream}


def _floats(value: Any) -> tuple[float, ...]:
    return tuple(float(number) for number in np.reshape(value, -1))


class _Transport(Protocol):
    def is_decoupled(self) -> bool: ...

    def infer(self, inputs: Mapping[str, Any], *, is_decoupled: bool) -> Responses: ...

    def close(self) -> None: ...


class _Http:
    """Triton's `generate` and `generate_stream`, which serve both kinds of model."""

    def __init__(self, address: Address, model: str, timeout_s: float) -> None:
        self._address = address
        self._path = f"/v2/models/{urllib.parse.quote(model)}"
        self._timeout_s = timeout_s

    def close(self) -> None:
        pass  # a connection for each request: closing it early is how HTTP cancels

    def is_decoupled(self) -> bool:
        with self._request("GET", "/config") as response:
            config = json.load(response)
        return bool(config.get("model_transaction_policy", {}).get("decoupled", False))

    def infer(self, inputs: Mapping[str, Any], *, is_decoupled: bool) -> Responses:
        body = json.dumps(inputs)
        if not inputs["stream"]:
            with self._request("POST", "/generate", body) as response:
                yield json.load(response)
            return
        with self._request("POST", "/generate_stream", body) as response:
            for line in response:
                if line.startswith(b"data:"):
                    event = json.loads(line[len(b"data:") :])
                    if "model_name" not in event:
                        raise RequestError(_plain(event["error"]))
                    yield event

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(
            self._address.host, self._address.port, timeout=self._timeout_s
        )
        try:
            connection.request(
                method, self._path + path, body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response.status, response.read())
            yield response
        except (OSError, http.client.HTTPException) as exc:
            raise ServerError(f"http://{self._address} does not answer: {exc!r}") from exc
        finally:
            connection.close()


def _refusal(status: int, body: bytes) -> RequestError | ServerError:
    try:
        # The first response of a stream is an event, even when it is an error.
        message = _plain(json.loads(body.removeprefix(b"data:"))["error"])
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    # 400 is also what a request that failed while it ran comes to; HTTP tells no more.
    return RequestError(message) if status in (400, 404) else ServerError(message)


def _plain(message: str) -> str:
    """Returns the model's own sentence, without the name of the ensemble that Triton puts first."""
    return re.sub(r"^in ensemble '[^']*', ", "", message)


def open_grpc(address: Address) -> Any:
    """Returns Triton's gRPC client, which asks no proxy for this machine."""
    from tritonclient import grpc

    options = [
        # Without limits, as without `channel_args`, which replace the client's own.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.enable_http_proxy", 0 if is_here(address.host) else 1),
    ]
    return grpc.InferenceServerClient(str(address), channel_args=options)


class _Grpc:
    """gRPC's bidirectional stream for decoupled models, its plain call for the others."""

    def __init__(self, address: Address, model: str, timeout_s: float) -> None:
        from tritonclient import grpc

        self._grpc = grpc
        self._address = address
        self._model = model
        self._timeout_s = timeout_s
        self._client = open_grpc(address)

    def close(self) -> None:
        self._client.close()

    def is_decoupled(self) -> bool:
        with self._errors():
            config = self._client.get_model_config(self._model, client_timeout=self._timeout_s)
        return bool(config.config.model_transaction_policy.decoupled)

    def infer(self, inputs: Mapping[str, Any], *, is_decoupled: bool) -> Responses:
        tensors = [self._tensor(name, value) for name, value in inputs.items()]
        if is_decoupled:
            yield from self._stream(tensors)
            return
        with self._errors():
            result = self._client.infer(self._model, tensors, client_timeout=self._timeout_s)
        yield self._values(result)

    def _stream(self, tensors: Sequence[Any]) -> Responses:
        results: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        # A connection of its own: one client carries one stream.
        client = open_grpc(self._address)
        # Errors come without a status code here. Asked for one (`triton_grpc_error`), Triton 2.51
        # logs a cancellation that never was, and its process was once seen to die.
        client.start_stream(lambda result, error: results.put((result, error)))
        is_finished = False
        try:
            with self._errors():
                client.async_stream_infer(self._model, tensors, enable_empty_final_response=True)
            while not is_finished:
                with self._errors():
                    try:
                        result, error = results.get(timeout=self._timeout_s)
                    except queue.Empty:
                        raise ServerError(
                            f"grpc://{self._address} sent nothing for {self._timeout_s:g} s"
                        ) from None
                    if error is not None:
                        is_finished = True
                        raise error
                response = result.get_response()
                is_finished = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    yield self._values(result)
        finally:
            client.stop_stream(cancel_requests=not is_finished)
            client.close()

    def _tensor(self, name: str, value: Any) -> Any:
        tensor = serving.input_tensor(name)
        listed = value if isinstance(value, (list, tuple)) else [value]
        if tensor.dtype == "STRING":
            listed = [text.encode() for text in listed]
        array = serving.as_array(tensor, listed)
        dtype = "BYTES" if tensor.dtype == "STRING" else tensor.dtype
        made = self._grpc.InferInput(name, array.shape, dtype)
        made.set_data_from_numpy(array)
        return made

    def _values(self, result: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for output in result.get_response().outputs:
            array = result.as_numpy(output.name)
            elements = [
                element.decode() if isinstance(element, bytes) else element
                for element in array.reshape(-1).tolist()
            ]
            values[output.name] = elements[0] if len(elements) == 1 else elements
        return values

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._grpc.InferenceServerException as exc:
            if exc.status() in (None, "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND"):
                raise RequestError(_plain(exc.message())) from exc
            raise ServerError(f"grpc://{self._address}: {_plain(exc.message())}") from exc
