from __future__ import annotations

import pytest

from specpipe.runtimes.tensorrt_llm.engines.trtllm_build_log import NUM_SHOWN_LINES, explain

MEMORY = (
    "the GPU ran out of memory: free it, or lower engine.max_num_tokens or engine.max_batch_size,"
    " or raise target.tp_size"
)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", "docker does not"),
        (
            'Error response from daemon: could not select device driver "" with: [[gpu]]',
            "docker cannot hand GPUs to containers",
        ),
        (
            "docker: Error response from daemon: manifest for a/b:c not found: manifest unknown",
            "the image cannot be had: check engine.tensorrt_llm.image",
        ),
        (
            "CUDA driver version is insufficient for CUDA runtime version",
            "the NVIDIA driver of this machine is too old for this release",
        ),
        ("RuntimeError: No CUDA GPUs are available", "the builder sees no such GPU"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("[E] Error Code 2: OutOfMemory (Requested size was 4096 bytes.)", MEMORY),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", MEMORY),
        (
            "trtllm-build: error: unrecognized arguments: --x 3",
            "this TensorRT-LLM has another command line (unrecognized arguments: --x 3)",
        ),
        (
            "RuntimeError: Paged Context FMHA doesn't work with int8 kv cache currently.",
            "the KV cache's type does not go with paged context FMHA, which drafting needs: set"
            " target.quantization.kv_cache",
        ),
        (
            "NotImplementedError: fp8_rowwise_gemm_plugin=auto is not supported on SM 100.",
            "this GPU has no kernels for the format or for a flag",
        ),
        (
            "Could not find any implementation for node {ForeignNode[a]}",
            "this GPU has no kernels for the format or for a flag",
        ),
        (
            "AssertionError: Unsupported model architecture: Qwen9ForCausalLM",
            "this TensorRT-LLM does not know the architecture Qwen9ForCausalLM",
        ),
        (
            "KeyError: 'Qwen2ForCausalLM'",
            "this TensorRT-LLM does not know the architecture Qwen2ForCausalLM",
        ),
        (
            "RuntimeError: Required but not provided tensors:{'a.b'}",
            "the checkpoint lacks tensors that this TensorRT-LLM wants",
        ),
        (
            "TypeError: QuantConfig.__init__() got an unexpected keyword argument 'x_y'",
            "this TensorRT-LLM reads the checkpoint's config.json otherwise (x_y)",
        ),
        ("PermissionError: [Errno 13] Permission denied: '/x'", "the builder may not write"),
    ],
)
def test_known_causes(line: str, sentence: str) -> None:
    told = explain("target", 1, ["starting", line, "Traceback", ""])
    assert told.startswith(sentence)
    assert told.endswith(f"\n  starting\n  {line}\n  Traceback")


def test_a_kill_is_taken_for_want_of_host_memory() -> None:
    for exit_code in (-9, 137):
        assert explain("draft", exit_code, ["x"]) == (
            "the kernel killed it, which is how want of host memory looks: give the machine or"
            " the container more, or lower engine.tensorrt_llm.build.workers\n  x"
        )


def test_unknown_failures_keep_their_exit_code_and_last_lines() -> None:
    lines = [f"line {number}" for number in range(40)]
    told = explain("draft", 3, lines).splitlines()
    assert told[0] == "it ended with exit code 3"
    assert told[1] == "  line 25"
    assert len(told) == 1 + NUM_SHOWN_LINES


def test_docker_is_named_before_what_ran_inside() -> None:
    lines = ["Cannot connect to the Docker daemon", "out of memory"]
    assert explain("draft", 1, lines).startswith("docker does not answer")
