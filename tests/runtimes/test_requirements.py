"""What a version needs of a machine, held against machines of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from specpipe.machine.gpus import Gpu
from specpipe.runtimes import requirements
from specpipe.runtimes.requirements import EngineGpus, Requirements, faults

H100 = Gpu("NVIDIA H100", 80 << 30, 90, "570.86.10")
L4 = Gpu("NVIDIA L4", 24 << 30, 89, "570.86.10")
ENGINES = Requirements(
    runtime="tensorrt_llm",
    libraries={"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"},
    engines={
        "draft": EngineGpus(compute_capabilities=("9.0",), gpu_ids=(0,)),
        "target": EngineGpus(compute_capabilities=("9.0",), gpu_ids=(0, 1)),
    },
    driver="570.124.06",
)
HERE = {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48.post1", "torch": "2.13.0+cpu"}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def be(**versions: str) -> None:
        monkeypatch.setattr(requirements, "installed", {**HERE, **versions}.get)

    be()
    return be


def test_a_machine_like_the_one_that_built_it_will_do() -> None:
    assert list(faults(ENGINES, (H100, H100))) == []
    newer = replace(H100, driver="580.1")
    assert list(faults(ENGINES, (newer, newer, L4))) == []


def test_a_cpu_will_do_for_torch_of_any_version(here: Callable[..., None]) -> None:
    needed = Requirements(runtime="torch", libraries={"torch": ""})
    assert list(faults(needed, ())) == []
    missing = replace(needed, libraries={"no_such_library": ""})
    assert list(faults(missing, ())) == [
        "runtime torch needs no_such_library, which is not installed here"
    ]


def test_all_that_is_missing_is_said(here: Callable[..., None]) -> None:
    here(tensorrt_llm="1.2.10", tensorrt="10.15")
    older = Gpu("NVIDIA L4", 24 << 30, 89, "550.90.07")
    assert list(faults(ENGINES, (older,))) == [
        "it was built with tensorrt_llm 1.2.1, here is 1.2.10",
        "it was built with tensorrt 10.14.1.48, here is 10.15",
        "draft: built for compute capability 9.0, GPU 0 has 8.9",
        "target: built for compute capability 9.0, GPU 0 has 8.9",
        "target: is to run on GPU 1, the last one here is GPU 0",
        "it was built under NVIDIA's driver 570.124.06, here is 550.90.07: install one of branch "
        "570 or later",
    ]
    assert list(faults(ENGINES, ()))[2:] == [
        "its engines run on a GPU, and NVIDIA's driver shows none here"
    ]


def test_any_gpu_that_an_engine_runs_on_will_do() -> None:
    needed = replace(
        ENGINES,
        libraries={},
        engines={"target": EngineGpus(compute_capabilities=("8.6", "8.9"))},
    )
    assert list(faults(needed, (H100, L4))) == []
    assert list(faults(needed, (H100, H100))) == [
        "target: built for compute capability 8.6 or 8.9, here is NVIDIA H100 (9.0)"
    ]


@pytest.mark.parametrize(
    ("version", "fits"),
    [("1.2.0", True), ("1.2", True), ("1.2.1.post1", True), ("1.20.0", False), ("1.3.0", False)],
)
def test_a_release_line_holds_every_version_of_it(
    here: Callable[..., None], version: str, fits: bool
) -> None:
    here(tensorrt_llm=version)
    needed = Requirements(runtime="tensorrt_llm", libraries={"tensorrt_llm": "1.2"})
    assert (list(faults(needed, ())) == []) is fits
