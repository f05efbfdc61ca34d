"""benchmarks/gpu/: what it makes of the times, and the weights that it times."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.gpu.goals import covered, goals, kv_bytes, steps_speedup
from benchmarks.gpu.report import main, merged, report, summary
from benchmarks.gpu.tensors import RoundedFormat, engine_tensors, rounded_config
from benchmarks.inflate import Size, inflated_tensors, open_source
from benchmarks.source_prompts import main as write_prompts
from specpipe.build.stages.quantize import quantize
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.unified import load_unified
from specpipe.runtimes.torch.kernel_choice import Kernel
from specpipe.runtimes.torch.layout import write_weights
from specpipe.text.tokenizer import Tokenizer
from tests.quantization.checkpoints import scheme, write_scales
from tests.runtimes.torch.engines import build_engine
from tests.toy import write_toy_checkpoint
from tests.toy_tokenizers import byte_level

ROOT = Path(__file__).parents[1]


def test_kv_bytes_stop_at_a_window() -> None:
    sizes = {"num_kv_heads": 16, "head_size": 64, "element_bytes": 2}
    # 2 · 32 layers · 1,001 positions · 16 heads · 64 channels · 2 bytes
    assert kv_bytes([None] * 32, num_positions=1001, **sizes) == 131_203_072
    # keys and values of 100 + 10 positions, 4,096 bytes each
    assert kv_bytes([None, 10], num_positions=100, **sizes) == 110 * 4_096


def test_prediction_from_steps() -> None:
    # 2.4 tokens in 4 · 0.5 + 6 ms, against one in 5 ms
    found = steps_speedup(2.4, draft=0.5, verification=6.0, plain=5.0, num_draft_tokens=4)
    assert found == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0.0),
        ([(1.0, 2.0), (4.0, 5.0)], 2.0),
        ([(4.0, 5.0), (1.0, 3.0), (2.0, 4.0)], 4.0),  # out of order, one in the other
        ([(1.0, 6.0), (2.0, 3.0)], 5.0),
        ([(-3.0, 1.0), (9.0, 12.0), (20.0, 21.0)], 2.0),  # only what is in 0 … 10
    ],
)
def test_covered_time_counts_once(intervals: list[tuple[float, float]], expected: float) -> None:
    assert covered(intervals, 0.0, 10.0) == expected


def step(model: str, context: int, rows: int, seconds: float) -> dict[str, Any]:
    return {
        "model": model,
        "context": context,
        "rows": rows,
        "seconds": seconds,
        "floor_seconds": 0.004,
        "bytes": 12_000_000_000,
    }


def by_k(num_draft_tokens: int, rate: float, speedup: float, of_steps: float) -> dict[str, Any]:
    return {
        "num_draft_tokens": num_draft_tokens,
        "round_seconds": 0.005,
        "tokens_per_second": rate,
        "acceptance_length": 1.0 + num_draft_tokens / 4,
        "speedup": speedup,
        "of_rounds": 0.97,
        "of_steps": of_steps,
        "num_answers": 5,
        "num_different": 0,
        "margins": [],
    }


def sampled(is_seeded: bool, num_different_from_alone: int | None) -> dict[str, Any]:
    return {
        "is_seeded": is_seeded,
        "num_draft_tokens": 2,
        "tokens_per_second": 290.0,
        "alone_tokens_per_second": 200.0,
        "step_by_step_tokens_per_second": 90.0,
        "acceptance_length": 1.7,
        "num_answers": 5,
        "num_different": 0,
        "num_different_from_alone": num_different_from_alone,
    }


SETTINGS = {"num_prompts": 5, "prompt_tokens": 128, "max_tokens": 192, "runs": 2}


def peer(engine: str, rate: float, **others: Any) -> dict[str, Any]:
    return {
        "engine": engine,
        "version": "5",
        "num_draft_tokens": 0,
        "tokens_per_second": rate,
        "acceptance_length": None,
        "num_prompts": 5,
        "max_tokens": 192,
        **others,
    }


def failed(engine: str) -> dict[str, Any]:
    return {"engine": engine, "num_draft_tokens": 2, "error": "exit status 1"}


NGRAM = peer("vllm-ngram", 320.0, version="0.23", num_draft_tokens=4, acceptance_length=4.18)
RUN: dict[str, Any] = {
    "machine": {"gpu": "H100", "torch": "2.11.0", "triton": "3.6.0", "dtype": "bfloat16"},
    "bytes_per_second": 3.01e12,
    "small": {
        "float32": {
            "draft": {"num_tokens": 64, "num_different": 0, "max_error": 1e-6, "margins": []},
            "target": {"num_tokens": 64, "num_different": 1, "max_error": 1e-6, "margins": [0.5]},
            "rounds": {"num_draft_tokens": 4, "num_answers": 2, "num_different": 0},
        }
    },
    "pairs": {
        "7b+0.4b": {
            "num_parameters": {"target": 6_996_365_312, "draft": 375_303_040},
            "settings": SETTINGS,
            "steps": [
                step("target", 8_000, 1, 0.006),
                step("target", 1_000, 1, 0.0044),
                step("target", 1_000, 5, 0.009),
                step("draft", 1_000, 1, 0.01),
            ],
            "rounds": [
                by_k(0, 200.0, 1.0, 1.0),
                by_k(2, 360.0, 1.8, 0.95),
                by_k(4, 300.0, 1.5, 0.85) | {"num_different": 1, "margins": [0.03125]},
            ],
            "sampled": [sampled(True, 1), sampled(False, None)],
            "own": {"error": "OutOfMemoryError: none is left"},
            "lookup": {
                "tokens_per_second": 400.0,
                "alone_tokens_per_second": 200.0,
                "acceptance_length": 3.5,
                "num_answers": 5,
                "num_different": 1,
                "margins": [0.0625],
            },
            "hopeless": {"tokens_per_second": 199.0, "alone_tokens_per_second": 200.0},
            "fp8": {"not_run": "the fused kernels do not run linears in fp8"},
            "busy": {"num_draft_tokens": 4, "busy": 0.96, "profiled": 0.9},
        },
        "32b+0.5b": {
            "num_parameters": {"target": 32_066_114_560, "draft": 494_978_048},
            "settings": {**SETTINGS, "num_prompts": 3, "runs": 1},
            "rounds": [by_k(0, 40.0, 1.0, 1.0), by_k(4, 76.0, 1.9, 0.95)],
        },
    },
    "peers": [
        peer("vllm", 160.0, version="0.23"),
        failed("vllm"),
        peer("vllm", 170.0, version="0.23", num_prompts=3),  # of other prompts: no peer of ours
        NGRAM,
        peer("transformers", 30.0),
        peer("transformers", 16.0, num_draft_tokens=4, acceptance_length=2.125),
        peer("transformers-compiled", 120.0),
    ],
}


def test_goals_are_judged_by_what_was_measured() -> None:
    found = {
        (g.pair, g.what): (None if g.is_reached is None else bool(g.is_reached), g.figure)
        for g in goals(RUN)
    }
    predicted = "speedup over what acceptance and steps predict, worst K"
    best = "speculation over target alone, best K"
    different = "answers other than target alone's, all K"
    plain = "best tokens other than the plain engine's"
    assert found == {
        ("small pair", f"draft, float32: {plain}"): (True, 0),
        ("small pair", f"target, float32: {plain}"): (False, 1),
        ("small pair", "rounds, float32: answers other than the plain engine's"): (True, 0),
        ("7b+0.4b", "target step after 8,000 tokens, over its floor"): (None, 1.5),
        ("7b+0.4b", "target step after 1,000 tokens, over its floor"): (True, 1.1),
        ("7b+0.4b", "draft step after 1,000 tokens, over its floor"): (False, 2.5),
        ("7b+0.4b", predicted): (False, 0.85),
        ("7b+0.4b", "target alone, tokens/s"): (None, 200.0),
        ("7b+0.4b", best): (None, 1.8),
        ("7b+0.4b", different): (False, 1),
        ("7b+0.4b", "sampled with a seed: speculation over target alone"): (None, 1.45),
        ("7b+0.4b", "sampled with a seed: answers other than step by step"): (None, 0),
        ("7b+0.4b", "sampled with a seed: answers other than target alone's"): (False, 1),
        ("7b+0.4b", "sampled: speculation over target alone"): (None, 1.45),
        ("7b+0.4b", "sampled: answers other than step by step"): (None, 0),
        ("7b+0.4b", "adaptive K with prompt lookup over target alone"): (None, 2.0),
        ("7b+0.4b", "with prompt lookup: answers other than target alone's"): (False, 1),
        ("7b+0.4b", "adaptive K with a draft of noise, over target alone"): (True, 0.995),
        ("7b+0.4b", "GPU busy in steady decode"): (True, 0.96),
        ("7b+0.4b", "best K over vLLM's best with the pair"): (True, 2.25),
        ("7b+0.4b", "prompt lookup over vLLM's best with n-gram drafts"): (False, 1.25),
        ("7b+0.4b", "best K over transformers as it comes"): (True, 12.0),
        ("7b+0.4b", "best K over transformers' best"): (True, 3.0),
        ("32b+0.5b", predicted): (True, 0.95),
        ("32b+0.5b", "target alone, tokens/s"): (None, 40.0),
        ("32b+0.5b", best): (False, 1.9),
        ("32b+0.5b", different): (True, 0),
    }


def test_the_summary_has_a_line_for_each_figure_and_a_column_for_each_pair() -> None:
    seven = {
        **{part: RUN["pairs"]["7b+0.4b"][part] for part in ("num_parameters", "settings", "busy")},
        "adaptive": {
            "tokens_per_second": 306.0,
            "alone_tokens_per_second": 200.0,
            "first_token_seconds": 0.0182,
            "alone_first_token_seconds": 0.0093,
        },
        "fp8": {"context": 1_000, "plain_seconds": 0.0051, "seconds": 0.003},
    }
    thirty_two = {
        **{part: RUN["pairs"]["32b+0.5b"][part] for part in ("num_parameters", "settings")},
        "busy": {"num_draft_tokens": 4, "busy": 0.91, "profiled": 0.9},
        "fp8": {"context": 1_000, "plain_seconds": 0.024, "seconds": 0.016},
    }
    pairs = {"7b+0.4b": seven, "32b+0.5b": thirty_two}
    assert (
        summary({**RUN, "pairs": pairs, "small": None})
        == """\
