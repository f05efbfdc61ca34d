"""Tensors to requests and back; no Triton, no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpipe.errors import RequestError, ServerError
from specpipe.speculative import request as requests
from specpipe.speculative.request import Chunk, Request, Sampling, Statistics, join_chunks
from specpipe.speculative.state import RequestState
from specpipe.text.tokenizer import Tokenizer
from specpipe.triton import serving
from specpipe.triton.secret import Signer
from specpipe.triton.serving.answers import Answer
from specpipe.triton.serving.requests import Generation, parse_request
from tests import toy_tokenizers
from tests.triton.serving.asked import LIMITS, SIGNER, UNKNOWN, Words, parse


def test_every_tensor_of_nvidias_ensemble_is_there() -> None:
    names = {tensor.name for tensor in serving.ENSEMBLE_INPUTS}
    assert names >= {
        *("text_input", "max_tokens", "decoder_text_input", "num_return_sequences", "bad_words"),
        *("stop_words", "exclude_input_in_output", "end_id", "pad_id", "top_k", "min_tokens"),
        *("beam_width", "prompt_vocab_size", "top_p", "temperature", "length_penalty"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
        *("prompt_table_extra_id", "lora_task_id", "return_log_probs", "return_context_logits"),
        *("return_generation_logits", "return_perf_metrics", "return_num_input_tokens", "stream"),
        *("return_num_output_tokens", "prompt_embedding_table", "embedding_bias_words"),
        *("embedding_bias_weights", "lora_weights", "lora_config", "guided_decoding_guide_type"),
        "guided_decoding_guide",
    }
    outputs = {tensor.name for tensor in serving.ENSEMBLE_OUTPUTS}
    assert outputs >= {
        *("text_output", "cum_log_probs", "output_log_probs", "context_logits", "batch_index"),
        *("generation_logits", "sequence_index", "kv_cache_alloc_new_blocks", "acceptance_rate"),
        *("kv_cache_reused_blocks", "kv_cache_alloc_total_blocks", "arrival_time_ns"),
        *("first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
        *("total_accepted_draft_tokens", "total_draft_tokens", "num_input_tokens"),
        "num_output_tokens",
    }
    assert names - {tensor.name for tensor in serving.ENSEMBLE_OUTPUTS} == names


def test_the_table_needs_neither_torch_nor_triton() -> None:
    code = "import sys, specpipe.triton.serving; print([m for m in sys.modules if m in sys.argv])"
    listed = subprocess.run(
        [sys.executable, "-c", code, "torch", "tritonclient", "triton_python_backend_utils"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert listed.stdout == "[]\n"


def test_greedy_by_default() -> None:
    generation = parse(text_input="ab", max_tokens=3)
    sampling = generation.request.sampling
    assert generation == Generation(
        request=Request(
            request_id="",
            prompt_token_ids=(1, 97, 98),
            max_tokens=3,
            sampling=Sampling(seed=sampling.seed),
            end_token_ids=frozenset({2}),
        )
    )
    assert sampling.is_greedy and not sampling.is_seeded


def test_without_a_seed_each_request_gets_its_own() -> None:
    first, second = (parse(text_input="a", max_tokens=1).request.sampling for _ in range(2))
    assert first.seed != second.seed


def test_every_setting_arrives() -> None:
    generation = parse(
        text_input="ab",
        max_tokens=3,
        num_draft_tokens=2,
        stream=True,
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        seed=2**64 - 1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        min_tokens=1,
        bad_words=["xy", "z"],
        stop_words=["\n", "a,b"],
        end_id=7,
        pad_id=0,
        priority=3,
        timeout_s=2.5,
        exclude_input_in_output=False,
        return_log_probs=True,
    )
    assert generation == Generation(
        request=Request(
            request_id="",
            prompt_token_ids=(1, 97, 98),
            max_tokens=3,
            sampling=Sampling(
                temperature=0.7,
                top_k=40,
                top_p=0.9,
                min_p=0.05,
                repetition_penalty=1.1,
                presence_penalty=0.2,
                frequency_penalty=-0.3,
                min_tokens=1,
                bad_words=((120, 121), (122,)),
                seed=2**64 - 1,
                is_seeded=True,
            ),
            num_draft_tokens=2,
            end_token_ids=frozenset({7}),
            stop_strings=("\n", "a,b"),
            echo=True,
            return_log_probs=True,
            priority=3,
            timeout_s=2.5,
        ),
        stream=True,
    )


@pytest.mark.parametrize(
    ("inputs", "temperature"),
    [
        ({"top_k": 50}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"min_p": 0.1}, 1.0),
        ({"top_k": 0, "top_p": 0.0}, 0.0),  # unset, as NVIDIA's clients send it
        ({"top_k": 1, "top_p": 1.0}, 0.0),
        ({"top_k": 50, "temperature": 0.0}, 0.0),
        ({"temperature": 0.5}, 0.5),
    ],
)
def test_what_makes_a_request_sample(inputs: dict[str, float], temperature: float) -> None:
    sampling = parse(text_input="a", max_tokens=1, **inputs).request.sampling
    assert sampling.temperature == temperature
    assert sampling.is_greedy == (temperature == 0.0)


def test_one_end_id_or_none() -> None:
    assert parse(text_input="a", max_tokens=1, end_id=-1).request.end_token_ids == frozenset()
    with pytest.raises(RequestError, match="^end_id is -2; it must be a token id, or -1 for none$"):
        parse(text_input="a", max_tokens=1, end_id=-2)
    with pytest.raises(RequestError, match="^end_id is 1114112, which is no token of this model$"):
        parse(text_input="a", max_tokens=1, end_id=0x110000)


def test_words_are_taken_as_they_stand() -> None:
    words = ["\n", "a,b", '"', " end"]
    assert parse(text_input="a", max_tokens=1, stop_words=words).request.stop_strings == tuple(
        words
    )


def test_an_empty_word_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    generation = parse(text_input="a", max_tokens=1, stop_words="", bad_words=["", "x"])
    assert generation.request.stop_strings == ()
    assert generation.request.sampling.bad_words == ((120,),)
    assert caplog.messages == [
        "bad_words: an empty word is ignored",
        "stop_words: an empty word is ignored",
    ]


def test_messages_instead_of_text() -> None:
    messages = json.dumps([{"role": "user", "content": "hi"}])
    request = parse(messages=messages, max_tokens=1).request
    assert (request.prompt_token_ids, request.starts_text) == ((1, 104, 105), True)
    assert not parse(text_input="hi", max_tokens=1).request.starts_text


def test_the_timeout_of_a_grpc_client() -> None:
    asked = {"text_input": "a", "max_tokens": 1}
    assert parse(**asked, timeout_us=1_500_000).request.timeout_s == 1.5
    assert parse(**asked, timeout_us=1_500_000, timeout_s=3.0).request.timeout_s == 3.0
    assert parse(**asked).request.timeout_s is None


@pytest.mark.parametrize(
    "name",
    [tensor.name for tensor in serving.ENSEMBLE_INPUTS if tensor.neutral is not None],
)
def test_an_unsupported_input_passes_with_its_neutral_values_alone(name: str) -> None:
    tensor = serving.input_tensor(name)
    assert tensor.neutral is not None
    rank = len(tensor.dims) + 1
    for neutral in tensor.neutral:
        value = neutral.encode() if isinstance(neutral, str) else neutral
        assert parse(text_input="a", max_tokens=1, **{name: value}).request.max_tokens == 1
    other: Any = {"STRING": "json", "BOOL": True}.get(tensor.dtype, 3)
    tensors = {
        "text_input": serving.as_array(serving.input_tensor("text_input"), [b"a"]),
        "max_tokens": serving.as_array(serving.input_tensor("max_tokens"), [1]),
        name: np.array([other], dtype=tensor.numpy_dtype).reshape((1,) * rank),
    }
    with pytest.raises(RequestError, match=f"^{name} is not supported: "):
        parse_request(tensors, Words(), limits=LIMITS, calls=UNKNOWN)
    empty = np.zeros((1,) * (rank - 1) + (0,), dtype=tensor.numpy_dtype)
    if -1 in tensor.dims:
        passes = parse_request({**tensors, name: empty}, Words(), limits=LIMITS, calls=UNKNOWN)
        assert passes.request.max_tokens == 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": "a"}, "max_tokens is missing: say how many tokens the answer may have"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
        (
            {"max_tokens": 1},
            "text_input, input_ids and messages: exactly one is needed, none was given",
        ),
        (
            {"text_input": "a", "messages": "[]", "max_tokens": 1},
            "text_input, input_ids and messages: exactly one is needed, text_input and messages "
            "were given",
        ),
        (
            {"text_input": "", "max_tokens": 1},
            "text_input is empty: a prompt needs at least one character",
        ),
        (
            {"messages": "hello", "max_tokens": 1},
            "messages is not JSON (Expecting value: line 1 column 1 (char 0)): expected a JSON "
            'array such as [{"role": "user", "content": "Hello"}]',
        ),
        (
            {"messages": '{"role": "user"}', "max_tokens": 1},
            'messages must be a list such as [{"role": "user", "content": "hi"}]',
        ),
        (
            {"messages": '[{"content": "a"}]', "max_tokens": 1},
            'messages[0] must be an object with a "role"',
        ),
        (
            {
                "messages": '[{"role": "u", "content": "a"}]',
                "max_tokens": 1,
                "exclude_input_in_output": False,
            },
            "exclude_input_in_output is false: messages cannot be echoed",
        ),
        ({"text_input": ["a", "b"], "max_tokens": 1}, "text_input has 2 values: it takes one"),
        ({"text_input": b"\xff", "max_tokens": 1}, "text_input is not UTF-8: "),
        (
            {"text_input": "a", "max_tokens": 1, "length_penalty": 2.0},
            "length_penalty is not supported: send 0.0 or 1.0 or leave it out",
        ),
    ],
)
def test_refusals_name_the_field(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**inputs)
    assert str(caught.value).startswith(message)


def test_request_parameters_are_refused_by_the_nearest_name() -> None:
    asked = {"text_input": "a", "max_tokens": 1}
    assert parse(**asked, parameters='{"id": "7"}').request.max_tokens == 1
    for name, advice in (
        ("temprature", "unknown request parameter 'temprature': did you mean 'temperature'?"),
        ("xyz", "unknown request parameter 'xyz': leave it out"),
        ("top_k", "top_k is an input: send it beside text_input, not as a parameter"),
    ):
        with pytest.raises(RequestError) as caught:
            parse(**asked, parameters=json.dumps({name: 1}))
        assert str(caught.value) == advice


def read(tensors: serving.Tensors, signer: Signer = SIGNER) -> Generation:
    return Generation.from_tensors(tensors, request_id="r1", signer=signer, max_seq_len=1024)


BIG = "x" * 10**6


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"text_input": "a" * 16385},
            "text_input has 16385 bytes; at most 16384 are taken (serving.limits.max_prompt_bytes)",
        ),
        (
            {"text_input": "a" * 1023},
            "the prompt has 1024 tokens; prompt and output together may have 1024 "
            "(engine.max_seq_len)",
        ),
        (
            {"messages": BIG},
            "messages has 1000000 bytes; at most 114688 are taken "
            "(serving.limits.max_messages_bytes)",
        ),
        ({"messages": "[" * 10**5}, "messages is nested 100000 deep; it may be 32 "),
        (
            {"text_input": "a", "stop_words": ["ab"] * 10**5},
            "stop_words has 100000 entries; it may have 256 (serving.limits.max_words)",
        ),
        (
            {"text_input": "a", "bad_words": ["ab"] * 10**5},
            "bad_words has 100000 entries; it may have 256 (serving.limits.max_words)",
        ),
        (
            {"text_input": "a", "stop_words": ["ab", "é" * 600]},
            "an entry of stop_words has 1200 bytes; at most 1024 are taken "
            "(serving.limits.max_word_bytes)",
        ),
        (
            {"text_input": "a", "bad_words": ["x" * 1000] * 17},
            "bad_words has 17000 bytes; at most 16384 are taken (serving.limits.max_words_bytes)",
        ),
        (
            {"text_input": "a", "embedding_bias_weights": [0.0] * 10**6},
            "embedding_bias_weights has 1000000 entries; it may have 256 (serving.limits.max_words",
        ),
        (
            {"text_input": "a", "guided_decoding_guide": BIG},
            "guided_decoding_guide has 1000000 bytes; at most 65536 are taken "
            "(serving.limits.max_guide_bytes)",
        ),
        ({"text_input": "a", "timeout_s": math.nan}, "timeout_s is nan; it must be positive"),
        ({"text_input": "a", "timeout_s": math.inf}, "timeout_s is inf; it must be positive"),
        ({"text_input": "a", "temperature": math.nan}, "temperature is nan; it must be 0 "),
        ({"text_input": "a", "min_tokens": -(2**31)}, "min_tokens is -2147483648; it must be 0 "),
        ({"text_input": "a", "end_id": -(2**31)}, "end_id is -2147483648; it must be a token id"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_too_large_is_refused_with_both_numbers(
    inputs: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        parse(max_tokens=1, **inputs)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            json.dumps({"x" * 60_000: 1}),
            f"unknown request parameter '{'x' * 80}…': leave it out",
        ),
        (
            json.dumps({"a\n\x1b[31m": 1}),
            "unknown request parameter 'a\\n\\x1b[31m': leave it out",
        ),
        (
            json.dumps({BIG: 1}),
            "the request parameters have 1000007 bytes; at most 65536 are taken "
            "(serving.limits.max_parameters_bytes)",
        ),
        ("[" * 65_000, "the request parameters are no JSON that can be read"),
        ('{"a":' * 10_000, "the request parameters are no JSON that can be read"),
        (json.dumps({f"k{n}": n for n in range(4000)}), "unknown request parameter 'k0': leave "),
    ],
    ids=lambda value: value[:12],
)
def test_hostile_request_parameters_are_one_short_sentence(parameters: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(text_input="a", max_tokens=1, parameters=parameters)
    assert str(caught.value).startswith(message)


def test_looking_for_the_nearest_name_takes_no_time() -> None:
    """With a name of 1 MB it took seconds."""
    start_s = time.process_time()
    with pytest.raises(RequestError):
        serving.check_known(["max_tokens" * 100_000])
    assert time.process_time() - start_s < 1


def test_a_generation_survives_the_way_to_the_pair() -> None:
    sent = parse(
        text_input="aé",
        max_tokens=3,
        stream=True,
        seed=2**64 - 1,
        temperature=0.3,
        bad_words=["xy"],
        stop_words=["é"],
        timeout_s=0.5,
        exclude_input_in_output=False,
    )
    received = read(sent.to_tensors(SIGNER))
    assert received.request.request_id == "r1"
    assert received.request.prompt_token_ids == (1, 97, 233)
    assert (received.request.echo, received.stream) == (True, True)
    assert received.request.sampling == sent.request.sampling
    assert received.request.stop_strings == ("é",)
    assert received.request.end_token_ids == {2}


def test_a_direct_caller_that_forgets_a_tensor() -> None:
    with pytest.raises(RequestError, match="^request is missing$"):
        read({})
    tensors = parse(text_input="a", max_tokens=1).to_tensors(SIGNER)
    del tensors["prompt_token_ids"]
    with pytest.raises(RequestError, match="^prompt_token_ids is missing$"):
        read(tensors)


def hand_on(fields: Any, prompt_token_ids: Any = (1, 97), **others: Any) -> dict[str, Any]:
    """A request as preprocessing hands it on, with just these contents, signed."""
    text = fields if isinstance(fields, str) else json.dumps(fields)
    ids = np.array([prompt_token_ids], np.int32)
    signature = SIGNER.sign("request", text.encode(errors="surrogatepass"), ids.tobytes())
    return {
        "request": np.array([[text.encode(errors="surrogatepass")]], object),
        "prompt_token_ids": ids,
        "signature": np.array([[signature.encode()]], object),
        **others,
    }


def written(**changes: Any) -> dict[str, Any]:
    """What preprocessing writes into `request`, but for some fields; those of `sampling` too."""
    tensors = parse(text_input="a", max_tokens=3).to_tensors(SIGNER)
    fields: dict[str, Any] = json.loads(tensors["request"].item())
    request = fields["request"]
    sampling = request["sampling"]
    for name, value in changes.items():
        owner = next((d for d in (fields, sampling) if name in d), request)
        owner[name] = value
    return fields


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 2.5}, "request.max_tokens: Input should be a valid integer"),
        ({"max_tokens": 2.0}, "request.max_tokens: Input should be a valid integer"),
        ({"max_tokens": True}, "request.max_tokens: Input should be a valid integer"),
        ({"num_draft_tokens": 1.5}, "request.num_draft_tokens: Input should be a valid integer"),
        ({"num_draft_tokens": "2"}, "request.num_draft_tokens: Input should be a valid integer"),
        ({"stop_strings": [5]}, "request.stop_strings.0: Input should be a valid string"),
        ({"stop_strings": "ab"}, "request.stop_strings: Input should be a valid array"),
        ({"end_token_ids": ["x"]}, "request.end_token_ids.0: Input should be a valid integer"),
        ({"bad_words": [5]}, "request.sampling.bad_words.0: Input should be a valid array"),
        ({"bad_words": [[[5]]]}, "request.sampling.bad_words.0.0: Input should be a valid integer"),
        ({"temperature": None}, "request.sampling.temperature: Input should be a valid number"),
        ({"seed": 1.5}, "request.sampling.seed: Input should be a valid integer"),
        ({"is_seeded": 1}, "request.sampling.is_seeded: Input should be a valid boolean"),
        ({"priority": "first"}, "request.priority: Input should be a valid integer"),
        ({"sampling": []}, "request.sampling: Input should be an object"),
        ({"echo": 5}, "request.echo: Input should be a valid boolean"),
        ({"stream": "no"}, "stream: Input should be a valid boolean"),
        ({"x" * 10**6: 1}, f"request.{'x' * 72}…: Unexpected keyword argument"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_field_of_another_type_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(hand_on(written(**changes)))
    assert str(caught.value) == f"request is not what preprocessing writes: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": math.nan}, "temperature is nan; it must be 0 (greedy) or a positive"),
        ({"top_k": 10**30}, "top_k is a number of more than 30 digits; it must be 0 (off) or"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be an unsigned 64-bit integer"),
        ({"timeout_s": math.inf}, "timeout_s is inf; it must be positive"),
        ({"end_token_ids": [-1]}, "end id -1 is no token id"),
        ({"end_token_ids": [2**31]}, "end id 2147483648 is no token id"),
        ({"max_tokens": -(10**40)}, "max_tokens is a number of more than 30 digits; it must be 1"),
        ({"bad_words": [[]]}, "bad_words has an empty entry; leave it out"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_field_out_of_range_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(hand_on(written(**changes)))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "request is missing"),
        (
            hand_on(written(), prompt_token_ids=[1] * 10**6),
            "the prompt has 1000000 tokens; prompt and output together may have 1024 "
            "(engine.max_seq_len)",
        ),
        (hand_on(written(), prompt_token_ids=[]), "the prompt is empty; send at least one token"),
        (
            {**hand_on(written()), "prompt_token_ids": np.zeros((1, 2), np.int64)},
            "prompt_token_ids is int64; it must be INT32",
        ),
        (
            hand_on(written(), request=np.array([[b"{}"], [b"{}"]], object)),
            "request has 2 values: it takes one",
        ),
        (
            hand_on(written(), request=np.array([[]], object)),
            "request has 0 values: it takes one",
        ),
        (
            {**hand_on(written()), "prompt_token_ids": np.array([[5]], np.int32)},
            "speculative takes requests from the ensemble only: ask 'ensemble'",
        ),
        (
            hand_on(written(), signature=np.array([[b"x" * 10**6]], object)),
            "speculative takes requests from the ensemble only: ask 'ensemble'",
        ),
        (
            hand_on("[" * 100_000),
            "request is not what preprocessing writes: Invalid JSON: recursio",
        ),
        (hand_on('"\ud800"'), "request is not what preprocessing writes: Invalid JSON: "),
        (hand_on("[]"), "request is not what preprocessing writes: Input should be an object"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_tensors_that_preprocessing_never_sends(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(tensors)
    assert str(caught.value).startswith(message)


def test_an_unsigned_request_is_taken_where_there_is_no_secret_alone() -> None:
    tensors = parse(text_input="a", max_tokens=3).to_tensors(Signer(None))
    assert read(tensors, Signer(None)).request.max_tokens == 3
    del tensors["signature"]
    assert read(tensors, Signer(None)).request.max_tokens == 3
    with pytest.raises(RequestError, match="^speculative takes requests from the ensemble only"):
        read(tensors)


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.integers(2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
_FIELDS = [
    *(field.name for field in dataclasses.fields(Generation)),
    *(field.name for field in dataclasses.fields(Request)),
    *(field.name for field in dataclasses.fields(Sampling)),
    "another",
]


@given(
    st.one_of(
        _JSON.map(json.dumps),
        st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4).map(
            lambda changes: json.dumps(written(**changes))
        ),
        st.text(),
    )
)
def test_any_json_is_a_request_that_can_run_or_a_refusal(text: str) -> None:
    try:
        request = read(hand_on(text)).request
    except RequestError as exc:
        assert len(str(exc)) < 300
        return
    assert isinstance(request.max_tokens, int) and isinstance(request.sampling.top_k, int)
    assert all(isinstance(string, str) for string in request.stop_strings)
    assert math.isfinite(request.sampling.temperature)


def test_a_chunk_that_speculative_never_sends() -> None:
    text, stream_id = np.array([[b"a"]], object), np.array([[b"s1"]], object)
    assert serving.read_chunk({"text": text, "stream_id": stream_id}) == (text, b"s1")
    assert serving.read_chunk({"text": text}) == (text, b"")
    for tensors, message in (
        ({"stream_id": stream_id}, "text is missing"),
        ({"text": text, "stream_id": text.repeat(9, 1)}, "stream_id has 9 values: it takes one"),
        (
            {"text": text, "stream_id": np.array([[b"x" * 10**6]], object)},
            "stream_id has 1000000 bytes; it may have 64",
        ),
    ):
        with pytest.raises(RequestError) as caught:
            serving.read_chunk(tensors)
        assert str(caught.value) == message


def test_a_cancel_is_taken_from_postprocessing_alone() -> None:
    tensors = serving.write_cancel(b"s1", SIGNER)
    assert serving.read_cancel(tensors, SIGNER) == "s1"
    strangers = [
        {"cancel": tensors["cancel"]},
        {**tensors, "cancel": np.array([[b"s2"]], object)},
        {**tensors, "signature": np.array([["é" * 32]], object)},
    ]
    for stranger in strangers:
        with pytest.raises(RequestError, match="^speculative takes requests from the ensemble"):
            serving.read_cancel(stranger, SIGNER)
    with pytest.raises(RequestError, match="^cancel has 1000000 values: it takes one$"):
        serving.read_cancel({"cancel": np.array([[b"s1"] * 10**6], object)}, SIGNER)


STATISTICS = Statistics(
    num_input_tokens=3,
    num_output_tokens=4,
    num_steps=2,
    total_draft_tokens=4,
    total_accepted_draft_tokens=2,
    seed_used=2**63 + 1,
    acceptance_rate=0.5,
    draft_status="drafted",
    acceptance_histogram=(1, 0, 1),
)


def answer(chunks: list[Chunk], **inputs: Any) -> list[dict[str, Any]]:
    """The responses to a request, as plain lists."""
    state = Answer(parse(text_input="ab", max_tokens=9, **inputs), "s1")
    responses = [state.add(chunk) for chunk in chunks]
    return [
        {name: array.tolist() for name, array in response.items()}
        for response in responses
        if response is not None
    ]


CHUNKS = [
    Chunk(request_id="s1", text="one ", token_ids=(5, 6), log_probs=(-1.0, -0.5)),
    Chunk(request_id="s1", text="", token_ids=(7,), log_probs=(-0.25,)),
    Chunk(
        request_id="s1",
        text="é",
        token_ids=(8,),
        log_probs=(-2.0,),
        finish_reason="length",
        statistics=STATISTICS,
    ),
]

LAST = {
    "finish_reason": [["length"]],
    "acceptance_rate": [[0.5]],
    "draft_status": [["drafted"]],
    "total_accepted_draft_tokens": [[2]],
    "total_draft_tokens": [[4]],
    "num_steps": [[2]],
    "num_input_tokens": [[3]],
    "num_output_tokens": [[4]],
    "accepted_prediction_tokens": [[0]],
    "rejected_prediction_tokens": [[0]],
    "num_cached_input_tokens": [[0]],
    "num_preemptions": [[0]],
    "acceptance_histogram": [[1, 0, 1]],
    "seed_used": [[2**63 + 1]],
    "is_lossless": [[True]],
}
EACH = {"batch_index": [[0]], "sequence_index": [[0]]}
POLL = {"stream_id": [["s1"]]}


def test_a_stream_has_text_in_each_response_and_statistics_in_the_last() -> None:
    assert answer(CHUNKS, stream=True) == [
        {"text": [["one "]], **EACH, **POLL},
        {"text": [["é"]], **EACH, **LAST},
    ]


def test_whether_the_client_is_gone_is_asked_first_and_then_now_and_then() -> None:
    times = [7.0]
    generation = parse(text_input="ab", max_tokens=9, stream=True)
    state = Answer(generation, "s1", clock=lambda: times[-1])
    polled = []
    for now in (7.0, 7.2, 7.4, 7.55, 7.9, 8.1, 9.0):
        times.append(now)
        if "stream_id" in (state.add(CHUNKS[0]) or {}):
            polled.append(now)
    assert polled == [7.0, 7.55, 8.1, 9.0]


def test_joined_chunks_make_the_response_that_they_would_have_made_together() -> None:
    """The sum of log-probabilities has the same last bits, however chunks were joined."""
    log_probs = [-(0.1 + 0.7 * i) for i in range(12)]
    chunks = [
        Chunk(
            request_id="s1",
            text=f"{i} ",
            token_ids=(i, i + 1),
            log_probs=(log_probs[2 * i], log_probs[2 * i + 1]),
            top_log_probs=(((i, -1.0),), ((i + 1, -1.0),)),
            prompt_log_probs=(-3.0,) if i == 0 else (),
            finish_reason="stop" if i == 5 else None,
            statistics=STATISTICS if i == 5 else None,
        )
        for i in range(6)
    ]
    inputs = {"stream": True, "return_log_probs": True, "num_top_log_probs": 1}
    asked = {**inputs, "return_token_ids": True, "return_prompt_log_probs": True}
    joined = [join_chunks(chunks[:1]), join_chunks(chunks[1:4]), join_chunks(chunks[4:])]
    whole = answer(joined, **asked)
    each = answer(chunks, **asked)
    for name in ("output_ids", "output_log_probs", "output_top_log_prob_ids"):
        of_whole, of_each = (
            np.concatenate([np.ravel(response[name]) for response in responses]).tolist()
            for responses in (whole, each)
        )
        assert of_whole == of_each
    assert "".join(r["text"][0][0] for r in whole) == "0 1 2 3 4 5 "
    assert whole[0]["prompt_log_probs"] == [[-3.0]] and "prompt_log_probs" not in whole[1]
    last = ("finish_reason", "cum_log_probs", "acceptance_histogram", "num_output_tokens")
    assert [whole[-1][name] for name in last] == [each[-1][name] for name in last]


def test_a_whole_answer_is_one_response() -> None:
    assert answer(CHUNKS) == [{"text": [["one é"]], **EACH, **LAST}]
    assert answer([join_chunks(CHUNKS)]) == [{"text": [["one é"]], **EACH, **LAST}]


def test_log_probs_wait_for_the_text_of_their_tokens() -> None:
    responses = answer(CHUNKS, stream=True, return_log_probs=True)
    assert [response["output_log_probs"] for response in responses] == [
        [[[-1.0, -0.5]]],
        [[[-0.25, -2.0]]],
    ]
    assert "cum_log_probs" not in responses[0]
    assert responses[1]["cum_log_probs"] == [[-3.75]]


def test_every_response_fits_the_table() -> None:
    state = Answer(parse(text_input="a", max_tokens=9, return_log_probs=True), "s1")
    for chunk in CHUNKS:
        for name, array in (state.add(chunk) or {}).items():
            tensor = next(t for t in serving.SPECULATIVE_OUTPUTS if t.name == name)
            assert array.dtype == tensor.numpy_dtype
            assert array.shape[0] == 1
            assert all(
                wanted in (-1, size)
                for wanted, size in zip(tensor.dims, array.shape[1:], strict=True)
            )


def test_nothing_drafted_is_a_rate_of_zero_and_a_word() -> None:
    last = Chunk(
        request_id="s1",
        finish_reason="stop",
        statistics=Statistics(
            num_input_tokens=3,
            num_output_tokens=0,
            num_steps=1,
            total_draft_tokens=0,
            total_accepted_draft_tokens=0,
            seed_used=0,
            acceptance_rate=0.0,
            draft_status="too_short",
        ),
    )
    (response,) = answer([last])
    assert (response["acceptance_rate"], response["draft_status"]) == ([[0.0]], [["too_short"]])
    assert response["text"] == [[""]]


FAILED = Chunk(request_id="s1", text="é", finish_reason="error", error="a target row is NaN")


def test_a_failure_before_the_first_response_is_raised() -> None:
    for chunks in ([FAILED], [CHUNKS[1], FAILED]):
        with pytest.raises(ServerError, match="^a target row is NaN$"):
            answer(chunks, stream=True)
    with pytest.raises(ServerError, match="^a target row is NaN$"):
        answer([CHUNKS[0], FAILED])


def test_a_failure_after_it_is_a_normal_last_response() -> None:
    assert answer([CHUNKS[0], FAILED], stream=True)[1] == {
        "text": [["é"]],
        **EACH,
        "finish_reason": [["error"]],
        "error": [["a target row is NaN"]],
    }


def test_statistics_survive_the_way_to_the_client() -> None:
    (response,) = answer(CHUNKS)
    values: dict[str, Any] = {name: np.reshape(v, -1)[0] for name, v in response.items()}
    values["acceptance_histogram"] = response["acceptance_histogram"]
    assert serving.parse_statistics(values) == STATISTICS
    values["acceptance_histogram"] = 2  # as Triton writes one number in JSON
    only_one = dataclasses.replace(STATISTICS, acceptance_histogram=(2,))
    assert serving.parse_statistics(values) == only_one
    assert serving.parse_statistics({"finish_reason": "error"}) is None


def test_a_server_that_tells_neither_rate_nor_status_is_understood() -> None:
    values = {name: value for name, value in STATISTICS.to_json().items() if value is not None}
    del values["acceptance_rate"], values["draft_status"]
    expected = dataclasses.replace(STATISTICS, acceptance_rate=0.0, draft_status=None)
    assert serving.parse_statistics(values) == expected


LEARNING = [{"role": "user", "content": "Deep"}]


@pytest.fixture(scope="module")
def space_mark(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A decoder as Llama 2 has it, which strips the space before the first word of a text."""
    folder = tmp_path_factory.mktemp("space_mark")
    toy_tokenizers.write_tokenizer(
        folder,
        toy_tokenizers.space_mark(),
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    return Tokenizer.load(folder)


def told(tokenizer: Tokenizer, output: list[str], **inputs: Any) -> tuple[str, int]:
    """What a client gets when the target writes these pieces: the text, and the tokens counted."""
    tensors = {"max_tokens": serving.as_array(serving.input_tensor("max_tokens"), [len(output)])}
    for name, value in inputs.items():
        tensors[name] = serving.as_array(serving.input_tensor(name), [value])
    generation = parse_request(tensors, tokenizer, limits=LIMITS, calls=UNKNOWN)
    request = generation.request
    limits = requests.RequestLimits(
        max_num_draft_tokens=4, max_seq_len=64, draft_max_seq_len=64, vocab_size=1000
    )
    state = RequestState(request, limits, tokenizer.detokenizer(request.text_token_ids))
    ids = {name: token_id for token_id, name in tokenizer.tokens().items()}
    received, responses = Answer(generation, stream_id="1"), []
    for piece in output:
        tensors = received.add(state.accept([ids[piece]], num_draft_tokens=0))
        if tensors is not None:
            responses.append(tensors)
        if state.is_finished:
            break
    texts = [response["text"].item() for response in responses]
    return "".join(texts), responses[-1]["num_output_tokens"].item()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"text_input": "Deep"}, (" learning is", 2)),
        ({"text_input": "Deep", "exclude_input_in_output": False}, ("Deep learning is", 2)),
        ({"text_input": "Deep", "stop_words": " learning"}, ("", 0)),
        (
            {"text_input": "Deep", "exclude_input_in_output": False, "stop_words": "Deep"},
            ("Deep learning is", 2),
        ),
        (
            {"text_input": "Deep", "exclude_input_in_output": False, "stop_words": " is"},
            ("Deep learning", 1),
        ),
        # An answer is a text of its own: its template says itself where there are spaces.
        ({"messages": json.dumps(LEARNING)}, ("learning is", 2)),
        ({"messages": json.dumps(LEARNING), "stop_words": " learning"}, ("learning is", 2)),
    ],
)
def test_case_s4_prompt_and_text_are_the_decode_of_all(
    space_mark: Tokenizer, inputs: dict[str, Any], expected: tuple[str, int], stream: bool
) -> None:
    assert told(space_mark, ["▁learning", "▁is"], stream=stream, **inputs) == expected


