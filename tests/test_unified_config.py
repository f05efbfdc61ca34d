from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specpipe.build.stages.convert import convert
from specpipe.checkpoints.checkpoint import read_config
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.unified_config import UnifiedConfig, read_unified_config
from specpipe.errors import CheckpointError
from tests.quantization.checkpoints import FORMATS, quantized_checkpoint
from tests.toy import ARCHITECTURES, spelled_as_4_57, toy_config, write_toy_checkpoint

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [2.0, 2.0, 2.0, 2.0],
}
SMALL_FILES = sorted((Path(__file__).parent / "small_files").glob("*--*"))
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}


COMMON = (
    "architecture dtype logits_dtype vocab_size hidden_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_size intermediate_size hidden_act norm_epsilon "
    "position_embedding_type max_position_embeddings rotary_embedding_dim rotary_base "
    "rotary_scaling sliding_window use_parallel_embedding embedding_sharding_dim "
    "tie_word_embeddings mapping quantization"
)
LLAMA = (
    "residual_mlp disable_weight_only_quant_plugin remove_duplicated_kv_heads qk_layernorm "
    "attn_bias attn_dense_bias mlp_bias"
)
QWEN = (
    "seq_length use_logn_attn mlp_bias qwen_type qk_layernorm attn_bias attn_dense_bias layer_types"
)
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("family", "overrides", "behind"),
    [
        ("llama", {}, LLAMA),
        ("mistral", {"sliding_window": 64}, LLAMA),
        ("qwen2", SOME_WINDOWS, QWEN),
        ("qwen3", SOME_WINDOWS, QWEN),
        (
            "phi3",
            {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
            "qk_layernorm attn_bias attn_dense_bias mlp_bias rotary_pct "
            "original_max_position_embeddings longrope_scaling_short_factors "
            "longrope_scaling_long_factors",
        ),
        (
            "gemma2",
            {},
            "qk_layernorm mlp_bias inter_layernorms attn_bias attn_dense_bias layer_types "
            "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping "
            "embedding_multiplier",
        ),
    ],
)
def test_keys_are_written_in_this_order(
    family: str, overrides: dict[str, Any], behind: str
) -> None:
    """Another order would be another file, and every engine that was built from it out of date."""
    config = unified_config(toy_config(family, **overrides))
    assert " ".join(config.plain()) == f"{COMMON} {behind}"


@pytest.mark.parametrize("folder", SMALL_FILES, ids=lambda folder: folder.name)
def test_real_models_come_back_from_json(folder: Path) -> None:
    config = unified_config(read_config(folder))
    written = json.dumps(config.plain())
    read = UnifiedConfig.from_json(json.loads(written))
    assert (read, json.dumps(read.plain())) == (config, written)


def test_keys_that_specpipe_does_not_know_stay() -> None:
    values = unified_config(toy_config()).plain() | {"runtime_defaults": {"kv_cache": None}}
    assert UnifiedConfig.from_json(values).plain() == values


def test_what_is_wrong_is_one_sentence_that_is_cut() -> None:
    values = unified_config(toy_config()).plain()
    for fault in ({"layer_types": [0] * 10_000}, {"architecture": "X" * 10_000}):
        with pytest.raises(CheckpointError) as caught:
            UnifiedConfig.from_json(values | fault)
        assert len(str(caught.value)) <= 1001
        assert "\n" not in str(caught.value)
        assert "X" * 81 not in str(caught.value)
    with pytest.raises(CheckpointError, match="^head_size: Field required$"):
        UnifiedConfig.from_json({key: values[key] for key in values if key != "head_size"})


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (2, 2)])
def test_converted_checkpoints_are_what_tensorrt_llm_reads(
    tmp_path: Path, family: str, tp_size: int, pp_size: int
) -> None:
    source = write_toy_checkpoint(tmp_path / "hf", family)
    out = tmp_path / "unified"
    out.mkdir()
    convert(source, out, tp_size=tp_size, pp_size=pp_size)
    config = read_unified_config(out)
    assert json.dumps(config.plain(), indent=2) + "\n" == (out / "config.json").read_text()
    assert config.architecture == ARCHITECTURES[family]
    assert config.mapping.world_size == tp_size * pp_size
    assert (config.dtype, config.logits_dtype) == ("bfloat16", "float32")
    assert (config.vocab_size, config.hidden_size, config.head_size) == (256, 32, 8)
    assert config.quantization.quant_algo is None
    assert config.use_parallel_embedding == (family == "gemma2" and tp_size > 1)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
