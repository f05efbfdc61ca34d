"""`specpipe init`: a commented YAML for two checkpoints."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("draft")
@click.argument("target")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; left out: NAME.yaml.",
)
@click.option("--name", metavar="NAME", help="Name of the pair; left out: the target's.")
def init(draft: str, target: str, output: Path | None, name: str | None) -> None:
    """Check a pair and write a commented YAML for it.

    DRAFT and TARGET are folders or ids on the Hugging Face hub; only their small files are read.
    """
    from specpipe.build.init import write_config

    click.echo(write_config(draft, target, output=output, name=name))
