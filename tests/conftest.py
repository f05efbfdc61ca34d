"""Marks that need hardware or a library are skipped where it is missing; what may run at once."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from specpipe.machine.gpus import gpus_here
from tests.installed import build, copy_checkout

HAS_GPU = bool(gpus_here())
if not HAS_GPU:
    # The fused kernels of runtime torch then run in Triton's interpreter, which must be asked for
    # before anything imports Triton: transformers does.
    os.environ["TRITON_INTERPRET"] = "1"

# A shell ignores Ctrl-C for what it runs in the background, and what the tests start would inherit
# that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What starts servers: each gets ports that were free a moment ago.
SERVING = (
    "tests/evaluate/bench/",
    "tests/evaluate/endpoints/",
    "tests/evaluate/nightly/",
    "tests/test_examples.py",
    "tests/triton/",
    "tests/evaluate/verification/test_triton.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not HAS_GPU:
        missing["gpu"] = "no NVIDIA GPU here"
    if importlib.util.find_spec("tensorrt_llm") is None:
        missing["tensorrt_llm"] = "TensorRT-LLM is not installed"
    for item in items:
        for mark, reason in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `pytest -n 3`, one process runs all that starts servers, the others other files."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "serving" if file.startswith(SERVING) else file

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout that may be installed from."""
    return copy_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    """The wheel of this checkout."""
    return build("build_wheel", checkout, tmp_path_factory.mktemp("wheel"))
