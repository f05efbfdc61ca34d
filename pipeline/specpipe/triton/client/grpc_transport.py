"""Triton over gRPC, with NVIDIA's tritonclient."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specpipe.errors import NoAnswer, RequestError, ServerError
from specpipe.machine.web import Address, is_here
from specpipe.triton import serving
from specpipe.triton.client.transport import Responses, Served, plain

if TYPE_CHECKING:
    Results = queue.SimpleQueue[tuple[Any, Exception | None]]

_POLL_S = 0.1  # between looks whether the reading thread lives: a guess
_CLOSE_TIME_S = 5.0  # what the reading thread may take to end after the last response: a guess


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


def last_cause(message: str) -> str:
    """Returns the system's reason alone: gRPC (1.85) puts before it what it was doing."""
    cause = message
    if message.startswith("failed to connect"):
        cause = message.rpartition(": ")[2]
    elif removed := re.fullmatch(r"Stream removed \((?:\w+:)?(.*)\)", message):
        cause = removed[1]
    cause = re.sub(r" \(\d+\)$", "", cause)
    return cause[:1].lower() + cause[1:]


class GrpcTransport:
    """gRPC's bidirectional stream for decoupled models, its plain call for the others."""

    def __init__(self, address: Address, model: str, timeout_s: float) -> None:
        from tritonclient import grpc

        self._grpc = grpc
        self._address = address
        self._url = f"grpc://{address}"
        self._model = model
        self._timeout_s = timeout_s
        self._client = open_grpc(address)

    def close(self) -> None:
        self._client.close()

    def ask_served(self) -> Served:
        with self._errors():
            response = self._client.get_model_config(self._model, client_timeout=self._timeout_s)
        return Served(
            is_decoupled=bool(response.config.model_transaction_policy.decoupled),
            has_finish_reason=any(o.name == "finish_reason" for o in response.config.output),
        )

    def infer(self, inputs: Mapping[str, Any], *, is_decoupled: bool) -> Responses:
        tensors = [self._tensor(name, value) for name, value in inputs.items()]
        if is_decoupled:
            yield from self._stream(tensors)
            return
        with self._errors():
            result = self._client.infer(self._model, tensors, client_timeout=self._timeout_s)
        yield self._values(result)

    def _stream(self, tensors: Sequence[Any]) -> Responses:
        results: Results = queue.SimpleQueue()
        # A connection of its own: one client carries one stream.
        client = open_grpc(self._address)
        # Errors come without a status code here. Asked for one (`triton_grpc_error`), Triton 2.51
        # logs a cancellation that never was, and its process was once seen to die.
        client.start_stream(lambda result, error: results.put((result, error)))
        # Nothing public reports a stream that the server closed in order: tritonclient's thread
        # ends then, and calls nobody. And its stop_stream waits without limit for a server that
        # does not close (tritonclient 2.73, grpc/_infer_stream.py).
        stream = client._stream
        reader: threading.Thread = stream._handler
        is_finished = False
        try:
            # Raises where the reader has already met an error, which is in the queue then.
            with contextlib.suppress(self._grpc.InferenceServerException):
                client.async_stream_infer(self._model, tensors, enable_empty_final_response=True)
            while not is_finished:
                result, error = self._next(results, reader)
                if error is not None:
                    is_finished = True
                    with self._errors():
                        raise error
                response = result.get_response()
                is_finished = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    yield self._values(result)
        finally:
            if is_finished:
                stream._request_queue.put(None)  # there are no more requests
                reader.join(_CLOSE_TIME_S)
            client.stop_stream(cancel_requests=reader.is_alive())
            client.close()
        while not results.empty():
            if results.get()[0] is not None:
                raise ServerError(f"{self._url} went on after the final response of {self._model}")

    def _next(self, results: Results, reader: threading.Thread) -> tuple[Any, Exception | None]:
        """Waits for the next result of the reading thread, as long as that lives."""
        deadline = time.monotonic() + self._timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            is_open = reader.is_alive()  # before the look: what it put there last is seen then
            with contextlib.suppress(queue.Empty):
                return results.get(timeout=min(_POLL_S, left_s) if is_open else 0)
            if not is_open:
                raise NoAnswer(self._url, "the stream was closed before the end")
        raise NoAnswer(self._url, f"timed out after {self._timeout_s:g} s")

    def _tensor(self, name: str, value: Any) -> Any:
        tensor = serving.input_tensor(name)
        listed = value if isinstance(value, (list, tuple)) else [value]
        if tensor.dtype == "STRING":
            listed = [text.encode() for text in listed]
        array = serving.as_array(tensor, listed)
        dtype = "BYTES" if tensor.dtype == "STRING" else tensor.dtype
        infer_input = self._grpc.InferInput(name, array.shape, dtype)
        infer_input.set_data_from_numpy(array)
        return infer_input

    def _values(self, result: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for output in result.get_response().outputs:
            array = result.as_numpy(output.name)
            elements = [
                element.decode(errors="replace") if isinstance(element, bytes) else element
                for element in array.reshape(-1).tolist()
            ]
            values[output.name] = elements[0] if len(elements) == 1 else elements
        return values

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._grpc.InferenceServerException as exc:
            status, message = exc.status(), plain(exc.message())
            if status in (None, "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND"):
                raise RequestError(message) from exc
            if status == "StatusCode.DEADLINE_EXCEEDED":
                raise NoAnswer(self._url, f"timed out after {self._timeout_s:g} s") from exc
            if status in ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED"):
                raise NoAnswer(self._url, last_cause(message)) from exc
            raise ServerError(f"{self._url}: {message}") from exc
