"""The arguments of `LLM` and of the configs that specpipe makes; strict, as TensorRT-LLM's are."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, create_model, model_validator

from tests.tensorrt_llm_stand_ins.llm_api_lines import VERSION_VARIABLE, VERSIONS, line

VERSION = os.environ.get(VERSION_VARIABLE, VERSIONS["1.2"])
HERE = line(VERSION)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class KvCacheConfig(_Strict):
    free_gpu_memory_fraction: float | None = Field(default=None, ge=0, le=1)
    enable_block_reuse: bool = True


class _DraftTarget(_Strict):
    """What all lines have; the draft's folder is `speculative_model` here, whatever its name."""

    max_draft_len: int = Field(gt=0 if HERE.needs_draft_len else -1)
    speculative_model: str = Field(validation_alias=AliasChoices(*HERE.draft_names))

    @model_validator(mode="after")
    def _check_schedule(self) -> Any:
        schedule: dict[int, int] | None = getattr(self, "draft_len_schedule", None)
        if schedule is None:
            return self
        if any(size < 1 or length < 0 for size, length in schedule.items()):
            raise ValueError("draft_len_schedule: batch sizes are at least 1, lengths at least 0")
        if HERE.schedule_keys == "first" and 1 not in schedule:
            raise ValueError("draft_len_schedule must include batch_size=1")
        if schedule[min(schedule)] != self.max_draft_len:
            raise ValueError(f"draft_len_schedule[{min(schedule)}] must equal max_draft_len")
        if max(schedule.values()) > self.max_draft_len:
            raise ValueError("draft_len_schedule: all draft lengths must be <= max_draft_len")
        return self

    def levels(self) -> tuple[tuple[int, int], ...]:
        """The schedule by the first batch size of each length."""
        schedule = sorted((getattr(self, "draft_len_schedule", None) or {}).items())
        if HERE.schedule_keys == "first" or not schedule:
            return tuple(schedule)
        firsts = [1, *(size + 1 for size, _ in schedule)]
        return tuple(zip(firsts, [*(length for _, length in schedule), 0], strict=True))


DraftTargetDecodingConfig: Any = create_model(
    "DraftTargetDecodingConfig",
    __base__=_DraftTarget,
    **{name: (kind | None, None) for name, kind in HERE.fields.items()},
)


PARDDecodingConfig: Any = create_model(
    "PARDDecodingConfig",
    __base__=_DraftTarget,
    **{
        name: (kind | None, None)
        for name, kind in {
            **HERE.fields,
            "mask_token_id": int,
            "decoding_type": Literal["PARD"],
        }.items()
    },
)


class TorchLlmArgs(_Strict):
    """The keyword arguments of `LLM` that specpipe may use, of the many that it takes.

    All lines have them: as its page in the documentation of 1.4.0rc4 shows, and llm_args.py before.
    """

    backend: Literal[HERE.backends] = "pytorch"  # type: ignore[valid-type]
    pipeline_parallel_size: int = 1
    max_batch_size: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    kv_cache_config: KvCacheConfig | None = None
    speculative_config: DraftTargetDecodingConfig | PARDDecodingConfig | None = None
