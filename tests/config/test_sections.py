from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from specpipe.build.load import load_config
from specpipe.config.limits import Limits
from specpipe.config.sections import PipelineConfig, json_schema
from specpipe.errors import ConfigError

MINIMAL = """\
name: toy
draft:
  checkpoint: models/draft
target:
  checkpoint: models/target
"""

TENSORRT = MINIMAL + "engine:\n  runtime: tensorrt\n"
TENSORRT_LLM = MINIMAL + "engine:\n  runtime: tensorrt_llm\n"

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str) -> PipelineConfig:
    Path("x.yaml").write_text(text)
    return load_config(Path("x.yaml"), overrides)


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_committed_configs_load(path: Path) -> None:
    assert load_config(path).source == path


def test_quickstart_names_the_committed_pair() -> None:
    config = load_config(next(path for path in CONFIGS if path.name == "quickstart.yaml"))
    for checkpoint in (config.draft.checkpoint, config.target.checkpoint):
        assert (config.base_dir / checkpoint / "config.json").is_file()


def test_defaults() -> None:
    values = load(MINIMAL).model_dump(mode="json")
    whole = {"revision": None, "tp_size": 1, "pp_size": 1, "quantization": None}
    assert values == {
        "name": "toy",
        "draft": {"checkpoint": "models/draft", **whole},
        "target": {"checkpoint": "models/target", **whole},
        "speculation": {
            "num_draft_tokens": 4,
            "adaptive": True,
            "schedule": [],
            "prompt_lookup": False,
        },
        "engine": {
            "runtime": "torch",
            "max_batch_size": 8,
            "max_seq_len": None,
            "max_num_tokens": 256,
            "dtype": "auto",
            "device": "auto",
            "kernels": "auto",
            "num_threads": None,
            "kv_cache_memory": None,
            "prefix_reuse": True,
        },
        "quality": {
            "measure": True,
            "max_mean_kl": None,
            "min_top1_agreement": None,
            "max_perplexity_ratio": None,
            "min_acceptance_ratio": None,
        },
        "serving": {
            "max_queue_size": 128,
            "request_timeout_s": 600.0,
            "stream_interval_ms": None,
            "preprocessing_instances": 2,
            "limits": Limits().model_dump(),
        },
        "nightly": {
            "prompts": "code",
            "num_prompts": 16,
            "max_tokens": 64,
            "concurrencies": [1, 8],
            "rounds": 3,
            "sampling_distance": None,
            "gate": None,
            "min_gate_pass_rate": None,
            "allow_ties": True,
            "min_acceptance_ratio": 0.95,
            "min_acceptance_rate": None,
            "min_speed_up": 0.9,
            "min_speed_up_ratio": 0.8,
            "max_latency_ratio": 1.5,
            "max_perplexity_ratio": 1.02,
            "max_kl_ratio": 1.25,
            "min_top1_ratio": 0.99,
            "max_size_ratio": 1.1,
        },
        "release": {
            "store": None,
            "cache": None,
            "trust": None,
            "require_signature": False,
            "keep_previous": True,
        },
        "output_dir": "engines",
    }


def test_defaults_of_runtime_tensorrt() -> None:
    assert load(TENSORRT).engine.model_dump(mode="json") == {
        "runtime": "tensorrt",
        "max_batch_size": 8,
        "max_seq_len": None,
        "max_num_tokens": 1024,
        "dtype": "auto",
        "library": "tensorrt_rtx",
        "compute_capabilities": ["8.0", "8.6", "8.9", "12.0", "12.1"],
        "weights": "inside",
        "weight_streaming": False,
    }


def test_defaults_of_runtime_tensorrt_llm() -> None:
    values = load(TENSORRT_LLM).engine.model_dump(mode="json")
    tensorrt_llm = values.pop("tensorrt_llm")
    assert values == {
        "runtime": "tensorrt_llm",
        "max_batch_size": 8,
        "max_seq_len": None,
        "max_num_tokens": 8192,
    }
    del tensorrt_llm["build"], tensorrt_llm["parameters"]
    assert tensorrt_llm == {
        "backend": "tensorrt",
        "version": "1.2.1",
        "image": None,
        "compute_capability": None,
        "draft_gpu_ids": None,
        "target_gpu_ids": None,
        "extra_build_args": [],
        "kv_cache_free_gpu_mem_fraction": None,
        "acceptance": "exact",
        "enable_block_reuse": None,
        "enable_penalty": False,
    }


