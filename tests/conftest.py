"""Marks that need hardware or a library are skipped where it is missing; what may run at once."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

import pytest

if shutil.which("nvidia-smi") is None:
    # The fused kernels of runtime torch then run in Triton's interpreter, which must be asked for
    # before anything imports Triton: transformers does.
    os.environ["TRITON_INTERPRET"] = "1"

# What starts servers: each gets ports that were free a moment ago.
SERVING = (
    "tests/bench/",
    "tests/endpoints/",
    "tests/nightly/",
    "tests/triton/",
    "tests/verification/test_triton.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if shutil.which("nvidia-smi") is None:
        missing["gpu"] = "no NVIDIA GPU here"
    if importlib.util.find_spec("tensorrt_llm") is None:
        missing["tensorrt_llm"] = "TensorRT-LLM is not installed"
    for item in items:
        for mark, reason in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `pytest -n 2`, one process runs all that starts servers, the other one other files."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "serving" if file.startswith(SERVING) else file

    return Scheduling(config, log)
