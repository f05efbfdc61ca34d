"""Whether an engine runs here: on these GPUs, with this version of its library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from specpipe.config.engine import ComputeCapability
from specpipe.errors import EngineMismatch
from specpipe.machine.gpus import Gpu
from specpipe.runtimes.engine_fit import release
from specpipe.runtimes.tensorrt.engine_config import TensorRTEngineSpec


def fit_faults(
    spec: TensorRTEngineSpec, gpus: Sequence[Gpu], library_version: str | None
) -> list[str]:
    """Returns what keeps an engine from running here, a sentence each; what is unknown is none."""
    diffs = []
    if library_version is not None and release(library_version) != release(spec.library_version):
        diffs.append(f"built with {spec.library} {spec.library_version}, here is {library_version}")
    if gpus and not any(_runs_on(spec, gpu) for gpu in gpus):
        diffs.append(
            f"built for compute capability {listed(spec.compute_capabilities)}, {_gpus_here(gpus)}"
        )
        if spec.library == "tensorrt_rtx" and not buildable(gpus):
            diffs[-1] += (
                ", which tensorrt_rtx does not run on: set engine.library to tensorrt, or "
                "engine.runtime to torch or tensorrt_llm"
            )
    return diffs


def buildable(gpus: Sequence[Gpu]) -> list[str]:
    """Returns the compute capabilities among GPUs that library tensorrt_rtx builds for."""
    capabilities = dict.fromkeys(gpu.compute_capability for gpu in gpus)
    return [capability for capability in capabilities if capability in get_args(ComputeCapability)]


def find_device(specs: Sequence[TensorRTEngineSpec], gpus: Sequence[Gpu]) -> int:
    """Returns the first GPU that all engines were built for; EngineMismatch without one."""
    for index, gpu in enumerate(gpus):
        if all(_runs_on(spec, gpu) for spec in specs):
            return index
    built = "; ".join(f"{spec.folder} for {listed(spec.compute_capabilities)}" for spec in specs)
    raise EngineMismatch(
        f"no GPU here has a compute capability that all engines were built for: {built}; "
        f"{_gpus_here(gpus)}; build them again"
    )


def _gpus_here(gpus: Sequence[Gpu]) -> str:
    kinds = list(dict.fromkeys(named(gpus)))
    return f"here {'is' if len(kinds) == 1 else 'are'} {listed(kinds)}"


def named(gpus: Sequence[Gpu]) -> list[str]:
    """Returns GPUs as messages name them: NVIDIA L4 (8.9)."""
    return [f"{gpu.name} ({gpu.compute_capability})" for gpu in gpus]


def listed(names: Sequence[str]) -> str:
    """Returns names as a sentence lists them: a, b and c."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _runs_on(spec: TensorRTEngineSpec, gpu: Gpu) -> bool:
    return gpu.compute_capability in spec.compute_capabilities
