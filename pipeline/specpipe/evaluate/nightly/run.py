"""One pair's nightly run: rebuild what changed, verify, bench in short form, compare, report, keep.

A run that a step of it ended is kept in the history as unfinished, with what it had found by then;
an interrupted one leaves nothing but what the steps themselves keep.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specpipe.build import execution, lock, planning
from specpipe.build.remote_cache import remote_cache
from specpipe.errors import RepositoryError
from specpipe.evaluate import prompts, results
from specpipe.evaluate.nightly import facts, latency, record, upstream
from specpipe.evaluate.nightly.record import (
    Conditions,
    Latency,
    Run,
    SpeedUp,
    StageRun,
    VerificationResult,
)
from specpipe.evaluate.nightly.thresholds import is_too_slow, judge
from specpipe.failures import sentence
from specpipe.machine.artifacts import Artifacts
from specpipe.machine.callables import Log

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.evaluate.bench.run import BenchSide, Measurements
    from specpipe.evaluate.verification.outcome import Findings

_LIBRARIES = ("torch", "nvidia-pytriton", "tritonclient", "scipy")
_MOST_MEASUREMENTS = 3
"""How often speed is measured at most; a night fails where every measurement is too slow."""


@dataclass(frozen=True)
class PromotedRun:
    """The promoted version of a pair, and the nightly run that it was published with.

    run  None: it was published without one
    """

    number: int
    run: Run | None


@dataclass(frozen=True, kw_only=True)
class NightlyOptions:
    """How runs are made.

    is_in_process    whether pairs run in this process instead of a Triton
    is_locked        whether a pair is built only as its x.lock says
    baseline         folder of last good runs, as `<name>/results/nightly.json`; None: the promoted
                     version's run, else each pair's own last good one
    is_new_baseline  whether no earlier run is compared with, after an intended change
    find_promoted    finds the promoted version of a pair; None where there is none
    """

    is_in_process: bool = False
    is_locked: bool = False
    baseline: Path | None = None
    is_new_baseline: bool = False
    find_promoted: Callable[[PipelineConfig], PromotedRun | None] = lambda config: None


@dataclass(frozen=True)
class Finished:
    """A run that is over, and the good one that it was compared with."""

    run: Run
    last: Run | None = None


def run_pair(config: PipelineConfig, options: NightlyOptions, *, report: Log) -> Finished:
    """Makes one run and keeps it; a second run of the pair waits. Failures end up in the run."""
    with record.locked(
        config.artifacts_dir,
        on_wait=lambda: report("another nightly run of this pair goes on, waiting"),
    ):
        return _PairRun(config, options, report).run()


def failed(pair: str, config: Path, exc: Exception) -> Run:
    """Returns the run of a config that there is no folder to keep a run in for."""
    return Run(pair=pair, config=str(config), made_at=_now(), reasons=[sentence(exc)])


class _PairRun:
    """The steps of one run, and what they have found so far."""

    def __init__(self, config: PipelineConfig, options: NightlyOptions, report: Log) -> None:
        self._config, self._options, self._report = config, options, report
        self._limits = config.nightly
        self._run = Run(pair=config.name, config=str(config.source), made_at=_now())
        self._last: Run | None = None
        self._prompts: prompts.PromptSet | None = None

    def run(self) -> Finished:
        run = self._run
        try:
            self._make()
        except Exception as exc:  # the other pairs are to run, whatever it is
            run.reasons.append(sentence(exc))
        else:
            run.outcome = "bad" if run.reasons else "good"
        record.keep(self._config.artifacts_dir, self._header(), run)
        return Finished(run, self._last)

    def _make(self) -> None:
        run = self._run
        self._prompts = self._load_prompts()
        self._last = self._read_last()
        run.compared_with = None if self._last is None else self._last.made_at
        run.asked = self._asked(self._prompts)
        pair = planning.plan_pair(self._config)
        run.asked = replace(run.asked, is_parallel_draft=pair.draft.unified.parallel is not None)
        stages = planning.plan_stages(self._config, pair)
        run.made_from = upstream.made_from(pair, stages, self._prompts, _LIBRARIES)
        if self._last is not None:
            run.changes = upstream.changes(self._last.made_from, run.made_from)
        if self._options.is_locked:
            lock.check_pair(self._config, pair, stages, report=self._report)
        remote = remote_cache(self._config)
        execution.run(stages, _Build(run, self._report), verify=True, remote=remote)
        run.repository = facts.repository(stages)
        run.checkpoints = facts.checkpoints_used(self._config, stages)
        run.sizes_bytes = facts.sizes(stages)
        run.quality = facts.quality(self._config.artifacts, run.made_from)
        verified = self._verify()
        run.verification = VerificationResult(
            verdict=verified.verdict, reason=verified.reason, num_ties=verified.num_ties
        )
        run.acceptance = facts.accepted(verified, self._prompts.prompts)
        if verified.reason is None:  # how fast a wrong answer comes is of no interest
            self._measure_speed(self._prompts)
        judged = judge(run, self._last, self._limits)
        run.reasons += judged.reasons
        run.notes += judged.notes
        self._write_report()

    def _load_prompts(self) -> prompts.PromptSet:
        """Returns the prompts, which are the same for verification and for the benchmark."""
        loaded = prompts.load_prompts(self._source(), limit=self._limits.num_prompts)
        sized = (
            replace(prompt, max_tokens=prompt.max_tokens or self._limits.max_tokens)
            for prompt in loaded.prompts
        )
        return prompts.PromptSet(loaded.source, tuple(sized))

    def _source(self) -> str:
        source = self._limits.prompts
        return source if source in prompts.BUILT_IN else str(self._config.base_dir / source)

    def _read_last(self) -> Run | None:
        if self._options.is_new_baseline:
            return None
        folder = self._options.baseline
        artifacts = self._config.artifacts
        if folder is not None:
            artifacts = Artifacts(folder / artifacts.folder.name)
        elif (promoted := self._options.find_promoted(self._config)) is not None:
            if promoted.run is not None:
                self._run.compared_version = promoted.number
                return promoted.run
            self._run.notes.append(
                f"version {promoted.number} is promoted, but was published without a nightly run "
                "to compare with"
            )
        return record.read_last_good(artifacts.result("nightly"))

    def _asked(self, prompt_set: prompts.PromptSet) -> Conditions:
        machine = results.machine()
        gpus = Counter(gpu["name"] for gpu in machine["gpus"])
        return Conditions(
            prompts=prompt_set.digest,
            num_draft_tokens=self._config.speculation.num_draft_tokens,
            served_by="this process" if self._options.is_in_process else "Triton",
            machine=", ".join(
                [
                    f"{machine['cpu']} ({machine['num_cores']} cores)",
                    *(f"{number} x {name}" for name, number in gpus.items()),
                ]
            ),
        )

    def _verify(self) -> Findings:
        from specpipe.evaluate.verification import outcome
        from specpipe.evaluate.verification.run import verify

        limits = self._limits
        verification = verify(
            self._config,
            outcome.VerifyOptions(
                prompts=self._source(),
                limit=limits.num_prompts,
                max_tokens=limits.max_tokens,
                is_in_process=self._options.is_in_process,
                distance=limits.sampling_distance,
                gate=None if limits.gate is None else self._config.base_dir / limits.gate,
                gate_pass_rate=limits.min_gate_pass_rate,
            ),
            report=self._report,
        )
        return verification.findings

    def _measure_speed(self, prompt_set: prompts.PromptSet) -> None:
        """Measures anew while a threshold is crossed: the machine may have been busy."""
        run = self._run
        measured = self._bench(prompt_set)
        run.speed_ups, run.latencies = facts.speed_ups(measured), latency.latencies(measured)
        for number in range(2, _MOST_MEASUREMENTS + 1):
            has_failures = any(speed_up.num_failed for speed_up in run.speed_ups)
            if has_failures or not is_too_slow(run, self._last, self._limits):
                return
            figures = ", ".join(
                f"{speed_up.ratio:.2f} at concurrency {speed_up.concurrency}"
                for speed_up in run.speed_ups
                if speed_up.ratio is not None
            )
            run.notes.append(f"speed was measured again; measurement {number - 1}: {figures}")
            measured = self._bench(prompt_set)
            speed_ups, latencies = facts.speed_ups(measured), latency.latencies(measured)
            run.speed_ups = [
                _spanning(later, earlier, earlier.ratio, later.ratio)
                for earlier, later in zip(run.speed_ups, speed_ups, strict=True)
            ]
            run.latencies = [
                _spanning(later, earlier, earlier.ms, later.ms)
                for earlier, later in zip(run.latencies, latencies, strict=True)
            ]

    def _bench(self, prompt_set: prompts.PromptSet) -> Measurements:
        from specpipe.evaluate.bench import run as bench
        from specpipe.evaluate.bench.sides import without_and_with

        limits = self._limits
        settings = bench.BenchSettings(concurrencies=limits.concurrencies, rounds=limits.rounds)
        with self._served() as served:
            measured = bench.measure(
                without_and_with(served), prompt_set, settings, report=self._report
            )
        self._check_unchanged()
        header = results.header(
            "bench",
            pair=self._config.name,
            settings=settings.to_json(),
            prompts=prompt_set,
            libraries=_LIBRARIES,
        )
        results.write_result(
            self._config.artifacts.result("nightly-bench"),
            {**header, **bench.result(measured, settings, count_tokens=None)},
        )
        return measured

    @contextlib.contextmanager
    def _served(self) -> Iterator[BenchSide]:
        """Yields the pair as it is served."""
        from specpipe.evaluate.bench.run import BenchSide
        from specpipe.evaluate.bench.sides import WITH
        from specpipe.evaluate.endpoints.in_process import InProcess
        from specpipe.evaluate.endpoints.triton import Triton
        from specpipe.evaluate.serving import served

        repository = self._config.artifacts.repository
        if self._options.is_in_process:
            with contextlib.closing(InProcess.load(repository)) as pair:
                yield BenchSide(name=WITH, endpoint=pair, is_local=True)
            return
        self._report("starting Triton, for the benchmark")
        with (
            served(repository) as server,
            contextlib.closing(Triton(server.grpc_url)) as ensemble,
        ):
            yield BenchSide(
                name=WITH, endpoint=ensemble, metrics_url=server.metrics_url, is_local=True
            )

    def _check_unchanged(self) -> None:
        """Refuses numbers of a repository that was built again since it was verified."""
        from specpipe.evaluate.verification.record import changes

        if changed := changes(self._config.artifacts_dir):
            raise RepositoryError(
                f"{self._config.artifacts_dir} was changed while it was measured ({changed[0]}): "
                "run `specpipe nightly` again"
            )

    def _write_report(self) -> None:
        from specpipe.evaluate.report.page import write_report

        self._report("writing the report")
        write_report(self._config.artifacts_dir)

    def _header(self) -> dict[str, Any]:
        return results.header(
            record.NIGHTLY_KIND,
            pair=self._config.name,
            settings=self._limits.model_dump(mode="json"),
            prompts=self._prompts,
            libraries=_LIBRARIES,
        )


class _Build:
    """Notes what became of each stage."""

    def __init__(self, run: Run, report: Log) -> None:
        self._run, self._report = run, report

    def planned(self, reports: Sequence[execution.StageReport]) -> None: ...

    def started(self, stage: str, reasons: Sequence[str]) -> None:
        for line in execution.start_lines(stage, reasons):
            self._report(line)

    def waiting(self, stage: str) -> None:
        self._report(f"{stage}: another build of it is running, waiting")

    def finished(self, report: execution.StageReport) -> None:
        self._run.stages.append(
            StageRun(
                stage=report.stage,
                reasons=report.reasons,
                duration_s=round(report.duration_s, 3),
            )
        )


_Measured = TypeVar("_Measured", SpeedUp, Latency)


def _spanning(later: _Measured, earlier: _Measured, *values: float | None) -> _Measured:
    """Returns the later one with an interval that holds both: each has to cross a threshold."""
    ends = (earlier.low, earlier.high, later.low, later.high, *values)
    known = [end for end in ends if end is not None]
    return replace(later, low=min(known, default=None), high=max(known, default=None))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