def test_gpu_ids_default_to_the_first_ones() -> None:
    config = load(TENSORRT_LLM, "target.tp_size=2", "target.pp_size=2")
    settings = config.engine.tensorrt_llm
    assert config.target.world_size == 4
    assert settings.gpu_ids("target", config.target.world_size) == (0, 1, 2, 3)
    assert settings.gpu_ids("draft", config.draft.world_size) == (0,)
    settings = load(TENSORRT_LLM, "engine.tensorrt_llm.draft_gpu_ids=[5]").engine.tensorrt_llm
    assert settings.gpu_ids("draft", 1) == (5,)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "x.yaml").write_text(MINIMAL + "output_dir: ../built\n")
    config = load_config(folder / "x.yaml")
    assert config.source == folder / "x.yaml"
    assert config.base_dir == folder
    assert config.artifacts_dir == tmp_path / "built" / "toy"


def test_config_is_frozen() -> None:
    config = load(MINIMAL)
    with pytest.raises(ValidationError):
        config.engine.max_batch_size = 2


def test_merge_keys_and_anchors() -> None:
    config = load(
        "name: toy\ndraft: &one {checkpoint: a, tp_size: 2}\ntarget: {<<: *one, checkpoint: b}\n"
    )
    assert config.target.checkpoint == "b"
    assert config.target.tp_size == 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "speculation:\n  num_draft_tokens: 64\n",
            "x.yaml:7: speculation.num_draft_tokens is 64: expected a whole number from 0 to 32",
        ),
        (
            'engine:\n  max_batch_size: "4"\n',
            "x.yaml:7: engine.max_batch_size is '4': expected a whole number of at least 1",
        ),
        (
            "engine:\n  max_batch_size: true\n",
            "x.yaml:7: engine.max_batch_size is true: expected a whole number of at least 1",
        ),
        (
            "engine:\n  max_seq_len: 1.5\n",
            "x.yaml:7: engine.max_seq_len is 1.5: expected a whole number of at least 2 or null",
        ),
        (
            "engine:\n\n  # a comment\n  dtype: float8\n",
            "x.yaml:9: engine.dtype is 'float8':"
            " expected one of 'auto', 'float32', 'bfloat16', 'float16'",
        ),
        (
            "engine: {runtime: vllm}\n",
            "x.yaml:6: engine.runtime is 'vllm':"
            " expected one of 'torch', 'tensorrt', 'tensorrt_llm'",
        ),
        (
            "speculation: {adaptive: 1}\n",
            "x.yaml:6: speculation.adaptive is 1: expected true or false",
        ),
        (
            "serving:\n  request_timeout_s: 0\n",
            "x.yaml:7: serving.request_timeout_s is 0: expected a number above 0",
        ),
        (
            "serving:\n",
            "x.yaml:6: serving is empty: expected a mapping with max_queue_size, request_timeout_s,"
            " stream_interval_ms, preprocessing_instances, limits",
        ),
        (
            "engine: fast\n",
            "x.yaml:6: engine is 'fast': expected a mapping with runtime, max_batch_size,"
            " max_seq_len, max_num_tokens, dtype, device, kernels, num_threads, kv_cache_memory,"
            " prefix_reuse, library,"
            " compute_capabilities, weights, weight_streaming, tensorrt_llm",
        ),
        (
            "engine:\n  max_num_tokens: 4\n",
            "x.yaml:7: engine.max_num_tokens is 4:"
            " expected at least 5, one more than speculation.num_draft_tokens",
        ),
        (
            "output_dir: [a]\n",
            "x.yaml:6: output_dir is ['a']: expected text"
            " (folder, relative to this file, under which `<name>/` holds the artifacts)",
        ),
    ],
)
def test_wrong_values_name_line_key_value_and_expectation(extra: str, message: str) -> None:
    assert refusal(MINIMAL + extra) == message


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "engine:\n  max_batchsize: 4\n",
            "x.yaml:7: engine.max_batchsize is not a setting: did you mean engine.max_batch_size?",
        ),
        (
            "engine:\n  num_draft_tokens: 4\n",
            "x.yaml:7: engine.num_draft_tokens is not a setting:"
            " did you mean speculation.num_draft_tokens?",
        ),
        (
            "max_sequence_len: 4\n",
            "x.yaml:6: max_sequence_len is not a setting: did you mean engine.max_seq_len?",
        ),
        (
            "speculation: {flavour: mild}\n",
            "x.yaml:6: speculation.flavour is not a setting:"
            " expected one of num_draft_tokens, adaptive, schedule, prompt_lookup",
        ),
    ],
)
def test_mistyped_keys_name_the_nearest(extra: str, message: str) -> None:
    assert refusal(MINIMAL + extra) == message


