"""`specpipe report`: everything that is known of an artifact, as one page."""

from __future__ import annotations

from pathlib import Path

import click

from specpipe.cli.options import OutputFolder


@click.command()
@click.argument("artifacts_dir", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--output",
    type=OutputFolder(),
    help="Folder for the report; left out: ARTIFACTS_DIR/report.",
)
def report(artifacts_dir: Path, output: Path | None) -> None:
    """Write a page about a built pair, from its folder.

    ARTIFACTS_DIR is the folder of a pair, such as engines/NAME.

    One HTML file that needs no other: formats and sizes, the verdict with its ties, acceptance by
    position, predicted and measured speed-up, latencies under load, what quantization costs, and
    where each number comes from. Its figures are beside it as PNG files. Nothing is measured: what
    is missing is named, with the command that measures it (verify, tune, bench).
    """
    from specpipe.evaluate.report.page import write_report

    written = write_report(artifacts_dir, output)
    for path in (written.page, *written.figures):
        click.echo(path)
