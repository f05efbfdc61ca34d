"""Hostile kinds of benchmarks.attack: requests to the models behind the ensemble.

Nobody but the ensemble has business with them. An answer that gave a client what another client's
request is run with would be a door; `preprocessing` is called directly for that reason too.
"""

from __future__ import annotations

import json
import random
import uuid
from typing import Any

import grpc

from benchmarks.attack.kind import Kind
from benchmarks.attack.send import (
    TIMEOUT_S,
    Reply,
    Target,
    Tensor,
    call,
    failed,
    infer,
    infer_request,
    number,
    strings,
    stub,
)
from specpipe.speculative.request import Request
from specpipe.triton.secret import Signer
from specpipe.triton.serving.requests import Generation

_PROMPT_IDS = Tensor("prompt_token_ids", "INT32", b"\7\0\0\0\1\0\0\0", (1, 2))


def speculative_types(target: Target, rng: random.Random) -> Reply:
    """What preprocessing would send, but for one value of another type or size."""
    fields = _fields()
    place, value = rng.choice(
        [
            ("max_tokens", 2.5),
            ("num_draft_tokens", 1.5),
            ("stop_strings", [5]),
            ("end_token_ids", ["x"]),
            ("priority", "x"),
            ("priority", [1]),
            ("timeout_s", "x"),
            ("max_tokens", True),
            ("max_tokens", 10**30),
            ("stop_strings", "abc"),
            ("return_log_probs", "x"),
            ("sampling", {**fields["request"]["sampling"], "seed": -1.5}),
            ("sampling", {**fields["request"]["sampling"], "bad_words": [["x"]]}),
            ("sampling", {**fields["request"]["sampling"], "temperature": "hot"}),
            ("sampling", {**fields["request"]["sampling"], "bad_words": [[10**9]]}),
        ]
    )
    fields["request"][place] = value
    return _speculative(target, json.dumps(fields), rng)


def speculative_whole(target: Target, rng: random.Random) -> Reply:
    """Exactly what preprocessing would send, but for what only this start of the server knows."""
    return _speculative(target, json.dumps(_fields()), rng)


def speculative_altered(target: Target, rng: random.Random) -> Reply:
    """What `preprocessing` itself wrote of one request, with a value changed."""
    asked = infer_request([strings("text_input", [b"a"]), number("max_tokens", 8)], "preprocessing")
    try:
        with stub(target) as triton:
            written = triton.ModelInfer(asked, timeout=TIMEOUT_S)
    except grpc.RpcError as exc:
        return failed(exc)
    tensors = []
    for output, raw in zip(written.outputs, written.raw_output_contents, strict=True):
        if output.name == "request":
            raw = strings("", [raw[4:].replace(b'"max_tokens": 8', b'"max_tokens": 7')]).raw
        tensors.append(Tensor(output.name, output.datatype, raw, tuple(output.shape)))
    return infer(target, tensors, "speculative")


def speculative_json(target: Target, rng: random.Random) -> Reply:
    """Anything that is JSON, or nearly."""
    text = rng.choice(
        [
            "",
            "null",
            "[]",
            "5",
            "{}",
            '{"request": 5}',
            '{"request": {"sampling": []}}',
            "[" * 100_000,
            '{"request":' * 50_000,
            "9" * 100_000,
            "NaN",
            json.dumps({"x" * (1 << 20): 1}),
            json.dumps({**_fields(), "echo": 5}),
            json.dumps({**_fields(), "stream": "x", "return_token_ids": []}),
        ]
    )
    return _speculative(target, text, rng)


def speculative_ids(target: Target, rng: random.Random) -> Reply:
    """Token ids that no model has, or none, or a million."""
    size = rng.choice([0, 1, 1_000_000])
    ids = rng.choice([b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\0\0\0\x80"]) * size
    request = strings("request", [json.dumps(_fields()).encode()])
    return infer(
        target, [request, Tensor("prompt_token_ids", "INT32", ids, (1, size))], "speculative"
    )


def cancels(target: Target, rng: random.Random) -> Reply:
    """Cancels of ids that are guessed."""
    guess = rng.choice(
        [uuid.UUID(int=rng.getrandbits(128)).hex.encode(), b"", b"0", b"\xff", b"x" * (1 << 20)]
    )
    return infer(target, [strings("cancel", [guess])], "speculative")


def preprocessing(target: Target, rng: random.Random) -> Reply:
    """A request as the ensemble's; its answer shows what `speculative` is told."""
    tensors = [strings("text_input", [b"a"]), number("max_tokens", rng.choice([8, 0]))]
    return call(target, "ModelInfer", infer_request(tensors, "preprocessing"))


def postprocessing(target: Target, rng: random.Random) -> Reply:
    """Texts that never were in a stream, streams that never were, and neither."""
    tensors = rng.choice(
        [
            [strings("text", [b"a"]), strings("stream_id", [b"0"])],
            [strings("text", [b"\xff" * (1 << 20)]), strings("stream_id", [b"\xff"])],
            [strings("text", [b"a"])],
            [strings("stream_id", [b"a"])],
            [],
            [Tensor("text", "BYTES", b"\xff\xff\xff\xff"), strings("stream_id", [b""])],
        ]
    )
    return call(target, "ModelInfer", infer_request(tensors, "postprocessing"))


def _speculative(target: Target, request: str, rng: random.Random) -> Reply:
    """Sends a request to the model, without a signature or with one that is guessed."""
    tensors = [strings("request", [request.encode()]), _PROMPT_IDS]
    guess = rng.choice([None, b"", b"\xff", rng.randbytes(32).hex().encode(), b"x" * (1 << 20)])
    if guess is not None:
        tensors.append(strings("signature", [guess]))
    return infer(target, tensors, "speculative")


def _fields() -> dict[str, Any]:
    """What preprocessing writes of a request for eight tokens."""
    generation = Generation(request=Request(request_id="", prompt_token_ids=(7, 1), max_tokens=8))
    fields: dict[str, Any] = json.loads(generation.to_tensors(Signer(None))["request"].item())
    return fields


KINDS = (
    Kind("speculative-types", speculative_types, must_refuse=True),
    Kind("speculative-whole", speculative_whole, must_refuse=True),
    Kind("speculative-altered", speculative_altered, must_refuse=True),
    Kind("speculative-json", speculative_json, must_refuse=True),
    Kind("speculative-ids", speculative_ids, must_refuse=True),
    Kind("cancels", cancels, must_refuse=True),
    Kind("preprocessing", preprocessing),
    Kind("postprocessing", postprocessing),
)