KV = "target.quantization.kv_cache"
LLM = "engine.tensorrt_llm"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engine.device=cuda"],
            "engine.device is 'cuda': expected nothing here, since it has no effect with"
            " engine.runtime 'tensorrt_llm'",
        ),
        (
            ["speculation.num_draft_tokens=0"],
            "speculation.num_draft_tokens is 0: expected at least 1: a target engine is built for"
            " the draft tokens that it verifies, and a request may still ask for 0",
        ),
        (
            ["target.quantization={format: fp8, kv_cache: int8}"],
            f"{KV} is 'int8': expected 'fp8' or null",
        ),
        (
            ["target.quantization={format: int4_awq, kv_cache: fp8}"],
            f"{KV} is 'fp8': expected null with format 'int4_awq': with it the builder switches"
            " off paged context FMHA, which drafting needs; formats that go with it: fp8,"
            " w4a8_awq, nvfp4",
        ),
        (
            ["target.quantization={format: fp4}"],
            "target.quantization.format is 'fp4': expected one of 'fp8', 'fp8_pc_pt', 'int8_sq',"
            " 'int4_awq', 'w4a8_awq', 'int8_wo', 'int4_wo', 'nvfp4'",
        ),
        (
            ["target.quantization={format: int4_awq, awq_block_size: 32}"],
            "target.quantization.awq_block_size is 32: expected 64 or 128: TensorRT-LLM has no"
            " other kernels of int4_awq",
        ),
        (
            ["draft.quantization={format: w4a8_awq, awq_block_size: 64}"],
            "draft.quantization.awq_block_size is 64: expected 128: TensorRT-LLM has no other"
            " kernels of w4a8_awq",
        ),
        (
            ["target.quantization={format: fp8_pc_pt, exclude: ['*.mlp.proj']}"],
            "target.quantization.exclude is ['*.mlp.proj']: expected nothing with format"
            " 'fp8_pc_pt', which TensorRT-LLM gives to whole attention and MLP modules; format"
            " 'fp8' leaves out single linears",
        ),
        (
            ["target.quantization={format: fp8_pc_pt, quantize_lm_head: true}"],
            "target.quantization.quantize_lm_head is true: expected false with format 'fp8_pc_pt',"
            " of which TensorRT-LLM has no head; format 'fp8' has one",
        ),
        (
            ["draft.quantization={format: int4_wo, quantize_lm_head: true}"],
            "draft.quantization.quantize_lm_head is true: expected false with format 'int4_wo',"
            " of which TensorRT-LLM has no head; format 'fp8' has one",
        ),
        (
            ["target.tp_size=2", f"{LLM}.target_gpu_ids=[0]"],
            f"{LLM}.target_gpu_ids is [0]: expected 2 GPUs, one for each rank of target.tp_size"
            " times target.pp_size",
        ),
        (
            ["target.tp_size=2", f"{LLM}.target_gpu_ids=[1, 1]"],
            f"{LLM}.target_gpu_ids is [1, 1]: expected each GPU once",
        ),
        (
            [f"{LLM}.draft_gpu_ids=0"],
            f"{LLM}.draft_gpu_ids is 0: expected a list of whole numbers of at least 0 or null",
        ),
        (
            [f"{LLM}.version=0.19.0"],
            f"{LLM}.version is '0.19.0': expected one of '1.0.0', '1.1.0', '1.2.0', '1.2.1', or"
            " with backend pytorch a release of 1.3 or 1.4 from 1.3.0rc23 on",
        ),
        (
            [f"{LLM}.version=1.4.0rc4"],
            f"{LLM}.version is '1.4.0rc4': expected one of 1.0.0, 1.1.0, 1.2.0, 1.2.1, since"
            " TensorRT-LLM builds no engines from 1.3.0rc23 on; or engine.tensorrt_llm.backend"
            " pytorch",
        ),
        (
            [f"{LLM}.version=1.2"],
            f"{LLM}.version is 1.2: expected one of '1.0.0', '1.1.0', '1.2.0', '1.2.1' or text"
            " (of 1.3 or 1.4, from 1.3.0rc23 on)",
        ),
        (
            [f"{LLM}.enable_penalty=true"],
            f"{LLM}.enable_penalty is true: expected nothing here, since it has no effect with"
            " backend tensorrt",
        ),
        (
            [f"{LLM}.enable_block_reuse=false"],
            f"{LLM}.enable_block_reuse is false: expected nothing here, since it has no effect with"
            " backend tensorrt",
        ),
        (
            [f"{LLM}.kv_cache_free_gpu_mem_fraction=1"],
            f"{LLM}.kv_cache_free_gpu_mem_fraction is 1: expected a number above 0 and below 1"
            " or null",
        ),
        (
            [f"{LLM}.build.use_paged_context_fmha=false"],
            f"{LLM}.build.use_paged_context_fmha is false: expected nothing here, since specpipe"
            " sets it: drafting needs it on, in both engines",
        ),
        (
            [f"{LLM}.build.max_batch_size=4"],
            f"{LLM}.build.max_batch_size is 4: expected nothing here, since specpipe sets it:"
            " set engine.max_batch_size",
        ),
        (
            [f"{LLM}.build.gem_plugin=auto"],
            f"{LLM}.build.gem_plugin is not a setting: did you mean {LLM}.build.gemm_plugin?",
        ),
        (
            [f"{LLM}.build.opt_num_tokens=8", f"{LLM}.build.multiple_profiles=true"],
            f"{LLM}.build.opt_num_tokens is 8: expected null with multiple_profiles",
        ),
        (
            [f"{LLM}.build.gemm_swiglu_plugin=fp8", f"{LLM}.build.use_fused_mlp=false"],
            f"{LLM}.build.gemm_swiglu_plugin is 'fp8': expected 'disable' without use_fused_mlp",
        ),
        (
            [f"{LLM}.build.user_buffer=true"],
            f"{LLM}.build.user_buffer is true: expected false without reduce_fusion",
        ),
        (
            [f"{LLM}.build.norm_quant_fusion=true", f"{LLM}.build.reduce_fusion=true"],
            f"{LLM}.build.norm_quant_fusion is true: expected false with reduce_fusion",
        ),
        (
            [f"{LLM}.parameters.gpu_weights_percent=0.5"],
            f"{LLM}.parameters.gpu_weights_percent is 0.5: expected 1, or"
            f" {LLM}.build.weight_streaming true",
        ),
    ],
)
def test_what_tensorrt_llm_cannot_do_names_the_setting(overrides: list[str], message: str) -> None:
    refused = refusal(TENSORRT_LLM, *overrides)
    assert refused.endswith(f": {message}")
    assert "\n" not in refused


