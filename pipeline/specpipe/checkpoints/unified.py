"""The unified checkpoint: TensorRT-LLM's own format, written rank by rank and merged back.

A folder of `config.json` and `rank{i}.safetensors`, i = pp_rank · tp_size + tp_rank. Layers are
numbered from 0 within their pipeline stage. Every runtime builds from this; `load_unified` gives
them whole tensors again, whatever the split was. Which tensors: unified_layout.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from specpipe.checkpoints.checkpoint import (
    CONFIG_NAME,
    ELEMENT_BYTES,
    RawArray,
    SafetensorsWriter,
    TensorInfo,
    create_safetensors,
    raw_dtype,
    read_blocks,
    read_safetensors_header,
)
from specpipe.checkpoints.row_jobs import JOB_BYTES, in_threads
from specpipe.checkpoints.rules import Part
from specpipe.checkpoints.unified_config import UnifiedConfig, read_unified_config
from specpipe.checkpoints.unified_layout import (
    UnifiedTensor,
    first_row,
    part_shape,
    piece_of,
    piece_shape,
    rank_shape,
    source_rows,
    stored_dtype,
    unified_tensors,
    whole_shape,
)
from specpipe.checkpoints.weight_values import rounded
from specpipe.errors import CheckpointError, SpecpipeError
from specpipe.machine.memory import disk_shortage
from specpipe.machine.own_json import write_object

ReadPart = Callable[[Part, int | None, int, int], Iterable[RawArray]]
"""Yields the rows of a part and a layer, from one row up to another, in blocks."""


@dataclass(frozen=True)
class RawTensor:
    """A tensor without its library.

    dtype  safetensors' name of it: "BF16", "F16", "F32", or of a quantized one "F8_E4M3", "I8"
    data   the elements as unsigned integers of that width; owned by the receiver, writable
    """

    dtype: str
    data: RawArray


def write_unified(out: Path, config: UnifiedConfig, read: ReadPart) -> None:
    """Writes a unified checkpoint into the empty folder `out`.

    `read` gives what it is made of, in blocks of whole rows in `stored_dtype`. It is called
    from several threads; each row is asked for once and written to every rank that holds it, so
    that no more is in memory than a block for each thread.
    """
    ranks = _rank_tensors(config)
    needed = sum(
        math.prod(shape) * ELEMENT_BYTES[dtype]
        for tensors in ranks
        for dtype, shape in tensors.values()
    )
    if (shortage := disk_shortage(out, needed)) is not None:
        raise SpecpipeError(f"{shortage} are needed for the unified checkpoint: make room")
    with ExitStack() as stack:
        writers = [
            stack.enter_context(create_safetensors(_rank_file(out, rank), tensors))
            for rank, tensors in enumerate(ranks)
        ]
        in_threads(
            lambda job: _copy(config, job, read, writers),
            list(_jobs(config)),
            lambda job: job.num_bytes,
        )
    # Last, so that a folder with a config.json has all its weights.
    write_object(out / CONFIG_NAME, config.plain())


def _rank_tensors(config: UnifiedConfig) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    """Returns dtype and shape of what each rank's file holds, by name."""
    tp_size = config.mapping.tp_size
    ranks: list[dict[str, tuple[str, tuple[int, ...]]]] = [
        {} for _ in range(config.mapping.world_size)
    ]
    for tensor in unified_tensors(config):
        stored = stored_dtype(config, tensor.rule), rank_shape(config, tensor.rule)
        for tp_rank in range(tp_size):
            ranks[tensor.pp_rank * tp_size + tp_rank][tensor.local_name] = stored
    return ranks


@dataclass(frozen=True)
class _Job:
    """Rows of one part, to be copied to the ranks.

    rank_row   the row of each rank's tensor at which its piece of the part begins
    num_bytes  of the rows, in one rank
    """

    tensor: UnifiedTensor
    part: Part
    rank_row: int
    start: int
    stop: int
    num_bytes: int


