"""`specpipe tune`: the draft length that pays at each load, and the draft that pays most."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specpipe.cli.options import (
    NumberRange,
    built_pair_options,
    chat_option,
    json_option,
    load,
    max_tokens_option,
    numbers,
    prompts_options,
)
from specpipe.cli.output import print_result
from specpipe.cli.progress import BuildProgress, log, outcome
from specpipe.errors import SpecpipeError

if TYPE_CHECKING:
    from specpipe.build.execution import StageReport


@click.command()
@built_pair_options
@prompts_options
@max_tokens_option
@chat_option
@click.option(
    "--temperature",
    type=NumberRange(min=0),
    default=0.0,
    help="0: greedy. Acceptance depends on it.",
)
@click.option(
    "--candidate",
    "candidates",
    multiple=True,
    metavar="CHECKPOINT",
    help="Another draft for the same target, to compare; may be given several times.",
)
@click.option(
    "--concurrency",
    "concurrencies",
    type=numbers,
    metavar="N,N,...",
    help="Loads to tune for; left out: 1, 2, 4 and so on, up to engine.max_batch_size.",
)
@click.option(
    "--max-draft-len",
    type=click.IntRange(1, 32),
    help="The largest K to consider; left out: speculation.num_draft_tokens. For more than that "
    "engines are built aside.",
)
@click.option(
    "--best",
    "num_best",
    type=click.IntRange(min=1),
    default=2,
    help="Draft lengths to measure at each load, those predicted best.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    help="How often at least each draft length answers all prompts, in turns with target alone.",
)
@click.option(
    "--time-limit",
    "time_limit_s",
    type=NumberRange(min=0),
    default=300.0,
    help="Seconds for more rounds, which are taken until it is certain (95%) what pays.",
)
@click.option(
    "--resume/--no-resume",
    "resumes",
    default=True,
    help="Go on with an interrupted run of the same settings, prompts, engines and machine.",
)
@click.option(
    "--write",
    is_flag=True,
    help="Write the schedule into the YAML as speculation.schedule; comments stay.",
)
@json_option
def tune(
    config_path: Path,
    overrides: Sequence[str],
    concurrencies: tuple[int, ...] | None,
    write: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the draft length that pays at each load, and compare drafts.

    Measures acceptance by position on your prompts and what steps cost, predicts the speed-up of
    every draft length, and measures the best few of them against the target alone, in as many
    rounds as it takes to be certain. What pays at each load becomes a schedule: --write puts it
    into the YAML, and the next build serves it; it is also printed in the forms of TensorRT-LLM and
    vLLM. Runs the pair in this process. The result is written to results/tune.json beside the
    repository.
    """
    from specpipe.evaluate.tune import outcome, run
    from specpipe.evaluate.tune.summary import NO_CERTAINTY, summary
    from specpipe.evaluate.tune.yaml_edit import write_schedule

    tuning = run.tune(
        load(config_path, overrides),
        outcome.TuneOptions(concurrencies=concurrencies or (), **options),
        report=log,
        reporter=_Progress(),
    )
    data = json.loads(tuning.path.read_text(encoding="utf-8")) if as_json else None
    print_result(data, summary(tuning), as_json=as_json)
    if write:
        if tuning.own.schedule is None:
            raise SpecpipeError(f"{config_path} stays as it is: {NO_CERTAINTY}")
        write_schedule(config_path, tuning.own.schedule)
        log(f"{config_path}: schedule written; build again, and it is served")


class _Progress(BuildProgress):
    """Writes to stderr what was built, and not why, nor what was there."""

    def planned(self, reports: Sequence[StageReport]) -> None: ...

    def started(self, stage: str, reasons: Sequence[str]) -> None: ...

    def finished(self, report: StageReport) -> None:
        if report.reasons:
            log(outcome(report))
