"""`specpipe lock`: what a build depends on, in a file to keep beside the YAML."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from specpipe.cli.options import load, pair_options, small_files_option
from specpipe.cli.output import shown


@click.command()
@pair_options
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; left out: x.lock beside x.yaml, which `build --locked` reads.",
)
@small_files_option
def lock(
    config_path: Path, overrides: Sequence[str], output: Path | None, small_files: Path | None
) -> None:
    """Write down all that a build depends on, for `build --locked`.

    Weights on a hub are not fetched where it tells their digests.
    """
    from specpipe.build import lock, planning

    config = load(config_path, overrides)
    pair = planning.plan_pair(config, small_files)
    path = output or lock.lock_path(config)
    old = lock.read(path) if os.path.lexists(path) else None
    new = lock.describe(pair, planning.plan_stages(config, pair), small_files=small_files)
    if old is not None:
        for line in lock.changes(old, new) or ["nothing changed"]:
            click.echo(line)
    if unknown := lock.unknown_entries(new):
        click.echo(lock.said_of(unknown), err=True)
    if old != new:
        lock.write(path, new)
    click.echo(shown(path))
