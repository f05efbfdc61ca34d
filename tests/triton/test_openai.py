"""OpenAI's own client asks the quickstart pair through the door; gRPC says what it must hear."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.lib._pydantic import to_strict_json_schema
from openai.types import chat, completion_create_params
from pydantic import BaseModel

from specpipe.gateway.app import make_app
from specpipe.gateway.chat_schema import ChatRequest
from specpipe.gateway.completion_schema import CompletionRequest
from specpipe.gateway.models import ServedModel
from specpipe.gateway.triton_upstream import TritonUpstream
from specpipe.triton.client import Client, Completion
from specpipe.triton.server.server import Server
from tests.gateway.conftest import running

MODEL = "python-code"
PROMPT = "def running_mean(values):\n"
QUESTION: Any = [{"role": "user", "content": "Write a function that adds two numbers."}]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 11, "max_tokens": 24}


class LazyUpstream:
    """Made where the event loop of the application runs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._upstream: TritonUpstream | None = None

    def _made(self) -> TritonUpstream:
        if self._upstream is None:
            self._upstream = TritonUpstream(self._url)
        return self._upstream

    async def answer(
        self, inputs: Mapping[str, Any], *, sticky_key: str = ""
    ) -> AsyncGenerator[Completion, None]:
        async with contextlib.aclosing(self._made().answer(inputs)) as answer:
            async for completion in answer:
                yield completion

    async def is_ready(self) -> bool:
        return await self._made().is_ready()

    async def close(self) -> None:
        await self._made().close()


@pytest.fixture(scope="session")
def openai_url(quickstart_server: Server, quickstart_repository: Path) -> Iterator[str]:
    served = ServedModel.load(quickstart_repository, [MODEL])
    with running(make_app(LazyUpstream(quickstart_server.grpc_url), served)) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture
def client(openai_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=openai_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def triton(quickstart_server: Server) -> Iterator[Client]:
    with Client(quickstart_server.grpc_url) as client:
        yield client


def test_a_chat_is_what_grpc_answers(client: openai.OpenAI, triton: Client) -> None:
    expected = triton.generate(messages=QUESTION, **SAMPLED)
    assert expected.statistics is not None and expected.text
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, **SAMPLED)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        expected.statistics.num_input_tokens,
        expected.statistics.num_output_tokens,
    )
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, **SAMPLED) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
    assert len(deltas) > 1 and "".join(deltas) == expected.text


def test_completions_are_what_grpc_answers(client: openai.OpenAI, triton: Client) -> None:
    expected = [
        triton.generate(prompt, temperature=0.8, seed=seed, max_tokens=24)
        for prompt in (PROMPT, "import os\n")
        for seed in (11, 12)
    ]
    body: dict[str, Any] = {"model": MODEL, "prompt": [PROMPT, "import os\n"], "n": 2, **SAMPLED}
    whole = client.completions.create(**body)
    assert [choice.text for choice in whole.choices] == [found.text for found in expected]
    texts, usage = [""] * 4, None
    for event in client.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    ):
        usage = event.usage
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [found.text for found in expected]
    assert usage == whole.usage


def test_asynchronous_streams_at_once(openai_url: str, triton: Client) -> None:
    async def text(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, stream=True, max_tokens=16, seed=seed
        )
        return "".join([event.choices[0].delta.content or "" async for event in stream])

    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=openai_url, api_key="none") as client:
            return await asyncio.gather(*(text(client, seed) for seed in range(8)))

    expected = [
        triton.generate(messages=QUESTION, max_tokens=16, temperature=1.0, seed=seed).text
        for seed in range(8)
    ]
    assert asyncio.run(texts()) == expected


def test_log_probs_are_the_target_s_for_every_draft_length(
    client: openai.OpenAI, triton: Client
) -> None:
    found = [
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            logprobs=True,
            top_logprobs=3,
            logit_bias={"5": -100},
            extra_body={"num_draft_tokens": k},
            **SAMPLED,
        ).choices[0]
        for k in (0, 8)
    ]
    tokens = [choice.logprobs.content for choice in found if choice.logprobs is not None]
    assert tokens[0] is not None and tokens[1] is not None and len(tokens[0]) == 24
    # The rounding of a block of nine rows is another than that of one.
    for one, other in zip(*tokens, strict=True):
        assert (one.token, one.logprob) == (other.token, pytest.approx(other.logprob, abs=1e-4))
        assert [entry.token for entry in one.top_logprobs] == [
            entry.token for entry in other.top_logprobs
        ]
    data = b"".join(bytes(token.bytes or ()) for token in tokens[0])
    assert data.decode(errors="replace") == found[0].message.content
    expected = triton.generate(
        messages=QUESTION,
        logit_bias_ids=[5],
        logit_bias_values=[-100],
        return_log_probs=True,
        **SAMPLED,
    )
    assert [token.logprob for token in tokens[0]] == pytest.approx(expected.log_probs, abs=1e-4)
    for token in tokens[0]:
        top = [entry.logprob for entry in token.top_logprobs]
        assert len(top) == 3 and top == sorted(top, reverse=True) and token.logprob <= top[0]


