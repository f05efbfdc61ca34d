"""Case A15 for this runtime: what engines were built for against what is here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import ConfigError, EngineMismatch, RuntimeUnavailable
from specpipe.runtimes.launch import Launch
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.requirements import EngineGpus, Requirements
from specpipe.runtimes.runtime import load_runtime
from specpipe.runtimes.tensorrt import library, serve
from tests import fake_nvml
from tests.fake_nvml import Device
from tests.runtimes.tensorrt.table_library import write_engine

OPTIONS = PairOptions(max_batch_size=4, max_seq_len=500)


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., Path]:
    """Writes what `launch` reads of a repository; builder's entries for each engine."""

    def write(
        *,
        options: PairOptions = OPTIONS,
        draft: dict[str, Any] | None = None,
        target: dict[str, Any] | None = None,
    ) -> Path:
        version = tmp_path / "speculative" / "1"
        write_engine(version / "draft", "draft", **(draft or {}))
        write_engine(version / "target", **(target or {}))
        (version / "pair.json").write_text(PairFile("tensorrt", options).to_json())
        return tmp_path

    return write


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine one with the library and an L4, or what is given."""

    def be(
        *gpus: tuple[str, tuple[int, int]],
        version: str | None = "1.7.1.116",
        is_installed: bool = True,
    ) -> None:
        fake_nvml.be(monkeypatch, *(Device(name, capability) for name, capability in gpus))
        monkeypatch.setattr(serve, "installed", lambda distribution: version)

        def require(name: str) -> None:
            if not is_installed:
                raise RuntimeUnavailable(f"runtime 'tensorrt' needs '{name}'")

        monkeypatch.setattr(library, "require", require)

    be(("NVIDIA L4", (8, 9)))
    return be


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(EngineMismatch) as caught:
        serve.launch(folder, **settings)
    return str(caught.value)


def test_engines_that_fit_are_launched(
    repository: Callable[..., Path], here: Callable[..., None]
) -> None:
    folder = repository()
    assert load_runtime("tensorrt").launch(folder) == Launch()
    here(("NVIDIA H100", (9, 0)), ("NVIDIA L4", (8, 9)), version="1.7.1.116.post1")
    assert serve.launch(folder) == Launch()


@pytest.mark.parametrize(
    ("name", "distribution", "driver"),
    [("tensorrt", "tensorrt", "570.1"), ("tensorrt_rtx", "tensorrt-rtx-cu13", None)],
)
def test_a_repository_says_which_library_gpus_and_driver_it_needs(
    repository: Callable[..., Path], name: str, distribution: str, driver: str | None
) -> None:
    capabilities = {"draft": ["8.9"], "target": ["8.9", "9.0"]}
    engines = repository(
        **{
            role: {"compute_capabilities": built, "library": name}
            for role, built in capabilities.items()
        }
    )
    assert load_runtime("tensorrt").requirements(engines, driver="570.1") == Requirements(
        runtime="tensorrt",
        libraries={distribution: "1.7.1.116"},
        engines={
            "draft": EngineGpus(compute_capabilities=("8.9",)),
            "target": EngineGpus(compute_capabilities=("8.9", "9.0")),
        },
        driver=driver,
    )


def test_one_message_lists_all_that_differs_and_the_rebuild_command(
    repository: Callable[..., Path], here: Callable[..., None]
) -> None:
    folder = repository(
        options=PairOptions(max_batch_size=8, num_draft_tokens=9),
        draft={"compute_capabilities": ["8.0", "12.0"], "library_version": "1.7.1.115"},
    )
    engine = folder / "speculative/1/target/rank0.engine"
    size = engine.stat().st_size
    engine.write_bytes(b"?" * size)
    here(("NVIDIA L4", (8, 9)), ("NVIDIA L4", (8, 9)))
    assert refusal(folder, build_command="specpipe build --config pair.yaml") == (
        f"the engines of {folder} do not fit what would run them:\n"
        "  draft: built with tensorrt_rtx 1.7.1.115, here is 1.7.1.116\n"
        "  draft: built for compute capability 8.0 and 12.0, here is NVIDIA L4 (8.9)\n"
        "  draft: built for max_batch_size 4, to be served with 8\n"
        "  draft: built for max_draft_len 8, to be served with 9\n"
        "  target: rank0.engine is damaged, it is not what was built (SHA-256)\n"
        "  target: built for max_batch_size 4, to be served with 8\n"
        "  target: built for max_draft_len 8, to be served with 9\n"
        "build them again here: specpipe build --config pair.yaml "
        "--set 'engine.compute_capabilities=[\"8.9\"]'"
    )


def test_a_gpu_that_tensorrt_rtx_does_not_run_on(
    repository: Callable[..., Path], here: Callable[..., None]
) -> None:
    folder = repository()
    here(("NVIDIA H100 80GB HBM3", (9, 0)))
    sentence = (
        "built for compute capability 8.0, 8.6, 8.9, 12.0 and 12.1, here is NVIDIA H100 80GB HBM3 "
        "(9.0), which tensorrt_rtx does not run on: set engine.library to tensorrt, or "
        "engine.runtime to torch or tensorrt_llm"
    )
    assert refusal(folder, allow_unknown_facts=True) == (
        f"the engines of {folder} do not fit what would run them:\n"
        f"  draft: {sentence}\n"
        f"  target: {sentence}\n"
        "build them again here: specpipe build --set engine.library=tensorrt"
    )


def test_engines_of_library_tensorrt_are_built_where_they_run(
    repository: Callable[..., Path], here: Callable[..., None]
) -> None:
    built = {"library": "tensorrt", "compute_capabilities": ["9.0"], "library_version": "11.4.0.1"}
    folder = repository(draft=built, target=built)
    here(("NVIDIA H100 80GB HBM3", (9, 0)), version="11.4.0.1")
    assert serve.launch(folder) == Launch()
    here(("NVIDIA B200", (10, 0)), version="11.4.0.1")
    assert refusal(folder) == (
        f"the engines of {folder} do not fit what would run them:\n"
        "  draft: built for compute capability 9.0, here is NVIDIA B200 (10.0)\n"
        "  target: built for compute capability 9.0, here is NVIDIA B200 (10.0)\n"
        "build them again here: specpipe build"
    )


def test_what_is_unknown_is_refused_unless_that_is_allowed(
    repository: Callable[..., Path], here: Callable[..., None]
) -> None:
    folder = repository()
    here(version=None)
    version = "the version of tensorrt_rtx here is unknown"
    gpu = "the GPU here is unknown: NVIDIA's driver shows none"
    assert refusal(folder) == (
        f"facts about {folder} are unknown:\n"
        f"  {version}\n"
        f"  {gpu}\n"
        "build them again here: specpipe build --set engine.runtime=torch\n"
        "or serve them as they are with --allow-unknown-engine-facts"
    )
    assert serve.launch(folder, allow_unknown_facts=True) == Launch(
        notes=(
            f"{version}; allowed by --allow-unknown-engine-facts",
            f"{gpu}; allowed by --allow-unknown-engine-facts",
        )
    )


def test_without_the_library(repository: Callable[..., Path], here: Callable[..., None]) -> None:
    here(("NVIDIA L4", (8, 9)), is_installed=False)
    with pytest.raises(RuntimeUnavailable, match="^runtime 'tensorrt' needs 'tensorrt_rtx'"):
        serve.launch(repository())


def test_an_engine_that_is_not_whole(repository: Callable[..., Path]) -> None:
    folder = repository()
    draft = folder / "speculative/1/draft"
    (draft / "rank0.engine").unlink()
    assert refusal(folder) == (
        f"the engines of {folder} do not fit what would run them:\n"
        f"  draft: {draft} has no rank0.engine: build the engine again\n"
        "build them again here: specpipe build --set 'engine.compute_capabilities=[\"8.9\"]'"
    )


def test_ranks_are_none_of_this_runtime(repository: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        serve.launch(repository(), mode="leader")
    assert str(caught.value) == "--mpi-mode leader has no effect: runtime 'tensorrt' has no ranks"
