"""Checkpoints on disk: safetensors files read by header, and whole Hugging Face folders.

Only headers and small JSON files are read when a folder is opened; weights are read in blocks when
asked for. Tensors are handled as raw bytes in NumPy: unsigned integers as wide as an element, with
the dtype beside them, so that bfloat16 needs no library. No pickle is read, no code imported.

Format: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from specpipe.checkpoints.files import (
    LFS_POINTER,
    is_there,
    open_file,
    parse_json,
    quoted,
    read_json,
)
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.errors import CheckpointError, show

RawArray = npt.NDArray[np.unsignedinteger[Any]]
"""A tensor's elements as unsigned integers of their width, in the tensor's shape."""

ELEMENT_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""The dtypes of safetensors that fill whole bytes."""

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
QUANT_CONFIG_NAME = "hf_quant_config.json"
"""What NVIDIA's ModelOpt writes beside a checkpoint that it quantized."""
QUANTIZATION_KEYS = frozenset({"quantization_config", "compression_config"})
"""The keys of `config.json` that say how a checkpoint is quantized."""

_BLOCK_BYTES = 1 << 20  # what is read at a time; stays in a core's cache until it is written
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_MAX_DIMENSIONS = 32  # NumPy's limit before 2.0
_MAX_SIZE = 2**100  # of a dimension or an offset; a message can still write out their product
_SHARD_NAME = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_MAX_LISTED = 3  # names in a message, of any number; the others are a count


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies; `offset` is that of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def rows(self, start: int, count: int) -> TensorInfo:
        """Returns where some of the tensor's rows lie, which follow one another in the file."""
        row_bytes = math.prod(self.shape[1:]) * ELEMENT_BYTES[self.dtype]
        return replace(self, shape=(count, *self.shape[1:]), offset=self.offset + start * row_bytes)


@dataclass(frozen=True)
class HFCheckpoint:
    """A Hugging Face folder whose files agree with one another; no weight has been read."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def brief(names: Sequence[str]) -> str:
    """Returns the first names for a message, and how many more there are."""
    num_more = len(names) - _MAX_LISTED
    listed = ", ".join(map(show, names[:_MAX_LISTED]))
    return f"{listed} and {num_more} more" if num_more > 0 else listed


def raw_dtype(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns the NumPy dtype that carries a safetensors dtype's elements."""
    return np.dtype(f"<u{ELEMENT_BYTES[dtype]}")


def read_blocks(info: TensorInfo) -> Iterator[RawArray]:
    """Yields a tensor in blocks of whole rows, of about 1 MiB; each overwrites the one before.

    The file is read, not mapped: mapped pages count as memory of the process, and their number
    grows with the file.
    """
    num_rows, *columns = info.shape
    row_bytes = math.prod(columns) * ELEMENT_BYTES[info.dtype]
    step = min(max(1, _BLOCK_BYTES // max(row_bytes, 1)), num_rows)
    buffer = np.empty((step, *columns), raw_dtype(info.dtype))
    with info.file.open("rb", buffering=0) as file:
        for row in range(0, num_rows, max(step, 1)):
            block = buffer[: num_rows - row]
            _read_at(file, info.offset + row * row_bytes, block)
            yield block


def _read_at(file: BinaryIO, offset: int, block: RawArray) -> None:
    data = block.reshape(-1).view(np.uint8).data
    while data:
        count = os.preadv(file.fileno(), [data], offset)
        if count == 0:
            raise CheckpointError(f"{file.name} became shorter while it was read; run again")
        data, offset = data[count:], offset + count


def _write_at(file: BinaryIO, offset: int, block: RawArray) -> None:
    data = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
    while data:
        count = os.pwrite(file.fileno(), data, offset)
        data, offset = data[count:], offset + count


def read_safetensors_header(path: Path, limits: FileLimits = FILE_LIMITS) -> dict[str, TensorInfo]:
    """Reads and checks the header of one safetensors file.

    Checked: the file is neither a Git LFS pointer nor truncated, and the tensors fill the data
    without hole or overlap. No more is allocated than the file is long.
    """
    with open_file(path) as file:
        file_bytes = path.stat().st_size
        start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in {path.parent}"
            )
        if file_bytes < 8:
            raise CheckpointError(f"{path} is truncated: {file_bytes} bytes; download it again")
        (header_bytes,) = struct.unpack("<Q", start[:8])
        if header_bytes > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is not a safetensors file: its header cannot be read")
        if header_bytes > file_bytes - 8:
            raise CheckpointError(
                f"{path} is truncated: its header has {header_bytes} bytes, the whole file "
                f"{file_bytes}; download it again"
            )
        fact = f"{path}: its header has {header_bytes} bytes"
        limits.check("max_safetensors_header_bytes", header_bytes, fact)
        file.seek(8)
        header = parse_json(file.read(header_bytes), f"{path} is not a safetensors file")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = {name: _tensor_info(path, name, entry, data_start) for name, entry in header.items()}
    end = data_start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if info.offset != end:
            raise CheckpointError(
                f"{path} is damaged: tensor {show(name)} begins at byte {info.offset}, "
                f"expected {end}"
            )
        end += info.num_bytes
    if end > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: its tensors need {end} bytes, the file has {file_bytes}; "
            "download it again"
        )
    if end < file_bytes:
        raise CheckpointError(f"{path} is damaged: {file_bytes - end} bytes follow its last tensor")
    return tensors


