from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import pytest

from specpipe.config.tensorrt_llm import FIXED_FLAGS, BuildFlags
from specpipe.roles import Role
from specpipe.runtimes.tensorrt_llm.engines.build_flags import (
    FLAGS,
    NOT_PASSED,
    BuildSpec,
    arguments,
    flags,
    values,
)
from specpipe.runtimes.tensorrt_llm.engines.toolbox import File
from tests.runtimes.tensorrt_llm import plans
from tests.tensorrt_llm_stand_ins import fake_trtllm_build


def spec(role: Role = "target", **changes: object) -> BuildSpec:
    fields: dict[str, object] = {
        "role": role,
        "version": "1.2.1",
        "max_batch_size": 8,
        "max_seq_len": 4096,
        "max_num_tokens": 8192,
        "num_draft_tokens": 4 if role == "target" else 0,
        "quant_algo": None,
        "kv_cache_quant_algo": None,
        "gather_logits": False,
        "flags": BuildFlags(),
    }
    return BuildSpec(**{**fields, **changes})


def line(of: BuildSpec, timing_cache: File | None = None) -> list[str]:
    words = arguments(
        of,
        checkpoint=File(Path("/in"), "checkpoint"),
        out=File(Path("/out"), "engine", is_output=True),
        timing_cache=timing_cache,
    )
    return [str(word.here) if isinstance(word, File) else word for word in words]


def options(of: BuildSpec) -> dict[str, str]:
    """The flags that take a value."""
    words = line(of)
    return {
        name: value
        for name, value in zip(words, words[1:], strict=False)
        if name.startswith("--") and not value.startswith("--")
    }


def test_whole_command_line_of_a_target() -> None:
    assert " ".join(line(spec())) == (
        "--checkpoint_dir /in --output_dir /out --max_batch_size 8 --max_input_len 4096"
        " --max_seq_len 4096 --max_beam_width 1 --max_num_tokens 8192 --opt_num_tokens 40"
        " --max_encoder_input_len 1024 --max_prompt_embedding_table_size 0"
        " --kv_cache_type paged --output_timing_cache /out/model.cache"
        " --profiling_verbosity layer_names_only"
        " --workers 1 --log_level info --logits_dtype float32"
        " --speculative_decoding_mode draft_tokens_external --max_draft_len 4"
        " --bert_attention_plugin auto --gpt_attention_plugin auto --gemm_plugin auto"
        " --gemm_swiglu_plugin disable --fp8_rowwise_gemm_plugin disable --lora_plugin disable"
        " --dora_plugin disable --moe_plugin auto --mamba_conv1d_plugin auto --nccl_plugin auto"
        " --low_latency_gemm_plugin disable --low_latency_gemm_swiglu_plugin disable"
        " --gemm_allreduce_plugin disable --context_fmha enable"
        " --bert_context_fmha_fp32_acc disable --remove_input_padding enable"
        " --tokens_per_block 32 --use_paged_context_fmha enable --use_fp8_context_fmha disable"
        " --fuse_fp4_quant disable --multiple_profiles disable --paged_state enable"
        " --streamingllm disable --norm_quant_fusion disable --reduce_fusion disable"
        " --user_buffer disable --use_fused_mlp enable --pp_reduce_scatter disable"
    )


def test_draft_differs_from_target_by_speculation_alone() -> None:
    draft, target = options(spec("draft")), options(spec("target"))
    assert {name for name in target if draft.get(name) != target[name]} == {
        "--speculative_decoding_mode",
        "--max_draft_len",
        "--opt_num_tokens",
    }
    assert "--speculative_decoding_mode" not in draft
    assert "--max_draft_len" not in draft
    assert draft["--opt_num_tokens"] == "8"
    assert draft["--use_paged_context_fmha"] == "enable"


@pytest.mark.parametrize(
    ("algo", "kv_cache_algo", "gemm_plugin", "rowwise", "fp8_fmha"),
    [
        ("FP8", None, "disable", "disable", "disable"),
        ("FP8", "FP8", "disable", "disable", "enable"),
        ("FP8_PER_CHANNEL_PER_TOKEN", None, "disable", "auto", "disable"),
        ("NVFP4", None, "nvfp4", "disable", "disable"),
        ("W4A16_AWQ", None, "auto", "disable", "disable"),
        (None, None, "auto", "disable", "disable"),
    ],
)
def test_weights_decide_what_is_left_open(
    algo: str | None, kv_cache_algo: str | None, gemm_plugin: str, rowwise: str, fp8_fmha: str
) -> None:
    given = options(spec(quant_algo=algo, kv_cache_quant_algo=kv_cache_algo))
    assert given["--gemm_plugin"] == gemm_plugin
    assert given["--fp8_rowwise_gemm_plugin"] == rowwise
    assert given["--use_fp8_context_fmha"] == fp8_fmha


