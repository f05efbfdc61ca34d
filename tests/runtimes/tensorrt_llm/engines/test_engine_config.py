from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import EngineBuildError, EngineMismatch
from specpipe.roles import Role
from specpipe.runtimes.tensorrt_llm.engines.engine_config import (
    AcceptTest,
    Wanted,
    check_built,
    check_engines,
    read_engine,
)
from tests.runtimes.tensorrt_llm.engines.folders import engine_json, write_engine

EXTRA = "remove it from engine.tensorrt_llm.extra_build_args"


def wanted(role: Role = "target", **changes: Any) -> Wanted:
    fields: dict[str, Any] = {
        "role": role,
        "version": "1.2.1",
        "world_size": 1,
        "vocab_size": 256,
        "quant_algo": None,
        "kv_cache_quant_algo": None,
        "max_batch_size": 8,
        "max_seq_len": 512,
        "num_draft_tokens": 4 if role == "target" else 0,
        "logits_dtype": "float32",
        "acceptance": "exact",
    }
    return Wanted(**{**fields, **changes})


def faults_of_one(folder: Path, role: Role, order: Wanted, **changes: Any) -> list[str]:
    try:
        check_built(write_engine(folder / "engine", role, **changes), order)
    except EngineBuildError as exc:
        first, *lines = str(exc).splitlines()
        assert first == f"{role}: trtllm-build ended well, but its engine cannot be used:"
        return [line.removeprefix("  - ") for line in lines]
    return []


def faults_of_pair(
    folder: Path,
    *,
    draft: dict[str, Any] | None = None,
    target: dict[str, Any] | None = None,
    num_draft_tokens: int = 4,
    acceptance: AcceptTest = "exact",
) -> list[str]:
    draft_engine = write_engine(folder / "d", "draft", **(draft or {}))
    target_engine = write_engine(folder / "t", "target", **(target or {}))
    try:
        check_engines(
            draft_engine, target_engine, num_draft_tokens=num_draft_tokens, acceptance=acceptance
        )
    except EngineMismatch as exc:
        first, *lines = str(exc).splitlines()
        assert first == f"the engines {draft_engine} and {target_engine} cannot run as a pair:"
        return [line.removeprefix("  - ") for line in lines]
    return []


def test_facts_of_an_engine(tmp_path: Path) -> None:
    engine = read_engine(write_engine(tmp_path / "engine", "target"))
    assert engine.version == "1.2.1"
    assert (engine.vocab_size, engine.logits_dtype) == (256, "float32")
    assert (engine.world_size, engine.num_rank_files) == (1, 1)
    assert (engine.max_seq_len, engine.max_draft_len) == (516, 4)
    assert engine.speculative_decoding_mode == "draft_tokens_external"
    assert engine.use_paged_context_fmha


@pytest.mark.parametrize(
    "mode", [2, "DRAFT_TOKENS_EXTERNAL", "SpeculativeDecodingMode.DRAFT_TOKENS_EXTERNAL"]
)
def test_speculation_mode_is_read_as_number_or_name(tmp_path: Path, mode: int | str) -> None:
    folder = write_engine(tmp_path / "engine", "target", speculative_decoding_mode=mode)
    assert read_engine(folder).speculative_decoding_mode == "draft_tokens_external"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "{0} has no config.json: build the engine again"),
        (
            "{",
            "{0}/config.json cannot be read (Expecting property name enclosed in double quotes: ",
        ),
        ("[]", "{0}/config.json cannot be read (list indices must be integers or slices, not str)"),
        (
            '{"version": "1.2.1"}',
            "{0}/config.json has no pretrained_config, so it is not that of a TensorRT-LLM engine:"
            " build the engine again",
        ),
    ],
)
def test_what_is_no_engine(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineMismatch) as caught:
        read_engine(tmp_path)
    assert str(caught.value).startswith(message.format(tmp_path))


def test_every_key_that_is_read_is_missed_by_name(tmp_path: Path) -> None:
    config = engine_json("target")
    del config["build_config"]["plugin_config"]["use_paged_context_fmha"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineMismatch, match="has no use_paged_context_fmha, so it is not"):
        read_engine(tmp_path)


