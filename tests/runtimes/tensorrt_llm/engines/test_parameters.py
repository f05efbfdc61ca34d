"""What the section `engine.tensorrt_llm.parameters` takes, through the door of the config."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpipe.build.load import load_config
from specpipe.errors import ConfigError

_YAML = """name: pair
draft: {checkpoint: draft}
target: {checkpoint: target}
engine:
  runtime: tensorrt_llm
  tensorrt_llm:
    parameters:
      KEY: VALUE
"""


def load(folder: Path, key: str, value: str) -> object:
    path = folder / "pair.yaml"
    path.write_text(_YAML.replace("KEY", key).replace("VALUE", value))
    return getattr(load_config(path).engine.tensorrt_llm.parameters, key)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("max_tokens_in_paged_kv_cache", "65536", 65536),
        ("batch_scheduler_policy", "max_utilization", "max_utilization"),
        ("gpt_model_type", "inflight_batching", "inflight_batching"),
        ("kv_cache_host_memory_bytes", "1000000000", 10**9),
        ("cuda_graph_mode", "true", True),
        ("max_beam_width", "1", 1),
    ],
)
def test_accepted(tmp_path: Path, key: str, value: str, found: object) -> None:
    assert load(tmp_path, key, value) == found


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (
            "exclude_input_in_output",
            "true",
            "is true: expected false, since the pair asks for what it needs with every request",
        ),
        (
            "enable_kv_cache_reuse",
            "false",
            "is false: expected true, since an engine that verifies draft tokens does not load "
            "without it, and a draft would read the whole text again in each step",
        ),
        (
            "kv_cache_onboard_blocks",
            "false",
            "is false: expected true, since an engine with paged context FMHA does not load "
            "without it",
        ),
        (
            "max_beam_width",
            "2",
            "is 2: expected 1, since draft tokens are verified for one beam only",
        ),
        (
            "gpt_model_type",
            "V1",
            "is 'V1': expected 'inflight_fused_batching', since TensorRT-LLM 1.x refuses static "
            "batching",
        ),
        (
            "decoding_mode",
            "medusa",
            "is 'medusa': expected 'top_k_top_p', since any other ignores sampling settings of "
            "requests or needs another way to speculate",
        ),
        (
            "decoding_mode",
            "top_k",
            "is 'top_k': expected 'top_k_top_p', since any other ignores sampling settings of "
            "requests or needs another way to speculate",
        ),
        (
            "speculative_decoding_fast_logits",
            "true",
            "is true: expected false, since it works only where the orchestrator spawns no "
            "processes, which specpipe's does",
        ),
        (
            "gpu_device_ids",
            "'0,1'",
            "is '0,1': expected nothing here, since specpipe sets it: set "
            "engine.tensorrt_llm.draft_gpu_ids and target_gpu_ids",
        ),
        (
            "sink_token_length",
            "4",
            "is 4: expected nothing here, since specpipe sets it: StreamingLLM is not supported "
            "by TensorRT-LLM 1.x",
        ),
        (
            "medusa_choices",
            "'{0}'",
            "is '{0}': expected nothing here, since specpipe sets it: a draft model speculates "
            "here, not Medusa",
        ),
        ("gpu_weights_percent", "1.5", "is 1.5: expected a number from 0 to 1"),
    ],
)
def test_refused_with_the_reason(tmp_path: Path, key: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, key, value)
    assert str(caught.value) == (
        f"{tmp_path}/pair.yaml:8: engine.tensorrt_llm.parameters.{key} {expected}"
    )


def test_a_mistyped_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean engine.tensorrt_llm.parameters.cuda_graph"):
        load(tmp_path, "cuda_graph_modes", "true")
