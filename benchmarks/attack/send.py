"""How benchmarks.attack sends what no honest client would: raw HTTP, raw gRPC, raw sockets.

Nothing here checks what it sends. Every call ends within TIMEOUT_S and says what came of it.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

TIMEOUT_S = 20.0
_MAX_TEXT = 100_000  # characters of a reply that are kept and searched
_JSON = {"Content-Type": "application/json"}
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
# gRPC has one code for a server that is gone and for a call that Triton does not allow.
_LOST = re.compile("(?i)socket closed|connect|reset|goaway|broken pipe|stream removed")

Outcome = Literal["answered", "refused", "timeout", "reset"]


@dataclass(frozen=True)
class Target:
    """Where the server listens."""

    host: str
    http_port: int
    grpc_port: int


@dataclass(frozen=True)
class Reply:
    """What came back: an answer, a refusal with words, nothing in time, or a broken connection."""

    outcome: Outcome
    text: str = ""


def generate(target: Target, **inputs: Any) -> Reply:
    """Asks HTTP `generate` for what the inputs say."""
    return post(target, "/v2/models/ensemble/generate", json.dumps(inputs))


def post(
    target: Target,
    path: str,
    body: str | bytes = b"",
    headers: Mapping[str, str] = _JSON,
    method: str = "POST",
) -> Reply:
    """Sends one HTTP request on a connection of its own."""
    connection = http.client.HTTPConnection(target.host, target.http_port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        text = response.read(_MAX_TEXT).decode(errors="replace")
        # An error after the head of a stream was sent comes with status 200, as an event.
        refused = response.status != 200 or text.startswith('data: {"error"')
        return Reply("refused" if refused else "answered", text)
    except TimeoutError as exc:
        return Reply("timeout", str(exc))
    except (OSError, http.client.HTTPException) as exc:
        return Reply("reset", repr(exc)[:_MAX_TEXT])
    finally:
        connection.close()


@dataclass(frozen=True)
class Tensor:
    """An input over gRPC, whether or not dtype, shape and bytes belong together."""

    name: str
    dtype: str
    raw: bytes
    shape: tuple[int, ...] = (1, 1)


def strings(name: str, values: Sequence[bytes], shape: tuple[int, ...] | None = None) -> Tensor:
    """A tensor of strings; its shape is [1, number of values] unless given."""
    raw = b"".join(struct.pack("<I", len(value)) + value for value in values)
    return Tensor(name, "BYTES", raw, (1, len(values)) if shape is None else shape)


def number(name: str, value: Any, dtype: str = "INT32") -> Tensor:
    """A tensor of one number; a value that the type cannot hold wraps around."""
    kinds = {"INT32": "<i4", "INT64": "<i8", "UINT64": "<u8", "FP32": "<f4", "BOOL": "?"}
    with np.errstate(all="ignore"):
        return Tensor(name, dtype, np.array(value).astype(kinds[dtype]).tobytes())


def infer_request(
    tensors: Sequence[Tensor], model: str = "ensemble", **fields: Any
) -> service_pb2.ModelInferRequest:
    """A request as protobuf has it; `fields` are others of its message."""
    request = service_pb2.ModelInferRequest(model_name=model, **fields)
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.dtype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.raw)
    return request


def infer(
    target: Target, tensors: Sequence[Tensor], model: str = "ensemble", **fields: Any
) -> Reply:
    """Sends one request on a gRPC stream and takes responses until the first error or the end."""
    return stream(target, infer_request(tensors, model, **fields))


def stream(target: Target, request: service_pb2.ModelInferRequest) -> Reply:
    """Sends one request on a gRPC stream of its own."""
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    texts = []
    try:
        with stub(target) as triton:
            for response in triton.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S):
                if response.error_message:
                    return Reply("refused", response.error_message[:_MAX_TEXT])
                texts += [
                    raw.decode(errors="replace")
                    for raw in response.infer_response.raw_output_contents
                ]
                if response.infer_response.parameters["triton_final_response"].bool_param:
                    break
    except grpc.RpcError as exc:
        return failed(exc)
    return Reply("answered", "".join(texts)[:_MAX_TEXT])


def call(target: Target, method: str, message: Any) -> Reply:
    """Makes one plain gRPC call."""
    try:
        with stub(target) as triton:
            return Reply("answered", str(getattr(triton, method)(message, timeout=TIMEOUT_S)))
    except grpc.RpcError as exc:
        return failed(exc)


@contextmanager
def stub(target: Target) -> Iterator[Any]:
    """Triton's gRPC service on a connection of its own."""
    address = f"{target.host}:{target.grpc_port}"
    options = [*_UNLIMITED, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@contextmanager
def connection(target: Target, port: int | None = None) -> Iterator[socket.socket]:
    """A bare connection, to the HTTP port unless another is given."""
    address = (target.host, target.http_port if port is None else port)
    with socket.create_connection(address, timeout=TIMEOUT_S) as opened:
        yield opened


def received(opened: socket.socket) -> Reply:
    """What a bare connection brings back; an end without a word is a reset."""
    try:
        text = opened.recv(_MAX_TEXT).decode(errors="replace")
    except TimeoutError as exc:
        return Reply("timeout", str(exc))
    except OSError as exc:
        return Reply("reset", repr(exc))
    if not text:
        return Reply("reset", "the connection was closed")
    return Reply("answered" if text.startswith("HTTP/1.1 200") else "refused", text)


def failed(exc: Any) -> Reply:
    """What a gRPC error means: no answer in time, a lost connection, or a refusal."""
    code, text = exc.code(), str(exc.details())[:_MAX_TEXT]
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return Reply("timeout", text)
    if code == grpc.StatusCode.UNAVAILABLE and _LOST.search(text):
        return Reply("reset", text)
    return Reply("refused", text)
