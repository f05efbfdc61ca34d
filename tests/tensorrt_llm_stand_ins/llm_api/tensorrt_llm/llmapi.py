"""The configs of tensorrt_llm.llmapi that specpipe makes; strict, as TensorRT-LLM's are."""

from __future__ import annotations

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

LLM_ARGUMENTS = frozenset(
    {
        "backend",
        "pipeline_parallel_size",
        "max_batch_size",
        "max_seq_len",
        "max_num_tokens",
        "enable_chunked_prefill",
        "disable_overlap_scheduler",
        "kv_cache_config",
        "speculative_config",
    }
)
"""Those that specpipe may use, of the many that `LLM` takes."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DraftTargetDecodingConfig(_Strict):
    max_draft_len: int = Field(gt=0)
    speculative_model: str = Field(
        validation_alias=AliasChoices("speculative_model", "speculative_model_dir")
    )


class KvCacheConfig(_Strict):
    free_gpu_memory_fraction: float | None = None
    enable_block_reuse: bool = True
