"""A TensorRT network in the making: layers as calls that return tensors, with names.

It keeps what the library only points at, and knows the two ways of giving weights: constants
of the network, or inputs that are bound when the engine runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specpipe.errors import EngineBuildError

ITensor = Any
"""An ITensor of the library."""


class NetworkWeights(Protocol):
    """The tensors of a checkpoint in the dtype of the engine."""

    dtype: str

    def __contains__(self, name: object) -> bool: ...

    def dtype_of(self, name: str) -> str:
        """Returns the dtype of a tensor: the engine's, "float32", "float8_e4m3" or "int4"."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a shape that counts numbers, also where two of them share a byte."""

    def array(self, name: str) -> NDArray[Any]:
        """Returns elements as they lie in memory: bfloat16 as uint16, int4 two in a byte."""


class Graph:
    """A network and the library that it belongs to."""

    def __init__(
        self, trt: Any, network: Any, weights: NetworkWeights, *, weights_are_inputs: bool
    ):
        self.trt, self.network, self._weights = trt, network, weights
        self._weights_are_inputs = weights_are_inputs
        self._dtypes = {
            "float32": trt.DataType.FLOAT,
            "float16": trt.DataType.HALF,
            "bfloat16": trt.DataType.BF16,
            "float8_e4m3": trt.DataType.FP8,
            "int4": trt.DataType.INT4,
        }
        self.dtype = self._dtypes[weights.dtype]
        self.float32, self.int32, self.int64 = (
            trt.DataType.FLOAT,
            trt.DataType.INT32,
            trt.DataType.INT64,
        )
        self._scope: list[str] = []
        self._named: Counter[str] = Counter()
        self._alive: list[NDArray[Any]] = []
        self._tensors: dict[str, ITensor] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Puts a name before those of the layers made inside."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    def input(self, name: str, dtype: Any, shape: Sequence[int]) -> ITensor:
        """Adds an input; the profiles give the range of a size that is -1."""
        return self._checked(self.network.add_input(name, dtype, tuple(shape)), name)

    def output(self, tensor: ITensor, name: str) -> None:
        tensor.name = name
        self.network.mark_output(tensor)

    def has_weight(self, name: str) -> bool:
        return name in self._weights

    def weight(self, name: str, *, rank: int) -> ITensor:
        """Returns a tensor of the checkpoint, with axes of size 1 before its own up to `rank`."""
        if name not in self._tensors:
            shape = self._weights.shape(name)
            shape = (1,) * (rank - len(shape)) + shape
            dtype = self._dtypes[self._weights.dtype_of(name)]
            if self._weights_are_inputs:
                self._tensors[name] = self.input(name, dtype, shape)
            else:
                self._tensors[name] = self._constant(self._weights.array(name), dtype, name, shape)
        assert len(self._tensors[name].shape) == rank
        return self._tensors[name]

    def constant(self, values: Any, dtype: Any, name: str = "constant") -> ITensor:
        """Returns numbers that are part of the network, float32 or int64 as `dtype` says."""
        kind = {self.float32: np.float32, self.int64: np.int64, self.int32: np.int32}[dtype]
        return self._constant(np.ascontiguousarray(values, kind), dtype, name)

    def scalar(self, value: float, *, rank: int) -> ITensor:
        """Returns one float32 number as a tensor of `rank` axes."""
        return self.constant(np.full((1,) * rank, value), self.float32, "scalar")

    def _constant(
        self, array: NDArray[Any], dtype: Any, name: str, shape: tuple[int, ...] | None = None
    ) -> ITensor:
        shape = array.shape if shape is None else shape
        self._alive.append(array)
        weights = self.trt.Weights(dtype, array.ctypes.data, math.prod(shape))
        return self._added(self.network.add_constant(shape, weights), name)

    def round_fp8(self, x: ITensor, scale: ITensor) -> ITensor:
        """Returns x rounded to FP8 at a scale; a product that follows is taken in FP8."""
        layer = self.network.add_quantize(x, scale, self.trt.DataType.FP8)
        return self.dequantize(self._added(layer, "quantize"), scale)

    def dequantize(self, x: ITensor, scale: ITensor) -> ITensor:
        """Returns x · scale in the dtype of the engine.

        Scales of blocks of the last axis have fewer columns than x, which gives the block size.
        """
        return self._added(self.network.add_dequantize(x, scale, self.dtype), "dequantize")

    def cast(self, x: ITensor, dtype: Any) -> ITensor:
        if x.dtype == dtype:
            return x
        return self._added(self.network.add_cast(x, dtype), "cast")

    def add(self, a: ITensor, b: ITensor) -> ITensor:
        return self._elementwise(a, b, "SUM", "add")

    def multiply(self, a: ITensor, b: ITensor) -> ITensor:
        return self._elementwise(a, b, "PROD", "multiply")

    def _elementwise(self, a: ITensor, b: ITensor, operation: str, name: str) -> ITensor:
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self._added(self.network.add_elementwise(a, b, kind), name)

    def mean(self, x: ITensor) -> ITensor:
        """Returns the mean over the last axis, which stays with size 1."""
        last = 1 << (len(x.shape) - 1)
        kind = self.trt.ReduceOperation.AVG
        return self._added(self.network.add_reduce(x, kind, last, True), "mean")

    def reciprocal_sqrt(self, x: ITensor) -> ITensor:
        root = self._added(self.network.add_unary(x, self.trt.UnaryOperation.SQRT), "sqrt")
        return self._added(self.network.add_unary(root, self.trt.UnaryOperation.RECIP), "recip")

    def sigmoid(self, x: ITensor) -> ITensor:
        kind = self.trt.ActivationType.SIGMOID
        return self._added(self.network.add_activation(x, kind), "sigmoid")

    def matmul(self, x: ITensor, weight: ITensor) -> ITensor:
        """Returns x [..., in] times the transpose of weight [..., out, in]."""
        operation = self.trt.MatrixOperation
        layer = self.network.add_matrix_multiply(x, operation.NONE, weight, operation.TRANSPOSE)
        return self._added(layer, "matmul")

    def gather(self, x: ITensor, indices: ITensor) -> ITensor:
        """Returns the rows of x that the indices name."""
        return self._added(self.network.add_gather(x, indices, 0), "gather")

    def shape(self, x: ITensor) -> ITensor:
        return self._added(self.network.add_shape(x), "shape")

    def slice(self, x: ITensor, start: Sequence[int], size: ITensor) -> ITensor:
        """Returns the part of x from `start` on; `size` is a tensor, one number for each axis."""
        rank = len(x.shape)
        layer = self.network.add_slice(x, tuple(start), (1,) * rank, (1,) * rank)
        layer.set_input(2, size)
        return self._added(layer, "slice")

    def reshape(
        self,
        x: ITensor,
        shape: Sequence[int],
        *,
        before: Sequence[int] | None = None,
        after: Sequence[int] | None = None,
    ) -> ITensor:
        """Permutes axes, reshapes (0: the size is kept, -1: whatever is left), permutes again."""
        layer = self.network.add_shuffle(x)
        if before is not None:
            layer.first_transpose = self.trt.Permutation(list(before))
        layer.reshape_dims = tuple(shape)
        if after is not None:
            layer.second_transpose = self.trt.Permutation(list(after))
        return self._added(layer, "reshape")

    def rotary_embedding(
        self, x: ITensor, cos: ITensor, sin: ITensor, position_ids: ITensor, size: int
    ) -> ITensor:
        """Turns channels i and i + size / 2 of x [B, H, N, D] together, as their position says."""
        layer = self.network.add_rotary_embedding(x, cos, sin, False, size)
        layer.set_input(3, position_ids)
        return self._added(layer, "rotary_embedding")

    def update_kv_cache(self, cache: ITensor, update: ITensor, write_indices: ITensor) -> ITensor:
        """Writes update [B, H_kv, N, D] into the cache, in place."""
        mode = self.trt.KVCacheMode.LINEAR
        layer = self.network.add_kv_cache_update(cache, update, write_indices, mode)
        return self._added(layer, "kv_cache_update")

    def attention(self, query: ITensor, key: ITensor, value: ITensor, lengths: ITensor) -> ITensor:
        """Returns attention with unscaled scores.

        Query n of sequence b sees the first lengths[b] - N + n + 1 keys.
        """
        layer = self.network.add_attention_v2(
            query,
            key,
            value,
            self.trt.AttentionNormalizationOp.SOFTMAX,
            self.trt.CausalMaskKind.LOWER_RIGHT,
        )
        self._checked(layer, "attention")
        layer.key_value_lengths = lengths
        # Where the library has no fused kernel for these shapes it may use several.
        layer.decomposable = True
        layer.name = self._unique_name("attention")
        return layer.get_output(0)

    def _added(self, layer: Any, name: str) -> ITensor:
        self._checked(layer, name)
        layer.name = self._unique_name(name)
        return layer.get_output(0)

    def _name(self, name: str) -> str:
        return "/".join([*self._scope, name])

    def _unique_name(self, name: str) -> str:
        """Returns a name for a layer; the library takes each only once."""
        name = self._name(name)
        self._named[name] += 1
        return name if self._named[name] == 1 else f"{name}_{self._named[name]}"

    def _checked(self, added: Any, name: str) -> Any:
        if added is None:
            raise EngineBuildError(f"the library refused {self._name(name)}")
        return added


def kinds(network: Any) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Counts a network's layers by what they do, and by the dtype of their first output."""
    layers: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        layers[layer.type.name.lower()] = layers.get(layer.type.name.lower(), 0) + 1
        dtype = layer.get_output(0).dtype.name.lower()
        dtypes[dtype] = dtypes.get(dtype, 0) + 1
    return layers, dtypes
