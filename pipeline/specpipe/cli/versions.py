"""`specpipe versions`: what is published of a pair, and `versions prune`, which removes the old."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from specpipe.cli.options import (
    built_pair_options,
    json_option,
    load,
    open_store_of,
    optional_pair_options,
    store_option,
)
from specpipe.cli.output import Group, print_result
from specpipe.cli.progress import log


@click.group(cls=Group, invoke_without_command=True)
@optional_pair_options
@store_option
@json_option
@click.pass_context
def versions(
    context: click.Context,
    config_path: Path | None,
    overrides: Sequence[str],
    store_url: str | None,
    as_json: bool,
) -> None:
    """List the published versions of a pair, newest first.

    Acceptance and speed-up are those of the nightly run that a version was published with. Marks:
    promoted (in the store), served and loaded (by the server of this machine), here (fetched).
    """
    if context.invoked_subcommand is not None:
        if config_path is not None:
            raise click.UsageError(f"Give --config after {context.invoked_subcommand}.")
        return
    if config_path is None:
        raise click.UsageError("Missing option '--config'.")
    from specpipe.release.listing import list_versions

    config = load(config_path, overrides)
    listing = list_versions(config, open_store_of(config, store_url))
    print_result(listing.to_json(), listing.lines(), as_json=as_json)


@versions.command()
@built_pair_options
@store_option
@click.option(
    "--keep",
    required=True,
    type=click.IntRange(min=1),
    help="How many of the newest versions stay.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
@json_option
def prune(
    config_path: Path,
    overrides: Sequence[str],
    store_url: str | None,
    keep: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove old versions from the store and from this machine.

    The promoted version stays, here and in the store, and so do the one before it and what a server
    of this machine has loaded.
    """
    from specpipe.release.pruning import prune as run

    config = load(config_path, overrides)
    pruned = run(config, open_store_of(config, store_url), keep, dry_run=dry_run, log=log)
    print_result(pruned.to_json(), pruned.lines(), as_json=as_json)
