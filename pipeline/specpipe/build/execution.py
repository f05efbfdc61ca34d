"""Running the stages of a plan: what is stale, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from specpipe.build import cache
from specpipe.build.planning import Plan
from specpipe.build.remote_cache import RemoteCache
from specpipe.machine.manifest import read_manifest
from specpipe.progress import phase
from specpipe.stage import PlannedStage


@dataclass(frozen=True)
class StageReport:
    """What became of a stage, or would: no reasons, no run.

    duration_s  what it took, or would: as it did last time; 0.0 where that is not known
    """

    stage: str
    artifact: Path
    reasons: tuple[str, ...]
    duration_s: float = 0.0
    commands: tuple[tuple[str, ...], ...] = ()
    """The programs that a stage would call; known before it runs."""
    shows: str | None = None
    """The name of a text in the artifact, for people."""


class Reporter(Protocol):
    """Gets what a run does, stage by stage."""

    def planned(self, reports: Sequence[StageReport]) -> None:
        """Gets what the stages would do, before the first one; some may turn out up to date."""

    def started(self, stage: str, reasons: Sequence[str]) -> None: ...

    def waiting(self, stage: str) -> None:
        """Gets a stage that waits for another build of the same artifact."""

    def finished(self, report: StageReport) -> None: ...


def preview(stages: Plan, *, verify_inputs: bool = False) -> tuple[StageReport, ...]:
    """Returns why each stage would run; nothing is made. `verify_inputs` as in `run`."""
    reports: list[StageReport] = []
    running: list[PlannedStage] = []
    for planned in stages:
        reasons = cache.stale_reasons(
            planned.stage, planned.artifact, verify=verify_inputs, verify_inputs=verify_inputs
        )
        if reasons != [cache.NOT_BUILT]:
            reasons += [
                f"upstream {upstream.name} runs" for upstream in running if planned.reads(upstream)
            ]
        commands: tuple[tuple[str, ...], ...] = ()
        if reasons:
            running.append(planned)
            if planned.commands is not None:
                commands = tuple(tuple(command) for command in planned.commands(planned.artifact))
        reports.append(
            StageReport(
                planned.name,
                planned.artifact,
                tuple(reasons),
                duration_s=_last_duration_s(planned.artifact) if reasons else 0.0,
                commands=commands,
            )
        )
    return tuple(reports)


def start_lines(stage: str, reasons: Sequence[str]) -> list[str]:
    """Returns what a stage is announced with when it runs: why, unless it never ran before."""
    return [f"{stage}: {'starts' if reason == cache.NOT_BUILT else reason}" for reason in reasons]


def run(
    stages: Plan,
    reporter: Reporter,
    *,
    verify: bool = False,
    verify_inputs: bool = False,
    remote: RemoteCache | None = None,
) -> tuple[StageReport, ...]:
    """Makes what is stale, in order; returns what became of each stage.

    A stage whose inputs came out as before does not run. Whether there is anything to do is decided
    by sizes, times and inodes; what a stage is made of is verified by digest first, so that damage
    is mended and never handed on. `verify` asks for the digests of all artifacts, so that damage is
    found where nothing else has changed, and `verify_inputs` for those of the checkpoints, too.
    What another machine has made is fetched from `remote`, and what is made here is put there.
    """
    for planned in stages:
        if planned.require is not None:
            planned.require()
    planned_reports = preview(stages)
    reporter.planned(planned_reports)
    everything = {planned.artifact for planned in stages}
    read = everything if verify or verify_inputs else _read_by_what_runs(stages, planned_reports)
    reports = tuple(
        _run_stage(planned, planned.artifact in read, verify_inputs, reporter, remote)
        for planned in stages
    )
    if any(report.reasons for report in reports):
        for planned in stages:
            cache.stale_reasons(planned.stage, planned.artifact)  # notes what was linked meanwhile
    return reports


def _last_duration_s(artifact: Path) -> float:
    manifest = read_manifest(artifact)
    return 0.0 if manifest is None else float(manifest.build.get("duration_s", 0.0))


def _read_by_what_runs(stages: Plan, reports: Sequence[StageReport]) -> set[Path]:
    """Returns the artifacts that stages will read which are stale, or are found damaged here."""
    running = {report.artifact for report in reports if report.reasons}
    read: set[Path] = set()
    for planned in reversed(stages):
        if planned.artifact in running or (
            planned.artifact in read
            and cache.stale_reasons(planned.stage, planned.artifact, verify=True)
        ):
            read |= {upstream.artifact for upstream in stages if planned.reads(upstream)}
    return read


def _run_stage(
    planned: PlannedStage,
    verify: bool,
    verify_inputs: bool,
    reporter: Reporter,
    remote: RemoteCache | None,
) -> StageReport:
    with phase(planned.name):
        if planned.fetch and cache.stale_reasons(planned.stage, planned.artifact, verify=verify):
            planned.fetch()
        built = cache.build(
            planned.stage,
            planned.artifact,
            verify=verify,
            verify_inputs=verify_inputs,
            on_start=lambda reasons: reporter.started(planned.name, reasons),
            on_wait=lambda: reporter.waiting(planned.name),
            fetch=None if remote is None else partial(remote.fetch, planned),
        )
        if remote is not None and built.reasons and not built.was_fetched:
            remote.keep(planned)
    report = StageReport(
        planned.name, planned.artifact, built.reasons, built.duration_s, shows=planned.shows
    )
    reporter.finished(report)
    return report
