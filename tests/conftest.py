"""Marks that need hardware or a library are skipped where it is missing; what may run at once."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

if shutil.which("nvidia-smi") is None:
    # The fused kernels of runtime torch then run in Triton's interpreter, which must be asked for
    # before anything imports Triton: transformers does.
    os.environ["TRITON_INTERPRET"] = "1"

TESTS = Path(__file__).parent
# What starts servers, which goes one after the other in one process of `pytest -n 2 --dist
# loadgroup`: a server is given ports that were free a moment ago.
SERVING = ("bench/", "endpoints/", "nightly/", "triton/", "verification/test_triton.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {}
    if shutil.which("nvidia-smi") is None:
        missing["gpu"] = "no NVIDIA GPU here"
    if importlib.util.find_spec("tensorrt_llm") is None:
        missing["tensorrt_llm"] = "TensorRT-LLM is not installed"
    for item in items:
        for mark, reason in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))

    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            path = item.path.relative_to(TESTS).as_posix()
            group = "serving" if path.startswith(SERVING) else path
            item.add_marker(pytest.mark.xdist_group(group))