def test_a_text_is_scored_as_evaluation_harnesses_ask(client: openai.OpenAI) -> None:
    """lm-eval's `local-completions` sends these, and reads the lists up to the last token."""
    text = PROMPT + "    return sum(values) / len(values)\n"
    scored = client.completions.create(
        model=MODEL, prompt=text, echo=True, logprobs=1, max_tokens=0, temperature=0
    ).choices[0]
    assert (scored.text, scored.finish_reason) == (text, "length")
    lists = scored.logprobs
    assert lists is not None and lists.tokens and lists.token_logprobs and lists.text_offset
    assert "".join(lists.tokens) == text
    assert lists.token_logprobs[0] is None and all(p < 0 for p in lists.token_logprobs[1:])
    starts = lists.text_offset
    assert [
        text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)
    ] == lists.tokens
    # What follows a prompt has the score that the whole has there.
    more = client.completions.create(
        model=MODEL, prompt=text, echo=True, logprobs=1, max_tokens=4, temperature=0
    ).choices[0]
    assert more.logprobs is not None and more.logprobs.token_logprobs
    assert more.text.startswith(text)
    again = client.completions.create(
        model=MODEL, prompt=more.text, echo=True, logprobs=1, max_tokens=0
    ).choices[0]
    assert again.logprobs is not None and again.logprobs.token_logprobs
    assert again.logprobs.token_logprobs[1:] == pytest.approx(
        more.logprobs.token_logprobs[1:], abs=1e-4
    )


def test_acceptance_comes_beside_the_usage(client: openai.OpenAI, triton: Client) -> None:
    drafted: Any = {"num_draft_tokens": 4}
    expected = triton.generate(PROMPT, **drafted, **SAMPLED).statistics
    assert expected is not None and expected.total_draft_tokens > 0
    whole = client.completions.create(model=MODEL, prompt=PROMPT, extra_body=drafted, **SAMPLED)
    found = whole.model_dump()["metrics"]["speculative_decoding"]
    histogram = found["acceptance_histogram"]
    assert sum(n * steps for n, steps in enumerate(histogram)) == found["num_accepted_draft_tokens"]
    assert found["num_spec_steps"] == sum(histogram)
    assert (found["num_draft_tokens"], found["num_accepted_draft_tokens"]) == (
        expected.total_draft_tokens,
        expected.total_accepted_draft_tokens,
    )
    plain = client.completions.create(
        model=MODEL, prompt=PROMPT, extra_body={"num_draft_tokens": 0}, **SAMPLED
    )
    assert "metrics" not in plain.model_dump()


def test_errors_are_the_client_s_exceptions(client: openai.OpenAI) -> None:
    def refused(**body: Any) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as error:
            client.completions.create(**{"model": MODEL, "prompt": PROMPT, **body})
        return error.value

    assert isinstance(refused(model="other"), openai.NotFoundError)
    for body, param in (
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"prompt": [[4095, 5000]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"max_tokens": 1025}, "max_tokens"),
        ({"extra_body": {"num_draft_tokens": 9}}, "num_draft_tokens"),
        ({"extra_body": {"unheard": 1}}, "unheard"),
        ({"temperature": 1e9}, "temperature"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
    ):
        for stream in (False, True):
            error = refused(**body, stream=stream)
            assert isinstance(error, openai.BadRequestError), error
            assert error.param == param, error
    with pytest.raises(openai.NotFoundError, match="/v1/responses"):
        client.responses.create(model=MODEL, input="x")
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        client.embeddings.create(model=MODEL, input="x")


