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
from specpipe.runtimes.tensorrt_llm.llmapi import model_yaml, refusals
from tests.runtimes.tensorrt_llm import plans
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


@pytest.mark.parametrize("version", ["1.3.0rc23", "1.3.0", "1.4.0rc4", "1.4.0"])
def test_arguments_where_one_engine_holds_both_models(tmp_path: Path, version: str) -> None:
    """The overlap scheduler is left on, and what makes output lossless is said."""
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
        "speculative_config": {
            "decoding_type": "Draft_Target",
            "max_draft_len": 4,
            "speculative_model": "draft",
            "use_rejection_sampling": False,
        },
    }


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0"])
def test_without_draft_tokens_there_is_no_draft(tmp_path: Path, version: str) -> None:
    arguments = arguments_of(
        tmp_path, "speculation.num_draft_tokens=0", f"engine.tensorrt_llm.version={version}"
    )
    assert "speculative_config" not in arguments
    assert "disable_overlap_scheduler" not in arguments


LATEST = "engine.tensorrt_llm.version=1.4.0rc4"


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (("engine.tensorrt_llm.acceptance=logits",), {"use_rejection_sampling": True}),
        (("engine.tensorrt_llm.enable_penalty=true",), {"enable_penalty": True}),
        # Batches of 1 to 3 draft 4 tokens, of 4 to 8 two.
        (
            ("speculation.schedule=[{from_batch_size: 4, num_draft_tokens: 2}]",),
            {"draft_len_schedule": {"3": 4, "8": 2}},
        ),
        (
            (
                "speculation.schedule=[{from_batch_size: 1, num_draft_tokens: 4},"
                " {from_batch_size: 2, num_draft_tokens: 1},"
                " {from_batch_size: 8, num_draft_tokens: 0}]",
            ),
            {"draft_len_schedule": {"1": 4, "7": 1, "8": 0}},
        ),
    ],
)
def test_settings_that_1_4_is_told_of(
    tmp_path: Path, overrides: Overrides, fields: dict[str, Any]
) -> None:
    given = arguments_of(tmp_path, LATEST, *overrides)["speculative_config"]
    assert given == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 4,
        "speculative_model": "draft",
        "use_rejection_sampling": False,
        **fields,
    }


def parallel_plan(folder: Path, version: str, num_draft_tokens: int = 8, **draft: int) -> Any:
    return plans.plan(
        folder,
        draft=plans.LLAMA_1B | {"pard_token": 128255} | draft,
        num_draft_tokens=num_draft_tokens,
        tensorrt_llm={"backend": "pytorch", "version": version},
    )


@pytest.mark.parametrize("version", ["1.3.0rc23", "1.4.0"])
def test_a_draft_that_proposes_in_one_pass_is_another_class(tmp_path: Path, version: str) -> None:
    """PARDDecodingConfig.html in the reference of 1.4.0rc4."""
    plan = parallel_plan(tmp_path, version)
    assert refusals.parallel_draft_fault(plan) is None
    given = model_yaml.llm_arguments(plan)["speculative_config"]
    assert given == {
        "decoding_type": "PARD",
        "max_draft_len": 8,
        "speculative_model": "draft",
        "mask_token_id": 128255,
        "use_rejection_sampling": False,
    }
    assert model_yaml.drafting_class(given) == "PARDDecodingConfig"


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0"])
def test_a_draft_that_is_never_asked_may_propose_as_it_will(tmp_path: Path, version: str) -> None:
    draft = {"vocab_size": 128264, "pard_token": 128256}
    unasked = parallel_plan(tmp_path, version, num_draft_tokens=0, **draft)
    assert refusals.parallel_draft_fault(unasked) is None
    assert refusals.parallel_draft_fault(parallel_plan(tmp_path, version, **draft)) is not None


def test_batch_sizes_of_a_schedule_are_numbers_to_tensorrt_llm() -> None:
    text = model_yaml.to_text(
        {"model": "target", "speculative_config": {"draft_len_schedule": {"3": 4, "16": 2}}},
        "1.4.0",
    )
    resolved = model_yaml.resolve(yaml.safe_load(text), draft=Path("/d"), target=Path("/t"))
    assert resolved["speculative_config"] == {"draft_len_schedule": {3: 4, 16: 2}}


