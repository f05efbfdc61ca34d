"""Bytes from a config, against the files that are written for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpipe.build.stages.convert import convert
from specpipe.checkpoints.checkpoint import read_safetensors_header
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.sizes import kv_cache_bytes_per_token, tensor_bytes, weights_bytes
from specpipe.checkpoints.unified_config import read_unified_config
from specpipe.checkpoints.unified_layout import tensor_rules
from specpipe.quantization.quantized_config import quantized_config
from tests.quantization.checkpoints import FORMATS, quantized_checkpoint, scheme
from tests.toy import toy_config, write_toy_checkpoint

BUILT = ("int8_wo", "int4_wo")


def file_bytes(folder: Path, rank: int = 0) -> int:
    tensors = read_safetensors_header(folder / f"rank{rank}.safetensors")
    return sum(info.num_bytes for info in tensors.values())


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in BUILT])
def test_a_quantized_checkpoint_has_the_bytes_of_its_file(name: str, tmp_path: Path) -> None:
    folder = quantized_checkpoint(
        tmp_path, format=name, settings={"kv_cache": "fp8", "exclude": ["*layers.1.mlp.proj"]}
    )
    config = read_unified_config(folder)
    assert weights_bytes(config) == file_bytes(folder)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "qwen2"])
def test_a_plain_checkpoint_too(family: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(write_toy_checkpoint(tmp_path / "hf", family), tmp_path / "out")
    config = read_unified_config(tmp_path / "out")
    head = 256 * 32 * 2 if config.tie_word_embeddings else 0  # is in the file a second time
    assert weights_bytes(config) == file_bytes(tmp_path / "out") - head


@pytest.mark.parametrize("name", ["fp8_pc_pt", "int4_awq", "int8_sq"])
def test_ranks_share_weights_and_scales(name: str, tmp_path: Path) -> None:
    folder = quantized_checkpoint(tmp_path, format=name, tp_size=2)
    config = read_unified_config(folder)
    total = sum(
        tensor_bytes(config, rule, layer, tp_size=2) for rule, layer in tensor_rules(config)
    )
    assert total == file_bytes(folder) == file_bytes(folder, 1)


@pytest.mark.parametrize(("name", "numerator"), [("int8_wo", 2), ("int4_wo", 1)])
def test_formats_that_the_builder_makes_count_as_built(name: str, numerator: int) -> None:
    plain = unified_config(toy_config())
    config = quantized_config(plain, scheme(name))
    # A layer: qkv 64 × 32, dense 32 × 32, fc and gate 64 × 32, proj 32 × 64; and a 16-bit scale
    # for each of their outputs.
    linears = 2 * (64 * 32 + 32 * 32 + 2 * 64 * 32 + 32 * 64)
    scales = 2 * (64 + 32 + 2 * 64 + 32)
    assert weights_bytes(config) == (
        weights_bytes(plain) - 2 * linears + linears * numerator // 2 + 2 * scales
    )


def test_a_quantized_head_is_no_embedding() -> None:
    tied = unified_config(toy_config(tie_word_embeddings=True))
    alone = quantized_config(tied, scheme("fp8"))
    both = quantized_config(tied, scheme("fp8", quantize_lm_head=True))
    assert weights_bytes(both) - weights_bytes(alone) == 256 * 32 + 2 * 4


def test_bytes_of_a_token_s_keys_and_values() -> None:
    plain = unified_config(toy_config())
    assert kv_cache_bytes_per_token(plain) == 2 * 2 * 2 * 8 * 2  # layers, heads of 8, 16 bits
    halved = quantized_config(plain, scheme("fp8", kv_cache="fp8"))
    assert kv_cache_bytes_per_token(halved) == 64
    assert kv_cache_bytes_per_token(halved, tp_size=4) == 32  # two heads on four ranks
    three = unified_config(toy_config(num_hidden_layers=3))
    assert [kv_cache_bytes_per_token(three, pp_size=2, pp_rank=r) for r in (0, 1)] == [128, 64]
