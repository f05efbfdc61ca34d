"""The hand-written models, loaded from their files, with a small Triton around them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.triton.metric_family import MetricFamily

MODELS = Path(__file__).parents[2] / "model_repo"
_NUMBERS = itertools.count()


class TritonError(Exception):
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG = range(4)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        self.code = code


class Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        assert isinstance(array, np.ndarray)
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class InferenceResponse:
    def __init__(
        self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None
    ) -> None:
        self._tensors, self._error = output_tensors or [], error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def error(self) -> TritonError | None:
        return self._error


class ResponseSender:
    def __init__(self) -> None:
        self.sent: list[tuple[InferenceResponse | None, int]] = []
        self.closed = threading.Event()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.closed.is_set(), "a response after the final one"
        self.sent.append((response, flags))
        if flags == 1:
            self.closed.set()

    def is_cancelled(self) -> bool:
        return False


class ServerRequest:
    """A request as `execute` gets it."""

    def __init__(
        self,
        arrays: dict[str, Any],
        *,
        parameters: dict[str, Any] | None = None,
        request_id: str = "",
    ) -> None:
        self._request_id = request_id
        self._tensors = [Tensor(name, array) for name, array in arrays.items()]
        self._parameters = json.dumps(parameters or {})
        self.sender = ResponseSender()
        self.cancelled = False

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        return self._request_id

    def timeout(self) -> int:
        return 0

    def is_cancelled(self) -> bool:
        return self.cancelled

    def get_response_sender(self) -> ResponseSender:
        return self.sender


class InferenceRequest:
    """A call of another model (BLS)."""

    made: list[InferenceRequest] = []

    def __init__(
        self, model_name: str, requested_output_names: list[str], inputs: list[Tensor]
    ) -> None:
        self.model_name, self.inputs = model_name, inputs
        self.made.append(self)

    def exec(self, decoupled: bool = False) -> list[InferenceResponse]:
        assert decoupled
        return []


def get_input_tensor_by_name(request: ServerRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def stand_in() -> ModuleType:
    """The part of `triton_python_backend_utils` that the models use."""
    module = ModuleType("triton_python_backend_utils")
    InferenceRequest.made.clear()
    MetricFamily.made.clear()
    for part in (TritonError, Tensor, InferenceResponse, InferenceRequest, MetricFamily):
        setattr(module, part.__name__, part)
    module.get_input_tensor_by_name = get_input_tensor_by_name  # type: ignore[attr-defined]
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    module.ServerRequest = ServerRequest  # type: ignore[attr-defined]
    return module


def load(name: str) -> Any:
    """Loads a model's class from its file, under a module name of its own."""
    path = MODELS / name / "1" / "model.py"
    spec = importlib.util.spec_from_file_location(f"model_{name}_{next(_NUMBERS)}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel()


@pytest.fixture
def pb_utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = stand_in()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def load_model(pb_utils: ModuleType) -> Callable[[str], Any]:
    return load
