"""A folder of artifacts with everything in it that a report can show, written without a model.

Results are written by the classes that write them, so that a change of their form is noticed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specpipe.evaluate.bench.compare import RateComparison
from specpipe.evaluate.bench.metrics import AcceptanceTotals, Distribution, Summary
from specpipe.evaluate.results import write_result
from specpipe.evaluate.tune import schedule
from specpipe.evaluate.tune.acceptance import AcceptanceEstimate
from specpipe.evaluate.tune.costs import LoadCosts
from specpipe.evaluate.tune.measure import Measurement
from specpipe.evaluate.tune.model import Prediction
from specpipe.evaluate.tune.outcome import Tuned
from specpipe.evaluate.verification import record
from specpipe.evaluate.verification.exact import CaseComparison, SideResult, VerifySide
from specpipe.evaluate.verification.verdict import FirstDifference, StreamComparison, TieThreshold
from specpipe.machine.manifest import InputRecord, Manifest, manifest_path, record_files
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile

GPU = {"name": "NVIDIA H100 80GB HBM3", "compute_cap": "9.0", "driver_version": "570.1"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
BUILT_AT, MEASURED_AT = "2026-11-01T10:00:00+00:00", "2026-11-02T10:00:00+00:00"
BASELINE, SPECULATION = "the target alone", "speculation"


def write_build(folder: Path, *, device: str = "cuda", quantization: str | None = None) -> Path:
    """What `specpipe build` leaves, as far as a report reads it."""
    hub = folder.parent / "hub" / "models--Qwen--Qwen2.5-7B-Instruct" / "snapshots" / COMMIT
    source = {"draft": folder.parent / "small" / "draft", "target": hub}
    version = folder / "model_repo" / "speculative" / "1"
    for role, size in (("draft", 1_000_000), ("target", 5_000_000)):
        source[role].mkdir(parents=True)
        (source[role] / "model.safetensors").write_bytes(bytes(size))
        _write_artifact(folder / role / "checkpoint", size, [source[role]], f"{role}/convert")
        made_from = [folder / role / "checkpoint"]
        _write_artifact(folder / role / "engine", size // 2, made_from, f"{role}/build_engine")
        (version / role).mkdir(parents=True)
        (version / role / "config.json").write_text(json.dumps(_engine(device, quantization)))
    pair = PairFile("torch", PairOptions(num_draft_tokens=4))
    (version / "pair.json").write_text(pair.to_json())
    engines = [folder / role / "engine" for role in ("draft", "target")]
    _write_manifest(folder / "model_repo", engines, "package")
    return folder


def _engine(device: str, quantization: str | None) -> dict[str, Any]:
    return {
        "pretrained_config": {
            "architecture": "Qwen2ForCausalLM",
            "dtype": "bfloat16",
            "vocab_size": 152064,
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "quantization": {"quant_algo": quantization, "kv_cache_quant_algo": None},
        },
        "build_config": {
            "dtype": "bfloat16",
            "device": device,
            "max_batch_size": 8,
            "max_seq_len": 4096,
        },
    }


def _write_artifact(folder: Path, size: int, inputs: list[Path], stage: str) -> None:
    folder.mkdir(parents=True)
    (folder / "rank0.safetensors").write_bytes(bytes(size))
    _write_manifest(folder, inputs, stage)


def _write_manifest(artifact: Path, inputs: list[Path], stage: str) -> None:
    Manifest(
        stage=stage,
        inputs=tuple(InputRecord(str(path), record_files(path)) for path in inputs),
        settings={},
        versions={"specpipe": "0.1.0"},
        outputs=record_files(artifact),
        build={
            "built_at": BUILT_AT,
            "duration_s": 12.5,
            "argv": ["/opt/bin/specpipe", "build", "--config", "configs/my pair.yaml"],
            "python": "3.11.7",
            "platform": "Linux",
            "gpus": [],
        },
    ).write(manifest_path(artifact))


def header(kind: str, settings: Mapping[str, Any], source: str = "code") -> dict[str, Any]:
    return {
        "format": 1,
        "kind": kind,
        "pair": "example",
        "made_at": MEASURED_AT,
        "versions": {"python": "3.11.7", "specpipe": "0.1.0"},
        "machine": {"cpu": "AMD EPYC 9354", "num_cores": 16, "gpus": [GPU]},
        "settings": dict(settings),
        "prompts": {"source": source, "digest": "ab" * 32, "count": 12},
    }


def write_verification(folder: Path, *, prompt: str = "fibonacci", fault: bool = False) -> None:
    """One tie on a prompt of that name, and a fault if asked for."""
    divergence = FirstDifference(
        position=9, expected_id=11, found_id=None, margin=0.03125, in_ulps=1.0, threshold=0.0625
    )
    tie = CaseComparison(prompt, StreamComparison("tie", divergence))
    compared = StreamComparison("fault", divergence, "position 9: an end instead of 11")
    wrong = CaseComparison(prompt, compared)
    sides = [
        SideResult(
            check="greedy",
            side=VerifySide(
                name="K = 1, 8 at once", kind="speculation", num_draft_tokens=1, at_once=8
            ),
            verdict="identical",
            num_identical=12,
            ties=(),
            faults=(),
            num_tokens=1500,
            num_draft_tokens=500,
            num_accepted_tokens=450,
        ),
        SideResult(
            check="greedy",
            side=VerifySide(
                name="K = 4, 8 at once", kind="speculation", num_draft_tokens=4, at_once=8
            ),
            verdict="fault" if fault else "tie",
            num_identical=10,
            ties=(tie,),
            faults=(wrong,) if fault else (),
            num_tokens=1500,
            num_draft_tokens=1000,
            num_accepted_tokens=640,
        ),
    ]
    settings = {"max_tokens": 64, "at_once": 8, "served_by": "Triton"}
    threshold = TieThreshold(dtype="bfloat16", block_difference=0.0625)
    data = {
        **header("verify", settings),
        "verdict": "fault" if fault else "tie",
        "reason": "greedy, K = 4, 8 at once: prompt fibonacci" if fault else None,
        "num_faults": int(fault),
        "num_ties": 1,
        "threshold": {**asdict(threshold), "rule": str(threshold)},
        "checks": [side.to_json() for side in sides],
        "sampling": {
            "distance": 0.1,
            "power": 0.9,
            "false_alarm": 0.001,
            "correction": "Holm",
            "tests": [
                {
                    "test": f"T = 1, K = 2, {prompt}",
                    "num_samples": 1300,
                    "num_bins": 12,
                    "distance": 0.031,
                    "p_value": 0.42,
                    "is_flagged": False,
                }
            ],
        },
        "gate": {
            "source": "gate.jsonl",
            "reason": None,
            "num_prompts": 20,
            "num_right": 19,
            "num_right_target_alone": 19,
        },
        "skipped": ["seeded: not here"],
    }
    record.write(folder, data, record.record_repository(folder))


def write_bench(folder: Path, *, side: str = SPECULATION, source: str = "code") -> None:
    """At 1 stream speculation gains, at 8 it loses."""
    settings = {
        "concurrencies": [1, 8],
        "rounds": 3,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "first_output_limit_ms": 500.0,
        "output_token_limit_ms": None,
    }
    loads = []
    for concurrency, ratio, rates in ((1, 1.8, (50.0, 90.0)), (8, 0.9, (200.0, 180.0))):
        compared = RateComparison(
            concurrency=concurrency,
            ratio=ratio,
            low=ratio - 0.05,
            high=ratio + 0.05,
            num_prompts=12,
            num_differing_prompts=1,
        )
        sides = {}
        for name, rate in zip((BASELINE, side), rates, strict=True):
            summary = _summary(concurrency, rate, has_draft=name == side)
            gpus = [{"gpu": 0, "max_memory_mib": 20480.0, "mean_utilization_percent": 71.0}]
            sides[name] = {**summary.to_json(), "server_counters": None, "gpus": gpus}
        loads.append({"concurrency": concurrency, "sides": sides, "comparison": compared.to_json()})
    data = {
        **header("bench", settings, source),
        "sides": [
            {"name": name, "endpoint": "grpc://127.0.0.1:8001", "num_draft_tokens": None}
            for name in (BASELINE, side)
        ],
        "loads": loads,
        "verdict": f"{side.capitalize()} is faster than {BASELINE} at concurrency 1 (1.80 times).",
    }
    write_result(folder / "results" / "bench.json", data)


def _summary(concurrency: int, rate: float, *, has_draft: bool) -> Summary:
    token_s = concurrency / rate
    acceptance = AcceptanceTotals(
        num_draft_tokens=1000 if has_draft else 0,
        num_accepted_tokens=640 if has_draft else 0,
        num_steps=400,
    )
    return Summary(
        concurrency=concurrency,
        num_answers=36,
        num_failed=1,
        num_cut=2,
        errors={},
        num_output_tokens=3300,
        mean_input_tokens=74.0,
        output_tokens_per_s=rate,
        answers_per_s=rate / 100,
        good_answers_per_s=rate / 200,
        first_output_s=Distribution.of([0.02 * concurrency, 0.05 * concurrency]),
        output_token_s=Distribution.of([token_s, 1.5 * token_s], mean=token_s),
        gap_s=Distribution.of([token_s, 3 * token_s]),
        latency_s=Distribution.of([100 * token_s]),
        acceptance=acceptance,
        tokens_counted_by="server",
    )


ROUNDS = [{(4, 4): 2, (4, 1): 1, (4, 0): 1}, {(4, 2): 2}]
"""Steps of two prompts by drafted and accepted tokens.

