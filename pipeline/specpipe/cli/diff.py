"""`specpipe diff`: what two versions of a pair do not have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from specpipe.cli.options import built_pair_options, json_option, load
from specpipe.cli.output import print_result


@click.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@built_pair_options
@json_option
def diff(
    before: str, after: str, config_path: Path, overrides: Sequence[str], as_json: bool
) -> None:
    """Show in what two versions of a pair differ.

    A and B are numbers of versions, folders of versions, or `built` for what is built now. Compared
    are the files and commits of the checkpoints, calibration data, settings, libraries, GPUs,
    sizes, the verdict, acceptance, speed-up, and what quantization costs. Weights are not read.
    """
    from specpipe.release.comparison import compare
    from specpipe.release.documents import find_documents

    config = load(config_path, overrides)
    found = compare(*(find_documents(config, name) for name in (before, after)))
    print_result(found.to_json(), found.lines(), as_json=as_json)