def test_engines_as_ordered_pass(tmp_path: Path) -> None:
    for role in ("draft", "target"):
        assert faults_of_one(tmp_path / role, role, wanted(role)) == []


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        (
            {"quant_algo": "FP8"},
            ["quant_algo is FP8, its checkpoint's None"],
        ),
        (
            {"use_paged_context_fmha": False, "kv_cache_quant_algo": "FP8"},
            [
                "kv_cache_quant_algo is FP8, its checkpoint's None",
                "use_paged_context_fmha is off, which drafting needs: the builder switches it off"
                " for a KV cache of FP8 with weights of None: set quantization.kv_cache to null",
            ],
        ),
        (
            {"use_paged_context_fmha": False},
            [
                "use_paged_context_fmha is off, which drafting needs: remove what switches it off"
                " from engine.tensorrt_llm.extra_build_args"
            ],
        ),
        (
            {"kv_cache_type": "CONTINUOUS"},
            [f"kv_cache_type is CONTINUOUS, but drafting needs PAGED: {EXTRA}"],
        ),
        ({"max_beam_width": 2}, [f"max_beam_width is 2, but drafting works with 1: {EXTRA}"]),
        (
            {"speculative_decoding_mode": 1, "max_draft_len": 0, "max_seq_len": 516},
            [
                "it verifies no draft tokens (speculative_decoding_mode none, max_draft_len 0):"
                " build it with speculation.num_draft_tokens of at least 1"
            ],
        ),
        (
            {"max_draft_len": 3},
            [
                "it verifies at most 3 draft tokens, but speculation.num_draft_tokens is 4: lower"
                " that, or build it again"
            ],
        ),
        (
            {"max_seq_len": 515},
            [
                "max_seq_len is 515, less than the 512 tokens of a request and 4 draft tokens",
            ],
        ),
        ({"max_batch_size": 4}, ["max_batch_size is 4, not 8"]),
        (
            {"logits_dtype": "float16"},
            ["its logits are float16, not float32: see engine.tensorrt_llm.build.logits_dtype"],
        ),
        ({"vocab_size": 320}, ["its vocabulary has 320 rows, its checkpoint's 256"]),
        (
            {"version": "1.1.0"},
            [
                "it was built by TensorRT-LLM 1.1.0, not 1.2.1: change engine.tensorrt_llm.version"
                " or engine.tensorrt_llm.image"
            ],
        ),
        (
            {"gather_context_logits": True},
            [f"gather_context_logits is on, which switches block reuse off: {EXTRA}"],
        ),
    ],
)
def test_targets_that_cannot_verify(
    tmp_path: Path, changes: dict[str, Any], faults: list[str]
) -> None:
    assert faults_of_one(tmp_path, "target", wanted(), **changes) == faults


def test_a_draft_does_not_speculate(tmp_path: Path) -> None:
    changes = {"speculative_decoding_mode": 32}
    assert faults_of_one(tmp_path, "draft", wanted("draft"), **changes) == [
        "speculative_decoding_mode is eagle, but a draft speculates by itself"
    ]


def test_logits_have_to_be_gathered_where_they_are_compared(tmp_path: Path) -> None:
    order = wanted("draft", acceptance="logits")
    assert faults_of_one(tmp_path, "draft", order) == [
        "gather_generation_logits is off, but engine.tensorrt_llm.acceptance logits needs the"
        " logits: build it again"
    ]
    changes = {"gather_generation_logits": True}
    assert faults_of_one(tmp_path / "b", "draft", order, **changes) == []


def test_all_ranks_have_to_be_there(tmp_path: Path) -> None:
    mapping = {"world_size": 4, "tp_size": 2, "pp_size": 2}
    folder = write_engine(tmp_path / "engine", "target", mapping=mapping)
    assert check_built(folder, wanted(world_size=4)).tp_size == 2
    (folder / "rank2.engine").unlink()
    with pytest.raises(EngineBuildError) as caught:
        check_built(folder, wanted(world_size=2))
    assert str(caught.value).splitlines()[1:] == [
        "  - it is for 4 ranks, not 2, target.tp_size times target.pp_size",
        "  - rank0.engine to rank3.engine should be there, but the first 2 of 4 are: build it"
        " again",
    ]


def test_pair_of_engines_passes(tmp_path: Path) -> None:
    assert faults_of_pair(tmp_path) == []


def test_draft_length_above_the_engines(tmp_path: Path) -> None:
    """A user report: K = 8 with an engine that allows 5."""
    assert faults_of_pair(
        tmp_path, target={"max_draft_len": 5, "max_seq_len": 517}, num_draft_tokens=8
    ) == [
        "target: it verifies at most 5 draft tokens, but speculation.num_draft_tokens is 8: lower"
        " that, or build it again"
    ]


def test_speculation_with_an_engine_that_allows_none(tmp_path: Path) -> None:
    """A user report: the message names the setting of the build."""
    assert faults_of_pair(tmp_path, target={"max_draft_len": 0}) == [
        "target: it verifies no draft tokens (speculative_decoding_mode draft_tokens_external,"
        " max_draft_len 0): build it with speculation.num_draft_tokens of at least 1"
    ]


def test_engines_of_a_pair_have_to_agree(tmp_path: Path) -> None:
    assert faults_of_pair(
        tmp_path,
        draft={"version": "1.2.0", "logits_dtype": "float16", "vocab_size": 320},
        target={"gather_generation_logits": True},
        acceptance="logits",
    ) == [
        "draft: gather_generation_logits is off, but engine.tensorrt_llm.acceptance logits needs"
        " the logits: build it again",
        "the draft was built by TensorRT-LLM 1.2.0, the target by 1.2.1: build them with one"
        " engine.tensorrt_llm.version",
        "the draft's logits are float16, the target's float32: build both with one"
        " engine.tensorrt_llm.build.logits_dtype",
        "the draft's vocabulary has 320 rows, the target's 256, but comparing logits needs equal"
        " ones: set engine.tensorrt_llm.acceptance to exact",
    ]


def test_vocabularies_may_differ_by_padding_where_tokens_are_compared(tmp_path: Path) -> None:
    assert faults_of_pair(tmp_path, draft={"vocab_size": 320}) == []
