"""`specpipe quickstart --runtime tensorrt_llm`, as on the first GPU machine with NVIDIA's image.

Triton is real. What is NVIDIA's stands in: a GPU, `trtllm-build`, the backend `tensorrtllm`, the
package `tensorrt_llm`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch")
pytest.importorskip("scipy")

from specpipe.build.load import load_config  # noqa: E402
from specpipe.cli import quickstart  # noqa: E402
from specpipe.cli.group import main  # noqa: E402
from specpipe.errors import RuntimeUnavailable, ServerError  # noqa: E402
from specpipe.evaluate import serving  # noqa: E402
from specpipe.evaluate.endpoints.base import Endpoint  # noqa: E402
from specpipe.evaluate.verification import outcome  # noqa: E402
from specpipe.evaluate.verification import run as verification  # noqa: E402
from specpipe.evaluate.verification.asking import VerifySide  # noqa: E402
from specpipe.evaluate.verification.exact import SideResult  # noqa: E402
from specpipe.evaluate.verification.gate import GateResult  # noqa: E402
from specpipe.evaluate.verification.subject import Subject  # noqa: E402
from specpipe.evaluate.verification.verdict import TieThreshold  # noqa: E402
from specpipe.triton.server import launcher  # noqa: E402
from tests.fake_nvml import Device, be  # noqa: E402
from tests.runtimes.tensorrt_llm.engines.tools import install  # noqa: E402
from tests.tensorrt_llm_stand_ins.llm_api import FOLDER  # noqa: E402
from tests.tensorrt_llm_stand_ins.triton_backend.engines import triton_with_stand_in  # noqa: E402

ROOT = Path(__file__).parents[2]

RUNNABLE = f"""\
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.tensorrt_llm_stand_ins.triton_backend.engines import write_built_engine
write_built_engine(out, config, sys.argv)
"""


VERDICT = r"verdict: served and lossless(, up to numerical ties \(\d+\))?: runtime tensorrt_llm, "


def install_distributions(folder: Path, monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    for name, version in versions.items():
        described = folder / f"{name}-{version}.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU machine with TensorRT-LLM 1.2.1, on which little is asked."""
    be(monkeypatch, Device())
    monkeypatch.chdir(tmp_path)
    versions = {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"}
    install_distributions(tmp_path / "site-packages", monkeypatch, **versions)

    @contextmanager
    def left_out(subject: Subject) -> Iterator[Endpoint]:
        raise RuntimeUnavailable("left out here")
        yield

    for control in ("open_own_draft", "open_wrong_draft"):  # two more starts of Triton
        monkeypatch.setattr(Subject, control, left_out)
    monkeypatch.setattr(quickstart, "_NUM_PROMPTS", 1)
    options = partial(outcome.VerifyOptions, max_tokens=8, distance=None)
    monkeypatch.setattr(outcome, "VerifyOptions", options)


def run(*options: str) -> Result:
    return CliRunner().invoke(main, ["quickstart", "--runtime", "tensorrt_llm", *options])


@pytest.mark.slow
def test_engines_are_built_served_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = triton_with_stand_in(tmp_path / "backends")
    if binary is None:
        pytest.skip("this Triton takes no other backends than its own")
    monkeypatch.setattr(serving, "running", partial(launcher.running, binary=binary))
    install(tmp_path, monkeypatch, "trtllm-build", FAKE_EDIT=RUNNABLE)
    yaml = Path("specpipe-quickstart/configs/quickstart.yaml")
    yaml.parent.mkdir(parents=True)
    text = (ROOT / "configs" / "quickstart.yaml").read_text()
    # With K as asked anyway, there is one start of Triton less to verify.
    yaml.write_text(text.replace("speculation:", "speculation:\n  adaptive: false"))
    result = run()
    assert result.exit_code == 0, result.output
    settings = (
        "--config specpipe-quickstart/configs/quickstart.yaml --set name=python-code-tensorrt_llm "
        "--set engine.runtime=tensorrt_llm --set engine.tensorrt_llm.version=1.2.1 "
        "--set engine.tensorrt_llm.backend=tensorrt"
    )
    assert re.findall(r"^--- (.*)$", result.stdout, re.MULTILINE) == [
        "the pair and its YAML go into specpipe-quickstart",
        f"specpipe build {settings}",
        f"a Triton on free ports, as specpipe serve {settings}",
        "a streamed request over gRPC",
        "a whole request over HTTP",
        f"specpipe verify {settings} --limit 1",
    ]
    assert f"{yaml} is not the one that comes with specpipe; it is left as it is" in result.stdout
    sides = ("target alone, 8 at once", "K = 4, 1 at once", "K = 2, 8 at once")
    assert all(f"greedy, {side}" in result.stdout for side in sides)
    assert "target/build_engine: [TensorRT-LLM] TensorRT-LLM version: 1.2.1" in result.stderr
    last_line = result.stdout.splitlines()[-1]
    assert re.fullmatch(VERDICT + "version 1.2.1, backend tensorrt", last_line)


def test_without_a_builder_the_llm_api_is_served_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    for folder in (ROOT, FOLDER):  # where this process finds packages, Triton's models do
        monkeypatch.syspath_prepend(str(folder))
    result = run()
    assert result.exit_code == 0, result.output
    assert "greedy, target alone, 8 at once" in result.stdout
    assert "greedy, K = 4, 1 at once" in result.stdout
    last_line = result.stdout.splitlines()[-1]
    assert re.fullmatch(VERDICT + "version 1.2.1, backend pytorch", last_line)


def refusal(*options: str) -> str:
    result = run(*options)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: "), result.stderr
    assert "verdict:" not in result.stdout
    return result.stderr.splitlines()[-1].removeprefix("Error: ")


def test_without_tensorrt_llm_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path / "site-packages")])
    assert refusal() == (
        "TensorRT-LLM is not installed: run specpipe in a container made from "
        "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3 (docker/Dockerfile.tensorrt-llm)"
    )
    assert not (tmp_path / "specpipe-quickstart").exists()


