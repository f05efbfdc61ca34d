"""Finding and starting Triton: what stops it from being ready, said in one sentence."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from specpipe.errors import ServerError
from specpipe.triton import installation, server
from specpipe.triton.installation import TritonBinary
from specpipe.triton.server import ServeOptions, Server


def test_a_model_that_does_not_load_is_one_sentence_with_the_reason(
    echo_repository: Callable[..., Path],
) -> None:
    folder = echo_repository()
    (folder / "preprocessing" / "1" / "model.py").write_text("import nothing_of_that_name\n")
    with (
        pytest.raises(ServerError, match="(?s)Triton did not start: .*nothing_of_that_name"),
        server.running(folder),
    ):
        pass


def test_a_first_request_that_fails_is_not_ready(echo_repository: Callable[..., Path]) -> None:
    folder = echo_repository(max_seq_len=1)
    with (
        pytest.raises(ServerError, match="the first request failed: the prompt has 3 tokens"),
        server.running(folder),
    ):
        pass


def test_ports_0_are_free_and_different() -> None:
    binary = TritonBinary(Path("tritonserver"))
    options = ServeOptions(http_port=0, grpc_port=0, metrics_port=0)
    made = Server(Path("repository"), options, binary=binary)
    ports = {made.options.http_port, made.options.grpc_port, made.options.metrics_port}
    assert len(ports) == 3 and 0 not in ports
    assert made.http_url == f"http://127.0.0.1:{made.options.http_port}"


def test_a_port_in_use_is_named_with_its_option() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        options = ServeOptions(http_port=0, grpc_port=port, metrics_port=0)
        made = Server(Path("repository"), options, binary=TritonBinary(Path("tritonserver")))
        with pytest.raises(ServerError) as caught:
            made.start()
    assert str(caught.value) == (
        f"127.0.0.1:{port} cannot be listened on (Address already in use): choose another port "
        "with --grpc-port"
    )


def test_tritonserver_on_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installation.find_tritonserver() == TritonBinary(binary)


def test_no_tritonserver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"pip install .*\[triton\]'"):
        installation.find_tritonserver()
