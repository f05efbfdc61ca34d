"""`specpipe diff`: what two versions of a pair do not have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from specpipe.cli.options import (
    built_pair_options,
    json_option,
    load,
    open_store_of,
    store_option,
)
from specpipe.cli.output import print_result


@click.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@built_pair_options
@store_option
@json_option
def diff(
    before: str,
    after: str,
    config_path: Path,
    overrides: Sequence[str],
    store_url: str | None,
    as_json: bool,
) -> None:
    """Show in what two versions of a pair differ.

    A and B are numbers of versions, folders of versions, or `built` for what is built now. Compared
    are the files and commits of the checkpoints, calibration data, settings, libraries, GPUs,
    sizes, the verdict, acceptance, speed-up, and what quantization costs. Of a version that is not
    on this machine the store is asked for the documents alone; weights are not read.
    """
    from specpipe.release.comparison import compare
    from specpipe.release.documents import find_documents
    from specpipe.release.fetching import fetch_documents

    config = load(config_path, overrides)

    def fetch(number: int, folder: Path) -> None:
        fetch_documents(open_store_of(config, store_url), config.name, number, folder)

    found = compare(*(find_documents(config, name, fetch) for name in (before, after)))
    print_result(found.to_json(), found.lines(), as_json=as_json)
