"""The command line that starts Triton: `tritonserver`, or mpirun with a section for each rank."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specpipe.errors import ServerError
from specpipe.machine.web import bracketed
from specpipe.runtimes.launch import Launch
from specpipe.triton.server.addresses import http_address

if TYPE_CHECKING:
    from specpipe.triton.server.installation import TritonBinary
    from specpipe.triton.server.options import ServeOptions
    from specpipe.triton.server.workspace import Workspace

# mpirun binds each of one or two ranks to one core, and the models that the first starts with it
# (Open MPI's mpirun, "binding"), unless it is told not to.
MPI_RUN = ("mpirun", "--allow-run-as-root", "--bind-to", "none")

# What anyone who reaches Triton could do to it; clients need none of it. Names: Triton's --help.
ADMIN_CALLS = ("shared-memory", "model-repository", "trace", "logging", "statistics")
ADMIN_HEADER = "specpipe-admin-key"
"""The HTTP header that opens them; over gRPC it is `triton-grpc-protocol-specpipe-admin-key`."""

_NOT_FOR_MODELS = frozenset({"SPECPIPE_ADMIN_KEY", "SPECPIPE_API_KEYS"})
"""Variables of the launcher (server.py) and of the front door (gateway/keys.py)."""

# Linux sends a SIGTERM when the thread that started the process dies, however that came (1 is
# PR_SET_PDEATHSIG), so that no server is left behind with its ports and its memory.
_EXEC = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def server_command(
    binary: TritonBinary,
    repository: Path,
    options: ServeOptions,
    launch: Launch,
    *,
    shared_memory_prefix: str,
    backends: Path | None,
    admin_key: str,
) -> list[str]:
    """Returns the command line; raises ServerError where mpirun is needed and not there.

    Several ranks are started as TensorRT-LLM 1.2 starts them, in
    triton_backend/scripts/launch_triton_server.py. Those after the first stay in the initialization
    of their models, and never open the ports.
    """
    restricted = f"{','.join(ADMIN_CALLS)}:{ADMIN_HEADER}={admin_key}"
    http = ["--allow-http=false"]
    if options.allow_http:
        http = [
            f"--http-address={http_address(options.host)}",
            f"--http-port={options.http_port}",
            f"--http-restricted-api={restricted}",
        ]
    ranks = []
    for rank in range(launch.world_size):
        command = [
            str(binary.path),
            f"--model-repository={repository}",
            "--disable-auto-complete-config",
            "--model-control-mode=explicit",
            # Else it is not ready while another version is loaded, however long (Triton 2.51).
            "--strict-readiness=false",
            *http,
            f"--grpc-address={bracketed(options.host)}",
            f"--grpc-port={options.grpc_port}",
            f"--grpc-restricted-protocol={restricted}",
            f"--metrics-address={http_address(options.host)}",
            f"--metrics-port={options.metrics_port}",
            f"--exit-timeout-secs={int(options.drain_timeout_s)}",
            shared_memory_argument(shared_memory_prefix, rank),
            *launch.arguments,
        ]
        if backends is not None:
            command.append(f"--backend-directory={backends}")
        models = ("*",) if rank == 0 else launch.rank_models
        command += [f"--load-model={model}" for model in models]
        ranks.append(command)
    start = [sys.executable, "-c", _EXEC]
    if not launch.uses_mpi:
        return [*start, *ranks[0]]
    mpirun = shutil.which(MPI_RUN[0])
    if mpirun is None:
        raise ServerError(
            f"engines of several ranks are started with {MPI_RUN[0]}, which is not on PATH: serve "
            "inside the image that the engines were built in"
        )
    command = [*start, mpirun, *MPI_RUN[1:]]
    for rank, section in enumerate(ranks):
        command += [*([":"] if rank > 0 else []), "-n", "1", *section]
    return command


def shared_memory_argument(prefix: str, rank: int) -> str:
    """Returns the option that keeps the Python models of two servers apart.

    A rank's process is also recognized by it.
    """
    return f"--backend-config=python,shm-region-prefix-name={prefix}{rank}_"


def server_environment(
    binary: TritonBinary, launch: Launch, inherited: Mapping[str, str], workspace: Workspace
) -> dict[str, str]:
    """Returns the variables of the server and, since mpirun hands its own on, of every rank."""
    own = {name: value for name, value in inherited.items() if name not in _NOT_FOR_MODELS}
    environment = {**own, **launch.environment, "PYTHONUNBUFFERED": "1"}
    # The stub finds its packages through the `python3` that comes first on PATH, and is started by
    # bash, which a PATH may lack.
    paths = [str(workspace.python_dir), str(Path(sys.executable).parent), inherited.get("PATH", "")]
    environment["PATH"] = ":".join(filter(None, [*paths, os.defpath]))
    # After what the user has there, and with nothing else in it, so that no library is shadowed.
    libraries = [
        str(binary.libraries_dir or ""),
        inherited.get("LD_LIBRARY_PATH", ""),
        str(workspace.library_dir),
    ]
    environment["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
    return environment
