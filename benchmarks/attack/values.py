"""Hostile kinds of benchmarks.attack: wrong values, types, shapes, texts and ids."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.attack.kind import Kind
from benchmarks.attack.send import (
    Reply,
    Target,
    Tensor,
    call,
    infer,
    infer_request,
    number,
    post,
    stream,
    strings,
)
from specpipe.triton.serving.tensors import ENSEMBLE_INPUTS, Input

_GENERATE = "/v2/models/ensemble/generate"
_PROMPT = "def read(path):\n"
_ASKED = (strings("text_input", [_PROMPT.encode()]), number("max_tokens", 8))
_BY_NAME = {tensor.name: tensor for tensor in ENSEMBLE_INPUTS}
_FLOATS = [name for name, tensor in _BY_NAME.items() if tensor.dtype == "FP32"]
_INTEGERS = [name for name, tensor in _BY_NAME.items() if tensor.dtype in ("INT32", "UINT64")]
_HOSTILE_FLOATS = [float("nan"), float("inf"), float("-inf"), -1.0, 1e-45, 3.4e38, -3.4e38]
_HOSTILE_INTEGERS = [-(2**31), 2**31 - 1, -1, 10**6]


def float_values(target: Target, rng: random.Random) -> Reply:
    value = number(rng.choice(_FLOATS), rng.choice(_HOSTILE_FLOATS), "FP32")
    return infer(target, [*_ASKED, value])


def integer_values(target: Target, rng: random.Random) -> Reply:
    name = rng.choice([name for name in _INTEGERS if name != "priority"])
    value = number(name, rng.choice(_HOSTILE_INTEGERS), _BY_NAME[name].dtype)
    return infer(target, [*(t for t in _ASKED if t.name != name), value])


def json_values(target: Target, rng: random.Random) -> Reply:
    """Values that JSON can write and the input cannot hold, or that are no JSON."""
    name = rng.choice([*_FLOATS, *_INTEGERS])
    texts = ["NaN", "-Infinity", "1e999", "2.5", '"x"', "true", "null", "[1, 2]", "{}", "[]"]
    value = rng.choice([*texts, "9" * 400, "-1e-999", "[[1]]", '"\\u0000"'])
    return post(target, _GENERATE, f'{{"text_input": "a", "max_tokens": 8, "{name}": {value}}}')


def dtypes(target: Target, rng: random.Random) -> Reply:
    """An input in another type than its own, its bytes now and then of yet another one."""
    name = rng.choice(list(_BY_NAME))
    dtype = rng.choice(["BOOL", "INT32", "INT64", "UINT64", "FP16", "FP32", "FP64", "BYTES", "X"])
    raw = rng.randbytes(rng.choice([0, 1, 2, 4, 8, 64]))
    return infer(target, [*(t for t in _ASKED if t.name != name), Tensor(name, dtype, raw)])


def shapes(target: Target, rng: random.Random) -> Reply:
    shape = rng.choice([(), (0,), (1,), (1, 0), (2, 1), (1, 2), (1, 1, 1), (-1, 1), (2**40, 1)])
    size = max(1, min(4, shape[-1] if shape else 1))
    value = rng.choice(
        [
            strings("text_input", [b"a"] * size, shape),
            Tensor("max_tokens", "INT32", b"\1\0\0\0" * size, shape),
            Tensor("prompt_embedding_table", "FP16", b"", shape),
            Tensor("lora_config", "INT32", b"\0" * 4 * size, shape),
        ]
    )
    return infer(target, [*(t for t in _ASKED if t.name != value.name), value])


def lying_strings(target: Target, rng: random.Random) -> Reply:
    """String tensors whose lengths say more, or less, than there is."""
    raw = rng.choice(
        [b"\xff\xff\xff\xff", b"\xff\xff\xff\x7fa", b"\5\0\0\0ab", b"\1\0\0", b"", b"a"]
    )
    name = rng.choice(["text_input", "messages", "stop_words"])
    return infer(target, [Tensor(name, "BYTES", raw), _ASKED[1]])


def two_prompts(target: Target, rng: random.Random) -> Reply:
    if rng.random() < 0.5:
        inputs = rng.choice([["a", "b"], [["a"], ["b"]], ["a"] * 1000])
        return post(target, _GENERATE, json.dumps({"text_input": inputs, "max_tokens": 8}))
    shape = rng.choice([(2, 1), (1, 2)])
    return infer(target, [strings("text_input", [b"a", b"b"], shape), _ASKED[1]])


def not_utf8(target: Target, rng: random.Random) -> Reply:
    text = rng.choice(
        [b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"a\xffb" * 9]
    )
    if rng.random() < 0.5:
        return post(target, _GENERATE, b'{"text_input": "' + text + b'", "max_tokens": 8}')
    name = rng.choice(["text_input", "messages", "stop_words", "bad_words"])
    asked = [t for t in _ASKED if t.name != name]
    return infer(target, [*asked, strings(name, [text])])


def odd_characters(target: Target, rng: random.Random) -> Reply:
    """Lone surrogates and other escapes of JSON, in inputs and in keys."""
    text = rng.choice(
        ["\\ud800", "\\udfff\\ud800", "\\u0000", "\\u202e", "\\uffff", "\\x", "\\u12"]
    )
    body = rng.choice(
        [
            f'{{"text_input": "{text}", "max_tokens": 8}}',
            f'{{"text_input": "a", "max_tokens": 8, "stop_words": ["{text}"]}}',
            f'{{"messages": "[{{\\"role\\": \\"\\{text}\\"}}]", "max_tokens": 8}}',
            f'{{"text_input": "a", "max_tokens": 8, "{text}": 1}}',
        ]
    )
    return post(target, _GENERATE, body)


def chats(target: Target, rng: random.Random) -> Reply:
    """Conversations that no template can render, and JSON that is none."""
    messages: Any = rng.choice(
        [
            [],
            {},
            "x",
            None,
            [None],
            [{}],
            [{"role": 1, "content": "a"}],
            [{"role": "user"}],
            [{"role": "user", "content": None}],
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "file:///"}}],
                }
            ],
            [{"role": "{{ 1 / 0 }}", "content": "{{ self.__class__ }}"}],
            [{"role": "assistant", "content": "a", "tool_calls": 5}],
            [{"role": "system", "content": "a"}] * 100,
        ]
    )
    text = rng.choice([json.dumps(messages), "", "{", "nan", "[1", "\ufeff[]"])
    return post(target, _GENERATE, json.dumps({"messages": text, "max_tokens": 8}))


def every_input(target: Target, rng: random.Random) -> Reply:
    """Names every input with its most hostile value."""
    tensors = [_most_hostile(tensor, rng) for tensor in ENSEMBLE_INPUTS]
    return infer(target, rng.sample(tensors, len(tensors)))


def _most_hostile(tensor: Input, rng: random.Random) -> Tensor:
    if tensor.dtype == "STRING":
        value = rng.choice([b"\xff" * 1000, b"[" * 50_000, b"\0", "\u202e".encode() * 999])
        return strings(tensor.name, [value], (1,) * (len(tensor.dims) + 1))
    if tensor.dtype == "FP16":
        return Tensor(tensor.name, "FP16", b"\xff\x7f", (1,) * (len(tensor.dims) + 1))
    if tensor.dims[-1] == 3:
        return Tensor(tensor.name, "INT32", b"\xff\xff\xff\x7f" * 3, (1, 1, 3))
    if tensor.dtype == "BOOL":
        return Tensor(tensor.name, "BOOL", b"\xff")
    values: Sequence[Any] = _HOSTILE_FLOATS if tensor.dtype == "FP32" else _HOSTILE_INTEGERS
    return number(tensor.name, rng.choice(values), tensor.dtype)


def request_fields(target: Target, rng: random.Random) -> Reply:
    """Ids, versions, models and parameters that Triton itself reads."""
    request = infer_request(_ASKED)
    setting = rng.choice(["id", "version", "model", "timeout", "priority", "sequence", "memory"])
    if setting == "id":
        request.id = rng.choice(["x" * (1 << 20), "\0", "../../etc/passwd", "\u202e"])
    elif setting == "version":
        request.model_version = rng.choice(["-1", "99999999999999999999", "x" * 100_000, "../1"])
    elif setting == "model":
        request.model_name = rng.choice(["", "x" * 100_000, "../ensemble", "ensemble\0"])
    elif setting == "timeout":
        request.parameters["timeout"].int64_param = rng.choice([-1, 1, 2**62])
    elif setting == "priority":
        request.parameters["priority"].uint64_param = 2**63
    elif setting == "sequence":
        request.parameters["sequence_id"].int64_param = -1
        request.parameters["sequence_start"].bool_param = True
    else:
        parameters = request.inputs[0].parameters
        parameters["shared_memory_region"].string_param = rng.choice(["x", "specpipe_", "../x"])
        parameters["shared_memory_byte_size"].int64_param = rng.choice([-1, 2**62])
        del request.raw_input_contents[:]
    return stream(target, request)


def plain_infer(target: Target, rng: random.Random) -> Reply:
    """The calls that a decoupled model does not take."""
    if rng.random() < 0.5:
        return call(target, "ModelInfer", infer_request(_ASKED))
    tensor = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
    return post(target, "/v2/models/ensemble/infer", json.dumps({"inputs": [tensor]}))


KINDS = (
    Kind("float-values", float_values),
    Kind("integer-values", integer_values),
    Kind("json-values", json_values),
    Kind("dtypes", dtypes),
    Kind("shapes", shapes),
    Kind("lying-strings", lying_strings),
    Kind("two-prompts", two_prompts),
    Kind("not-utf8", not_utf8),
    Kind("odd-characters", odd_characters),
    Kind("chats", chats),
    Kind("every-input", every_input),
    Kind("request-fields", request_fields),
    Kind("plain-infer", plain_infer),
)