def no_effect(key: str, value: str, where: str) -> str:
    return f"{key} is {value}: expected nothing here, since it has no effect with {where}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["target.tp_size=2"],
            "target.tp_size is 2: expected 1: an engine of runtime 'tensorrt' runs on one GPU;"
            " engine.runtime tensorrt_llm splits it",
        ),
        (
            ["draft.pp_size=3"],
            "draft.pp_size is 3: expected 1: an engine of runtime 'tensorrt' runs on one GPU;"
            " engine.runtime tensorrt_llm splits it",
        ),
        (
            ["target.quantization={format: nvfp4}"],
            "target.quantization.format is 'nvfp4': expected fp8 or int4_awq with runtime"
            " 'tensorrt'; engine.runtime torch and tensorrt_llm run the others",
        ),
        (
            ["target.quantization={format: fp8, kv_cache: fp8}"],
            "target.quantization.kv_cache is 'fp8': expected null with runtime 'tensorrt': the"
            " library's KV cache takes floating-point types only",
        ),
        (
            ["draft.quantization={format: int4_awq}", "engine.weights=beside"],
            "engine.weights is 'beside': expected inside, since draft is quantized: inputs of an"
            " engine are not",
        ),
        (
            [
                "target.quantization={format: fp8}",
                'engine.compute_capabilities=["8.0", "8.6", "8.9"]',
            ],
            "engine.compute_capabilities is ['8.0', '8.6', '8.9']: expected none of 8.0, 8.6,"
            " which target.quantization.format fp8 does not run on",
        ),
        (
            ["engine.library=tensorrt", 'engine.compute_capabilities=["8.9"]'],
            no_effect(
                "engine.compute_capabilities",
                "['8.9']",
                "engine.library tensorrt, which builds for the GPU that it finds",
            ),
        ),
        (
            ["engine.weights=beside", "engine.weight_streaming=true"],
            no_effect(
                "engine.weight_streaming",
                "true",
                "engine.weights beside: there is none in the engine",
            ),
        ),
        (
            ["engine.device=cuda"],
            no_effect("engine.device", "'cuda'", "engine.runtime 'tensorrt'"),
        ),
        (
            ["engine.num_threads=2"],
            no_effect("engine.num_threads", "2", "engine.runtime 'tensorrt'"),
        ),
        (
            ["engine.compute_capabilities=[]"],
            "engine.compute_capabilities is []:"
            " expected a list of '8.0' or '8.6' or '8.9' or '12.0' or '12.1'",
        ),
        (
            ["engine.library=trt"],
            "engine.library is 'trt': expected one of 'tensorrt_rtx', 'tensorrt'",
        ),
    ],
)
def test_what_runtime_tensorrt_cannot_do_names_the_setting(
    overrides: list[str], message: str
) -> None:
    assert refusal(TENSORRT, *overrides) == f"--set {overrides[-1]}: {message}"


