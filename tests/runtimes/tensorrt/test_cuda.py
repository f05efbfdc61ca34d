"""What is done with a GPU's memory: on one in host memory, and marked `gpu` on a real one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpipe.checkpoints.checkpoint import create_safetensors
from specpipe.errors import EngineMismatch, RuntimeUnavailable
from specpipe.machine.gpus import Gpu
from specpipe.machine.libraries import with_extras
from specpipe.runtimes.tensorrt import cuda as cuda_module
from specpipe.runtimes.tensorrt.cuda import Cuda
from specpipe.runtimes.tensorrt.cuda_runner import KERNELS_NAME, CudaRunner
from specpipe.runtimes.tensorrt.engine_config import TensorRTEngineSpec
from tests.runtimes.tensorrt.gpus import CudaGpu, HostGpu
from tests.runtimes.tensorrt.table_library import TableLibrary, write_engine
from tests.speculative.table import TableModel, target_rule


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> HostGpu | CudaGpu:
    return HostGpu() if request.param == "host" else CudaGpu()


def load(gpu: HostGpu | CudaGpu, folder: Path, **library: Any) -> tuple[CudaRunner, TableLibrary]:
    trt = TableLibrary(gpu, {"target": TableModel(target_rule)}, **library)
    runner = CudaRunner(TensorRTEngineSpec.read(folder), 0, trt=trt, cuda=Cuda(gpu.cudart))
    return runner, trt


def run(
    runner: CudaRunner,
    rows: Sequence[Sequence[int]],
    *,
    first_slot: int = 0,
    starts: Sequence[int] | None = None,
    scored: Sequence[int] = (0,),
) -> list[int]:
    """Runs rows of equal length; the best id of each row that is scored."""
    logits = runner.run(
        first_slot,
        np.array(rows, np.int32),
        np.array(starts or [0] * len(rows), np.int32),
        np.array(scored, np.int32),
    )
    assert logits.dtype == np.float32 and logits.shape == (len(scored), 104)
    return [int(i) for i in logits.argmax(axis=1)]


def rules(*contexts: Sequence[int]) -> list[int]:
    return [target_rule(context) for context in contexts]


def test_slots_keep_what_was_written(gpu: HostGpu | CudaGpu, tmp_path: Path) -> None:
    runner, _ = load(gpu, write_engine(tmp_path / "engine"))
    for slot in range(4):
        runner.clear(slot, 0, 520)
    assert run(runner, [[7, 8, 9]], first_slot=2, scored=[0, 1, 2]) == rules([7], [7, 8], [7, 8, 9])
    assert run(runner, [[5], [6]], scored=[1, 0]) == rules([6], [5])
    # All four: one goes on, others begin, and one row of padding is not scored.
    found = run(
        runner,
        [[5, 6], [7, 7], [4, 10], [8, 8]],
        starts=[1, 1, 3, 0],
        scored=[1, 2, 4, 5],
    )
    assert found == rules([5, 5, 6], [6, 7], [7, 8, 9, 4], [7, 8, 9, 4, 10])
    runner.close()


def test_a_prompt_goes_through_its_own_profile(gpu: HostGpu | CudaGpu, tmp_path: Path) -> None:
    runner, trt = load(gpu, write_engine(tmp_path / "engine", max_num_tokens=16))
    runner.clear(3, 0, 520)
    prompt = list(range(20, 36))
    assert run(runner, [prompt], first_slot=3, scored=[15]) == rules(prompt)
    assert run(runner, [[40]], first_slot=3, starts=[16]) == rules([*prompt, 40])
    assert [context.profile for context in trt.engines[0].contexts] == [0, 1]
    assert [context.num_runs for context in trt.engines[0].contexts] == [1, 1]
    with pytest.raises(AssertionError, match=r"no profile has B, N, R = \(2, 10, 1\)"):
        run(runner, [prompt[:10]] * 2)
    runner.close()


def test_clear_zeroes_some_positions_of_one_slot_in_all_layers(
    gpu: HostGpu | CudaGpu, tmp_path: Path
) -> None:
    folder = write_engine(tmp_path / "engine")
    runner, trt = load(gpu, folder)
    for slot in range(4):
        runner.clear(slot, 0, 520)
    run(runner, [[9] * 6] * 4)
    runner.clear(1, 2, 5)
    run(runner, [[9]], first_slot=3)  # and waits
    context = trt.engines[0].contexts[0]
    shape = (4, 2, 520, 8)
    for index, name in enumerate(("key_cache.0", "value_cache.0", "key_cache.1", "value_cache.1")):
        begin = context.addresses[name] - 3 * 2 * 520 * 8 * 4
        cache = np.frombuffer(gpu.read(begin, 4 * 4 * 2 * 520 * 8), np.float32).reshape(shape)
        expected = np.zeros(shape)
        expected[:, :, :6] = 9 * (index + 1)
        expected[1, :, 2:5] = 0
        assert (cache == expected).all()
    runner.close()


def test_what_stays_is_not_told_again(tmp_path: Path) -> None:
    runner, trt = load(HostGpu(), write_engine(tmp_path / "engine"))
    for slot in range(4):
        runner.clear(slot, 0, 520)
    context = trt.engines[0].contexts[0]
    run(runner, [[9]])
    for change, expected in (
        ({}, 0),
        ({"starts": [1]}, 0),
        ({"first_slot": 1}, 8),  # addresses of four caches and of their outputs
        ({"first_slot": 1, "rows": [[9, 9]]}, 2),
        ({"first_slot": 1, "rows": [[9, 9], [9, 9]]}, 8),
        ({"first_slot": 1, "rows": [[9, 9], [9, 9]], "scored": [0, 2]}, 1),
    ):
        before = context.num_calls
        settings: dict[str, Any] = {"rows": [[9]], **change}
        run(runner, **settings)
        assert context.num_calls - before == expected


def test_close_gives_all_memory_back(tmp_path: Path) -> None:
    gpu = HostGpu()
    runner, _ = load(gpu, write_engine(tmp_path / "engine"))
    assert (len(gpu.device_memory), len(gpu.host_memory), len(gpu.streams)) == (3, 2, 1)
    run(runner, [[9]])
    runner.close()
    assert (gpu.device_memory, gpu.host_memory, gpu.streams) == ({}, {}, {})


def test_the_gpu_is_chosen_in_each_thread_that_runs(tmp_path: Path) -> None:
    gpu = HostGpu(("A", 9, 0), ("B", 8, 9))
    trt = TableLibrary(gpu, {"target": TableModel(target_rule)})
    spec = TensorRTEngineSpec.read(write_engine(tmp_path / "engine"))
    runner = CudaRunner(spec, 1, trt=trt, cuda=Cuda(gpu))
    for call in (lambda: runner.clear(0, 0, 1), lambda: run(runner, [[9]]), runner.close):
        gpu.device = 0
        call()
        assert gpu.device == 1


# The first is read in more than one block.
WEIGHTS = {"transformer.vocab_embedding.weight": [150_000, 2], "transformer.ln_f.weight": [1, 1, 2]}


def write_weights(folder: Path, tensors: dict[str, np.ndarray]) -> int:
    """Writes weights beside an engine; the size of the file."""
    path = folder / "rank0_managed_weights.safetensors"
    header = {name: ("F32", array.shape) for name, array in tensors.items()}
    with create_safetensors(path, header) as writer:
        for name, array in tensors.items():
            writer.write_rows(name, 0, array.view(np.uint32))
    return path.stat().st_size


def test_weights_beside_the_engine_are_inputs(gpu: HostGpu | CudaGpu, tmp_path: Path) -> None:
    tensors = {
        "transformer.ln_f.weight": np.array([1.5, -2.0], np.float32),
        "transformer.vocab_embedding.weight": np.arange(300_000, dtype=np.float32).reshape(-1, 2),
        "unused": np.zeros(4, np.float32),
    }
    folder = write_engine(tmp_path / "engine", weights=WEIGHTS, weights_bytes=0)
    write_weights(folder, tensors)
    runner, trt = load(gpu, folder)
    run(runner, [[9]])
    for context in trt.engines[0].contexts:
        for name in WEIGHTS:
            found = gpu.read(context.addresses[name], tensors[name].nbytes)
            assert found == tensors[name].tobytes()
    runner.close()


@pytest.mark.parametrize(
    "other",
    [
        {"transformer.ln_f.weight": np.zeros(2, np.float32)},
        {
            "transformer.vocab_embedding.weight": np.zeros((4, 2), np.float32),
            "transformer.ln_f.weight": np.zeros(2, np.float32),
        },
    ],
)
def test_other_weights_beside_an_engine(tmp_path: Path, other: dict[str, np.ndarray]) -> None:
    folder = write_engine(tmp_path / "engine", weights=WEIGHTS, weights_bytes=0)
    write_weights(folder, other)
    gpu = HostGpu()
    with pytest.raises(EngineMismatch) as caught:
        load(gpu, folder)
    assert str(caught.value) == (
        f"{folder}/rank0_managed_weights.safetensors has no transformer.vocab_embedding.weight as "
        "the engine takes it: build it again"
    )
    assert (gpu.device_memory, gpu.host_memory, gpu.streams) == ({}, {}, {})
    (folder / "rank0_managed_weights.safetensors").write_bytes(b"?")
    with pytest.raises(EngineMismatch, match="is truncated: 1 bytes.*build the engine again"):
        load(gpu, folder)


def test_streamed_weights_get_what_memory_is_left(tmp_path: Path) -> None:
    _, trt = load(HostGpu(), write_engine(tmp_path / "a"))
    assert trt.engines[0].weight_streaming_budget_v2 is None
    _, trt = load(HostGpu(), write_engine(tmp_path / "b", weight_streaming=True))
    assert trt.engines[0].weight_streaming_budget_v2 == 12345


def test_compiled_kernels_are_kept_beside_the_engine(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "engine")
    runner, _ = load(HostGpu(), folder)
    assert not (folder / KERNELS_NAME).exists()
    run(runner, [[9]])
    runner.keep_kernels()
    assert (folder / KERNELS_NAME).read_bytes() == b"kernels of 1 runs"
    run(runner, [[9]])
    runner.close()
    assert (folder / KERNELS_NAME).read_bytes() == b"kernels of 2 runs"
    assert sorted(path.name for path in folder.iterdir()) == [
        KERNELS_NAME,
        "config.json",
        "rank0.engine",
    ]
    runner, _ = load(HostGpu(), folder)
    assert runner._kernels.read == b"kernels of 2 runs"
    (folder / KERNELS_NAME).write_bytes(b"of another GPU")
    load(HostGpu(), folder)


def test_kernels_that_cannot_be_written_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_engine(tmp_path / "engine")
    runner, _ = load(HostGpu(), folder)

    def replace(self: Path, target: Path) -> None:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(Path, "replace", replace)
    runner.close()
    assert sorted(os.listdir(folder)) == ["config.json", "rank0.engine"]


def test_a_library_that_compiles_nothing_where_it_runs(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "engine")
    runner, _ = load(HostGpu(), folder, compiles_when_run=False)
    assert run(runner, [[9]])
    runner.close()
    assert sorted(os.listdir(folder)) == ["config.json", "rank0.engine"]


def test_what_the_library_refuses_is_told_with_its_reason(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "engine")
    (folder / "rank0.engine").write_bytes(b"?")
    with pytest.raises(RuntimeUnavailable) as caught:
        load(HostGpu(), folder)
    assert str(caught.value) == (
        f"the engine of {folder} was not loaded:\nheader.magicTag is not that of an engine"
    )


def test_a_run_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "engine")
    runner, trt = load(HostGpu(), folder)
    del trt.engines[0].contexts[0].addresses["input_ids"]
    with pytest.raises(RuntimeUnavailable) as caught:
        run(runner, [[9]])
    assert str(caught.value) == (
        f"the engine of {folder} did not run:\nthe addresses of ['input_ids'] are not set"
    )


@pytest.mark.parametrize("function", ["cudaMalloc", "cudaMallocHost", "cudaStreamSynchronize"])
def test_an_error_of_cuda_is_told_in_its_words(tmp_path: Path, function: str) -> None:
    gpu = HostGpu(failing={function: 2})
    with pytest.raises(RuntimeUnavailable, match=f"^{function}: out of memory$"):
        load(gpu, write_engine(tmp_path / "engine"))
    assert (gpu.device_memory, gpu.host_memory, gpu.streams) == ({}, {}, {})


def test_gpus_by_name() -> None:
    assert Cuda(HostGpu(("NVIDIA A10", 8, 6), ("NVIDIA L4", 8, 9))).gpus() == [
        Gpu("NVIDIA A10", 1 << 34, 86),
        Gpu("NVIDIA L4", 1 << 34, 89),
    ]
    with pytest.raises(RuntimeUnavailable, match="no CUDA-capable device is detected"):
        Cuda(HostGpu(failing={"cudaGetDeviceCount": 100})).gpus()


@pytest.mark.gpu
def test_a_real_gpu_has_name_capability_and_memory() -> None:
    cuda = Cuda.load("tensorrt_rtx")
    found = cuda.gpus()[0]
    assert found.name.startswith("NVIDIA ") and found.name.isprintable()
    assert found.sm is not None and found.sm >= 75
    assert 1 << 30 < cuda.free_bytes(0) < found.memory_bytes


def test_without_cuda_python_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(cuda_module.importlib, "import_module", import_module)
    with pytest.raises(RuntimeUnavailable) as caught:
        Cuda.load("tensorrt")
    assert str(caught.value) == (
        f"runtime 'tensorrt' needs 'cuda-python': {with_extras('tensorrt')}"
    )
