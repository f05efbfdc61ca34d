"""Case A15: engine facts against runtime facts; and how the ranks of two engines start."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import ConfigError, EngineMismatch, RepositoryError, RuntimeUnavailable
from specpipe.runtimes.launch import Launch
from specpipe.runtimes.requirements import EngineGpus, Requirements
from specpipe.runtimes.runtime import load_runtime
from specpipe.runtimes.tensorrt_llm.engines import serve
from specpipe.runtimes.tensorrt_llm.engines.serve import (
    EngineFacts,
    EngineUse,
    Here,
    fit_faults,
    plan_launch,
    unknown_facts,
)
from tests.runtimes.tensorrt_llm.engines.folders import package

BUILT = EngineFacts(
    tensorrt_llm="0.17.0",
    tensorrt="10.8.0.43",
    compute_capability="8.9",
    world_size=1,
    max_batch_size=4,
)
SAME = Here(tensorrt_llm="0.17.0", tensorrt="10.8.0.43", compute_capabilities=("8.9",))
USE = EngineUse(world_size=1, max_batch_size=4, gpu_ids=(0,))


def test_equal_facts_pass() -> None:
    assert list(fit_faults(BUILT, SAME, USE)) == []
    assert list(unknown_facts(BUILT, SAME)) == []


def test_all_differences_are_listed() -> None:
    here = Here(tensorrt_llm="0.20.0", tensorrt="10.10.0.31", compute_capabilities=("9.0",))
    assert list(fit_faults(BUILT, here, USE)) == [
        "built with TensorRT-LLM 0.17.0, here is 0.20.0",
        "built with TensorRT 10.8.0.43, here is 10.10.0.31",
        "built for compute capability 8.9, GPU 0 has 9.0",
    ]


@pytest.mark.parametrize(
    ("here", "use", "difference"),
    [
        (
            replace(SAME, tensorrt="10.8.0.44"),
            USE,
            "built with TensorRT 10.8.0.43, here is 10.8.0.44",
        ),
        (SAME, replace(USE, world_size=2), "built for 1 rank, to be served with 2"),
        (
            SAME,
            replace(USE, max_batch_size=8),
            "built for 4 requests at once (max_batch_size), to be served with 8",
        ),
        (
            SAME,
            replace(USE, gpu_ids=(1,)),
            "is to run on GPU 1, the last one here is GPU 0",
        ),
        (
            replace(SAME, compute_capabilities=("8.9", "8.6")),
            replace(USE, gpu_ids=(0, 1)),
            "built for compute capability 8.9, GPU 1 has 8.6",
        ),
    ],
)
def test_a_single_difference_is_found(here: Here, use: EngineUse, difference: str) -> None:
    assert list(fit_faults(BUILT, here, use)) == [difference]


def test_a_smaller_batch_than_built_for_and_the_way_of_packaging_are_no_differences() -> None:
    here = replace(SAME, tensorrt="10.8.0.43.post1", tensorrt_llm="0.17.0+cu124")
    assert list(fit_faults(BUILT, here, replace(USE, max_batch_size=2))) == []


def test_what_one_side_does_not_say_is_unknown_and_no_difference() -> None:
    built = replace(BUILT, compute_capability=None, world_size=None)
    here = replace(SAME, tensorrt=None)
    assert list(fit_faults(built, here, USE)) == []
    assert list(unknown_facts(built, here)) == [
        "the TensorRT here is unknown",
        "the compute capability that it was built for is unknown",
        "the number of ranks that it was built for is unknown",
    ]
    assert list(unknown_facts(BUILT, replace(SAME, compute_capabilities=()))) == [
        "the compute capability here is unknown"
    ]


FACTS: dict[str, Any] = {
    "tensorrt_llm": "1.2.1",
    "tensorrt": "10.14.1.48",
    "cuda": "13.1.0.036",
    "compute_capability": "9.0",
    "world_size": 1,
    "max_batch_size": 8,
}


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., Path]:
    """Writes what `launch` reads of a repository: a draft of one rank, a target of two."""

    def write(
        *, target: dict[str, Any] | None = None, draft: dict[str, Any] | None = None, **options: Any
    ) -> Path:
        settings = {
            "backend": "tensorrt",
            "tensorrt_llm": "1.2.1",
            "draft_world_size": 1,
            "target_world_size": 2,
            "draft_gpu_ids": [0],
            "target_gpu_ids": [0, 1],
        } | options.pop("settings", {})
        served = {"max_batch_size": 8, "runtime_settings": settings, **options}
        pair = {"runtime": "tensorrt_llm", "options": served}
        speculative = tmp_path / "speculative" / "1"
        speculative.mkdir(parents=True)
        (speculative / "pair.json").write_text(json.dumps(pair))
        for role, facts in (
            ("draft", FACTS if draft is None else draft),
            ("target", {**FACTS, "world_size": 2} if target is None else target),
        ):
            engine = tmp_path / role / "1" / "engine"
            engine.mkdir(parents=True)
            (engine / "specpipe.json").write_text(json.dumps(facts))
        return tmp_path

    return write


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine one that has TensorRT-LLM 1.2.1 and two H100, or what is given."""

    def be(**changes: Any) -> None:
        facts = Here(
            tensorrt_llm="1.2.1", tensorrt="10.14.1.48", compute_capabilities=("9.0", "9.0")
        )
        monkeypatch.setattr(serve, "facts_here", lambda: replace(facts, **changes))

    be()
    return be


