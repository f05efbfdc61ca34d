"""The lock of a pair: everything that decides what a build makes, in a file beside the YAML.

It has of each checkpoint the commit and the digest of each file that a build reads, of each stage
what its manifest will record (settings, other files), and the libraries, tools and GPUs that work.
What cannot be known is "unknown", and is compared with nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specpipe.build.planning import Fetch, Plan
from specpipe.checkpoints import source
from specpipe.config.sections import PipelineConfig
from specpipe.errors import SpecpipeError, show
from specpipe.machine import provenance
from specpipe.machine.callables import Log
from specpipe.machine.manifest import record_files
from specpipe.machine.own_json import read_object, reason
from specpipe.machine.whole_file import written_whole
from specpipe.quantization.texts import data_file
from specpipe.runtimes.plan import PairPlan, Side

UNKNOWN = "unknown"

Lock = Mapping[str, Any]

_FORMAT = 1
_MAX_BYTES = 16 << 20  # a lock has some ten thousand
_MAX_LISTED = 50  # differences that a message names
_MAX_NAMED = 10  # entries that are passed over, in a line
_NOTES = "not_reproducible"  # on builders: follows from the rest
_ABSENT = object()


def lock_path(config: PipelineConfig) -> Path:
    """Returns where the lock of a YAML is: x.lock beside x.yaml."""
    return config.source.with_suffix(".lock")


def describe(
    pair: PairPlan, stages: Plan, *, small_files: Path | None = None, is_fetched: bool = False
) -> Lock:
    """Returns the lock of a pair as it would be built here and now; hashes every input.

    small_files  the folder that a plan was made from instead of a hub: the rest of it is unknown
    is_fetched   whether all weights are here; until then the hub's own digests are taken, and
                 weights are fetched where it does not tell them
    """
    sides = (pair.draft, pair.target)
    checkpoints = {side.role: _checkpoint(side, stages, small_files, is_fetched) for side in sides}
    inputs = {planned.name: planned.stage.inputs() for planned in stages}
    texts = {
        side.role: data_file(scheme.calibration, side.base_dir)
        for side in sides
        if (scheme := side.checkpoint.quantization) is not None
    }
    elsewhere = [
        path
        for path in _roots(stages)
        if path not in texts.values() and path.parent not in [side.folder for side in sides]
    ]
    lock = {
        "format": _FORMAT,
        "checkpoints": checkpoints,
        "calibration": {
            role: _digests(path)[path.name] for role, path in texts.items() if path.is_file()
        },
        "stages": {
            planned.name: {
                "settings": inputs[planned.name].settings,
                "files": {
                    name: digest
                    for path in inputs[planned.name].files
                    if path in elsewhere
                    for name, digest in _digests(path).items()
                },
                "tool": {} if planned.tool_facts is None else planned.tool_facts(),
            }
            for planned in stages
        },
        "versions": provenance.versions(
            sorted({name for needed in inputs.values() for name in needed.libraries})
        ),
        "gpus": {str(number): gpu for number, gpu in enumerate(provenance.gpus())},
        _NOTES: {name: needed.varies for name, needed in inputs.items() if needed.varies},
    }
    as_read: Lock = json.loads(json.dumps(lock))
    return as_read


def _checkpoint(
    side: Side, stages: Plan, small_files: Path | None, is_fetched: bool
) -> dict[str, Any]:
    files = {
        name: digest
        for path in _roots(stages)
        if path.parent == side.folder
        for name, digest in _digests(path).items()
    }
    weights = {name: files.pop(name) for name in [*files] if name.endswith(".safetensors")}
    found = {"source": side.checkpoint.checkpoint, "files": files}
    if isinstance(side.fetch, Fetch):
        if not is_fetched:
            told = source.weight_digests(side.fetch.repo_id, side.fetch.commit)
            if told is None:
                side.fetch()
                return _checkpoint(side, stages, small_files, is_fetched=True)
            weights = told
        return {**found, "commit": side.fetch.commit, "weights": weights}
    if small_files is not None and side.folder.is_relative_to(small_files.resolve()):
        return {**found, "commit": UNKNOWN, "weights": UNKNOWN}
    # Wherever it lies: only its files decide.
    return {"source": "a folder", "files": files, "weights": weights}


def _roots(stages: Plan) -> list[Path]:
    """Returns the files and folders that a build reads and does not make."""
    made = {planned.artifact for planned in stages}
    read = {path for planned in stages for path in planned.stage.inputs().files}
    return sorted(path for path in read if made.isdisjoint((path, *path.parents)))


def _digests(root: Path) -> dict[str, str]:
    """Returns the SHA-256 of a file, or of those below a folder, by names that begin with its."""
    return {
        root.name if name == "." else f"{root.name}/{name}": record.sha256
        for name, record in record_files(root).items()
    }


def read(path: Path) -> Lock:
    """Returns what a lock says; SpecpipeError for what is none."""
    try:
        lock = read_object(path, max_bytes=_MAX_BYTES)
        if lock.get("format") != _FORMAT:
            raise ValueError(f"its format is {show(lock.get('format'))}, expected {_FORMAT}")
    except FileNotFoundError:
        raise SpecpipeError(
            f"{path} does not exist: run `specpipe lock`, and keep what it writes"
        ) from None
    except (OSError, ValueError) as exc:
        raise SpecpipeError(
            f"{path} is not what `specpipe lock` writes ({reason(exc)}): bring back the lock, or "
            "remove it and lock again"
        ) from exc
    return lock


def write(path: Path, lock: Lock) -> None:
    """Writes a lock, an entry a line and sorted, so that two can be read side by side."""
    text = json.dumps(lock, indent=1, sort_keys=True, ensure_ascii=False)
    with written_whole(path) as staged:
        staged.write_text(text + "\n", encoding="utf-8")


def changes(old: Lock, new: Lock) -> list[str]:
    """Returns a line for everything in which two locks differ."""
    lines = [
        f"{entry}: was {_shown(before)}, is now {_shown(after)}"
        for entry, before, after in _walk(old, new)
        if _text(before) != _text(after)
    ]
    return _cut(lines)


def check(path: Path, locked: Lock, here: Lock) -> list[str]:
    """Raises SpecpipeError, with a line for each difference, where a build would not be as locked.

    Returns the entries that were not compared, since they are unknown here or in the lock.
    """
    lines, not_compared = [], []
    for entry, before, after in _walk(_inputs(locked), _inputs(here)):
        if UNKNOWN in (before, after):
            not_compared.append(entry)
        else:
            lines.append(f"{entry}: locked {_shown(before)}, here {_shown(after)}")
    if lines:
        raise SpecpipeError(
            "\n  - ".join([f"{path} has something else locked, so nothing is built:", *_cut(lines)])
            + (f"\n{said_of(not_compared)}" if not_compared else "")
            + "\nbring back what differs (`revision` holds a commit), or run `specpipe lock` and "
            "see what it changes"
        )
    return not_compared


def check_pair(
    config: PipelineConfig,
    pair: PairPlan,
    stages: Plan,
    *,
    small_files: Path | None = None,
    fetches: bool = True,
    report: Log,
) -> None:
    """Raises SpecpipeError where stages would not make what is locked; `fetches` weights to see.

    `report` gets a line on what is not compared.
    """
    path = lock_path(config)
    locked = read(path)
    not_compared = check(path, locked, describe(pair, stages, small_files=small_files))
    fetch = [side.fetch for side in (pair.draft, pair.target) if side.fetch is not None]
    if fetches and fetch:
        # Until now the hub was believed.
        for bring in fetch:
            bring()
        not_compared = check(path, locked, describe(pair, stages, is_fetched=True))
    if not_compared:
        report(said_of(not_compared))


def unknown_entries(lock: Lock) -> list[str]:
    """Returns the entries that could not be known where the lock was made."""
    return [entry for entry, _, _ in _walk(lock, lock)]


def said_of(entries: Sequence[str]) -> str:
    """Returns one line on entries that are unknown, which says that they are not compared."""
    more = len(entries) - _MAX_NAMED
    names = ", ".join(entries[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"not compared, since unknown: {names}"


def _inputs(lock: Lock) -> Lock:
    return {key: value for key, value in lock.items() if key != _NOTES}


def _walk(old: Any, new: Any, entry: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields where two trees differ, or where either is unknown, with both values.

    One of them is specpipe's own, so that it goes no deeper than that.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            below = f"{entry}.{key}" if entry else key
            yield from _walk(old.get(key, _ABSENT), new.get(key, _ABSENT), below)
    elif UNKNOWN in (old, new) or _text(old) != _text(new):
        yield show(entry), old, new


def _cut(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _MAX_LISTED
    return [*lines[:_MAX_LISTED], *([f"{more} more"] if more > 0 else [])]


def _text(value: Any) -> str:
    """Writes a value as JSON, where True, 1 and 1.0 are three."""
    if value is _ABSENT:
        return "nothing"
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    except RecursionError:
        return "what is nested too deeply"


def _shown(value: Any) -> str:
    return show(value if isinstance(value, str) else _text(value))
