"""Two engines on one GPU as a pair; their logits come to the host, where torch chooses tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from specpipe.errors import EngineMismatch
from specpipe.machine.memory import MemoryEstimate, check_room
from specpipe.runtimes.engine_fit import check_limits
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import DetokenizerFactory, PairOptions
from specpipe.runtimes.tensorrt import library as libraries
from specpipe.runtimes.tensorrt.cuda import Cuda
from specpipe.runtimes.tensorrt.cuda_runner import CudaRunner
from specpipe.runtimes.tensorrt.engine import TensorRTEngine
from specpipe.runtimes.tensorrt.engine_config import TensorRTEngineSpec, check_files
from specpipe.runtimes.tensorrt.fit import find_device, fit_faults
from specpipe.runtimes.torch.pair import pair_of
from specpipe.speculative.guide import Guides


def load_pair(
    draft: Path,
    target: Path,
    options: PairOptions,
    detokenizer: DetokenizerFactory,
    guides: Guides | None = None,
) -> EnginePair:
    """Loads both engines and measures what their steps cost, unless drafting is fixed or off.

    Whatever can be known not to run is refused before anything is loaded.
    """
    specs = [TensorRTEngineSpec.read(folder) for folder in (draft, target)]
    for spec in specs:
        check_limits(spec.folder, spec, options)
    modules = {spec.library: libraries.load(spec.library) for spec in specs}
    cuda = Cuda.load(specs[0].library)
    device = _device(specs, modules, cuda)
    for spec in specs:
        check_files(spec)
    loaded = ExitStack()
    try:
        runners = []
        for spec in specs:
            runners.append(CudaRunner(spec, device, trt=modules[spec.library], cuda=cuda))
            loaded.callback(runners[-1].close)
        draft_engine, target_engine = map(TensorRTEngine, specs, runners)
        pair = pair_of(
            draft_engine,
            target_engine,
            options,
            detokenizer,
            guides=guides,
            on_close=loaded.close,
        )
        for runner in runners:
            runner.keep_kernels()  # also for a server that is killed
        return pair
    except BaseException:
        loaded.close()
        raise


def _device(specs: Sequence[TensorRTEngineSpec], modules: dict[str, Any], cuda: Cuda) -> int:
    """Returns the GPU that can run all engines, and has room for them."""
    gpus = cuda.gpus()
    faults = [
        f"{spec.folder}: {fault}"
        for spec in specs
        for fault in fit_faults(spec, gpus, modules[spec.library].__version__)
    ]
    if faults:
        raise EngineMismatch("\n".join([*faults, "build them again"]))
    device = find_device(specs, gpus)
    check_room(
        [(spec.folder, _needs(spec)) for spec in specs], cuda.free_bytes(device), on_gpu=True
    )
    return device


def _needs(spec: TensorRTEngineSpec) -> MemoryEstimate:
    """Returns what must be on the GPU; weights that are streamed need not be."""
    if spec.weight_streaming and spec.weights_bytes is None:
        return replace(spec.memory, weights_bytes=0)
    return spec.memory