H100 (a copy moves 3.01 TB/s), torch 2.11.0, Triton 3.6.0,
bfloat16, one stream, greedy unless said otherwise
7b+0.4b: 7.0 B + 0.375 B parameters; prompts: 5 of 128 tokens, 192 new ones; runs: 2
32b+0.5b: 32.1 B + 0.495 B parameters; prompts: 3 of 128 tokens, 192 new ones; runs: 1
peers: transformers 5, vllm 0.23

                                      7b+0.4b         32b+0.5b         goal
adaptive K over target alone          1.53 (306/s)
first token, target alone, ms         9.30
first token, adaptive K, ms           18
speed of an FP8 target over bfloat16  1.70 (3.00 ms)  1.50 (16.00 ms)  >= 1.6 (7b)  reached
GPU busy in steady decode             0.960 (K = 4)   0.910 (K = 4)    >= 0.95      missed (32b)\
""".splitlines()
    )


def test_a_peer_that_did_not_run_is_told_where_its_goal_is() -> None:
    peers = [failed("vllm"), peer("transformers", 30.0)]
    lines = [re.split(r"  +", line) for line in summary({**RUN, "peers": peers})]
    what = "best K over vLLM's best with the pair"
    assert [what, "not measured (exit status 1)", ">= 1.8", "not measured"] in lines


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ([peer("vllm", 160.0), NGRAM], (1.25, "400/s, 320/s")),
        ([peer("vllm", 160.0), NGRAM, peer("vllm-ngram", 200.0)], (1.25, "400/s, 320/s")),
        ([peer("vllm", 500.0), NGRAM, peer("transformers", 800.0)], (0.8, "400/s, 500/s")),
        ([peer("vllm", 500.0, num_prompts=3), NGRAM], (1.25, "400/s, 320/s")),
        ([peer("vllm", 160.0), failed("vllm-ngram")], (None, "exit status 1")),
        ([failed("vllm"), NGRAM, failed("vllm-ngram")], (1.25, "400/s, 320/s")),
        ([peer("vllm", 160.0)], None),
        ([peer("vllm", 160.0), NGRAM | {"max_tokens": 64}], None),
    ],
)
def test_prompt_lookup_is_judged_by_all_of_vllm_where_it_has_ngram_drafts(
    peers: list[dict[str, Any]], expected: tuple[float | None, str] | None
) -> None:
    found = [
        (goal.figure, goal.note)
        for goal in goals({**RUN, "peers": peers})
        if goal.what == "prompt lookup over vLLM's best with n-gram drafts"
    ]
    assert found == ([] if expected is None else [expected])


def test_the_tables_tell_figures_and_what_has_none() -> None:
    lines = report(RUN).splitlines()
    assert lines[: len(summary(RUN))] == summary(RUN)
    cells = [re.split(r"  +", line) for line in summary(RUN)]
    for row in (
        ["best K over vLLM's best with the pair", "2.25 (360/s, 160/s)", ">= 1.8", "reached"],
        ["prompt lookup over vLLM's best with n-gram drafts", "1.25 (400/s, 320/s)"]
        + [">= 1.8", "missed (7b)"],
        ["adaptive K with prompt lookup over target alone", "2.00 (400/s)"],
        ["with prompt lookup: answers other than target alone's"]
        + ["1 (of 5; by logits up to 0.062 apart)", "<= 0", "missed (7b)"],
        ["speculation over target alone, best K", "1.80 (K = 2, 360/s)", "1.90 (K = 4, 76/s)"]
        + [">= 2 (32b)", "missed (32b)"],
        ["answers other than target alone's, all K", "1 (of 10; by logits up to 0.031 apart)"]
        + ["0 (of 5)", "<= 0", "missed (7b)"],
        ["", "small pair", "goal"],
    ):
        assert row in cells
    for line in (
        "| rows | 1,000 tokens | 8,000 tokens |",
        "| 1 | 4.40 (1.10) | 6.00 (1.50) |",
        "| 5 | 9.00 (2.25) |  |",
        "| 4 | 5.00 | 2.00 | 300.0 | 1.50 | 0.97 | 0.85 |",
        "| vllm | 0.23 | 0 | 160.0 |  |",
        "| vllm |  | 2 | exit status 1 | |",
        "| vllm-ngram | 0.23 | 4 | 320.0 | 4.18 |",
        "| transformers | 5 | 4 | 16.0 | 2.12 |",
        "7b+0.4b, own: OutOfMemoryError: none is left",
        "7b+0.4b, fp8: the fused kernels do not run linears in fp8",
    ):
        assert line in lines


def test_runs_of_one_machine_make_one_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seven, thirty_two = (
        {**RUN, "pairs": {name: pair}, "peers": []} for name, pair in RUN["pairs"].items()
    )
    assert merged([seven, thirty_two]) == {**RUN, "peers": []}
    files = [tmp_path / "7b.json", tmp_path / "32b.json", tmp_path / "peers.jsonl"]
    files[0].write_text(json.dumps(seven))
    files[1].write_text(json.dumps(thirty_two))
    files[2].write_text("".join(f"{json.dumps(line)}\n" for line in RUN["peers"]))
    first, second, peers = map(str, files)
    main([first, second, "--peers", peers])
    assert capsys.readouterr().out == f"{report(RUN)}\n"
    with pytest.raises(SystemExit):
        main([first, first])
    assert "two runs have figures for 7b+0.4b" in capsys.readouterr().err
    with pytest.raises(ValueError, match="are two tables"):
        merged([seven, {**thirty_two, "machine": {"gpu": "H200"}}])


def test_prompts_are_pieces_of_sources_each_further_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    write_prompts([str(tmp_path), "--number", "3", "--tokens", "200"])
    prompts = json.loads(capsys.readouterr().out)
    assert [len(prompt) for prompt in prompts] == [200] * 3
    text = Path(json.__file__).read_text(encoding="utf-8")
    assert Tokenizer.load(tmp_path).decode(prompts[0]) == text[:200]
    assert prompts[1][:103] == prompts[0][97:]
    assert prompts[2][:103] == prompts[1][97:]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("phi3", {}),
    ],
)
def test_tensors_made_in_memory_are_those_of_a_built_engine(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_toy_checkpoint(tmp_path / "toy", family, dtype="float32", **overrides)
    built = load_file(build_engine(folder, tmp_path) / "model.safetensors")
    config, read_source = open_source(folder)
    made = inflated_tensors(
        config, read_source, Size(32, 2, 2, 64), device="cpu", dtype=torch.float32
    )
    names, read = engine_tensors(unified_config(config), made)
    assert sorted(names) == sorted(built)
    for name in ["head.weight", *(name for name in names if name != "head.weight")]:
        tensor = read(name)
        assert tensor is not None
        assert torch.equal(tensor, built[name]), name
    assert read("layers.9.qkv.weight") is None


@pytest.mark.parametrize("name", get_args(RoundedFormat))
def test_rounded_linears_are_those_of_a_built_engine(name: RoundedFormat, tmp_path: Path) -> None:
    """One that was quantized with the scales that are not searched for all 1."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
    toy = write_toy_checkpoint(tmp_path / "toy", intermediate_size=96, **sizes)
    hf_config, read_source = open_source(toy)
    config = rounded_config(unified_config(hf_config), name)
    settings = scheme(name, awq_block_size=32)
    scales = write_scales(tmp_path / "scales", toy, settings, is_searched=False)
    (tmp_path / "checkpoint").mkdir()
    quantize(toy, scales, tmp_path / "checkpoint", settings)
    kernel: Kernel = "fp8" if name == "fp8" else "int4"
    checkpoint = load_unified(tmp_path / "checkpoint")
    assert config.quantization == checkpoint.config.quantization
    write_weights(tmp_path / "engine", checkpoint, "bfloat16", kernel)
    built = load_file(tmp_path / "engine")
    size = Size(64, 2, 2, 96)
    made = inflated_tensors(hf_config, read_source, size, device="cpu", dtype=torch.bfloat16)
    _, read = engine_tensors(config, made)
    linears = {linear.rpartition(".")[0] for linear in built if linear.endswith("_scale")}
    assert len(linears) == 2 * 4
    names = [f"{linear}.weight" for linear in ("head", *linears)]
    for each in [*names, *(n for n in built if n.endswith(("weight_scale", "prequant")))]:
        tensor = read(each)
        assert tensor is not None, each
        assert tensor.dtype == built[each].dtype, each
        assert torch.equal(tensor.float(), built[each].float()), each


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_a_run_without_a_gpu_measures_every_part(tmp_path: Path) -> None:
    """In Triton's interpreter, so that its times mean nothing."""
    for role in ("draft", "target"):
        folder = write_toy_checkpoint(
            tmp_path / role,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            dtype="float32",
            seed=len(role),
        )
        byte_level().save(str(folder / "tokenizer.json"))
    out, prompts = tmp_path / "out.json", tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[7, 191, 3, 88] * 3, [9] * 20]))
    options = {
        "--draft": tmp_path / "draft",
        "--target": tmp_path / "target",
        "--pairs": "64,1,1,96+32,1,1,64",
        "--device": "cpu",
        "--dtype": "float32",
        "--contexts": "8,20",
        "--rows": "1,2",
        "--num-draft-tokens": "0,2",
        "--max-tokens": 6,
        "--num-prompts": 1,
        "--runs": 1,
        "--times": 1,
        "--out": out,
        "--prompts": prompts,
    }
    command = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(
        command + [str(word) for option in options.items() for word in option],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a CPU (a copy moves ")
    run = json.loads(out.read_bytes())
    assert run["small"]["float32"]["target"]["num_different"] == 0
    assert run["small"]["float32"]["rounds"]["num_different"] == 0
    pair = run["pairs"]["64,1,1,96+32,1,1,64"]
    assert (pair["settings"]["num_prompts"], pair["settings"]["prompt_tokens"]) == (1, 12)
    assert [(s["model"], s["context"], s["rows"]) for s in pair["steps"]] == [
        (model, context, rows)
        for model in ("target", "draft")
        for context in (8, 20)
        for rows in (1, 2)
    ]
    # 256 · 64 of the head, 64 · 96 of attention, 3 · 64 · 96 of the MLP, 3 · 64 of norms; and
    # 2 · 16 of keys and values of 9 positions; 4 bytes each
    assert pair["steps"][0]["bytes"] == 4 * (16_384 + 6_144 + 18_432 + 192 + 288)
    assert [(r["num_draft_tokens"], r["num_different"]) for r in pair["rounds"]] == [(0, 0), (2, 0)]
    assert [(s["is_seeded"], s["num_draft_tokens"]) for s in pair["sampled"]] == [
        (True, 2),
        (False, 2),
    ]
    assert [s["num_different"] for s in pair["sampled"]] == [0, 0]
    assert [s["num_different_from_alone"] for s in pair["sampled"]] == [0, None]
    assert pair["own"]["acceptance_rate"] == 1.0
    adaptive = pair["adaptive"]
    assert adaptive["tokens_per_second"] > 0
    assert adaptive["first_token_seconds"] > 0 and adaptive["alone_first_token_seconds"] > 0
    assert (pair["lookup"]["num_answers"], pair["lookup"]["num_different"]) == (1, 0)
    assert pair["lookup"]["tokens_per_second"] > 0
    assert pair["hopeless"]["tokens_per_second"] > 0
    assert pair["fp8"]["seconds"] > 0
    assert pair["busy"] == {"not_run": "there is no GPU"}
