from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from specpipe.build import planning
from specpipe.build.load import load_config
from specpipe.build.stages.package import Package
from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError, EngineBuildError
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.tensorrt_llm.llmapi import model_yaml
from tests.toy import toy_config

ROOT = Path(__file__).parents[4]
PAIR = ROOT / "models" / "python-code"

Overrides = tuple[str, ...]


def config_of(tmp_path: Path, *overrides: str, **checkpoints: Path) -> PipelineConfig:
    """A config for backend pytorch: of the quickstart pair, unless checkpoints are given."""
    folders = {"draft": PAIR / "draft", "target": PAIR / "target", **checkpoints}
    path = tmp_path / "pair.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "toy",
                **{role: {"checkpoint": str(folder)} for role, folder in folders.items()},
                "engine": {
                    "runtime": "tensorrt_llm",
                    "max_seq_len": 512,
                    "tensorrt_llm": {"backend": "pytorch"},
                },
            }
        )
    )
    return load_config(path, overrides)


def options_of(config: PipelineConfig) -> PairOptions:
    package = planning.plan(config)[-1].stage
    assert isinstance(package, Package)
    return package.options


def arguments_of(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    settings = options_of(config_of(tmp_path, *overrides)).runtime_settings
    arguments: dict[str, Any] = settings["llm"]
    return arguments


@pytest.mark.parametrize(
    ("version", "speculative_config"),
    [
        (
            "1.0.0",
            {"decoding_type": "DraftTarget", "max_draft_len": 4, "speculative_model_dir": "draft"},
        ),
        (
            "1.1.0",
            {"decoding_type": "DraftTarget", "max_draft_len": 4, "speculative_model_dir": "draft"},
        ),
        (
            "1.2.0",
            {"decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "draft"},
        ),
        (
            "1.2.1",
            {"decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "draft"},
        ),
    ],
)
def test_arguments_as_each_release_spells_them(
    tmp_path: Path, version: str, speculative_config: dict[str, Any]
) -> None:
    assert arguments_of(tmp_path, f"engine.tensorrt_llm.version={version}") == {
        "model": "target",
        "backend": "pytorch",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "max_batch_size": 8,
        "max_seq_len": 512,
        "max_num_tokens": 8192,
        "enable_chunked_prefill": False,
        "disable_overlap_scheduler": True,
        "speculative_config": speculative_config,
    }


def test_without_draft_tokens_there_is_no_draft(tmp_path: Path) -> None:
    arguments = arguments_of(tmp_path, "speculation.num_draft_tokens=0")
    assert "speculative_config" not in arguments
    assert "disable_overlap_scheduler" not in arguments


def test_sizes_come_from_the_settings(tmp_path: Path) -> None:
    arguments = arguments_of(
        tmp_path,
        "draft.tp_size=2",
        "target.tp_size=2",
        "engine.max_batch_size=3",
        "engine.max_num_tokens=128",
        "engine.tensorrt_llm.kv_cache_free_gpu_mem_fraction=0.5",
        "speculation.num_draft_tokens=7",
    )
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["max_batch_size"] == 3
    assert (arguments["max_num_tokens"], arguments["enable_chunked_prefill"]) == (128, True)
    assert arguments["kv_cache_config"] == {"free_gpu_memory_fraction": 0.5}
    assert arguments["speculative_config"]["max_draft_len"] == 7


def test_the_file_is_what_the_arguments_are() -> None:
    arguments = {"model": "target", "speculative_config": {"speculative_model": "draft"}}
    text = model_yaml.to_text(arguments, "1.2.1")
    assert text == (
        "# Keyword arguments of tensorrt_llm.LLM 1.2.1; paths are relative to this file.\n"
        "model: target\n"
        "speculative_config:\n"
        "  speculative_model: draft\n"
    )
    assert model_yaml.resolve_paths(
        yaml.safe_load(text), draft=Path("/r/draft"), target=Path("/r/target")
    ) == {"model": "/r/target", "speculative_config": {"speculative_model": "/r/draft"}}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("target.quantization={format: int8_sq}",),
            "target.quantization.format is 'int8_sq': expected fp8, fp8_pc_pt, int4_awq, "
            "w4a8_awq, nvfp4: backend pytorch reads no other; backend tensorrt builds engines of "
            "it",
        ),
        (
            ("target.quantization={format: fp8, export: true}",),
            "target.quantization.export is true: expected nothing here, since it has no effect "
            "with backend pytorch, which serves the exported folder",
        ),
        (
            ("target.tp_size=2",),
            "draft.tp_size is 1: expected 2, as target.tp_size: backend pytorch splits both "
            "models alike",
        ),
        (("draft.pp_size=2",), "draft.pp_size is 2: expected 1, as target.pp_size"),
        (
            ("speculation.adaptive=true",),
            "speculation.adaptive is true: expected false: backend pytorch drafts "
            "num_draft_tokens in every step of every request",
        ),
        (
            ("engine.tensorrt_llm.draft_gpu_ids=[1]",),
            "engine.tensorrt_llm.draft_gpu_ids is [1]: expected nothing: with backend pytorch "
            "both models run on target_gpu_ids",
        ),
        (
            ("engine.tensorrt_llm.target_gpu_ids=[0, 1]",),
            "engine.tensorrt_llm.target_gpu_ids is [0, 1]: expected 1, one for each rank of the "
            "target",
        ),
        (
            ("engine.tensorrt_llm.image=nvidia/triton:1",),
            "engine.tensorrt_llm.image is 'nvidia/triton:1': expected nothing, since backend "
            "pytorch builds no engine",
        ),
        (
            ("engine.tensorrt_llm.extra_build_args=[--fast_build]",),
            "engine.tensorrt_llm.extra_build_args is ['--fast_build']: expected nothing",
        ),
        (
            ("engine.tensorrt_llm.build.use_fused_mlp=false",),
            "engine.tensorrt_llm.build.use_fused_mlp is false: expected nothing",
        ),
    ],
)
def test_settings_without_effect_are_refused(
    tmp_path: Path, overrides: Overrides, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, *overrides)
    assert expected in str(caught.value)