def _jobs(config: UnifiedConfig) -> Iterator[_Job]:
    for tensor in unified_tensors(config):
        element_bytes = ELEMENT_BYTES[stored_dtype(config, tensor.rule)]
        rank_row = 0
        for part in tensor.rule.parts:
            rows, *columns = part_shape(config, part)
            row_bytes = math.prod(columns) * element_bytes
            step = max(1, JOB_BYTES // row_bytes)
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                yield _Job(tensor, part, rank_row, start, stop, (stop - start) * row_bytes)
            rank_row += piece_shape(config, part)[0]


def _copy(
    config: UnifiedConfig, job: _Job, read: ReadPart, writers: list[SafetensorsWriter]
) -> None:
    tp_size = config.mapping.tp_size
    first = job.tensor.pp_rank * tp_size
    name, part = job.tensor.local_name, job.part
    row = job.start
    for block in read(part, job.tensor.layer, job.start, job.stop):
        for tp_rank, writer in enumerate(writers[first : first + tp_size]):
            rank_row, piece = piece_of(config, part, row, block, tp_rank)
            if len(piece):
                writer.write_rows(name, job.rank_row + rank_row, piece)
        row += len(block)
    rows, *columns = part_shape(config, part)
    if part.split == "vocab" and row == rows:  # the last job of the part adds the zero rows
        rank_rows = piece_shape(config, part)[0]
        for tp_rank, writer in enumerate(writers[first : first + tp_size]):
            used = min(max(rows - tp_rank * rank_rows, 0), rank_rows)
            padding = np.zeros((rank_rows - used, *columns), block.dtype)
            writer.write_rows(name, job.rank_row + used, padding)


class UnifiedCheckpoint:
    """A unified checkpoint, read as if it had one rank.

    Query, key and value rows stand one after the other in `qkv`, `lm_head` has `vocab_size` rows.
    Names count layers over the whole model.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the rank files and checks that they hold exactly the tensors of the config."""
        self.folder = folder
        self.config = read_unified_config(folder)
        self._tp_size = self.config.mapping.tp_size
        world_size = self.config.mapping.world_size
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

    def whole_file(self) -> Path | None:
        """Returns the file that holds all tensors as they are merged; None with several ranks."""
        return _rank_file(self.folder, 0) if len(self._ranks) == 1 else None

    def names(self) -> list[str]:
        """Returns the names of all tensors in the order of the forward pass."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a merged tensor."""
        return whole_shape(self.config, self._tensors[name].rule)

    def fixed_dtype(self, name: str) -> str | None:
        """Returns the dtype of a quantized weight or scale that has its own; else None."""
        return self._tensors[name].rule.dtype

    def keeps_float32(self, name: str) -> bool:
        """Says whether a tensor is computed with in float32 whatever an engine's dtype is."""
        return self._tensors[name].rule.parts[0].one_plus

    def tensor(self, name: str) -> RawTensor:
        """Reads one tensor from all ranks and merges it.

        What several ranks hold alike (norms, shared KV heads, padding) is compared, so that a rank
        file from another conversion is found.
        """
        dtype = stored_dtype(self.config, self._tensors[name].rule)
        merged = np.empty(self.shape(name), raw_dtype(dtype))
        if not self._merge(name, merged):
            raise CheckpointError(f"{self.folder}: the ranks disagree about {name}; convert again")
        return RawTensor(dtype, merged)

    def rounded(self, name: str, tensor: RawTensor, dtype: str) -> RawArray:
        """Returns what `tensor` read in another dtype, an engine's.

        CheckpointError names the Hugging Face weight that is NaN or infinite, there or in it.
        """
        wider = "bfloat16" if dtype == "F16" else "float32"
        cure = f"set engine.dtype to {wider}"
        return rounded(tensor.data, tensor.dtype, dtype, partial(self._source, name), cure=cure)

    def _source(self, name: str, index: tuple[int, ...]) -> str:
        """Names the element of a Hugging Face weight that one of a merged tensor was made from."""
        tensor = self._tensors[name]
        if any(part.content != "plain" for part in tensor.rule.parts):
            return f"{name}{list(index)}"
        row, *columns = index
        for part in tensor.rule.parts:
            num_rows = part_shape(self.config, part)[0]
            if row < num_rows:
                break
            row -= num_rows
        place = [source_rows(self.config, part)[1] + row, *columns]
        return f"{part.source.format(n=tensor.layer)}{place}"

    def holds(self, name: str, data: RawArray) -> bool:
        """Returns whether a tensor is this one on all ranks, without holding it in memory too."""
        return data.shape == self.shape(name) and self._merge(name, data, is_whole=True)

    def _merge(self, name: str, whole: RawArray, *, is_whole: bool = False) -> bool:
        """Joins the pieces of all ranks in `whole`, or only compares where it is whole already.

        Returns whether the pieces agree with one another and with `whole`.
        """
        tensor = self._tensors[name]
        first = tensor.pp_rank * self._tp_size
        row = rank_row = 0
        for part in tensor.rule.parts:
            rows, rank_rows = part_shape(self.config, part)[0], piece_shape(self.config, part)[0]
            place = _Place(self.config, part, whole[row : row + rows], rows if is_whole else 0)
            for tp_rank in range(self._tp_size):
                info = self._ranks[first + tp_rank][tensor.local_name]
                piece_row = 0
                for block in read_blocks(info.rows(rank_row, rank_rows)):
                    if not place.put(tp_rank, piece_row, block):
                        return False
                    piece_row += len(block)
            row += rows
            rank_row += rank_rows
        return True

    def _check_names(self) -> None:
        expected = _rank_tensors(self.config)
        for rank, tensors in enumerate(self._ranks):
            held = {name: (info.dtype, info.shape) for name, info in tensors.items()}
            for name in sorted(held.keys() | expected[rank].keys()):
                if held.get(name) != expected[rank].get(name):
                    raise CheckpointError(
                        f"{_rank_file(self.folder, rank)} does not fit its config.json: {name} is "
                        f"{held.get(name, 'missing')}, expected "
                        f"{expected[rank].get(name, 'nothing')}; convert again"
                    )


def load_unified(folder: Path) -> UnifiedCheckpoint:
    """Opens a unified checkpoint of any number of ranks."""
    return UnifiedCheckpoint(folder)


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.safetensors"


class _Place:
    """A part in the making, from pieces of all ranks, rank by rank."""

    def __init__(
        self, config: UnifiedConfig, part: Part, whole: RawArray, num_known_rows: int
    ) -> None:
        self._config = config
        self._part = part
        self._whole = whole
        self._num_known_rows = num_known_rows

    def put(self, tp_rank: int, row: int, block: RawArray) -> bool:
        """Puts in rows of a rank's piece; returns whether they equal those that are known."""
        if self._part.split == "columns":
            columns = block.shape[1]
            place = self._whole[:, tp_rank * columns : (tp_rank + 1) * columns]
            is_known = self._num_known_rows == len(self._whole)
            return _fill(place[row : row + len(block)], block, len(block) if is_known else 0)
        row += first_row(self._config, self._part, tp_rank)
        inside = block[: max(len(self._whole) - row, 0)]
        num_known_rows = min(max(self._num_known_rows - row, 0), len(inside))
        self._num_known_rows = max(self._num_known_rows, row + len(inside))
        padding = block[len(inside) :]
        return not padding.any() and _fill(
            self._whole[row : row + len(inside)], inside, num_known_rows
        )


def _fill(place: RawArray, rows: RawArray, num_known_rows: int) -> bool:
    """Copies all rows but the first ones, which are there; returns whether those are equal."""
    place[num_known_rows:] = rows[num_known_rows:]
    return np.array_equal(place[:num_known_rows], rows[:num_known_rows])
