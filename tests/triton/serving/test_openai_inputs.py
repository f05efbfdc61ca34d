"""The inputs that OpenAI's API needs: what they mean, and how they are refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from specpipe.errors import RequestError, ServerError
from specpipe.speculative.guide import Guide
from specpipe.speculative.request import Chunk, Statistics
from specpipe.triton.client import Completion, read_completion
from specpipe.triton.serving.answers import Answer
from specpipe.triton.serving.requests import Generation
from tests.triton.serving.asked import SIGNER, parse

ASKED = {"text_input": "ab", "max_tokens": 3}
CHAT = {"messages": '[{"role": "user", "content": "hi"}]', "max_tokens": 3}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


class Calls:
    """Writes the names that may be called, and what else decides the grammar."""

    def is_reasoning_after(self, prompt: str) -> bool:
        return prompt.endswith("?")

    def after_thoughts(self, guide: Guide, prompt: str) -> Guide:
        if not self.is_reasoning_after(prompt):
            return guide
        return Guide(type="lark", text=f"thoughts {guide.type} {guide.text}")

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool, is_reasoning: bool = False
    ) -> str:
        names = (tool["function"]["name"] for tool in tools)
        return " ".join([*names, "+" * is_parallel, "?" * is_reasoning])


def refusal(**inputs: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse(**inputs)
    assert len(str(caught.value)) < 300
    return str(caught.value)


def test_a_prompt_of_token_ids_is_taken_as_it_is_and_may_be_echoed() -> None:
    generation = parse(input_ids=[97, 98, 97], max_tokens=2, exclude_input_in_output=False)
    request = generation.request
    assert (request.prompt_token_ids, request.echo) == ((97, 98, 97), True)
    assert request.text_token_ids == (97, 98, 97)


def test_every_input_of_the_api_arrives_and_survives_the_way_to_the_pair() -> None:
    sent = parse(
        **ASKED,
        stop_token_ids=[7, 8],
        logit_bias_ids=[5, 6, 5],
        logit_bias_values=[1.5, -100.0, 0.5],
        embedding_bias_words=["a", "", "ba"],
        embedding_bias_weights=[0.25, 9.0, 1.0],
        num_top_log_probs=4,
        return_prompt_log_probs=True,
        return_token_ids=True,
        prediction="xy",
        guided_decoding_guide_type="regex",
        guided_decoding_guide="a+",
        skip_special_tokens=False,
    )
    request = sent.request
    assert request.end_token_ids == {2, 7, 8}
    assert request.sampling.logit_bias == (
        *((5, 1.5), (6, -100.0), (5, 0.5)),
        *((97, 0.25), (98, 1.0), (97, 1.0)),
    )
    assert (request.return_log_probs, request.num_top_log_probs) == (True, 4)
    assert (request.return_prompt_log_probs, sent.return_token_ids) == (True, True)
    assert request.prediction_token_ids == (120, 121)
    assert request.guide == Guide(type="regex", text="a+")
    assert not request.skip_special_tokens
    received = Generation.from_tensors(
        sent.to_tensors(SIGNER), request_id="", signer=SIGNER, max_seq_len=1024
    )
    assert received == sent


def test_ends_besides_the_checkpoints_or_instead_of_them() -> None:
    asked = {**ASKED, "stop_token_ids": [7]}
    assert parse(**asked, ignore_eos=True).request.end_token_ids == {7}
    assert parse(**asked, ignore_eos=True, end_id=-1).request.end_token_ids == {7}
    assert parse(**asked, end_id=9).request.end_token_ids == {7, 9}
    assert parse(**ASKED, ignore_eos=True).request.end_token_ids == set()


@pytest.mark.parametrize(
    "neutral",
    [
        {"embedding_bias_words": ""},
        {"embedding_bias_weights": 0.0},
        {"embedding_bias_words": "", "embedding_bias_weights": [0.0, 0.0]},
        {"guided_decoding_guide_type": "", "guided_decoding_guide": ""},
        {"num_top_log_probs": 0, "prediction": "", "ignore_eos": False},
    ],
    ids=str,
)
def test_what_asks_for_nothing_passes(neutral: dict[str, Any]) -> None:
    found = parse(**ASKED, seed=1, **neutral)
    assert found == parse(**ASKED, seed=1)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (
            {"input_ids": [97], **ASKED},
            "text_input, input_ids and messages: exactly one is needed, text_input and input_ids "
            "were given",
        ),
        (
            {"input_ids": [], "max_tokens": 1},
            "input_ids is empty: a prompt needs at least one token",
        ),
        (
            {"input_ids": [97, 0x110000], "max_tokens": 1},
            "input_ids has 1114112, which is no token of this model",
        ),
        (
            {"input_ids": [97] * 10**6, "max_tokens": 1},
            "the prompt has 1000000 tokens; prompt and output together may have 1024 "
            "(engine.max_seq_len)",
        ),
        (
            {**ASKED, "stop_token_ids": [7, 2**31 - 1]},
            "stop_token_ids has 2147483647, which is no token of this model",
        ),
        (
            {**ASKED, "stop_token_ids": [7] * 257},
            "stop_token_ids has 257 entries; it may have 256 (serving.limits.max_words)",
        ),
        (
            {**ASKED, "ignore_eos": True, "end_id": 7},
            "ignore_eos is true, and end_id is 7: leave one out",
        ),
        (
            {**ASKED, "logit_bias_ids": [5, 6], "logit_bias_values": 1.0},
            "logit_bias_ids has 2 entries, logit_bias_values 1: each takes one of the other",
        ),
        (
            {**ASKED, "logit_bias_values": 1.0},
            "logit_bias_ids has 0 entries, logit_bias_values 1: each takes one of the other",
        ),
        (
            {**ASKED, "logit_bias_ids": 0x110000, "logit_bias_values": 1.0},
            "logit_bias_ids has 1114112, which is no token of this model",
        ),
        (
            {**ASKED, "logit_bias_ids": 5, "logit_bias_values": math.inf},
            "logit_bias_values has inf; it must be a number",
        ),
        (
            {**ASKED, "logit_bias_ids": [5] * 1025},
            "logit_bias_ids has 1025 entries; it may have 1024 (serving.limits.max_logit_biases)",
        ),
        (
            {**ASKED, "embedding_bias_words": "a"},
            "embedding_bias_words has 1 entries, embedding_bias_weights 0: each takes one of the "
            "other",
        ),
        (
            {**ASKED, "embedding_bias_words": "a", "embedding_bias_weights": math.nan},
            "embedding_bias_weights has nan; it must be a number",
        ),
        (
            {**ASKED, "num_top_log_probs": 21},
            "num_top_log_probs is 21; it must be between 0 and 20",
        ),
        (
            {**ASKED, "num_top_log_probs": -1},
            "num_top_log_probs is -1; it must be between 0 and 20",
        ),
        (
            {**ASKED, "prediction": "x" * 1025},
            "prediction has 1025 tokens; prompt and output together may have 1024 "
            "(engine.max_seq_len)",
        ),
        (
            {**ASKED, "guided_decoding_guide": "a+"},
            "guided_decoding_guide was sent without its type: json, json_schema, regex, "
            "ebnf_grammar, choice, lark",
        ),
        (
            {**ASKED, "guided_decoding_guide_type": "structural_tag"},
            "guided_decoding_guide_type is 'structural_tag'; it must be one of json, json_schema, "
            "regex, ebnf_grammar, choice, lark",
        ),
        (
            {**ASKED, "guided_decoding_guide_type": "x" * 16000},
            f"guided_decoding_guide_type is '{'x' * 80}…'; it must be one of json, json_schema, "
            "regex, ebnf_grammar, choice, lark",
        ),
        (
            {
                **ASKED,
                "guided_decoding_guide_type": "regex",
                "guided_decoding_guide": "bad: 3",
            },
            "guided_decoding_guide: bad: 3",
        ),
        (
            {**ASKED, "guided_decoding_guide_type": "regex"},
            "guided_decoding_guide_type 'regex' needs a guided_decoding_guide",
        ),
        (
            {
                **ASKED,
                "guided_decoding_guide_type": "json",
                "guided_decoding_guide": '{"type": "object"}',
            },
            "guided_decoding_guide_type 'json' is any JSON and takes no guided_decoding_guide; "
            "'json_schema' does",
        ),
        (
            {**ASKED, "tools": "[]"},
            "tools says how messages are rendered: send it with messages",
        ),
        (
            {**ASKED, "add_generation_prompt": True},
            "add_generation_prompt says how messages are rendered: send it with messages",
        ),
        (
            {**CHAT, "add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt and continue_final_message are both true: an answer either "
            "begins or goes on; leave one out",
        ),
        (
            {**CHAT, "tools": "x" * 262145},
            "tools has 262145 bytes; at most 262144 are taken (serving.limits.max_tools_bytes)",
        ),
        (
            {**CHAT, "tool_choice": "x" * 262145},
            "tool_choice has 262145 bytes; at most 262144 are "
            "taken (serving.limits.max_tools_bytes)",
        ),
        (
            {**CHAT, "chat_template_kwargs": "x" * 65537},
            "chat_template_kwargs has 65537 bytes; at "
            "most 65536 are taken (serving.limits.max_template_kwargs_bytes)",
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, str) else "",
)
def test_refusals_name_the_input(inputs: dict[str, Any], sentence: str) -> None:
    assert refusal(**inputs) == sentence


@pytest.mark.parametrize(
    ("choice", "prompt", "grammar"),
    [
        ({}, "fghi", None),
        ({"tool_choice": "auto"}, "fghi", None),
        ({"tool_choice": "none"}, "hi", None),
        ({"tool_choice": "required"}, "fghi", "f g + "),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "fghi", "f g  "),
        ({"tool_choice": json.dumps(TOOLS[1])}, "fghi", "g  "),
    ],
    ids=str,
)
def test_what_a_tool_choice_means(choice: dict[str, Any], prompt: str, grammar: str | None) -> None:
    request = parse(**CHAT, tools=json.dumps(TOOLS), **choice, calls=Calls()).request
    assert "".join(map(chr, request.prompt_token_ids[1:])) == prompt
    assert request.guide == (None if grammar is None else Guide(type="lark", text=grammar))
    open_ = {**CHAT, "messages": '[{"role": "user", "content": "<think>?"}]'}
    guide = parse(**open_, tools=json.dumps(TOOLS), **choice, calls=Calls()).request.guide
    assert guide == (None if grammar is None else Guide(type="lark", text=f"{grammar}?"))


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (
            {"tool_choice": "required"},
            "tool_choice is required: send such a function in tools",
        ),
        (
            {"tools": json.dumps(TOOLS), "tool_choice": json.dumps(TOOLS[0]).replace("f", "g", 1)},
            "tool_choice must be none, auto, required, or JSON such as "
            '{"type": "function", "function": {"name": "f"}}',
        ),
        (
            {
                "tools": json.dumps(TOOLS),
                "tool_choice": '{"type": "function", "function": {"name": "h"}}',
            },
            "tool_choice names 'h': send such a function in tools",
        ),
        (
            {
                "tools": json.dumps(TOOLS),
                "tool_choice": "required",
                "guided_decoding_guide_type": "json",
            },
            "guided_decoding_guide_type and tool_choice both say what the answer must be: leave "
            "one out",
        ),
        (
            {"tools": json.dumps(TOOLS), "tool_choice": "required"},
            "tool_choice: how this model writes calls is not known, so none can be asked for",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_tool_choice_that_cannot_be_kept(inputs: dict[str, Any], sentence: str) -> None:
    assert refusal(**CHAT, **inputs) == sentence


def test_tools_whose_calls_cannot_be_forced_are_refused_by_their_name() -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "bad"}}])
    asked = {**CHAT, "tools": tools, "tool_choice": "required", "calls": Calls()}
    assert refusal(**asked) == "tools: bad + "


def test_a_guide_holds_after_the_thoughts_that_a_prompt_opens() -> None:
    asked = {"max_tokens": 3, "guided_decoding_guide_type": "regex", "guided_decoding_guide": "a"}
    for content, guide in (
        ("hi", Guide(type="regex", text="a")),
        ("<think>?", Guide(type="lark", text="thoughts regex a")),
    ):
        messages = json.dumps([{"role": "user", "content": content}])
        assert parse(messages=messages, **asked, calls=Calls()).request.guide == guide
    plain = parse(text_input="<think>?", **asked, calls=Calls()).request
    assert plain.guide == Guide(type="regex", text="a")


def test_an_answer_that_goes_on_is_no_text_of_its_own() -> None:
    assert parse(**CHAT).request.starts_text
    assert not parse(**CHAT, continue_final_message=True).request.starts_text


STATISTICS = Statistics(
    num_input_tokens=3,
    num_output_tokens=3,
    num_steps=2,
    total_draft_tokens=4,
    total_accepted_draft_tokens=2,
    seed_used=1,
    acceptance_rate=0.5,
    draft_status="drafted",
    accepted_prediction_tokens=2,
    rejected_prediction_tokens=1,
    num_cached_input_tokens=2,
    num_preemptions=1,
)
CHUNKS = [
    Chunk(
        request_id="s1",
        token_ids=(5,),
        log_probs=(-1.0,),
        top_log_probs=(((5, -1.0), (6, -1.5)),),
        prompt_log_probs=(-0.5, -0.25),
        prompt_top_log_probs=(((1, -0.5), (2, -2.0)), ((3, -0.125), (4, -0.25))),
    ),
    Chunk(
        request_id="s1",
        text="é",
        token_ids=(7,),
        log_probs=(-3.0,),
        top_log_probs=(((8, -0.5), (7, -3.0)),),
    ),
    Chunk(
        request_id="s1",
        text="n",
        token_ids=(9,),
        log_probs=(-2.0,),
        top_log_probs=(((9, -2.0), (1, -4.0)),),
    ),
    Chunk(request_id="s1", finish_reason="stop", statistics=STATISTICS),
]
ALL_OF_IT = {"return_token_ids": True, "num_top_log_probs": 2, "return_prompt_log_probs": True}


def completions(*, flat: bool, chunks: Sequence[Chunk] = CHUNKS, **inputs: Any) -> list[Completion]:
    """What a client makes of an answer; protocols deliver it flat, or one element as itself."""
    answer = Answer(parse(**ASKED, **inputs), "s1")
    read = []
    for chunk in chunks:
        response = answer.add(chunk)
        if response is None:
            continue
        values: dict[str, Any] = {
            name: array.reshape(-1).tolist() if flat else array.tolist()
            for name, array in response.items()
        }
        values["text_output"] = values.pop("text")
        scalars = {n: v for n, v in values.items() if np.size(v) == 1}
        values |= {name: np.reshape(value, -1).tolist()[0] for name, value in scalars.items()}
        read.append(read_completion(values, "grpc://x: ensemble"))
    return read


@pytest.mark.parametrize("flat", [True, False])
def test_ids_and_likeliest_tokens_survive_the_way_to_the_client(flat: bool) -> None:
    assert completions(flat=flat, stream=True, **ALL_OF_IT) == [
        Completion(
            text="é",
            token_ids=(5, 7),
            log_probs=(-1.0, -3.0),
            top_log_probs=(((5, -1.0), (6, -1.5)), ((8, -0.5), (7, -3.0))),
            prompt_log_probs=(-0.5, -0.25),
            prompt_top_log_probs=(((1, -0.5), (2, -2.0)), ((3, -0.125), (4, -0.25))),
        ),
        Completion(
            text="n",
            token_ids=(9,),
            log_probs=(-2.0,),
            top_log_probs=(((9, -2.0), (1, -4.0)),),
        ),
        Completion(text="", finish_reason="stop", statistics=STATISTICS),
    ]
    (whole,) = completions(flat=flat, **ALL_OF_IT)
    assert (whole.text, whole.token_ids, whole.log_probs) == ("én", (5, 7, 9), (-1.0, -3.0, -2.0))
    assert len(whole.top_log_probs) == 3 and len(whole.prompt_top_log_probs) == 2
    assert (whole.finish_reason, whole.statistics) == ("stop", STATISTICS)


def test_nothing_is_sent_that_was_not_asked_for() -> None:
    (whole,) = completions(flat=True)
    assert whole == Completion(text="én", finish_reason="stop", statistics=STATISTICS)
    (whole,) = completions(flat=True, return_prompt_log_probs=True)
    assert (whole.prompt_log_probs, whole.prompt_top_log_probs) == ((-0.5, -0.25), ())


def test_a_prompt_of_one_token_has_no_log_probs() -> None:
    last = dataclasses.replace(CHUNKS[3], statistics=STATISTICS)
    (whole,) = completions(flat=True, chunks=[last], **ALL_OF_IT)
    assert (whole.prompt_log_probs, whole.prompt_top_log_probs) == ((), ())


@pytest.mark.parametrize(
    "values",
    [
        {"output_top_log_prob_ids": [1, 2], "output_top_log_probs": [-1.0]},
        {"output_top_log_prob_ids": [1, 2], "output_top_log_probs": [-1.0, -2.0]},
        {
            "output_log_probs": [-1.0, -2.0],
            "output_top_log_prob_ids": [1, 2, 3],
            "output_top_log_probs": [-1.0, -2.0, -3.0],
        },
        {"output_ids": "abc"},
        {"output_ids": [1.5]},
    ],
    ids=str,
)
def test_what_is_no_answer_is_one_sentence(values: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="^http://x: ensemble sent what is no answer of the ens"):
        read_completion(values, "http://x: ensemble")
