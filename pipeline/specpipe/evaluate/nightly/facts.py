"""What a nightly run keeps of a build, a verification and a benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.build import planning
from specpipe.build.quality.report import REPORT_JSON, QualityReport
from specpipe.build.stages.check import Check
from specpipe.build.stages.package import Package
from specpipe.evaluate.nightly.record import (
    Accepted,
    CheckpointUsed,
    PromptAccepted,
    Quality,
    SpeedUp,
)
from specpipe.evaluate.prompts import Prompt
from specpipe.evaluate.tune.acceptance import position_counts
from specpipe.machine.artifacts import Artifacts
from specpipe.machine.manifest import FileRecord, read_manifest
from specpipe.roles import Role

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.evaluate.bench.run import Measurements
    from specpipe.evaluate.verification.outcome import Findings


def checkpoints_used(config: PipelineConfig, stages: planning.Plan) -> dict[str, CheckpointUsed]:
    """Returns commits and digests as the built stages recorded them; no weight is read again."""
    from specpipe.evaluate.verification.record import repository_digest

    check = stages[0].stage
    assert isinstance(check, Check)
    sides: dict[Role, Path] = {"draft": check.draft, "target": check.target}
    commits = {
        planned.fetch.role: planned.fetch.commit
        for planned in stages
        if isinstance(planned.fetch, planning.Fetch)
    }
    return {
        role: CheckpointUsed(
            checkpoint=getattr(config, role).checkpoint,
            revision=commits.get(role),
            digest=repository_digest(_files_read(stages, folder)),
        )
        for role, folder in sides.items()
    }


def _files_read(stages: planning.Plan, folder: Path) -> dict[str, FileRecord]:
    """Returns the files of a checkpoint that any stage was made from."""
    files: dict[str, FileRecord] = {}
    for planned in stages:
        manifest = read_manifest(planned.artifact)
        recorded = manifest.inputs if manifest else ()
        # What an input is for lies in its place: where it was when the stage ran does not matter.
        for root, read in zip(planned.stage.inputs().files, recorded, strict=False):
            if root.is_relative_to(folder):
                for name, file in read.files.items():
                    files[(root / name).relative_to(folder).as_posix()] = file
    return files


def repository(stages: planning.Plan) -> str | None:
    """Returns the digest of what was packaged, as its manifest has it."""
    from specpipe.evaluate.verification.record import repository_digest

    manifest = read_manifest(stages[-1].artifact)
    return None if manifest is None else repository_digest(manifest.outputs)


def sizes(stages: planning.Plan) -> dict[str, int]:
    """Returns the bytes of both engines and of the repository, which holds them."""
    package = stages[-1].stage
    assert isinstance(package, Package)
    artifacts = {
        "draft engine": package.draft_engine,
        "target engine": package.target_engine,
        "repository": stages[-1].artifact,
    }
    sizes_bytes = {}
    for name, artifact in artifacts.items():
        manifest = read_manifest(artifact)
        if manifest is not None:
            sizes_bytes[name] = sum(file.size for file in manifest.outputs.values())
    return sizes_bytes


def accepted(verified: Findings, prompts: Sequence[Prompt]) -> Accepted | None:
    """Returns the draft tokens of the greedy answers with the full K, asked one at a time.

    K as served follows the clock; these counts are the same every night.
    """
    sides = [
        side
        for side in verified.sides
        if side.check == "greedy" and side.side.kind == "speculation" and side.side.at_once == 1
    ]
    counted = [side for side in sides if side.side.num_draft_tokens and side.num_draft_tokens]
    if not counted:
        return None
    longest = max(counted, key=lambda side: side.side.num_draft_tokens or 0)
    by_prompt = []
    for prompt, answer in zip(prompts, longest.drafted, strict=False):
        judged_at: list[int] = []
        accepted_at: list[int] = []
        if answer.steps is not None:
            judged_at, accepted_at = position_counts(
                answer.steps, longest.side.num_draft_tokens or 0
            )
        by_prompt.append(
            PromptAccepted(
                prompt=prompt.name,
                kind=prompt.kind,
                num_draft_tokens=answer.num_draft_tokens,
                num_accepted_tokens=answer.num_accepted_tokens,
                judged_at=tuple(judged_at),
                accepted_at=tuple(accepted_at),
            )
        )
    return Accepted(
        num_draft_tokens=longest.num_draft_tokens,
        num_accepted_tokens=longest.num_accepted_tokens,
        prompts=tuple(by_prompt),
    )


def quality(artifacts: Artifacts, made_from: Mapping[str, Any]) -> dict[str, Quality]:
    """Returns what quantization costs each model that is quantized, where the build measured it."""
    path = artifacts.quality / REPORT_JSON
    if not path.is_file():
        return {}
    report = QualityReport.read(path)
    return {
        model.role: Quality(
            format=model.quantized.name,
            perplexity_ratio=model.divergence.perplexity_ratio,
            mean_kl=model.divergence.mean_kl,
            top1_agreement=model.divergence.top1_agreement,
            measured_on="; ".join(
                [
                    model.texts or "texts",
                    *([digest] if (digest := made_from["calibration"].get(model.role)) else []),
                    report.engines,
                ]
            ),
        )
        for model in report.models
        if model.quantized is not None and model.divergence is not None
    }


def speed_ups(measured: Measurements) -> list[SpeedUp]:
    """Returns what speculation gained at each concurrency, and how many answers failed."""
    from specpipe.evaluate.bench.metrics import LatencyLimits

    comparisons = {comparison.concurrency: comparison for comparison in measured.comparisons(None)}
    speed_ups = []
    for concurrency, by_side in measured.summaries(LatencyLimits(), None).items():
        errors: Counter[str] = Counter()
        for summary in by_side.values():
            errors.update(summary.errors)
        comparison = comparisons.get(concurrency)
        speed_ups.append(
            SpeedUp(
                concurrency=concurrency,
                ratio=None if comparison is None else comparison.ratio,
                low=None if comparison is None else comparison.low,
                high=None if comparison is None else comparison.high,
                num_answers=sum(s.num_answers for s in by_side.values()),
                num_failed=sum(s.num_failed + s.num_cut for s in by_side.values()),
                error=next((error for error, _ in errors.most_common(1)), None),
            )
        )
    return speed_ups
