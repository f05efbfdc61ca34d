"""The road from a config to a Triton repository: which stages, in which order, and running them.

check ─→ draft/convert ──→ draft/build_engine ───┐
         target/convert ─→ target/build_engine ──┴→ package

A checkpoint that is quantized has more before its engine, and what both pay for it is measured:

draft/calibrate ──→ draft/quantize ──┬→ draft/build_engine ─→ ...
                └─→ draft/export     │
target/calibrate ─→ target/quantize ─┴→ quality ─→ quality_limits

<output_dir>/<name>/  check/  draft/{checkpoint,engine}/  target/{checkpoint,engine}/  model_repo/
    with quantization:  {draft,target}/{scales,huggingface}/  quality/  quality_limits/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from specpipe.build import cache
from specpipe.build.checkpoint_stages import side_stages
from specpipe.build.memory_plan import MemoryPlan, plan_memory
from specpipe.build.pairing import PairContract, check_pair
from specpipe.build.quality.measure import CheckQuality, Measure, MeasuredSide
from specpipe.build.quality.report import REPORT_JSON, REPORT_TEXT
from specpipe.build.stages.check import Check
from specpipe.build.stages.package import Package
from specpipe.checkpoints import source
from specpipe.checkpoints.checkpoint import (
    QUANT_CONFIG_NAME,
    QUANTIZATION_KEYS,
    read_config,
    refuse_pickles,
)
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.files import is_there
from specpipe.checkpoints.hf_config import context_length
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.config.sections import CheckpointConfig, PipelineConfig
from specpipe.errors import CheckpointError, ConfigError, RepositoryError
from specpipe.machine.gpus import Gpu
from specpipe.machine.manifest import MANIFEST_SUFFIX, Hashed, read_anew
from specpipe.machine.memory import MemoryEstimate
from specpipe.quantization.prequantized import read_prequantized
from specpipe.quantization.quantized_config import quantized_config
from specpipe.roles import Role
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.plan import PairPlan, Side, checkpoint_dir
from specpipe.runtimes.runtime import load_runtime
from specpipe.stage import PlannedStage

_DEFAULT_MAX_SEQ_LEN = 4096
"""Contexts are long by now, and the KV cache of a whole one for each request seldom fits."""
_LISTED = 8  # so many files stand in a refusal; the rest is a count


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
    shows: str | None = None
    """A text in the artifact for people."""


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
    pair = _plan_pair(config, small_files)
    runtime = load_runtime(config.engine.runtime)
    check = PlannedStage(
        Check(pair.draft.folder, pair.target.folder, config.serving.limits),
        config.artifacts_dir / "check",
    )
    draft_stages, target_stages = (
        side_stages(pair, side, engine)
        for side, engine in zip((pair.draft, pair.target), runtime.engine_stages(pair), strict=True)
    )
    in_turn = _in_turn(draft_stages, target_stages)
    if pair.measures:
        measuring = _measure_stages(config, pair, check.artifact / "pair.json")
        # Before the engines, so that what costs too much fails before hours of building them.
        last_read = max(n for n, planned in enumerate(in_turn) if measuring[0].reads(planned))
        in_turn[last_read + 1 : last_read + 1] = measuring
    package = Package(
        draft_engine=draft_stages[-1].artifact,
        target_engine=target_stages[-1].artifact,
        tokenizer=pair.target.folder,
        contract=check.artifact / "pair.json",
        runtime=config.engine.runtime,
        options=PairOptions(
            num_draft_tokens=config.speculation.num_draft_tokens,
            adaptive=config.speculation.adaptive,
            schedule=config.speculation.limits,
            prompt_lookup=config.speculation.prompt_lookup,
            max_batch_size=config.engine.max_batch_size,
            max_seq_len=pair.max_seq_len,
            max_num_tokens=config.engine.max_num_tokens,
            max_queue_size=config.serving.max_queue_size,
            request_timeout_s=config.serving.request_timeout_s,
            num_threads=config.engine.num_threads,
            runtime_settings=runtime.serving_settings(pair),
        ),
        limits=config.serving.limits,
        num_preprocessing=config.serving.preprocessing_instances,
    )
    return (check, *in_turn, PlannedStage(package, repository_dir(config)))


@dataclass(frozen=True)
class Checked:
    """What is known of a pair before anything is built."""

    contract: PairContract
    memory: Mapping[Role, MemoryEstimate]
    plan: MemoryPlan | None


def check(
    config: PipelineConfig, *, small_files: Path | None = None, gpus: Sequence[Gpu] = ()
) -> Checked:
    """Returns the pair contract and memory; raises what a build would, and makes nothing.

    gpus  those to plan for; none: nothing is known of them, and nothing planned
    """
    pair = _plan_pair(config, small_files)
    runtime = load_runtime(config.engine.runtime)
    return Checked(
        check_pair(pair.draft.folder, pair.target.folder, config.serving.limits),
        {side.role: runtime.estimate_memory(pair, side) for side in (pair.draft, pair.target)},
        plan_memory(config, pair, runtime, gpus) if gpus else None,
    )


def repository_dir(config: PipelineConfig) -> Path:
    """Returns where the Triton repository of a pair is, or will be."""
    return config.artifacts_dir / "model_repo"


@dataclass(frozen=True)
class BuiltRepository:
    """A Triton repository, held against its manifest.

    refusal  why it is not what was built, as a sentence; None: it is
    """

    folder: Path
    refusal: str | None
    hashed: Hashed


def hold_repository(config: PipelineConfig, *, verify: bool = False) -> BuiltRepository:
    """Finds the Triton repository of a pair; raises RepositoryError where none was built.

    A file that is untouched since it was packaged is not read, unless `verify` asks for all.
    """
    folder = repository_dir(config)
    if not folder.is_dir():
        why = "does not exist"
        if cache.old_artifact(folder).is_dir():
            why = "is missing, since a build was killed while it replaced it"
        raise RepositoryError(
            f"{folder} {why}: run `specpipe build --config {config.source}` first"
        )
    if verify:
        read_anew()
    held = cache.hold(folder, verify=verify)
    return BuiltRepository(folder, _refusal(config, folder, held.damage), held.hashed)


def _refusal(config: PipelineConfig, folder: Path, damage: Sequence[str]) -> str | None:
    if not damage:
        return None
    listed = "; ".join(damage[:_LISTED])
    more = f"; and {len(damage) - _LISTED} more" if len(damage) > _LISTED else ""
    return (
        f"{folder} is not what was built: {listed}{more}: run "
        f"`specpipe build --config {config.source}` again"
    )


def built_repository(config: PipelineConfig) -> Path:
    """Returns the Triton repository of a pair; raises RepositoryError for one that is not whole."""
    found = hold_repository(config)
    if found.refusal is not None:
        raise RepositoryError(found.refusal)
    return found.folder


def hold_artifacts(config: PipelineConfig) -> Hashed:
    """Hashes a built pair all the way back; RepositoryError where a file is not what it was.

    Every artifact that is there is held against its manifest, and what the manifests say that it
    was made from against what is there now: engines, checkpoints, tokenizer. Inputs that are gone
    are nothing to compare with.
    """
    found = hold_repository(config, verify=True)
    if found.refusal is not None:
        raise RepositoryError(found.refusal)
    total = found.hashed
    for manifest in sorted(config.artifacts_dir.glob(f"*/*{MANIFEST_SUFFIX}")):
        artifact = manifest.with_name(manifest.name.removesuffix(MANIFEST_SUFFIX))
        if artifact.is_dir():
            held = cache.hold(artifact, verify=True)
            total += held.hashed
            if (refusal := _refusal(config, artifact, held.damage)) is not None:
                raise RepositoryError(refusal)
    for planned in _local_plan(config):
        held = cache.changed_inputs(planned.stage, planned.artifact)
        total += held.hashed
        if held.damage:
            more = f" and {len(held.damage) - 1} more" if len(held.damage) > 1 else ""
            raise RepositoryError(
                f"{planned.artifact} was made from other files than those of today: "
                f"{held.damage[0]}{more}: run `specpipe build --config {config.source}` again"
            )
    return total


def outdated(config: PipelineConfig) -> list[str]:
    """Returns what a build would do now, as sentences, where that can be told without the hub.

    Serving needs no checkpoint: where one is gone, there is nothing to compare with.
    """
    reports = preview(_local_plan(config))
    return [f"{report.stage}: {reason}" for report in reports for reason in report.reasons]


def _local_plan(config: PipelineConfig) -> Plan:
    """The stages where both checkpoints are folders that are there; else none."""
    folders = [config.base_dir / side.checkpoint for side in (config.draft, config.target)]
    return plan(config) if all(folder.is_dir() for folder in folders) else ()


def preview(stages: Plan, *, verify_inputs: bool = False) -> tuple[StageReport, ...]:
    """Returns why each stage would run; nothing is made. `verify_inputs` as in `run`."""
    reports: list[StageReport] = []
    running: list[PlannedStage] = []
    for planned in stages:
        reasons = cache.stale_reasons(
            planned.stage, planned.artifact, verify=verify_inputs, verify_inputs=verify_inputs
        )
        if reasons != [cache.NOT_BUILT]:
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


def start_lines(stage: str, reasons: Sequence[str]) -> list[str]:
    """Returns what a stage is announced with when it runs: why, unless it never ran before."""
    return [f"{stage}: {'starts' if reason == cache.NOT_BUILT else reason}" for reason in reasons]


def run(
    stages: Plan, reporter: Reporter, *, verify: bool = False, verify_inputs: bool = False
) -> tuple[StageReport, ...]:
    """Makes what is stale, in order. A stage whose inputs came out as before does not run.

    Whether there is anything to do is told by sizes, times and inodes; what a stage is made of is
    verified by digest first, so that damage is mended and never handed on. `verify` asks for the
    digests of all artifacts, so that damage is found where nothing else has changed, and
    `verify_inputs` for those of the checkpoints, too.
    """
    for planned in stages:
        if planned.require is not None:
            planned.require()
    everything = {planned.artifact for planned in stages}
    read = everything if verify or verify_inputs else _read_by_what_runs(stages)
    reports = tuple(
        _run_stage(planned, planned.artifact in read, verify_inputs, reporter) for planned in stages
    )
    if any(report.reasons for report in reports):
        for planned in stages:
            cache.stale_reasons(planned.stage, planned.artifact)  # notes what was linked meanwhile
    return reports


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


def _run_stage(
    planned: PlannedStage, verify: bool, verify_inputs: bool, reporter: Reporter
) -> StageReport:
    if planned.fetch and cache.stale_reasons(planned.stage, planned.artifact, verify=verify):
        planned.fetch()
    built = cache.build(
        planned.stage,
        planned.artifact,
        verify=verify,
        verify_inputs=verify_inputs,
        on_start=lambda reasons: reporter.started(planned.name, reasons),
        on_wait=lambda: reporter.waiting(planned.name),
    )
    report = StageReport(
        planned.name, planned.artifact, built.reasons, built.duration_s, shows=planned.shows
    )
    reporter.finished(report)
    return report


def _in_turn(draft: Plan, target: Plan) -> list[PlannedStage]:
    """Puts the stages of both sides in one order, so that the last of each stand together.

    A side that is quantized has more of them, and engines come after all checkpoints.
    """
    rows = list(zip_longest(reversed(draft), reversed(target)))
    return [planned for row in reversed(rows) for planned in row if planned is not None]


def _plan_pair(config: PipelineConfig, small_files: Path | None) -> PairPlan:
    draft = _resolve(config, config.draft, "draft", small_files)
    target = _resolve(config, config.target, "target", small_files)
    quantizes = any(side.checkpoint.quantization is not None for side in (draft, target))
    return PairPlan(
        draft=draft,
        target=target,
        engine=config.engine,
        max_seq_len=_max_seq_len(config, target),
        num_draft_tokens=config.speculation.num_draft_tokens,
        measures=quantizes and config.quality.measure,
    )


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
    if found.revision is None:
        check_weights(role, found.path)
    try:
        unified = _unified(config, checkpoint, role, found.path)
    except CheckpointError as exc:
        raise CheckpointError(f"{role} {found.path}: {exc}") from exc
    except ConfigError as exc:
        raise ConfigError(f"{config.source}: {role}: {exc}") from exc
    return Side(
        role=role,
        checkpoint=checkpoint,
        folder=found.path,
        unified=unified,
        context_length=context_length(
            unified.max_position_embeddings,
            unified.rotary_scaling,
            config.serving.limits,
        ),
        base_dir=config.base_dir,
        artifacts=config.artifacts_dir / role,
        limits=config.serving.limits,
        fetch=Fetch(found.name, found.revision, config.base_dir, role) if found.revision else None,
    )


def _unified(
    config: PipelineConfig, checkpoint: CheckpointConfig, role: Role, folder: Path
) -> UnifiedConfig:
    """Returns the config of the unified checkpoint, but for its dtype.

    Where quantized weights are read as they are, it tells the architecture alone.
    """
    scheme = checkpoint.quantization
    limits = config.serving.limits
    hf_config = read_config(folder, allow_quantized=True, limits=limits)
    is_quantized = is_there(folder / QUANT_CONFIG_NAME) or any(
        hf_config.get(key) for key in QUANTIZATION_KEYS
    )
    if is_quantized and scheme is not None:
        raise CheckpointError(
            f"it is already quantized: leave {role}.quantization out, or use the checkpoint that "
            "it was quantized from"
        )
    reads_quantized = load_runtime(config.engine.runtime).reads_quantized(config.engine)
    prequantized = (
        read_prequantized(folder, limits) if is_quantized and not reads_quantized else None
    )
    plain = _architecture(
        hf_config, tp_size=checkpoint.tp_size, pp_size=checkpoint.pp_size, limits=limits
    )
    if scheme is not None:
        return quantized_config(plain, scheme)
    return plain if prequantized is None else plain.quantized(prequantized.quantization())


def check_weights(role: Role, folder: Path) -> None:
    """Refuses a folder of pickles, before there is anything else to do with it."""
    try:
        refuse_pickles(folder)
    except CheckpointError as exc:
        raise CheckpointError(f"{role}: {exc}") from exc


def check_architecture(role: Role, folder: Path) -> None:
    """Refuses a checkpoint that no build takes, whatever its YAML says."""
    try:
        hf_config = read_config(folder, allow_quantized=True)
        _architecture(hf_config, tp_size=1, pp_size=1)
    except CheckpointError as exc:
        raise CheckpointError(f"{role} {folder}: {exc}") from exc


def _architecture(
    hf_config: Mapping[str, Any],
    *,
    tp_size: int,
    pp_size: int,
    limits: FileLimits = FILE_LIMITS,
) -> UnifiedConfig:
    """Returns the unified config of plain weights, but for its dtype."""
    plain = {key: value for key, value in hf_config.items() if key not in QUANTIZATION_KEYS}
    # It may be left to the weights, and has no part in this.
    whole = {**plain, "dtype": "float32"}
    return unified_config(whole, tp_size=tp_size, pp_size=pp_size, limits=limits)


def _measure_stages(config: PipelineConfig, pair: PairPlan, contract: Path) -> Plan:
    """What quantization costs, and whether that is too much."""

    def measured(side: Side) -> MeasuredSide:
        scheme = side.checkpoint.quantization
        return MeasuredSide(
            role=side.role,
            folder=side.folder,
            checkpoint=None if scheme is None else checkpoint_dir(side),
            calibration=None if scheme is None else scheme.calibration,
            base_dir=side.base_dir,
            limits=side.limits,
        )

    def fetch() -> None:
        for side in (pair.draft, pair.target):
            if side.fetch is not None:
                side.fetch()

    stage = Measure(
        draft=measured(pair.draft),
        target=measured(pair.target),
        contract=contract,
        num_draft_tokens=pair.num_draft_tokens,
        dtype=pair.engine.dtype,
        device=pair.engine.device,
    )
    measure = PlannedStage(
        stage, config.artifacts_dir / "quality", fetch, stage.require, shows=REPORT_TEXT
    )
    if not config.quality.has_limits:
        return (measure,)
    limits = CheckQuality(measure.artifact / REPORT_JSON, config.quality)
    return measure, PlannedStage(limits, config.artifacts_dir / "quality_limits")


def _max_seq_len(config: PipelineConfig, target: Side) -> int:
    wanted = config.engine.max_seq_len
    if wanted is not None and wanted > target.context_length:
        raise ConfigError(
            f"{config.source}: engine.max_seq_len is {wanted}: expected at most "
            f"{target.context_length}, the context length of the target "
            f"{target.checkpoint.checkpoint}"
        )
    return wanted or min(target.context_length, _DEFAULT_MAX_SEQ_LEN)