def test_a_gpu_that_tensorrt_rtx_does_not_build_for_is_named() -> None:
    """H100: compute capability 9.0 is served by library tensorrt."""
    first = refusal(TENSORRT, 'engine.compute_capabilities=["8.9", "9.0"]').splitlines()[0]
    assert first.endswith(
        "engine.compute_capabilities.1 is '9.0':"
        " expected one of '8.0', '8.6', '8.9', '12.0', '12.1'"
    )


def test_settings_of_runtime_tensorrt() -> None:
    engine = load(TENSORRT, 'engine.compute_capabilities=["12.0"]', "engine.weights=beside").engine
    assert (engine.compute_capabilities, engine.weights) == (("12.0",), "beside")
    engine = load(TENSORRT, "engine.library=tensorrt", "engine.weight_streaming=true").engine
    assert (engine.library, engine.weight_streaming) == ("tensorrt", True)


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("library=tensorrt", "'tensorrt'"),
        ("weights=beside", "'beside'"),
        ("weight_streaming=false", "false"),
    ],
)
def test_settings_of_runtime_tensorrt_are_refused_elsewhere(setting: str, shown: str) -> None:
    key = f"engine.{setting.partition('=')[0]}"
    for text, runtime in ((MINIMAL, "torch"), (TENSORRT_LLM, "tensorrt_llm")):
        refused = refusal(text, f"engine.{setting}")
        assert refused.endswith(no_effect(key, shown, f"engine.runtime '{runtime}'"))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "engine:\n  tensorrt_llm: {version: 1.1.0}\n",
            "x.yaml:7: engine.tensorrt_llm is {'version': '1.1.0'}: expected nothing here, since"
            " it has no effect with engine.runtime 'torch'",
        ),
        (
            "engine: {runtime: tensorrt_llm}\nspeculation: {num_draft_tokens: 0}\n",
            "x.yaml:7: speculation.num_draft_tokens is 0: expected at least 1: a target engine is"
            " built for the draft tokens that it verifies, and a request may still ask for 0",
        ),
    ],
)
def test_settings_without_effect_are_refused_at_their_line(extra: str, message: str) -> None:
    assert refusal(MINIMAL + extra) == message


FORMAT_SETTINGS = (
    "{format: fp8}",
    "{format: fp8_pc_pt, exclude: ['*.mlp.proj'], quantize_lm_head: true}",
    "{format: int8_sq, kv_cache: fp8}",
    "{format: int4_awq, awq_block_size: 32}",
    "{format: w4a8_awq, awq_block_size: 64, kv_cache: fp8}",
    "{format: int8_wo, quantize_lm_head: true}",
    "{format: int4_wo, calibration: {num_samples: 16}}",  # on them the cost is measured
    "{format: nvfp4, export: true}",
)


