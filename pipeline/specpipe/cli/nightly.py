"""`specpipe nightly`: every pair rebuilt where it changed, verified, measured and compared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from specpipe.cli.options import NumberRange
from specpipe.cli.output import print_json
from specpipe.cli.progress import log


@click.command()
@click.argument(
    "configs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="CONFIG..."
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a setting in every CONFIG; may be given several times.",
)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder with the runs to compare with, as NAME/results/nightly.json; left out: that of "
    "the promoted version, else each pair's last good one.",
)
@click.option(
    "--new-baseline",
    "is_new_baseline",
    is_flag=True,
    help="Compare with no earlier run, as after an intended change.",
)
@click.option(
    "--locked",
    "is_locked",
    is_flag=True,
    help="Refuse to build anything else than x.lock, beside x.yaml, says.",
)
@click.option(
    "--in-process", "is_in_process", is_flag=True, help="Run the pairs here instead of in Triton."
)
@click.option(
    "--summary",
    "summary_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the summary, in Markdown, to this file as well.",
)
@click.option(
    "--junit",
    "junit_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write what came of each pair to this file, as JUnit's XML for GitLab and others.",
)
@click.option(
    "--check-age",
    metavar="HOURS",
    type=NumberRange(min=0, min_open=True),
    help="Run nothing: fail where the last good run of a pair is older than that, or missing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the runs as JSON.")
def nightly(
    configs: Sequence[Path],
    overrides: Sequence[str],
    summary_path: Path | None,
    junit_path: Path | None,
    check_age: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Rebuild what changed, verify, measure, and compare with the version that is promoted.

    For every CONFIG, a YAML of a pair: its revisions are resolved anew, stages whose inputs changed
    run, the pair is verified and measured in short form, and a report is written. The section
    `nightly` of the YAML says what is measured and what a run must not fall below; all of it has
    defaults (`specpipe schema`). A good run becomes results/nightly.json beside the repository,
    which the next one is compared with where no version is promoted.

    Exit code 1 when a pair is not good, with the reasons; the others run all the same. On GitHub
    the summary is added to that of the job.
    """
    if check_age is not None:
        _check_age(configs, overrides, check_age)
        return

    from specpipe.evaluate.nightly.all import reasons, run_all
    from specpipe.evaluate.nightly.junit import write_junit
    from specpipe.evaluate.nightly.run import NightlyOptions
    from specpipe.evaluate.nightly.summary import write_summary
    from specpipe.machine.signals import deferred
    from specpipe.release.compared import find_promoted

    if options["baseline"] is not None and options["is_new_baseline"]:
        raise click.UsageError("--new-baseline compares with nothing: leave out --baseline.")
    paths = [path for path in (summary_path, junit_path) if path is not None]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    asked = NightlyOptions(find_promoted=find_promoted, **options)
    finished_runs = run_all(configs, overrides, asked, report=log)
    summary = write_summary(finished_runs)
    with deferred():
        if summary_path is not None:
            summary_path.write_text(summary, encoding="utf-8")
        if junit_path is not None:
            junit_path.write_bytes(write_junit(finished_runs))
    if job_summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(job_summary, "a", encoding="utf-8") as file:
            file.write(summary)
    if as_json:
        print_json({"runs": [finished.run.to_json() for finished in finished_runs]})
    else:
        click.echo(summary, nl=False)
    if failures := reasons(finished_runs):
        raise click.ClickException("\n".join(failures))


def _check_age(configs: Sequence[Path], overrides: Sequence[str], hours: float) -> None:
    from specpipe.build.load import load_config
    from specpipe.evaluate.nightly.age import age_fault

    found = [age_fault(load_config(path, overrides), hours) for path in configs]
    if faults := [fault for fault in found if fault is not None]:
        raise click.ClickException("\n".join(faults))
