"""Puts the stand-ins for NVIDIA's tools on the PATH, and makes toy pairs for them to build."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specpipe.build.checkpoint_stages import side_stages
from specpipe.roles import Role
from specpipe.runtimes.plan import PairPlan
from specpipe.runtimes.tensorrt_llm.engines import build
from specpipe.runtimes.tensorrt_llm.engines.build import BuildEngine
from specpipe.stage import PlannedStage
from tests import tensorrt_llm_stand_ins
from tests.runtimes.tensorrt_llm import plans
from tests.toy import toy_config, write_toy_checkpoint
from tests.toy_tokenizers import words, write_tokenizer

_STAND_INS = Path(tensorrt_llm_stand_ins.__file__).parent


@dataclass(frozen=True)
class Tools:
    """What the tests see of the stand-ins."""

    bin: Path
    state: Path

    def docker_calls(self) -> list[list[str]]:
        calls = self.state / "calls.jsonl"
        return [json.loads(line) for line in calls.read_text().splitlines()]


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *programs: str, **environment: str
) -> Tools:
    """Leaves `programs` (`trtllm-build`, `docker`) on the PATH, and nothing else of interest."""
    tools = Tools(folder / "bin", folder / "docker")
    tools.bin.mkdir()
    tools.state.mkdir()
    sources = {"trtllm-build": "fake_trtllm_build.py", "docker": "fake_docker.py"}
    for program in programs:
        source = (_STAND_INS / sources[program]).read_text(encoding="utf-8")
        path = tools.bin / program
        path.write_text(f"#!{sys.executable}\n{source}", encoding="utf-8")
        path.chmod(0o755)
    env = shutil.which("env")
    assert env is not None
    (tools.bin / "env").symlink_to(env)
    monkeypatch.setenv("PATH", str(tools.bin))
    monkeypatch.setenv("FAKE_BIN", str(_STAND_INS))
    monkeypatch.setenv("FAKE_STATE", str(tools.state))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return tools


def toy_pair(
    folder: Path,
    *,
    draft: Mapping[str, Any] | None = None,
    target: Mapping[str, Any] | None = None,
    num_draft_tokens: int = 4,
    max_seq_len: int = 256,
    tensorrt_llm: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Any] | None = None,
    **engine: Any,
) -> PairPlan:
    """A plan of two toy Llamas that are there with weights and tokenizer.

    `draft` and `target` are fields of CheckpointConfig, `sizes` keys of both models' config.json,
    `engine` fields of EngineConfig.
    """
    config = toy_config(**{"head_dim": 8, **(sizes or {})})
    pair = plans.plan(
        folder,
        draft=config,
        target=config,
        draft_checkpoint=draft,
        target_checkpoint=target,
        max_seq_len=max_seq_len,
        num_draft_tokens=num_draft_tokens,
        tensorrt_llm=tensorrt_llm,
        **engine,
    )
    for side in (pair.draft, pair.target):
        (side.folder / "model.safetensors").unlink(missing_ok=True)  # of an earlier, equal pair
        write_toy_checkpoint(side.folder, **(sizes or {}))
        write_tokenizer(side.folder, words())
    return pair


def stages(pair: PairPlan, role: Role) -> tuple[PlannedStage, ...]:
    """All stages from a checkpoint to its engine."""
    draft, target = build.engine_stages(pair)
    if role == "draft":
        return side_stages(pair, pair.draft, draft)
    return side_stages(pair, pair.target, target)


def make(pair: PairPlan, role: Role) -> Path:
    """Runs the stages of one engine into the folders that they are planned for; the engine's."""
    for planned in stages(pair, role):
        planned.artifact.mkdir(parents=True)
        planned.stage.run(planned.artifact)
    return planned.artifact


def build_stage(pair: PairPlan, role: Role) -> BuildEngine:
    """The stage that builds an engine, with its checkpoint made."""
    *before, engine = stages(pair, role)
    for planned in before:
        planned.artifact.mkdir(parents=True)
        planned.stage.run(planned.artifact)
    assert isinstance(engine.stage, BuildEngine)
    return engine.stage
