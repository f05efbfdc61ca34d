"""Memory of engines and KV caches, against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pynvml
import pytest

from specpipe.checkpoints.family_config import unified_config
from specpipe.errors import EngineBuildError
from specpipe.runtimes.runtime import load_runtime
from specpipe.runtimes.tensorrt_llm import kv_plan
from specpipe.runtimes.tensorrt_llm.engines import refusals
from tests.fake_nvml import Device, be
from tests.runtimes.tensorrt_llm.plans import LLAMA_1B, LLAMA_70B, MISTRAL_7B, plan
from tests.toy import toy_config


def test_a_cache_holds_all_sequences_at_once(tmp_path: Path) -> None:
    pair = plan(tmp_path)
    # 4096 + 4 tokens are 129 blocks of 32, with one more for a shared block: 130 * 32 * 8.
    assert kv_plan.plan_cache(pair, pair.target).tokens == 33280
    # The draft's sequences have 4096 tokens: 128 blocks and one.
    assert kv_plan.plan_cache(pair, pair.draft).tokens == 33024


def test_bytes_of_a_token(tmp_path: Path) -> None:
    pair = plan(tmp_path)
    # Llama 3 70B: keys and values, 80 layers, 8 heads of 128, 2 bytes: 320 KiB.
    assert kv_plan.plan_cache(pair, pair.target).bytes_per_token == 327680
    # Llama 3.2 1B: 16 layers, 8 heads of 64: 32 KiB.
    assert kv_plan.plan_cache(pair, pair.draft).bytes_per_token == 32768


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({"tp_size": 2}, 163840),
        ({"tp_size": 16}, 40960),  # 8 heads on 16 ranks: each has one
        ({"pp_size": 3}, 110592),  # 27, 27 and 26 layers
        ({"quantization": {"format": "fp8", "kv_cache": "fp8"}}, 163840),
        ({"quantization": {"format": "fp8"}}, 327680),
    ],
)
def test_bytes_of_a_token_on_one_rank(
    tmp_path: Path, checkpoint: dict[str, object], expected: int
) -> None:
    pair = plan(tmp_path, target_checkpoint=checkpoint)
    assert kv_plan.plan_cache(pair, pair.target).bytes_per_token == expected


def test_a_float32_model_keeps_float32(tmp_path: Path) -> None:
    pair = plan(tmp_path, target=LLAMA_70B | {"torch_dtype": "float32"})
    assert kv_plan.plan_cache(pair, pair.target).bytes_per_token == 655360


def test_tokens_per_block_and_a_given_size(tmp_path: Path) -> None:
    pair = plan(tmp_path, tensorrt_llm={"build": {"tokens_per_block": 64}})
    assert kv_plan.plan_cache(pair, pair.target).tokens == 33792  # (65 + 1) * 64 * 8
    given = {"parameters": {"max_tokens_in_paged_kv_cache": 100000}}
    pair = plan(tmp_path, tensorrt_llm=given)
    assert kv_plan.plan_cache(pair, pair.draft).tokens == 100000


def test_a_cache_for_less_than_a_sequence_is_refused(tmp_path: Path) -> None:
    pair = plan(tmp_path, tensorrt_llm={"parameters": {"max_tokens_in_paged_kv_cache": 4096}})
    with pytest.raises(EngineBuildError) as caught:
        kv_plan.plan_cache(pair, pair.target)
    assert str(caught.value) == (
        "engine.tensorrt_llm.parameters.max_tokens_in_paged_kv_cache is 4096, but one sequence of "
        "the target needs 4160: raise it, or lower engine.max_seq_len"
    )


def test_weights_of_a_whole_model(tmp_path: Path) -> None:
    pair = plan(tmp_path)
    # Llama 3 70B has 70,553,706,496 parameters.
    assert kv_plan.rank_memory(pair, pair.target).weights_bytes == 141_107_412_992
    # Llama 3.2 1B has 1,235,814,400, and an engine has a head of its own: 128256 * 2048 more.
    assert kv_plan.rank_memory(pair, pair.draft).weights_bytes == 2 * (1_235_814_400 + 262_668_288)


def test_weights_are_shared_out_over_ranks(tmp_path: Path) -> None:
    pair = plan(tmp_path, target_checkpoint={"tp_size": 2})
    embedding, norms = 128256 * 8192, 161 * 8192  # every rank has these
    split = 70_553_706_496 - embedding - norms
    assert kv_plan.rank_memory(pair, pair.target).weights_bytes == 2 * (
        split // 2 + embedding + norms
    )
    total = kv_plan.estimate_memory(pair, pair.target)
    assert total.weights_bytes == 2 * kv_plan.rank_memory(pair, pair.target).weights_bytes
    assert total.kv_cache_bytes == 33280 * 327680


def test_ranks_share_kv_heads_where_there_are_fewer(tmp_path: Path) -> None:
    pair = plan(tmp_path, target_checkpoint={"tp_size": 16})
    embedding, norms = 128256 * 8192, 161 * 8192
    kv_heads = 80 * 2 * 8 * 128 * 8192  # each head on two of the 16 ranks
    split = 70_553_706_496 - embedding - norms - kv_heads
    assert kv_plan.rank_memory(pair, pair.target).weights_bytes == 2 * (
        split // 16 + kv_heads // 8 + embedding + norms
    )


def test_quantized_weights(tmp_path: Path) -> None:
    fp8 = plan(tmp_path, target_checkpoint={"quantization": {"format": "fp8"}})
    plain = 2 * 128256 * 8192 + 161 * 8192  # embedding, head and norms stay in 16 bits
    linear = 70_553_706_496 - plain
    scales = 80 * 5 * 2 * 4  # of every linear's weight and activations, in 32 bits
    assert kv_plan.rank_memory(fp8, fp8.target).weights_bytes == linear + 2 * plain + scales
    awq = plan(tmp_path, target_checkpoint={"quantization": {"format": "int4_awq"}})
    # A 16-bit scale for each 128 weights, and one for each input: 4 of 8192 and one of 28672.
    scales = 2 * linear // 128 + 2 * 80 * (4 * 8192 + 28672)
    assert kv_plan.rank_memory(awq, awq.target).weights_bytes == linear // 2 + 2 * plain + scales


def test_a_checkpoint_that_modelopt_quantized(tmp_path: Path) -> None:
    pair = plan(tmp_path, max_seq_len=8192, tensorrt_llm={"backend": "pytorch"})
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    described = json.dumps({"quantization": quantization})
    (pair.target.folder / "hf_quant_config.json").write_text(described)
    plain = 2 * 128256 * 8192 + 161 * 8192
    found = kv_plan.estimate_memory(pair, pair.target)
    scales = 80 * 5 * 2 * 4 + 80 * 4  # as above, and of each layer's KV cache
    assert found.weights_bytes == (70_553_706_496 - plain) + 2 * plain + scales
    assert found.kv_cache_bytes == 8 * (257 + 1) * 32 * 163840


def test_backend_pytorch_keeps_sliding_windows(tmp_path: Path) -> None:
    pair = plan(tmp_path, target=MISTRAL_7B, max_seq_len=8192, tensorrt_llm={"backend": "pytorch"})
    load_runtime("tensorrt_llm").estimate_memory(pair, pair.target)


def test_the_whole_length_lies_within_a_sliding_window(tmp_path: Path) -> None:
    pair = plan(tmp_path, draft=MISTRAL_7B, target=MISTRAL_7B, max_seq_len=4092)
    refusals.check_window(pair, pair.target)
    longer = plan(tmp_path, draft=MISTRAL_7B, target=MISTRAL_7B, max_seq_len=4096)
    refusals.check_window(longer, longer.draft)
    with pytest.raises(EngineBuildError) as caught:
        load_runtime("tensorrt_llm").estimate_memory(longer, longer.target)
    assert str(caught.value) == (
        "target: target has a sliding window of 4096 tokens, and its sequences may have 4100: "
        "TensorRT-LLM does not reuse the KV cache past a window, which every step of a pair "
        "needs; set engine.max_seq_len to at most 4092"
    )


def test_windows_layer_by_layer() -> None:
    config = unified_config(toy_config("phi3", sliding_window=64, num_hidden_layers=3))
    assert config.windows == (64, 64, 64)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config.model_copy(update={"layer_types": kinds}).windows == (64, None, 64)
    assert config.model_copy(update={"sliding_window": None}).windows == (None, None, None)


def test_too_much_for_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, Device(), Device())
    halves = {"tp_size": 2}
    kv_plan.check_gpus(
        plan(tmp_path, target_checkpoint=halves)
    )  # 71.6 + 5.5 and 3.0 + 1.1 of 85.5 GB
    with pytest.raises(EngineBuildError) as caught:
        kv_plan.check_gpus(plan(tmp_path, max_batch_size=32, target_checkpoint=halves))
    assert str(caught.value) == (
        "GPU 0 has 85.5 GB, but weights and KV caches alone take 100.7 GB there (draft: 3.0 GB "
        "weights, 4.3 GB KV cache, target: 71.6 GB weights, 21.8 GB KV cache): lower "
        "engine.max_batch_size or engine.max_seq_len, quantize a checkpoint, or give the engines "
        "other GPUs (engine.tensorrt_llm.draft_gpu_ids, target_gpu_ids)"
    )


def test_each_gpu_is_counted_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, Device(), Device(), Device(total_mib=4096))
    with pytest.raises(EngineBuildError, match="^GPU 2 has 4.3 GB, .* take 4.3"):
        kv_plan.check_gpus(
            plan(
                tmp_path,
                target_checkpoint={"tp_size": 2},
                tensorrt_llm={"draft_gpu_ids": [2]},
                max_batch_size=10,
            )
        )


def test_where_no_gpu_is_known_none_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(monkeypatch)
    kv_plan.check_gpus(plan(tmp_path))
    shared = {"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_NOT_SUPPORTED}
    be(monkeypatch, Device("NVIDIA Thor", failing=shared))
    kv_plan.check_gpus(plan(tmp_path))


def test_a_smaller_model_needs_less(tmp_path: Path) -> None:
    large, small = plan(tmp_path), plan(tmp_path, target=LLAMA_1B)
    assert (
        kv_plan.estimate_memory(small, small.target).workspace_bytes
        < kv_plan.estimate_memory(large, large.target).workspace_bytes
    )
