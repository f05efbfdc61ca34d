"""Runs NVIDIA's tools where they are: on this machine's PATH, else in their image with docker.

A command is written once, with `File`s in place of paths; natively these are the paths themselves,
in a container the mounts. Whatever ends this process, but for SIGKILL, ends the tool as well.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import TypeAlias

from specpipe.errors import EngineBuildError, RuntimeUnavailable
from specpipe.machine.signals import deferred
from specpipe.roles import Role
from specpipe.runtimes.tensorrt_llm.engines.trtllm_build_log import explain

BUILDER = "trtllm-build"

_LOG = logging.getLogger(__name__)
_MAX_KEPT_LINES = 2000  # of a log: enough for every rank's last words
_GRACE_S = 10.0
_DAEMON_TIMEOUT_S = 20.0
_MOUNT_ROOT = PurePosixPath("/specpipe")

_PROBE_MARK = "specpipe-versions "
_PROBE = f"""\
import importlib.metadata, json, os
def version(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
print({_PROBE_MARK!r} + json.dumps({{
    "tensorrt_llm": version("tensorrt_llm"),
    "tensorrt": version("tensorrt", "tensorrt_cu13", "tensorrt_cu12"),
    "cuda": os.environ.get("CUDA_VERSION"),
}}))
"""


@dataclass(frozen=True)
class File:
    """A file or folder that a tool reads or writes.

    path    what a container is given
    name    of the mount
    inside  where in `path` the thing itself is
    """

    path: Path
    name: str
    is_output: bool = False
    inside: str = "."

    @property
    def here(self) -> Path:
        """Where it is on this machine."""
        return self.path / self.inside

    @property
    def mounted(self) -> PurePath:
        """Where it is in a container."""
        return _MOUNT_ROOT / self.name / self.inside


Word: TypeAlias = "str | File"


@dataclass(frozen=True)
class Tool:
    """One program of NVIDIA's image, and the GPUs that it sees.

    task     what it does for the role, in messages and in the name of a container
    gpu_ids  by the numbers of nvidia-smi
    """

    role: Role
    task: str
    image: str
    gpu_ids: tuple[int, ...]

    def command_line(
        self, words: Sequence[Word], *, container: str | None = None, native: bool | None = None
    ) -> list[str]:
        """Returns what would be run here.

        container  the name that a container gets
        native     whether the program is on the PATH; None: looks
        """
        if is_native() if native is None else native:
            gpus = ",".join(map(str, self.gpu_ids))
            plain = [str(word.here) if isinstance(word, File) else word for word in words]
            # CUDA would count the fastest GPU first, not as nvidia-smi and docker do.
            order = "CUDA_DEVICE_ORDER=PCI_BUS_ID"
            return ["env", order, f"CUDA_VISIBLE_DEVICES={gpus}", *plain]
        return self._docker_line(words, container or self._container)

    @property
    def _container(self) -> str:
        return f"specpipe-{self.role}-{self.task}"

    def _docker_line(self, words: Sequence[Word], container: str) -> list[str]:
        # Docker reads the value of --gpus as CSV, hence the quotes around the comma.
        gpus = ",".join(map(str, self.gpu_ids))
        line = ["docker", "run", "--rm", "--name", container, "--init"]
        line += ["--gpus", f'"device={gpus}"', "--user", f"{os.getuid()}:{os.getgid()}"]
        # The caller has no entry in the image's passwd: what asks for a name or a home gets these.
        line += ["--env", "HOME=/tmp", "--env", "USER=specpipe", "--workdir", "/tmp"]
        files = {word.name: word for word in words if isinstance(word, File)}
        for file in files.values():
            line += ["--mount", _mount(file)]
        inside = [str(word.mounted) if isinstance(word, File) else word for word in words]
        return [*line, self.image, *inside]

    def run(self, words: Sequence[Word]) -> ToolResult:
        """Runs the program to its end, whatever that is; each line it prints goes to the log."""
        _require_program()
        native = is_native()
        container = f"{self._container}-{uuid.uuid4().hex[:8]}"
        line = self.command_line(words, container=container, native=native)
        with _running(line, None if native else container) as process:
            assert process.stdout is not None
            kept: deque[str] = deque(maxlen=_MAX_KEPT_LINES)
            for text in process.stdout:
                text = text.rstrip()
                kept.append(text)
                _LOG.info("%s/%s: %s", self.role, self.task, text)
            return ToolResult(process.wait(), tuple(kept))


@dataclass(frozen=True)
class ToolResult:
    """How a tool ended, and the last lines that it printed."""

    exit_code: int
    lines: tuple[str, ...] = field(repr=False)


def versions(tool: Tool) -> dict[str, str | None]:
    """Returns the versions of `tensorrt_llm`, `tensorrt` and `cuda` where a tool runs.

    None stands for what is not known there: TensorRT-LLM may be installed without its metadata.
    Raises EngineBuildError where nothing can be run at all.
    """
    outcome = tool.run([interpreter(), "-c", _PROBE])
    told = [line for line in outcome.lines if line.startswith(_PROBE_MARK)]
    if outcome.exit_code or not told:
        cause = explain(tool.role, outcome.exit_code, outcome.lines)
        raise EngineBuildError(f"{tool.role}: TensorRT-LLM cannot be asked its version: {cause}")
    found: dict[str, str | None] = json.loads(told[-1].removeprefix(_PROBE_MARK))
    return found


def interpreter() -> str:
    """Returns the Python that has TensorRT-LLM: natively that of the builder's first line."""
    builder = shutil.which(BUILDER)
    if builder is None:
        return "python3"
    with open(builder, "rb") as script:
        line = script.readline(1024)
    if not line.startswith(b"#!"):
        return "python3"
    return os.fsdecode(line[2:].strip()).removeprefix("/usr/bin/env ")


def is_native() -> bool:
    """True where specpipe runs inside NVIDIA's image, or beside an installed TensorRT-LLM."""
    return shutil.which(BUILDER) is not None


def require() -> None:
    """Raises RuntimeUnavailable where engines can be built neither here nor in a container."""
    docker = _require_program()
    if docker is not None and docker_version(docker) is None:
        raise RuntimeUnavailable(
            f"runtime 'tensorrt_llm' needs {BUILDER} or docker: {BUILDER} is not on the PATH, and "
            f"the daemon of {docker} does not answer: start it, or run specpipe inside NVIDIA's "
            "image"
        )


def _require_program() -> str | None:
    """Returns docker's path; None where it is not needed."""
    if is_native():
        return None
    if (docker := shutil.which("docker")) is None:
        raise RuntimeUnavailable(
            f"runtime 'tensorrt_llm' needs {BUILDER} or docker, and neither is on the PATH: run "
            "specpipe inside NVIDIA's image, or install docker with NVIDIA's container toolkit"
        )
    return docker


def docker_version(docker: str) -> str | None:
    """Returns the version of docker's daemon; None where it does not answer."""
    return _told([docker, "version", "--format", "{{.Server.Version}}"])


def image_digest(image: str) -> str | None:
    """Returns the digest of an image that is here, as `sha256:…`; None where docker tells none.

    An image that was built here and never pushed has none (`docker image inspect`, RepoDigests).
    """
    told = _told(["docker", "image", "inspect", "--format", '{{join .RepoDigests " "}}', image])
    digests = {name.rpartition("@")[2] for name in (told or "").split()}
    return min(digests, default=None)


def _told(asked: Sequence[str]) -> str | None:
    """Returns what docker prints; None where it or its daemon does not answer."""
    try:
        printed = subprocess.run(
            asked, capture_output=True, text=True, timeout=_DAEMON_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return printed.stdout.strip()


def _mount(file: File) -> str:
    """Writes a bind mount as docker's CSV, so that commas in a path do no harm."""
    fields = ["type=bind", f"source={file.path.resolve()}", f"target={_MOUNT_ROOT / file.name}"]
    if not file.is_output:
        fields.append("readonly")
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(fields)
    return text.getvalue()


@contextmanager
def _running(line: Sequence[str], container: str | None) -> Iterator[subprocess.Popen[str]]:
    """Starts a process in a group of its own, which is gone when the block is left."""
    try:
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches us alone, and we end it
        )
    except OSError as exc:
        raise EngineBuildError(f"{line[0]} cannot be started: {exc.strerror}") from exc
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                _end(process, container)


@deferred()
def _end(process: subprocess.Popen[str], container: str | None) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
            break
    if container is None:
        return
    # The death of docker's client is not the container's.
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            ["docker", "kill", container],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_GRACE_S,
            check=False,
        )
