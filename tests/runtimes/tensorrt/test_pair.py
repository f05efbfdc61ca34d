"""Loading a pair: all that keeps it from running is known before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specpipe.checkpoints.parallel_draft import ParallelDraft
from specpipe.errors import EngineMismatch, RuntimeUnavailable
from specpipe.runtimes.pair import costs
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.runtime import load_runtime
from specpipe.runtimes.tensorrt import library
from specpipe.runtimes.tensorrt.cuda import Cuda
from specpipe.runtimes.tensorrt.cuda_runner import KERNELS_NAME
from tests.runtimes.pair.test_parallel_drafts import MASK, in_parallel
from tests.runtimes.table_engine import ids, run
from tests.runtimes.tensorrt.gpus import HostGpu
from tests.runtimes.tensorrt.table_library import TableLibrary, tensorrt_pair, write_engine
from tests.speculative.table import (
    TableModel,
    WordDetokenizer,
    greedy_reference,
    half_rule,
    request,
    target_rule,
)

FIXED = PairOptions(adaptive=False, max_batch_size=4, max_seq_len=500, max_num_tokens=16)

Machine = Callable[[HostGpu], TableLibrary]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this machine one with a GPU and the library."""

    def be(gpu: HostGpu) -> TableLibrary:
        models = {"draft": TableModel(half_rule), "target": TableModel(target_rule)}
        trt = TableLibrary(gpu, models)
        monkeypatch.setattr(library, "load", lambda name: trt)
        monkeypatch.setattr(Cuda, "load", lambda name: Cuda(gpu))
        return trt

    return be


@pytest.fixture
def engines(tmp_path: Path) -> tuple[Path, Path]:
    return write_engine(tmp_path / "draft", "draft"), write_engine(tmp_path / "target")


def load(engines: tuple[Path, Path], options: PairOptions = FIXED) -> EnginePair:
    pair = load_runtime("tensorrt").load_pair(
        *engines, options, lambda prompt, **_: WordDetokenizer()
    )
    assert isinstance(pair, EnginePair)
    return pair


def test_a_loaded_pair_answers_and_gives_its_memory_back(
    machine: Machine, engines: tuple[Path, Path]
) -> None:
    gpu = HostGpu(("NVIDIA H100", 9, 0), ("NVIDIA L4", 8, 9))
    trt = machine(gpu)
    pair = load(engines)
    assert gpu.device == 1
    assert pair.costs is None
    requests = [request("a", 3), request("b", 60)]
    chunks = run(pair, requests)
    for r in requests:
        assert ids(chunks[r.request_id]) == greedy_reference(r)
    pair.close()
    assert (gpu.device_memory, gpu.host_memory, gpu.streams) == ({}, {}, {})
    num_runs = [sum(c.num_runs for c in engine.contexts) for engine in trt.engines]
    # The draft's tokens are right every other time, and both engines kept what they compiled.
    assert num_runs[0] > num_runs[1] > 10
    assert [(folder / KERNELS_NAME).read_bytes() for folder in engines] == [
        b"kernels of %d runs" % count for count in num_runs
    ]


