"""How commands print paths and results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click


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
