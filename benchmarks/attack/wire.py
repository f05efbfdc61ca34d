"""Hostile kinds of benchmarks.attack: connections and bytes that are no whole request.

The last four kinds kill tritonserver 2.51 by itself, in its own servers for HTTP and gRPC (fixed
upstream in 25.07), and are sent only with --holes.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import socket
import struct
import time
from typing import Any

import grpc

from benchmarks.attack.kind import Kind
from benchmarks.attack.send import (
    TIMEOUT_S,
    Reply,
    Target,
    connection,
    infer_request,
    number,
    post,
    received,
    stream,
    strings,
    stub,
)

_PROMPT = "def read(path):\n"
_NUM_TOKENS = 200
_HELD_S = 3.0
_GENERATE = "/v2/models/ensemble/generate"
_STREAM = "/v2/models/ensemble/generate_stream"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on, for 0 s: socket(7)


def _request(path: str, inputs: dict[str, Any]) -> bytes:
    body = json.dumps(inputs).encode()
    return _head(path, len(body)) + body


def _head(path: str, length: int | str) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: attack\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def _endless(stream: bool) -> bytes:
    inputs = {"text_input": _PROMPT, "max_tokens": _NUM_TOKENS, "end_id": -1, "stream": stream}
    return _request(_STREAM if stream else _GENERATE, inputs)


def slow_reader_http(target: Target, rng: random.Random) -> Reply:
    """Asks for a stream, and reads its first bytes only; its window is as small as can be."""
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        opened.settimeout(TIMEOUT_S)
        opened.connect((target.host, target.http_port))
        opened.sendall(_endless(stream=True))
        time.sleep(_HELD_S)
        return received(opened)


def slow_reader_grpc(target: Target, rng: random.Random) -> Reply:
    tensors = [
        strings("text_input", [_PROMPT.encode()]),
        number("max_tokens", _NUM_TOKENS),
        number("end_id", -1),
        number("stream", True, "BOOL"),
    ]
    try:
        with stub(target) as triton:
            responses = triton.ModelStreamInfer(iter([infer_request(tensors)]), timeout=TIMEOUT_S)
            time.sleep(_HELD_S)
            error = next(responses).error_message
            responses.cancel()
    except grpc.RpcError as exc:
        return Reply("reset", str(exc))
    return Reply("refused" if error else "answered", error)


def disconnect(target: Target, rng: random.Random) -> Reply:
    """Goes away with a reset while its request is sent, waits, or is being answered."""
    stream = rng.random() < 0.5
    request = _endless(stream)
    with connection(target) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        opened.sendall(request[: rng.choice([len(request) // 2, len(request)])])
        time.sleep(rng.choice([0.0, 0.05, 0.5]))
    return Reply("answered", "")


def half_open(target: Target, rng: random.Random) -> Reply:
    """Sends the beginning of a head or of a body, and waits."""
    whole = _request(_GENERATE, {"text_input": _PROMPT, "max_tokens": 8})
    part = rng.choice([b"", b"POST /v2", whole[:40], whole[:-5], _head(_GENERATE, 10**9)])
    with connection(target, rng.choice([target.http_port, target.grpc_port])) as opened:
        opened.sendall(part)
        opened.settimeout(_HELD_S)
        return received(opened)


def http_garbage(target: Target, rng: random.Random) -> Reply:
    garbage = rng.choice(
        [
            rng.randbytes(4096),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"POST " + b"/" * 60_000 + b" HTTP/1.1\r\n\r\n",
            b"GET /v2 HTTP/1.1\r\nX: " + b"x" * 1_000_000 + b"\r\n\r\n",
            b"GET /v2 HTTP/1.1\r\n" + b"a: b\r\n" * 50_000 + b"\r\n",
            _head(_GENERATE, -1),
            _head(_GENERATE, "9" * 40),
            _head(_GENERATE, "x") + b"{}",
            _head(_GENERATE, 5) + b"{}" * 50_000,
        ]
    )
    with connection(target) as opened, contextlib.suppress(ConnectionError):
        opened.settimeout(_HELD_S)
        opened.sendall(garbage)
        return received(opened)
    return Reply("reset", "closed while it was sent to")


def grpc_garbage(target: Target, rng: random.Random) -> Reply:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    with connection(target, target.grpc_port) as opened, contextlib.suppress(ConnectionError):
        opened.settimeout(_HELD_S)
        opened.sendall(rng.choice([b"", preface]) + rng.randbytes(rng.choice([9, 4096])))
        return received(opened)
    return Reply("reset", "closed while it was sent to")


def odd_paths(target: Target, rng: random.Random) -> Reply:
    """Paths, methods and bodies that Triton's HTTP server was not made for."""
    method, path = rng.choice(
        [
            ("GET", _GENERATE),
            ("DELETE", "/v2/models/ensemble"),
            ("POST", "/v2/models/ensemble/versions/99999999999999999999/generate"),
            ("POST", "/v2/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd/generate"),
            ("POST", "/v2/models/" + "x" * 50_000 + "/generate"),
            ("POST", "/v2/models/ensemble%00/generate"),
            ("GET", "/v2/models/../../../etc/passwd"),
            ("POST", "/v2/models/preprocessing/generate"),
            ("POST", "/v2/models/postprocessing/generate"),
            ("POST", "/v2/models/speculative/generate"),
        ]
    )
    body = rng.choice(["", "{", "null", "[]", "5", '"x"', "{}", '{"text_input": {"a": 1}}'])
    return post(target, path, body, method=method)


