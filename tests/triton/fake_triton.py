"""A Triton that answers every request by a script, faults and endings included, by protocol."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from tests.quiet import QuietServer
from tests.waiting import PATIENCE_S

OUTPUTS = ("text_output", "finish_reason", "error")

CLOSE = "close"  # the stream ends in order, without a final response
CUT = "cut"  # the connection ends, orderly for TCP
RESET = "reset"  # a TCP reset, once the client has read what came before
SILENCE = "silence"  # nothing more comes, until the test is over

Script = Sequence["dict[str, str] | bytes | str"]
"""Responses, raw data of events, and an ending; without one the stream ends as Triton ends it."""


def failure(message: str) -> dict[str, str]:
    """Triton's error in place of a response."""
    return {"": message}


@contextlib.contextmanager
def serving(
    protocol: str,
    script: Script,
    *,
    outputs: Sequence[str] = OUTPUTS,
    has_read: threading.Event | None = None,
) -> Iterator[str]:
    """Yields the server's URL; has_read is set once the client has all before a RESET."""
    start = _http if protocol == "http" else _grpc
    with start(script, outputs, has_read) as port:
        yield f"{protocol}://127.0.0.1:{port}"


@contextlib.contextmanager
def _http(
    script: Script, outputs: Sequence[str], has_read: threading.Event | None
) -> Iterator[int]:
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            config = {
                "model_transaction_policy": {"decoupled": True},
                "output": [{"name": name} for name in outputs],
            }
            self.whole(json.dumps(config).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.endswith("/generate"):
                (response,) = script
                self.whole(response if isinstance(response, bytes) else event(response))
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for item in script:
                if item in (CUT, RESET, SILENCE):
                    return self.end(item)
                if item == CLOSE:
                    break
                data = item if isinstance(item, bytes) else event(item)
                self.chunk(b"data: " + data + b"\n\n")
            self.chunk(b"")

        def whole(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def end(self, how: object) -> None:
            self.close_connection = True
            if how == SILENCE:
                is_over.wait()
            if how == RESET:
                assert has_read is not None  # what the client has not read yet would be lost
                has_read.wait(PATIENCE_S)
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                os.close(self.connection.detach())  # http.server would close it in order first

        def log_message(self, *_: object) -> None: ...

    server = QuietServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def event(response: Any) -> bytes:
    """A response as Triton writes it into a body."""
    if "" in response:
        return json.dumps({"error": response[""]}).encode()
    return json.dumps({"model_name": "ensemble", "model_version": "1", **response}).encode()


@contextlib.contextmanager
def _grpc(script: Script, outputs: Sequence[str], _: threading.Event | None) -> Iterator[int]:
    is_over = threading.Event()

    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
        def ModelConfig(self, request: Any, context: Any) -> Any:
            return service_pb2.ModelConfigResponse(
                config=model_config_pb2.ModelConfig(
                    model_transaction_policy={"decoupled": True},
                    output=[{"name": name} for name in outputs],
                )
            )

        def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
            next(requests)
            for item in script:
                if item == CLOSE:
                    return
                if item == SILENCE:
                    is_over.wait()
                if item in (CUT, RESET):
                    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                yield message(item)
            yield message({}, is_final=True)
            assert list(requests) == []  # as Triton, which closes after the client

    def message(response: Any, *, is_final: bool = False) -> Any:
        if "" in response:
            return service_pb2.ModelStreamInferResponse(error_message=response[""])
        answer = service_pb2.ModelInferResponse(model_name="ensemble")
        for name, text in response.items():
            answer.outputs.add(name=name, datatype="BYTES", shape=[1])
            array = np.array([text.encode()], dtype=np.object_)
            answer.raw_output_contents.append(serialize_byte_tensor(array).item())
        answer.parameters["triton_final_response"].bool_param = is_final
        return service_pb2.ModelStreamInferResponse(infer_response=answer)

    with ThreadPoolExecutor() as pool:
        server = grpc.server(pool)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield port
        finally:
            is_over.set()
            server.stop(0).wait()
