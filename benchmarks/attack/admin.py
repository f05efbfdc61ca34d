"""Hostile kinds of benchmarks.attack: what only the operator of a Triton may call.

Each is sent without the key of this start. A call counts as refused when the door itself refuses
it: 403 over HTTP, `This protocol is restricted` over gRPC. Whatever else comes back, an error
included, was said by what stands behind the door, and counts as answered. No call changes anything
that would disturb a server which lets it through.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from benchmarks.attack.kind import Kind
from benchmarks.attack.send import Reply, Target, call, post

_HTTP: dict[str, tuple[str, str, Any]] = {
    "memory-status": ("GET", "/v2/systemsharedmemory/status", None),
    "memory-unregister": ("POST", "/v2/systemsharedmemory/unregister", {}),
    "cuda-memory-status": ("GET", "/v2/cudasharedmemory/status", None),
    "repository-index": ("POST", "/v2/repository/index", {}),
    "repository-load": ("POST", "/v2/repository/models/ensemble/load", {}),
    "repository-unload": ("POST", "/v2/repository/models/ensemble/unload", {}),
    "trace": ("POST", "/v2/trace/setting", {"trace_level": ["OFF"]}),
    "model-trace": ("GET", "/v2/models/ensemble/trace/setting", None),
    "logging": ("POST", "/v2/logging", {"log_verbose_level": 0}),
    "statistics": ("GET", "/v2/models/stats", None),
    "model-statistics": ("GET", "/v2/models/ensemble/stats", None),
}
_GRPC: dict[str, tuple[str, Any]] = {
    "memory-status": ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
    "memory-unregister": ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest()),
    "cuda-memory-status": ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
    "repository-index": ("RepositoryIndex", pb.RepositoryIndexRequest()),
    "repository-load": ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="x")),
    "repository-unload": ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="x")),
    "trace": ("TraceSetting", pb.TraceSettingRequest()),
    "logging": ("LogSettings", pb.LogSettingsRequest()),
    "statistics": ("ModelStatistics", pb.ModelStatisticsRequest()),
}
_REGION = "attack"


def _http_kind(name: str) -> Kind:
    method, path, body = _HTTP[name]

    def send(target: Target, rng: random.Random) -> Reply:
        text = "" if body is None else json.dumps(body)
        return _by_door(post(target, path, text, method=method))

    return Kind(f"http-{name}", send, must_refuse=True)


def _grpc_kind(name: str) -> Kind:
    method, message = _GRPC[name]

    def send(target: Target, rng: random.Random) -> Reply:
        return _by_door(call(target, method, message))

    return Kind(f"grpc-{name}", send, must_refuse=True)


def register_http(target: Target, rng: random.Random) -> Reply:
    """Registers a region of the server's own models, whose names any local process can list."""
    path = f"/v2/systemsharedmemory/region/{_REGION}"
    body = {"key": _a_region(rng), "offset": 0, "byte_size": 64}
    reply = post(target, f"{path}/register", json.dumps(body))
    post(target, f"{path}/unregister")
    return _by_door(reply)


def register_grpc(target: Target, rng: random.Random) -> Reply:
    message = pb.SystemSharedMemoryRegisterRequest(
        name=_REGION, key=_a_region(rng), offset=0, byte_size=64
    )
    reply = call(target, "SystemSharedMemoryRegister", message)
    call(
        target, "SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=_REGION)
    )
    return _by_door(reply)


def _a_region(rng: random.Random) -> str:
    names = sorted(path.name for path in Path("/dev/shm").glob("specpipe_*"))
    return f"/{rng.choice(names)}" if names else "/attack"


def _by_door(reply: Reply) -> Reply:
    """An error of what stands behind the door is an answer."""
    if reply.outcome == "refused" and "restricted" not in reply.text:
        return replace(reply, outcome="answered")
    return reply


KINDS = (
    *map(_http_kind, _HTTP),
    *map(_grpc_kind, _GRPC),
    Kind("http-memory-register", register_http, must_refuse=True),
    Kind("grpc-memory-register", register_grpc, must_refuse=True),
)
