"""Hostile kinds of benchmarks.attack: more bytes, words, messages or names than anybody needs.

Bodies stay below the 6 MiB that kill tritonserver 2.51's own HTTP server.
"""

from __future__ import annotations

import json
import random
from typing import Any

from benchmarks.attack.kind import Kind
from benchmarks.attack.send import (
    Reply,
    Target,
    generate,
    infer,
    infer_request,
    number,
    post,
    stream,
    strings,
)

_MIB = 1 << 20
_PROMPT = "def read(path):\n"
_CODE = "def read(path):\n    with open(path) as file:\n        return file.read()\n"
_GENERATE = "/v2/models/ensemble/generate"


def _code(rng: random.Random, low: int = _MIB, high: int = 5 * _MIB) -> str:
    """Text of a seeded length that tokenizes as programs do."""
    num_bytes = rng.randint(low, high)
    return (_CODE * (num_bytes // len(_CODE) + 1))[:num_bytes]


def huge_prompt_http(target: Target, rng: random.Random) -> Reply:
    return generate(target, text_input=_code(rng, high=9 * _MIB // 2), max_tokens=8)


def huge_prompt_grpc(target: Target, rng: random.Random) -> Reply:
    prompt = strings("text_input", [_code(rng).encode()])
    return infer(target, [prompt, number("max_tokens", 8)])


def huge_word(target: Target, rng: random.Random) -> Reply:
    """A prompt that is one word, which a tokenizer cannot split before it merges."""
    word = rng.choice([b"a", b"ab", "\u00e4".encode(), b" ", b"\n", b"("])
    prompt = strings("text_input", [word * (rng.randint(_MIB, 4 * _MIB) // len(word))])
    return infer(target, [prompt, number("max_tokens", 8)])


def just_below_the_limit(target: Target, rng: random.Random) -> Reply:
    """A prompt of far more tokens than fit, and of few enough bytes to be looked at."""
    return generate(target, text_input=_code(rng, 8_000, 60_000), max_tokens=8)


def huge_messages(target: Target, rng: random.Random) -> Reply:
    return _messages(target, [{"role": "user", "content": _code(rng, high=9 * _MIB // 2)}])


def many_messages(target: Target, rng: random.Random) -> Reply:
    return _messages(target, [{"role": "user", "content": "a"}] * rng.randint(10_000, 100_000))


def nested_messages(target: Target, rng: random.Random) -> Reply:
    depth = rng.randint(50_000, 100_000)
    text = rng.choice(['[{"role": "user", "content": %s', "%s", '[{"role": %s', '[{"a": %s'])
    return generate(target, messages=text % (rng.choice(["[", '{"a":']) * depth), max_tokens=8)


def closed_nested_messages(target: Target, rng: random.Random) -> Reply:
    """JSON that is whole, and deeper than anything that walks it by recursion may go."""
    depth = rng.randint(500, 20_000)
    nested = "[" * depth + "]" * depth
    text = f'[{{"role": "user", "content": {nested}}}]'
    return generate(target, messages=text, max_tokens=8)


def long_number_in_messages(target: Target, rng: random.Random) -> Reply:
    digits = "9" * rng.randint(5_000, 500_000)
    text = f'[{{"role": "user", "content": "a", "n": {digits}}}]'
    return generate(target, messages=text, max_tokens=8)


def _messages(target: Target, messages: list[dict[str, Any]]) -> Reply:
    return generate(target, messages=json.dumps(messages), max_tokens=8)


def many_words(name: str) -> Kind:
    """10^5 stop or bad words, all of them different."""

    def send(target: Target, rng: random.Random) -> Reply:
        words = [f"{name}{rng.getrandbits(32):x}" for _ in range(100_000)]
        settings = {name: words, "max_tokens": 32}
        return generate(target, text_input=_PROMPT, **settings)

    return Kind(f"many-{name.replace('_', '-')}", send)


def many_words_grpc(target: Target, rng: random.Random) -> Reply:
    """10^5 and more words, of one byte or none, in one tensor."""
    words = [rng.choice([b"", b"a", b" "])] * rng.randint(100_000, 400_000)
    name = rng.choice(["stop_words", "bad_words", "embedding_bias_words"])
    prompt = strings("text_input", [_PROMPT.encode()])
    return infer(target, [prompt, number("max_tokens", 8), strings(name, words)])


def long_stop_words(target: Target, rng: random.Random) -> Reply:
    """301 stop words of 1.3 kB, which the text to be searched may begin again and again."""
    word = rng.choice([" ", "    ", "self.", "\n"])
    words = [(word * 1300)[: 1300 - number] + f"{number}" for number in range(301)]
    return generate(target, text_input=_PROMPT, stop_words=words, max_tokens=64)


def long_words(target: Target, rng: random.Random) -> Reply:
    """A few stop or bad words of 1 MB."""
    settings = {rng.choice(["stop_words", "bad_words"]): [_code(rng, high=_MIB)] * 3}
    return generate(target, text_input=_PROMPT, max_tokens=8, **settings)


def as_many_words_as_allowed(target: Target, rng: random.Random) -> Reply:
    """Few enough stop and bad words for most limits, and as costly as those allow."""
    words = [" " * 60 + f"{number:03}" for number in range(250)]
    return generate(
        target,
        text_input=_PROMPT,
        max_tokens=64,
        **{rng.choice(["stop_words", "bad_words"]): words},
    )


def unknown_parameter_http(target: Target, rng: random.Random) -> Reply:
    """A key of 1 MB, or one near to a name, 10^4 times."""
    size = rng.choice([_MIB, 100_000])
    keys = rng.choice([["x" * size], ["max_token" + "s" * size], [f"x{n}" for n in range(10_000)]])
    body = {"text_input": _PROMPT, "max_tokens": 8, **dict.fromkeys(keys, 1)}
    return post(target, _GENERATE, json.dumps(body))


def unknown_parameter_grpc(target: Target, rng: random.Random) -> Reply:
    request = infer_request([strings("text_input", [b"a"]), number("max_tokens", 8)])
    value = request.parameters["x" * rng.choice([_MIB, 20])]
    value.string_param = "y" * rng.choice([_MIB, 3])
    return stream(target, request)


def unknown_input(target: Target, rng: random.Random) -> Reply:
    """An input over gRPC that is none, its name 1 MB long."""
    prompt = strings("text_input", [b"a"])
    return infer(target, [prompt, strings("x" * rng.choice([_MIB, 20]), [b"a"])])


def unknown_output(target: Target, rng: random.Random) -> Reply:
    request = infer_request([strings("text_input", [b"a"]), number("max_tokens", 8)])
    request.outputs.add(
        name=rng.choice(["x" * _MIB, "prompt_token_ids", "request", "text", "stream_id"])
    )
    return stream(target, request)


def huge_values(target: Target, rng: random.Random) -> Reply:
    """Inputs that must be neutral or small, with 1 MB in them."""
    names = [
        "decoder_text_input",
        "embedding_bias_words",
        "guided_decoding_guide_type",
        "guided_decoding_guide",
    ]
    value = strings(rng.choice(names), [b"x" * _MIB])
    return infer(target, [strings("text_input", [b"a"]), number("max_tokens", 8), value])


KINDS = (
    Kind("huge-prompt-http", huge_prompt_http),
    Kind("huge-prompt-grpc", huge_prompt_grpc),
    Kind("huge-word", huge_word),
    Kind("prompt-below-limit", just_below_the_limit),
    Kind("huge-messages", huge_messages),
    Kind("many-messages", many_messages),
    Kind("nested-messages", nested_messages),
    Kind("closed-nested-messages", closed_nested_messages),
    Kind("long-number-in-messages", long_number_in_messages),
    many_words("stop_words"),
    many_words("bad_words"),
    Kind("many-words-grpc", many_words_grpc),
    Kind("long-stop-words", long_stop_words),
    Kind("long-words", long_words),
    Kind("words-below-limit", as_many_words_as_allowed),
    Kind("unknown-parameter-http", unknown_parameter_http),
    Kind("unknown-parameter-grpc", unknown_parameter_grpc),
    Kind("unknown-input", unknown_input),
    Kind("unknown-output", unknown_output),
    Kind("huge-values", huge_values),
)
