"""`specpipe migrate`: a config for TensorRT-LLM's engines becomes one for its pytorch backend."""

from __future__ import annotations

from pathlib import Path

import click

from specpipe.cli.output import shown


@click.command()
@click.option(
    "--config",
    "config_path",
    required=True,
    type=click.Path(path_type=Path),
    help="A YAML for runtime tensorrt_llm with backend tensorrt.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; left out: the YAML's name with -pytorch.",
)
def migrate(config_path: Path, output: Path | None) -> None:
    """Turn a config for TensorRT-LLM's engines into one for its backend pytorch.

    Prints what changes in settings and in behaviour.
    """
    from specpipe.build.migrate import migrate

    migration = migrate(config_path, output)
    click.echo(shown(migration.output))
    for title, lines in (("settings", migration.settings), ("behaviour", migration.behaviour)):
        click.echo(f"{title}:")
        for line in lines:
            click.echo(f"  {line}")
