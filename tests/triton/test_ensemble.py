"""The repository on a real Triton: what clients see of the ensemble."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc

from specpipe.errors import RequestError, ServerError
from specpipe.speculative.request import Request
from specpipe.triton import serving
from specpipe.triton.client import Client
from specpipe.triton.secret import Signer
from specpipe.triton.server.processes import arguments, session_pids
from specpipe.triton.server.server import Server
from tests.triton.asking import CANCELLED, metrics, settled_metrics
from tests.waiting import PATIENCE_S

PROMPT = "def f(x):"  # five tokens: "def", " f", "(", "x", "):"; the echo pair repeats them


def post(
    server: Server, body: dict[str, object], path: str = "generate", *, model: str = "ensemble"
) -> tuple[int, str]:
    """Plain HTTP, as curl sends it."""
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/{model}/{path}", json.dumps(body).encode(), method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def test_whole_answer(url: str) -> None:
    with Client(url) as client:
        completion = client.generate(PROMPT, max_tokens=6, seed=2**64 - 1)
    assert completion.text == "def f(x):def"
    assert completion.finish_reason == "length"
    assert completion.statistics is not None
    assert completion.statistics.to_json() == {
        "num_input_tokens": 5,
        "num_output_tokens": 6,
        "num_steps": 3,
        "total_draft_tokens": 3,
        "total_accepted_draft_tokens": 3,
        "seed_used": 2**64 - 1,
        "acceptance_rate": 1.0,
        "draft_status": "drafted",
        "is_lossless": True,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
        "num_cached_input_tokens": 0,
        "num_preemptions": 0,
        "acceptance_histogram": (0, 3),
    }


def test_streamed_chunks_join_to_the_whole_and_only_the_last_has_statistics(url: str) -> None:
    with Client(url) as client:
        chunks = list(client.stream(PROMPT, max_tokens=6))
    assert [chunk.text for chunk in chunks] == ["def f", "(x", "):def"]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
    assert [chunk.statistics is None for chunk in chunks] == [True, True, False]


def test_where_nothing_was_drafted_the_rate_is_zero_and_a_word_says_why(url: str) -> None:
    with Client(url) as client:
        completion = client.generate(PROMPT, max_tokens=6, num_draft_tokens=0)
    assert completion.statistics is not None
    assert completion.statistics.num_steps == 6
    assert completion.statistics.total_draft_tokens == 0
    assert completion.statistics.acceptance_rate == 0.0
    assert completion.statistics.draft_status == "off_by_request"


def test_a_call_that_takes_one_response_gets_tritons_501(echo_server: Server) -> None:
    status, body = post(echo_server, {"inputs": []}, "infer")
    assert status == 501 and "decoupled" in body
    client = grpc.InferenceServerClient(echo_server.grpc_url.removeprefix("grpc://"))
    inputs = [grpc.InferInput("max_tokens", [1, 1], "INT32")]
    inputs[0].set_data_from_numpy(np.array([[1]], np.int32))
    with pytest.raises(grpc.InferenceServerException, match="decoupled") as refused:
        client.infer("ensemble", inputs)
    assert refused.value.status() == "StatusCode.UNIMPLEMENTED"
    client.close()


def test_several_stop_words_as_people_write_them(url: str) -> None:
    with Client(url) as client:
        completion = client.generate(
            'foo a,b bar "\n end', max_tokens=40, stop_words=["\n", "a,b", '"', " end", ""]
        )
        assert (completion.text, completion.finish_reason) == ("foo ", "stop")
        newline_only = client.generate("foo a,b bar\n end", max_tokens=40, stop_words="\n")
        assert newline_only.text == "foo a,b bar"


def test_log_probs_come_with_their_tokens(url: str) -> None:
    with Client(url) as client:
        whole = client.generate(PROMPT, max_tokens=5, return_log_probs=True)
        chunks = list(client.stream(PROMPT, max_tokens=5, return_log_probs=True))
    assert whole.log_probs == (-0.5,) * 5
    assert [chunk.log_probs for chunk in chunks] == [(-0.5, -0.5), (-0.5, -0.5), (-0.5,)]


ALL_THAT_IS_TAKEN = {
    "stop_token_ids": [2, 3],
    "ignore_eos": True,
    "logit_bias_ids": [5, 6],
    "logit_bias_values": [1.5, -100.0],
    "embedding_bias_words": ["a"],
    "embedding_bias_weights": [0.5],
    "prediction": PROMPT,
    "guided_decoding_guide_type": "regex",
    "guided_decoding_guide": ".*",
    "skip_special_tokens": False,
}


def test_ids_and_likeliest_tokens_pass_every_protocol(url: str) -> None:
    asked = {"return_token_ids": True, "num_top_log_probs": 3, **ALL_THAT_IS_TAKEN}
    with Client(url) as client:
        by_text = client.generate(PROMPT, max_tokens=5, return_token_ids=True)
        ids = by_text.token_ids
        whole = client.generate(
            input_ids=list(ids), max_tokens=5, return_prompt_log_probs=True, **asked
        )
        chunks = list(client.stream(input_ids=list(ids), max_tokens=5, **asked))
        scored = client.generate(
            input_ids=list(ids),
            max_tokens=0,
            return_prompt_log_probs=True,
            exclude_input_in_output=False,
            num_top_log_probs=1,
        )
        of_one = client.generate(input_ids=[ids[0]], max_tokens=1, **asked)
    likeliest = [tuple((i + n, -0.5 - n) for n in range(3)) for i in ids]
    assert (by_text.text, len(ids), by_text.log_probs) == (PROMPT, 5, ())
    assert (whole.text, whole.token_ids, whole.log_probs) == (PROMPT, ids, (-0.5,) * 5)
    assert whole.top_log_probs == tuple(likeliest)
    assert whole.prompt_log_probs == (-0.5,) * 4
    assert whole.prompt_top_log_probs == tuple(likeliest[1:])
    assert [chunk.token_ids for chunk in chunks] == [ids[:2], ids[2:4], ids[4:]]
    assert [row for chunk in chunks for row in chunk.top_log_probs] == likeliest
    assert (scored.text, scored.token_ids, scored.finish_reason) == (PROMPT, (), "length")
    assert scored.prompt_top_log_probs == tuple(row[:1] for row in likeliest[1:])
    assert (of_one.token_ids, of_one.top_log_probs) == (ids[:1], (likeliest[0],))


def test_inputs_of_openais_api_are_refused_by_name(url: str) -> None:
    with Client(url) as client:
        for settings, sentence in (
            ({"input_ids": [1, 10**9]}, "input_ids has 1000000000, which is no token of this mode"),
            ({"text_input": "a", "tools": []}, "tools says how messages are rendered: send it wi"),
            (
                {"messages": [{"role": "user", "content": "a"}], "tools": "[" * 99},
                "tools is nested 99 deep; it may be 32 (serving.limits.max_json_depth)",
            ),
            ({"text_input": "a", "num_top_log_probs": 21}, "num_top_log_probs is 21; it must be "),
        ):
            with pytest.raises(RequestError) as caught:
                client.generate(max_tokens=1, **settings)
            assert str(caught.value).startswith(sentence)


def test_echo_begins_the_first_chunk(url: str) -> None:
    with Client(url) as client:
        whole = client.generate(PROMPT, max_tokens=3, exclude_input_in_output=False)
        chunks = list(client.stream(PROMPT, max_tokens=3, exclude_input_in_output=False))
    assert whole.text == "def f(x):def f("
    assert [chunk.text for chunk in chunks] == ["def f(x):def f", "("]


def test_refused_before_the_first_response(url: str) -> None:
    with Client(url) as client:
        for ask in (client.generate, lambda *a, **k: list(client.stream(*a, **k))):
            with pytest.raises(RequestError, match="^beam_width is not supported: send 1 or leave"):
                ask(PROMPT, max_tokens=3, beam_width=2)
            with pytest.raises(RequestError, match=r"^the queue is full \(0 requests\)$"):
                ask("<refuse>", max_tokens=3)
            with pytest.raises(RequestError, match="a target row is NaN"):
                ask("<fail 0>", max_tokens=3)
        assert client.generate(PROMPT, max_tokens=2).text == "def f"


def test_failure_after_the_first_chunk_ends_the_stream_with_its_text(url: str) -> None:
    texts = []
    with Client(url) as client:
        with pytest.raises(ServerError, match="the request failed: a target row is NaN"):
            for chunk in client.stream("<fail 2>", max_tokens=30):
                texts.append(chunk.text)  # noqa: PERF401
        assert "".join(texts) == "<fail 2>"
        assert client.generate(PROMPT, max_tokens=2).text == "def f"


def test_failure_of_a_whole_answer_is_a_triton_error(url: str) -> None:
    with Client(url) as client, pytest.raises(RequestError, match="is NaN"):
        client.generate("<fail 2>", max_tokens=30)


def test_closing_a_stream_early_cancels_the_request(
    url: str, echo_server: Server, wait_until: Callable[..., bool]
) -> None:
    before = settled_metrics(echo_server)[CANCELLED]
    with Client(url) as client:
        stream = client.stream(f"<slow> {PROMPT}", max_tokens=900, num_draft_tokens=0)
        next(stream)
        stream.close()
        assert wait_until(lambda: metrics(echo_server, CANCELLED)[CANCELLED] == before + 1)


def test_32_streams_at_once_stay_in_order(url: str) -> None:
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        with Client(url) as client:
            chunks = client.stream(f"{number} = {number}", max_tokens=60)
            texts[number] = "".join(chunk.text for chunk in chunks)

    with Client(url) as client:
        expected = {
            number: client.generate(f"{number} = {number}", max_tokens=60).text
            for number in range(32)
        }
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == expected


def test_http_needs_nothing_but_curl(echo_server: Server) -> None:
    status, text = post(echo_server, {"text_input": PROMPT, "max_tokens": 3, "stop_words": ["("]})
    answer = json.loads(text)
    assert (status, answer["text_output"], answer["finish_reason"]) == (200, "def f", "stop")

    status, text = post(
        echo_server, {"text_input": PROMPT, "max_tokens": 3, "stream": True}, "generate_stream"
    )
    events = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:")]
    assert (status, [event["text_output"] for event in events]) == (200, ["def f", "("])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"text_input": "a"}, "max_tokens is missing"),
        ({"max_tokens": 3}, "input_ids and messages: exactly one is needed, none was given"),
        (
            {"text_input": "a", "max_token": 3},
            "unknown request parameter 'max_token': did you mean 'max_tokens'?",
        ),
        ({"text_input": ["a", "b"], "max_tokens": [3, 3]}, "batch-size must be <= 1"),
    ],
)
def test_http_refusals_name_the_field(
    echo_server: Server, body: dict[str, object], expected: str
) -> None:
    status, text = post(echo_server, body)
    assert status == 400
    assert expected in json.loads(text)["error"]


SIZES = {
    "prompt": {"text_input": "a" * 2_000_000},
    "stop words": {"stop_words": ["ab"] * 50_000},
    "bad words": {"bad_words": ["x" * 1300] * 301},
    "messages": {"text_input": None, "messages": "[" * 100_000},
    "parameter": {"y" * 1_000_000: 1},
    "control characters": {"\x1b[31m\n": 1},
    "guide": {"guided_decoding_guide": "z" * 1_000_000},
}


@pytest.mark.parametrize("kind", SIZES)
def test_hostile_sizes_are_one_short_sentence_at_once(echo_server: Server, kind: str) -> None:
    asked = {"text_input": "a", "max_tokens": 1, **SIZES[kind]}
    start = time.monotonic()
    status, text = post(echo_server, {n: v for n, v in asked.items() if v is not None})
    assert time.monotonic() - start < 30
    error = json.loads(text)["error"]
    assert status == 400 and len(error) < 250 and error.isprintable(), error
    assert post(echo_server, {"text_input": "a", "max_tokens": 1})[0] == 200


REFUSAL = "speculative takes requests from the ensemble only: ask 'ensemble'"


@pytest.mark.parametrize(
    ("model", "body", "expected"),
    [
        ("speculative", {"request": "{}", "prompt_token_ids": [1, 2]}, REFUSAL),
        ("speculative", {"request": "{}", "prompt_token_ids": [1], "signature": "0" * 64}, REFUSAL),
        ("speculative", {"cancel": "somebody"}, REFUSAL),
        ("postprocessing", {"stream_id": "a"}, "text is missing"),
        (
            "postprocessing",
            {"text": "a", "stream_id": "s" * 100_000},
            "stream_id has 100000 bytes; it may have 64",
        ),
    ],
)
def test_inner_models_refuse_strangers(
    echo_server: Server, model: str, body: dict[str, object], expected: str
) -> None:
    status, text = post(echo_server, body, model=model)
    assert (status, json.loads(text)["error"]) == (400, expected)


def test_what_preprocessing_signs_for_a_stranger_cannot_be_changed(echo_server: Server) -> None:
    _, text = post(echo_server, {"text_input": PROMPT, "max_tokens": 3}, model="preprocessing")
    signed = {n: v for n, v in json.loads(text).items() if not n.startswith("model_")}
    _, answer = post(echo_server, signed, model="speculative")
    assert json.loads(answer)["text"] == "def f("
    for change in (
        {"request": signed["request"].replace('"max_tokens": 3', '"max_tokens": 2.5')},
        {"prompt_token_ids": [1, *signed["prompt_token_ids"]]},
    ):
        status, answer = post(echo_server, {**signed, **change}, model="speculative")
        assert (status, json.loads(answer)["error"]) == (400, REFUSAL)


@pytest.mark.parametrize(
    "change",
    [
        ('"max_tokens": 9', '"max_tokens": 2.5'),
        ('"num_draft_tokens": null', '"num_draft_tokens": 1.5'),
        ('"stop_strings": []', '"stop_strings": [5]'),
        ('"end_token_ids": []', '"end_token_ids": ["x"]'),
    ],
)
def test_a_wrong_type_from_who_knows_the_secret_leaves_other_streams_alone(
    echo_server: Server, change: tuple[str, str], tmp_path: Path
) -> None:
    """It was a TypeError in the loop, which ended every stream."""
    request = Request(request_id="", prompt_token_ids=(700, 701), max_tokens=9)
    written = serving.Generation(request=request).to_tensors(Signer(None))["request"].item()
    text, ids = written.replace(*change), np.array([[700, 701]], np.int32)
    assert text != written
    signature = Signer(echo_server.secret).sign("request", text.encode(), ids.tobytes())
    hostile = {"request": text, "prompt_token_ids": [700, 701], "signature": signature}
    with Client(echo_server.http_url) as client:
        chunks = client.stream(f"<until {tmp_path / 'go'}> {PROMPT}", max_tokens=12)
        first = next(chunks)
        status, answer = post(echo_server, hostile, model="speculative")
        assert (status, json.loads(answer)["error"][:42]) == (
            400,
            "request is not what preprocessing writes: ",
        )
        (tmp_path / "go").touch()
        rest = list(chunks)
    assert first.text
    assert rest[-1].finish_reason == "length"


def test_the_secret_is_in_no_command_line_log_file_or_message(echo_server: Server) -> None:
    process = echo_server.triton._process
    assert process is not None
    pids = session_pids(process.pid)
    assert len(pids) > 3
    assert not any(echo_server.secret in argument for pid in pids for argument in arguments(pid))
    assert not any(echo_server.secret in line for line in echo_server.triton.last_log_lines)
    files = [path for path in echo_server.version.repository.rglob("*") if path.is_file()]
    assert not any(echo_server.secret.encode() in path.read_bytes() for path in files)
    _, text = post(echo_server, {"text_input": PROMPT, "max_tokens": 3}, model="preprocessing")
    assert echo_server.secret not in text


def test_http_request_id_is_no_unknown_parameter(echo_server: Server) -> None:
    assert post(echo_server, {"id": "7", "text_input": "a", "max_tokens": 1})[0] == 200


def test_grpc_final_response_carries_the_last_text(echo_server: Server) -> None:
    """Without `enable_empty_final_response` a client would wait forever for an empty one."""
    client = grpc.InferenceServerClient(echo_server.grpc_url.removeprefix("grpc://"))
    done = threading.Event()
    responses = []

    def receive(result: grpc.InferResult, error: Exception | None) -> None:
        assert error is None
        responses.append(result)
        if result.get_response().parameters["triton_final_response"].bool_param:
            done.set()

    inputs = []
    for name, value in (("text_input", b"a b"), ("max_tokens", 3), ("stream", True)):
        tensor = serving.input_tensor(name)
        array = serving.as_array(tensor, [value])
        dtype = "BYTES" if tensor.dtype == "STRING" else tensor.dtype
        inputs.append(grpc.InferInput(name, array.shape, dtype))
        inputs[-1].set_data_from_numpy(array)
    outputs = [
        grpc.InferRequestedOutput(name)
        for name in ("text_output", "finish_reason", "context_logits", "arrival_time_ns")
    ]
    client.start_stream(receive)
    client.async_stream_infer("ensemble", inputs, outputs=outputs)
    assert done.wait(5)
    client.stop_stream()
    client.close()
    assert [r.as_numpy("text_output").tolist() for r in responses] == [[[b"a b"]], [[b"a"]]]
    assert responses[-1].as_numpy("context_logits") is None  # NVIDIA's; declared, never sent
    assert responses[-1].as_numpy("finish_reason") == np.array([[b"length"]], dtype=object)


def test_the_policy_decides_the_call(url: str) -> None:
    with Client(url) as ensemble, Client(url, model="plain") as plain:
        assert ensemble.is_decoupled
        assert not plain.is_decoupled
        assert plain.generate("whole", max_tokens=1).text == "whole"
        with pytest.raises(
            RequestError, match="plain cannot stream: model_transaction_policy.decoupled is false"
        ):
            plain.stream("streamed", max_tokens=1)


def test_unknown_model_and_unreachable_server(url: str) -> None:
    with Client(url, model="nobody") as client, pytest.raises(RequestError, match="nobody"):
        client.generate("a", max_tokens=1)
    scheme = url.split(":")[0]
    with (
        Client(f"{scheme}://127.0.0.1:9") as client,
        pytest.raises(ServerError, match="127.0.0.1:9"),
    ):
        client.generate("a", max_tokens=1)


def test_client_refuses_a_mistyped_setting_before_sending() -> None:
    with (
        Client("http://127.0.0.1:9") as client,
        pytest.raises(RequestError, match="'temprature': did you mean 'temperature'"),
    ):
        client.generate("a", max_tokens=1, temprature=1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": -1}, "seed is -1; it must be a whole number from 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be"),
        ({"max_tokens": 2**32 + 3}, "max_tokens is 4294967299; it must be a whole number from"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0; it must be a whole number"),
        ({"max_tokens": "4"}, "max_tokens is '4'; it must be a whole number"),
        ({"max_tokens": True}, "max_tokens is True; it must be a whole number"),
        ({"max_tokens": [4, 5]}, "max_tokens has 2 values: it takes one"),
        ({"temperature": 1e39}, "temperature is 1e+39; it must be a number of at most 3.4e38"),
        ({"temperature": 10**400}, "temperature is a number of more than 30 digits; it must be"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be true or false"),
        ({"stop_words": ["a", None]}, "stop_words is None; it must be a text in UTF-8"),
        ({"stop_words": "\ud83d"}, "stop_words is '\\ud83d'; it must be a text in UTF-8"),
        ({"messages": [{"role": object}]}, "messages cannot be written as JSON: Object of type"),
    ],
)
@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_client_sends_nothing_of_another_type(
    scheme: str, settings: dict[str, Any], message: str
) -> None:
    with Client(f"{scheme}://127.0.0.1:9") as client:
        with pytest.raises(RequestError) as caught:
            client.generate("a", **{"max_tokens": 1, **settings})
        assert str(caught.value).startswith(message)


def test_client_takes_numpys_values(url: str) -> None:
    settings = {"max_tokens": np.int64(1), "temperature": np.float32(0), "seed": np.uint64(3)}
    with Client(url) as client:
        of_array = client.generate(input_ids=np.array([5, 6]), **settings)
        assert of_array == client.generate(input_ids=[np.int32(5), 6], **settings)


def test_client_refuses_an_address_without_scheme() -> None:
    with pytest.raises(ServerError, match="'localhost:8000' is not http://HOST:PORT or grpc://"):
        Client("localhost:8000")
