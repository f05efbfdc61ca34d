"""Triton's three methods of each hand-written model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from specpipe.config.limits import Limits
from specpipe.errors import RequestError
from specpipe.runtimes.pair.pair import Occupancy, PairOptions
from specpipe.runtimes.pair_file import PairFile
from specpipe.speculative.request import Chunk, Request, Statistics
from specpipe.text.tokenizer import Tokenizer
from specpipe.triton import serving
from specpipe.triton.cancel_ids import new_cancel_id
from specpipe.triton.repository import contents
from specpipe.triton.secret import Signer

TOKENIZER = Path(__file__).parents[2] / "models" / "python-code" / "target"
PREPROCESSING = {"tokenizer_dir": "tokenizer", "limits_file": "limits.json"}
LoadModel = Callable[[str], Any]


SECRET = "the secret of a start"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPIPE_SECRET", SECRET)


def arguments(folder: Path, **parameters: str) -> dict[str, str]:
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    return {
        "model_name": folder.name or "speculative",
        "model_config": json.dumps(config),
        "model_repository": str(folder),
        "model_version": "1",
    }


def arrays(**values: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {
        name: serving.as_array(serving.input_tensor(name), [value])
        for name, value in values.items()
    }


def outputs(response: Any) -> dict[str, Any]:
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}


@pytest.fixture
def version(tmp_path: Path) -> Path:
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "tokenizer").symlink_to(TOKENIZER)
    limits = Limits().resolved(max_seq_len=64, longest_token_bytes=82, is_bytewise=True)
    (folder / "limits.json").write_text(limits.model_dump_json())
    return folder


def test_preprocessing_answers_neighbours_of_a_bad_request(
    load_model: LoadModel, pb_utils: ModuleType, version: Path
) -> None:
    model = load_model("preprocessing")
    model.initialize(arguments(version.parent, **PREPROCESSING))
    responses = model.execute(
        [
            pb_utils.ServerRequest(arrays(text_input=b"def f", max_tokens=3)),
            pb_utils.ServerRequest(arrays(text_input=b"def f")),
            pb_utils.ServerRequest(
                arrays(text_input=b"def f", max_tokens=3), parameters={"max_token": 3}
            ),
        ]
    )
    assert responses[0].error() is None
    assert set(outputs(responses[0])) == {"request", "prompt_token_ids", "signature"}
    assert len(outputs(responses[0])["prompt_token_ids"][0]) == 2
    assert str(responses[1].error()).startswith("max_tokens is missing")
    assert str(responses[2].error()).startswith("unknown request parameter 'max_token'")
    assert {r.error().code for r in responses[1:]} == {pb_utils.TritonError.INVALID_ARG}


def test_preprocessing_survives_what_nobody_expected(
    load_model: LoadModel,
    pb_utils: ModuleType,
    version: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def encode(tokenizer: Tokenizer, text: str) -> list[int]:
        if text == "bad":
            raise RecursionError(f"in {version}")
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    model = load_model("preprocessing")
    model.initialize(arguments(version.parent, **PREPROCESSING))
    good, bad = (
        pb_utils.ServerRequest(arrays(text_input=text, max_tokens=3)) for text in (b"good", b"bad")
    )
    responses = model.execute([bad, good])
    error = responses[0].error()
    assert (str(error), error.code) == (
        "the request failed inside the server, whose log says how",
        pb_utils.TritonError.INTERNAL,
    )
    assert responses[1].error() is None
    assert f"RecursionError: in {version}" in caplog.text


def test_postprocessing_refuses_what_is_no_chunk(
    load_model: LoadModel, pb_utils: ModuleType
) -> None:
    model = load_model("postprocessing")
    model.initialize(arguments(Path("."), cancels="speculative"))
    nothing = pb_utils.ServerRequest({})
    big = pb_utils.ServerRequest(
        {
            "text": serving.as_array(serving.TEXT, [b" f"]),
            "stream_id": serving.as_array(serving.STREAM_ID, [b"s" * 10**6]),
        }
    )
    nothing.cancelled = big.cancelled = True
    responses = model.execute([nothing, big])
    assert [str(response.error()) for response in responses] == [
        "text is missing",
        "stream_id has 1000000 bytes; it may have 64",
    ]
    assert pb_utils.InferenceRequest.made == []


def test_postprocessing_hands_the_text_on(load_model: LoadModel, pb_utils: ModuleType) -> None:
    model = load_model("postprocessing")
    model.initialize(arguments(Path("."), cancels="speculative"))
    chunk = {
        "text": serving.as_array(serving.TEXT, [b" f"]),
        "stream_id": serving.as_array(serving.STREAM_ID, [b"s1"]),
    }
    (response,) = model.execute([pb_utils.ServerRequest(chunk)])
    assert outputs(response) == {"text_output": [[b" f"]]}
    assert pb_utils.InferenceRequest.made == []


def test_postprocessing_looks_for_its_client_where_it_is_asked_to(
    load_model: LoadModel, pb_utils: ModuleType
) -> None:
    model = load_model("postprocessing")
    model.initialize(arguments(Path("."), cancels="speculative"))
    request = pb_utils.ServerRequest({"text": serving.as_array(serving.TEXT, [b" f"])})
    request.is_cancelled = lambda: pytest.fail("a look takes as much as a fifth of a response")
    (response,) = model.execute([request])
    assert outputs(response) == {"text_output": [[b" f"]]}


def test_postprocessing_tells_speculative_of_a_cancellation(
    load_model: LoadModel, pb_utils: ModuleType
) -> None:
    model = load_model("postprocessing")
    model.initialize(arguments(Path("."), cancels="speculative"))
    request = pb_utils.ServerRequest(
        {
            "text": serving.as_array(serving.TEXT, [b" f"]),
            "stream_id": serving.as_array(serving.STREAM_ID, [b"s1"]),
        }
    )
    request.cancelled = True
    model.execute([request])
    (call,) = pb_utils.InferenceRequest.made
    assert call.model_name == "speculative"
    assert {t.name(): t.as_numpy().tolist() for t in call.inputs} == {
        "cancel": [[b"s1"]],
        "signature": [[Signer(SECRET).sign("cancel", b"s1")]],
    }


STATISTICS = Statistics(
    num_input_tokens=2,
    num_output_tokens=1,
    num_steps=1,
    total_draft_tokens=4,
    total_accepted_draft_tokens=3,
    seed_used=5,
    acceptance_rate=0.75,
)


class ScriptedPair:
    """Two chunks for each request; a request of 666 tokens is refused, one of 13 fails."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self._chunks: list[Chunk] = []
        self.num_steps = 0

    def submit(self, request: Request) -> str:
        name = request.request_id
        if request.max_tokens == 666:
            raise RequestError("the queue is full (128 requests)")
        if request.max_tokens == 13:
            self._chunks.append(Chunk(request_id=name, finish_reason="error", error="NaN"))
        else:
            last = Chunk(request_id=name, text=" b", finish_reason="stop", statistics=STATISTICS)
            self._chunks += [Chunk(request_id=name, text="a"), last]
        return name

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def has_work(self) -> bool:
        return bool(self._chunks)

    def interrupt(self) -> None: ...

    def close(self) -> None: ...

    def occupancy(self) -> Occupancy:
        return Occupancy()

    def step(self) -> list[Chunk]:
        self.num_steps += 1
        return [self._chunks.pop(0)]


