"""The section `engine` of the YAML: one model a runtime, of which `runtime` chooses; none: torch.

What a runtime leaves no choice of is a constant of its model, and no setting.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter

from specpipe.config import messages
from specpipe.config.tensorrt_llm import TensorRTLLMConfig
from specpipe.section import Section

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

Device = Literal["auto", "cpu", "cuda"]

ComputeCapability = Literal["8.0", "8.6", "8.9", "12.0", "12.1"]
"""What TensorRT for RTX builds for; 7.5 has no bfloat16."""


MemorySize = Annotated[
    str,
    Field(
        pattern=r"^[0-9]{1,6}(\.[0-9]{1,3})? ?[MGT]i?B$",
        description='A size, as "8GB" or "7.5 GiB".',
    ),
]


class _EngineConfig(Section):
    """What every runtime is told."""

    runtime: str
    """The library that builds and runs the engines."""

    max_batch_size: int = Field(default=8, ge=1)
    """Requests that run at once; more wait in the queue."""

    max_seq_len: int | None = Field(default=None, ge=2)
    """Tokens of prompt and answer together; none: the target's context length, up to 4096."""


class TorchEngineConfig(_EngineConfig):
    """What runtime torch builds, and what it must hold at once."""

    runtime: Literal["torch"] = "torch"
    """PyTorch builds and runs the engines, on a CPU or a GPU."""

    max_num_tokens: int = Field(default=256, ge=1)
    """Tokens of all requests in one forward; longer prompts come in chunks. A CPU is better off
    with short forwards; fused kernels on a GPU read long prompts faster with 1024, and others do
    not wait longer for that."""

    dtype: Dtype = "auto"
    """What the engines compute in; auto: the checkpoint's own, but float32 on a CPU."""

    device: Device = "auto"
    """Where the engines run; auto: the GPU where there is one."""

    kernels: Literal["auto", "fused", "plain"] = "auto"
    """What computes on a GPU: fused kernels with CUDA graphs, or torch's own operations; auto:
    fused where they run the pair."""

    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engines; none: all cores but one, which is left to Triton."""

    kv_cache_memory: MemorySize | None = Field(default=None, json_schema_extra={"since": "0.2.0"})
    """GPU memory of both KV caches together, as "8GB", of which the fused kernels give requests as
    much as they have tokens; none: what max_batch_size requests of max_seq_len tokens need."""

    prefix_reuse: bool = Field(default=True, json_schema_extra={"since": "0.2.0"})
    """Whether prompts that begin alike share what the fused kernels cached of that, as long as
    nothing else needs the room."""

    @property
    def kv_cache_bytes(self) -> int | None:
        """The memory of both KV caches in bytes; none where it is not set."""
        if self.kv_cache_memory is None:
            return None
        return TypeAdapter(ByteSize).validate_python(self.kv_cache_memory)


class TensorRTEngineConfig(_EngineConfig):
    """What runtime tensorrt builds, and what it must hold at once."""

    runtime: Literal["tensorrt"]
    """TensorRT builds and runs the engines, on GPUs of NVIDIA's."""

    max_num_tokens: int = Field(default=1024, ge=1)
    """Tokens of all requests in one forward; longer prompts come in chunks."""

    dtype: Dtype = "auto"
    """What the engines compute in; auto: the checkpoint's own."""

    library: Literal["tensorrt_rtx", "tensorrt"] = "tensorrt_rtx"
    """TensorRT for RTX, which builds without a GPU, or TensorRT, which builds for the GPU that it
    finds."""

    compute_capabilities: tuple[ComputeCapability, ...] = Field(
        default=get_args(ComputeCapability), min_length=1, strict=False
    )
    """Compute capabilities of the GPUs that engines of library tensorrt_rtx are to run on, as
    ["8.9", "12.0"]."""

    weights: Literal["inside", "beside"] = "inside"
    """Whether weights are in the engine, or in a file beside it, so that other weights of the same
    shape need no new engine."""

    weight_streaming: bool = False
    """Whether weights may stay in host memory, for a model that the GPU cannot hold."""

    device: ClassVar[Device] = "auto"
    num_threads: ClassVar[int | None] = None
    kv_cache_memory: ClassVar[str | None] = None
    prefix_reuse: ClassVar[bool] = False


class TensorRTLLMEngineConfig(_EngineConfig):
    """What runtime tensorrt_llm builds, and what it must hold at once."""

    runtime: Literal["tensorrt_llm"]
    """TensorRT-LLM builds the engines, or loads the checkpoints, and runs them on NVIDIA's GPUs."""

    max_num_tokens: int = Field(default=8192, ge=1)
    """Tokens of all requests in one forward, as many as trtllm-build takes by itself; longer
    prompts come in chunks."""

    tensorrt_llm: TensorRTLLMConfig = TensorRTLLMConfig()
    """TensorRT-LLM's own settings: how it builds and serves the pair."""

    dtype: ClassVar[Dtype] = "auto"
    device: ClassVar[Device] = "auto"
    num_threads: ClassVar[int | None] = None
    kv_cache_memory: ClassVar[str | None] = None
    prefix_reuse: ClassVar[bool] = False


ENGINE_SECTIONS: dict[str, type[Section]] = {
    "torch": TorchEngineConfig,
    "tensorrt": TensorRTEngineConfig,
    "tensorrt_llm": TensorRTLLMEngineConfig,
}
"""What the section is, by its runtime."""


def _name_runtime(data: Any) -> Any:
    """Refuses a runtime that there is not, and says which is meant where none is named."""
    if not isinstance(data, dict):
        return data
    runtime = data.get("runtime", "torch")
    if runtime not in tuple(ENGINE_SECTIONS):  # it may be a list, which has no hash
        expected = f"one of {', '.join(map(repr, ENGINE_SECTIONS))}"
        raise messages.broken_rule("engine.runtime", runtime, expected)
    return {**data, "runtime": runtime}


EngineConfig = Annotated[
    TorchEngineConfig | TensorRTEngineConfig | TensorRTLLMEngineConfig,
    Field(discriminator="runtime"),
    BeforeValidator(_name_runtime),
]
