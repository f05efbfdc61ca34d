"""A chat template that turns hostile, on a real Triton: its chat fails, the others do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import RequestError
from specpipe.triton.client import Client
from specpipe.triton.server import launcher
from specpipe.triton.server.server import Server

ECHO = {"max_tokens": 40, "end_id": -1}
TEMPLATE = (
    "{% set word = messages[0].content %}"
    "{% if word == 'slow' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% elif word == 'large' %}{{ 'x' * 10**10 }}{% endif %}{{ word }}"
    "{% if tools %}({{ tools[0].function.name }}, {{ style }}){% endif %}"
    "{% if messages[1] %}{{ messages[1].content }} else{% endif %}"
)


def chat(server: Server, word: str) -> str:
    messages = json.dumps([{"role": "user", "content": word}])
    with Client(server.grpc_url) as client:
        return client.generate(messages=messages, **ECHO).text


def ask(server: Server, prompt: str) -> str:
    with Client(server.grpc_url) as client:
        return client.generate(prompt, **ECHO).text


def refusal(server: Server, word: str) -> str:
    with pytest.raises(RequestError) as error:
        chat(server, word)
    return str(error.value)


def rendered(url: str) -> str:
    """What the template makes of everything that it may be given, as the echo of it tells."""
    function = {"type": "function", "function": {"name": "g"}}
    with Client(url) as client:
        completion = client.generate(
            messages=[
                {"role": "user", "content": "def f"},
                {"role": "assistant", "content": ":ret"},
            ],
            tools=[function],
            tool_choice="auto",
            chat_template_kwargs={"style": "plain"},
            continue_final_message=True,
            max_tokens=40,
            end_id=-1,
        )
    return completion.text[: completion.text.index(":ret") + 4]


def test_hostile_chat_fails_alone(echo_repository: Callable[..., Path]) -> None:
    repository = echo_repository()
    preprocessing = repository / "preprocessing"
    (preprocessing / "1" / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    config = preprocessing / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 2"))
    with launcher.running(repository) as server, ThreadPoolExecutor(1) as pool:
        expected = chat(server, "def read(path):")
        assert expected == ask(server, "def read(path):") != ""
        slow = pool.submit(refusal, server, "slow")
        answers: list[Any] = []
        while not slow.done():
            answers.append(ask(server, "def read(path):"))
        assert set(answers) == {expected}
        assert "takes longer than 2 s" in slow.result()
        assert "needs more than 268435456 bytes of memory" in refusal(server, "large")
        assert str(repository) not in slow.result()
        for url in (server.http_url, server.grpc_url):
            assert rendered(url) == "def f(g, plain):ret"
        assert [chat(server, "def read(path):") for _ in range(4)] == [expected] * 4
