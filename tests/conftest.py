"""Marks that need hardware or a library are skipped where it is missing; what may run at once."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specpipe.machine.gpus import gpus_here
from specpipe.runtimes.pair import costs
from tests import waiting
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

# What starts servers, in two processes at most: each server gets ports that were free a moment ago.
# The tests of one group wait for servers a third of their time, and some share one.
SERVING = (
    ("tests/triton/",),
    (
        "tests/evaluate/bench/",
        "tests/evaluate/endpoints/",
        "tests/evaluate/nightly/",
        "tests/evaluate/verification/test_triton.py",
        "tests/release/test_whole_way.py",
        "tests/test_examples.py",
        "tests/test_site.py",
    ),
)


def serving_group(nodeid: str) -> int | None:
    """The index in SERVING of the group that a test or file belongs to."""
    return next((i for i, group in enumerate(SERVING) if nodeid.startswith(group)), None)


@pytest.hookimpl(trylast=True)  # when those that do not run are out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {}
    if not HAS_GPU:
        missing["gpu"] = "no NVIDIA GPU here"
    if importlib.util.find_spec("tensorrt_llm") is None:
        missing["tensorrt_llm"] = "TensorRT-LLM is not installed"
    for item in items:
        for mark, reason in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
    if hasattr(config, "workerinput"):
        items.sort(key=partial(_place, Counter(item.path for item in items)))


def _place(num_tests: Counter[Path], item: pytest.Item) -> tuple[int, int]:
    """Servers first. Then files of few tests, as each of these takes long: one that begins when
    the other processes are at their end would be waited for.
    """
    group = serving_group(item.nodeid)
    return (len(SERVING), num_tests[item.path]) if group is None else (group, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `pytest -n 3`, a process runs one group of SERVING or one file after the other."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = serving_group(nodeid)
            return str(super()._split_scope(nodeid)) if group is None else f"servers {group}"

    config.option.loadscopereorder = False  # files come as they were sorted above
    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def _costs_are_timed_in_a_moment() -> Iterator[None]:
    """An adaptive pair that is loaded in this process is timed for as few rounds as do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "_MAX_ROUNDS", costs._MIN_ROUNDS)
        yield


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., bool]:
    return waiting.wait_until


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout that may be installed from."""
    return copy_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    """The wheel of this checkout."""
    return build("build_wheel", checkout, tmp_path_factory.mktemp("wheel"))
