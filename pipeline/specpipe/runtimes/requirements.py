"""What a machine must be to serve a built pair: known from the repository, and held against facts
of the machine before anything large is fetched.

`Runtime.launch` compares the engines themselves and is the last word; this asks for no file that
they are in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field

from specpipe.errors import show
from specpipe.machine.gpus import Gpu
from specpipe.roles import Role
from specpipe.runtimes.engine_fit import installed, release

_Text = Annotated[str, Field(max_length=64)]
_Capability = Annotated[str, Field(pattern=r"^[0-9]{1,3}\.[0-9]$")]
_GpuId = Annotated[int, Field(ge=0, lt=1024, strict=True)]


@dataclass(frozen=True, kw_only=True)
class EngineGpus:
    """The GPUs that one engine needs.

    compute_capabilities  those that it runs on; none: any, or it is not known
    gpu_ids               numbers of the GPUs that it takes; none: any one that will do
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    compute_capabilities: Annotated[tuple[_Capability, ...], Field(max_length=64)] = ()
    gpu_ids: Annotated[tuple[_GpuId, ...], Field(max_length=1024)] = ()


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a machine must be.

    libraries  the version of each distribution, or the first numbers of it; "": any version
    engines    those that run on GPUs only; none: a CPU will do
    driver     the version under which the engines were built; None: not known, or no matter
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    runtime: _Text
    libraries: Annotated[Mapping[_Text, _Text], Field(max_length=16)]
    engines: Mapping[Role, EngineGpus] = field(default_factory=dict)
    driver: _Text | None = None


def faults(needed: Requirements, gpus: Sequence[Gpu]) -> Iterator[str]:
    """Yields what keeps this machine, with these GPUs, from serving, a sentence each."""
    for name, version in needed.libraries.items():
        here = installed(name)
        wanted = f"{show(name)} {show(version)}".rstrip()
        if here is None:
            yield f"runtime {show(needed.runtime)} needs {wanted}, which is not installed here"
        elif not _is_of(here, version):
            yield f"it was built with {wanted}, here is {here}"
    if not needed.engines:
        return
    if not gpus:
        yield "its engines run on a GPU, and NVIDIA's driver shows none here"
        return
    for role, engine in needed.engines.items():
        yield from (f"{role}: {fault}" for fault in _gpu_faults(engine, gpus))
    if (fault := _driver_fault(needed.driver, gpus[0].driver)) is not None:
        yield fault


def _is_of(version: str, wanted: str) -> bool:
    return not wanted or f"{release(version)}.".startswith(f"{release(wanted)}.")


def _gpu_faults(engine: EngineGpus, gpus: Sequence[Gpu]) -> Iterator[str]:
    wanted = engine.compute_capabilities
    if not engine.gpu_ids:
        if wanted and not any(gpu.compute_capability in wanted for gpu in gpus):
            kinds = dict.fromkeys(f"{gpu.name} ({gpu.compute_capability})" for gpu in gpus)
            yield f"built for compute capability {_any_of(wanted)}, here is {', '.join(kinds)}"
        return
    for number in engine.gpu_ids:
        if number >= len(gpus):
            yield f"is to run on GPU {number}, the last one here is GPU {len(gpus) - 1}"
        elif wanted and gpus[number].compute_capability not in wanted:
            yield (
                f"built for compute capability {_any_of(wanted)}, GPU {number} has "
                f"{gpus[number].compute_capability}"
            )


def _any_of(names: Collection[str]) -> str:
    return " or ".join(names)


def _driver_fault(built: str | None, here: str) -> str | None:
    """A driver runs what an older one ran; of an older branch than that, nobody knows.

    NVIDIA, CUDA Compatibility, "Backward compatibility": the branch is the number before the dot.
    """
    branches = [version.partition(".")[0] for version in (built or "", here)]
    if not all(branch.isdecimal() for branch in branches):
        return None
    if int(branches[1]) >= int(branches[0]):
        return None
    return (
        f"it was built under NVIDIA's driver {show(built)}, here is {here}: install one of branch "
        f"{branches[0]} or later"
    )