class SafetensorsWriter:
    """Writes one safetensors file: the header first, then rows of its tensors in any order.

    Several threads may write rows at once.
    """

    def __init__(self, file: BinaryIO, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Writes the header; `tensors` gives dtype and shape by name, in the order of the data."""
        self._file = file
        self._missing_bytes = 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, (dtype, shape) in tensors.items():
            start = self._missing_bytes
            self._missing_bytes += math.prod(shape) * ELEMENT_BYTES[dtype]
            offsets = [start, self._missing_bytes]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligned data can be mapped and used in place
        text = struct.pack("<Q", len(text)) + text
        _write_at(file, 0, np.frombuffer(text, np.uint8))
        self._tensors = {
            name: TensorInfo(
                dtype, tuple(shape), Path(file.name), len(text) + header[name]["data_offsets"][0]
            )
            for name, (dtype, shape) in tensors.items()
        }
        self._lock = threading.Lock()

    def write(self, name: str, array: RawArray) -> None:
        """Writes a whole tensor."""
        self._put(self._tensors[name], name, array)

    def write_rows(self, name: str, row: int, rows: RawArray) -> None:
        """Writes some rows of a tensor, the first of them at `row`; each row is written once."""
        info = self._tensors[name]
        assert row + len(rows) <= info.shape[0], name
        self._put(info.rows(row, len(rows)), name, rows)

    def _put(self, info: TensorInfo, name: str, array: RawArray) -> None:
        assert (raw_dtype(info.dtype), info.shape) == (array.dtype, array.shape), name
        _write_at(self._file, info.offset, array)
        with self._lock:
            self._missing_bytes -= array.nbytes

    def finish(self) -> None:
        """Asserts that every row of the header was written."""
        assert self._missing_bytes == 0


@contextmanager
def create_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> Iterator[SafetensorsWriter]:
    """Opens a new file for writing and checks at the end that it is whole."""
    with path.open("xb", buffering=0) as file:
        writer = SafetensorsWriter(file, tensors)
        yield writer
        writer.finish()


def checkpoint_files(folder: Path) -> tuple[Path, ...]:
    """Returns the files of a Hugging Face folder that decide what is converted."""
    small = (folder / CONFIG_NAME, folder / QUANT_CONFIG_NAME, folder / INDEX_NAME)
    return (*(path for path in small if is_there(path)), *_weight_files(folder))


def read_config(
    folder: Path, *, allow_quantized: bool = False, limits: FileLimits = FILE_LIMITS
) -> dict[str, Any]:
    """Reads `config.json`; refuses what is no plain checkpoint or would need remote code.

    allow_quantized lets pass what ModelOpt quantized, for a runtime that reads it as it is.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    adapter = folder / "adapter_config.json"
    if is_there(adapter):
        base = read_json(adapter, limits=limits).get("base_model_name_or_path")
        raise CheckpointError(
            f"{folder} is an adapter{f' for {show(base)}' if base else ''}, which is not "
            "supported; merge it into its base model and save the result"
        )
    if is_there(folder / QUANT_CONFIG_NAME) and not allow_quantized:
        raise CheckpointError(
            f"{folder} is already quantized ({QUANT_CONFIG_NAME}); "
            "use the one it was quantized from"
        )
    path = folder / CONFIG_NAME
    if not is_there(path):
        raise CheckpointError(f"{folder} has no config.json, so it is no Hugging Face checkpoint")
    config = read_json(path, limits=limits)
    if auto_map := config.get("auto_map"):
        classes = sorted(auto_map) if isinstance(auto_map, dict) else [str(auto_map)]
        raise CheckpointError(
            f"{path} asks for remote code (auto_map: {brief(classes)}), "
            "which specpipe never runs; use a checkpoint of a supported architecture"
        )
    return config


def open_checkpoint(
    folder: Path, *, allow_quantized: bool = False, limits: FileLimits = FILE_LIMITS
) -> HFCheckpoint:
    """Opens a Hugging Face folder after checking that its files are whole and agree.

    Every fault has its own message: no config, remote code, an adapter, pickles only, a missing or
    a surplus shard, an index that names other tensors than the shards hold, a Git LFS pointer, a
    truncated file.
    """
    config = read_config(folder, allow_quantized=allow_quantized, limits=limits)
    weights = _weight_files(folder)
    index = folder / INDEX_NAME
    if not is_there(index):
        tensors = read_safetensors_header(_only_file(folder, weights), limits)
        return HFCheckpoint(folder, config, tensors)

    weight_map = _read_weight_map(index, limits)
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, set()).add(name)
    for file, names in sorted(by_file.items()):
        if not is_there(folder / file):
            raise CheckpointError(
                f"{folder} lacks {show(file)}, which holds {len(names)} of its {len(weight_map)} "
                "tensors; the download seems incomplete, run it again"
            )
    surplus = [path.name for path in weights if path.name not in by_file]
    if surplus:
        raise CheckpointError(
            f"{folder} has {brief(surplus)}, which {INDEX_NAME} does not name; "
            "delete what does not belong to this checkpoint"
        )
    tensors = {}
    for file, names in sorted(by_file.items()):
        stored = read_safetensors_header(folder / file, limits)
        if absent := sorted(names - stored.keys()):
            raise CheckpointError(
                f"{index} is stale: {file} does not hold {brief(absent)}; "
                "download index and shards from one revision"
            )
        if unnamed := sorted(stored.keys() - names):
            raise CheckpointError(
                f"{index} is stale: it does not place {brief(unnamed)} in {file}; "
                "download index and shards from one revision"
            )
        tensors |= stored
    return HFCheckpoint(folder, config, tensors)


