"""TensorRT-LLM releases: the image of each, and for engines the TensorRT and CUDA inside it.

An engine runs only under the TensorRT-LLM and TensorRT that built it, so one row of the table is
built with and served with. Source: triton-inference-server/server, docs/introduction/
compatibility.md and the Dockerfiles of its release branches, as of 2026-08; of several images with
one TensorRT-LLM the newest is taken. Left out is 25.11, whose TensorRT-LLM 1.0.3.2510 is no release
of its own.

Engines end with 1.2.1: from 1.3.0rc23 on (d41ab33d, 2026-07-31) there is no `trtllm-build` and no
`tensorrt` backend (TensorRT-LLM, docs/source/legacy/tensorrt-backend-removal.md@c83651ab), and no
Triton image has TensorRT-LLM. Backend `pytorch` goes on, in an image of TensorRT-LLM's own. Of 1.3
the candidates before that one are left out: between 1.2 and them the draft mode, what it samples
and the keys of draft_len_schedule changed one by one, and in which candidate was not found out.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, WithJsonSchema

from specpipe.config import messages
from specpipe.errors import ConfigError

EngineVersion = Literal["1.0.0", "1.1.0", "1.2.0", "1.2.1"]
"""The releases that build engines; all of them have backend `pytorch`, too."""

ENGINE_VERSIONS: tuple[str, ...] = get_args(EngineVersion)

DEFAULT_VERSION: EngineVersion = "1.2.1"

FIRST_WITHOUT_ENGINES = "1.3.0rc23"
"""The first release that only has backend `pytorch`, and the first such that specpipe knows."""

_WITHOUT_ENGINES = r"1\.[34]\.[0-9]{1,3}(rc[0-9]{1,3}|\.post[0-9]{1,3})?"

_PARTS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?")


def version_order(version: str) -> tuple[float, ...]:
    """Returns what sorts versions: 1.3.0rc22 before 1.3.0rc23 before 1.3.0; () for no version."""
    found = _PARTS.match(version)
    if found is None:
        return ()
    major, minor, micro, candidate = (None if n is None else int(n) for n in found.groups())
    return (major or 0, minor or 0, micro or 0, math.inf if candidate is None else candidate)


def is_without_engines(version: str) -> bool:
    """Whether a release is one of those that have backend `pytorch` only."""
    return version_order(version) >= version_order(FIRST_WITHOUT_ENGINES)


def _check_version(version: str) -> str:
    if version in ENGINE_VERSIONS or (
        re.fullmatch(_WITHOUT_ENGINES, version) and is_without_engines(version)
    ):
        return version
    choices = ", ".join(f"'{one}'" for one in ENGINE_VERSIONS)
    raise messages.broken_rule(
        "engine.tensorrt_llm.version",
        version,
        f"one of {choices}, or with backend pytorch a release of 1.3 or 1.4 from "
        f"{FIRST_WITHOUT_ENGINES} on",
    )


SupportedVersion = Annotated[
    str,
    AfterValidator(_check_version),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(ENGINE_VERSIONS), "type": "string"},
                {
                    "description": f"Of 1.3 or 1.4, from {FIRST_WITHOUT_ENGINES} on.",
                    "pattern": f"^{_WITHOUT_ENGINES}$",
                    "type": "string",
                },
            ]
        }
    ),
]
"""The releases that specpipe serves with, by either backend."""

_REGISTRY = "nvcr.io/nvidia/tritonserver"
_OWN_REGISTRY = "nvcr.io/nvidia/tensorrt-llm/release"


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
        raise ConfigError(
            f"TensorRT-LLM {version} is not known to build engines: "
            f"set engine.tensorrt_llm.version to one of {', '.join(ENGINE_VERSIONS)}"
        )
    return found


def serving_image(version: str) -> str:
    """Returns NVIDIA's image that has a release of `SupportedVersion`.

    Where there are no engines it is TensorRT-LLM's own, which has no Triton.
    """
    return f"{_OWN_REGISTRY}:{version}" if is_without_engines(version) else release(version).image


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
