"""`specpipe inspect`: what a built engine is, and whether it is whole."""

from __future__ import annotations

from pathlib import Path

import click

from specpipe.cli.options import json_option
from specpipe.cli.output import print_result


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Compare the digest of every file, and not its time.")
@json_option
def inspect(engine: Path, verify: bool, as_json: bool) -> None:
    """Say what a built engine is, and whether it is whole.

    ENGINE is its folder, that of a role (engines/NAME/target) or that of a pair (engines/NAME).
    """
    from specpipe.build import inspection

    inspections = inspection.inspect(engine, verify=verify)
    data = {"engines": [inspected.as_json() for inspected in inspections]}
    text = "\n\n".join(map(inspection.as_text, inspections))
    print_result(data, [text], as_json=as_json)
    for inspected in inspections:
        if inspected.damage:
            raise inspection.damaged(inspected.engine, inspected.damage)
