"""What the LLM API's release lines do differently, as far as a caller can tell, and who says so.

A row has a value for each of `VERSIONS`, and where it was read: NVIDIA/TensorRT-LLM, by file and
commit, by the number of a stored text (id), by pull request, or by the page of its documentation.
The line 1.3 is that of its late candidates (1.3.0rc29), the first that specpipe knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import Field

VERSIONS = {
    "1.0": "1.0.0",
    "1.1": "1.1.0",
    "1.2": "1.2.1",
    "1.3": "1.3.0rc29",
    "1.4": "1.4.0rc4",
}
"""The release that stands for each line."""

VERSION_VARIABLE = "FAKE_TENSORRT_LLM_VERSION"
"""Names the release to stand in for, one of VERSIONS; none: that of 1.2."""

_Positive = Annotated[int, Field(gt=0)]
_Count = Annotated[int, Field(ge=0)]

_TWO_ENGINES = {
    "max_total_draft_tokens": int,
    "max_concurrency": _Count,
    "draft_len_schedule": dict[int, int],
    "load_format": str,
    "acceptance_window": _Count,
    "acceptance_length_threshold": Annotated[float, Field(ge=0)],
    "allow_advanced_sampling": bool,
    "decoding_type": Literal["Draft_Target"],
}
_ONE_ENGINE = {
    "max_total_draft_tokens": int,
    "moe_backend": str,
    "max_concurrency": _Positive,
    "draft_len_schedule": dict[int, int],
    "load_format": str,
    "acceptance_rate_window_size": _Count,
    "acceptance_rate_threshold": Annotated[float, Field(ge=0, le=1)],
    "use_rejection_sampling": bool,
    "allow_advanced_sampling": bool,
    "advanced_sampling_mode": str,
    "enable_penalty": bool,
    "decoding_type": Literal["Draft_Target"],
}
_1_4 = _ONE_ENGINE | {"spec_dec_variant": _Positive, "moe_tactic": str}


@dataclass(frozen=True)
class Difference:
    """One thing, its value in each of VERSIONS, and the source of each value."""

    values: tuple[Any, Any, Any, Any, Any]
    source: str


_DIR = ("speculative_model_dir",)
_MODEL = ("speculative_model", "speculative_model_dir")

DIFFERENCES = {
    # The names of the draft's folder in DraftTargetDecodingConfig.
    "draft_names": Difference(
        (_DIR, _DIR, _MODEL, _MODEL, _MODEL),
        "llmapi/llm_args.py: id 1090804222 (1.0, 1.1), id 7019226376 (1.2), id 55143598664 (1.3)",
    ),
    # Its other fields, beside max_draft_len, with their types.
    "fields": Difference(
        ({}, {}, _TWO_ENGINES, _ONE_ENGINE, _1_4),
        "llmapi/llm_args.py: id 1090804222, id 7019226376; documentation of 1.3.0rc29 "
        "(llm-api/reference/AutoDecodingConfig.html) and 1.4.0rc4 (SADecodingConfig.html), for the "
        "fields of their common base; spec_dec_variant from 1.4.0rc1, moe_tactic from 1.4.0rc4 on",
    ),
    # Whether max_draft_len must be above 0.
    "needs_draft_len": Difference(
        (False, False, False, True, True), "llmapi/llm_args.py: id 55143598664"
    ),
    # What the keys of draft_len_schedule are: the first batch size of a length, or the last.
    "schedule_keys": Difference(
        (None, None, "first", "last", "last"),
        "llmapi/llm_args.py: id 7019226376, id 55143598664; PR #10860 (2026-03-13)",
    ),
    # Where the draft runs, which decides what is below.
    "is_one_engine": Difference(
        (False, False, False, True, True), "PR #11758 (2026-03), tests in id 62557768214"
    ),
    # Families of targets that can be drafted for; None: all.
    "targets": Difference(
        (None, None, None, *[("LlamaForCausalLM", "Qwen3ForCausalLM")] * 2),
        "_torch/models/modeling_llama.py: id 426411151, modeling_qwen3.py: id 2464033405, "
        "modeling_qwen.py@87b279a9, modeling_mistral.py: id 52281727364, "
        "the loader: id 54640543954",
    ),
    # Whether the draft's KV cache must be of the target's dtype. TensorRT-LLM overwrites it without
    # a word; what stands in for it refuses, so that no test depends on it unseen.
    "has_one_kv_dtype": Difference(
        (False, False, False, True, True), "_torch/models/modeling_speculative.py: id 51970737270"
    ),
    # Whether there is PARDDecodingConfig, for a draft that proposes in one pass.
    "has_parallel": Difference(
        (False, False, False, True, True),
        "PR #11438 (in 1.3.0rc7); _torch/speculative/pard.py: id 66807157793",
    ),
    # Whether requests may ask for log-probabilities although there is a draft.
    "has_log_probs": Difference((True, True, True, False, False), "PR #18401 (2026-08-29)"),
    # Inputs of sampling that have an effect, and those that are refused with a draft.
    "applied": Difference(
        ((), *[("temperature", "top_k", "top_p")] * 4),
        "_torch/pyexecutor/sampler.py (1.0), sampling_utils.py (1.1), "
        "_torch/speculative, SpecSampler.validate_request: id 57364433433 (1.3)",
    ),
    "refused": Difference(
        ((), (), (), *[("min_p", "min_tokens", "bad_token_ids", "no_repeat_ngram_size")] * 2),
        "SpecSampler.validate_request: id 57364433433",
    ),
    # Whether enable_penalty lets penalties in; without it they are refused, and before ignored.
    "has_penalties": Difference(
        (False, False, False, True, True), "PR #17701 (2026-08-14), id 57364433433"
    ),
    # Whether request_perf_metrics count draft tokens.
    "fills_metrics": Difference((False, False, False, True, True), "PR #17082 (2026-07-30)"),
    # What `backend` takes.
    "backends": Difference(
        (*[("pytorch", "tensorrt", "_autodeploy")] * 3, *[("pytorch", "_autodeploy")] * 2),
        "docs/source/legacy/tensorrt-backend-removal.md@c83651ab",
    ),
}

UNKNOWN_FAMILIES = ("Gemma2ForCausalLM",)
"""In no line: _torch/models/_arch_index.py@065ff9e9."""


def line(version: str) -> Any:
    """Returns the column of a release's line: its values by the names of DIFFERENCES."""
    column = [*VERSIONS.values()].index(version)
    return SimpleNamespace(**{name: row.values[column] for name, row in DIFFERENCES.items()})
