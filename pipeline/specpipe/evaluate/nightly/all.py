"""Nightly runs of many pairs, one after the other; one that fails does not stop the others."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from specpipe.build.load import load_config
from specpipe.errors import ConfigError, RuntimeUnavailable, SpecpipeError
from specpipe.evaluate.nightly.run import Finished, NightlyOptions, failed, run_pair
from specpipe.evaluate.nightly.summary import what_changed
from specpipe.machine.callables import Log
from specpipe.machine.libraries import with_extras

_LIBRARIES = ("scipy", "matplotlib", "torch")


def run_all(
    config_paths: Sequence[Path], overrides: Sequence[str], options: NightlyOptions, *, report: Log
) -> list[Finished]:
    """Runs every config and returns what became of each, in their order."""
    for library in _LIBRARIES:  # hours before the first of them is used
        if importlib.util.find_spec(library) is None:
            raise RuntimeUnavailable(f"nightly runs need '{library}': {with_extras('evaluate')}")
    runs: list[Finished] = []
    seen: dict[Path, Path] = {}
    for path in config_paths:
        report(f"--- {path}")
        try:
            config = load_config(path, overrides)
            first = seen.setdefault(config.artifacts_dir, path)
            if first != path:
                raise ConfigError(
                    f"{path} and {first} are both named {config.name}, with one folder for both: "
                    "give one of them another name"
                )
            runs.append(run_pair(config, options, report=report))
        except (SpecpipeError, OSError) as exc:  # no YAML, or no folder that can be written to
            runs.append(Finished(failed(path.stem, path, exc)))
    return runs


def reasons(runs: Sequence[Finished]) -> list[str]:
    """Returns why runs are not good, a sentence each that begins with the pair.

    After those of a pair stands what changed since the run that it is compared with.
    """
    lines = []
    for run in (finished.run for finished in runs):
        said = [*run.reasons, *([what_changed(run)] if run.reasons and run.changes else [])]
        lines += [f"{run.pair}: {sentence}" for sentence in said]
    return lines
