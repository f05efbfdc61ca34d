from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import EngineBuildError
from specpipe.runtimes.tensorrt_llm import refusals
from specpipe.runtimes.tensorrt_llm.formats import FORMATS, exported_vocab_size
from tests.runtimes.tensorrt_llm import plans


def refused(folder: Path, **changes: Any) -> list[str]:
    """The lines that a plan is refused with; [] if it is not."""
    try:
        pair = plans.plan(folder, **changes)
        refusals.check_plan(pair, refusals.capabilities(pair))
    except EngineBuildError as exc:
        return str(exc).splitlines()
    return []


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "gpus", list)


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
    for name in FORMATS:
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
    found = [{"compute_cap": "9.0"}, {"compute_cap": "8.6"}]
    monkeypatch.setattr(refusals, "gpus", lambda: found)
    pair = plans.plan(tmp_path, tensorrt_llm={"target_gpu_ids": [1]})
    assert refusals.capabilities(pair) == {"draft": "9.0", "target": "8.6"}
    both = plans.plan(tmp_path, target_checkpoint={"tp_size": 2})
    assert refusals.capabilities(both)["target"] == "8.6"
    given = plans.plan(tmp_path, **on("10.0"))
    assert refusals.capabilities(given) == {"draft": "10.0", "target": "10.0"}


def test_float32_has_no_paged_attention(tmp_path: Path) -> None:
    plain = plans.LLAMA_1B | {"torch_dtype": "float32"}
    assert refused(tmp_path, draft=plain) == [
        "draft: the checkpoint is float32, for which TensorRT-LLM has no paged context FMHA, which"
        " drafting needs: set dtype to bfloat16 or float16 in its config.json"
    ]
    quantized = {"quantization": {"format": "fp8"}}
    assert refused(tmp_path, draft=plain, draft_checkpoint=quantized) == []


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


def test_awq_blocks_have_to_fit_into_a_rank(tmp_path: Path) -> None:
    scheme = {"quantization": {"format": "int4_awq", "awq_block_size": 128}}
    narrow = plans.LLAMA_70B | {"intermediate_size": 8 * 1000}
    assert refused(tmp_path, target=narrow, target_checkpoint={**scheme, "tp_size": 8}) == [
        "target.quantization.awq_block_size 128 does not divide the intermediate size per rank of"
        " 1000; lower it or target.tp_size"
    ]
    assert refused(tmp_path, target_checkpoint={**scheme, "tp_size": 8}) == []
    fp8 = {"quantization": {"format": "fp8"}, "tp_size": 8}
    assert refused(tmp_path, target=narrow, target_checkpoint=fp8) == []


def test_awq_fills_up_the_vocabulary_and_comparing_logits_notices(tmp_path: Path) -> None:
    odd = {"vocab_size": 32001}
    changes = {
        "draft": plans.LLAMA_1B | odd,
        "target": plans.LLAMA_70B | odd,
        "target_checkpoint": {"quantization": {"format": "int4_awq"}},
    }
    assert exported_vocab_size(32001, "int4_awq") == 32064
    assert exported_vocab_size(32001, "fp8") == 32001
    assert refused(tmp_path, **changes, tensorrt_llm={"acceptance": "logits"}) == [
        "the draft's vocabulary has 32001 rows, the target's 32064 (AWQ fills it up to a multiple"
        " of 64), but comparing logits needs equal ones: set engine.tensorrt_llm.acceptance to"
        " exact, or quantize both alike"
    ]
    assert refused(tmp_path, **changes) == []
    both = {"quantization": {"format": "int4_awq"}}
    assert (
        refused(
            tmp_path,
            **{**changes, "draft_checkpoint": both},
            tensorrt_llm={"acceptance": "logits"},
        )
        == []
    )


def test_prompts_that_no_iteration_could_take(tmp_path: Path) -> None:
    whole = {"parameters": {"enable_chunked_context": False}}
    assert refused(tmp_path, max_num_tokens=2048) == []
    assert refused(tmp_path, max_num_tokens=2048, tensorrt_llm=whole) == [
        "engine.max_num_tokens 2048 is less than engine.max_seq_len 4096, so that the longest"
        " prompts would never run: raise it, or set"
        " engine.tensorrt_llm.parameters.enable_chunked_context to true"
    ]
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
