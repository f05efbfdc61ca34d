"""Why `trtllm-build` or docker failed, read from what they printed.

The wording of TensorRT-LLM and TensorRT is that of their sources and of public reports of 0.5 to
1.1; a failure that none of it matches is reported by its last lines alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specpipe.roles import Role

NUM_SHOWN_LINES = 15


@dataclass(frozen=True)
class Cause:
    """A known failure.

    pattern  what a line of the log has; its groups may be named in the sentence
    sentence
             what it means and what to do; {role} is the engine's, {0} and {1} the pattern's groups
    """

    pattern: re.Pattern[str]
    sentence: str


def _cause(pattern: str, sentence: str) -> Cause:
    return Cause(re.compile(pattern, re.IGNORECASE), sentence)


CAUSES = (
    _cause(
        r"cannot connect to the docker daemon|permission denied while trying to connect to the "
        r"docker",
        "docker does not answer: start it, or give the calling user access to it",
    ),
    _cause(
        r"could not select device driver|nvidia-container-cli|unknown runtime.*nvidia|"
        r"unresolvable cdi devices",
        "docker cannot hand GPUs to containers: install NVIDIA's container toolkit, and check "
        "engine.tensorrt_llm.{role}_gpu_ids",
    ),
    _cause(
        r"manifest (?:for \S+ )?(?:unknown|not found)|pull access denied|repository does not exist|"
        r"no such image|error response from daemon:.*(?:not found|denied)",
        "the image cannot be had: check engine.tensorrt_llm.image, or log in to its registry",
    ),
    _cause(
        r"cuda driver version is insufficient|forward compatibility was attempted|"
        r"the nvidia driver on your system is too old|cuda_error_system_driver_mismatch",
        "the NVIDIA driver of this machine is too old for this release: update it, or set "
        "engine.tensorrt_llm.version to an older one",
    ),
    _cause(
        r"no cuda gpus are available|no cuda-capable device|invalid device ordinal|"
        r"cuda_visible_devices.*invalid",
        "the builder sees no such GPU: check engine.tensorrt_llm.{role}_gpu_ids against nvidia-smi",
    ),
    _cause(
        r"no space left on device|disk quota exceeded",
        "the disk is full: an engine takes as much room as its checkpoint; make room below "
        "output_dir",
    ),
    _cause(
        r"outofmemory|out of memory|amount of gpu memory .*could not be allocated",
        "the GPU ran out of memory: free it, or lower engine.max_num_tokens or "
        "engine.max_batch_size, or raise {role}.tp_size",
    ),
    _cause(
        r"trtllm-build: error: (.+)",
        "this TensorRT-LLM has another command line ({0}): check engine.tensorrt_llm.version "
        "against the image, and engine.tensorrt_llm.extra_build_args",
    ),
    _cause(
        r"paged (?:kv )?context fmha (?:does ?n.t work|is not supported|requires|must)|"
        r"(?:int8|fp8) kv cache .*paged context",
        "the KV cache's type does not go with paged context FMHA, which drafting needs: set "
        "{role}.quantization.kv_cache to null, or to fp8 with FP8 weights",
    ),
    _cause(
        r"not supported on sm|fp8 fmha cannot be enabled|unsupported sm|"
        r"(?:int8/int4 quantization|smoothquant|per-token scaling) is not supported|"
        r"could not find any implementation for node|no kernel image is available",
        "this GPU has no kernels for the format or for a flag: change {role}.quantization.format, "
        "or the plugins under engine.tensorrt_llm.build",
    ),
    _cause(
        r"unsupported model architecture:? *(\S*)|keyerror: '(\w+For\w+)'",
        "this TensorRT-LLM does not know the architecture {0}: set engine.tensorrt_llm.version to "
        "a newer one",
    ),
    _cause(
        r"required but not provided tensors",
        "the checkpoint lacks tensors that this TensorRT-LLM wants: check "
        "engine.tensorrt_llm.version against the image, and build again",
    ),
    _cause(
        r"unexpected keyword argument '(\w+)'|extra inputs are not permitted|"
        r"object has no attribute '(\w+)'",
        "this TensorRT-LLM reads the checkpoint's config.json otherwise ({0}): check "
        "engine.tensorrt_llm.version against the image",
    ),
    _cause(
        r"permissionerror: .*|mkdir: cannot create directory",
        "the builder may not write where it has to: check who owns output_dir",
    ),
)
"""Asked in this order; what names its cause more exactly stands first."""

_BY_KILL = (
    "the kernel killed it, which is how want of host memory looks: give the machine or the "
    "container more, or lower engine.tensorrt_llm.build.workers"
)
_KILLED = (-9, 137)


def explain(role: Role, exit_code: int, lines: Sequence[str]) -> str:
    """Returns the cause of a failure as a sentence, then the last lines of the log."""
    cause = _find(role, exit_code, lines) or f"it ended with exit code {exit_code}"
    shown = [line for line in lines if line.strip()][-NUM_SHOWN_LINES:]
    return cause + "".join(f"\n  {line}" for line in shown)


def _find(role: Role, exit_code: int, lines: Sequence[str]) -> str | None:
    for cause in CAUSES:
        for line in reversed(lines):
            match = cause.pattern.search(line)
            if match:
                groups = [group for group in match.groups() if group]
                return cause.sentence.format(*(groups or ["unknown"]), role=role)
    return _BY_KILL if exit_code in _KILLED else None
