"""Starting the server of a pair: whether its engines fit what is here.

TensorRT finds out only when it loads an engine, one difference at a time and in the server's log.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from specpipe.errors import ConfigError, EngineMismatch
from specpipe.machine.gpus import Gpu, gpus_here
from specpipe.roles import ROLES
from specpipe.runtimes.engine_fit import installed, limits, mismatch, release
from specpipe.runtimes.launch import Launch, LaunchMode
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION
from specpipe.runtimes.requirements import EngineGpus, Requirements
from specpipe.runtimes.tensorrt import library as libraries
from specpipe.runtimes.tensorrt.engine_config import TensorRTEngineSpec, size_faults
from specpipe.runtimes.tensorrt.fit import buildable, fit_faults


def launch(
    repository: Path,
    *,
    mode: LaunchMode = "auto",
    allow_unknown_facts: bool = False,
    build_command: str = "specpipe build",
) -> Launch:
    """Compares the engines of a repository with this machine; one plain server runs them."""
    if mode != "auto":
        raise ConfigError(f"--mpi-mode {mode} has no effect: runtime 'tensorrt' has no ranks")
    version = repository / SPECULATIVE / VERSION
    options = read_pair(repository).options
    gpus = gpus_here()
    faults: list[str] = []
    unknown: dict[str, None] = {}
    library = None
    for role in ROLES:
        try:
            spec = TensorRTEngineSpec.read(version / role)
        except EngineMismatch as exc:
            faults.append(f"{role}: {exc}")
            continue
        library = spec.library
        libraries.require(library)
        version_here = installed(libraries.DISTRIBUTIONS[library])
        differing = [*fit_faults(spec, gpus, version_here), *size_faults(spec)]
        for name, built, served in limits(spec, options):
            if built < served:
                differing.append(f"built for {name} {built}, to be served with {served}")
        faults += [f"{role}: {fault}" for fault in differing]
        if version_here is None:
            unknown[f"the version of {library} here is unknown"] = None
    if not gpus:
        unknown["the GPU here is unknown: NVIDIA's driver shows none"] = None
    if faults or (unknown and not allow_unknown_facts):
        raise mismatch(repository, faults, list(unknown), _rebuild(build_command, library, gpus))
    return Launch(
        notes=tuple(f"{sentence}; allowed by --allow-unknown-engine-facts" for sentence in unknown)
    )


def requirements(repository: Path, *, driver: str | None) -> Requirements:
    """Returns the library's version, and the compute capabilities that each engine runs on.

    What tensorrt_rtx built is compiled by the driver of the GPU that runs it, whichever that is.
    """
    version = repository / SPECULATIVE / VERSION
    specs = {role: TensorRTEngineSpec.read(version / role) for role in ROLES}
    return Requirements(
        runtime="tensorrt",
        libraries={
            libraries.DISTRIBUTIONS[spec.library]: release(spec.library_version)
            for spec in specs.values()
        },
        engines={
            role: EngineGpus(compute_capabilities=spec.compute_capabilities)
            for role, spec in specs.items()
        },
        driver=None if all(s.library == "tensorrt_rtx" for s in specs.values()) else driver,
    )


def _rebuild(build_command: str, library: str | None, gpus: Sequence[Gpu]) -> str:
    """Returns the command that builds what runs here, whatever the config says."""
    if not gpus:
        return f"{build_command} --set engine.runtime=torch"  # needs no GPU
    if library != "tensorrt_rtx":
        return build_command
    if capabilities := buildable(gpus):
        return f"{build_command} --set 'engine.compute_capabilities={json.dumps(capabilities)}'"
    return f"{build_command} --set engine.library=tensorrt"
