"""docker/: what the images start from and leave behind; `make lint` checks their form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from specpipe.runtimes.tensorrt_llm.versions import DEFAULT_VERSION, RELEASES

DOCKER = Path(__file__).parents[1] / "docker"
TENSORRT_LLM = "Dockerfile.tensorrt-llm"


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile and their arguments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / name).read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line.strip()]  # type: ignore[misc]


def test_the_image_is_that_of_the_default_release() -> None:
    image = RELEASES[DEFAULT_VERSION].image
    assert image == "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    assert instructions(TENSORRT_LLM)[:2] == [
        ("ARG", f"TENSORRT_LLM_IMAGE={image}"),
        ("FROM", "${TENSORRT_LLM_IMAGE}"),
    ]


def test_both_images_are_of_one_triton() -> None:
    (_, argument), *_ = instructions("Dockerfile")
    assert argument == f"TRITON_IMAGE=nvcr.io/nvidia/tritonserver:{RELEASES['1.2.1'].triton}-py3"


def test_the_image_is_told_which_runtimes_it_has() -> None:
    found = instructions("Dockerfile")
    assert ("ARG", "EXTRAS=torch") in found[2:]  # what stands before FROM is not known after it
    (install,) = (arguments for name, arguments in found if name == "RUN")
    assert '"/opt/specpipe[${EXTRAS}]"' in install
    (named,) = re.findall(r"--build-arg EXTRAS=(\S+)", (DOCKER / "Dockerfile").read_text())
    extras = re.findall(r"^([\w-]+) = \[", (DOCKER.parent / "pyproject.toml").read_text(), re.M)
    assert set(named.split(",")) <= set(extras)


@pytest.mark.parametrize("name", ["Dockerfile", TENSORRT_LLM])
def test_an_image_runs_as_a_user_and_says_how_it_is(name: str) -> None:
    found = dict(instructions(name))
    assert found["USER"] == "1000:1000"
    assert found["ENTRYPOINT"] == '["specpipe"]'
    assert "http://127.0.0.1:8000/v2/health/ready" in found["HEALTHCHECK"]
    assert "HF_HOME=/cache/huggingface" in found["ENV"]


@pytest.mark.parametrize("name", ["Dockerfile", TENSORRT_LLM])
def test_what_is_copied_is_let_into_the_build(name: str) -> None:
    allowed = (DOCKER.parent / ".dockerignore").read_text().splitlines()
    for instruction, arguments in instructions(name):
        if instruction == "COPY":
            *sources, _ = arguments.split()
            for source in sources:
                assert (DOCKER.parent / source).exists()
                assert f"!{source}" in allowed


def test_compose_builds_both_and_leaves_time_to_drain() -> None:
    services: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert {name: service["build"]["dockerfile"] for name, service in services.items()} == {
        "cpu": "docker/Dockerfile",
        "tensorrt-llm": "docker/Dockerfile.tensorrt-llm",
    }
    for service in services.values():
        assert service["stop_grace_period"] == "1m"  # the launcher's 30 s, and Triton's unloading
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
