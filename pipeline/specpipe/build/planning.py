"""The road from a config to a Triton repository: which stages, in which order.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

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
    check_no_pickles,
    read_config,
)
from specpipe.checkpoints.family_config import supported_dtype, unified_config
from specpipe.checkpoints.files import is_there
from specpipe.checkpoints.hf_config import context_length
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.parallel_draft import MASK_KEY
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.config.sections import CheckpointConfig, PipelineConfig
from specpipe.errors import CheckpointError, ConfigError
from specpipe.machine.gpus import Gpu
from specpipe.machine.memory import MemoryEstimate
from specpipe.quantization.prequantized import read_prequantized
from specpipe.quantization.quantized_config import quantized_config
from specpipe.roles import Role
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.plan import PairPlan, Side
from specpipe.runtimes.runtime import load_runtime
from specpipe.stage import PlannedStage, naming

DEFAULT_MAX_SEQ_LEN = 4096
"""The length without engine.max_seq_len: a KV cache of a whole context for each request
seldom fits. A guess at what most requests need."""


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


def plan(config: PipelineConfig, *, small_files: Path | None = None) -> Plan:
    """Returns the stages in order; refuses unsupported checkpoints, reads small files only.

    With `small_files`, a folder of them instead of the hub, the plan is good to look at: there are
    no weights to run it with.
    """
    return plan_stages(config, plan_pair(config, small_files))


def plan_stages(config: PipelineConfig, pair: PairPlan) -> Plan:
    """Returns the stages of a pair whose checkpoints are found, in order."""
    runtime = load_runtime(config.engine.runtime)
    check = PlannedStage(
        Check(pair.draft.folder, pair.target.folder, config.serving.limits),
        config.artifacts.check,
    )
    draft_stages, target_stages = (
        side_stages(pair, side, engine)
        for side, engine in zip((pair.draft, pair.target), runtime.engine_stages(pair), strict=True)
    )
    in_turn = _in_turn(draft_stages, target_stages)
    if pair.measures:
        measuring = _measure_stages(config, pair, config.artifacts.contract)
        # Before the engines, so that what costs too much fails before hours of building them.
        last_read = max(n for n, planned in enumerate(in_turn) if measuring[0].reads(planned))
        in_turn[last_read + 1 : last_read + 1] = measuring
    package = Package(
        draft_engine=draft_stages[-1].artifact,
        target_engine=target_stages[-1].artifact,
        tokenizer=pair.target.folder,
        contract=config.artifacts.contract,
        runtime=config.engine.runtime,
        options=PairOptions(
            num_draft_tokens=config.speculation.num_draft_tokens,
            adaptive=config.speculation.adaptive,
            schedule=config.speculation.limits,
            prompt_lookup=config.speculation.prompt_lookup,
            prefix_reuse=config.engine.prefix_reuse,
            max_batch_size=config.engine.max_batch_size,
            max_seq_len=pair.max_seq_len,
            max_num_tokens=config.engine.max_num_tokens,
            max_queue_size=config.serving.max_queue_size,
            request_timeout_s=config.serving.request_timeout_s,
            stream_interval_s=config.serving.stream_interval_s,
            num_threads=config.engine.num_threads,
            runtime_settings=runtime.serving_settings(pair),
        ),
        limits=config.serving.limits,
        num_preprocessing=config.serving.preprocessing_instances,
    )
    return (check, *in_turn, PlannedStage(package, config.artifacts.repository))


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
    pair = plan_pair(config, small_files)
    runtime = load_runtime(config.engine.runtime)
    contract = check_pair(pair.draft.folder, pair.target.folder, config.serving.limits)
    return Checked(
        replace(
            contract,
            notes=(*contract.notes, *_parallel_notes(pair), *runtime.plan_notes(pair)),
        ),
        {side.role: runtime.estimate_memory(pair, side) for side in (pair.draft, pair.target)},
        plan_memory(config, pair, runtime, gpus) if gpus else None,
    )


def _in_turn(draft: Plan, target: Plan) -> list[PlannedStage]:
    """Returns the stages of both sides in one order, so that the last of each stand together.

    A side that is quantized has more of them, and engines come after all checkpoints.
    """
    rows = list(zip_longest(reversed(draft), reversed(target)))
    return [planned for row in reversed(rows) for planned in row if planned is not None]


def plan_pair(config: PipelineConfig, small_files: Path | None = None) -> PairPlan:
    """Finds both checkpoints, at a hub's commit of now, and refuses what is not supported."""
    draft = _resolve(config, config.draft, "draft", small_files)
    target = _resolve(config, config.target, "target", small_files)
    quantizes = any(side.checkpoint.quantization is not None for side in (draft, target))
    pair = PairPlan(
        draft=draft,
        target=target,
        engine=config.engine,
        max_seq_len=_max_seq_len(config, target),
        num_draft_tokens=config.speculation.num_draft_tokens,
        measures=quantizes and config.quality.measure,
        schedule=config.speculation.limits,
    )
    _check_parallel(config, pair)
    return pair


