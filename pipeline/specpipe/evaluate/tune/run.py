"""One tuning from beginning to end.

each draft     built → costs → acceptance → predicted speed-up over K × concurrency → ranked
the pair's own, and the best where that is another one: the best few predictions are measured
each load      the draft length that measured best → the schedule
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from specpipe.build import repositories
from specpipe.build.execution import Reporter
from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError, RuntimeUnavailable
from specpipe.evaluate import results
from specpipe.evaluate.endpoints.base import Endpoint
from specpipe.evaluate.endpoints.in_process import InProcess
from specpipe.evaluate.tune import costs, measure, model, schedule
from specpipe.evaluate.tune.acceptance import AcceptanceEstimate, RoundCounts, run_requests
from specpipe.evaluate.tune.candidates import CandidatePair, candidate, own_pair
from specpipe.evaluate.tune.costs import LoadCosts
from specpipe.evaluate.tune.measure import Cell
from specpipe.evaluate.tune.outcome import Tuned, TuneOptions, Tuning
from specpipe.evaluate.tune.progress import TUNE_KIND, TuneProgress
from specpipe.evaluate.tune.workload import TuneWorkload
from specpipe.machine.callables import Log
from specpipe.progress import count, logged_phase, phase
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.runtime import load_runtime

_WORK = ".tune"
_LIBRARIES = ("torch", "numpy")


def tune(
    config: PipelineConfig, options: TuneOptions, *, report: Log, reporter: Reporter
) -> Tuning:
    """Tunes a built pair and writes the result beside it.

    Raises ConfigError for what cannot be tuned. `report` hears how it goes on, `reporter` what is
    built.
    """
    run = _Run(config, options, report)
    work = config.artifacts_dir / _WORK
    subjects = [own_pair(config, run.max_draft_len, work, reporter)]
    for checkpoint in options.candidates:
        if checkpoint in [subject.checkpoint for subject in subjects]:
            raise ConfigError(
                f"--candidate {checkpoint}: there is a draft of that name already; give each once, "
                "and not the pair's own"
            )
        report(f"building {checkpoint}")
        subjects.append(candidate(checkpoint, config, run.max_draft_len, work, reporter))
    tuning = run.tune(subjects)
    shutil.rmtree(work, ignore_errors=True)
    return tuning


class _Run:
    """What the steps of one tuning share."""

    def __init__(self, config: PipelineConfig, options: TuneOptions, report: Log) -> None:
        self._config, self._options, self._report = config, options, report
        _check_runtime(config)
        self.max_draft_len = _max_draft_len(config, options)
        self._loads = _loads(config, options)
        repository = repositories.built_repository(config)
        self._workload = TuneWorkload(repository, options, self.max_draft_len)
        self._header = results.header(
            TUNE_KIND,
            pair=config.name,
            settings=self._settings(),
            prompts=self._workload.prompts,
            libraries=_LIBRARIES,
        )
        self._progress = TuneProgress(config.artifacts.result("tune.unfinished"), self._header)
        if config.speculation.prompt_lookup:
            report("speculation.prompt_lookup is off while the draft is measured")
        for line in repositories.outdated(config):
            report(f"warning: not what {config.source} says now: {line}")

    def tune(self, subjects: Sequence[CandidatePair]) -> Tuning:
        if self._options.resumes:
            self._progress.resume(self._report)
        entries = {
            subject.checkpoint: self._progress.entry(
                subject.checkpoint, subject.digest, self._report
            )
            for subject in subjects
            if subject.digest is not None
        }
        options = self._options
        self._report(
            f"to measure: {options.num_best + 1} draft lengths at each of {len(self._loads)} "
            f"loads, in {options.rounds} rounds of {len(self._workload.prompts.prompts)} prompts; "
            f"then, for {options.time_limit_s:.0f} s at most, until it is certain what pays"
        )
        drafts = {s.checkpoint: self._observe(s, entries.get(s.checkpoint)) for s in subjects}
        winner = max(drafts.values(), key=lambda draft: draft.score)
        for subject in subjects:
            if subject.is_own or subject.checkpoint == winner.checkpoint:
                drafts[subject.checkpoint] = self._measure(
                    subject, drafts[subject.checkpoint], entries[subject.checkpoint]
                )
        return self._conclude(sorted(drafts.values(), key=lambda d: d.score, reverse=True))

    def _conclude(self, ranked: Sequence[Tuned]) -> Tuning:
        own = next(draft for draft in ranked if draft.is_own)
        forms = []
        if own.best is not None:
            forms = schedule.server_settings(
                own.best,
                self._own_draft(),
                is_parallel=own.memory_bound is not None and own.memory_bound.is_parallel,
            )
        path = self._config.artifacts.result("tune")
        results.write_result(
            path,
            {
                **self._header,
                "context": self._workload.context,
                "drafts": [draft.to_json() for draft in ranked],
                "forms": [asdict(form) for form in forms],
            },
        )
        self._progress.remove()
        prompts = self._workload.prompts
        return Tuning(drafts=tuple(ranked), forms=tuple(forms), prompts=prompts, path=path)

    def _own_draft(self) -> str:
        """What others are to call the pair's draft: its folder, or the hub id."""
        checkpoint = self._config.draft.checkpoint
        folder = (self._config.base_dir / Path(checkpoint).expanduser()).resolve()
        return str(folder) if folder.is_dir() else checkpoint

    def _observe(self, subject: CandidatePair, entry: dict[str, Any] | None) -> Tuned:
        """Costs, acceptance and what they promise; what the entry has is not measured again."""
        if entry is None or subject.repository is None:
            return Tuned(
                checkpoint=subject.checkpoint, is_own=subject.is_own, reason=subject.reason
            )
        if "costs" not in entry or "rounds" not in entry:
            with closing(self._workload.load(subject.repository)) as pair:
                if "costs" not in entry:
                    with logged_phase(f"{subject.checkpoint}: timing steps", self._report):
                        entry["costs"] = [load.to_json() for load in self._time(pair)]
                    self._progress.save()
                if "rounds" not in entry:
                    prompts, requests = self._workload.prompts, self._workload.requests()
                    name = f"{subject.checkpoint}: acceptance on {prompts.source}"
                    with logged_phase(name, self._report):
                        rounds = run_requests(pair, requests, at_once=max(self._loads))
                    entry["rounds"] = _rounds_to_json(rounds)
                    self._progress.save()
        rounds = _rounds_from_json(entry["rounds"])
        found = tuple(LoadCosts.from_json(load) for load in entry["costs"])
        acceptance = AcceptanceEstimate.of(list(rounds.values()), self.max_draft_len)
        return Tuned(
            checkpoint=subject.checkpoint,
            is_own=subject.is_own,
            digest=entry["digest"],
            acceptance=acceptance,
            kinds={
                kind: AcceptanceEstimate.of(of_kind, self.max_draft_len)
                for kind, of_kind in self._workload.by_kind(rounds).items()
            },
            costs=found,
            memory_bound=model.MemoryBound.fit(found),
            predictions=tuple(
                model.predict(acceptance.alpha or 0.0, acceptance.rates, found, self.max_draft_len)
            ),
        )

    def _time(self, pair: EnginePair) -> list[LoadCosts]:
        return costs.measure(
            pair,
            self._workload.longest_prompt,
            batch_sizes=self._loads,
            max_draft_len=self.max_draft_len,
            context=self._workload.context,
        )

    def _measure(self, subject: CandidatePair, draft: Tuned, entry: dict[str, Any]) -> Tuned:
        """Measures the best few predictions at each load, and picks what is best there."""
        assert subject.repository is not None
        wanted = {load: [0, *self._best_few(draft, load)] for load in self._loads}
        cells = measure.whole_rounds([Cell(**cell) for cell in entry.get("cells", ())], wanted)
        assert draft.acceptance is not None
        most = {e.num_draft_tokens: e.most for e in draft.acceptance.expected}
        rounds = self._open_rounds(cells, most)
        first = next(rounds, None)
        if first is not None:
            pair = self._workload.load(subject.repository)
            num_cells = self._options.rounds * sum(map(len, wanted.values()))
            with (
                closing(InProcess(pair, self._workload.tokenizer)) as endpoint,
                phase(subject.checkpoint),
                count(num_cells, "rounds") as measured,
            ):
                measured.advance(len(cells))
                for load, number in chain([first], rounds):
                    lengths = wanted[load]
                    measured.expect(max(num_cells, len(cells) + len(lengths)))
                    for length in lengths if number % 2 == 0 else reversed(lengths):
                        cells.append(self._cell(subject, endpoint, load, length, number))
                        entry["cells"] = [cell.to_json() for cell in cells]
                        self._progress.save()
                        measured.advance()
        measurements = measure.compare(cells, most)
        doubts = [
            doubt
            for load in self._loads
            if (doubt := schedule.doubt([m for m in measurements if m.concurrency == load]))
        ]
        best = {
            load: schedule.pick(
                {m.num_draft_tokens: m.speed_up for m in measurements if m.concurrency == load}
            )
            for load in self._loads
        }
        return dataclasses.replace(
            draft,
            measurements=tuple(measurements),
            best=None if doubts else best,
            doubts=tuple(doubts),
        )

    def _open_rounds(
        self, cells: Sequence[Cell], most: dict[int, float]
    ) -> Iterator[tuple[int, int]]:
        """Yields load and number of every round that is to be measured, while `cells` grow."""
        for load in self._loads:
            for number in range(self._options.rounds):
                if not any(c.concurrency == load and c.round_number == number for c in cells):
                    yield load, number
        deadline = time.monotonic() + self._options.time_limit_s
        while time.monotonic() < deadline:
            measurements = measure.compare(cells, most)
            uncertain = [
                load
                for load in self._loads
                if schedule.doubt([m for m in measurements if m.concurrency == load])
            ]
            if not uncertain:
                return
            for load in uncertain:
                yield load, 1 + max(c.round_number for c in cells if c.concurrency == load)

    def _best_few(self, draft: Tuned, load: int) -> list[int]:
        here = [p for p in draft.predictions if p.concurrency == load]
        here.sort(key=lambda prediction: prediction.speed_up, reverse=True)
        return sorted(p.num_draft_tokens for p in here[: self._options.num_best])

    def _cell(
        self, subject: CandidatePair, endpoint: Endpoint, load: int, length: int, number: int
    ) -> Cell:
        round_name = f"concurrency {load}, round {number + 1}, K = {length}"
        with logged_phase(f"{subject.checkpoint}: {round_name}", self._report):
            return measure.measure_cell(
                endpoint,
                self._workload.questions(length),
                concurrency=load,
                num_draft_tokens=length,
                round_number=number,
            )

    def _settings(self) -> dict[str, Any]:
        options = self._options
        return {
            "concurrencies": list(self._loads),
            "max_draft_len": self.max_draft_len,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "num_best": options.num_best,
            "rounds": options.rounds,
            "runtime": self._config.engine.runtime,
            "num_threads": self._config.engine.num_threads,
        }


