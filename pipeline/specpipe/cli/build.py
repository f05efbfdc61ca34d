"""`specpipe build`: what is stale of a pair, made in order."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specpipe.cli.options import json_option, load, pair_options, small_files_option
from specpipe.cli.output import print_json, shown
from specpipe.cli.progress import BuildProgress, log, log_shown

if TYPE_CHECKING:
    from specpipe.build.execution import StageReport


@click.command()
@pair_options
@click.option("--dry-run", is_flag=True, help="Print each stage that would run, and why.")
@click.option(
    "--verify-inputs",
    is_flag=True,
    help="Hash every checkpoint and artifact, and not only what looks changed.",
)
@click.option(
    "--locked",
    "is_locked",
    is_flag=True,
    help="Refuse to build anything else than x.lock, beside x.yaml, says.",
)
@small_files_option
@json_option
def build(
    config_path: Path,
    overrides: Sequence[str],
    dry_run: bool,
    verify_inputs: bool,
    is_locked: bool,
    small_files: Path | None,
    as_json: bool,
) -> None:
    """Build engines and Triton repository; do only what is not done yet."""
    from specpipe.build import execution, lock, planning
    from specpipe.build.remote_cache import remote_cache

    if small_files is not None and not dry_run:
        raise click.UsageError("--small-files has no weights to build from: add --dry-run.")
    config = load(config_path, overrides)
    if is_locked:
        pair = planning.plan_pair(config, small_files)
        stages = planning.plan_stages(config, pair)
        lock.check_pair(
            config, pair, stages, small_files=small_files, fetches=not dry_run, report=log
        )
    else:
        stages = planning.plan(config, small_files=small_files)
    repository = config.artifacts.repository
    if dry_run:
        reports = execution.preview(stages, verify_inputs=verify_inputs)
        if as_json:
            print_json({"stages": [_stage_json(report) for report in reports]})
        else:
            for report in reports:
                for reason in report.reasons or ("up to date",):
                    click.echo(f"{report.stage}: {reason}")
                for command in report.commands:
                    click.echo(f"  $ {shlex.join(command)}")
        return
    with log_shown():
        reports = execution.run(
            stages, BuildProgress(), verify_inputs=verify_inputs, remote=remote_cache(config)
        )
    if as_json:
        print_json(
            {
                "repository": str(repository),
                "stages": [
                    {**_stage_json(report), "duration_s": round(report.duration_s, 3)}
                    for report in reports
                ],
            }
        )
    else:
        click.echo(shown(repository))


def _stage_json(report: StageReport) -> dict[str, Any]:
    return {
        "stage": report.stage,
        "artifact": str(report.artifact),
        "reasons": list(report.reasons),
        **({"commands": [list(command) for command in report.commands]} if report.commands else {}),
    }
