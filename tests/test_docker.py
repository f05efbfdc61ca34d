"""docker/: what the images start from and leave behind; `make lint` checks their form."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from specpipe.config.tensorrt_llm_versions import (
    DEFAULT_VERSION,
    FIRST_WITHOUT_ENGINES,
    RELEASES,
    serving_image,
)
from tests.installed import extras_of

DOCKER = Path(__file__).parents[1] / "docker"
TENSORRT_LLM, PYTORCH = "Dockerfile.tensorrt-llm", "Dockerfile.tensorrt-llm-pytorch"
ALL = ("Dockerfile", TENSORRT_LLM, PYTORCH)


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


def test_all_images_are_of_one_triton() -> None:
    argument = f"TRITON_IMAGE=nvcr.io/nvidia/tritonserver:{RELEASES['1.2.1'].triton}-py3"
    assert instructions("Dockerfile")[0] == ("ARG", argument)
    assert ("ARG", argument) in instructions(PYTORCH)


def test_without_engines_triton_comes_into_tensorrt_llm_s_image() -> None:
    found = instructions(PYTORCH)
    (_, version), *_ = found
    assert version == f"TENSORRT_LLM_VERSION={FIRST_WITHOUT_ENGINES}"
    *_, last = [arguments for name, arguments in found if name == "FROM"]
    image = last.replace("${TENSORRT_LLM_VERSION}", FIRST_WITHOUT_ENGINES)
    assert image == serving_image(FIRST_WITHOUT_ENGINES)
    copied = [
        words for name, words in found if name == "COPY" and words.startswith("--from=triton")
    ]
    for part in ("bin", "lib", "backends/python"):
        assert f"--from=triton /opt/tritonserver/{part} /opt/tritonserver/{part}" in copied


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("Dockerfile", "torch,evaluate,openai"),
        (TENSORRT_LLM, "evaluate,openai"),
        (PYTORCH, "evaluate,openai"),
    ],
)
def test_the_image_is_told_which_extras_it_has(name: str, default: str, wheel: Path) -> None:
    found = instructions(name)
    # What stands before FROM is not known after it.
    assert ("ARG", f"EXTRAS={default}") in found[2:]
    install = next(arguments for name, arguments in found if "pip install" in arguments)
    assert '"/opt/specpipe[${EXTRAS}]"' in install
    named = re.findall(r"EXTRAS[=:](?:-| \"\$\{EXTRAS:-)?([a-z-]+(?:,[a-z-]+)*)", text_of_all())
    assert len(named) >= 4
    assert {extra for extras in named for extra in extras.split(",")} <= extras_of(wheel)


def text_of_all() -> str:
    return "".join(path.read_text() for path in sorted(DOCKER.iterdir()))


@pytest.mark.parametrize("name", ALL)
def test_an_image_runs_as_a_user_and_says_how_it_is(name: str) -> None:
    found = dict(instructions(name))
    assert found["USER"] == "1000:1000"
    assert found["ENTRYPOINT"] == '["specpipe"]'


@pytest.mark.parametrize("name", ALL)
def test_a_user_without_a_home_can_write_every_cache(name: str) -> None:
    made = [arguments for name, arguments in instructions(name) if name == "RUN"]
    assert made[-1].endswith("mkdir --mode=1777 /cache")
    variables = dict(
        word.split("=", 1)
        for name, arguments in instructions(name)
        if name == "ENV"
        for word in arguments.split()
    )
    caches = ("HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    assert {variables[cache].split("/")[1] for cache in caches} == {"cache"}


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("name", ALL)
def test_the_health_check_asks_the_server_and_no_proxy(
    name: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (check,) = (arguments for name, arguments in instructions(name) if name == "HEALTHCHECK")
    python, option, code = json.loads(check.partition("CMD ")[2])
    assert (python, option) == ("python3", "-c")

    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/v2/health/ready" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.handle_request).start()
        code = code.replace("8000", str(server.server_port))
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == (status != 200)


def test_command_lines_listen_on_this_machine_and_have_shared_memory() -> None:
    lines = re.sub(r"\\\n#\s*", "", text_of_all()).splitlines()
    runs = [line for line in lines if line.startswith("#   docker run")]
    assert len(runs) == 4
    for line in runs:
        assert "--shm-size" in line
        assert re.findall(r"-p (\S+)", line) in ([], ["127.0.0.1:8000:8000", "127.0.0.1:8001:8001"])
        assert ("0.0.0.0" in line) == ("-p " in line)


@pytest.mark.parametrize("name", ALL)
def test_what_is_copied_is_let_into_the_build(name: str) -> None:
    allowed = (DOCKER.parent / ".dockerignore").read_text().splitlines()
    for instruction, arguments in instructions(name):
        if instruction == "COPY" and not arguments.startswith("--from="):
            *sources, _ = arguments.split()
            for source in sources:
                assert (DOCKER.parent / source).exists()
                assert f"!{source}" in allowed


def test_compose_builds_all_and_leaves_time_to_drain() -> None:
    services: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    gateway = services.pop("gateway")
    assert {name: service["build"]["dockerfile"] for name, service in services.items()} == {
        "cpu": "docker/Dockerfile",
        "gpu": "docker/Dockerfile",
        "tensorrt-llm": "docker/Dockerfile.tensorrt-llm",
    }
    for service in services.values():
        assert service["stop_grace_period"] == "1m"  # the launcher's 30 s, and Triton's unloading
        assert service["shm_size"] == "2gb"
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    with_gpus = [name for name, service in services.items() if "deploy" in service]
    assert with_gpus == ["gpu", "tensorrt-llm"]
    # Two images of one file must not bear one name.
    assert len({service["image"] for service in services.values()}) == len(services)
    assert services["cpu"]["build"]["args"]["TORCH_INDEX"].endswith("/cpu")
    # The door is the image of another one, knows what its server knows, and is held to keys.
    assert gateway["image"] == services["cpu"]["image"]
    for service in services.values():
        assert service["environment"].items() <= gateway["environment"].items()
    assert gateway["command"][0] == "gateway"
    assert gateway["environment"]["SPECPIPE_API_KEYS"] == "${SPECPIPE_API_KEYS:-}"
    assert not {"--allow-no-keys", "--keys"} & set(gateway["command"])
    assert gateway["ports"] == ["127.0.0.1:8080:8080"]
    assert gateway["stop_grace_period"] == "1m"
