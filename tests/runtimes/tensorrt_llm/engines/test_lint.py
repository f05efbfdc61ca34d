"""Each rule for models of the backend `tensorrtllm`, on a repository that breaks it alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from specpipe.runtimes.config_pbtxt import read_config
from specpipe.triton.repository import lint
from tests.runtimes.tensorrt_llm.engines.folders import engine_json, package, pair_options

Edit = Callable[[pb.ModelConfig], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return package(tmp_path)


def edit(folder: Path, model: str, change: Edit) -> None:
    path = folder / model / "config.pbtxt"
    config = read_config(path)
    change(config)
    path.write_text(text_format.MessageToString(config))


def set_to(key: str, value: str) -> Edit:
    return lambda config: setattr(config.parameters[key], "string_value", value)


def tensor(tensors: Any, name: str) -> Any:
    return next(tensor for tensor in tensors if tensor.name == name)


def rebuild(folder: Path, role: str, **changes: Any) -> None:
    """Replaces the `config.json` of an engine, in both of its places."""
    for place in (folder / role / "1" / "engine", folder / "speculative" / "1" / role):
        path = place / "config.json"
        path.unlink()  # a link to the engine's own
        path.write_text(json.dumps(engine_json(role, **changes)))  # type: ignore[arg-type]


BROKEN_CONFIGS: list[tuple[str, Edit, str]] = [
    (
        "draft",
        lambda c: c.parameters.pop("tokenizer_dir"),
        "draft: parameter tokenizer_dir is missing; the backend needs it, if empty",
    ),
    (
        "draft",
        lambda c: c.parameters.pop("xgrammar_tokenizer_info_path"),
        "draft: parameter xgrammar_tokenizer_info_path is missing; the backend needs it, if empty",
    ),
    (
        "target",
        set_to("enable_kv_cache_resue", "true"),
        "target: the backend knows no parameter enable_kv_cache_resue; did you mean "
        "enable_kv_cache_reuse?",
    ),
    (
        "target",
        set_to("worker_path", "/opt/worker"),
        "target: the backend knows no parameter worker_path; did you mean executor_worker_path?",
    ),
    (
        "target",
        set_to("enable_kv_cache_reuse", "yes"),
        "target: enable_kv_cache_reuse is 'yes', which the backend does not read as true or false",
    ),
    (
        "target",
        set_to("kv_cache_free_gpu_mem_fraction", "half"),
        "target: kv_cache_free_gpu_mem_fraction is 'half', which the backend does not read as a "
        "number",
    ),
    (
        "target",
        set_to("max_attention_window_size", "512,"),
        "target: max_attention_window_size is '512,', which the backend does not read as numbers",
    ),
    (
        "target",
        set_to("enable_kv_cache_reuse", "FALSE"),
        "target: enable_kv_cache_reuse is false; it must be true, since each step of a pair reads "
        "the text again",
    ),
    (
        "draft",
        set_to("exclude_input_in_output", "1"),
        "draft: exclude_input_in_output is true; it must be false, since callers count on the "
        "prompt where they ask for it",
    ),
    (
        "draft",
        set_to("max_beam_width", "2"),
        "draft: max_beam_width is 2; it must be 1, since draft tokens are verified for one beam",
    ),
    (
        "target",
        set_to("decoding_mode", "medusa"),
        "target: decoding_mode is medusa; it must be top_k_top_p, since another ignores settings "
        "of requests",
    ),
    (
        "target",
        set_to("decoding_mode", "topk"),
        "target: decoding_mode is 'topk'; it must be one of top_k, top_p, top_k_top_p, "
        "beam_search, medusa, redrafter, lookahead, eagle",
    ),
    (
        "target",
        set_to("cross_kv_cache_fraction", "0.5"),
        "target: cross_kv_cache_fraction is 0.5; it must be empty, since a decoder-only engine "
        "does not load else",
    ),
    (
        "target",
        set_to("gpt_model_type", "V1"),
        "target: gpt_model_type is 'V1'; it must be 'inflight_fused_batching'",
    ),
    (
        "target",
        lambda c: c.parameters.pop("gpt_model_type"),
        "target: gpt_model_type is ''; it must be 'inflight_fused_batching'",
    ),
    (
        "target",
        set_to("gpt_model_path", "/engines/target"),
        "target: gpt_model_path '/engines/target' leads out of the repository",
    ),
    (
        "target",
        set_to("gpt_model_path", ""),
        "target: gpt_model_path is empty; it must name the engine's folder",
    ),
    (
        "target",
        set_to("gpu_device_ids", "0,1"),
        "target: gpu_device_ids is 0,1; the engine has 1 rank, each of which needs one",
    ),
    (
        "target",
        set_to("max_tokens_in_paged_kv_cache", "256"),
        "target: max_tokens_in_paged_kv_cache is 256, less than the 516 tokens of one sequence, "
        "which the backend would shorten",
    ),
    (
        "target",
        set_to("max_attention_window_size", "516,256"),
        "target: max_attention_window_size is 516,256, less than max_seq_len 516: the KV cache is "
        "not reused past a window; build the engine for shorter sequences",
    ),
    (
        "target",
        lambda c: setattr(c, "max_batch_size", 16),
        "target: max_batch_size is 16; it must be 1 to 8, which the engine was built with",
    ),
    (
        "target",
        lambda c: setattr(c, "max_batch_size", 0),
        "target: max_batch_size is 0; it must be 1 to 8, which the engine was built with",
    ),
    (
        "draft",
        lambda c: setattr(c, "max_batch_size", 4),
        "speculative: max_batch_size is 8, but the model draft takes 4",
    ),
    (
        "draft",
        lambda c: setattr(c.instance_group[0], "count", 2),
        "draft: instance_group has 2 instances; each would load the engine again",
    ),
    (
        "draft",
        lambda c: setattr(c.model_transaction_policy, "decoupled", True),
        "speculative: model_transaction_policy.decoupled of draft is true; its answers come whole",
    ),
    (
        "speculative",
        lambda c: setattr(c.model_transaction_policy, "decoupled", False),
        "speculative: model_transaction_policy.decoupled is false, but it calls target, where it "
        "is true",
    ),
    (
        "target",
        lambda c: setattr(tensor(c.output, "generation_logits"), "data_type", pb.TYPE_FP16),
        "target: output 'generation_logits' is TYPE_FP16, but the engine's logits are TYPE_FP32",
    ),
    (
        "target",
        lambda c: setattr(tensor(c.input, "seed"), "data_type", pb.TYPE_INT64),
        "target: input 'seed' is TYPE_INT64, but the backend takes TYPE_UINT64",
    ),
    (
        "target",
        lambda c: setattr(tensor(c.input, "min_tokens"), "name", "min_length"),
        "target: TensorRT-LLM 1.2.1 has no input 'min_length'",
    ),
    (
        "target",
        lambda c: setattr(tensor(c.input, "draft_input_ids"), "name", "draft_ids"),
        "target: the input 'draft_input_ids' of TensorRT-LLM 1.2.1 is missing",
    ),
]


@pytest.mark.parametrize(("model", "change", "fault"), BROKEN_CONFIGS)
def test_a_broken_config_is_found(folder: Path, model: str, change: Edit, fault: str) -> None:
    edit(folder, model, change)
    assert fault in lint.lint(folder)


BROKEN_ENGINES: list[tuple[str, dict[str, Any], str]] = [
    (
        "target",
        {"speculative_decoding_mode": 1, "max_draft_len": 0},
        "speculative: target: it verifies no draft tokens (speculative_decoding_mode none, "
        "max_draft_len 0): build it with speculation.num_draft_tokens of at least 1",
    ),
    (
        "target",
        {"max_draft_len": 3},
        "speculative: target: it verifies at most 3 draft tokens, but "
        "speculation.num_draft_tokens is 4: lower that, or build it again",
    ),
    (
        "draft",
        {"speculative_decoding_mode": 8},
        "speculative: draft: speculative_decoding_mode is lookahead_decoding, but a draft "
        "speculates by itself",
    ),
    (
        "draft",
        {"use_paged_context_fmha": False},
        "speculative: draft: use_paged_context_fmha is off, which drafting needs: remove what "
        "switches it off from engine.tensorrt_llm.extra_build_args",
    ),
    (
        "target",
        {"kv_cache_type": "CONTINUOUS"},
        "speculative: target: kv_cache_type is CONTINUOUS, but drafting needs PAGED: remove it "
        "from engine.tensorrt_llm.extra_build_args",
    ),
    (
        "draft",
        {"version": "1.1.0"},
        "speculative: the draft was built by TensorRT-LLM 1.1.0, the target by 1.2.1: build them "
        "with one engine.tensorrt_llm.version",
    ),
    (
        "draft",
        {"max_seq_len": 256},
        "speculative: max_seq_len is 512, but the draft engine was built with max_seq_len 256, so "
        "the draft would stop drafting there; build it with a higher one",
    ),
    (
        "target",
        {"sliding_window": 256},
        "target: the checkpoint has a sliding window of 256 tokens, but the engine was built with "
        "max_seq_len 516, and would attend past it; lower engine.max_seq_len",
    ),
    (
        "target",
        {"logits_dtype": "float16"},
        "target: input 'draft_logits' is TYPE_FP32, but the engine's logits are TYPE_FP16",
    ),
    (
        "target",
        {"logits_dtype": "bfloat16"},
        "target: the engine gives its logits in bfloat16, which TensorRT-LLM's Triton backend "
        "does not know: build it with engine.tensorrt_llm.build.logits_dtype float32",
    ),
]


@pytest.mark.parametrize(("role", "changes", "fault"), BROKEN_ENGINES)
def test_an_engine_that_does_not_fit_is_found(
    folder: Path, role: str, changes: dict[str, Any], fault: str
) -> None:
    rebuild(folder, role, **changes)
    assert fault in lint.lint(folder)


def test_a_draft_whose_model_reaches_no_further_is_fine(folder: Path) -> None:
    rebuild(folder, "draft", max_seq_len=256, max_position_embeddings=256)
    assert lint.lint(folder) == []


def test_vocabularies_may_differ_by_padding_unless_logits_are_compared(tmp_path: Path) -> None:
    folder = package(tmp_path)
    rebuild(folder, "target", vocab_size=320)
    assert lint.lint(folder) == []
    compared = tmp_path / "compared"
    compared.mkdir()
    folder = package(compared, pair_options(acceptance="logits"), gather_generation_logits=True)
    assert lint.lint(folder) == []
    rebuild(folder, "target", vocab_size=320, gather_generation_logits=True)
    assert lint.lint(folder) == [
        "speculative: the draft's vocabulary has 256 rows, the target's 320, but comparing logits "
        "needs equal ones: set engine.tensorrt_llm.acceptance to exact"
    ]


def test_without_chunks_a_prompt_fits_into_one_forward(folder: Path) -> None:
    edit(folder, "draft", set_to("enable_chunked_context", ""))
    assert lint.lint(folder) == []
    rebuild(folder, "draft", max_num_tokens=256)
    assert lint.lint(folder) == [
        "draft: enable_chunked_context is not true, so prompts longer than max_num_tokens 256 "
        "would not run"
    ]


def test_every_rank_has_its_file(tmp_path: Path) -> None:
    mapping = {"world_size": 2, "tp_size": 2, "pp_size": 1}
    options = pair_options(draft_gpu_ids=[0, 1], target_gpu_ids=[0, 1])
    folder = package(tmp_path, options, mapping=mapping)
    assert lint.lint(folder) == []
    engine = folder / "target" / "1" / "engine"
    (engine / "rank1.engine").rename(engine / "rank2.engine")
    assert lint.lint(folder) == [
        f"target: {engine}/rank1.engine is missing",
        f"target: {engine}/rank2.engine belongs to no rank; the engine was built for 2",
    ]


def test_an_engine_that_is_gone_is_found(folder: Path) -> None:
    shutil.rmtree(folder / "draft" / "1" / "engine")
    assert lint.lint(folder) == [
        f"draft: {folder}/draft/1/engine has no config.json: build the engine again",
        "speculative: it calls the model draft, which is not there or has no engine",
    ]


def test_nvidia_s_own_pair_may_not_mix_decoupled_and_not(folder: Path) -> None:
    """The engine model streams, the model that calls it does not."""
    model = folder / "tensorrt_llm_bls"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text("")
    (model / "config.pbtxt").write_text(
        'name: "tensorrt_llm_bls" backend: "python" max_batch_size: 8\n'
        'parameters { key: "tensorrt_llm_model_name" value { string_value: "target" } }\n'
        'parameters { key: "tensorrt_llm_draft_model_name" value { string_value: "draft" } }\n'
    )
    assert lint.lint(folder) == [
        "tensorrt_llm_bls: model_transaction_policy.decoupled is false, but it calls target, where "
        "it is true"
    ]
