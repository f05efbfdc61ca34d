"""The models of the versions that one Triton has, in a folder each and by names of their own.

`ensemble`, which clients ask, keeps its name. The inner models of version 7 are `preprocessing_7`,
`speculative_7` and so on, so that versions stand beside each other; a pair that is served as it was
built has no number, and its models keep their names. A folder links to what the version's has, but
for the `config.pbtxt`, in which other models are named as they are named here:

name, ensemble_scheduling.step   the model, and the models of an ensemble
`cancels`, `..._model_name`      parameters: models that the model calls
`..._path`                       parameters: a path below the repository, the first part of which
                                 may be a model (TensorRT-LLM's `gpt_model_path`)

Triton calls the ensemble's version by the number too, so that answers, which have a
`model_version`, and Triton's metrics of `ensemble` tell which version of the pair it was.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specpipe.machine.whole_file import written_whole
from specpipe.runtimes.config_pbtxt import read_config, to_text
from specpipe.runtimes.repository_layout import ENSEMBLE, VERSION
from specpipe.triton.model_config import CALLS_SUFFIX, CANCELS, REPOSITORY_PATH_SUFFIX

_CONFIG = "config.pbtxt"

# With an ensemble Triton 2.51 loads each of its models anew below which a file is younger than the
# youngest was, be it by a new link to it alone (`st_ctim`). What is loaded stays as it is, so that
# its config is made the youngest, within what all file systems can store (2038).
_YEARS_S = 8 * 365 * 86400.0


@dataclass(frozen=True)
class Version:
    """What is served: the folder of a Triton repository, and its number; None: as it was built."""

    repository: Path
    number: int | None = None

    def __str__(self) -> str:
        return "the pair without a number" if self.number is None else f"version {self.number}"

    def name(self, model: str) -> str:
        """Returns the name that a model of the repository has here."""
        return model if self.number is None else f"{model}_{self.number}"

    @property
    def names(self) -> dict[str, str]:
        """The names here of all models but the ensemble, by those in the repository."""
        folders = sorted(path.name for path in self.repository.iterdir() if path.is_dir())
        return {model: self.name(model) for model in folders if model != ENSEMBLE}

    @property
    def private_ensemble(self) -> str:
        """An ensemble of these models that only the launcher asks."""
        return f"{ENSEMBLE}_{self.number or 0}"


def write(out: Path, version: Version) -> None:
    """Writes all models of a version into `out`, which is made, and the ensemble of them."""
    out.mkdir()
    write_inner(out, version)
    if (version.repository / ENSEMBLE).is_dir():
        write_ensemble(out, version, ENSEMBLE)


def write_inner(out: Path, version: Version) -> None:
    """Writes all models of a version but the ensemble."""
    names = version.names
    remove(out, *names.values())
    for model, name in names.items():
        folder = out / name
        folder.mkdir()
        for path in (version.repository / model).iterdir():
            if path.name != _CONFIG:
                (folder / path.name).symlink_to(path)
        _write_config(folder, version.repository / model, name, names)
        later = time.time() + _YEARS_S
        with contextlib.suppress(OSError):
            os.utime(folder / _CONFIG, (later, later))


def write_ensemble(out: Path, version: Version, name: str) -> None:
    """Writes an ensemble of a version's models, in place of one that has the name."""
    folder = out / name
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            path.rmdir()
    (folder / (VERSION if version.number is None else str(version.number))).mkdir()
    _write_config(folder, version.repository / ENSEMBLE, name, version.names)


def remove(out: Path, *names: str) -> None:
    """Removes models that Triton no longer has."""
    for name in names:
        shutil.rmtree(out / name, ignore_errors=True)


def _write_config(folder: Path, source: Path, name: str, names: Mapping[str, str]) -> None:
    if not (source / _CONFIG).is_file():  # Triton says so
        return
    config = read_config(source / _CONFIG)
    config.name = name
    for step in config.ensemble_scheduling.step:
        step.model_name = names.get(step.model_name, step.model_name)
    for key, value in config.parameters.items():
        value.string_value = _renamed(key, value.string_value, names)
    with written_whole(folder / _CONFIG) as file:
        file.write_text(to_text(config), encoding="utf-8")


def _renamed(key: str, value: str, names: Mapping[str, str]) -> str:
    if key == CANCELS or key.endswith(CALLS_SUFFIX):
        return names.get(value, value)
    if key.endswith(REPOSITORY_PATH_SUFFIX):
        model, slash, rest = value.partition("/")
        return f"{names.get(model, model)}{slash}{rest}"
    return value
