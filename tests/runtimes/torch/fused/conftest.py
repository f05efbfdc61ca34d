"""Without Triton nothing here can be imported. Without a GPU it interprets: tests/conftest.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


class _WithoutTriton(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        pytest.skip("'triton' is not installed")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    has_triton = importlib.util.find_spec("triton") is not None
    kind = pytest.Module if has_triton else _WithoutTriton
    return kind.from_parent(parent, path=module_path)
