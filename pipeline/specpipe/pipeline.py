"""The road from a config to a Triton repository: which stages, in which order, and running them.

check ─→ draft/convert ──→ draft/build_engine ───┐
         target/convert ─→ target/build_engine ──┴→ package

<output_dir>/<name>/  check/  draft/{checkpoint,engine}/  target/{checkpoint,engine}/  model_repo/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from specpipe import cache, source
from specpipe.checkpoint import QUANTIZATION_KEYS, read_config
from specpipe.config import CheckpointConfig, PipelineConfig
from specpipe.errors import CheckpointError, ConfigError, RepositoryError
from specpipe.families import unified_config
from specpipe.hf_config import context_length
from specpipe.pairing import PairContract, check_pair
from specpipe.runtimes.base import PairOptions, PairPlan, Side, load_runtime
from specpipe.runtimes.memory import MemoryEstimate
from specpipe.stages.base import PlannedStage, Role
from specpipe.stages.check import Check
from specpipe.stages.package import Package

_DEFAULT_MAX_SEQ_LEN = 4096
"""Contexts are long by now, and the KV cache of a whole one for each request seldom fits."""


@dataclass(frozen=True)
class Fetch:
    """Brings the weights of a hub checkpoint, at the commit whose small files made the plan."""

    repo_id: str
    commit: str
    base: Path
    role: Role

    def __call__(self) -> None:
        source.resolve(self.repo_id, revision=self.commit, base=self.base, role=self.role)


Plan = tuple[PlannedStage, ...]


@dataclass(frozen=True)
class StageReport:
    """What became of a stage, or would: no reasons, no run."""

    stage: str
    artifact: Path
    reasons: tuple[str, ...]
    duration_s: float = 0.0
    commands: tuple[tuple[str, ...], ...] = ()
    """What a stage that would run calls; known before it runs."""


class Reporter(Protocol):
    """Hears how a run goes on."""

    def started(self, stage: str, reasons: Sequence[str]) -> None: ...

    def waiting(self, stage: str) -> None:
        """Another build of the same artifact has to finish first."""

    def finished(self, report: StageReport) -> None: ...


def plan(config: PipelineConfig, *, small_files: Path | None = None) -> Plan:
    """Returns the stages in order; refuses unsupported checkpoints, reads small files only.

    With `small_files`, a folder of them instead of the hub, the plan is good to look at: there are
    no weights to run it with.
    """
    draft = _resolve(config, config.draft, "draft", small_files)
    target = _resolve(config, config.target, "target", small_files)
    max_seq_len = _max_seq_len(config, target)
    runtime = load_runtime(config.engine.runtime)
    check = PlannedStage(Check(draft.folder, target.folder), config.artifacts_dir / "check")
    pair = PairPlan(
        draft=draft,
        target=target,
        engine=config.engine,
        max_seq_len=max_seq_len,
        num_draft_tokens=config.speculation.num_draft_tokens,
    )
    draft_stages, target_stages = runtime.engine_stages(pair)
    package = Package(
        draft_engine=draft_stages[-1].artifact,
        target_engine=target_stages[-1].artifact,
        tokenizer=target.folder,
        contract=check.artifact / "pair.json",
        runtime=config.engine.runtime,
        options=PairOptions(
            num_draft_tokens=config.speculation.num_draft_tokens,
            adaptive=config.speculation.adaptive,
            max_batch_size=config.engine.max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=config.engine.max_num_tokens,
            max_queue_size=config.serving.max_queue_size,
            request_timeout_s=config.serving.request_timeout_s,
            num_threads=config.engine.num_threads,
            runtime_settings=runtime.serving_settings(pair),
        ),
    )
    in_turn = (s for pair_of in zip_longest(draft_stages, target_stages) for s in pair_of if s)
    return (check, *in_turn, PlannedStage(package, repository_dir(config)))


@dataclass(frozen=True)
class Checked:
    """What is known of a pair before anything is built."""

    contract: PairContract
    memory: Mapping[Role, MemoryEstimate]


def check(config: PipelineConfig, *, small_files: Path | None = None) -> Checked:
    """Returns the pair contract and memory; raises what a build would, and makes nothing."""
    draft = _resolve(config, config.draft, "draft", small_files)
    target = _resolve(config, config.target, "target", small_files)
    pair = PairPlan(
        draft=draft,
        target=target,
        engine=config.engine,
        max_seq_len=_max_seq_len(config, target),
        num_draft_tokens=config.speculation.num_draft_tokens,
    )
    runtime = load_runtime(config.engine.runtime)
    return Checked(
        check_pair(draft.folder, target.folder),
        {side.role: runtime.estimate_memory(pair, side) for side in (draft, target)},
    )


def repository_dir(config: PipelineConfig) -> Path:
    """Returns where the Triton repository of a pair is, or will be."""
    return config.artifacts_dir / "model_repo"


def built_repository(config: PipelineConfig) -> Path:
    """Returns the Triton repository of a pair; raises RepositoryError where none was built."""
    folder = repository_dir(config)
    if not folder.is_dir():
        raise RepositoryError(
            f"{folder} does not exist: run `specpipe build --config {config.source}` first"
        )
    return folder


def outdated(config: PipelineConfig) -> list[str]:
    """Returns what a build would do now, as sentences, where that can be told without the hub.

    Serving needs no checkpoint: where one is gone, there is nothing to compare with.
    """
    folders = [config.base_dir / side.checkpoint for side in (config.draft, config.target)]
    if not all(folder.is_dir() for folder in folders):
        return []
    reports = preview(plan(config))
    return [f"{report.stage}: {reason}" for report in reports for reason in report.reasons]


def preview(stages: Plan) -> tuple[StageReport, ...]:
    """Returns why each stage would run; nothing is made."""
    reports: list[StageReport] = []
    running: list[PlannedStage] = []
    for planned in stages:
        reasons = cache.stale_reasons(planned.stage, planned.artifact)
        if reasons != ["missing"]:
            reasons += [f"upstream {other.name} runs" for other in running if planned.reads(other)]
        commands: tuple[tuple[str, ...], ...] = ()
        if reasons:
            running.append(planned)
            if planned.commands is not None:
                commands = tuple(tuple(command) for command in planned.commands(planned.artifact))
        reports.append(
            StageReport(planned.name, planned.artifact, tuple(reasons), commands=commands)
        )
    return tuple(reports)


def run(stages: Plan, reporter: Reporter) -> tuple[StageReport, ...]:
    """Makes what is stale, in order. A stage whose inputs came out as before does not run.

    Whether there is anything to do is told by sizes and times; what a stage is made of is verified
    by digest first, so that damage is mended and never handed on.
    """
    for planned in stages:
        if planned.require is not None:
            planned.require()
    read = _read_by_what_runs(stages)
    return tuple(_run_stage(planned, planned.artifact in read, reporter) for planned in stages)


def _read_by_what_runs(stages: Plan) -> set[Path]:
    """Returns the artifacts that stages will read which are stale, or are found damaged here."""
    running = {report.artifact for report in preview(stages) if report.reasons}
    read: set[Path] = set()
    for planned in reversed(stages):
        if planned.artifact in running or (
            planned.artifact in read
            and cache.stale_reasons(planned.stage, planned.artifact, verify=True)
        ):
            read |= {other.artifact for other in stages if planned.reads(other)}
    return read


def _run_stage(planned: PlannedStage, verify: bool, reporter: Reporter) -> StageReport:
    if planned.fetch and cache.stale_reasons(planned.stage, planned.artifact, verify=verify):
        planned.fetch()
    built = cache.build(
        planned.stage,
        planned.artifact,
        verify=verify,
        on_start=lambda reasons: reporter.started(planned.name, reasons),
        on_wait=lambda: reporter.waiting(planned.name),
    )
    report = StageReport(planned.name, planned.artifact, built.reasons, built.duration_s)
    reporter.finished(report)
    return report


def _resolve(
    config: PipelineConfig, checkpoint: CheckpointConfig, role: Role, small_files: Path | None
) -> Side:
    """Resolves one checkpoint to a folder that holds its small files at least."""
    found = source.resolve(
        checkpoint.checkpoint,
        revision=checkpoint.revision,
        base=config.base_dir,
        role=role,
        weights=False,
        small_files=small_files,
    )
    allow_quantized = load_runtime(config.engine.runtime).reads_quantized(config.engine)
    try:
        hf_config = read_config(found.path, allow_quantized=allow_quantized)
        if allow_quantized:  # what it is apart from that
            hf_config = {k: v for k, v in hf_config.items() if k not in QUANTIZATION_KEYS}
        # The dtype may be left to the weights, and has no part in this.
        unified = unified_config({**hf_config, "dtype": "float32"})
    except CheckpointError as exc:
        raise CheckpointError(f"{role} {found.path}: {exc}") from exc
    return Side(
        role=role,
        checkpoint=checkpoint,
        folder=found.path,
        unified=unified,
        context_length=context_length(
            unified["max_position_embeddings"], unified["rotary_scaling"]
        ),
        artifacts=config.artifacts_dir / role,
        fetch=Fetch(found.name, found.revision, config.base_dir, role) if found.revision else None,
    )


def _max_seq_len(config: PipelineConfig, target: Side) -> int:
    wanted = config.engine.max_seq_len
    if wanted is not None and wanted > target.context_length:
        raise ConfigError(
            f"{config.source}: engine.max_seq_len is {wanted}: expected at most "
            f"{target.context_length}, the context length of the target "
            f"{target.checkpoint.checkpoint}"
        )
    return wanted or min(target.context_length, _DEFAULT_MAX_SEQ_LEN)
