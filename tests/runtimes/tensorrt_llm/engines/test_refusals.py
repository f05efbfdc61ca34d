"""Kind K12: formats, caches and sizes that TensorRT-LLM or a GPU cannot do, told beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specpipe.checkpoints.formats import OFFERED
from specpipe.checkpoints.unified_sections import Quantization
from specpipe.errors import EngineBuildError
from specpipe.runtimes.tensorrt_llm import capabilities
from specpipe.runtimes.tensorrt_llm.engines import refusals
from tests.fake_nvml import Device, be
from tests.runtimes.tensorrt_llm import plans
from tests.toy import toy_config


def refused(folder: Path, **changes: Any) -> list[str]:
    """The lines that a plan is refused with; [] if it is not."""
    try:
        pair = plans.plan(folder, **changes)
        refusals.check_plan(pair, capabilities.capabilities(pair))
    except EngineBuildError as exc:
        return str(exc).splitlines()
    return []


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch)


AWQ = {"quantization": {"format": "int4_awq"}}


def on(sm: str, **settings: Any) -> dict[str, Any]:
    return {"tensorrt_llm": {"compute_capability": sm, **settings}}


def test_plain_pair_passes_everywhere(tmp_path: Path) -> None:
    for sm in ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0"):
        assert refused(tmp_path, **on(sm)) == []


@pytest.mark.parametrize(
    ("sm", "runs"),
    [
        ("8.0", "int8_sq int4_awq int8_wo int4_wo"),
        ("8.6", "int8_sq int4_awq int8_wo int4_wo"),
        ("8.9", "fp8 fp8_pc_pt int8_sq int4_awq w4a8_awq int8_wo int4_wo"),
        ("9.0", "fp8 fp8_pc_pt int8_sq int4_awq w4a8_awq int8_wo int4_wo"),
        ("10.0", "fp8 nvfp4"),
        ("10.3", "fp8 nvfp4"),
        ("12.0", "fp8 fp8_pc_pt int8_sq int4_awq w4a8_awq int8_wo int4_wo nvfp4"),
    ],
)
def test_formats_by_gpu(tmp_path: Path, sm: str, runs: str) -> None:
    possible = []
    for name in OFFERED:
        lines = refused(tmp_path, target_checkpoint={"quantization": {"format": name}}, **on(sm))
        if not lines:
            possible.append(name)
            continue
        assert lines == [
            f"target.quantization.format '{name}' does not run on a GPU of compute capability {sm};"
            f" formats that do: {', '.join(runs.split())}; or leave quantization out"
        ]
    assert possible == runs.split()


def test_formats_pass_where_the_gpu_is_not_known(tmp_path: Path) -> None:
    scheme = {"quantization": {"format": "nvfp4", "kv_cache": "fp8"}}
    assert refused(tmp_path, target_checkpoint=scheme) == []


def test_volta_verifies_nothing(tmp_path: Path) -> None:
    assert refused(tmp_path, **on("7.0")) == [
        f"{role}: TensorRT-LLM does not verify draft tokens on a GPU of compute capability 7.0; "
        "it needs 8.0 or more"
        for role in ("draft", "target")
    ]


@pytest.mark.parametrize(
    ("sm", "flags", "line"),
    [
        (
            "8.9",
            {"gemm_swiglu_plugin": "fp8"},
            "engine.tensorrt_llm.build.gemm_swiglu_plugin does not run on a GPU of compute"
            " capability 8.9, but on 9.0; disable it",
        ),
        (
            "10.0",
            {"low_latency_gemm_plugin": "fp8"},
            "engine.tensorrt_llm.build.low_latency_gemm_plugin does not run on a GPU of compute"
            " capability 10.0; disable it",
        ),
    ],
)
def test_plugins_by_gpu(tmp_path: Path, sm: str, flags: Mapping[str, str], line: str) -> None:
    assert refused(tmp_path, **on(sm, build=flags)) == [line]
    assert refused(tmp_path, **on("9.0", build=flags)) == []


def test_gpus_of_this_machine_decide_where_the_config_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(monkeypatch, Device(), Device("NVIDIA A10", (8, 6)))
    pair = plans.plan(tmp_path, tensorrt_llm={"target_gpu_ids": [1]})
    assert capabilities.capabilities(pair) == {"draft": "9.0", "target": "8.6"}
    both = plans.plan(tmp_path, target_checkpoint={"tp_size": 2})
    assert capabilities.capabilities(both)["target"] == "8.6"
    given = plans.plan(tmp_path, **on("10.0"))
    assert capabilities.capabilities(given) == {"draft": "10.0", "target": "10.0"}


@pytest.mark.parametrize("checkpoint", [{}, {"quantization": {"format": "fp8"}}])
def test_float32_has_no_paged_attention(tmp_path: Path, checkpoint: dict[str, Any]) -> None:
    plain = plans.LLAMA_1B | {"torch_dtype": "float32"}
    assert refused(tmp_path, draft=plain, draft_checkpoint=checkpoint) == [
        "draft: the checkpoint is float32, for which TensorRT-LLM has no paged context FMHA, which"
        " drafting needs: set dtype to bfloat16 or float16 in its config.json"
    ]


def test_fusion_that_the_builder_would_switch_off(tmp_path: Path) -> None:
    flags = {"build": {"reduce_fusion": True}}
    assert refused(tmp_path, tensorrt_llm=flags) == [
        "engine.tensorrt_llm.build.reduce_fusion has no effect with target.tp_size 1; set it to"
        " false"
    ]
    two = {"tp_size": 2}
    assert refused(tmp_path, tensorrt_llm=flags, target_checkpoint=two) == []
    assert refused(
        tmp_path, tensorrt_llm=flags, target_checkpoint=two, target=plans.MISTRAL_7B
    ) == [
        "engine.tensorrt_llm.build.reduce_fusion has no effect with MistralForCausalLM; set it to"
        " false"
    ]


def test_norms_are_fused_with_quantization_in_one_model_and_format(tmp_path: Path) -> None:
    flags = {"build": {"norm_quant_fusion": True}}

    def lines(format: str | None, target: dict[str, Any] = plans.LLAMA_70B) -> list[str]:
        scheme = {} if format is None else {"quantization": {"format": format}}
        return refused(tmp_path, tensorrt_llm=flags, target=target, target_checkpoint=scheme)

    begin = "engine.tensorrt_llm.build.norm_quant_fusion has no effect with"
    assert lines("nvfp4") == []
    assert lines("fp8") == [f"{begin} format 'fp8', only with 'nvfp4'; set it to false"]
    assert lines(None) == [f"{begin} plain weights, only with 'nvfp4'; set it to false"]
    assert lines("nvfp4", plans.MISTRAL_7B) == [f"{begin} MistralForCausalLM; set it to false"]


def toy(family: str, **overrides: Any) -> dict[str, Any]:
    """A toy of one vocabulary with the plan's drafts, and no window."""
    if family == "gemma2":
        overrides["sliding_window"] = None
    return toy_config(family, vocab_size=128256, **overrides)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("model", "lost"),
    [
        (toy("qwen3"), "the norms of queries and keys"),
        (toy("gemma2"), "the scale and cap of attention scores"),
        (
            toy("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=128),
            "longrope",
        ),
        (toy("phi3"), None),
        (toy("qwen2"), None),
        (toy("mistral"), None),
    ],
)
def test_attention_of_fp8_pc_pt_leaves_out_what_some_models_need(
    tmp_path: Path, model: dict[str, Any], lost: str | None
) -> None:
    scheme = {"quantization": {"format": "fp8_pc_pt"}}
    lines = refused(tmp_path, target=model, target_checkpoint=scheme, **on("9.0"))
    assert lines == (
        []
        if lost is None
        else [
            f"target.quantization.format 'fp8_pc_pt' does not go with {model['architectures'][0]}:"
            f" TensorRT-LLM's attention of this format leaves out {lost}; formats that go with it:"
            " fp8, int8_sq, int4_awq, w4a8_awq, int8_wo, int4_wo; or leave quantization out"
        ]
    )