def _weight_files(folder: Path) -> list[Path]:
    """Returns `model.safetensors` and shards; `consolidated.safetensors` and so on are copies."""
    files = (path for path in folder.glob("*.safetensors") if is_there(path))
    return [folder / name for name in weights_among(path.name for path in files)]


def weights_among(names: Iterable[str]) -> list[str]:
    """Returns which safetensors files of a folder, by name, hold the weights that are read."""
    files = sorted(names)
    shards = [name for name in files if name == "model.safetensors" or _SHARD_NAME.fullmatch(name)]
    return shards or files


def check_no_pickles(folder: Path) -> None:
    """Refuses a folder whose weights are pickles only; one without any weights passes."""
    if not _weight_files(folder) and any(
        path.suffix.lower() in _PICKLE_SUFFIXES for path in folder.iterdir()
    ):
        _only_file(folder, ())


def _only_file(folder: Path, weights: Sequence[Path]) -> Path:
    """Returns the weights file of a folder without an index."""
    if len(weights) == 1:
        return weights[0]
    if weights:
        raise CheckpointError(
            f"{folder} has {len(weights)} safetensors files but no {INDEX_NAME}; "
            "the download seems incomplete, run it again"
        )
    pickles = sorted(
        path.name for path in folder.iterdir() if path.suffix.lower() in _PICKLE_SUFFIXES
    )
    if pickles:
        raise CheckpointError(
            f"{folder} holds its weights as pickles only ({brief(pickles)}), which can run code "
            "when they are read; save the model as safetensors"
        )
    raise CheckpointError(
        f"{folder} has no *.safetensors file, the only kind of weights that specpipe reads"
    )


def _read_weight_map(index: Path, limits: FileLimits) -> dict[str, str]:
    weight_map = read_json(index, limits=limits).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; download it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{index} places {show(name)} in {quoted(file)}, which is no file name"
            )
    return weight_map


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _damaged_entry(path, name, "is no object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise CheckpointError(
            f"{path}: tensor {show(name)} has dtype {show(dtype)}, which is not supported; "
            "use a checkpoint that is not quantized"
        )
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _damaged_entry(path, name, "has no valid shape or data_offsets")
    info = TensorInfo(dtype, tuple(shape), path, data_start + offsets[0])
    if offsets[1] - offsets[0] != info.num_bytes:
        raise CheckpointError(
            f"{path} is damaged: tensor {show(name)} of shape {show(shape)} and dtype {dtype} "
            f"needs {show(info.num_bytes)} bytes, its entry spans {show(offsets[1] - offsets[0])}"
        )
    return info


def _damaged_entry(path: Path, name: str, fault: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a safetensors file: its entry for {show(name)} {fault}")


def _are_counts(value: Any) -> bool:
    """Returns whether a value is a list of sizes or offsets within the limits of this module."""
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size <= _MAX_SIZE for size in value)
    )
