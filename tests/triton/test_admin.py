"""Triton's admin calls, each over both protocols: closed without the key of this start."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient import grpc

from specpipe.errors import ServerError
from specpipe.triton.client import Client
from specpipe.triton.server import launcher
from specpipe.triton.server.command import ADMIN_HEADER
from specpipe.triton.server.server import Server
from tests.waiting import PATIENCE_S

REGION = {"key": "/x", "offset": 0, "byte_size": 8}

# The paths of http_server.cc (Triton 2.51).
OVER_HTTP = [
    *(
        ("GET", f"/v2/{kind}sharedmemory{region}/status")
        for kind in ("system", "cuda")
        for region in ("", "/region/x")
    ),
    *(
        ("POST", f"/v2/{kind}sharedmemory{region}/{call}")
        for kind in ("system", "cuda")
        for region, call in (
            ("/region/x", "register"),
            ("", "unregister"),
            ("/region/x", "unregister"),
        )
    ),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/plain/load"),
    ("POST", "/v2/repository/models/plain/unload"),
    *(
        (method, f"/v2{model}/trace/setting")
        for method in ("GET", "POST")
        for model in ("", "/models/plain")
    ),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/models/stats"),
    ("GET", "/v2/models/ensemble/stats"),
    ("GET", "/v2/models/ensemble/versions/1/stats"),
]

OVER_GRPC: list[tuple[str, tuple[Any, ...]]] = [
    ("get_system_shared_memory_status", ()),
    ("get_system_shared_memory_status", ("x",)),
    ("register_system_shared_memory", ("x", "/x", 8)),
    ("unregister_system_shared_memory", ()),
    ("unregister_system_shared_memory", ("x",)),
    ("get_cuda_shared_memory_status", ()),
    ("get_cuda_shared_memory_status", ("x",)),
    ("register_cuda_shared_memory", ("x", b"AAAA", 0, 8)),
    ("unregister_cuda_shared_memory", ()),
    ("unregister_cuda_shared_memory", ("x",)),
    ("get_model_repository_index", ()),
    ("load_model", ("plain",)),
    ("unload_model", ("plain",)),
    ("get_trace_settings", ()),
    ("get_trace_settings", ("plain",)),
    ("update_trace_settings", ()),
    ("update_trace_settings", ("plain", {"trace_rate": "1"})),
    ("get_log_settings", ()),
    ("update_log_settings", ({"log_info": False},)),
    ("get_inference_statistics", ()),
    ("get_inference_statistics", ("ensemble",)),
]


def ask_http(server: Server, method: str, path: str, body: Any = None, **headers: str) -> int:
    """The status of one call."""
    data = json.dumps(body or {}).encode() if method == "POST" else None
    request = urllib.request.Request(
        f"{server.http_url}{path}", data, method=method, headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture(scope="module")
def grpc_client(echo_server: Server) -> Iterator[Any]:
    with grpc.InferenceServerClient(echo_server.grpc_url.removeprefix("grpc://")) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), OVER_HTTP)
def test_http_answers_403(echo_server: Server, method: str, path: str) -> None:
    assert ask_http(echo_server, method, path) == 403
    assert ask_http(echo_server, method, path, **{ADMIN_HEADER: "guess"}) == 403


@pytest.mark.parametrize(("call", "arguments"), OVER_GRPC)
def test_grpc_answers_unavailable(grpc_client: Any, call: str, arguments: tuple[Any, ...]) -> None:
    for headers in (None, {f"triton-grpc-protocol-{ADMIN_HEADER}": "guess"}):
        with pytest.raises(grpc.InferenceServerException, match="restricted") as caught:
            getattr(grpc_client, call)(*arguments, headers=headers)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_every_call_of_the_grpc_client_is_tried_or_open() -> None:
    """So that a call that a later tritonclient adds is looked at."""
    tried = {call for call, _ in OVER_GRPC}
    open_calls = {
        *("is_server_live", "is_server_ready", "is_model_ready"),
        *("get_server_metadata", "get_model_metadata", "get_model_config"),
        *("infer", "async_infer", "start_stream", "stop_stream", "async_stream_infer"),
        *("close", "plugin", "register_plugin", "unregister_plugin"),
    }
    public = {name for name in dir(grpc.InferenceServerClient) if not name.startswith("_")}
    assert public == tried | open_calls


def test_what_clients_need_is_open(echo_server: Server, grpc_client: Any) -> None:
    for path in (
        *("", "/health/live", "/health/ready", "/models/ensemble", "/models/ensemble/ready"),
        "/models/ensemble/config",
    ):
        assert ask_http(echo_server, "GET", f"/v2{path}") == 200
    assert grpc_client.is_server_live() and grpc_client.is_model_ready("ensemble")
    assert grpc_client.get_server_metadata().name == "triton"
    assert grpc_client.get_model_metadata("ensemble").name == "ensemble"
    assert grpc_client.get_model_config("ensemble").config.name == "ensemble"
    for url in echo_server.urls:
        with Client(url) as client:
            assert client.generate("a b", max_tokens=1).finish_reason == "length"
    assert echo_server.read_metrics()


def test_private_regions_cannot_be_registered(echo_server: Server, grpc_client: Any) -> None:
    """Not even by who knows their names, which an error of Triton 2.51 may tell."""
    regions = [
        path.name for path in Path("/dev/shm").glob(f"{echo_server.triton.shared_memory_prefix}*")
    ]
    assert regions
    for name in regions:
        path = "/v2/systemsharedmemory/region/x/register"
        assert ask_http(echo_server, "POST", path, {**REGION, "key": f"/{name}"}) == 403
        with pytest.raises(grpc.InferenceServerException, match="restricted"):
            grpc_client.register_system_shared_memory("x", f"/{name}", 8)


def test_each_start_has_a_key_of_its_own(
    echo_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECPIPE_ADMIN_KEY", raising=False)
    keys = {Server(tmp_path, echo_server.options)._admin_key for _ in range(3)}
    assert len(keys) == 3 and {len(key) for key in keys} == {32}


@pytest.mark.parametrize("key", ["", "short", "0123456789abcde=", "0123456789abcdef,x:y"])
def test_a_key_that_would_not_do_is_refused(
    echo_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("SPECPIPE_ADMIN_KEY", key)
    with pytest.raises(ServerError) as caught:
        Server(tmp_path, echo_server.options)
    assert str(caught.value) == (
        "SPECPIPE_ADMIN_KEY is no key: set 16 or more letters, digits, '-' and '_', or unset it"
    )


def test_the_operators_own_key_opens_them(
    echo_repository: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "an-operators_own-key-1"
    monkeypatch.setenv("SPECPIPE_ADMIN_KEY", key)
    with launcher.running(echo_repository()) as server:
        assert ask_http(server, "GET", "/v2/logging", **{ADMIN_HEADER: key}) == 200
        assert ask_http(server, "GET", "/v2/logging") == 403
        with grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
            headers = {f"triton-grpc-protocol-{ADMIN_HEADER}": key}
            assert client.get_inference_statistics("ensemble", headers=headers).model_stats
