from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import CheckpointError
from specpipe.stages.convert import convert
from specpipe.unified_config import read_unified_config
from tests.quantization.checkpoints import FORMATS, quantized_checkpoint
from tests.toy import ARCHITECTURES, spelled_as_4_57, toy_config, write_toy_checkpoint

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [2.0, 2.0, 2.0, 2.0],
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}


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
    config = read_unified_config(quantized_checkpoint(tmp_path, family, format, settings=settings))
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