@pytest.mark.parametrize("scheme", FORMAT_SETTINGS)
def test_torch_runs_every_format(scheme: str) -> None:
    assert load(MINIMAL, f"draft.quantization={scheme}").draft.quantization is not None


NO_EFFECT = "expected nothing here, since it has no effect with"
FP8 = "target.quantization={format: fp8}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["target.quantization={format: fp8, awq_block_size: 64}"],
            f"target.quantization.awq_block_size is 64: {NO_EFFECT} format 'fp8'",
        ),
        (
            [
                "draft.quantization={format: int8_wo, calibration: {num_samples: 16}}",
                "quality.measure=false",
            ],
            f"draft.quantization.calibration is {{'num_samples': 16}}: {NO_EFFECT} format"
            " 'int8_wo', which needs no data, and quality.measure false",
        ),
        (
            ["target.quantization={format: int4_wo, export: true}"],
            "target.quantization.export is true: expected false with format 'int4_wo', which has"
            " no Hugging Face layout: TensorRT-LLM quantizes its weights while it builds an engine",
        ),
        (
            ["quality.max_mean_kl=0.1"],
            f"quality is {{'max_mean_kl': 0.1}}: {NO_EFFECT} checkpoints that are not quantized"
            " here",
        ),
        (
            ["quality.measure=true"],
            f"quality is {{'measure': True}}: {NO_EFFECT} checkpoints that are not quantized here",
        ),
        (
            [FP8, "quality.measure=false", "quality.max_mean_kl=0.1"],
            f"quality.max_mean_kl is 0.1: {NO_EFFECT} quality.measure false",
        ),
        (
            [FP8, "quality.min_acceptance_ratio=0.9", "speculation.num_draft_tokens=0"],
            f"quality.min_acceptance_ratio is 0.9: {NO_EFFECT} speculation.num_draft_tokens 0",
        ),
    ],
)
def test_settings_of_quantization_without_effect(overrides: list[str], message: str) -> None:
    assert refusal(MINIMAL, *overrides).endswith(f": {message}")


def test_a_pair_that_is_not_quantized_is_not_measured() -> None:
    assert not load(MINIMAL, "quality.measure=false").quality.measure


def test_fp8_kv_cache_needs_the_data_that_its_weights_do_not() -> None:
    scheme = "{format: fp8_pc_pt, kv_cache: fp8, calibration: {num_samples: 16}}"
    config = load(MINIMAL, f"target.quantization={scheme}", "quality.measure=false")
    assert config.target.quantization is not None
    assert config.target.quantization.needs_data


def test_missing_keys_name_their_section() -> None:
    assert refusal("name: toy\ndraft:\n  checkpoint: a\ntarget:\n  tp_size: 2\n") == (
        "x.yaml:4: target.checkpoint is missing: expected text"
        " (a folder, relative to this file, or the id of a model on the Hugging Face hub)"
    )


def test_all_faults_are_named_at_once() -> None:
    assert refusal(MINIMAL.replace("toy", "a/b") + "engine: {max_batch_size: 0}\n") == (
        "x.yaml:1: name is 'a/b': expected text"
        " (names the folder of the artifacts: letters, digits, `.`, `_` and `-`)\n"
        "x.yaml:6: engine.max_batch_size is 0: expected a whole number of at least 1"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.yaml is empty: expected the keys name, draft, target"),
        ("# nothing\n", "x.yaml is empty: expected the keys name, draft, target"),
        (
            "- a\n",
            "x.yaml:1: the file holds a list: expected a mapping with the keys name, draft, target",
        ),
        (
            "hello\n",
            "x.yaml:1: the file holds text: expected a mapping with the keys name, draft, target",
        ),
        (
            "3\n",
            "x.yaml:1: the file holds the value 3:"
            " expected a mapping with the keys name, draft, target",
        ),
        ("a: 1\nb: c: d\n", "x.yaml:2: not YAML: mapping values are not allowed here"),
        (
            "a: 1\nb: [1,\n",
            "x.yaml:3: not YAML: while parsing a flow node expected the node"
            " content, but found '<stream end>'",
        ),
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3: duplicate key 'a', first set in line 1"),
        ("a:\n  b: 1\n  b: 1\n", "x.yaml:3: duplicate key 'b', first set in line 2"),
        ("a: 1:30\n", "x.yaml:1: '1:30' is no number, nor text without quotes"),
        ("a: &x [*x]\n", "x.yaml:1: this value contains itself"),
        ("1: 2\n", "x.yaml:1: the key 1 is not text: put it in quotes"),
        ("? [a]\n: 2\n", "x.yaml:1: this key is not text: put it in quotes"),
        (
            "a: 2026-13-45\n",
            "x.yaml:1: '2026-13-45' has no meaning in YAML: month must be in 1..12",
        ),
        ("a: \x00\n", "x.yaml:1: not YAML: the character U+0000 is not allowed"),
        (
            "a: !!python/object:os.system x\n",
            "x.yaml:1: not YAML: could not determine a constructor for the tag"
            " 'tag:yaml.org,2002:python/object:os.system'",
        ),
        (
            "a: 1\n---\nb: 2\n",
            "x.yaml:2: not YAML: expected a single document in the stream"
            " but found another document",
        ),
        ("[" * 1000, "x.yaml: not a configuration: nested too deeply"),
    ],
)
def test_unreadable_files_are_one_sentence(text: str, message: str) -> None:
    assert refusal(text) == message