Position 1 was judged in 6 steps and accepted in 5; position 2 judged in 5, accepted in 4; position
3 judged in 4, accepted in 2; position 4 judged in 2, accepted in 2. Together 13 of 17.
"""


def write_tune(folder: Path, *, draft: str = "../models/draft") -> None:
    acceptance = AcceptanceEstimate.of(ROUNDS, 4)
    best = {1: 4, 8: 0}
    own = Tuned(
        checkpoint=draft,
        is_own=True,
        acceptance=acceptance,
        kinds={"code": acceptance, "chat": acceptance},
        costs=tuple(LoadCosts(load, 0.001, {0: 0.01, 4: 0.012}, 0.0, 0.001) for load in (1, 8)),
        predictions=tuple(
            Prediction(
                concurrency=load,
                num_draft_tokens=length,
                expected_tokens=1.5,
                published=1.7,
                memory_bound=1.6,
                speed_up=1.4 / load**0.5,
            )
            for load in (1, 8)
            for length in (1, 2, 3, 4)
        ),
        measurements=tuple(
            Measurement(
                concurrency=load,
                num_draft_tokens=4,
                tokens_per_s=90.0,
                speed_up=1.35 / load**0.5,
                lowest=1.3 / load**0.5,
                highest=1.4 / load**0.5,
            )
            for load in (1, 8)
        ),
        best=best,
    )
    other = Tuned(checkpoint="other", is_own=False, reason="its vocabulary is another one")
    settings = {
        "concurrencies": [1, 8],
        "max_draft_len": 4,
        "max_tokens": 64,
        "temperature": 0.0,
        "rounds": 3,
    }
    data = {
        **header("tune", settings),
        "context": 102,
        "drafts": [own.to_json(), other.to_json()],
        "forms": [asdict(form) for form in schedule.server_settings(best, draft)],
    }
    write_result(folder / "results" / "tune.json", data)


def write_quality(folder: Path) -> None:
    """As the build of a quantized pair writes it."""

    def acceptance(draft: str, target: str, rate: float) -> dict[str, Any]:
        return {
            "draft": draft,
            "target": target,
            "num_draft_tokens": 1000,
            "num_accepted_tokens": round(1000 * rate),
            "standard_error": 0.02,
            "acceptance_rate": rate,
        }

    plain = {"name": "plain", "weights_bytes": 5_000_000, "kv_cache_bytes_per_token": 2048}
    quantized = {"name": "fp8", "weights_bytes": 2_600_000, "kv_cache_bytes_per_token": 1024}
    divergence = {
        "num_positions": 4000,
        "plain_perplexity": 7.5,
        "perplexity": 7.65,
        "perplexity_ratio": 1.02,
        "mean_kl": 0.0123,
        "top1_agreement": 0.971,
    }
    data = {
        "models": [
            {"role": "draft", "plain": plain, "quantized": None, "divergence": None, "texts": None},
            {
                "role": "target",
                "plain": plain,
                "quantized": quantized,
                "divergence": divergence,
                "texts": "16 built-in texts",
            },
        ],
        "engines": "cuda, bfloat16",
        "num_draft_tokens": 4,
        "num_prompts": 48,
        "acceptance": [acceptance("plain", "plain", 0.6), acceptance("plain", "fp8", 0.57)],
        "acceptance_ratio": 0.95,
        "warnings": ["the texts are few"],
    }
    path = folder / "quality" / "report.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))


def write_all(folder: Path, *, name: str = "fibonacci") -> Path:
    """A folder with every part; `name` is wherever a user's own words come in."""
    write_build(folder, quantization="FP8")
    write_verification(folder, prompt=name)
    write_bench(folder, side=name, source=name)
    write_tune(folder, draft=name)
    write_quality(folder)
    return folder
