"""The unified checkpoint: TensorRT-LLM's own format, written rank by rank and merged back.

A folder of `config.json` and `rank{i}.safetensors`, i = pp_rank · tp_size + tp_rank. Layers are
numbered from 0 within their pipeline stage. Every runtime builds from this; `load_unified` gives
them whole tensors again, whatever the split was. Tables: families.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specpipe.checkpoint import (
    CONFIG_NAME,
    ELEMENT_BYTES,
    RawArray,
    TensorInfo,
    create_safetensors,
    map_tensor,
    num_elements,
    read_safetensors_header,
)
from specpipe.errors import CheckpointError, SpecpipeError
from specpipe.families import (
    DTYPES,
    FAMILIES,
    Part,
    TensorRule,
    part_shape,
    pipeline_layers,
    tensor_rules,
)


@dataclass(frozen=True)
class RawTensor:
    """A tensor without its library.

    dtype  safetensors' name of it: "BF16", "F16", "F32"
    data   the elements as unsigned integers of that width; owned by the receiver, writable
    """

    dtype: str
    data: RawArray


@dataclass(frozen=True)
class UnifiedTensor:
    """One tensor of the whole model, and where its pieces lie."""

    name: str
    rule: TensorRule
    layer: int | None
    pp_rank: int
    local_name: str


def unified_tensors(config: Mapping[str, Any]) -> Iterator[UnifiedTensor]:
    """Yields every tensor of the model in the order of the forward pass.

    `name` counts layers over the whole model, `local_name` within the pipeline stage.
    """
    pp_size = config["mapping"]["pp_size"]
    stages = [pipeline_layers(config, pp_rank) for pp_rank in range(pp_size)]
    stage_of = {layer: rank for rank, layers in enumerate(stages) for layer in layers}
    for rule, layer in tensor_rules(config):
        if layer is None:
            pp_rank = 0 if rule.stage == "first" else pp_size - 1
            yield UnifiedTensor(rule.name, rule, None, pp_rank, rule.name)
        else:
            pp_rank = stage_of[layer]
            name = rule.name.format(n=layer)
            local_name = rule.name.format(n=layer - stages[pp_rank].start)
            yield UnifiedTensor(name, rule, layer, pp_rank, local_name)


def write_unified(
    out: Path, config: Mapping[str, Any], read: Callable[[Part, int | None], RawArray]
) -> None:
    """Writes a unified checkpoint into the empty folder `out`, one tensor at a time.

    `read` gives the Hugging Face tensor of a part and a layer, of `part_shape` and the config's
    dtype.
    """
    dtype, tp_size = DTYPES[config["dtype"]], config["mapping"]["tp_size"]
    ranks: list[dict[str, tuple[str, tuple[int, ...]]]] = [
        {} for _ in range(config["mapping"]["world_size"])
    ]
    for tensor in unified_tensors(config):
        shape = _rank_shape(config, tensor.rule)
        for tp_rank in range(tp_size):
            ranks[tensor.pp_rank * tp_size + tp_rank][tensor.local_name] = (dtype, shape)
    needed = sum(
        num_elements(shape) * ELEMENT_BYTES[dtype]
        for tensors in ranks
        for dtype, shape in tensors.values()
    )
    if (free := shutil.disk_usage(out).free) < needed:
        raise SpecpipeError(
            f"the unified checkpoint needs {needed / 1e6:,.1f} MB, but the disk of {out} has "
            f"{free / 1e6:,.1f} MB free"
        )
    with ExitStack() as stack:
        writers = [
            stack.enter_context(create_safetensors(_rank_file(out, rank), tensors))
            for rank, tensors in enumerate(ranks)
        ]
        for tensor in unified_tensors(config):
            parts = [(part, read(part, tensor.layer)) for part in tensor.rule.parts]
            for tp_rank in range(tp_size):
                pieces = [_piece(config, part, whole, tp_rank) for part, whole in parts]
                writers[tensor.pp_rank * tp_size + tp_rank].write(
                    tensor.local_name, pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
                )
    # Last, so that a folder with a config.json has all its weights.
    (out / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class UnifiedCheckpoint:
    """A unified checkpoint, read as if it had one rank.

    Query, key and value rows stand one after the other in `qkv`, `lm_head` has `vocab_size` rows.
    Names count layers over the whole model.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the rank files and checks that they hold exactly the tensors of the config."""
        self.folder = folder
        self.config: dict[str, Any] = _read_config(folder)
        self._tp_size = self.config["mapping"]["tp_size"]
        world_size = self.config["mapping"]["world_size"]
        self._tensors = {tensor.name: tensor for tensor in unified_tensors(self.config)}
        self._ranks: list[dict[str, TensorInfo]] = []
        for rank in range(world_size):
            path = _rank_file(folder, rank)
            if not path.is_file():
                raise CheckpointError(
                    f"{folder} lacks {path.name}, one of its {world_size} ranks; convert again"
                )
            self._ranks.append(read_safetensors_header(path))
        self._check_names()

    def names(self) -> list[str]:
        """Returns the names of all tensors in the order of the forward pass."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a merged tensor."""
        parts = self._tensors[name].rule.parts
        shapes = [part_shape(self.config, part) for part in parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def tensor(self, name: str) -> RawTensor:
        """Reads one tensor from all ranks and merges it.

        What several ranks hold alike (norms, shared KV heads, padding) is compared, so that a rank
        file from another conversion is found.
        """
        tensor = self._tensors[name]
        first = tensor.pp_rank * self._tp_size
        infos = [rank[tensor.local_name] for rank in self._ranks[first : first + self._tp_size]]
        arrays = [map_tensor(info) for info in infos]
        parts = tensor.rule.parts
        merged = np.empty(self.shape(name), arrays[0].dtype)
        row = rank_row = 0
        for part in parts:
            rows = part_shape(self.config, part)[0]
            rank_rows = _piece_shape(self.config, part)[0]
            pieces = [array[rank_row : rank_row + rank_rows] for array in arrays]
            if not _merge(self.config, part, pieces, merged[row : row + rows]):
                raise CheckpointError(
                    f"{self.folder}: the ranks disagree about {name}; convert again"
                )
            row += rows
            rank_row += rank_rows
        return RawTensor(infos[0].dtype, merged)

    def _check_names(self) -> None:
        dtype = DTYPES[self.config["dtype"]]
        expected: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in self._ranks]
        for tensor in self._tensors.values():
            for tp_rank in range(self._tp_size):
                expected[tensor.pp_rank * self._tp_size + tp_rank][tensor.local_name] = (
                    dtype,
                    _rank_shape(self.config, tensor.rule),
                )
        for rank, tensors in enumerate(self._ranks):
            held = {name: (info.dtype, info.shape) for name, info in tensors.items()}
            wrong = sorted(
                name
                for name in held.keys() | expected[rank].keys()
                if held.get(name) != expected[rank].get(name)
            )
            if wrong:
                raise CheckpointError(
                    f"{_rank_file(self.folder, rank)} does not fit its config.json: {wrong[0]} is "
                    f"{held.get(wrong[0], 'missing')}, expected "
                    f"{expected[rank].get(wrong[0], 'nothing')}; convert again"
                )