def test_tokens_of_a_text_and_of_a_conversation(client: openai.OpenAI, triton: Client) -> None:
    found: Any = client.post(
        "../tokenize", body={"prompt": PROMPT, "return_token_strs": True}, cast_to=object
    )
    assert "".join(found["token_strs"]) == PROMPT
    text: Any = client.post("../detokenize", body={"tokens": found["tokens"]}, cast_to=object)
    assert text["prompt"] == PROMPT
    chat: Any = client.post("../tokenize", body={"messages": QUESTION}, cast_to=object)
    expected = triton.generate(messages=QUESTION, max_tokens=1).statistics
    assert expected is not None and chat["count"] == expected.num_input_tokens
    by_ids = client.completions.create(model=MODEL, prompt=chat["tokens"], **SAMPLED)
    by_chat = client.chat.completions.create(model=MODEL, messages=QUESTION, **SAMPLED)
    assert by_ids.choices[0].text.strip() == (by_chat.choices[0].message.content or "").strip()
    assert json.loads(by_chat.model_dump_json())["object"] == "chat.completion"
    assert [model.id for model in client.models.list()] == [MODEL]


class Verdict(BaseModel):
    is_good: bool
    grade: Literal["a", "b", "c"]


class Weather(BaseModel):
    """Tells the weather."""

    city: Literal["Bonn", "Rome"]
    days: Literal[1, 2, 3]


def test_answers_that_follow_a_schema_are_parsed(client: openai.OpenAI, triton: Client) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Verdict, seed=5
    )
    (choice,) = parsed.choices
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Verdict)
    schema = json.dumps(to_strict_json_schema(Verdict))
    expected = triton.generate(
        messages=QUESTION,
        max_tokens=100,
        temperature=1.0,
        seed=5,
        guided_decoding_guide_type="json_schema",
        guided_decoding_guide=schema,
    )
    assert choice.message.content == expected.text
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Verdict, seed=5
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed
    for guide, pattern in (
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"regex": "[ab]{3}-[0-9]"}}, "[ab]{3}-[0-9]"),
        ({"guided_grammar": 'root ::= "x" ("y" | "z")'}, "x[yz]"),
        ({"guided_grammar": 'start: "x" ("y" | "z")'}, "x[yz]"),
    ):
        found = client.completions.create(model=MODEL, prompt=PROMPT, extra_body=guide)
        assert re.fullmatch(pattern, found.choices[0].text), (guide, found)
        assert found.choices[0].finish_reason == "stop"


def test_a_call_that_must_be_is_parsed(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    for choice in ("required", {"type": "function", "function": {"name": "Weather"}}):
        body: Any = {
            "model": MODEL,
            "messages": QUESTION,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "seed": 3,
        }
        (found,) = client.chat.completions.parse(**body).choices
        assert found.finish_reason == "tool_calls" and found.message.tool_calls
        (call,) = found.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)
        with client.chat.completions.stream(**body) as stream:
            (streamed,) = stream.get_final_completion().choices
        assert streamed.message.tool_calls is not None
        assert [c.function.parsed_arguments for c in streamed.message.tool_calls] == [
            call.function.parsed_arguments
        ]
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    message = found.message.model_dump(include={"role", "content", "tool_calls"})
    after = client.chat.completions.create(
        model=MODEL, messages=[*QUESTION, message, result], max_tokens=4, tools=tools
    )
    assert after.usage is not None and after.usage.completion_tokens > 0


def test_guides_that_nothing_can_follow_are_named(client: openai.OpenAI) -> None:
    def refused(**body: Any) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=MODEL, messages=QUESTION, **body)
        return error.value

    wrong = {"type": "object", "properties": {"a": {"type": "frog"}}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}
    error = refused(response_format=schema)
    assert error.param == "response_format" and "properties.a" in error.message
    assert refused(extra_body={"guided_regex": "("}).param == "guided_regex"
    assert refused(extra_body={"structured_outputs": {"grammar": "start: x"}}).param == (
        "structured_outputs.grammar"
    )


def test_a_prediction_that_is_right_is_counted(client: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "messages": QUESTION, **SAMPLED}
    plain = client.chat.completions.create(**body).choices[0].message.content
    predicted = client.chat.completions.create(
        **body, prediction={"type": "content", "content": plain or ""}
    )
    assert predicted.choices[0].message.content == plain
    assert predicted.usage is not None
    details = predicted.usage.completion_tokens_details
    assert details is not None and (details.accepted_prediction_tokens or 0) > 0


def test_every_parameter_of_the_client_is_known() -> None:
    for params, body in (
        (chat.completion_create_params.CompletionCreateParamsStreaming, ChatRequest),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
    ):
        names = params.__required_keys__ | params.__optional_keys__
        assert len(names) > 15 and names - set(body.model_fields) == set()
