"""Lines that Triton 2.51 and its models wrote, and which of them `specpipe serve` shows."""

from __future__ import annotations

import pytest

from specpipe.triton.server.log_lines import is_worth_showing

NEVER = [
    'I1128 23:20:01.348903 10790 model_lifecycle.cc:472] "loading: postprocessing:1"',
    "I1128 23:20:08.030920 10790 server.cc:604] ",
    "+------------------+------+",
    "| Repository Agent | Path |",
    "",
    "Signal (15) received.",
]
OF_A_GPU = [
    'W1128 23:20:01.345503 10790 pinned_memory_manager.cc:273] "Unable to allocate pinned system '
    'memory, pinned memory pool will not be available: CUDA driver version is insufficient"',
    'E1128 23:20:01.345782 10790 server.cc:241] "CudaDriverHelper has not been initialized."',
    'E1128 23:20:08.030506 10790 ensemble_scheduler.cc:1468] "unable to create stream for '
    'ensemble: CUDA driver version is insufficient for CUDA runtime version"',
    "Error: Failed to initialize NVML",
    'W1128 23:20:08.032885 10790 metrics.cc:798] "DCGM unable to start: DCGM initialization error"',
]
ALWAYS = [
    "E1128 23:20:08.030506 10790 model_lifecycle.cc:642] \"failed to load 'ensemble' version 1\"",
    "W1128 23:20:08.030506 10790 model_lifecycle.cc:111] \"ignore version directory 'x'\"",
    'I1128 23:20:08.030506 10790 model.py:40] "draft and target take 90 MB"',
    "Traceback (most recent call last):",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "[TensorRT-LLM][WARNING] the KV cache is small",
]


@pytest.mark.parametrize("has_gpu", [False, True])
def test_only_trouble_is_shown(has_gpu: bool) -> None:
    lines = [*NEVER, *OF_A_GPU, *ALWAYS]
    shown = [line for line in lines if is_worth_showing(line, has_gpu=has_gpu)]
    assert shown == ([*OF_A_GPU, *ALWAYS] if has_gpu else ALWAYS)
