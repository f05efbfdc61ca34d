"""A start that fails: how soon it ends, and with whose words."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specpipe.errors import ServerError
from specpipe.triton.server import server, start_failure
from specpipe.triton.server.installation import TritonBinary, find_tritonserver
from specpipe.triton.server.options import ServeOptions

# What Triton 2.51 writes on a machine without a GPU, whatever happens.
WITHOUT_GPU = [
    'W1128 20:15:09.501343 11786 pinned_memory_manager.cc:273] "Unable to allocate pinned system'
    ' memory, pinned memory pool will not be available: CUDA driver version is insufficient"',
    'E1128 20:15:09.501498 11786 server.cc:241] "CudaDriverHelper has not been initialized."',
    "Error: Failed to initialize NVML",
]
NOT_HEALTHY = (
    "E1128 20:35:17.596361 13718 model_lifecycle.cc:642] \"failed to load '{}' version 1: Internal:"
    " Stub process '{}_0_0' is not healthy.\""
)


SOON_S = 200.0  # on a busy machine; what is waited for would take 300 s, a start may take 600


def not_started(repository: Path, binary: TritonBinary | None = None) -> tuple[str, float]:
    """Why a start failed, and after how many seconds."""
    begin_s = time.monotonic()
    with pytest.raises(ServerError) as caught, server.running(repository, binary=binary):
        pass
    return str(caught.value), time.monotonic() - begin_s


def stub_that(folder: Path, script: str) -> TritonBinary:
    """This machine's Triton with a stub that passes the look before the start, then does this."""
    stub = folder / "triton_python_backend_stub"
    stub.write_text(f"#!/bin/sh\n[ $# -gt 0 ] || exit 1\n{script}\n")
    stub.chmod(0o755)
    binary = find_tritonserver()
    if binary.python_stub is None:
        pytest.skip("this Triton has its stub in a place of its own")
    return replace(binary, python_stub=stub)


def in_initialize(repository: Path, model: str, statement: str) -> None:
    path = repository / model / "1" / "model.py"
    before = "    def initialize(self, args):\n"
    path.write_text(path.read_text().replace(before, f"{before}        {statement}\n"))


def test_stubs_that_the_loader_refuses_are_not_waited_for(
    echo_repository: Callable[..., Path], tmp_path: Path
) -> None:
    loader = "stub: error while loading shared libraries: libfoo.so.1: cannot open shared object"
    binary = stub_that(tmp_path, f"echo '{loader}' >&2; exit 127")
    message, took_s = not_started(echo_repository(), binary)
    assert message.startswith("Triton did not start: ")
    # After another's, where the stubs of two models ended at once.
    assert message.endswith((f": {loader}", f"; {loader}"))
    assert took_s < SOON_S


def test_a_stopped_stub_is_not_waited_for(
    echo_repository: Callable[..., Path], tmp_path: Path
) -> None:
    message, took_s = not_started(echo_repository(), stub_that(tmp_path, "kill -STOP $$"))
    assert " is stopped (pid " in message
    assert took_s < SOON_S


def test_one_model_that_fails_ends_the_start_while_another_loads(
    echo_repository: Callable[..., Path],
) -> None:
    folder = echo_repository()
    in_initialize(folder, "preprocessing", 'raise ValueError("a line\\nand another")')
    in_initialize(folder, "speculative", "import time; time.sleep(300)")
    message, took_s = not_started(folder)
    assert message == "Triton did not start: preprocessing: ValueError: a line and another"
    assert took_s < SOON_S


def test_a_model_that_dies_without_a_word_is_named(echo_repository: Callable[..., Path]) -> None:
    folder = echo_repository()
    in_initialize(folder, "preprocessing", "import os; os.kill(os.getpid(), 9)")
    message, _ = not_started(folder)
    assert message.startswith("Triton did not start: preprocessing")
    assert "died" in message and "CUDA" not in message


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_tritonserver_that_is_killed_or_stopped_is_noticed(
    tmp_path: Path, number: signal.Signals
) -> None:
    triton = tmp_path / "tritonserver"
    triton.write_text(f"#!/bin/sh\necho its last words\nkill -{int(number)} $$\nsleep 300\n")
    triton.chmod(0o755)
    message, took_s = not_started(tmp_path, TritonBinary(triton))
    assert message.endswith(": its last words")
    assert took_s < SOON_S


def test_the_limit_of_a_start_says_what_was_written_last(tmp_path: Path) -> None:
    triton = tmp_path / "tritonserver"
    triton.write_text("#!/bin/sh\necho loading\nexec sleep 300\n")
    triton.chmod(0o755)
    options = ServeOptions(http_port=0, grpc_port=0, metrics_port=0, startup_timeout_s=2.0)
    before = set(shared_memory())
    with (
        pytest.raises(ServerError, match="^Triton was not ready after 2 s: loading$"),
        server.running(tmp_path, options, binary=TritonBinary(triton)),
    ):
        pass
    assert not [path for path in shared_memory() if path not in before]


def shared_memory() -> list[Path]:
    """What servers of this process have; other processes have their own meanwhile."""
    return list(Path("/dev/shm").glob(f"specpipe_{os.getpid()}_*"))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "it wrote no log"),
        (["terminate called after throwing an instance of 'std::bad_alloc'", "  what():  bad"],
         "what():  bad"),
        (["terminate called without an active exception"],
         "terminate called without an active exception"),
        ([NOT_HEALTHY.format("plain", "plain")], "plain: its process died without a word"),
        (["  what():  error evaluating path"] * 3
         + [NOT_HEALTHY.format(name, name) for name in ("plain", "preprocessing")],
         "what():  error evaluating path"),
        (["Traceback (most recent call last):", '  File "x.py", line 1', "KeyError: 'a'"],
         "KeyError: 'a'"),
        ([f"E1128 20:35:17.5 1 model_lifecycle.cc:642] \"failed to load '{name}' version 1: "
          "Internal: Unable to initialize shared memory key 'of_" + name + "' (1048576 bytes)\""
          for name in ("preprocessing", "speculative")],
         "preprocessing: Unable to initialize shared memory key 'of_preprocessing' "
         "(1048576 bytes)"),
        (["error: creating server: Invalid argument - no model repository"],
         "error: creating server: Invalid argument - no model repository"),
        (["x: symbol lookup error: " + "y" * 400], ("x: symbol lookup error: " + "y" * 400)[:300]),
    ],
)  # fmt: skip
def test_the_words_nearest_to_the_cause_come_once_and_without_a_gpus(
    lines: list[str], expected: str
) -> None:
    assert start_failure.words([*WITHOUT_GPU, *lines]) == expected