def test_without_a_gpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch)
    assert refusal() == (
        "TensorRT-LLM runs on a GPU, and NVIDIA's driver shows none: start the container with "
        "`--gpus all`"
    )
    assert not (tmp_path / "specpipe-quickstart").exists()


def test_engines_where_there_is_no_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    assert refusal("--backend", "tensorrt") == (
        "the pair is not built: runtime 'tensorrt_llm' needs trtllm-build or docker, and neither "
        "is on the PATH: run specpipe inside NVIDIA's image, or install docker with NVIDIA's "
        "container toolkit"
    )


def test_a_builder_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "trtllm-build", FAKE_FAIL="driver")
    result = run()
    assert result.exit_code == 1
    failure = "\nError: the pair is not built: draft: trtllm-build failed: the NVIDIA driver of "
    assert failure in result.stderr


def test_a_server_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_server(repository: Path, **options: Any) -> NoReturn:
        raise ServerError("Triton did not start: no such backend")

    monkeypatch.setattr(serving, "running", no_server)
    assert refusal("--backend", "pytorch") == (
        "the pair is built, but not served: Triton did not start: no such backend"
    )


def test_a_pair_that_is_not_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = GateResult(
        source="gate",
        digest="",
        num_prompts=2,
        num_right=1,
        num_right_target_alone=2,
        num_failed=0,
        lost=("one",),
    )
    side = SideResult(
        check="greedy",
        side=VerifySide(name="K = 4", kind="speculation", num_draft_tokens=4, at_once=1),
        verdict="identical",
        num_identical=2,
        ties=(),
        faults=(),
        num_tokens=16,
        num_draft_tokens=8,
        num_accepted_tokens=4,
    )
    findings = outcome.Findings(
        sides=(side,), tests=(), gate=gate, threshold=TieThreshold(dtype="float32")
    )
    verified = outcome.Verification(findings, tmp_path / "verification.json")
    monkeypatch.setattr(verification, "verify", lambda *_, **__: verified)
    with pytest.raises(click.ClickException) as caught:
        quickstart._verify(load_config(ROOT / "configs" / "quickstart.yaml"), {})
    assert str(caught.value) == (
        "the pair is built and served, but not lossless: with speculation 1 of 2 answers of the "
        "gate are right, without it 2: please report it, with verification.json and what "
        "`specpipe doctor` prints"
    )


@pytest.mark.parametrize("options", [(), ("--runtime", "torch")], ids=str)
def test_a_backend_without_the_runtime_that_has_it(options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["quickstart", *options, "--backend", "pytorch"])
    assert result.exit_code == 2
    assert "--backend has no effect without --runtime tensorrt_llm." in result.stderr