@pytest.mark.parametrize("format", FORMATS)
def test_quantized_checkpoints_are_what_tensorrt_llm_reads(
    tmp_path: Path, family: str, format: str
) -> None:
    settings = {"kv_cache": "fp8"} if format == "fp8" else {}
    out = quantized_checkpoint(tmp_path, family, format, settings=settings)
    config = read_unified_config(out)
    assert json.dumps(config.plain(), indent=2) + "\n" == (out / "config.json").read_text()
    assert (config.architecture, config.vocab_size) == (ARCHITECTURES[family], 256)
    assert (config.dtype, config.logits_dtype) == ("bfloat16", "float32")
    quantization = config.quantization
    assert (
        quantization.quant_algo
        == {
            "fp8": "FP8",
            "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN",
            "int8_sq": "W8A8_SQ_PER_CHANNEL",
            "int4_awq": "W4A16_AWQ",
            "w4a8_awq": "W4A8_AWQ",
            "int8_wo": "W8A16",
            "int4_wo": "W4A16",
            "nvfp4": "NVFP4",
        }[format]
    )
    assert quantization.kv_cache_quant_algo == ("FP8" if format == "fp8" else None)
    assert quantization.pre_quant_scale == (format in ("int8_sq", "int4_awq", "w4a8_awq"))
    assert quantization.group_size == (16 if format in ("int4_awq", "w4a8_awq", "nvfp4") else 128)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
        ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_variants_of_a_family(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    source = write_toy_checkpoint(tmp_path / "hf", family, **overrides)
    out = tmp_path / "unified"
    out.mkdir()
    convert(source, out)
    config = read_unified_config(out)
    assert config.rotary_base == 10000.0
    if family == "phi3":
        assert config.position_embedding_type == "long_rope"


def test_both_spellings_of_transformers_give_one_config(tmp_path: Path) -> None:
    folders = []
    for name, config in (("new", toy_config()), ("old", spelled_as_4_57(toy_config()))):
        source = write_toy_checkpoint(tmp_path / name)
        (source / "config.json").write_text(json.dumps(config))
        out = tmp_path / f"{name}-unified"
        out.mkdir()
        convert(source, out)
        folders.append(out)
    assert read_unified_config(folders[0]) == read_unified_config(folders[1])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"vocab_size": None}, "vocab_size: Input should be a valid integer"),
        ({"dtype": "float8"}, "dtype: Input should be 'float16', 'bfloat16' or 'float32'"),
        (
            {"mapping": {"world_size": 3, "tp_size": 2, "pp_size": 1}},
            "mapping: Value error, world_size is not tp_size times pp_size times cp_size",
        ),
        (
            {"quantization": {"quant_algo": "FP8", "kv_cache_algo": "FP8"}},
            "quantization.kv_cache_algo: Extra inputs are not permitted",
        ),
        (
            {"quantization": {"quant_algo": "FP9"}},
            "quantization.quant_algo: Input should be 'W8A16'",
        ),
        (
            {"quantization": {"quant_algo": "W8A16", "exclude_modules": ["lm_head"]}},
            "quantization: Value error, exclude_modules lacks transformer.vocab_embedding",
        ),
        (
            {"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": []}},
            "quantization: Value error, exclude_modules lacks transformer.ln_f",
        ),
        ({"architecture": "GPT2LMHeadModel"}, "architecture: Input tag 'GPT2LMHeadModel' found"),
    ],
)
def test_what_tensorrt_llm_would_stumble_over_is_listed(
    tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    source = write_toy_checkpoint(tmp_path / "hf")
    out = tmp_path / "unified"
    out.mkdir()
    convert(source, out)
    path = out / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError) as caught:
        read_unified_config(out)
    first, second = str(caught.value).splitlines()
    assert first == f"{path} is not one that TensorRT-LLM builds an engine from:"
    assert second.startswith(f"  - {line}")


def test_no_config_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no config.json"):
        read_unified_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json cannot be read: "):
        read_unified_config(tmp_path)
