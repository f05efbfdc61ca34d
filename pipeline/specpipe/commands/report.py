"""`specpipe report`: everything that is known of an artifact, as one page."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("artifacts_dir", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the report; left out: `report` in that of the pair.",
)
def report(artifacts_dir: Path, output: Path | None) -> None:
    """Write a page about a built pair (engines/NAME).

    The page needs no other file: formats and sizes, the verdict with its ties, acceptance by
    position, predicted and measured speed-up, latencies under load, what quantization costs, and
    where each number comes from. Its figures are beside it as PNG files. What was not measured is
    said to be missing, with the command that measures it.
    """
    from specpipe.report.page import write_report

    written = write_report(artifacts_dir, output)
    for path in (written.page, *written.figures):
        click.echo(path)
