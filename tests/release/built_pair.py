"""A quickstart pair that was built, and records of a verification and a night that speak of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from specpipe.build import execution, planning
from specpipe.build.load import load_config
from specpipe.config.sections import PipelineConfig
from specpipe.evaluate.results import write_result
from specpipe.evaluate.verification import record
from specpipe.machine.manifest import read_manifest
from tests.quiet import Quiet

MODELS = Path(__file__).parents[2] / "models" / "python-code"

YAML = """
name: pair
draft: {checkpoint: draft}
target: {checkpoint: target}
speculation: {num_draft_tokens: 3}
engine: {max_batch_size: 4, max_seq_len: 256}
"""
CARD = "---\nlicense: apache-2.0\nlanguage: [en]\n---\n# A draft\n"


def write_pair(folder: Path, yaml: str = YAML) -> PipelineConfig:
    """Writes checkpoints and a YAML, the draft with licence files."""
    shutil.copytree(MODELS, folder, dirs_exist_ok=True)
    (folder / "draft" / "LICENSE").write_text("Apache License, Version 2.0\n")
    (folder / "draft" / "NOTICE.txt").write_text("Made by hand.\n")
    (folder / "draft" / "README.md").write_text(CARD)
    (folder / "pair.yaml").write_text(yaml)
    return load_config(folder / "pair.yaml")


def copied(config: PipelineConfig, folder: Path) -> PipelineConfig:
    """Copies a pair; its large files are links."""

    def copy(source: str, destination: str) -> None:
        (os.link if source.endswith(".safetensors") else shutil.copy2)(source, destination)

    shutil.copytree(config.base_dir, folder, copy_function=copy)
    return load_config(folder / "pair.yaml")


def build(config: PipelineConfig) -> None:
    execution.run(planning.plan(config), Quiet())


def repository_digest(config: PipelineConfig) -> str:
    manifest = read_manifest(config.artifacts.repository)
    assert manifest is not None
    return record.repository_digest(manifest.outputs)


def head(kind: str, **values: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "kind": kind,
        "pair": "pair",
        "made_at": "2026-11-29T03:00:09+00:00",
        "versions": {"python": "3.11.7", "specpipe": "0.2.0", "torch": "2.13.0+cpu"},
        "machine": {"cpu": "a processor", "num_cores": 2, "gpus": []},
        "settings": {"prompts": "code"},
        "prompts": {"source": "code", "digest": "9b" * 32, "count": 4},
        **values,
    }


def check(kind: str, name: str, k: int | None, drafted: int, accepted: int) -> dict[str, Any]:
    return {
        "check": kind,
        "side": name,
        "kind": "speculation",
        "num_draft_tokens": k,
        "at_once": 1,
        "verdict": "identical",
        "num_identical": 4,
        "ties": [],
        "faults": [],
        "num_tokens": 24,
        "total_draft_tokens": drafted,
        "total_accepted_draft_tokens": accepted,
        "notes": [],
    }


def write_verification(config: PipelineConfig, *, reason: str | None = None) -> None:
    data = head(
        "verify",
        verdict="identical" if reason is None else "fault",
        reason=reason,
        num_faults=0 if reason is None else 1,
        num_ties=0,
        threshold={"dtype": "float32", "rule": "a margin of at most one unit"},
        checks=[
            check("greedy", "K = 3, 1 at once", 3, 36, 13),
            check("seeded", "K = 3, 1 at once", 3, 39, 12),
        ],
        sampling=None,
        gate=None,
        notes=[],
        skipped=["unseeded sampling: not asked for"],
    )
    record.write(config.artifacts_dir, data, record.record_repository(config.artifacts_dir))


def accepted(accepted_at: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Acceptance of prompts with four steps of three draft tokens each, by position."""
    prompts = [
        {
            "prompt": name,
            "kind": "code",
            "num_draft_tokens": 12,
            "num_accepted_tokens": sum(found),
            "judged_at": [4, *found[:-1]],
            "accepted_at": found,
        }
        for name, found in accepted_at.items()
    ]
    totals = {
        name: sum(prompt[name] for prompt in prompts)
        for name in ("num_draft_tokens", "num_accepted_tokens")
    }
    return {**totals, "prompts": prompts}


def write_night(
    config: PipelineConfig, *, repository: str | None = None, ratio: float = 1.3, **values: Any
) -> None:
    """Writes what a good night of the repository leaves, or of the one with that digest."""
    compared = {"concurrency": 1, "ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1}
    acceptance = {"rate": 1 / 3, "length": 1.5, "per_position": [0.5, 0.4, 0.1]}
    bench = head(
        "bench",
        sides=[{"name": "the target alone"}, {"name": "speculation"}],
        loads=[
            {
                "concurrency": 1,
                "sides": {"speculation": {"concurrency": 1, "acceptance": acceptance}},
                "comparison": {**compared, "confidence": 0.95, "outcome": "gain"},
            }
        ],
        verdict="Speculation is faster.",
    )
    night = head(
        "nightly",
        config="pair.yaml",
        outcome="good",
        reasons=[],
        notes=[],
        repository=repository or repository_digest(config),
        asked={
            "prompts": "9b" * 32,
            "num_draft_tokens": 3,
            "served_by": "this process",
            "machine": "a processor (2 cores)",
        },
        verification={"verdict": "identical", "reason": None, "num_ties": 0},
        acceptance=accepted({"a": (2, 1, 1), "b": (3, 1, 1), "c": (2, 1, 1)}),
        speed_ups=[{**compared, "num_answers": 8, "num_failed": 0, "error": None}],
        sizes_bytes={"draft engine": 10, "target engine": 20, "repository": 30},
        **values,
    )
    write_result(config.artifacts.result("nightly-bench"), bench)
    write_result(config.artifacts.result("nightly"), night)


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data