def lying_headers(target: Target, rng: random.Random) -> Reply:
    """Lengths, encodings and types that do not fit the body."""
    headers = rng.choice(
        [
            {"Inference-Header-Content-Length": "-1"},
            {"Inference-Header-Content-Length": "99999999999"},
            {"Inference-Header-Content-Length": "x"},
            {"Content-Encoding": "gzip"},
            {"Content-Encoding": "deflate"},
            {"Content-Encoding": "x" * 10_000},
            {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "2"},
        ]
    )
    path = rng.choice([_GENERATE, "/v2/models/ensemble/infer"])
    return post(target, path, '{"text_input": "a", "max_tokens": 8}', headers)


def compressed(target: Target, rng: random.Random) -> Reply:
    """A small body that becomes a prompt of 4 MB where the server unpacks it."""
    prompt = "a " * (2 << 20)
    if rng.random() < 0.5:
        path, body = _GENERATE, {"text_input": prompt, "max_tokens": 8}
    else:
        tensor = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [prompt]}
        path, body = "/v2/models/preprocessing/infer", {"inputs": [tensor]}
    packed = gzip.compress(json.dumps(body).encode())
    return post(target, path, packed, {"Content-Encoding": "gzip"})


def short_connections(target: Target, rng: random.Random) -> Reply:
    """100 connections, opened and closed, some with a request for nothing."""
    for number_ in range(100):
        port = target.http_port if number_ % 2 else target.grpc_port
        with connection(target, port) as opened:
            if number_ % 4 == 1:
                opened.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
    return Reply("answered")


def idle_connections(target: Target, rng: random.Random) -> Reply:
    """100 connections at once, on which nothing is said for some seconds."""
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            port = rng.choice([target.http_port, target.grpc_port])
            stack.enter_context(connection(target, port))
        time.sleep(_HELD_S)
    return Reply("answered")


def first_in_the_queue(target: Target, rng: random.Random) -> Reply:
    """A long answer that puts itself before everybody."""
    inputs = {
        "text_input": _PROMPT,
        "max_tokens": _NUM_TOKENS,
        "end_id": -1,
        "priority": -(2**31),
    }
    return post(target, _GENERATE, json.dumps(inputs))


def body_of_6_mib(target: Target, rng: random.Random) -> Reply:
    return post(target, _GENERATE, json.dumps({"text_input": "a" * (6 << 20), "max_tokens": 8}))


def million_chunks(target: Target, rng: random.Random) -> Reply:
    """10^6 chunks of one byte: 6 MB."""
    head = _head(_GENERATE, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with connection(target) as opened:
        opened.sendall(head + b"1\r\na\r\n" * 1_000_000 + b"0\r\n\r\n")
        return received(opened)


def brackets_body(target: Target, rng: random.Random) -> Reply:
    return post(target, _GENERATE, "[" * 1_000_000)


def classes_of_text(target: Target, rng: random.Random) -> Reply:
    """The likeliest classes of an output whose elements have no size."""
    asked = infer_request([strings("text_input", [_PROMPT.encode()]), number("max_tokens", 8)])
    asked.outputs.add(name="text_output").parameters["classification"].int64_param = 1
    return stream(target, asked)


KINDS = (
    Kind("slow-reader-http", slow_reader_http),
    Kind("slow-reader-grpc", slow_reader_grpc),
    Kind("disconnect", disconnect),
    Kind("half-open", half_open),
    Kind("http-garbage", http_garbage),
    Kind("grpc-garbage", grpc_garbage),
    Kind("odd-paths", odd_paths),
    Kind("lying-headers", lying_headers),
    Kind("compressed", compressed),
    Kind("short-connections", short_connections),
    Kind("idle-connections", idle_connections),
    Kind("first-in-the-queue", first_in_the_queue),
    Kind("body-of-6-mib", body_of_6_mib, is_hole=True),
    Kind("million-chunks", million_chunks, is_hole=True),
    Kind("brackets-body", brackets_body, is_hole=True),
    Kind("classes-of-text", classes_of_text, is_hole=True),
)