def test_a_format_that_does_not_go_either_is_not_offered(tmp_path: Path) -> None:
    scheme = {"quantization": {"format": "int8_wo"}}
    (line,) = refused(tmp_path, target=toy("qwen3"), target_checkpoint=scheme, **on("9.0"))
    assert line.endswith("formats that need none: fp8, int8_sq; or leave quantization out")


def test_phi3_has_no_pipeline_stages(tmp_path: Path) -> None:
    assert refused(tmp_path, target=toy("phi3"), target_checkpoint={"pp_size": 2}) == [
        "target.pp_size 2 does not go with Phi3ForCausalLM, which TensorRT-LLM does not divide into"
        " pipeline stages: set it to 1, and split by target.tp_size"
    ]
    assert refused(tmp_path, target=toy("phi3"), target_checkpoint={"tp_size": 2}) == []


NARROW = plans.LLAMA_1B | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
"""Sizes of SmolLM2-135M: multiples of 64, and not of 128."""

ODD = plans.LLAMA_1B | {"intermediate_size": 64 * 129}


@pytest.mark.parametrize(
    ("model", "scheme", "tp_size", "line"),
    [
        (NARROW, {"format": "fp8"}, 1, None),
        (NARROW, {"format": "int8_wo"}, 1, None),
        (NARROW, {"format": "int4_awq", "awq_block_size": 64}, 1, None),
        (
            NARROW,
            {"format": "w4a8_awq", "awq_block_size": 64},
            1,
            "target.quantization.format 'w4a8_awq' needs multiples of 128 in TensorRT-LLM, but"
            " transformer.layers.0.attention.qkv has 576 inputs, and 111 more do not fit either;"
            " formats that need none: fp8, fp8_pc_pt, int8_sq, nvfp4; or leave quantization out",
        ),
        (ODD, {"format": "int8_wo"}, 1, None),
        (
            ODD,
            {"format": "int8_wo"},
            2,
            "target.quantization.format 'int8_wo' needs multiples of 128 in TensorRT-LLM, but"
            " transformer.layers.0.mlp.fc has 8256 outputs, and 47 more do not fit either;"
            " formats that need none: fp8, fp8_pc_pt, int8_sq, nvfp4; or leave quantization out",
        ),
    ],
)
def test_sizes_that_the_builder_would_fill_up(
    tmp_path: Path, model: dict[str, Any], scheme: dict[str, Any], tp_size: int, line: str | None
) -> None:
    checkpoint = {"quantization": scheme, "tp_size": tp_size}
    lines = refused(tmp_path, target=model, target_checkpoint=checkpoint)
    assert lines == ([] if line is None else [line])


