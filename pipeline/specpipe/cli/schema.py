"""`specpipe schema`: the JSON Schema of the YAML."""

from __future__ import annotations

import click

from specpipe.cli.output import print_json


@click.command()
def schema() -> None:
    """Print the JSON Schema of the YAML, for editors."""
    from specpipe.config.sections import json_schema

    print_json(json_schema())
