"""What can be told of an engine from its folder, without the library that built it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specpipe.checkpoints.files import read_json
from specpipe.errors import CheckpointError, EngineMismatch

ENGINE_CONFIG = "config.json"


@dataclass(frozen=True)
class DescribedTensor:
    """An input or output. Sizes that differ from call to call are letters; profiles bound them."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class DescribedProfile:
    """Sizes that an engine was built for together: least, best and greatest, by letter."""

    name: str
    sizes: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class RecordedFile:
    """A file that belongs to an engine, as the engine itself records it; None: it does not say."""

    name: str
    num_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes that a loaded engine takes on all of its GPUs; None where its folder does not tell.

    kv_cache_bytes   of as many tokens as limits say that all sequences have together
                     (kv_cache_tokens), or of the most sequences, each of its full length
    workspace_bytes  activations of the largest forward; an estimate
    """

    weights_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    kv_cache_bytes: int | None = None
    workspace_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineDescription:
    """One engine; what is empty or None, its folder does not tell.

    versions              of what built it, by name
    limits, settings      what it was built for, and how, by the names of its config
    compute_capabilities  of the GPUs that it runs on; empty also where it is not tied to any
    layers                by kind
    layer_precisions      layers by the dtype of their output
    weight_precisions     stored tensors by dtype
    files                 what must be there besides config.json
    """

    runtime: str
    versions: Mapping[str, str]
    architecture: str
    num_layers: int | None
    dtype: str
    limits: Mapping[str, int]
    settings: Mapping[str, Any]
    memory: EngineMemory
    files: tuple[RecordedFile, ...]
    quantization: Mapping[str, str] = field(default_factory=dict)
    compute_capabilities: tuple[str, ...] = ()
    inputs: tuple[DescribedTensor, ...] = ()
    outputs: tuple[DescribedTensor, ...] = ()
    profiles: tuple[DescribedProfile, ...] = ()
    layers: Mapping[str, int] = field(default_factory=dict)
    layer_precisions: Mapping[str, int] = field(default_factory=dict)
    weight_precisions: Mapping[str, int] = field(default_factory=dict)


def read_engine_config(folder: Path) -> dict[str, Any] | None:
    """Returns an engine's config.json; None where there is none that can be read."""
    try:
        return read_json(folder / ENGINE_CONFIG)
    except CheckpointError:
        return None


def is_built_by(config: Mapping[str, Any], runtime: str) -> bool:
    """True for the config.json of an engine of a runtime that writes its name there."""
    kind = config.get("runtime")
    return isinstance(kind, dict) and kind.get("name") == runtime


@contextmanager
def reading_config(folder: Path) -> Iterator[None]:
    """Turns what a config.json lacks, or says in another form, into one sentence."""
    path = folder / ENGINE_CONFIG
    try:
        yield
    except KeyError as exc:
        raise EngineMismatch(f"{path} has no {exc.args[0]}: build the engine again") from exc
    except (TypeError, ValueError, AttributeError, CheckpointError) as exc:
        raise EngineMismatch(f"{path} cannot be read ({exc}): build the engine again") from exc


def quantization_of(pretrained: Mapping[str, Any]) -> dict[str, str]:
    """Returns the algorithms that a unified config names, without those that it leaves open."""
    found = pretrained.get("quantization") or {}
    return {
        key: str(found[key])
        for key in ("quant_algo", "kv_cache_quant_algo")
        if found.get(key) is not None
    }
