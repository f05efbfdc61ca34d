"""Which tritonserver has which holes, and who may reach it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from specpipe.errors import ServerError
from specpipe.triton.server import known_holes, launcher
from specpipe.triton.server.options import ServeOptions
from specpipe.triton.server.server import TritonBinary, find_tritonserver

CLASSES = "to ask for the classes of a text output ends the server"
FOUR = (
    "a body of a million chunks ends the server; a body of 4 MiB ends the server; "
    f"a body of a million '[' ends the server; {CLASSES}"
)
NAMES = "an error tells the name of private memory, which is of use with the admin key alone"


@pytest.fixture
def image(tmp_path: Path) -> TritonBinary:
    """A tritonserver that lies as in NVIDIA's images, of a version that a test may write."""
    binary = tmp_path / "tritonserver" / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.touch()
    return TritonBinary(binary)


def test_the_version_of_an_image_is_in_its_file_or_variable(image: TritonBinary) -> None:
    variables = {"TRITON_SERVER_VERSION": "2.70.0"}
    assert known_holes.find_version(image, {}) is None
    assert known_holes.find_version(image, variables) == "2.70.0"
    (image.path.parents[1] / "TRITON_VERSION").write_text("2.71.0\n")
    assert known_holes.find_version(image, variables) == "2.71.0"


def test_the_version_of_the_wheel_is_known() -> None:
    binary = find_tritonserver()
    assert binary.python_stub is not None
    assert known_holes.find_version(binary, {"TRITON_SERVER_VERSION": "2.71.0"}) == "2.51.0"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.51.0", f"tritonserver 2.51.0: {FOUR}; {NAMES}"),
        (
            "2.59.0",
            "tritonserver 2.59.0: a body of a million chunks ends the server; "
            f"a body of 4 MiB ends the server; {CLASSES}; {NAMES}",
        ),
        ("2.59.1", "none in tritonserver 2.59.1"),
        ("2.73.0dev", "none in tritonserver 2.73.0dev"),
        (None, "unknown, as its version is: TRITON_SERVER_VERSION may tell it"),
        ("main", "unknown, as its version is: TRITON_SERVER_VERSION may tell it"),
    ],
)
def test_the_holes_of_a_version(version: str | None, expected: str) -> None:
    assert known_holes.describe(version) == expected


def test_without_http_what_comes_by_http_alone_is_closed() -> None:
    described = known_holes.describe("2.51.0", allow_http=False)
    assert described == f"tritonserver 2.51.0: {CLASSES}; {NAMES}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
def test_beyond_loopback_a_server_with_holes_is_refused(host: str) -> None:
    with pytest.raises(ServerError) as caught:
        known_holes.check("2.51.0", ServeOptions(host=host))
    assert str(caught.value) == (
        f"{host} can be reached from elsewhere, and tritonserver 2.51.0 has known holes ({FOUR}): "
        "serve with a newer one (nvcr.io/nvidia/tritonserver:26.07-py3), let others reach the "
        "front door alone (--openai HOST:PORT), or add --allow-known-holes"
    )
    with pytest.raises(ServerError, match=f"has known holes \\({CLASSES}\\)"):
        known_holes.check("2.51.0", ServeOptions(host=host, allow_http=False))
    known_holes.check("2.51.0", ServeOptions(host=host, allow_known_holes=True))
    known_holes.check("2.59.1", ServeOptions(host=host))


def test_beyond_loopback_an_unknown_version_is_refused() -> None:
    for allow_http in (True, False):
        with pytest.raises(ServerError) as caught:
            known_holes.check(None, ServeOptions(host="0.0.0.0", allow_http=allow_http))
        assert str(caught.value) == (
            "0.0.0.0 can be reached from elsewhere, and the version of this tritonserver is "
            "unknown, and so are its holes: set TRITON_SERVER_VERSION to it, or add "
            "--allow-known-holes"
        )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_on_loopback_any_server_is_allowed(host: str) -> None:
    known_holes.check("2.51.0", ServeOptions(host=host))
    known_holes.check(None, ServeOptions(host=host))


def test_serve_refuses_before_it_starts_anything(
    echo_repository: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "Server", lambda *_, **__: pytest.fail("a server was made"))
    with pytest.raises(ServerError, match=r"2\.51\.0 has known holes .*--allow-known-holes$"):
        launcher.serve(echo_repository(), ServeOptions(host="0.0.0.0"), report=print)


def test_the_images_of_docker_may_listen_on_all_addresses() -> None:
    """compose.yaml does so inside of its containers."""
    docker = Path(__file__).parents[3] / "docker"
    services = yaml.safe_load((docker / "compose.yaml").read_text())["services"]
    hosts = {service["command"][-1].partition(":")[0] for service in services.values()}
    assert hosts == {"0.0.0.0"}
    for name in ("Dockerfile", "Dockerfile.tensorrt-llm"):
        (release,) = re.findall(r"tritonserver:([\d.]+)-", (docker / name).read_text())
        assert release == "26.07"  # which is 2.71.0: README.md of server's tag v2.71.0
    known_holes.check("2.71.0", ServeOptions(host="0.0.0.0"))