@pytest.fixture
def speculative(load_model: LoadModel, version: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    class Runtime:
        def load_pair(self, *_: object) -> ScriptedPair:
            return ScriptedPair()

    monkeypatch.setattr(contents, "load_runtime", lambda name: Runtime())
    (version / "pair.json").write_text(
        PairFile("torch", PairOptions(stream_interval_s=0)).to_json()
    )
    model = load_model("speculative")
    model.initialize(
        arguments(
            version.parent,
            **PREPROCESSING,
            pair_file="pair.json",
            draft_engine_dir="draft",
            target_engine_dir="target",
        )
    )
    return model


def ask(model: Any, pb_utils: ModuleType, *, max_tokens: int, stream: bool = False) -> list[Any]:
    """Sends one request as preprocessing hands it on; returns what was sent, with its flags."""
    generation = serving.Generation(
        request=Request(request_id="", prompt_token_ids=(1, 2), max_tokens=max_tokens),
        stream=stream,
    )
    request = pb_utils.ServerRequest(generation.to_tensors(Signer(SECRET)))
    assert model.execute([request]) is None
    assert request.sender.closed.wait(5)
    model.finalize()
    return list(request.sender.sent)


def test_speculative_streams_chunks_and_flags_the_last(
    speculative: Any, pb_utils: ModuleType
) -> None:
    (first, first_flags), (last, last_flags) = ask(speculative, pb_utils, max_tokens=9, stream=True)
    assert (first_flags, last_flags) == (0, 1)
    assert outputs(first)["text"] == [["a"]]
    assert outputs(last)["text"] == [[" b"]]
    assert outputs(last)["acceptance_rate"] == [[0.75]]
    counted = pb_utils.MetricFamily.made
    assert counted["specpipe_requests_total"]["stop"].value == 1
    assert counted["specpipe_accepted_draft_tokens_total"][""].value == 3
    assert counted["specpipe_requests_in_flight"][""].value == 0


def test_speculative_merges_chunks_unless_asked_to_stream(
    speculative: Any, pb_utils: ModuleType
) -> None:
    ((only, flags),) = ask(speculative, pb_utils, max_tokens=9)
    assert flags == 1
    assert outputs(only)["text"] == [["a b"]]


@pytest.mark.parametrize(
    ("max_tokens", "message", "code"),
    [(666, "the queue is full (128 requests)", "INVALID_ARG"), (13, "NaN", "INTERNAL")],
)
def test_speculative_fails_before_the_first_chunk_by_a_triton_error(
    speculative: Any, pb_utils: ModuleType, max_tokens: int, message: str, code: str
) -> None:
    ((response, flags),) = ask(speculative, pb_utils, max_tokens=max_tokens, stream=True)
    assert flags == 1
    assert str(response.error()) == message
    assert response.error().code == getattr(pb_utils.TritonError, code)


def test_speculative_refuses_strangers(speculative: Any, pb_utils: ModuleType) -> None:
    request = Request(request_id="", prompt_token_ids=(1, 2), max_tokens=9)
    signed = serving.Generation(request=request).to_tensors(Signer("of another start"))
    unsigned = {name: array for name, array in signed.items() if name != "signature"}
    cancel = {"cancel": serving.as_array(serving.CANCEL, [b"nobody"])}
    asked = [pb_utils.ServerRequest(tensors) for tensors in (signed, unsigned, cancel, {})]
    speculative.execute(asked)
    refusal = "speculative takes requests from the ensemble only: ask 'ensemble'"
    assert [[str(r.error()) for r, _ in request.sender.sent] for request in asked] == [
        [refusal],
        [refusal],
        [refusal],
        ["request is missing"],
    ]
    speculative.finalize()
    counted = pb_utils.MetricFamily.made
    assert counted["specpipe_requests_in_flight"][""].value == 0


def test_speculative_survives_what_nobody_expected(
    speculative: Any, pb_utils: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreadable(pb_utils.ServerRequest):  # type: ignore[misc, name-defined]
        def inputs(self) -> list[Any]:
            raise MemoryError("no room for it")

    bad = Unreadable({})
    good = pb_utils.ServerRequest(
        serving.Generation(
            request=Request(request_id="", prompt_token_ids=(1, 2), max_tokens=9)
        ).to_tensors(Signer(SECRET))
    )
    speculative.execute([bad, good])
    ((response, _),) = bad.sender.sent
    assert str(response.error()) == "the request failed inside the server, whose log says how"
    assert good.sender.closed.wait(5)
    assert good.sender.sent[0][0].error() is None
    speculative.finalize()


def test_speculative_cancels_by_the_id_that_the_sender_drew_and_by_no_other(
    speculative: Any, pb_utils: ModuleType
) -> None:
    drawn = new_cancel_id()
    generation = serving.Generation(
        request=Request(request_id="", prompt_token_ids=(1, 2), max_tokens=9)
    )
    tensors = generation.to_tensors(Signer(SECRET))
    submitted: list[str] = []
    loop = speculative._loop
    loop.submit = lambda request, **_: submitted.append(request.request_id)
    cancelled: list[str] = []
    loop.cancel = cancelled.append
    ids = ("1", drawn)
    speculative.execute([pb_utils.ServerRequest(tensors, request_id=id_) for id_ in ids])
    speculative.execute(
        [pb_utils.ServerRequest(serving.write_cancel(id_.encode(), Signer(SECRET))) for id_ in ids]
    )
    assert cancelled == ["1", submitted[1]]
    speculative.finalize()


def test_speculative_takes_a_cancellation_and_answers_it_at_once(
    speculative: Any, pb_utils: ModuleType
) -> None:
    request = pb_utils.ServerRequest(serving.write_cancel(b"nobody", Signer(SECRET)))
    speculative.execute([request])
    assert request.sender.sent == [(None, 1)]
    speculative.finalize()
