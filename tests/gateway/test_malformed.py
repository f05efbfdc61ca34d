"""Bodies that are not what `/openapi.json` says: each gets 4xx with its field named, none 5xx."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import string
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specpipe.gateway.app import make_app
from specpipe.gateway.parameters import Parameters
from tests.gateway.conftest import served_model
from tests.gateway.fake_upstream import FakeUpstream

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
# Fields that hold fields of their own, each with a value that is right.
OBJECTS: dict[str, Any] = {
    "stream_options": {"include_usage": True},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}},
    },
    "structured_outputs": {"json": {}},
    "messages": [{"role": "assistant", "content": "x", "tool_calls": [CALL]}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]},
}
VALUES = [
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    10**29,
    -(2**63) - 1,
    "",
    "x" * 5000,
    [],
    ["x"],
    [None],
    [[5]],
    [5] * 300,
    {},
    {"5": 1000},
    {"type": "x"},
    {f"k{n}": 0 for n in range(300)},
]

COMMON = set(Parameters.model_fields)
"""Fields of both kinds of completion, of which one will do."""

Call = tuple[int, dict[str, Any]]


class Application:
    """The application without a socket."""

    def __init__(self) -> None:
        self._app = make_app(FakeUpstream(), served_model(), max_body_bytes=1 << 18)
        self.schema: dict[str, Any] = self._app.openapi()
        self._loop = asyncio.new_event_loop()

    def post(self, path: str, body: Any) -> Call:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._loop.run_until_complete(self._post(path, data))

    async def _post(self, path: str, data: bytes) -> Call:
        sent: list[dict[str, Any]] = []
        bodies = iter([{"type": "http.request", "body": data}])
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
            "app": self._app,
        }

        async def receive() -> Any:
            for body in bodies:
                return body
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        content = b"".join(message.get("body", b"") for message in sent)
        is_json = content.startswith(b"{")
        return sent[0]["status"], json.loads(content) if is_json else {}

    def close(self) -> None:
        self._loop.close()


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    with contextlib.closing(Application()) as application:
        yield application


def schema_of(whole: Mapping[str, Any], path: str) -> dict[str, Any]:
    body = whole["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return resolved(whole, body)


def resolved(whole: Mapping[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A schema, or the member of a union that has fields."""
    if "$ref" in schema:
        found: dict[str, Any] = whole["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    for choice in schema.get("anyOf", ()):
        found = resolved(whole, choice)
        if "properties" in found or "properties" in resolved(whole, found.get("items", {})):
            return found
    return schema


def fields(
    whole: Mapping[str, Any], schema: dict[str, Any], value: Any, path: str = ""
) -> Iterator[tuple[str, dict[str, Any], list[Any]]]:
    """Each field with its schema, and the keys that lead to it."""
    for name, found in schema.get("properties", {}).items():
        yield f"{path}{name}", found, [name]
        inner = resolved(whole, found)
        if isinstance(value.get(name), list) and value[name] and isinstance(value[name][0], dict):
            inner = resolved(whole, inner["items"])
            for below, its, keys in fields(whole, inner, value[name][0], f"{path}{name}[0]."):
                yield below, its, [name, 0, *keys]
        elif isinstance(value.get(name), dict):
            for below, its, keys in fields(whole, inner, value[name], f"{path}{name}."):
                yield below, its, [name, *keys]


def with_value(body: Any, keys: list[Any], value: Any) -> Any:
    body = copy.deepcopy(body)
    place = body
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return body


@pytest.mark.parametrize("path", BODIES)
def test_each_field_with_each_wrong_value(application: Application, path: str) -> None:
    whole = application.schema
    schema = schema_of(whole, path)
    num_refused = 0
    for field in [None, *OBJECTS]:
        if field is not None and field not in schema["properties"]:
            continue
        body = {**BODIES[path], **({} if field is None else {field: OBJECTS[field]})}
        if (path, field) == ("/tokenize", "messages"):
            continue  # the pair has no chat template
        assert application.post(path, body)[0] == 200, body
        for name, found, keys in fields(whole, schema, body):
            is_seen = path.endswith("chat/completions") and keys[0] in COMMON
            if is_seen or (field is not None and len(keys) == 1):
                continue
            validator = jsonschema.Draft202012Validator(
                {**found, "components": whole["components"]}
            )
            for value in VALUES:
                status, answer = application.post(path, with_value(body, keys, value))
                case = (name, str(value)[:40], status, answer)
                if status == 200:
                    assert validator.is_valid(value), case
                    continue
                num_refused += 1
                assert 400 <= status < 500, case
                error = answer["error"]
                assert len(error["message"]) < 400 and error["message"].isprintable(), case
                # A rule across fields may name another one of them.
                assert error["param"] is not None, case
                if not validator.is_valid(value):
                    assert error["param"].startswith(str(keys[0])), case
    assert num_refused > 10


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the body is not JSON"),
        (b"[]", "the body must be a JSON object"),
        (b'{"prompt": NaN}', "the body has NaN, which JSON does not have"),
        (b'{"prompt": "x", "prompt": "y"}', "the body has the key 'prompt' twice in one object"),
        (b'{"prompt": "\xff"}', "the body is not UTF-8"),
        (b'{"prompt": "\\ud800"}', "the body has half a surrogate pair"),
        (b"[" * 100_000, "the body is nested 100000 deep"),
        (b'{"a":' * 50_000, "the body is nested 50000 deep"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "the body has a number of 5000 digits"),
        (b'{"temperature": 1e999}', "the body has the number 1e999, which is too large"),
    ],
)
def test_a_body_that_is_no_json(application: Application, data: bytes, message: str) -> None:
    for path in BODIES:
        status, answer = application.post(path, data)
        assert status == 400
        assert answer["error"]["message"].startswith(message)
        assert answer["error"]["code"] == "invalid_json"


def test_a_body_that_is_too_large(application: Application) -> None:
    status, answer = application.post("/v1/completions", b" " * 300_000)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert "it may have 262144 bytes" in answer["error"]["message"]


NAMES = [*OBJECTS, "prompt", "stop", "n", "seed", "logit_bias", "tool_choice", "logprobs", "stream"]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(string.printable + "é\u2028\U0001f600", max_size=20)
    | st.sampled_from(["function", "content", "text", "json_schema", "required", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "content", "role", "json", "5"])
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def check_any_body(application: Application, path: str, changes: Any, data: bytes | None) -> None:
    status, answer = application.post(path, {**BODIES[path], **changes} if data is None else data)
    assert status == 200 or 400 <= status < 500, answer
    if status != 200:
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"].isprintable() and len(error["message"]) < 1200


ANY_BODY = given(
    path=st.sampled_from(sorted(BODIES)),
    changes=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=9), JSON, max_size=4),
    data=st.none() | st.none() | st.binary(max_size=40),
)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@ANY_BODY
def test_any_body_is_answered_or_refused(
    application: Application, path: str, changes: Any, data: bytes | None
) -> None:
    check_any_body(application, path, changes, data)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None, suppress_health_check=list(HealthCheck))
@ANY_BODY
def test_any_body_for_a_minute(
    application: Application, path: str, changes: Any, data: bytes | None
) -> None:
    check_any_body(application, path, changes, data)