def test_missing_file_folder_and_binary_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"name: \xff\n")
    messages = []
    for name in ("nothing.yaml", ".", "binary.yaml"):
        with pytest.raises(ConfigError) as caught:
            load_config(Path(name))
        messages.append(str(caught.value))
    assert messages == [
        "nothing.yaml does not exist: expected a YAML file",
        ". is a folder: expected a YAML file",
        "binary.yaml is not text in UTF-8 (byte 6): expected a YAML file",
    ]


def test_many_aliases_stay_small() -> None:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 30)]
    assert refusal("l0: &l0 [x]\n" + "\n".join(levels)).startswith("x.yaml:")


def test_overrides_apply_in_order_and_leave_the_rest() -> None:
    config = load(
        MINIMAL + "engine: {max_batch_size: 2, max_seq_len: 64}\n",
        "engine.max_batch_size=3",
        "engine.max_batch_size=5",
        "speculation.adaptive=false",
        "draft.checkpoint=other/draft",
    )
    assert config.engine.max_batch_size == 5
    assert config.engine.max_seq_len == 64
    assert config.speculation.adaptive is False
    assert config.draft.checkpoint == "other/draft"


def test_override_values_are_yaml() -> None:
    assert load(MINIMAL, "engine.max_seq_len=null").engine.max_seq_len is None
    assert load(MINIMAL, "speculation={num_draft_tokens: 2}").speculation.num_draft_tokens == 2
    assert load(MINIMAL, "name='12'").name == "12"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "engine.max_batch_size=0",
            "engine.max_batch_size is 0: expected a whole number of at least 1",
        ),
        (
            "engine.max_batch=4",
            "engine.max_batch is not a setting: did you mean engine.max_batch_size?",
        ),
        ("draft=x", "draft is 'x': expected a mapping with checkpoint"),
        (
            "engine.dtype.x=4",
            "engine.dtype is {'x': 4}: expected one of 'auto', 'float32', 'bfloat16', 'float16'",
        ),
        ("name.x=4", "name is 'toy', which has no settings below it"),
        ("engine", "expected KEY=VALUE, as in --set engine.max_batch_size=8"),
        ("=3", "expected KEY=VALUE, as in --set engine.max_batch_size=8"),
        ("engine..x=3", "expected KEY=VALUE, as in --set engine.max_batch_size=8"),
    ],
)
def test_wrong_overrides_name_the_option(override: str, message: str) -> None:
    assert refusal(MINIMAL, override) == f"--set {override}: {message}"


def test_override_that_is_not_yaml_names_the_option() -> None:
    assert refusal(MINIMAL, "name=[").startswith("--set name=[:1: not YAML: ")


def test_override_can_supply_what_the_file_lacks() -> None:
    assert load("draft: {checkpoint: a}\ntarget: {checkpoint: b}\n", "name=toy").name == "toy"


def test_fault_in_the_file_is_not_blamed_on_an_override() -> None:
    message = refusal(MINIMAL + "engine: {max_batch_size: 0}\n", "engine.max_seq_len=64")
    assert message.startswith("x.yaml:6: engine.max_batch_size is 0")