def _check_parallel(config: PipelineConfig, pair: PairPlan) -> None:
    """Refuses a draft that proposes several tokens in one pass where nothing runs it so."""
    if pair.draft.unified.parallel is None:
        return
    fault = load_runtime(config.engine.runtime).parallel_draft_fault(pair)
    if fault is not None:
        raise ConfigError(
            f"{config.source}: draft.checkpoint {pair.draft.checkpoint.checkpoint} proposes "
            f"several tokens in one pass ({MASK_KEY} in its config.json), and {fault}, or remove "
            f"{MASK_KEY} from a copy of it, to have its tokens one by one"
        )


def _parallel_notes(pair: PairPlan) -> Iterator[str]:
    parallel, number = pair.draft.unified.parallel, pair.num_draft_tokens
    trained = None if parallel is None else parallel.num_draft_tokens
    if trained is not None and number > trained:
        yield (
            f"speculation.num_draft_tokens is {number}, but the draft was trained to propose "
            f"{trained} in one pass: those beyond are seldom accepted"
        )


def _resolve(
    config: PipelineConfig, checkpoint: CheckpointConfig, role: Role, small_files: Path | None
) -> Side:
    """Returns one side, whose checkpoint is a folder that holds its small files at least."""
    resolved = source.resolve(
        checkpoint.checkpoint,
        revision=checkpoint.revision,
        base=config.base_dir,
        role=role,
        weights=False,
        small_files=small_files,
    )
    if resolved.revision is None:
        check_weights(role, resolved.path)
    try:
        unified = _unified(config, checkpoint, role, resolved.path)
    except CheckpointError as exc:
        raise CheckpointError(f"{role} {resolved.path}: {exc}") from exc
    except ConfigError as exc:
        raise ConfigError(f"{config.source}: {role}: {exc}") from exc
    return Side(
        role=role,
        checkpoint=checkpoint,
        folder=resolved.path,
        unified=unified,
        context_length=context_length(
            unified.max_position_embeddings,
            unified.rotary_scaling,
            config.serving.limits,
        ),
        base_dir=config.base_dir,
        artifacts=config.artifacts.side(role),
        limits=config.serving.limits,
        fetch=Fetch(resolved.name, resolved.revision, config.base_dir, role)
        if resolved.revision
        else None,
    )


def _unified(
    config: PipelineConfig, checkpoint: CheckpointConfig, role: Role, folder: Path
) -> UnifiedConfig:
    """Returns the config of the unified checkpoint, but for its dtype.

    Where quantized weights are read as they are, it is that of the architecture alone.
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
    with naming(role):
        check_no_pickles(folder)


def check_architecture(role: Role, folder: Path) -> None:
    """Refuses a checkpoint that no build takes, whatever its YAML says."""
    with naming(f"{role} {folder}"):
        _architecture(read_config(folder, allow_quantized=True), tp_size=1, pp_size=1)


def _architecture(
    hf_config: Mapping[str, Any],
    *,
    tp_size: int,
    pp_size: int,
    limits: FileLimits = FILE_LIMITS,
) -> UnifiedConfig:
    """Returns the unified config of plain weights, but for its dtype."""
    plain = {key: value for key, value in hf_config.items() if key not in QUANTIZATION_KEYS}
    # It may be left to the weights, or be that of quantized ones, and has no part in this.
    if plain == hf_config and (plain.get("dtype") or plain.get("torch_dtype")):
        supported_dtype(plain)
    whole = {**plain, "dtype": "float32"}
    return unified_config(whole, tp_size=tp_size, pp_size=pp_size, limits=limits)


def _measure_stages(config: PipelineConfig, pair: PairPlan, contract: Path) -> Plan:
    """Returns the stages for what quantization costs, and for whether that is too much."""

    def measured(side: Side) -> MeasuredSide:
        scheme = side.checkpoint.quantization
        return MeasuredSide(
            role=side.role,
            folder=side.folder,
            checkpoint=None if scheme is None else side.artifacts.checkpoint,
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
    measure = PlannedStage(stage, config.artifacts.quality, fetch, stage.require, shows=REPORT_TEXT)
    if not config.quality.has_limits:
        return (measure,)
    limits = CheckQuality(measure.artifact / REPORT_JSON, config.quality)
    return measure, PlannedStage(limits, config.artifacts.quality_limits)


def _max_seq_len(config: PipelineConfig, target: Side) -> int:
    wanted = config.engine.max_seq_len
    if wanted is not None and wanted > target.context_length:
        raise ConfigError(
            f"{config.source}: engine.max_seq_len is {wanted}: expected at most "
            f"{target.context_length}, the context length of the target "
            f"{target.checkpoint.checkpoint}"
        )
    return wanted or min(target.context_length, DEFAULT_MAX_SEQ_LEN)
