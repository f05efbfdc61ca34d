"""The weights of an engine: a unified checkpoint's tensors in the dtype that it computes in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specpipe.checkpoints.checkpoint import ELEMENT_BYTES, RawArray, create_safetensors
from specpipe.checkpoints.quantized_rules import shares_embedding
from specpipe.checkpoints.unified import UnifiedCheckpoint
from specpipe.checkpoints.unified_config import DTYPES, UnifiedConfig
from specpipe.checkpoints.unified_layout import unified_tensors, whole_shape
from specpipe.errors import CheckpointError, EngineBuildError
from specpipe.progress import counted
from specpipe.runtimes.repository_layout import link_file

_EMBEDDING, _HEAD = "transformer.vocab_embedding.weight", "lm_head.weight"


class CheckpointWeights:
    """The weights of a checkpoint; each is read when it is asked for, and not kept here."""

    def __init__(self, role: str, checkpoint: UnifiedCheckpoint, dtype: str) -> None:
        """`dtype` is "float32", "bfloat16" or "float16"."""
        self.dtype = dtype
        self._role, self._checkpoint = role, checkpoint
        self._names = frozenset(checkpoint.names())
        self._check_tied()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def dtype_of(self, name: str) -> str:
        return _fixed_dtype(self._checkpoint.fixed_dtype(name)) or self.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        rows, *columns = self._checkpoint.shape(name)
        return (2 * rows if self.dtype_of(name) == "int4" else rows, *columns)

    def array(self, name: str) -> RawArray:
        """Reads one tensor; raises EngineBuildError for a number that the dtype cannot hold."""
        tensor = self._checkpoint.tensor(name)
        dtype = self.dtype_of(name)
        if dtype == "int4":
            return _pack_columns(tensor.data)
        stored_dtype = "F8_E4M3" if dtype == "float8_e4m3" else DTYPES[dtype]
        try:
            return self._checkpoint.rounded(name, tensor, stored_dtype)
        except CheckpointError as exc:
            raise EngineBuildError(f"{self._role}: {exc}") from exc

    def used(self) -> Iterator[str]:
        """Yields the names of what an engine reads: a tied head is the embedding."""
        is_tied = shares_embedding(self._checkpoint.config)
        return (name for name in self._checkpoint.names() if not (is_tied and name == _HEAD))

    def place(self, path: Path) -> None:
        """Puts them all into a safetensors file: the checkpoint's own, where that will do.

        A head that is tied stands in that one too, and is not read.
        """
        whole = self._checkpoint.whole_file()
        if whole is not None and self._checkpoint.config.dtype == self.dtype:
            link_file(whole, path)
            return
        header = {name: (DTYPES[self.dtype], self.shape(name)) for name in self.used()}
        num_bytes = {n: math.prod(s) * ELEMENT_BYTES[dtype] for n, (dtype, s) in header.items()}
        total = sum(num_bytes.values())
        with create_safetensors(path, header) as writer:
            for name in counted(header, total, "bytes", num_bytes.__getitem__):
                writer.write_rows(name, 0, self.array(name))

    def _check_tied(self) -> None:
        if not shares_embedding(self._checkpoint.config):
            return
        if not self._checkpoint.holds(_HEAD, self._checkpoint.tensor(_EMBEDDING).data):
            raise EngineBuildError(
                f"{self._role}: config.json says tie_word_embeddings, but {_HEAD} is not the "
                f"embedding in {self._checkpoint.folder}; convert again"
            )


class ShapesOnly:
    """The weights that a config names, without their numbers: a network gets them when it runs."""

    def __init__(self, config: UnifiedConfig, dtype: str) -> None:
        self.dtype = dtype
        self._shapes = {
            tensor.name: whole_shape(config, tensor.rule) for tensor in unified_tensors(config)
        }

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def dtype_of(self, name: str) -> str:
        return self.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def array(self, name: str) -> NDArray[Any]:
        raise AssertionError(f"{name} is bound when the engine runs")


def _fixed_dtype(stored: str | None) -> str | None:
    """Returns the engine's name of a dtype that a quantized checkpoint stores."""
    return {None: None, "F32": "float32", "F8_E4M3": "float8_e4m3", "I8": "int4"}[stored]


def _pack_columns(packed_rows: RawArray) -> RawArray:
    """Makes bytes of two int4 of one row, from bytes of two of one column; low half first.

    [out / 2, in] → [out, in / 2]: TensorRT-LLM's order to TensorRT's.
    """
    rows, columns = packed_rows.shape
    numbers = np.stack([packed_rows & 0xF, packed_rows >> 4], axis=1).reshape(2 * rows, columns)
    packed: RawArray = numbers[:, 0::2] | (numbers[:, 1::2] << 4)
    return packed