def test_a_quantized_head_has_to_fit_too(tmp_path: Path) -> None:
    odd = {"draft": plans.LLAMA_1B | {"vocab_size": 32002}}
    plain_head = {"quantization": {"format": "int4_awq"}}
    assert refused(tmp_path, **odd, draft_checkpoint=plain_head) == []
    head = {"quantization": {"format": "int4_awq", "quantize_lm_head": True}}
    assert refused(tmp_path, **odd, draft_checkpoint=head, **on("9.0")) == [
        "draft.quantization.format 'int4_awq' needs multiples of 128 in TensorRT-LLM, but lm_head"
        " has 32002 outputs; formats that need none: fp8, fp8_pc_pt, int8_sq; or leave"
        " quantization out"
    ]


def test_layers_that_stay_plain_on_every_stage(tmp_path: Path) -> None:
    def checkpoint(*exclude: str, pp_size: int) -> dict[str, Any]:
        return {"quantization": {"format": "nvfp4", "exclude": exclude}, "pp_size": pp_size}

    first = checkpoint("transformer.layers.0.*", pp_size=2)
    assert refused(tmp_path, target_checkpoint=first) == [
        "target: what is left plain differs from layer to layer, but with target.pp_size 2"
        " TensorRT-LLM counts layers anew on each stage; exclude by patterns that mean all layers,"
        " or split by tp_size"
    ]
    assert (
        refused(
            tmp_path, target_checkpoint=checkpoint(*first["quantization"]["exclude"], pp_size=1)
        )
        == []
    )
    assert refused(tmp_path, target_checkpoint=checkpoint("*.mlp.proj", pp_size=2)) == []


@pytest.mark.parametrize(
    ("format", "exclude", "plain"),
    [
        ("fp8", ["*.mlp.fc", "*.mlp.gate"], "fc"),
        ("nvfp4", ["*.7.mlp.gate"], "gate"),
        ("nvfp4", ["*.mlp.fc", "*.mlp.gate"], None),
        ("fp8", ["*.attention.*", "*.mlp.proj"], None),
    ],
)
def test_a_fused_mlp_is_quantized_as_a_whole(
    tmp_path: Path, format: str, exclude: list[str], plain: str | None
) -> None:
    changes = {"target_checkpoint": {"quantization": {"format": format, "exclude": exclude}}}
    layer = 7 if plain == "gate" else 0
    assert refused(tmp_path, **changes) == (
        []
        if plain is None
        else [
            f"target: transformer.layers.{layer}.mlp.{plain} is left plain, and TensorRT-LLM fuses"
            " gate and fc as if it were not; set engine.tensorrt_llm.build.use_fused_mlp to false"
        ]
    )
    unfused = {"build": {"use_fused_mlp": False}}
    assert refused(tmp_path, **changes, tensorrt_llm=unfused) == []


