"""Which kernels a pair runs on, where no GPU is to be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specpipe.errors import RuntimeUnavailable
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.torch.describe import describe
from specpipe.runtimes.torch.pair import _cannot_compile, _too_old, load_pair, unfused
from tests.runtimes.torch.engines import build_engine
from tests.toy import write_toy_checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    return build_engine(write_toy_checkpoint(folder / "hf", "llama"), folder)


def test_an_engine_for_a_cpu_runs_on_plain_kernels(engine: Path) -> None:
    assert unfused((engine, engine), "auto") == f"{engine} was built for a CPU"


def test_who_wants_plain_kernels_gets_them(engine: Path) -> None:
    assert unfused((engine, engine), "plain") == "engine.kernels is plain"


def test_who_wants_fused_kernels_is_told_why_not(engine: Path) -> None:
    with pytest.raises(RuntimeUnavailable) as refused:
        unfused((engine, engine), "fused")
    assert str(refused.value) == (
        f"engine.kernels is fused, but {engine} was built for a CPU; "
        "set it to auto, which then takes torch's own"
    )


def test_memory_for_pages_is_refused_where_there_are_none(engine: Path, tmp_path: Path) -> None:
    config = json.loads((engine / "config.json").read_text())
    config["build_config"]["kv_cache_tokens"] = 6400
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").hardlink_to(engine / "model.safetensors")
    described = describe(tmp_path)
    assert described is not None
    assert described.limits["kv_cache_tokens"] == 6400
    assert described.memory.kv_bytes_per_token is not None
    assert described.memory.kv_cache_bytes == 6400 * described.memory.kv_bytes_per_token
    with pytest.raises(RuntimeUnavailable) as refused:
        load_pair(engine, tmp_path, PairOptions(), lambda *_, **__: None)  # type: ignore[arg-type, return-value]
    assert str(refused.value) == (
        f"engine.kv_cache_memory needs the fused kernels, but {engine} was built for a CPU; leave "
        "it out and build again"
    )


@pytest.mark.parametrize(
    ("capability", "formats", "reason"),
    [
        ((7, 5), [], "the GPU is older than Ampere (compute capability 8.0)"),
        ((8, 0), ["int4_awq", "int8_wo"], None),
        ((8, 6), ["fp8"], "the GPU is older than Ada (compute capability 8.9), and has no FP8"),
        (
            (8, 0),
            ["w4a8_awq"],
            "the GPU is older than Ada (compute capability 8.9), and has no FP8",
        ),
        ((8, 9), ["fp8", "fp8_pc_pt"], None),
    ],
)
def test_a_gpu_can_be_too_old(
    capability: tuple[int, int], formats: list[str], reason: str | None
) -> None:
    assert _too_old(capability, formats) == reason


def test_triton_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _cannot_compile() == "Triton finds no C compiler (gcc, clang, or what CC names)"


def test_triton_needs_the_headers_of_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert _cannot_compile() == "Triton finds no headers of Python (Debian: python3-dev)"
    (tmp_path / "Python.h").touch()
    assert _cannot_compile() is None
