"""`specpipe doctor`: what is said of this machine."""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from specpipe import __version__
from specpipe.build.stages import calibrate
from specpipe.cli.group import main
from specpipe.machine.libraries import with_extras, with_library
from specpipe.runtimes.tensorrt import library
from specpipe.triton.server import installation
from tests.fake_nvml import Device, be


def examined() -> dict[str, str]:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    found: dict[str, str] = json.loads(result.stdout)
    return found


def docker_that(folder: Path, script: str) -> None:
    docker = folder / "docker"
    docker.write_text(f"#!{sys.executable}\n{script}\n")
    docker.chmod(0o755)


def test_a_bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    be(monkeypatch)
    found = examined()
    assert found["python"] == f"{platform.python_version()} ({sys.executable})"
    assert found["specpipe"] == __version__
    assert found["tensorrt_llm"] == "not installed"
    assert found["trtllm-build"] == found["mpirun"] == found["docker"] == "not on PATH"
    assert found["GPU"] == "none that NVIDIA's driver shows"
    assert found["runtime torch"] == "builds here, and is served here"
    assert found["quantization"] == "has what calibrating needs"
    assert found["runtime tensorrt_llm"].startswith(
        "plans here (--dry-run); runtime 'tensorrt_llm' needs trtllm-build or docker"
    )


def test_tritonserver_and_its_known_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = examined()
    assert wheel["tritonserver"].startswith("2.51.0 (")
    assert wheel["known holes"].startswith("tritonserver 2.51.0: a body of a million chunks ends ")
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(binary.parent))
    unknown = examined()
    assert unknown["tritonserver"] == f"version unknown ({binary})"
    assert unknown["known holes"].startswith("unknown, ")
    (tmp_path / "TRITON_VERSION").write_text("2.71.0\n")
    image = examined()
    assert image["tritonserver"] == f"2.71.0 ({binary})"
    assert image["known holes"] == "none in tritonserver 2.71.0"


def test_gpus_and_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    be(monkeypatch, Device(), Device())
    docker_that(tmp_path, "print('28.2.2')")
    found = examined()
    assert found["GPU 1"] == "NVIDIA H100, compute capability 9.0, driver 590.44.01"
    assert found["docker"] == f"28.2.2 ({tmp_path}/docker)"
    assert found["runtime tensorrt_llm"] == (
        "builds here; not served here: TensorRT-LLM is not installed: run specpipe in a"
        " container made from nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
        " (docker/Dockerfile.tensorrt-llm)"
    )


def test_runtime_tensorrt_builds_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    be(monkeypatch)
    found = examined()
    assert found["tensorrt-rtx-cu13"] == trt.__version__
    assert found["cuda-bindings"].startswith("13.")
    assert found["runtime tensorrt"] == (
        "builds here; not served here: engines run on a GPU, and NVIDIA's driver shows none"
    )


def test_runtime_tensorrt_and_the_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda name: name == "tensorrt_rtx")
    pytest.importorskip("tensorrt_rtx")
    be(monkeypatch, Device())
    assert examined()["runtime tensorrt"] == (
        "builds here; not served here: tensorrt_rtx runs on none of NVIDIA H100 (9.0): "
        f"set engine.library to tensorrt, and {with_extras('tensorrt')}"
    )
    be(monkeypatch, Device(), Device("NVIDIA L4", (8, 9)))
    assert examined()["runtime tensorrt"] == "builds here, and is served here"


def test_runtime_tensorrt_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "tensorrt" in name else find_spec(name)
    )
    assert examined()["runtime tensorrt"] == (
        "plans here (--dry-run); runtime 'tensorrt' needs 'tensorrt_rtx': "
        f"{with_extras('tensorrt-rtx')}"
    )


def test_a_triton_that_does_not_start_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "2.3.5")
    binary = installation.find_tritonserver()
    if binary.python_stub is None:
        pytest.skip("this Triton is not the pip-installed one")
    assert examined()["tritonserver"] == (
        f"{binary.path}, which does not start here: the pip-installed Triton needs NumPy 1, and "
        f"this Python has NumPy 2.3.5: {with_library('numpy<2')}"
    )


def test_without_what_calibrating_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_IMPORTED", ("torch", "no_such_library"))
    assert examined()["quantization"] == (
        f"plans here (--dry-run); quantization needs 'no_such_library': {with_extras('quantize')}"
    )


def test_docker_without_its_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    docker_that(tmp_path, "raise SystemExit(1)")
    found = examined()
    assert found["docker"] == f"{tmp_path}/docker, but its daemon does not answer"
    assert found["runtime tensorrt_llm"] == (
        "plans here (--dry-run); runtime 'tensorrt_llm' needs trtllm-build or docker: trtllm-build "
        f"is not on the PATH, and the daemon of {tmp_path}/docker does not answer: start it, or "
        "run specpipe inside NVIDIA's image"
    )


def test_one_line_each() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    lines = [line.split()[0] for line in result.stdout.splitlines()]
    assert lines[:4] == ["python", "installed", "specpipe", "huggingface_hub"]
    assert {len(line.split("  ", 1)[0]) < 24 for line in result.stdout.splitlines()} == {True}