def _check_runtime(config: PipelineConfig) -> None:
    if not load_runtime(config.engine.runtime).runs_own_loop:
        raise RuntimeUnavailable(
            "`specpipe tune` times both engines in this process, which TensorRT-LLM's do not run "
            "in: what a draft's acceptance is on your prompts, --set engine.runtime=torch with a "
            "build of its own tells; the costs of TensorRT-LLM it does not"
        )


def _max_draft_len(config: PipelineConfig, options: TuneOptions) -> int:
    built = config.speculation.num_draft_tokens
    wanted = built if options.max_draft_len is None else options.max_draft_len
    if wanted < 1:
        raise ConfigError(
            f"{config.source}: speculation.num_draft_tokens is 0: there is nothing to tune; give "
            "--max-draft-len"
        )
    return wanted


def _loads(config: PipelineConfig, options: TuneOptions) -> tuple[int, ...]:
    most = config.engine.max_batch_size
    if not options.concurrencies:
        doubled = (2**power for power in range(most.bit_length()))
        return tuple(sorted({*doubled, most}))
    for load in options.concurrencies:
        if not 1 <= load <= most:
            raise ConfigError(
                f"--concurrency {load}: expected 1 to {most} (engine.max_batch_size); more "
                "requests would only wait"
            )
    return tuple(sorted(set(options.concurrencies)))


def _rounds_to_json(rounds: dict[str, RoundCounts]) -> dict[str, Any]:
    """By prompt: draft tokens, accepted ones, number of steps."""
    return {
        name: [[drafted, accepted, count] for (drafted, accepted), count in sorted(found.items())]
        for name, found in rounds.items()
    }


def _rounds_from_json(data: dict[str, Any]) -> dict[str, RoundCounts]:
    return {
        name: {(drafted, accepted): count for drafted, accepted, count in found}
        for name, found in data.items()
    }