def load_unified(folder: Path) -> UnifiedCheckpoint:
    """Opens a unified checkpoint of any number of ranks."""
    return UnifiedCheckpoint(folder)


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.safetensors"


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as exc:
        raise CheckpointError(f"{folder} has no config.json; convert again") from exc
    except ValueError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(config, dict) or config.get("architecture") not in FAMILIES:
        raise CheckpointError(f"{path} is not that of a unified checkpoint of a supported family")
    return config


def _piece_shape(config: Mapping[str, Any], part: Part) -> tuple[int, ...]:
    """Returns the shape of one rank's piece of a part."""
    rows, *columns = part_shape(config, part)
    tp_size = config["mapping"]["tp_size"]
    if part.split == "rows":
        return (rows // tp_size, *columns)
    if part.split == "columns":
        return (rows, columns[0] // tp_size)
    if part.split == "kv_heads":
        return (max(rows // tp_size, config["head_size"]), *columns)
    if part.split == "vocab":
        return (-(-rows // tp_size), *columns)
    return (rows, *columns)


def _rank_shape(config: Mapping[str, Any], rule: TensorRule) -> tuple[int, ...]:
    """Returns the shape of one unified tensor on one rank."""
    shapes = [_piece_shape(config, part) for part in rule.parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _first_row(config: Mapping[str, Any], part: Part, tp_rank: int) -> int:
    """Returns the row of the whole part at which a rank's piece begins."""
    if part.split == "kv_heads":
        # Ranks 0 … tp/kv - 1 hold head 0, the next as many head 1, as their query heads need.
        head = tp_rank * config["num_key_value_heads"] // config["mapping"]["tp_size"]
        return int(head * config["head_size"])
    return tp_rank * _piece_shape(config, part)[0] if part.split in ("rows", "vocab") else 0


def _piece(config: Mapping[str, Any], part: Part, whole: RawArray, tp_rank: int) -> RawArray:
    """Cuts one rank's piece out of a part; a view where no padding is needed."""
    shape = _piece_shape(config, part)
    if part.split == "columns":
        return whole[:, tp_rank * shape[1] : (tp_rank + 1) * shape[1]]
    row = _first_row(config, part, tp_rank)
    piece = whole[row : row + shape[0]]
    if piece.shape[0] < shape[0]:
        padding = np.zeros((shape[0] - piece.shape[0], *shape[1:]), whole.dtype)
        piece = np.concatenate([piece, padding])
    return piece


def _merge(config: Mapping[str, Any], part: Part, pieces: list[RawArray], whole: RawArray) -> bool:
    """Joins the pieces of all ranks in `whole`; False if two of them contradict each other."""
    if part.split == "columns":
        np.concatenate(pieces, axis=1, out=whole)
        return True
    end = 0
    for tp_rank, piece in enumerate(pieces):
        row = _first_row(config, part, tp_rank)
        inside = piece[: max(len(whole) - row, 0)]
        if row + len(inside) <= end:
            if not np.array_equal(whole[row : row + len(inside)], inside):
                return False
        else:
            whole[row : row + len(inside)] = inside
            end = row + len(inside)
        if piece[len(inside) :].any():
            return False
    return True
