"""Names of the models in a repository, and how large folders get into it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from specpipe.machine.manifest import relinked

ENSEMBLE, PREPROCESSING, SPECULATIVE, POSTPROCESSING = (
    "ensemble",
    "preprocessing",
    "speculative",
    "postprocessing",
)

VERSION = "1"
"""The folder of a model's only version."""


def link_folder(source: Path, destination: Path) -> None:
    """Copies a folder by hard links: engines are large, and no build changes one in place."""
    shutil.copytree(source, destination, copy_function=link_file)


def link_file(source: str | Path, destination: str | Path) -> None:
    """Copies a file by a hard link, where the file system has them."""
    try:
        with relinked([Path(source)]):
            os.link(source, destination)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, destination)
