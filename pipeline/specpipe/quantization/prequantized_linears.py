"""Linears as other tools store them quantized, read by outputs.

Layouts: prequantized.py. AWQ and GPTQ store by inputs, so their tensors pass by as a whole for any
outputs, of which so many are taken at a time that little is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from specpipe.checkpoints.checkpoint import (
    HFCheckpoint,
    TensorInfo,
    read_blocks,
)
from specpipe.checkpoints.formats import FORMATS, Content
from specpipe.checkpoints.unified_config import DTYPES, UnifiedConfig
from specpipe.checkpoints.weight_values import check_finite, in_tensor
from specpipe.errors import CheckpointError
from specpipe.quantization import numbers
from specpipe.quantization.huggingface import SUFFIXES
from specpipe.quantization.prequantized import CURE, Prequantized
from specpipe.quantization.tensors import TORCH_DTYPES, as_tensor, read_small

_CHUNK_BYTES = 32 << 20  # of int4 numbers that are unpacked at a time

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight numbers stands in each half byte of AWQ's int32, from the lowest on."""


class StoredLinear(Protocol):
    """One Hugging Face linear as it is stored."""

    names: frozenset[str]

    def shared(self, content: Content) -> Tensor:
        """Returns a scale [1] or [in]."""

    def rows(self, content: Content, start: int, stop: int) -> Iterator[Tensor]:
        """Yields what there is of some outputs: numbers as the unified checkpoint packs them, or
        scales."""