def test_what_backend_pytorch_honours_is_accepted(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "speculation.adaptive=false",
        "engine.tensorrt_llm.acceptance=logits",
        "engine.tensorrt_llm.target_gpu_ids=[3]",
        "engine.tensorrt_llm.draft_gpu_ids=[3]",
    )
    settings = options_of(config).runtime_settings
    assert (settings["acceptance"], settings["target_gpu_ids"]) == ("logits", [3])


def toy(folder: Path, **config: Any) -> Path:
    """The small files of a checkpoint, with the tokenizer of the quickstart pair."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(toy_config(vocab_size=4096, **config)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((PAIR / "target" / name).read_bytes())
    return folder


def test_a_draft_with_a_shorter_context_is_refused(tmp_path: Path) -> None:
    draft = toy(tmp_path / "short", max_position_embeddings=256)
    config = config_of(tmp_path, draft=draft)
    with pytest.raises(EngineBuildError) as caught:
        planning.plan(config)
    assert str(caught.value) == (
        "the draft reaches 256 tokens and requests may have 512: TensorRT-LLM's pytorch backend "
        "drafts up to the last one; set engine.max_seq_len to 256 at most"
    )
    planning.plan(config_of(tmp_path, "engine.max_seq_len=256", draft=draft))
    planning.plan(config_of(tmp_path, "speculation.num_draft_tokens=0", draft=draft))


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("quantization", "version"),
    [
        (FP8_BLOCKS, "1.0.0"),
        (FP8_BLOCKS, "1.2.1"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "1.2.1"),
    ],
)
def test_quantized_checkpoints_that_the_release_reads(
    tmp_path: Path, quantization: dict[str, Any], version: str
) -> None:
    target = toy(tmp_path / "t", quantization_config=quantization)
    config = config_of(tmp_path, f"engine.tensorrt_llm.version={version}", target=target)
    assert [s.name for s in planning.plan(config)] == [
        "check",
        "draft/collect",
        "target/collect",
        "package",
    ]


@pytest.mark.parametrize(
    ("quantization", "version", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4}, "1.2.1", "is quantized by gptq, which TensorRT-LLM "),
        ({"bits": 4}, "1.2.1", "is quantized by an unnamed method, which"),
        ({"quant_method": "fp8"}, "1.2.1", "reads .* compressed-tensors and fp8 in blocks of"),
        ({"quant_method": "compressed-tensors"}, "1.1.0", "TensorRT-LLM 1.1.0 is not known to"),
    ],
)
def test_quantized_checkpoints_that_it_does_not(
    tmp_path: Path, quantization: dict[str, Any], version: str, expected: str
) -> None:
    draft = toy(tmp_path / "d", quantization_config=quantization)
    config = config_of(tmp_path, f"engine.tensorrt_llm.version={version}", draft=draft)
    with pytest.raises(EngineBuildError, match=expected) as caught:
        planning.plan(config)
    assert str(caught.value).startswith(f"draft {draft} is quantized by")
    assert str(caught.value).endswith(
        "; set draft.quantization on the checkpoint that it was quantized from"
    )