def test_costs_are_measured_and_what_that_compiled_is_kept_at_once(
    machine: Machine, engines: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_BUDGET_S", 0.0)
    machine(HostGpu())
    pair = load(engines, PairOptions(num_draft_tokens=3, max_batch_size=2))
    assert pair.costs is not None
    assert len(pair.costs.at(2).verify) == 4
    assert all((folder / KERNELS_NAME).exists() for folder in engines)
    assert load(engines, PairOptions(num_draft_tokens=0, max_batch_size=2)).costs is None


def test_an_engine_too_small_for_what_it_is_to_serve(
    machine: Machine, engines: tuple[Path, Path]
) -> None:
    machine(HostGpu())
    for options, name, built, wanted in (
        (PairOptions(max_batch_size=5), "max_batch_size", 4, 5),
        (PairOptions(max_batch_size=4, num_draft_tokens=9), "max_draft_len", 8, 9),
    ):
        with pytest.raises(EngineMismatch) as caught:
            load(engines, options)
        assert str(caught.value) == (
            f"{engines[0]} was built for {name} {built}, the pair is to serve {wanted}; "
            "build it again"
        )


def test_all_that_differs_is_told_before_anything_is_loaded(
    machine: Machine, tmp_path: Path
) -> None:
    gpu = HostGpu(("NVIDIA T4", 7, 5), ("NVIDIA A10", 8, 6))
    machine(gpu)
    draft = write_engine(tmp_path / "draft", library_version="1.8.0.2")
    target = write_engine(tmp_path / "target", compute_capabilities=["8.9", "12.0"])
    with pytest.raises(EngineMismatch) as caught:
        load((draft, target))
    assert str(caught.value) == (
        f"{draft}: built with tensorrt_rtx 1.8.0.2, here is 1.7.1.116\n"
        f"{target}: built for compute capability 8.9 and 12.0, here are NVIDIA T4 (7.5) and "
        "NVIDIA A10 (8.6)\n"
        "build them again"
    )
    assert gpu.streams == {}


def test_engines_that_run_here_but_not_together(machine: Machine, tmp_path: Path) -> None:
    machine(HostGpu(("NVIDIA A10", 8, 6), ("NVIDIA L4", 8, 9)))
    draft = write_engine(tmp_path / "draft", compute_capabilities=["8.6"])
    target = write_engine(tmp_path / "target", compute_capabilities=["8.9"])
    with pytest.raises(EngineMismatch) as caught:
        load((draft, target))
    assert str(caught.value) == (
        f"no GPU here has a compute capability that all engines were built for: {draft} for 8.6; "
        f"{target} for 8.9; here are NVIDIA A10 (8.6) and NVIDIA L4 (8.9); build them again"
    )


def test_a_gpu_without_room(machine: Machine, tmp_path: Path) -> None:
    """Weights that are streamed need none."""
    machine(HostGpu(free_bytes=1_000_000))
    draft = write_engine(tmp_path / "draft", "draft")
    target = write_engine(tmp_path / "target", weight_streaming=True)
    with pytest.raises(RuntimeUnavailable) as caught:
        load((draft, target))
    assert str(caught.value) == (
        f"1.0 MB of GPU memory are free: {draft} needs 779.1 kB (87.7 kB weights, 532.5 kB KV "
        f"cache, 159.0 kB workspace); {target} needs 691.5 kB (0.0 kB weights, 532.5 kB KV cache, "
        "159.0 kB workspace); lower engine.max_batch_size or engine.max_seq_len"
    )


def test_without_a_gpu(machine: Machine, engines: tuple[Path, Path]) -> None:
    machine(HostGpu(failing={"cudaGetDeviceCount": 100}))
    with pytest.raises(RuntimeUnavailable) as caught:
        load(engines)
    assert str(caught.value) == "cudaGetDeviceCount: no CUDA-capable device is detected"


def test_a_damaged_engine(machine: Machine, engines: tuple[Path, Path]) -> None:
    machine(HostGpu())
    (engines[1] / "rank0.engine").write_bytes(b"?")
    with pytest.raises(EngineMismatch, match="rank0.engine is damaged.*: build the engine again"):
        load(engines)


def test_what_was_loaded_before_a_failure_is_given_back(
    machine: Machine, engines: tuple[Path, Path]
) -> None:
    gpu = HostGpu()
    trt = machine(gpu)
    del trt.models["target"]  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        load(engines)
    assert (gpu.device_memory, gpu.host_memory, gpu.streams) == ({}, {}, {})


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_a_draft_that_proposes_in_one_pass(num_draft_tokens: int, tmp_path: Path) -> None:
    """Texts of several lengths at once; no token sees a mask of an earlier round."""
    target, draft = TableModel(target_rule), TableModel(in_parallel(half_rule))
    requests = [request(f"{p}-{m}", p, max_tokens=m) for p in (1, 7, 60) for m in (2, 32)]
    with tensorrt_pair(
        *(tmp_path, target, draft),
        parallel=ParallelDraft(MASK),
        num_draft_tokens=num_draft_tokens,
        prompt_lookup=False,
    ) as pair:
        chunks = run(pair, requests)
    for r in requests:
        assert ids(chunks[r.request_id]) == greedy_reference(r)
