"""Starting the server of a pair: whether its engines fit what is here, and how their ranks start.

An engine runs only under the TensorRT-LLM and TensorRT that built it, on GPUs of the compute
capability that it was built on (TensorRT, "Version Compatibility" and "Hardware Compatibility").
What runs it elsewhere fails late, with a message about serialization, or answers wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.config.tensorrt_llm_versions import ENGINE_VERSIONS, RELEASES
from specpipe.errors import ConfigError, RepositoryError, RuntimeUnavailable
from specpipe.machine.gpus import gpus_here
from specpipe.machine.own_json import read_object, reason
from specpipe.roles import ROLES
from specpipe.runtimes.engine_fit import installed, mismatch, release
from specpipe.runtimes.launch import Launch, LaunchMode
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.repository_layout import VERSION
from specpipe.runtimes.requirements import EngineGpus, Requirements
from specpipe.runtimes.tensorrt_llm.engines.contract import ENGINE_DIR
from specpipe.runtimes.tensorrt_llm.engines.engine_config import FACTS_NAME


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine was built with and for; None where its folder does not say."""

    tensorrt_llm: str | None
    tensorrt: str | None
    compute_capability: str | None
    world_size: int | None
    max_batch_size: int | None

    @classmethod
    def read(cls, engine: Path) -> EngineFacts:
        """Reads an engine's folder; raises RepositoryError where what is there is no JSON object.

        A folder without the file was not built by specpipe: nothing is known of it.
        """
        path = engine / FACTS_NAME
        try:
            found = read_object(path) if path.is_file() else {}
        except (OSError, ValueError) as exc:
            raise RepositoryError(
                f"{path} cannot be read ({reason(exc)}): build the engine again"
            ) from exc
        return cls(**{name: found.get(name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class Here:
    """What would run the engines; None where this machine does not say.

    compute_capabilities  of each GPU, as nvidia-smi counts them
    """

    tensorrt_llm: str | None
    tensorrt: str | None
    compute_capabilities: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EngineUse:
    """How the repository uses an engine."""

    world_size: int
    max_batch_size: int
    gpu_ids: tuple[int, ...]


def facts_here() -> Here:
    """Asks the installed distributions and the driver."""
    return Here(
        tensorrt_llm=installed("tensorrt_llm"),
        tensorrt=installed("tensorrt"),
        compute_capabilities=tuple(gpu.compute_capability for gpu in gpus_here()),
    )


def fit_faults(built: EngineFacts, here: Here, use: EngineUse) -> Iterator[str]:
    """Yields what differs between an engine and what would run it, a sentence each."""
    for name, then, now in (
        ("TensorRT-LLM", built.tensorrt_llm, here.tensorrt_llm),
        ("TensorRT", built.tensorrt, here.tensorrt),
    ):
        if then is not None and now is not None and release(then) != release(now):
            yield f"built with {name} {then}, here is {now}"
    capability = built.compute_capability
    num_gpus = len(here.compute_capabilities)
    if num_gpus and capability is not None:
        for gpu_id in use.gpu_ids:
            if gpu_id >= num_gpus:
                yield f"is to run on GPU {gpu_id}, the last one here is GPU {num_gpus - 1}"
            elif here.compute_capabilities[gpu_id] != capability:
                yield (
                    f"built for compute capability {capability}, GPU {gpu_id} has "
                    f"{here.compute_capabilities[gpu_id]}"
                )
    if built.world_size not in (None, use.world_size):
        yield f"built for {_ranks(built.world_size)}, to be served with {use.world_size}"
    if built.max_batch_size is not None and built.max_batch_size < use.max_batch_size:
        yield (
            f"built for {built.max_batch_size} requests at once (max_batch_size), to be served "
            f"with {use.max_batch_size}"
        )


def unknown_facts(built: EngineFacts, here: Here) -> Iterator[str]:
    """Yields what cannot be compared, a sentence each."""
    for name, then, now in (
        ("TensorRT-LLM", built.tensorrt_llm, here.tensorrt_llm),
        ("TensorRT", built.tensorrt, here.tensorrt),
        ("compute capability", built.compute_capability, here.compute_capabilities or None),
        ("number of ranks", built.world_size, True),
        ("max_batch_size", built.max_batch_size, True),
    ):
        if then is None:
            yield f"the {name} that it was built for is unknown"
        elif now is None:
            yield f"the {name} here is unknown"


def launch(
    repository: Path,
    *,
    mode: LaunchMode = "auto",
    allow_unknown_facts: bool = False,
    build_command: str = "specpipe build",
) -> Launch:
    """Compares the engines of a repository with this machine, and plans how to start them."""
    options = read_pair(repository).options
    settings = options.runtime_settings
    here = facts_here()
    if here.tensorrt_llm is None:
        version = settings["tensorrt_llm"]
        raise RuntimeUnavailable(
            f"TensorRT-LLM is not installed here, and the engines need {version}: run `specpipe "
            f"serve` in a container made from {RELEASES[version].image} (docker/"
            "Dockerfile.tensorrt-llm)"
        )
    faults: list[str] = []
    unknown: list[str] = []
    used_gpus: set[int] = set()
    for role in ROLES:
        built = EngineFacts.read(repository / role / VERSION / ENGINE_DIR)
        use = EngineUse(
            world_size=settings[f"{role}_world_size"],
            max_batch_size=options.max_batch_size,
            gpu_ids=tuple(settings[f"{role}_gpu_ids"]),
        )
        used_gpus.update(use.gpu_ids)
        faults += [f"{role}: {fault}" for fault in fit_faults(built, here, use)]
        unknown += [f"{role}: {sentence}" for sentence in unknown_facts(built, here)]
    if faults or (unknown and not allow_unknown_facts):
        command = _rebuild(build_command, here, used_gpus)
        raise mismatch(repository, faults, unknown, command)
    notes = tuple(f"{sentence}; allowed by --allow-unknown-engine-facts" for sentence in unknown)
    sizes = [settings[f"{role}_world_size"] for role in ROLES]
    return plan_launch(sizes, mode, num_gpus=len(here.compute_capabilities), notes=notes)


def requirements(repository: Path, *, driver: str | None) -> Requirements:
    """Returns the releases that built the engines, and the GPUs that each engine takes."""
    settings = read_pair(repository).options.runtime_settings
    built = {role: EngineFacts.read(repository / role / VERSION / ENGINE_DIR) for role in ROLES}
    known = {
        "tensorrt_llm": [facts.tensorrt_llm for facts in built.values()],
        "tensorrt": [facts.tensorrt for facts in built.values()],
    }
    return Requirements(
        runtime="tensorrt_llm",
        libraries={"tensorrt_llm": ""}
        | {
            name: release(version)
            for name, versions in known.items()
            for version in versions
            if version is not None
        },
        engines={
            role: EngineGpus(
                compute_capabilities=tuple(filter(None, [facts.compute_capability])),
                gpu_ids=tuple(settings[f"{role}_gpu_ids"]),
            )
            for role, facts in built.items()
        },
        driver=driver,
    )


def plan_launch(
    world_sizes: Sequence[int], mode: LaunchMode, *, num_gpus: int, notes: tuple[str, ...] = ()
) -> Launch:
    """Plans how the ranks of a draft and a target start, given how many each has.

    Two engines of one rank each live in the server's own process. Otherwise the server spawns the
    ranks, as NVIDIA advises for a draft and a target wherever one is split (TensorRT-LLM,
    examples/draft_target_model/README.md, and pull request 3797, where unequal counts were seen to
    fail without). With a leader both engines of a process share its MPI session and its NCCL
    communicators (cpp/tensorrt_llm/executor/executorImpl.cpp), so that is only for those who ask,
    such as where a batch system does not let processes spawn others.
    """
    draft, target = world_sizes
    if mode == "auto":
        mode = "leader" if draft == target == 1 else "orchestrator"
    if mode == "leader":
        if draft != target:
            raise ConfigError(
                f"--mpi-mode leader needs as many ranks for the draft as for the target, here are "
                f"{draft} and {target}: leave it out, or set draft.tp_size"
            )
        return Launch(
            world_size=target,
            rank_models=ROLES if target > 1 else (),
            environment={"TRTLLM_ORCHESTRATOR": "0"},
            notes=notes,
        )
    return Launch(
        is_orchestrator=True,
        environment={"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"},
        # The GPUs belong to the ranks: what the server reserves there, they would lack.
        arguments=(
            "--pinned-memory-pool-byte-size=0",
            "--enable-peer-access=false",
            *(f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(num_gpus)),
        ),
        notes=notes,
    )


def _rebuild(build_command: str, here: Here, used_gpus: Iterable[int]) -> str:
    """The command that builds for this machine, whatever the config says."""
    found = {here.compute_capabilities[i : i + 1] for i in used_gpus}
    sets = {}
    if here.tensorrt_llm in ENGINE_VERSIONS:
        sets["version"] = here.tensorrt_llm
    if len(found) == 1 and (capabilities := found.pop()):
        sets["compute_capability"] = capabilities[0]
    words = [f"--set engine.tensorrt_llm.{key}={value}" for key, value in sets.items()]
    return " ".join([build_command, *words])


def _ranks(count: Any) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
