"""`specpipe promote` and `specpipe rollback`: which version this machine serves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click

from specpipe.cli.options import json_option, load, open_store_of, pair_options, store_option
from specpipe.cli.output import print_result
from specpipe.cli.progress import log

_replace_option = click.option(
    "--replace",
    is_flag=True,
    help="Unload what is served first, also where there is room for both; requests are refused in "
    "between.",
)
_dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Check everything and say what would be done; change nothing."
)


def _number(text: str) -> int | None:
    """Returns the number of a version; None for `latest`."""
    from specpipe.errors import show

    if text == "latest":
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise click.BadParameter(f"{show(text)!r}: expected the number of a version, or `latest`.")
    return int(text)


@click.command()
@click.argument("version", type=_number, metavar="VERSION")
@pair_options
@store_option
@click.option(
    "--older", "allow_older", is_flag=True, help="Take a version older than the promoted one."
)
@_replace_option
@_dry_run_option
@json_option
def promote(
    version: int | None,
    config_path: Path,
    overrides: Sequence[str],
    store_url: str | None,
    allow_older: bool,
    replace: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve a published version on this machine.

    VERSION is its number, or `latest`. It is fetched, checked, and loaded by the running `specpipe
    serve` beside what is served now; requests go to it once it has answered one. Where nothing
    serves, `specpipe serve --promoted` will begin with it.
    """
    from specpipe.release.promoting import promote as run

    config = load(config_path, overrides)
    promoted = run(
        config,
        open_store_of(config, store_url),
        version,
        allow_older=allow_older,
        replace=replace,
        dry_run=dry_run,
        log=log,
    )
    print_result(promoted.to_json(), promoted.lines(), as_json=as_json)


@click.command()
@pair_options
@store_option
@_replace_option
@_dry_run_option
@json_option
def rollback(
    config_path: Path,
    overrides: Sequence[str],
    store_url: str | None,
    replace: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve the version before the promoted one again.

    In seconds where it was kept loaded (`release.keep_previous`), else as soon as it is loaded.
    """
    from specpipe.release.promoting import rollback as run

    config = load(config_path, overrides)
    promoted = run(
        config, open_store_of(config, store_url), replace=replace, dry_run=dry_run, log=log
    )
    print_result(promoted.to_json(), promoted.lines(), as_json=as_json)
