"""Files that appear whole: whoever reads finds the old one or the new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a file to write, which takes the place of `path` at the end of a `with` block.

    Folders above it are made. A failure leaves the old file, and no other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield staged
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