ORCHESTRATOR = Launch(
    is_orchestrator=True,
    environment={"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"},
    arguments=(
        "--pinned-memory-pool-byte-size=0",
        "--enable-peer-access=false",
        "--cuda-memory-pool-byte-size=0:0",
        "--cuda-memory-pool-byte-size=1:0",
    ),
)


def test_engines_that_fit_are_launched(
    repository: Callable[..., Path], here: Callable[..., None]
) -> None:
    assert load_runtime("tensorrt_llm").launch(repository()) == ORCHESTRATOR


def test_a_repository_says_which_releases_and_gpus_it_needs(
    repository: Callable[..., Path],
) -> None:
    folder = repository(draft={"tensorrt_llm": "1.2.1+cu130", "world_size": 1})
    assert load_runtime("tensorrt_llm").requirements(folder, driver="570.1") == Requirements(
        runtime="tensorrt_llm",
        libraries={"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"},
        engines={
            "draft": EngineGpus(gpu_ids=(0,)),  # its folder does not say what it was built for
            "target": EngineGpus(compute_capabilities=("9.0",), gpu_ids=(0, 1)),
        },
        driver="570.1",
    )


def test_one_message_lists_both_engines_and_the_rebuild_command(
    repository: Callable[..., Path], here: Callable[..., None]
) -> None:
    folder = repository(
        draft={**FACTS, "max_batch_size": 4},
        target={**FACTS, "tensorrt_llm": "1.1.0", "tensorrt": "10.13.3.9"},
    )
    here(compute_capabilities=("10.0", "10.0"))
    with pytest.raises(EngineMismatch) as caught:
        serve.launch(folder, build_command="specpipe build --config pair.yaml")
    assert str(caught.value) == (
        f"the engines of {folder} do not fit what would run them:\n"
        "  draft: built for compute capability 9.0, GPU 0 has 10.0\n"
        "  draft: built for 4 requests at once (max_batch_size), to be served with 8\n"
        "  target: built with TensorRT-LLM 1.1.0, here is 1.2.1\n"
        "  target: built with TensorRT 10.13.3.9, here is 10.14.1.48\n"
        "  target: built for compute capability 9.0, GPU 0 has 10.0\n"
        "  target: built for compute capability 9.0, GPU 1 has 10.0\n"
        "  target: built for 1 rank, to be served with 2\n"
        "build them again here: specpipe build --config pair.yaml "
        "--set engine.tensorrt_llm.version=1.2.1 --set engine.tensorrt_llm.compute_capability=10.0"
    )


def test_an_unknown_fact_is_refused_unless_that_is_allowed(
    repository: Callable[..., Path], here: Callable[..., None]
) -> None:
    facts = {key: value for key, value in FACTS.items() if key != "compute_capability"}
    folder = repository(target={**facts, "world_size": 2})
    with pytest.raises(EngineMismatch) as caught:
        serve.launch(folder)
    sentence = "target: the compute capability that it was built for is unknown"
    assert str(caught.value) == (
        f"facts about {folder} are unknown:\n  {sentence}\n"
        "build them again here: specpipe build --set engine.tensorrt_llm.version=1.2.1 "
        "--set engine.tensorrt_llm.compute_capability=9.0\n"
        "or serve them as they are with --allow-unknown-engine-facts"
    )
    allowed = serve.launch(folder, allow_unknown_facts=True)
    assert allowed.notes == (f"{sentence}; allowed by --allow-unknown-engine-facts",)
    assert replace(allowed, notes=()) == ORCHESTRATOR


