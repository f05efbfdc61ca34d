"""TensorRT-LLM releases: the Triton image of each, and the TensorRT and CUDA inside it.

An engine runs only under the TensorRT-LLM and TensorRT that built it, so one row of this table is
built with and served with. Source: triton-inference-server/server, docs/introduction/
compatibility.md and the Dockerfiles of its release branches, as of 2026-08; of several images with
one TensorRT-LLM the newest is taken. Left out is 25.11, whose TensorRT-LLM 1.0.3.2510 is no release
of its own. From 1.3 on there is no engine path: no `trtllm-build` and no `tensorrt` backend
(TensorRT-LLM, docs/source/legacy/tensorrt-backend-removal.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from specpipe.errors import ConfigError

SupportedVersion = Literal["1.0.0", "1.1.0", "1.2.0", "1.2.1"]
"""The releases that specpipe builds with and serves."""

DEFAULT_VERSION: SupportedVersion = "1.2.1"

_REGISTRY = "nvcr.io/nvidia/tritonserver"


@dataclass(frozen=True)
class Release:
    """One TensorRT-LLM release, and the newest Triton image that has it.

    triton    the image's year and month
    tensorrt  its version of the TensorRT that builds and runs engines
    cuda      its CUDA toolkit
    driver    the oldest driver that the image's notes name
    """

    version: str
    triton: str
    tensorrt: str
    cuda: str
    driver: str

    @property
    def image(self) -> str:
        """The image, pinned by tag."""
        return f"{_REGISTRY}:{self.triton}-trtllm-python-py3"

    @property
    def number(self) -> tuple[int, ...]:
        """The version for comparing: (1, 2, 1)."""
        return version_number(self.version)


RELEASES = {
    release.version: release
    for release in (
        Release("1.2.1", "26.07", "10.14.1.48", "13.1.0.036", "590.44.01"),
        Release("1.2.0", "26.03", "10.14.1.48", "13.1.0.036", "590.44.01"),
        Release("1.1.0", "26.02", "10.13.3.9", "13.0.2.006", "580.95.05"),
        Release("1.0.0", "25.10", "10.11.0.33", "12.9.1.010", "575.57.08"),
        Release("0.21.0", "25.08", "10.11.0.33", "12.9.0.043", "575.51.03"),
        Release("0.20.0", "25.07", "10.10.0.31", "12.9.0.036", "575.51.03"),
        Release("0.19.0", "25.05", "10.9.0.34", "12.8.1.012", "570.124.06"),
        Release("0.18.2", "25.04", "10.9.0.34", "12.8.1.012", "570.124.06"),
        Release("0.18.0", "25.03", "10.9.0.34", "12.8.1.012", "570.124.06"),
        Release("0.17.0.post1", "25.02", "10.8.0.43", "12.8.0.038", "570.86.10"),
        Release("0.17.0", "25.01", "10.8.0.43", "12.8.0.038", "570.86.10"),
        Release("0.16.0", "24.12", "10.7.0", "12.6.3", "560.35.05"),
    )
}
"""Newest first. Those before 1.0 are here to tell what an engine of theirs was built with."""


def release(version: str) -> Release:
    """Returns the row of a release; raises ConfigError, naming those that can be built with."""
    found = RELEASES.get(version)
    if found is None:
        known = ", ".join(get_args(SupportedVersion))
        raise ConfigError(
            f"TensorRT-LLM {version} is not known to specpipe: "
            f"set engine.tensorrt_llm.version to one of {known}"
        )
    return found


def version_number(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (1, 2, 0) of "1.2.0rc8"."""
    numbers = []
    for piece in version.split("."):
        digits = piece[: len(piece) - len(piece.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != piece:
            break
    return tuple(numbers)
