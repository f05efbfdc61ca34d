from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specpipe.build.stages.convert import convert
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.trtllm_build import fit_trtllm_build
from specpipe.checkpoints.unified import UnifiedCheckpoint, load_unified
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.config.sections import QuantizationConfig
from specpipe.quantization.quantized_config import quantized_config
from tests.quantization.checkpoints import as_floats
from tests.toy import ARCHITECTURES, toy_config, write_toy_checkpoint

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


def changes(config: UnifiedConfig) -> dict[str, Any]:
    before, after = config.plain(), fit_trtllm_build(config).plain()
    assert list(after)[: len(before)] == list(before)
    return {key: value for key, value in after.items() if before.get(key) != value}


@pytest.mark.parametrize("family", [family for family in ARCHITECTURES if family != "gemma2"])
def test_most_checkpoints_are_the_same_for_every_runtime(family: str) -> None:
    config = unified_config(toy_config(family))
    assert fit_trtllm_build(config) is config


def test_gemma2_says_that_its_norms_are_rounded() -> None:
    config = unified_config(toy_config("gemma2"))
    assert changes(config) == {"rounds_norms": True}
    assert changes(fit_trtllm_build(config)) == {}


@pytest.mark.parametrize(
    ("rope", "positions", "stretched"),
    [
        (YARN | {"original_max_position_embeddings": 512}, 512, 2048),
        (YARN | {"original_max_position_embeddings": 512}, 2048, None),
        (YARN | {"original_max_position_embeddings": 512}, 4096, None),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 512, None),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 512, None),
    ],
)
def test_rope_has_a_row_for_every_position_that_yarn_reaches(
    rope: dict[str, Any], positions: int, stretched: int | None
) -> None:
    config = unified_config(toy_config(rope_parameters=rope, max_position_embeddings=positions))
    assert changes(config) == ({} if stretched is None else {"max_position_embeddings": stretched})


@pytest.mark.parametrize(
    ("format", "exclude", "added"),
    [
        ("int8_wo", ["*.mlp.proj"], ["*.mlp.proj.weight"]),
        ("int4_wo", ["*.mlp.proj", "*.fc", "*attention*"], ["*.mlp.proj.weight", "*.fc.weight"]),
        ("int4_wo", ["transformer.layers.0.*", "*.0.mlp.gate"], []),
        ("int8_wo", [], []),
        ("fp8", ["*.mlp.proj"], []),
        ("int4_awq", ["*.mlp.proj"], []),
    ],
)
def test_what_stays_plain_is_named_by_module_and_by_tensor(
    format: str, exclude: list[str], added: list[str]
) -> None:
    scheme = {"format": format, "exclude": exclude, "awq_block_size": 16}
    config = quantized_config(
        unified_config(toy_config()), QuantizationConfig.model_validate(scheme)
    )
    excluded = fit_trtllm_build(config).quantization.exclude_modules
    assert excluded == ["lm_head", *exclude, "*vocab_embedding", "*ln_f", *added]


def converted(checkpoint: Path, out: Path, **settings: Any) -> UnifiedCheckpoint:
    out.mkdir()
    convert(checkpoint, out, **settings)
    return load_unified(out)


@pytest.mark.parametrize(
    ("dtype", "stored"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_norms_are_1_plus_a_weight_and_rounded_once(
    tmp_path: Path, dtype: str, stored: torch.dtype
) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf", "gemma2", dtype=dtype)
    exact = converted(checkpoint, tmp_path / "exact")
    ours = converted(checkpoint, tmp_path / "ours", for_trtllm_build=True, tp_size=2, pp_size=2)
    assert ours.names() == exact.names()
    num_norms = 0
    for name in exact.names():
        expected, found = exact.tensor(name), ours.tensor(name)
        if "norm" in name or "ln_f" in name:
            num_norms += 1
            assert (expected.dtype, found.dtype) == ("F32", {"bfloat16": "BF16"}.get(dtype, "F16"))
            wanted = as_floats(expected.data, "F32").to(stored)
            assert torch.equal(as_floats(found.data, found.dtype), wanted.float())
        else:
            assert found.dtype == expected.dtype
            assert (found.data == expected.data).all()
    assert num_norms == 9
