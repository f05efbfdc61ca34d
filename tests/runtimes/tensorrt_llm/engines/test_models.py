"""The models `draft` and `target`: what is planned for them, and what packaging writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from specpipe.build import cache
from specpipe.build.pairing import check_pair
from specpipe.build.stages.package import Package
from specpipe.errors import EngineBuildError, RepositoryError
from specpipe.runtimes import runtime as base
from specpipe.runtimes.config_pbtxt import read_config
from specpipe.runtimes.tensorrt_llm import TensorRTLLMRuntime
from specpipe.runtimes.tensorrt_llm.engines import models
from specpipe.triton.repository import lint
from tests.runtimes.tensorrt_llm.engines.folders import package, pair_options, write_engine
from tests.runtimes.tensorrt_llm.plans import LLAMA_1B, MISTRAL_7B, plan

ROOT = Path(__file__).parents[4]


def parameters(folder: Path, role: str) -> dict[str, str]:
    config = read_config(folder / role / "config.pbtxt")
    return {key: value.string_value for key, value in config.parameters.items()}


def test_settings_of_a_pair(tmp_path: Path) -> None:
    pair = plan(
        tmp_path,
        target_checkpoint={"tp_size": 2},
        tensorrt_llm={"target_gpu_ids": [1, 2], "parameters": {"multi_block_mode": False}},
    )
    settings = dict(models.serving_settings(pair))
    assert settings.pop("parameters")["multi_block_mode"] is False
    assert settings == {
        "backend": "tensorrt",
        "tensorrt_llm": "1.2.1",
        "acceptance": "exact",
        "kv_cache_free_gpu_mem_fraction": 0.9,
        "draft_world_size": 1,
        "draft_gpu_ids": [0],
        "draft_kv_cache_tokens": 33024,
        "draft_attention_windows": None,
        "target_world_size": 2,
        "target_gpu_ids": [1, 2],
        "target_kv_cache_tokens": 33280,
        "target_attention_windows": None,
    }
    assert json.loads(json.dumps(models.serving_settings(pair))) == models.serving_settings(pair)


def test_a_fraction_of_the_config_is_the_ceiling(tmp_path: Path) -> None:
    pair = plan(tmp_path, tensorrt_llm={"kv_cache_free_gpu_mem_fraction": 0.5})
    assert models.serving_settings(pair)["kv_cache_free_gpu_mem_fraction"] == 0.5


def test_sliding_windows_are_planned_and_checked(tmp_path: Path) -> None:
    pair = plan(tmp_path, draft=LLAMA_1B, target=MISTRAL_7B, max_seq_len=4092)
    assert models.serving_settings(pair)["target_attention_windows"] == [4096] * 32
    longer = plan(tmp_path, draft=LLAMA_1B, target=MISTRAL_7B, max_seq_len=4093)
    with pytest.raises(EngineBuildError, match="set engine.max_seq_len to at most 4092$"):
        models.serving_settings(longer)


def test_the_tree(tmp_path: Path) -> None:
    folder = package(tmp_path)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {file for file in files if file.startswith(("draft", "target"))} == {
        "draft/config.pbtxt",
        "draft/1/engine/config.json",
        "draft/1/engine/rank0.engine",
        "draft/1/engine/specpipe.json",
        "target/config.pbtxt",
        "target/1/engine/config.json",
        "target/1/engine/rank0.engine",
        "target/1/engine/specpipe.json",
    }
    assert {"speculative/1/draft/config.json", "speculative/1/target/config.json"} <= files
    engine = tmp_path / "engines" / "target"
    assert (folder / "target" / "1" / "engine" / "rank0.engine").samefile(engine / "rank0.engine")
    assert (engine / "model.cache").read_bytes() == b"timing"
    assert lint.lint(folder) == []


def test_the_config_of_an_engine_model(tmp_path: Path) -> None:
    config = read_config(package(tmp_path) / "target" / "config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == ("target", "tensorrtllm", 8)
    assert list(config.dynamic_batching.preferred_batch_size) == [8]
    assert config.dynamic_batching.max_queue_delay_microseconds == 0
    assert config.dynamic_batching.HasField("default_queue_policy")
    assert [(group.count, group.kind) for group in config.instance_group] == [
        (1, pb.ModelInstanceGroup.KIND_CPU)
    ]
    tensors = {tensor.name: tensor for tensor in config.input}
    assert (len(tensors), len(config.output)) == (62, 21)
    assert tensors["draft_logits"].data_type == pb.TYPE_FP32
    assert tensors["draft_logits"].allow_ragged_batch
    assert tensors["request_output_len"].HasField("reshape")
    assert list(tensors["request_output_len"].reshape.shape) == []
    assert not tensors["request_output_len"].optional
    assert not tensors["stop_words_list"].HasField("reshape")
    assert list(tensors["stop_words_list"].dims) == [2, -1]


def test_the_target_streams_and_the_draft_does_not(tmp_path: Path) -> None:
    folder = package(tmp_path)
    assert {
        role: read_config(folder / role / "config.pbtxt").model_transaction_policy.decoupled
        for role in ("draft", "target")
    } == {"draft": False, "target": True}


def test_every_parameter_is_written(tmp_path: Path) -> None:
    options = pair_options(target_world_size=2, target_gpu_ids=[1, 2])
    folder = package(tmp_path, options, mapping={"world_size": 2, "tp_size": 2, "pp_size": 1})
    assert parameters(folder, "target") == {
        "max_beam_width": "1",
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": "target/1/engine",
        "encoder_model_path": "",
        "max_tokens_in_paged_kv_cache": "4608",
        "max_attention_window_size": "",
        "sink_token_length": "",
        "batch_scheduler_policy": "guaranteed_no_evict",
        "kv_cache_free_gpu_mem_fraction": "0.9",
        "cross_kv_cache_fraction": "",
        "kv_cache_host_memory_bytes": "0",
        "kv_cache_onboard_blocks": "true",
        "exclude_input_in_output": "false",
        "cancellation_check_period_ms": "100",
        "stats_check_period_ms": "100",
        "iter_stats_max_iterations": "",
        "request_stats_max_iterations": "",
        "enable_kv_cache_reuse": "true",
        "normalize_log_probs": "true",
        "enable_chunked_context": "true",
        "gpu_device_ids": "1,2",
        "participant_ids": "",
        "num_nodes": "1",
        "lora_cache_optimal_adapter_size": "",
        "lora_cache_max_adapter_size": "",
        "lora_cache_gpu_memory_fraction": "",
        "lora_cache_host_memory_bytes": "",
        "decoding_mode": "top_k_top_p",
        "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        "lookahead_window_size": "",
        "lookahead_ngram_size": "",
        "lookahead_verification_set_size": "",
        "medusa_choices": "",
        "eagle_choices": "",
        "gpu_weights_percent": "1.0",
        "enable_context_fmha_fp32_acc": "false",
        "multi_block_mode": "true",
        "cuda_graph_mode": "false",
        "cuda_graph_cache_size": "0",
        "speculative_decoding_fast_logits": "false",
        "tokenizer_dir": "",
        "guided_decoding_backend": "",
        "xgrammar_tokenizer_info_path": "",
        "recv_poll_period_ms": "0",
    }
    assert parameters(folder, "draft")["gpt_model_path"] == "draft/1/engine"
    assert parameters(folder, "draft")["max_tokens_in_paged_kv_cache"] == "4352"


def test_settings_reach_both_models(tmp_path: Path) -> None:
    given = {
        "max_queue_size": 64,
        "max_queue_delay_microseconds": 200,
        "iter_stats_max_iterations": 10,
        "gpu_weights_percent": 0.5,
    }
    folder = package(tmp_path, pair_options(parameters=given))
    for role in ("draft", "target"):
        config = read_config(folder / role / "config.pbtxt")
        assert config.dynamic_batching.max_queue_delay_microseconds == 200
        assert config.dynamic_batching.default_queue_policy.max_queue_size == 64
        assert parameters(folder, role)["iter_stats_max_iterations"] == "10"
        assert parameters(folder, role)["gpu_weights_percent"] == "0.5"


def test_draft_logits_are_compared_in_whole_contexts_where_one_iteration_holds_them(
    tmp_path: Path,
) -> None:
    def chunked(acceptance: str, max_num_tokens: int, **parameters: bool) -> bool:
        settings = {"acceptance": acceptance, "parameters": parameters}
        pair = plan(tmp_path, max_num_tokens=max_num_tokens, tensorrt_llm=settings)
        written: bool = models.serving_settings(pair)["parameters"]["enable_chunked_context"]
        return written

    assert chunked("exact", 4100)
    assert not chunked("logits", 4100)
    assert chunked("logits", 4099)
    assert chunked("logits", 4100, enable_chunked_context=True)


def test_the_logits_type_is_the_engine_s(tmp_path: Path) -> None:
    config = read_config(package(tmp_path, logits_dtype="float16") / "target" / "config.pbtxt")
    logits = [tensor for tensor in (*config.input, *config.output) if "logits" in tensor.name]
    assert {tensor.name: pb.DataType.Name(tensor.data_type) for tensor in logits} == {
        "draft_logits": "TYPE_FP16",
        "return_context_logits": "TYPE_BOOL",
        "return_generation_logits": "TYPE_BOOL",
        "context_logits": "TYPE_FP16",
        "generation_logits": "TYPE_FP16",
    }


def test_an_engine_of_an_older_release_has_older_names(tmp_path: Path) -> None:
    folder = package(tmp_path, version="0.19.0")
    names = [tensor.name for tensor in read_config(folder / "draft" / "config.pbtxt").input]
    assert "random_seed" in names and "seed" not in names
    assert lint.lint(folder) == []


def test_windows_are_written_layer_by_layer(tmp_path: Path) -> None:
    options = pair_options(target_attention_windows=[600, None, 600])
    folder = package(tmp_path, options)
    assert parameters(folder, "target")["max_attention_window_size"] == "516,516,516"
    assert parameters(folder, "draft")["max_attention_window_size"] == ""


def test_an_engine_past_its_window_is_not_packaged(tmp_path: Path) -> None:
    options = pair_options(target_attention_windows=[512, None])
    with pytest.raises(RepositoryError) as caught:
        package(tmp_path, options)
    assert str(caught.value) == (
        "the target engine was built with max_seq_len 516, past its sliding window of 512 tokens: "
        "lower engine.max_seq_len and build it again"
    )


def test_the_repository_can_be_moved(tmp_path: Path) -> None:
    moved = package(tmp_path).rename(tmp_path / "elsewhere")
    assert lint.lint(moved) == []
    for path in moved.rglob("*.pbtxt"):
        assert str(tmp_path) not in path.read_text()


class TemplateRuntime(TensorRTLLMRuntime):
    """Leaves a number, a truth, a name and a quoted text unfilled, as a hand-made template may."""

    def write_models(self, out: Path, **arguments: Any) -> None:
        super().write_models(out, **arguments)
        path = out / "target" / "config.pbtxt"
        text = path.read_text()
        for filled, unfilled in (
            ("max_batch_size: 8", "max_batch_size: ${triton_max_batch_size}"),
            ("decoupled: true", "decoupled: ${decoupled_mode}"),
            ("kind: KIND_CPU", "kind: ${instance_kind}"),
            ('string_value: "target/1/engine"', 'string_value: "${engine_dir}"'),
        ):
            assert filled in text
            text = text.replace(filled, unfilled)
        path.write_text(text)


def test_no_unfilled_key_is_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "load_runtime", lambda name: TemplateRuntime())
    monkeypatch.setattr(
        "specpipe.triton.repository.contents.load_runtime", lambda name: TemplateRuntime()
    )
    checkpoints = ROOT / "models" / "python-code"
    contract = tmp_path / "pair.json"
    contract.write_text(check_pair(checkpoints / "draft", checkpoints / "target").to_json())
    stage = Package(
        contract=contract,
        draft_engine=write_engine(tmp_path / "engines" / "draft", "draft"),
        target_engine=write_engine(tmp_path / "engines" / "target", "target"),
        tokenizer=checkpoints / "target",
        runtime="tensorrt_llm",
        options=pair_options(),
    )
    artifacts = tmp_path / "artifacts"
    artifacts.mkdir()
    with pytest.raises(RepositoryError) as caught:
        cache.build(stage, artifacts / "model_repo")
    sentences = str(caught.value).splitlines()
    assert [line.strip() for line in sentences if "placeholder" in line] == [
        "target/config.pbtxt: max_batch_size is the placeholder ${triton_max_batch_size}",
        "target/config.pbtxt: kind is the placeholder ${instance_kind}",
        "target/config.pbtxt: gpt_model_path is the placeholder ${engine_dir}",
        "target/config.pbtxt: decoupled is the placeholder ${decoupled_mode}",
    ]
    assert [path.name for path in artifacts.rglob("*")] == [".model_repo.lock"]