def test_settings_win_over_what_the_weights_suggest() -> None:
    flags_given = BuildFlags(
        gemm_plugin="fp8", opt_num_tokens=7, use_fp8_context_fmha=True, weight_streaming=True
    )
    words = line(spec(quant_algo="FP8", flags=flags_given))
    assert words[words.index("--gemm_plugin") + 1] == "fp8"
    assert words[words.index("--opt_num_tokens") + 1] == "7"
    assert words[words.index("--use_fp8_context_fmha") + 1] == "enable"
    assert "--weight_streaming" in words
    assert "--weight_sparsity" not in words


def test_verification_of_a_full_batch_fits_one_iteration() -> None:
    tight = spec(max_num_tokens=16, num_draft_tokens=7, max_batch_size=4)
    assert options(tight)["--max_num_tokens"] == "32"
    assert options(tight)["--opt_num_tokens"] == "32"


def test_multiple_profiles_go_without_an_optimum() -> None:
    words = line(spec(flags=BuildFlags(multiple_profiles=True)))
    assert "--opt_num_tokens" not in words
    assert words[words.index("--multiple_profiles") + 1] == "enable"


def test_logits_are_gathered_in_both_engines_to_compare_them() -> None:
    for role in get_args(Role):
        assert "--gather_generation_logits" in line(spec(role, gather_logits=True))
        assert "--gather_generation_logits" not in line(spec(role))


def test_extra_arguments_come_last_and_unchanged() -> None:
    assert line(spec(extra_args=("--new_flag", "a b")))[-2:] == ["--new_flag", "a b"]


def test_timing_cache_is_read_where_one_is_given() -> None:
    words = line(spec(), File(Path("/old/model.cache"), "timing.cache"))
    assert words[words.index("--input_timing_cache") + 1] == "/old/model.cache"
    assert words[words.index("--output_timing_cache") + 1] == "/out/model.cache"


def test_every_flag_is_a_setting_or_fixed_or_left_out_for_a_reason() -> None:
    settings = set(BuildFlags.model_fields)
    paths = {"output_timing_cache"}
    names = {flag.name for flag in flags("1.2.1")}
    assert settings | set(FIXED_FLAGS) | set(NOT_PASSED) | paths == names
    assert not settings & set(FIXED_FLAGS)
    assert not settings & set(NOT_PASSED)


def test_settings_take_what_the_flag_takes() -> None:
    """What a choice of the table allows, the section's type allows, and no more."""
    properties = BuildFlags.model_json_schema()["properties"]
    for flag in flags("1.2.1"):
        schema = properties.get(flag.name)
        if schema is None:
            continue
        kinds = schema.get("anyOf", [schema])
        if flag.kind == "choice":
            allowed = [value for kind in kinds for value in kind.get("enum", [])]
            assert sorted(allowed) == sorted(flag.choices), flag.name
        elif flag.kind in ("toggle", "switch"):
            assert {"type": "boolean"} in [{"type": kind.get("type")} for kind in kinds], flag.name


def test_flags_agree_with_the_ones_of_the_stand_in() -> None:
    """Both were written from the sources, apart from each other."""
    theirs = {
        action.option_strings[0].removeprefix("--"): action
        for action in fake_trtllm_build.parser()._actions
        if not isinstance(action, argparse._HelpAction)
    }
    ours = {flag.name: flag for flag in flags("1.2.1")}
    assert set(ours) == set(theirs)
    for name, flag in ours.items():
        action = theirs[name]
        if flag.kind == "choice":
            assert sorted(flag.choices) == sorted(action.choices or ()), name
        if flag.kind == "toggle":
            assert list(action.choices or ()) == ["enable", "disable"], name
            assert action.default == ("enable" if flag.default else "disable"), name
        elif flag.kind == "switch":
            assert action.nargs == 0, name
        else:
            assert action.default == flag.default, name
        assert [f"--{alias}" for alias in flag.aliases] == action.option_strings[1:], name


def test_flags_that_went_away_belong_to_old_releases() -> None:
    gone = {flag.name for flag in FLAGS} - {flag.name for flag in flags("1.0.0")}
    assert gone == {"auto_parallel", "gpus_per_node", "cluster_key"}
    assert gone < {flag.name for flag in flags("0.21.0")}


def test_values_cover_every_flag_but_paths_and_what_is_not_passed() -> None:
    covered = set(values(spec()))
    assert covered - {flag.name for flag in flags("1.2.1")} == set()
    assert "dry_run" not in covered
    assert "max_lora_rank" not in covered


def test_command_line_of_a_plan_is_understood_by_the_stand_in(tmp_path: Path) -> None:
    pair = plans.plan(tmp_path, num_draft_tokens=8)
    args = fake_trtllm_build.parser().parse_args(
        line(spec(num_draft_tokens=pair.num_draft_tokens, flags=pair.engine.tensorrt_llm.build))
    )
    assert args.max_draft_len == 8
    assert args.kv_cache_type == "paged"