@pytest.mark.parametrize(
    ("word", "pieces"),
    [("end", [("end",), ("▁end",)]), (" end", [("▁end",)]), ("foo", [("foo",)])],
)
def test_a_bad_word_is_banned_after_a_space_too(
    space_mark: Tokenizer, word: str, pieces: list[tuple[str, ...]]
) -> None:
    """foo is ▁ and foo, of which the last is banned already."""
    inputs = {"text_input": "Deep", "max_tokens": 1, "bad_words": word}
    tensors = {
        name: serving.as_array(serving.input_tensor(name), [value])
        for name, value in inputs.items()
    }
    sampling = parse_request(tensors, space_mark, limits=LIMITS, calls=UNKNOWN).request.sampling
    names = space_mark.tokens()
    assert [tuple(names[i] for i in ids) for ids in sampling.bad_words] == pieces


def test_an_echo_without_text_of_an_output(space_mark: Tokenizer) -> None:
    echoed = {"text_input": "Deep", "exclude_input_in_output": False}
    assert told(space_mark, ["</s>"], **echoed) == ("Deep", 0)
    # A run of byte pieces that never became characters spoils the prompt's end, too.
    spoiled = told(space_mark, ["<0xF0>"], **{**echoed, "text_input": "Deepé"})
    assert spoiled == ("Deep\ufffd\ufffd\ufffd", 1)
