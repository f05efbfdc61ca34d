"""Paths beside chat and completions, and what is true of all of them."""

from __future__ import annotations

import gzip
import logging

import pytest

from specpipe.gateway.app import make_app
from specpipe.version import __version__
from tests.gateway.conftest import Door, running, served_model
from tests.gateway.fake_upstream import FakeUpstream


def test_models_by_each_of_their_names(door: Door) -> None:
    listed = door.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [(model["id"], model["root"]) for model in listed["data"]] == [
        ("python-code", "python-code"),
        ("alias", "python-code"),
    ]
    assert door.get("/v1/models/alias").json() == listed["data"][1]
    assert listed["data"][0]["max_model_len"] == 1024
    unknown = door.get("/v1/models/org/other")
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    asked = door.post("/v1/completions", {"model": "x" * 500, "prompt": "x"})
    assert (asked.status, asked.error["param"]) == (404, "model")
    assert len(asked.error["message"]) < 200


def test_health_is_that_of_the_servers(door: Door) -> None:
    assert door.get("/health").status == 200
    asked = door.get("/health", "HEAD")
    assert (asked.status, asked.body) == (200, b"")
    door.upstream.is_well = False
    found = door.get("/health")
    assert (found.status, found.error["message"]) == (503, "no server answers")
    assert door.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/v1/responses", 404, "there is no /v1/responses here: ask /v1/chat/completions"),
        ("GET", "/v1/responses/x", 404, "there is no /v1/responses here: ask"),
        ("POST", "/v1/embeddings", 404, "there is no /v1/embeddings here: this model generates"),
        ("GET", "/", 404, "there is no / here"),
        ("GET", "/v1/completions", 405, "/v1/completions does not take GET"),
        ("DELETE", "/v1/models/x", 405, "/v1/models/x does not take DELETE"),
    ],
)
def test_what_is_not_here(door: Door, method: str, path: str, status: int, message: str) -> None:
    response = door.get(path, method)
    assert response.status == status
    assert response.error["message"].startswith(message)
    assert response.error["type"] == "invalid_request_error"


def test_a_body_that_is_packed(door: Door) -> None:
    data = b'{"prompt": "hello"}'
    packed = door.post("/tokenize", gzip.compress(data), {"Content-Encoding": "gzip"})
    assert (packed.status, packed.error["code"]) == (415, "unsupported_encoding")
    assert packed.error["message"].startswith(
        "content-encoding is gzip, which is not unpacked here"
    )
    assert door.post("/tokenize", data, {"Content-Encoding": "identity"}).status == 200


def test_tokens_and_back(door: Door) -> None:
    found = door.post("/tokenize", {"prompt": "hello é", "return_token_strs": True}).json()
    assert found == {
        "count": 5,
        "max_model_len": 1024,
        "tokens": [1377, 324, 222, 129, 104],
        "token_strs": ["hel", "lo", " ", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert door.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "hello é"}
    refused = door.post("/detokenize", {"tokens": [5, 4096]})
    assert (refused.status, refused.error["param"]) == (400, "tokens[1]")
    without_template = door.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert (without_template.status, without_template.error["param"]) == (400, "messages")


def test_a_lenient_door_logs_what_nobody_knows(caplog: pytest.LogCaptureFixture) -> None:
    upstream = FakeUpstream()
    with (
        running(make_app(upstream, served_model(), is_lenient=True)) as port,
        caplog.at_level(logging.WARNING),
    ):
        door = Door(port, upstream, served_model())
        body = {"prompt": "x", "unheard": 1, "stream_options": {"other": {}, "include_usage": True}}
        assert door.post("/v1/completions", body).status == 200
        assert door.post("/v1/completions", {**body, "n": 0}).error["param"] == "n"
        assert door.post("/v1/completions", {**body, "suffix": "y"}).error["param"] == "suffix"
    told = [record.message for record in caplog.records if "nobody knows" in record.message]
    assert told[:2] == [
        "a field that nobody knows is left out: stream_options.other",
        "a field that nobody knows is left out: unheard",
    ]