class ScaledLinear:
    """A weight stored by outputs, with scales beside it: ModelOpt and compressed-tensors."""

    def __init__(
        self,
        source: HFCheckpoint,
        scheme: Prequantized,
        prefix: str,
        size: tuple[int, int],
        config: UnifiedConfig,
    ) -> None:
        self._source = source
        self._prefix = prefix
        self._format = FORMATS[scheme.format]
        self._size = rows, columns = size
        self._dtype = TORCH_DTYPES[config.plain_dtype]
        self._rows_each = 2 if self._format.packs == "out" else 1
        packed_columns = columns // (2 if self._format.packs == "in" else 1)
        dtypes = {"I8", "U8"} if self._format.packs else {self._format.weight_dtype or ""}
        self._expect("weight", dtypes, (rows // self._rows_each, packed_columns))
        used = {f"{prefix}weight"}
        for scale in self._format.scales:
            name = prefix + SUFFIXES[scale.content]
            if scale.axes == "in" and name not in source.tensors:
                continue  # in the norm before it
            dtypes = {"F8_E4M3"} if scale.dtype == "F8_E4M3" else set(DTYPES.values())
            shapes: list[tuple[int, ...]] = [(), (1,)]
            if scale.axes == "in":
                shapes = [(columns,)]
            elif scale.axes == "out":
                shapes += [(rows,), (rows, 1)]
            elif scale.axes == "blocks":
                assert scheme.group_size is not None
                shapes = [(rows, columns // scheme.group_size)]
            self._expect(SUFFIXES[scale.content], dtypes, *shapes)
            used.add(name)
        self.names = frozenset(used)

    def _expect(self, suffix: str, dtypes: set[str], *shapes: tuple[int, ...]) -> None:
        _expect(self._source, self._prefix + suffix, dtypes, *shapes)

    def shared(self, content: Content) -> Tensor:
        name = self._prefix + SUFFIXES[content]
        if content != "prequant_scaling_factor":
            return one_number(self._source, name)
        if name not in self._source.tensors:
            return torch.ones(self._size[1], dtype=self._dtype)
        scales = read_small(self._source.tensors[name]).to(self._dtype)
        return _checked(self._source, name, scales)

    def rows(self, content: Content, start: int, stop: int) -> Iterator[Tensor]:
        name = self._prefix + SUFFIXES[content]
        info = self._source.tensors[name]
        if content == "quantized":
            first, count = start // self._rows_each, (stop - start) // self._rows_each
            for block in read_blocks(info.rows(first, count)):
                check_finite(block, info.dtype, in_tensor(f"{info.file}: {name}", first))
                yield as_tensor(block, info.dtype)
                first += len(block)
            return
        scale = self._format.scale(content)
        assert scale is not None, content
        if math.prod(info.shape) == 1:  # per_channel_scale of a weight that has one for all
            yield one_number(self._source, name).expand(stop - start)
            return
        for block in read_blocks(info.rows(start, stop - start)):
            values = as_tensor(block, info.dtype)
            if scale.axes == "out":
                values = values.float().reshape(-1)
            elif scale.dtype != "F8_E4M3":
                values = values.to(self._dtype)
            yield _checked(self._source, name, values, start)
            start += len(block)


class PackedLinear:
    """int4 numbers in int32, by inputs: AWQ and GPTQ."""

    def __init__(
        self,
        source: HFCheckpoint,
        scheme: Prequantized,
        prefix: str,
        size: tuple[int, int],
        config: UnifiedConfig,
    ) -> None:
        rows, columns = size
        assert scheme.group_size is not None
        self._source = source
        self._scheme = scheme
        self._num_columns = columns
        self._dtype = TORCH_DTYPES[config.plain_dtype]
        if rows % 8 or columns % 8 or columns % scheme.group_size:
            raise CheckpointError(
                f"{source.folder}: {prefix}qweight has {columns} inputs and {rows} outputs, which "
                f"neither 8 nor its group_size {scheme.group_size} may leave a rest of; {CURE}"
            )
        groups = columns // scheme.group_size
        by_inputs = (columns // 8, rows) if scheme.layout == "gptq" else (columns, rows // 8)
        shapes = {"qweight": by_inputs, "qzeros": (groups, rows // 8), "scales": (groups, rows)}
        infos = {}
        for suffix, shape in shapes.items():
            dtypes = set(DTYPES.values()) if suffix == "scales" else {"I32"}
            infos[suffix] = _expect(source, prefix + suffix, dtypes, shape)
        self._infos = infos
        self._name = prefix + "scales"
        self.names = frozenset(prefix + suffix for suffix in shapes)
        order = prefix + "g_idx"
        if order in source.tensors:
            _check_order(source, order, columns, scheme.group_size)
            self.names |= {order}

    def shared(self, content: Content) -> Tensor:
        assert content == "prequant_scaling_factor", content
        return torch.ones(self._num_columns, dtype=self._dtype)

    def rows(self, content: Content, start: int, stop: int) -> Iterator[Tensor]:
        if content == "weights_scaling_factor":
            yield self._scales(start, stop)
        elif content == "zero":
            yield (8 - self._zeros(start, stop)) * self._scales(start, stop).float()
        else:
            if FORMATS[self._scheme.format].scale("zero") is None:
                self._check_zeros(start, stop)
            step = max(8, _CHUNK_BYTES // self._num_columns // 8 * 8)
            for row in range(start, stop, step):
                yield numbers.pack_rows(self._numbers(row, min(row + step, stop)))

    def _numbers(self, start: int, stop: int) -> Tensor:
        """Returns the int4 numbers [rows, in] of some outputs, less 8."""
        if self._scheme.layout == "awq":
            return (self._unpack_columns("qweight", _AWQ_ORDER, start, stop) - 8).T
        packed = self._columns("qweight", start, stop)
        half_bytes = [packed >> 4 * n & 15 for n in range(8)]
        return (torch.stack(half_bytes, 1).flatten(0, 1).to(torch.int8) - 8).T

    def _zeros(self, start: int, stop: int) -> Tensor:
        """Returns the zero points [rows, groups] of some outputs."""
        order = _AWQ_ORDER if self._scheme.layout == "awq" else tuple(range(8))
        zeros = self._unpack_columns("qzeros", order, start, stop) + self._scheme.zero_offset
        return (zeros & 15).T  # AutoGPTQ's kernels add 1 within four bits

    def _check_zeros(self, start: int, stop: int) -> None:
        if bool((self._zeros(start, stop) != 8).any()):
            raise CheckpointError(
                f"{self._source.folder}: {self._name.removesuffix('scales')}qzeros has zero points "
                f"other than 8, but its config says that there are none; {CURE}"
            )

    def _scales(self, start: int, stop: int) -> Tensor:
        scales = self._columns("scales", start, stop).to(self._dtype)
        return _checked(self._source, self._name, scales).T

    def _unpack_columns(self, suffix: str, order: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Returns columns of a tensor of which eight stand in each int32, as int8."""
        first = start // 8
        packed = self._columns(suffix, first, -(-stop // 8))
        values = torch.empty((*packed.shape, 8), dtype=torch.int8)
        for half_byte, column in enumerate(order):
            values[:, :, column] = packed >> 4 * half_byte & 15
        return values.flatten(1)[:, start - 8 * first : stop - 8 * first]

    def _columns(self, suffix: str, start: int, stop: int) -> Tensor:
        """Reads some columns of a tensor; it passes by in blocks."""
        info = self._infos[suffix]
        columns = torch.empty((info.shape[0], stop - start), dtype=TORCH_DTYPES[info.dtype])
        row = 0
        for block in read_blocks(info):
            columns[row : row + len(block)] = as_tensor(block[:, start:stop], info.dtype)
            row += len(block)
        return columns


def _expect(
    source: HFCheckpoint, name: str, dtypes: set[str], *shapes: tuple[int, ...]
) -> TensorInfo:
    """Returns where a tensor lies; refuses one that is missing or of another kind."""
    info = source.tensors.get(name)
    if info is None:
        raise CheckpointError(
            f"{source.folder} lacks {name}, which a linear has that is quantized as its config "
            f"says; {CURE}"
        )
    if info.dtype not in dtypes or info.shape not in shapes:
        raise CheckpointError(
            f"{source.folder}: {name} is {info.dtype} {list(info.shape)}, expected "
            f"{' or '.join(sorted(dtypes))} {' or '.join(str(list(shape)) for shape in shapes)}; "
            + CURE
        )
    return info


def _check_order(source: HFCheckpoint, name: str, num_columns: int, group_size: int) -> None:
    """Refuses act-order: inputs that belong to another group than that of their place."""
    info = _expect(source, name, {"I32"}, (num_columns,))
    if not torch.equal(
        read_small(info), torch.arange(num_columns, dtype=torch.int32) // group_size
    ):
        raise CheckpointError(
            f"{source.folder}: {name} says that inputs are not in the order of their groups "
            f"(act-order), which no kernel of the engine reads; {CURE}"
        )


def one_number(source: HFCheckpoint, name: str) -> Tensor:
    """Reads a single number as [1], in float32."""
    info = source.tensors[name]
    if math.prod(info.shape) != 1 or info.dtype not in DTYPES.values():
        raise CheckpointError(
            f"{source.folder}: {name} is {info.dtype} {list(info.shape)}, expected one number; "
            + CURE
        )
    return _checked(source, name, read_small(info).float().reshape(1))


def _checked(source: HFCheckpoint, name: str, scales: Tensor, first_row: int = 0) -> Tensor:
    """Returns scales, in the dtype that they are used in; refuses what is no scale there."""
    values = scales.float()
    is_good = values.isfinite() & (values > 0)
    if not bool(is_good.all()):
        row, *rest_of_index = (~is_good).nonzero()[0].tolist()
        raise CheckpointError(
            f"{source.folder}: {name}{[first_row + row, *rest_of_index]} is the scale "
            f"{float(values[~is_good][0]):g} in {str(scales.dtype).removeprefix('torch.')}; every "
            "scale is above 0 and finite"
        )
    return scales
