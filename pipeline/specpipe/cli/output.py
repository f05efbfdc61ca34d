"""How commands print paths and results, and groups of them their help."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click


class Group(click.Group):
    """Lists its commands with whole summaries."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Wraps the commands' summaries, which click would cut."""
        whole = 1000  # characters
        summaries = [
            (name, command.get_short_help_str(limit=whole))
            for name, command in sorted(self.commands.items())
        ]
        with formatter.section("Commands"):
            formatter.write_dl(summaries)


def shown(path: Path) -> str:
    """Returns a path as it is seen from here, where it lies below."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def print_result(data: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Prints a result as JSON, or as lines for people."""
    if as_json:
        print_json(data)
        return
    for line in lines:
        click.echo(line)


def print_json(data: Any, indent: int | None = 2) -> None:
    click.echo(json.dumps(data, indent=indent, ensure_ascii=False))