def test_what_differs_is_refused_whatever_is_allowed(
    repository: Callable[..., Path], here: Callable[..., None]
) -> None:
    folder = repository(draft={**FACTS, "tensorrt": "10.14.1.47", "compute_capability": None})
    with pytest.raises(EngineMismatch, match="(?s)10.14.1.47.*also unknown:\n  draft: the compute"):
        serve.launch(folder, allow_unknown_facts=True)


def test_an_engine_of_unknown_origin(
    repository: Callable[..., Path], here: Callable[..., None]
) -> None:
    folder = repository()
    (folder / "target/1/engine/specpipe.json").unlink()
    with pytest.raises(EngineMismatch, match="target: the TensorRT-LLM that it was built for"):
        serve.launch(folder)
    (folder / "target/1/engine/specpipe.json").write_text("[")
    with pytest.raises(RepositoryError, match="specpipe.json cannot be read .*build the engine"):
        serve.launch(folder)


def test_without_tensorrt_llm_the_image_is_named(
    repository: Callable[..., Path], here: Callable[..., None]
) -> None:
    here(tensorrt_llm=None)
    with pytest.raises(RuntimeUnavailable) as caught:
        serve.launch(repository())
    assert str(caught.value) == (
        "TensorRT-LLM is not installed here, and the engines need 1.2.1: run `specpipe serve` in a "
        "container made from nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3 "
        "(docker/Dockerfile.tensorrt-llm)"
    )


def test_the_pytorch_backend_starts_its_ranks_itself(repository: Callable[..., Path]) -> None:
    folder = repository(settings={"backend": "pytorch"})
    assert load_runtime("tensorrt_llm").launch(folder) == Launch()
    with pytest.raises(ConfigError, match="--mpi-mode leader has no effect: backend 'pytorch'"):
        load_runtime("tensorrt_llm").launch(folder, mode="leader")


def test_two_engines_of_one_rank_need_no_mpi() -> None:
    launch = plan_launch([1, 1], "auto", num_gpus=1)
    assert launch == Launch(environment={"TRTLLM_ORCHESTRATOR": "0"})
    assert not launch.uses_mpi


@pytest.mark.parametrize("sizes", [[1, 2], [2, 2], [2, 1]])
def test_engines_of_more_ranks_are_orchestrated(sizes: list[int]) -> None:
    assert plan_launch(sizes, "auto", num_gpus=2) == ORCHESTRATOR
    assert plan_launch(sizes, "orchestrator", num_gpus=2) == ORCHESTRATOR


def test_leader_mode_by_choice() -> None:
    assert plan_launch([2, 2], "leader", num_gpus=2) == Launch(
        world_size=2,
        rank_models=("draft", "target"),
        environment={"TRTLLM_ORCHESTRATOR": "0"},
    )
    with pytest.raises(ConfigError) as caught:
        plan_launch([1, 2], "leader", num_gpus=2)
    assert str(caught.value) == (
        "--mpi-mode leader needs as many ranks for the draft as for the target, here are 1 and 2: "
        "leave it out, or set draft.tp_size"
    )


def test_torch_has_no_ranks() -> None:
    torch = load_runtime("torch")
    assert torch.launch(Path("repository")) == Launch()
    with pytest.raises(ConfigError, match="--mpi-mode leader has no effect: runtime 'torch'"):
        torch.launch(Path("repository"), mode="leader")


def test_a_repository_as_packaged(tmp_path: Path, here: Callable[..., None]) -> None:
    """Its engines' folders hold an empty specpipe.json: nothing is known of them."""
    folder = package(tmp_path)
    with pytest.raises(EngineMismatch, match="target: the max_batch_size that it was built for"):
        load_runtime("tensorrt_llm").launch(folder)
    for role in ("draft", "target"):
        facts = folder / role / "1" / "engine" / "specpipe.json"
        facts.unlink()  # a hard link
        facts.write_text(json.dumps(FACTS))
    launch = load_runtime("tensorrt_llm").launch(folder)
    assert launch == Launch(environment={"TRTLLM_ORCHESTRATOR": "0"})