def carried_over(folder: Path, **quantization: Any) -> list[str]:
    """The lines for a target that was quantized by others, on a GPU of compute capability 8.6."""
    pair = plans.plan(folder, **on("8.6"))
    unified = pair.target.unified.quantized(Quantization(**quantization))
    pair = replace(pair, target=replace(pair.target, unified=unified))
    with pytest.raises(EngineBuildError) as caught:
        refusals.check_plan(pair, capabilities.capabilities(pair))
    return str(caught.value).splitlines()


def test_checkpoints_that_others_quantized(tmp_path: Path) -> None:
    assert carried_over(tmp_path, quant_algo="FP8") == [
        "target: the format of its checkpoint, fp8, does not run on a GPU of compute capability"
        " 8.6; formats that do: int8_sq, int4_awq, int8_wo, int4_wo; or use the checkpoint that it"
        " was quantized from"
    ]
    gptq = carried_over(tmp_path, quant_algo="W4A16_GPTQ", group_size=128)
    assert gptq == [
        "target: the format of its checkpoint, int4_gptq, is none that trtllm-build takes; set"
        " engine.tensorrt_llm.backend to pytorch, engine.runtime to torch, or use the checkpoint"
        " that it was quantized from"
    ]
    assert carried_over(tmp_path, quant_algo="W8A8_SQ_PER_CHANNEL", kv_cache_quant_algo="FP8") == [
        "target: the FP8 KV cache of its checkpoint does not run on a GPU of compute capability"
        " 8.6; use one without",
        "target: its checkpoint has int8_sq weights and an FP8 KV cache, with which the builder"
        " switches off paged context FMHA, which drafting needs; use the checkpoint that it was"
        " quantized from",
    ]


def test_comparing_logits_needs_equal_vocabularies(tmp_path: Path) -> None:
    changes = {"draft": plans.LLAMA_1B | {"vocab_size": 32000}, "target_checkpoint": AWQ}
    assert refused(tmp_path, **changes, tensorrt_llm={"acceptance": "logits"}) == [
        "the draft's vocabulary has 32000 rows, the target's 128256, but comparing logits needs"
        " equal ones: set engine.tensorrt_llm.acceptance to exact"
    ]
    assert refused(tmp_path, **changes) == []


def test_quantization_leaves_the_vocabulary_as_it_is(tmp_path: Path) -> None:
    """ModelOpt's own AWQ would fill up that of the target to 32064."""
    odd = {"vocab_size": 32001}
    assert (
        refused(
            tmp_path,
            draft=plans.LLAMA_1B | odd,
            target=plans.LLAMA_70B | odd,
            target_checkpoint=AWQ,
            tensorrt_llm={"acceptance": "logits"},
        )
        == []
    )


def test_prompts_that_no_iteration_could_take(tmp_path: Path) -> None:
    whole = {"parameters": {"enable_chunked_context": False}}
    assert refused(tmp_path, max_num_tokens=2048) == []
    for max_num_tokens in (2048, 4099):
        assert refused(tmp_path, max_num_tokens=max_num_tokens, tensorrt_llm=whole) == [
            f"engine.max_num_tokens {max_num_tokens} is less than engine.max_seq_len 4096 and 4 "
            "draft tokens, so that the longest texts would end all requests that run: raise it, or "
            "set engine.tensorrt_llm.parameters.enable_chunked_context to true"
        ]
    assert refused(tmp_path, max_num_tokens=4100, tensorrt_llm=whole) == []
    assert refused(tmp_path, tensorrt_llm={"build": {"opt_num_tokens": 9000}}) == [
        "engine.tensorrt_llm.build.opt_num_tokens 9000 is more than engine.max_num_tokens 8192"
    ]


def test_all_faults_of_a_plan_are_named_at_once(tmp_path: Path) -> None:
    lines = refused(
        tmp_path,
        draft_checkpoint={"quantization": {"format": "int8_sq"}},
        target_checkpoint={"quantization": {"format": "int4_awq"}},
        **on("10.0"),
    )
    assert [line.split(" ")[0] for line in lines] == [
        "draft.quantization.format",
        "target.quantization.format",
    ]