def test_schema_describes_every_setting() -> None:
    schema = json.loads(json.dumps(json_schema()))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["name", "draft", "target"]
    draft_tokens = schema["$defs"]["SpeculationConfig"]["properties"]["num_draft_tokens"]
    assert draft_tokens == {
        "type": "integer",
        "title": "Num Draft Tokens",
        "default": 4,
        "minimum": 0,
        "maximum": 32,
        "description": "Draft tokens per step (K), at most; a request that names a number up to"
        " this is drafted with\njust that. 0: the target model alone.",
    }
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        for setting in section["properties"].values():
            assert setting["description"].endswith(".")


LEVELS = """\
speculation:
  num_draft_tokens: 4
  schedule:
    - {from_batch_size: 1, num_draft_tokens: 4}
    - {from_batch_size: 3, num_draft_tokens: 2}
"""


def test_a_schedule_by_load() -> None:
    assert load(MINIMAL + LEVELS).speculation.limits == ((1, 4), (3, 2))
    assert load(MINIMAL).speculation.limits == ()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("[3]", "0 is 3: expected a mapping with from_batch_size, num_draft_tokens"),
        (
            "[{from_batch_size: 0, num_draft_tokens: 1}]",
            "0.from_batch_size is 0: expected a whole number of at least 1",
        ),
        (
            "[{from_batch_size: 2, num_draft_tokens: 1}, {from_batch_size: 2, "
            "num_draft_tokens: 0}]",
            "1.from_batch_size is 2: expected more than 2, the level before it",
        ),
        (
            "[{from_batch_size: 1, num_draft_tokens: 5}]",
            "0.num_draft_tokens is 5: expected at most 4, which is speculation.num_draft_tokens",
        ),
        (
            "[{from_batch_size: 9, num_draft_tokens: 1}]",
            "0.from_batch_size is 9: expected at most 8, which is engine.max_batch_size",
        ),
    ],
)
def test_a_schedule_that_cannot_be(override: str, message: str) -> None:
    given = f"speculation.schedule={override}"
    assert refusal(MINIMAL, given) == f"--set {given}: speculation.schedule.{message}"


def test_a_schedule_that_is_no_list() -> None:
    text = MINIMAL + "speculation:\n  schedule: 3\n"
    assert refusal(text) == "x.yaml:7: speculation.schedule is 3: expected a list of mappings"


def test_the_line_of_a_level() -> None:
    text = MINIMAL + LEVELS.replace("from_batch_size: 3", "from_batch_size: 1")
    assert refusal(text).startswith("x.yaml:10: speculation.schedule.1.from_batch_size is 1: ")


def test_backend_pytorch_has_no_schedule_of_ours() -> None:
    backend = "engine:\n  runtime: tensorrt_llm\n  tensorrt_llm: {backend: pytorch}\n"
    assert "speculation.schedule is [{" in refusal(MINIMAL + LEVELS + backend)


LOOKUP = "speculation:\n  prompt_lookup: true\n"


@pytest.mark.parametrize("runtime", ["torch", "tensorrt"])
def test_prompt_lookup_where_our_loop_runs(runtime: str) -> None:
    assert load(MINIMAL + LOOKUP, f"engine.runtime={runtime}").speculation.prompt_lookup
    never = "speculation.schedule=[{from_batch_size: 1, num_draft_tokens: 0}]"
    assert load(MINIMAL + LOOKUP, never).speculation.limits == ((1, 0),)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["speculation.adaptive=false"],
            "false, or speculation.adaptive true: what recent copies were worth decides whether a"
            " step copies",
        ),
        (
            ["speculation.num_draft_tokens=0"],
            "nothing here, since it has no effect with speculation.num_draft_tokens 0",
        ),
        (
            ["engine.runtime=tensorrt_llm"],
            "nothing here, since it has no effect with engine.runtime 'tensorrt_llm'",
        ),
        (
            ["engine.runtime=tensorrt_llm", f"{LLM}.backend=pytorch"],
            "nothing here, since it has no effect with engine.runtime 'tensorrt_llm'",
        ),
    ],
)
def test_prompt_lookup_without_effect(overrides: list[str], expected: str) -> None:
    assert refusal(MINIMAL + LOOKUP, *overrides) == (
        f"x.yaml:7: speculation.prompt_lookup is true: expected {expected}"
    )
    off = load(MINIMAL + LOOKUP.replace("true", "false"), *overrides)
    assert not off.speculation.prompt_lookup
