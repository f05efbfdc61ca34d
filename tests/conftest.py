"""Marks that need hardware or a library are skipped where it is missing."""

from __future__ import annotations

import importlib.util
import shutil

import pytest


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
