"""The licence files of a checkpoint, and what its model card says of its licence.

A model card is the README.md of a repository on the Hugging Face hub; the block of YAML at its
beginning has `license`, and for licences that have no name there `license_name` and `license_link`
(huggingface_hub's documentation, "Model Cards"). Whoever wrote a checkpoint wrote these files too:
they are opened as its other files are, and no more of them is read than a licence takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specpipe.checkpoints.files import is_there, open_file
from specpipe.errors import CheckpointError, show
from specpipe.roles import Role

LICENCE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
"""What the names of licence files begin with, in either case."""

MODEL_CARD = "README.md"

_MAX_BYTES = 1 << 20  # of one file: the GPL has 35,000
_MAX_FILES = 32
_MAX_HEADER_BYTES = 1 << 16  # of a model card's YAML
_MAX_YAML_CHARS = 1000  # of it about licences; PyYAML takes a second for twice as many brackets
_MAX_CHARS = 200  # of a name or a link


@dataclass(frozen=True, kw_only=True)
class Licences:
    """What is known of a checkpoint's licence.

    files     what is published with it, by name
    declared  licences by the names of the model card
    name      what `other` is called there; link: where its text is
    notes     what is missing, a sentence each
    """

    files: Mapping[str, Path]
    declared: tuple[str, ...] = ()
    name: str | None = None
    link: str | None = None
    notes: tuple[str, ...] = ()


def find_licences(role: Role, checkpoint: str, folder: Path) -> Licences:
    """Looks for the licence of a checkpoint; CheckpointError for what is no plain file.

    checkpoint  what the YAML calls it, for notes
    """
    where = f"the {role}'s checkpoint {show(checkpoint)}"
    if not folder.is_dir():
        return Licences(
            files={},
            notes=(f"no licence file found: {where} is no longer where it was built from",),
        )
    files = {
        name: folder / name
        for name in sorted(os.listdir(folder))
        if name.upper().startswith(LICENCE_NAMES) and not (folder / name).is_dir()
    }
    notes: tuple[str, ...] = ()
    card = folder / MODEL_CARD
    header = _header(card) if is_there(card) else {}
    declared = _texts(header.get("license"))
    if not files:
        said = f"; its {MODEL_CARD} says {', '.join(map(show, declared))}" if declared else ""
        notes = (f"no licence file found in {where}{said}",)
    if declared and card.stat().st_size > _MAX_BYTES:
        notes += (f"{MODEL_CARD} of {where} has more than {_MAX_BYTES} bytes and is left out",)
    elif declared:
        files[MODEL_CARD] = card
    if len(files) > _MAX_FILES:
        raise CheckpointError(
            f"{folder} has {len(files)} licence files, expected at most {_MAX_FILES}"
        )
    for path in files.values():
        read_licence(path)
    return Licences(
        files=files,
        declared=declared,
        name=next(iter(_texts(header.get("license_name"))), None),
        link=next(iter(_texts(header.get("license_link"))), None),
        notes=notes,
    )


def read_licence(path: Path) -> bytes:
    """Returns what a licence file holds; CheckpointError for a link out of the folder, or more
    than any licence has.
    """
    with open_file(path) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise CheckpointError(
            f"{path} has more than {_MAX_BYTES} bytes: expected the text of a licence"
        )
    return data


def _header(card: Path) -> Mapping[str, Any]:
    """Returns the YAML at the beginning of a model card; nothing where there is none to be read."""
    with open_file(card) as file:
        lines = file.read(_MAX_HEADER_BYTES).decode(errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    end = next((n for n, line in enumerate(lines[1:], 1) if line.strip() == "---"), 0)
    text = "\n".join(_licence_lines(lines[1:end]))
    if len(text) > _MAX_YAML_CHARS:
        return {}
    try:
        value = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _licence_lines(lines: list[str]) -> Iterator[str]:
    """Yields the lines of the keys that are read, and of what stands below them."""
    wanted = False
    for line in lines:
        if line[:1] not in ("", " ", "\t", "-", "#"):
            wanted = line.partition(":")[0] in ("license", "license_name", "license_link")
        if wanted:
            yield line


def _texts(value: object) -> tuple[str, ...]:
    """Returns a text, or the texts of a list; what is neither, or endless, is none."""
    values = value if isinstance(value, list) else [value]
    return tuple(
        text.strip()
        for text in values[:_MAX_FILES]
        if isinstance(text, str) and 0 < len(text.strip()) <= _MAX_CHARS and text.isprintable()
    )
