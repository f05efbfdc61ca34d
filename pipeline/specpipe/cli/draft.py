"""`specpipe draft`: a draft that pays, made from its target."""

from __future__ import annotations

import click

from specpipe.cli.draft_collect import collect
from specpipe.cli.draft_train import train
from specpipe.cli.output import Group


@click.group(cls=Group)
def draft() -> None:
    """Collect what a target answers, and train a draft for it."""


draft.add_command(collect)
draft.add_command(train)