@pytest.mark.parametrize("version", ["1.1.0", "1.4.0"])
@pytest.mark.parametrize("reuses", [True, False])
def test_block_reuse_is_said_where_it_is_set(tmp_path: Path, version: str, reuses: bool) -> None:
    arguments = arguments_of(
        tmp_path,
        f"engine.tensorrt_llm.version={version}",
        f"engine.tensorrt_llm.enable_block_reuse={str(reuses).lower()}",
        "engine.tensorrt_llm.kv_cache_free_gpu_mem_fraction=0.5",
    )
    assert arguments["kv_cache_config"] == {
        "free_gpu_memory_fraction": 0.5,
        "enable_block_reuse": reuses,
    }


@pytest.mark.parametrize(
    ("installed", "version", "expected"),
    [
        ("1.2.0", "1.2.1", True),
        ("1.1.0", "1.2.1", False),
        ("1.3.0rc29", "1.3.0rc23", True),
        ("1.3.0", "1.3.0rc23", True),
        ("1.3.0rc22", "1.3.0rc23", False),
        ("1.4.0rc1", "1.3.0", False),
        ("1.4.0", "1.4.0rc4", True),
    ],
)
def test_what_was_written_for_a_release_is_its_line_s(
    installed: str, version: str, expected: bool
) -> None:
    assert model_yaml.serves(installed, version) is expected


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
    assert model_yaml.resolve(
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
            ("speculation.schedule=[{from_batch_size: 4, num_draft_tokens: 2}]",),
            "speculation.schedule is [{'from_batch_size': 4, 'num_draft_tokens': 2}]: expected "
            "nothing: backend pytorch of TensorRT-LLM 1.2.1 does not tell how much it drafted, so "
            "with its draft_len_schedule the counts would be wrong; 1.3.0rc23 and later do",
        ),
        (
            (LATEST, "speculation.schedule=[{from_batch_size: 1, num_draft_tokens: 2}]"),
            "speculation.schedule.0.num_draft_tokens is 2: expected 4, which is "
            "speculation.num_draft_tokens: TensorRT-LLM wants it of the smallest batches",
        ),
        (
            ("engine.tensorrt_llm.enable_penalty=true",),
            "engine.tensorrt_llm.enable_penalty is true: expected false: TensorRT-LLM has it from "
            "1.3.0rc27 on, not earlier",
        ),
        (
            (
                "engine.tensorrt_llm.enable_penalty=true",
                "engine.tensorrt_llm.version=1.3.0rc26",
            ),
            "engine.tensorrt_llm.enable_penalty is true: expected false",
        ),
        (
            (
                LATEST,
                "engine.tensorrt_llm.enable_penalty=true",
                "speculation.num_draft_tokens=0",
            ),
            "engine.tensorrt_llm.enable_penalty is true: expected nothing here, since it has no "
            "effect with speculation.num_draft_tokens 0",
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


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("version", ["1.0.0", "1.2.1", "1.3.0rc23", "1.4.0rc4"])
def test_gemma_2_is_not_among_the_models_of_backend_pytorch(
    tmp_path: Path, role: str, version: str
) -> None:
    gemma = toy(tmp_path / "gemma", family="gemma2")
    others = {"draft": PAIR / "draft", "target": PAIR / "target"} | {role: gemma}
    config = config_of(tmp_path, f"engine.tensorrt_llm.version={version}", **others)
    with pytest.raises(EngineBuildError) as caught:
        planning.plan(config)
    assert str(caught.value) == (
        f"{role}: Gemma2ForCausalLM is not among the models of backend pytorch in TensorRT-LLM "
        f"{version}, nor in any later release that specpipe knows of; runtime torch runs it, "
        "and backend tensorrt up to 1.2.1"
    )


@pytest.mark.parametrize("runtime", ["torch", "tensorrt_llm"])
def test_gemma_2_is_planned_by_all_that_have_it(tmp_path: Path, runtime: str) -> None:
    gemma = toy(tmp_path / "gemma", family="gemma2", sliding_window=512)
    path = tmp_path / "gemma.yaml"
    sides = {role: {"checkpoint": str(gemma)} for role in ("draft", "target")}
    path.write_text(yaml.safe_dump({"name": "gemma", **sides, "engine": {"runtime": runtime}}))
    assert planning.plan(load_config(path))[-1].name == "package"


@pytest.mark.parametrize("family", ["mistral", "qwen2", "phi3"])
def test_one_engine_drafts_for_two_families_only(tmp_path: Path, family: str) -> None:
    target = toy(tmp_path / "target", family=family)
    with pytest.raises(EngineBuildError) as caught:
        planning.plan(config_of(tmp_path, LATEST, target=target))
    architecture = toy_config(family)["architectures"][0]
    assert str(caught.value) == (
        "target: TensorRT-LLM 1.4.0rc4 drafts for LlamaForCausalLM and Qwen3ForCausalLM only, and "
        f"this is {architecture}; set speculation.num_draft_tokens to 0, or "
        "engine.tensorrt_llm.version to 1.2.1"
    )
    planning.plan(config_of(tmp_path, target=target))
    planning.plan(config_of(tmp_path, LATEST, "speculation.num_draft_tokens=0", target=target))
    planning.plan(config_of(tmp_path, LATEST, draft=target))


def test_one_engine_drafts_for_qwen3(tmp_path: Path) -> None:
    planning.plan(config_of(tmp_path, LATEST, target=toy(tmp_path / "target", family="qwen3")))


FP8_WITH_KV = "{format: fp8, kv_cache: fp8}"


@pytest.mark.parametrize(
    ("overrides", "caches"),
    [
        ((f"target.quantization={FP8_WITH_KV}",), ("not quantized", "FP8")),
        ((f"draft.quantization={FP8_WITH_KV}",), ("FP8", "not quantized")),
    ],
)
def test_one_engine_has_one_dtype_of_kv_cache(
    tmp_path: Path, overrides: Overrides, caches: tuple[str, str]
) -> None:
    with pytest.raises(EngineBuildError) as caught:
        planning.plan(config_of(tmp_path, LATEST, *overrides))
    assert str(caught.value) == (
        f"the draft's KV cache is {caches[0]} and the target's {caches[1]}: TensorRT-LLM 1.4.0rc4 "
        "gives the draft's the dtype of the target's; set draft.quantization.kv_cache and "
        "target.quantization.kv_cache alike"
    )
    planning.plan(config_of(tmp_path, *overrides))
    planning.plan(config_of(tmp_path, LATEST, "speculation.num_draft_tokens=0", *overrides))


def test_equal_dtypes_of_kv_cache_are_planned(tmp_path: Path) -> None:
    both = [f"{role}.quantization={FP8_WITH_KV}" for role in ("draft", "target")]
    planning.plan(config_of(tmp_path, LATEST, *both))
    planning.plan(config_of(tmp_path, LATEST, "target.quantization={format: fp8}"))


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("quantization", "version"),
    [
        (FP8_BLOCKS, "1.0.0"),
        (FP8_BLOCKS, "1.2.1"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "1.2.1"),
        (FP8_BLOCKS, "1.3.0rc23"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "1.4.0rc4"),
        ({"quant_method": "mxfp4"}, "1.3.0rc23"),
        ({"quant_method": "mxfp8"}, "1.4.0rc4"),
        ({"quant_method": "nvfp4", "group_size": 16}, "1.4.0rc4"),
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
        ({"quant_method": "nvfp4"}, "1.2.1", "TensorRT-LLM 1.2.1 is not known to read"),
        ({"quant_method": "nvfp4", "group_size": 32}, "1.4.0rc4", "is not known to read"),
        ({"quant_method": "fp8"}, "1.4.0rc4", "compressed-tensors and fp8 in blocks"),
        ({"quant_method": "awq"}, "1.4.0rc4", "is quantized by awq, which TensorRT-LLM 1.4.0rc4"),
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
