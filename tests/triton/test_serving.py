"""Tensors to requests and back; no Triton, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from specpipe.errors import RequestError, ServerError
from specpipe.speculative.request import (
    Chunk,
    Limits,
    Request,
    RequestState,
    Sampling,
    Statistics,
)
from specpipe.text import Tokenizer
from specpipe.triton import serving
from specpipe.triton.serving import Answer, Generation, parse_request
from tests import toy_tokenizers


class Words:
    """A tokenizer: each character is the token of its code point; id 2 ends."""

    end_token_ids = frozenset({2})

    def encode(self, text: str) -> list[int]:
        return [1, *map(ord, text)]

    def encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        return [1, *(ord(char) for message in messages for char in message["content"])]

    def encode_fragment(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def is_used(self, token_id: int) -> bool:
        return token_id < 0x110000


def parse(*, parameters: tuple[str, ...] = (), timeout_us: int = 0, **inputs: Any) -> Generation:
    """What preprocessing does with inputs as Triton delivers them: shaped, strings as bytes."""
    tensors = {}
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        encoded = [v.encode() if isinstance(v, str) else v for v in values]
        tensors[name] = serving.as_array(serving.input_tensor(name), encoded)
    return parse_request(tensors, Words(), parameters=parameters, timeout_us=timeout_us)


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
        parse_request(tensors, Words())
    empty = np.zeros((1,) * (rank - 1) + (0,), dtype=tensor.numpy_dtype)
    if -1 in tensor.dims:
        assert parse_request({**tensors, name: empty}, Words()).request.max_tokens == 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": "a"}, "max_tokens is missing: say how many tokens the answer may have"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
        (
            {"max_tokens": 1},
            "text_input and messages: exactly one is needed, neither was given",
        ),
        (
            {"text_input": "a", "messages": "[]", "max_tokens": 1},
            "text_input and messages: exactly one is needed, both were given",
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
            "exclude_input_in_output is false: only a text_input can be echoed",
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
    assert parse(**asked, parameters=("id",)).request.max_tokens == 1
    for name, advice in (
        ("temprature", "unknown request parameter 'temprature': did you mean 'temperature'?"),
        ("xyz", "unknown request parameter 'xyz': leave it out"),
        ("top_k", "top_k is an input: send it beside text_input, not as a parameter"),
    ):
        with pytest.raises(RequestError) as caught:
            parse(**asked, parameters=(name,))
        assert str(caught.value) == advice


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
    received = Generation.from_tensors(sent.to_tensors(), request_id="r1")
    assert received.request.request_id == "r1"
    assert received.request.prompt_token_ids == (1, 97, 233)
    assert (received.request.echo, received.stream) == (True, True)
    assert received.request.sampling == sent.request.sampling
    assert received.request.stop_strings == ("é",)
    assert received.request.end_token_ids == {2}


def test_a_direct_caller_that_forgets_a_tensor() -> None:
    with pytest.raises(RequestError, match="^request is missing$"):
        Generation.from_tensors({}, request_id="r1")
    tensors = parse(text_input="a", max_tokens=1).to_tensors()
    tensors["request"] = serving.as_array(serving.REQUEST, ["[]"])
    with pytest.raises(RequestError, match="^request is not what preprocessing writes: "):
        Generation.from_tensors(tensors, request_id="r1")


STATISTICS = Statistics(
    num_input_tokens=3,
    num_output_tokens=4,
    num_steps=2,
    total_draft_tokens=4,
    total_accepted_draft_tokens=2,
    seed_used=2**63 + 1,
    acceptance_rate=0.5,
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
    "total_accepted_draft_tokens": [[2]],
    "total_draft_tokens": [[4]],
    "num_steps": [[2]],
    "num_input_tokens": [[3]],
    "num_output_tokens": [[4]],
    "seed_used": [[2**63 + 1]],
    "is_lossless": [[True]],
}
EACH = {"stream_id": [["s1"]], "batch_index": [[0]], "sequence_index": [[0]]}


def test_a_stream_has_text_in_each_response_and_statistics_in_the_last() -> None:
    assert answer(CHUNKS, stream=True) == [
        {"text": [["one "]], **EACH},
        {"text": [["é"]], **EACH, **LAST},
    ]


def test_a_whole_answer_is_one_response() -> None:
    assert answer(CHUNKS) == [{"text": [["one é"]], **EACH, **LAST}]


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


def test_nothing_drafted_no_acceptance_rate() -> None:
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
            acceptance_rate=None,
        ),
    )
    (response,) = answer([last])
    assert "acceptance_rate" not in response
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
    values = {name: np.reshape(value, -1)[0] for name, value in response.items()}
    assert serving.parse_statistics(values) == STATISTICS
    assert serving.parse_statistics({"finish_reason": "error"}) is None


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
    generation = parse_request(tensors, tokenizer)
    request = generation.request
    limits = Limits(max_num_draft_tokens=4, max_seq_len=64, draft_max_seq_len=64, vocab_size=1000)
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


def test_an_echo_without_text_of_an_output(space_mark: Tokenizer) -> None:
    echoed = {"text_input": "Deep", "exclude_input_in_output": False}
    assert told(space_mark, ["</s>"], **echoed) == ("Deep", 0)
    # A run of byte pieces that never became characters spoils the prompt's end, too.
    spoiled = told(space_mark, ["<0xF0>"], **{**echoed, "text_input": "Deepé"})
    assert spoiled == ("Deep\ufffd\ufffd\ufffd", 1)
