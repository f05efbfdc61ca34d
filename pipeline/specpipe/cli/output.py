"""How commands print paths and JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click


def shown(path: Path) -> str:
    """Returns a path as it is seen from here, where it lies below."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def print_json(data: Any, indent: int | None = 2) -> None:
    click.echo(json.dumps(data, indent=indent, ensure_ascii=False))
