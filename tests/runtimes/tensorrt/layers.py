"""What each kind of layer of a TensorRT network computes, in torch.

A reader takes a layer of the library, with its attributes readable, and returns a function from the
values of the layer's inputs to that of its output. Floating numbers are float32 in and out; the
interpreter rounds them where they are kept. Attributes and layers beyond a decoder's are refused.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "FP8": torch.float8_e4m3fn,
    # torch has no arithmetic on four bits: each element has a byte, or a float32, of its own.
    "INT4": torch.int8,
    "FP4": torch.float32,
}
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 of E2M1 mean; 8 to 15 are the same below zero."""

Operation = Callable[..., Tensor]


def _only(is_so: bool, what: str) -> None:
    if not is_so:
        raise NotImplementedError(f"{what} is not interpreted")


class _Weights(ctypes.Structure):
    """nvinfer1::Weights."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("values", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


def _constant(layer: Any) -> Operation:
    """Constant: the weights in the shape. They are copied, since the library only points at them.

    Elements of four bits lie in pairs, the first one in the low half of a byte.
    """
    value = _elements(layer.weights).reshape(tuple(layer.shape))
    return lambda: value


def _elements(weights: Any) -> Tensor:
    if isinstance(weights, np.ndarray):
        return torch.from_numpy(weights.copy())
    kind, bits = weights.dtype.name, {"INT4": 4, "FP4": 4, "FP8": 8, "BF16": 16}
    _only(kind in bits, f"a constant of type {kind}")
    # A Python object of pybind11 has the pointer to its C++ object behind the object's header.
    address = ctypes.c_void_p.from_address(id(weights) + object.__basicsize__).value
    fields = _Weights.from_address(address or 0)
    assert (fields.type, fields.count) == (int(weights.dtype), weights.size)
    num_bytes = (weights.size * bits[kind] + 7) // 8
    packed = (ctypes.c_uint8 * num_bytes).from_address(fields.values)
    stored = torch.frombuffer(packed, dtype=torch.uint8).clone()
    if bits[kind] >= 8:
        return stored.view(DTYPES[kind])
    codes = torch.stack([stored & 15, stored >> 4], dim=1).flatten()[: weights.size]
    if kind == "INT4":
        return torch.where(codes < 8, codes.to(torch.int8), codes.to(torch.int8) - 16)
    magnitudes = torch.tensor(_FP4_VALUES)[(codes & 7).long()]
    return torch.where(codes < 8, magnitudes, -magnitudes)


def _gather(layer: Any) -> Operation:
    """Gather, mode DEFAULT: slices along an axis, the shape of the indices in place of the axis."""
    _only(layer.mode.name == "DEFAULT", f"gather mode {layer.mode.name}")
    _only(layer.num_elementwise_dims == 0, "an elementwise dimension")
    axis = layer.axis

    def gather(data: Tensor, indices: Tensor) -> Tensor:
        rows = data.index_select(axis, indices.flatten().long())
        return rows.reshape(*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])

    return gather


def _matrix_multiply(layer: Any) -> Operation:
    """MatrixMultiply: the last two axes are matrices, transposed where asked; others broadcast."""
    kinds = (layer.op0.name, layer.op1.name)
    _only("VECTOR" not in kinds, "a product with vectors")
    first, second = (kind == "TRANSPOSE" for kind in kinds)
    return lambda a, b: torch.matmul(a.mT if first else a, b.mT if second else b)


def _divided(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


_ELEMENTWISE: Mapping[str, Operation] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "SUB": torch.sub,
    "DIV": _divided,
    "POW": torch.pow,
    "FLOOR_DIV": functools.partial(torch.div, rounding_mode="floor"),
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "XOR": torch.logical_xor,
    "EQUAL": torch.eq,
    "GREATER": torch.gt,
    "LESS": torch.lt,
}
_UNARY: Mapping[str, Operation] = {
    "EXP": torch.exp,
    "LOG": torch.log,
    "SQRT": torch.sqrt,
    "RECIP": torch.reciprocal,
    "ABS": torch.abs,
    "NEG": torch.neg,
    "SIN": torch.sin,
    "COS": torch.cos,
    "ERF": torch.erf,
    "NOT": torch.logical_not,
}
_ACTIVATIONS: Mapping[str, Operation] = {
    "SIGMOID": torch.sigmoid,
    "TANH": torch.tanh,
    "RELU": torch.relu,
    "GELU_ERF": torch.nn.functional.gelu,
    "GELU_TANH": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}
_REDUCTIONS: Mapping[str, Operation] = {
    "SUM": torch.sum,
    "AVG": torch.mean,
    "MAX": torch.amax,
    "MIN": torch.amin,
}


def _named(operations: Mapping[str, Operation], member: Any) -> Operation:
    _only(member.name in operations, f"{type(member).__name__} {member.name}")
    return operations[member.name]


def _elementwise(layer: Any) -> Operation:
    """ElementWise: both inputs have the same rank, axes of size 1 broadcast."""
    operation = _named(_ELEMENTWISE, layer.op)

    def elementwise(a: Tensor, b: Tensor) -> Tensor:
        assert a.ndim == b.ndim and a.dtype == b.dtype
        return operation(a, b)

    return elementwise


def _unary(layer: Any) -> Operation:
    return _named(_UNARY, layer.op)


def _activation(layer: Any) -> Operation:
    return _named(_ACTIVATIONS, layer.type)


def _axes(bits: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(bits.bit_length()) if bits >> axis & 1)


def _reduce(layer: Any) -> Operation:
    """Reduce: over the axes whose bits are set."""
    operation, axes, keeps = _named(_REDUCTIONS, layer.op), _axes(layer.axes), layer.keep_dims
    return lambda x: operation(x, dim=axes, keepdim=keeps)


def _softmax(layer: Any) -> Operation:
    """SoftMax: over the one axis whose bit is set."""
    (axis,) = _axes(layer.axes)
    return lambda x: torch.softmax(x, axis)


def _cast(layer: Any) -> Operation:
    """Cast: what every layer does to its output. Floating numbers become integers toward zero."""
    return lambda x: x


def _shuffle(layer: Any) -> Operation:
    """Shuffle: transpose, reshape, transpose. Size 0: as it was; -1: what is left."""
    _only(layer.num_inputs == 1, "a shape that is an input")
    first, second = tuple(layer.first_transpose), tuple(layer.second_transpose)
    reshape_dims = layer.reshape_dims
    zero_keeps = layer.zero_is_placeholder

    def shuffle(x: Tensor) -> Tensor:
        x = x.permute(first[: x.ndim])
        if reshape_dims is not None:
            sizes = enumerate(reshape_dims)
            x = x.reshape([x.shape[i] if zero_keeps and not size else size for i, size in sizes])
        return x.permute(second[: x.ndim])

    return shuffle


def _slice(layer: Any) -> Operation:
    """Slice: `size` elements of each axis, from `start`, `stride` apart.

    Inputs 1 to 3, start, size and stride, take the place of the attributes.
    """
    _only(layer.mode.name == "STRICT_BOUNDS", f"slice mode {layer.mode.name}")
    _only(layer.num_inputs <= 4 and layer.axes is None, "a slice over chosen axes")
    rest = [layer.get_input(i) for i in range(1, layer.num_inputs)]
    fixed = [
        () if i < len(rest) and rest[i] is not None else tuple(getattr(layer, name))
        for i, name in enumerate(("start", "shape", "stride"))
    ]

    def sliced(x: Tensor, *tensors: Tensor | None) -> Tensor:
        told = list(fixed)
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                told[i] = tuple(tensor.tolist())
        starts, sizes, strides = told
        for axis, (start, size, stride) in enumerate(zip(starts, sizes, strides, strict=True)):
            last = start + (size - 1) * stride
            if start < 0 or size < 0 or (size and not 0 <= last < x.shape[axis]):
                raise IndexError(f"axis {axis} has {x.shape[axis]} elements, not {last + 1}")
            x = x.index_select(axis, start + stride * torch.arange(size))
        return x

    return sliced


def _shape(layer: Any) -> Operation:
    return lambda x: torch.tensor(x.shape)


def _rotary_embedding(layer: Any) -> Operation:
    """RotaryEmbedding of x [b, d, s, h], with cosines and sines of half of the channels turned.

    Channels i and i + r / 2 turn together, or 2i and 2i + 1 if interleaved; r is
    `rotary_embedding_dim`, 0: all. Without position ids the tables are [b, s, r / 2], with them
    [positions, r / 2]. "Working with Transformers", section "Rotary Position Embedding".
    """
    is_interleaved, size = layer.interleaved, layer.rotary_embedding_dim

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is not None:
            cos, sin = cos[position_ids.long()], sin[position_ids.long()]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        turned = size or x.shape[-1]
        channels, rest = x[..., :turned], x[..., turned:]
        if is_interleaved:
            real, imaginary = channels[..., 0::2], channels[..., 1::2]
        else:
            real, imaginary = channels.chunk(2, dim=-1)
        parts = (real * cos - imaginary * sin, real * sin + imaginary * cos)
        joined = torch.stack(parts, dim=-1).flatten(-2) if is_interleaved else torch.cat(parts, -1)
        return torch.cat([joined, rest], dim=-1)

    return rotate


def _kv_cache_update(layer: Any) -> Operation:
    """KVCacheUpdate, mode LINEAR: output[i, :, writeIndices[i] + s, :] = update[i, :, s, :].

    The output shares its memory with the cache, so the input tensor itself is written.
    writeIndices[i] + sequenceLength must not exceed the cache's length.
    """
    _only(layer.cache_mode.name == "LINEAR", f"cache mode {layer.cache_mode.name}")
    _only(layer.update_form.name == "PADDED_BHND", f"update form {layer.update_form.name}")

    def update_cache(cache: Tensor, update: Tensor, write_indices: Tensor) -> Tensor:
        for row, start in enumerate(write_indices.tolist()):
            stop = start + update.shape[2]
            if not 0 <= start <= stop <= cache.shape[2]:
                raise IndexError(f"positions {start} to {stop} of {cache.shape[2]}")
            cache[row, :, start:stop] = update[row]
        return cache

    return update_cache


def _attention(layer: Any) -> Operation:
    """Attention of query [b, d_q, s_q, h] over key and value [b, d_kv, s_kv, h].

    softmax(Q · Kᵀ, masked) · V; scores are not scaled; d_q / d_kv consecutive query heads share a
    key head. With `key_value_lengths`, s_kv of each sequence is its length, and what the tensors
    hold after it is not seen. NONE: every key is seen; UPPER_LEFT: query i sees keys j <= i;
    LOWER_RIGHT: j <= i + (s_kv - s_q) (`CausalMaskKind` in the library's help). A mask of booleans
    tells what is seen, one of numbers is added to the scores.

    That a sequence's length takes the place of s_kv in LOWER_RIGHT is how we read it; no page that
    we found says it in so many words.
    """
    attention = layer.attention
    kind = attention.causal_kind.name
    _only(attention.norm_op.name == "SOFTMAX", f"normalization {attention.norm_op.name}")
    _only(attention.normalization_quantize_scale is None, "a quantized softmax")
    for form in (attention.query_form.name, attention.key_value_form.name):
        _only(form == "PADDED_BHND", f"layout {form}")
    assert kind in ("NONE", "UPPER_LEFT", "LOWER_RIGHT")

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        group = query.shape[1] // key.shape[1]
        assert query.shape[1] == group * key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        num_queries, num_keys = query.shape[2], key.shape[2]
        if lengths is None:
            lengths = torch.full((query.shape[0],), num_keys)
        ends = lengths.view(-1, 1, 1, 1)  # per sequence: a query sees keys before its end
        if kind != "NONE":
            diagonal = ends - num_queries if kind == "LOWER_RIGHT" else torch.zeros_like(ends)
            ends = torch.minimum(ends, diagonal + torch.arange(num_queries).view(-1, 1) + 1)
        scores = query @ key.mT
        scores = scores.masked_fill(torch.arange(num_keys) >= ends, -torch.inf)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        return torch.softmax(scores, dim=-1) @ value

    return attend


def _concatenation(layer: Any) -> Operation:
    axis = layer.axis
    return lambda *parts: torch.cat(parts, dim=axis)


def _select(layer: Any) -> Operation:
    return torch.where


def _spread(scale: Tensor, x: Tensor, axis: int) -> Tensor:
    """Gives each element of x its scale.

    A scale is one number, one for each index of an axis, or one for each block: of x's rank, each
    size of x a multiple of its own ("Quantize" and "Dequantize", section "Shape Information").
    """
    if scale.numel() == 1:
        return scale.reshape([1] * x.ndim)
    if scale.ndim == 1:
        return scale.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
    for dim, (size, whole) in enumerate(zip(scale.shape, x.shape, strict=True)):
        assert whole % size == 0
        scale = scale.repeat_interleave(whole // size, dim=dim)
    return scale


def _quantize(layer: Any) -> Operation:
    """Quantize: x / scale, clipped to the type's range, rounded to the nearest, ties to even.

    "Quantization Schemes" in NVIDIA's documentation: int8 -128 to 127, int4 -8 to 7,
    float8 (E4M3) -448 to 448, float4 (E2M1) -6 to 6. A zero point must be zero.
    """
    kind, axis = layer.to_type.name, layer.axis
    ranges = {"INT8": (-128, 127), "INT4": (-8, 7), "FP8": (-448, 448), "FP4": (-6, 6)}
    _only(kind in ranges, f"quantizing to {kind}")

    def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        assert zero_point is None or not zero_point.any()
        scaled = (x / _spread(scale, x, axis)).clamp(*ranges[kind])
        if kind == "FP8":
            return scaled  # rounded where it is kept
        return _nearest_fp4(scaled) if kind == "FP4" else scaled.round()

    return quantize


def _nearest_fp4(x: Tensor) -> Tensor:
    """Rounds to the values of E2M1; a tie goes to the even code."""
    values = torch.tensor(_FP4_VALUES)
    codes = torch.bucketize(x.abs(), (values[:-1] + values[1:]) / 2)
    is_tie = torch.isin(x.abs(), (values[:-1] + values[1:]) / 2)
    return values[codes + (is_tie & (codes % 2 == 1))] * x.sign()


def _dequantize(layer: Any) -> Operation:
    """Dequantize: x · scale. A zero point must be zero."""
    axis = layer.axis

    def dequantize(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        assert zero_point is None or not zero_point.any()
        return x.float() * _spread(scale, x, axis)

    return dequantize


KINDS: Mapping[str, tuple[str, Callable[[Any], Operation]]] = {
    "CONSTANT": ("IConstantLayer", _constant),
    "GATHER": ("IGatherLayer", _gather),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", _matrix_multiply),
    "ELEMENTWISE": ("IElementWiseLayer", _elementwise),
    "UNARY": ("IUnaryLayer", _unary),
    "ACTIVATION": ("IActivationLayer", _activation),
    "REDUCE": ("IReduceLayer", _reduce),
    "SOFTMAX": ("ISoftMaxLayer", _softmax),
    "CAST": ("ICastLayer", _cast),
    "SHUFFLE": ("IShuffleLayer", _shuffle),
    "SLICE": ("ISliceLayer", _slice),
    "SHAPE": ("IShapeLayer", _shape),
    "ROTARY_EMBEDDING": ("IRotaryEmbeddingLayer", _rotary_embedding),
    "KV_CACHE_UPDATE": ("IKVCacheUpdateLayer", _kv_cache_update),
    "ATTENTION_OUTPUT": ("IAttentionOutputLayer", _attention),
    "CONCATENATION": ("IConcatenationLayer", _concatenation),
    "SELECT": ("ISelectLayer", _select),
    "QUANTIZE": ("IQuantizeLayer", _quantize),
    "DEQUANTIZE": ("IDequantizeLayer", _dequantize),
}
"""By the library's LayerType: the class that shows its attributes, and what reads them."""
