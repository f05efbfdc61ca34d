"""What the config.json of an engine's folder says, and whether its files agree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.checkpoints.checkpoint import ELEMENT_BYTES
from specpipe.checkpoints.unified_config import DTYPES, UnifiedConfig
from specpipe.errors import EngineMismatch
from specpipe.machine.manifest import hash_file
from specpipe.machine.memory import MemoryEstimate
from specpipe.runtimes.engine_description import reading_config
from specpipe.runtimes.tensorrt import shapes
from specpipe.runtimes.tensorrt.build import CONFIG_NAME, ENGINE_KIND, ENGINE_NAME, WEIGHTS_NAME
from specpipe.runtimes.tensorrt.memory import estimate_memory
from specpipe.runtimes.tensorrt.shapes import Profile
from specpipe.version import __version__

_OF_A_STEP = frozenset(
    (
        shapes.INPUT_IDS,
        shapes.POSITION_IDS,
        shapes.WRITE_INDICES,
        shapes.KEY_VALUE_LENGTHS,
        shapes.LOGITS_INDICES,
    )
)
"""The inputs that are neither KV caches nor weights."""


@dataclass(frozen=True, kw_only=True)
class TensorRTEngineSpec:
    """What an engine folder's `config.json` says.

    compute_capabilities  of the GPUs that the engine was built for, as "8.9"
    max_rows              the most tokens of a sequence in a step that decodes or verifies
    capacity              S: positions of a slot of the KV cache
    profiles              in the order in which the engine has them
    inputs                shape of each input by name, -1 where it differs from run to run
    weights_bytes         size of the file of weights; None where they are in the engine
    """

    folder: Path
    library: str
    library_version: str
    compute_capabilities: tuple[str, ...]
    dtype: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    max_batch_size: int
    max_seq_len: int
    max_draft_len: int
    max_rows: int
    capacity: int
    profiles: tuple[Profile, ...]
    inputs: Mapping[str, tuple[int, ...]]
    weight_streaming: bool
    engine_bytes: int
    engine_sha256: str
    weights_bytes: int | None
    memory: MemoryEstimate

    @classmethod
    def read(cls, folder: Path) -> TensorRTEngineSpec:
        """Reads an engine's folder; EngineMismatch where it is none, or one that is not whole."""
        config = _read_config(folder)
        with reading_config(folder):
            model = UnifiedConfig.from_json(config["pretrained_config"])
            build, builder = config["build_config"], config["builder"]
            limits = {key: build[key] for key in ("max_batch_size", "max_seq_len", "max_draft_len")}
            is_beside = builder["weights"] == "beside"
            spec = cls(
                folder=folder,
                library=builder["library"],
                library_version=builder["library_version"],
                compute_capabilities=tuple(builder["compute_capabilities"]),
                dtype=build["dtype"],
                vocab_size=model.vocab_size,
                num_layers=model.num_hidden_layers,
                num_kv_heads=model.num_key_value_heads,
                head_size=model.head_size,
                max_rows=shapes.max_rows(
                    build["max_draft_len"], is_parallel=model.parallel is not None
                ),
                capacity=builder["capacity"],
                profiles=tuple(map(Profile.from_json, builder["profiles"])),
                inputs={entry["name"]: tuple(entry["shape"]) for entry in builder["inputs"]},
                weight_streaming=builder["weight_streaming"],
                engine_bytes=builder["engine"]["bytes"],
                engine_sha256=builder["engine"]["sha256"],
                weights_bytes=builder["weights_bytes"] if is_beside else None,
                memory=estimate_memory(
                    model, dtype=build["dtype"], max_num_tokens=build["max_num_tokens"], **limits
                ),
                **limits,
            )
        for name in (ENGINE_NAME, *([WEIGHTS_NAME] if is_beside else [])):
            if not (folder / name).is_file():
                raise EngineMismatch(f"{folder} has no {name}: build the engine again")
        return spec

    @property
    def cache_names(self) -> tuple[str, ...]:
        """The inputs that are KV caches; the output that each is updated by has `.out` behind."""
        return tuple(shapes.cache_names(self.num_layers))

    @property
    def row_bytes(self) -> int:
        """Bytes of the key, or value, of one position and one head."""
        return self.head_size * ELEMENT_BYTES[DTYPES[self.dtype]]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of one KV cache."""
        return self.num_kv_heads * self.capacity * self.row_bytes

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The inputs that are weights, in the order of the engine; none where it holds them."""
        no_weights = {*_OF_A_STEP, *self.cache_names}
        return tuple(name for name in self.inputs if name not in no_weights)


def check_files(spec: TensorRTEngineSpec) -> None:
    """Reads the engine; EngineMismatch where it is not the one that config.json describes."""
    faults = "; ".join(size_faults(spec))
    if faults:
        raise EngineMismatch(f"{spec.folder}: {faults}: build the engine again")


def size_faults(spec: TensorRTEngineSpec) -> Iterator[str]:
    """Yields how the files of an engine differ from what its config.json says, a sentence each."""
    sizes = {ENGINE_NAME: spec.engine_bytes, WEIGHTS_NAME: spec.weights_bytes}
    for name, built in sizes.items():
        size = (spec.folder / name).stat().st_size if built is not None else None
        if size != built:
            yield f"{name} is damaged, it has {size} bytes, not {built}"
        elif name == ENGINE_NAME and _sha256(spec.folder / name) != spec.engine_sha256:
            yield f"{name} is damaged, it is not what was built (SHA-256)"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hash_file(file).hexdigest()


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_bytes())
        runtime = config["runtime"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise EngineMismatch(f"{folder} is not an engine of runtime 'tensorrt'") from exc
    if runtime != ENGINE_KIND:
        raise EngineMismatch(
            f"{folder} was built for {runtime}, specpipe {__version__} runs {ENGINE_KIND}; "
            "build it again"
        )
    return config
