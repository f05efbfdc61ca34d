"""`specpipe inspect`: what an engine is, whichever runtime built it, and whether it is whole."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.errors import EngineMismatch
from specpipe.machine.columns import aligned
from specpipe.machine.manifest import (
    FileRecord,
    Hashed,
    Manifest,
    compare_files,
    file_faults,
    read_anew,
    read_manifest,
)
from specpipe.machine.memory import format_bytes
from specpipe.roles import ROLES
from specpipe.runtimes.engine_description import (
    DescribedProfile,
    DescribedTensor,
    EngineDescription,
)
from specpipe.runtimes.runtime import RUNTIMES, load_runtime

_LINE_LENGTH = 76  # of values, behind a label of 24 characters: 100 together
_NUMBER = re.compile(r"\d+")

_ENGINE_FOLDERS = (".", "engine", "checkpoint")
"""Where an engine may be in the folder of its role; a backend may serve a checkpoint instead."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """One engine's folder.

    file_bytes  size of each file that is there
    build       when and on what it was built, as the manifest beside it has it; {} without one
    damage      a clause for each file that is not what was built
    hashed      what was read to find that; None where sizes and times were enough
    """

    engine: Path
    description: EngineDescription
    file_bytes: Mapping[str, int]
    build: Mapping[str, Any]
    damage: tuple[str, ...]
    hashed: Hashed | None = None

    def as_json(self) -> dict[str, Any]:
        described = dataclasses.asdict(self.description)
        del described["files"]  # sizes and damage are reported instead
        return {
            "engine": str(self.engine),
            **described,
            "files": dict(self.file_bytes),
            "build": dict(self.build),
            "damage": list(self.damage),
            "hashed": None if self.hashed is None else dataclasses.asdict(self.hashed),
        }


def inspect(folder: Path, *, verify: bool = False) -> tuple[Inspection, ...]:
    """Returns what an engine is: one, that of a role's folder, or both of a pair's.

    A file of the recorded size and time counts as whole, unless `verify` asks for its digest.
    Raises EngineMismatch for a folder without an engine.
    """
    if verify:
        read_anew()
    inspection = _find(folder, verify)
    if inspection is not None:
        return (inspection,)
    if not any((folder / role).is_dir() for role in ROLES):
        raise _no_engine(folder)
    return tuple(_of_role(folder / role, verify) for role in ROLES)


def _of_role(folder: Path, verify: bool) -> Inspection:
    inspection = _find(folder, verify)
    if inspection is None:
        raise _no_engine(folder)
    return inspection


def _no_engine(folder: Path) -> EngineMismatch:
    if not folder.exists():
        return EngineMismatch(f"{folder} does not exist: run `specpipe build` first")
    return EngineMismatch(
        f"{folder} is no engine and holds none: expected a folder that `specpipe build` made, as "
        "engines/NAME/target, or engines/NAME for both"
    )


def _find(folder: Path, verify: bool) -> Inspection | None:
    for name in _ENGINE_FOLDERS:
        if (folder / name).is_dir() and (inspection := _inspect(folder / name, verify)) is not None:
            return inspection
    return None


def _inspect(engine: Path, verify: bool) -> Inspection | None:
    described = (load_runtime(name).describe(engine) for name in RUNTIMES)
    description = next((candidate for candidate in described if candidate is not None), None)
    manifest = read_manifest(engine)
    damages, hashed = _damage(engine, manifest, description, verify)
    if description is None:
        if damages:
            raise damaged(engine, damages)
        return None
    if manifest is not None:
        versions = {"specpipe": manifest.versions["specpipe"], **description.versions}
        description = dataclasses.replace(description, versions=versions)
    files = sorted(path for path in engine.iterdir() if path.is_file())
    return Inspection(
        engine=engine,
        description=description,
        file_bytes={path.name: path.stat().st_size for path in files},
        build=manifest.build if manifest is not None else {},
        damage=tuple(damages),
        hashed=hashed if verify else None,
    )


def _damage(
    engine: Path, manifest: Manifest | None, description: EngineDescription | None, verify: bool
) -> tuple[list[str], Hashed]:
    """Returns what differs from the manifest of an artifact, which lists every file; where there is
    none, in a repository, from what the engine itself records."""
    if manifest is not None:
        compared = compare_files(engine, manifest.outputs, trust_times=not verify)
        return file_faults(compared.differences), compared.hashed
    damages, total = [], Hashed(0, 0, 0.0)
    for file in () if description is None else description.files:
        path = engine / file.name
        if not path.is_file():
            damages.append(f"file {file.name} is missing")
        elif (size := path.stat().st_size) != (file.num_bytes or size):
            damages.append(f"file {file.name} has {size} bytes, built were {file.num_bytes}")
        elif verify and file.sha256 is not None:
            record = FileRecord(size, 0, file.sha256)
            compared = compare_files(path, {".": record}, trust_times=False)
            total += compared.hashed
            if compared.differences:
                damages.append(f"file {file.name} is not what was built")
    return damages, total


def damaged(engine: Path, sentences: Sequence[str]) -> EngineMismatch:
    """Returns the error of an engine that is not what was built."""
    return EngineMismatch(f"{engine} is damaged: {'; '.join(sentences)}: build it again")


def as_text(inspection: Inspection) -> str:
    """Returns what is known, a line for each fact and several for a list."""
    lines = [str(inspection.engine)]
    for label, values in _sections(inspection):
        for value in values:
            lines.append(f"  {label:22}{value}".rstrip())
            label = ""
    return "\n".join(lines)


def _sections(inspection: Inspection) -> Iterator[tuple[str, list[str]]]:
    """Yields labels with their values; nothing for what is not known."""
    engine, build = inspection.description, inspection.build
    yield "runtime", [engine.runtime]
    yield "versions", _joined(engine.versions)
    if build:
        yield "built", [f"{build['built_at']}, in {build['duration_s']:.1f} s"]
    layers = [] if engine.num_layers is None else [f"{engine.num_layers} layers"]
    yield "model", [", ".join([engine.architecture, *layers, engine.dtype])]
    yield "quantization", _joined(engine.quantization)
    yield "compute capabilities", _line(engine.compute_capabilities)
    yield "limits", _joined(engine.limits)
    yield "settings", _joined(engine.settings)
    files = {name: format_bytes(size) for name, size in inspection.file_bytes.items()}
    yield "files", _joined(files)
    yield "memory", _memory(engine)
    yield "inputs", _tensors(engine.inputs)
    yield "outputs", _tensors(engine.outputs)
    yield "profiles", [_profile(profile) for profile in engine.profiles]
    yield "layers", _counts(engine.layers)
    yield "layers by precision", _counts(engine.layer_precisions)
    yield "weights by precision", _counts(engine.weight_precisions)
    yield "verified", [] if inspection.hashed is None else [str(inspection.hashed)]
    yield "damaged", list(inspection.damage)


def _line(values: Iterable[str]) -> list[str]:
    """Returns a list of values in as few lines as hold them."""
    lines: list[str] = []
    for value in values:
        if lines and len(lines[-1]) + len(value) < _LINE_LENGTH:
            lines[-1] += f", {value}"
        else:
            lines.append(value)
    return [f"{line}," for line in lines[:-1]] + lines[-1:]


def _joined(values: Mapping[str, Any]) -> list[str]:
    return _line(f"{name} {_as_word(value)}" for name, value in values.items())


def _as_word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _counts(counts: Mapping[str, int]) -> list[str]:
    """Returns counts as words, the most frequent first."""
    return _joined(dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))))


def _memory(engine: EngineDescription) -> list[str]:
    memory, lines = engine.memory, []
    if memory.weights_bytes is not None:
        lines.append(f"weights {format_bytes(memory.weights_bytes)}")
    if memory.workspace_bytes is not None:
        lines.append(f"workspace {format_bytes(memory.workspace_bytes)} (estimated)")
    if memory.kv_bytes_per_token is not None:
        cache = f"KV cache {format_bytes(memory.kv_bytes_per_token)} per token"
        if memory.kv_cache_bytes is not None:
            content = f"{engine.limits['max_batch_size']} sequences"
            if "kv_cache_tokens" in engine.limits:
                content = f"{engine.limits['kv_cache_tokens']} tokens"
            cache += f", {format_bytes(memory.kv_cache_bytes)} for {content}"
        lines.append(cache)
    return lines


def _profile(profile: DescribedProfile) -> str:
    sizes = (
        f"{letter} {low} to {high} (best {best})" if low != high else f"{letter} {low}"
        for letter, (low, best, high) in profile.sizes.items()
    )
    return f"{profile.name}: {', '.join(sizes)}"


def _tensors(tensors: Sequence[DescribedTensor]) -> list[str]:
    """Returns one line for all tensors whose names differ by a number, as those of layers do."""
    alike: dict[tuple[str, str, str], list[DescribedTensor]] = {}
    for tensor in tensors:
        shape = f"[{', '.join(map(str, tensor.shape))}]"
        alike.setdefault((_NUMBER.sub("#", tensor.name), tensor.dtype, shape), []).append(tensor)
    rows = [(_names(group), dtype, shape) for (_, dtype, shape), group in alike.items()]
    return aligned(rows, texts=(0, 1, 2))


def _names(group: Sequence[DescribedTensor]) -> str:
    first, last = group[0].name, group[-1].name
    if len(group) == 1:
        return first
    number = _NUMBER.search(last)
    assert number is not None, "names that differ have numbers"
    return _NUMBER.sub(lambda match: f"{match[0]}…{number[0]}", first, count=1)
