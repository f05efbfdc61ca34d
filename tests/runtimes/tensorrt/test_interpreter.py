"""Each layer kind in a network of its own, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx as trt
import torch

from tests.runtimes.tensorrt.interpreter import Interpreter

FLOAT, HALF, BF16 = trt.DataType.FLOAT, trt.DataType.HALF, trt.DataType.BF16
INT32, INT64, BOOL = trt.DataType.INT32, trt.DataType.INT64, trt.DataType.BOOL


class HandMade:
    """A network of a few layers, each told as the library's own call."""

    def __init__(self) -> None:
        self._builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.network = self._builder.create_network(flag)
        self._alive: list[Any] = []

    def input(self, name: str, shape: Sequence[int], dtype: Any = FLOAT) -> Any:
        return self.network.add_input(name, dtype, tuple(shape))

    def constant(
        self, values: Any, dtype: Any = FLOAT, *, shape: Sequence[int] | None = None
    ) -> Any:
        """Adds a constant; `values` as they lie in memory for a type that NumPy has not."""
        plain = {FLOAT: np.float32, HALF: np.float16, INT32: np.int32, INT64: np.int64}
        array = np.array(values, plain.get(dtype))
        self._alive.append(array)
        shape = array.shape if shape is None else tuple(shape)
        weights = trt.Weights(dtype, array.ctypes.data, math.prod(shape))
        return self.network.add_constant(shape, weights).get_output(0)

    def run(self, made: Any, dtype: Any = None, **inputs: Any) -> Any:
        """Makes a layer, or an attention, the network's output and returns what comes out."""
        made.get_output(0).name = "out"
        self.network.mark_output(made.get_output(0))
        interpreter = Interpreter(trt, self.network, dtype=dtype)
        (out,) = interpreter.run(inputs).values()
        return out


@pytest.fixture
def net() -> Iterator[HandMade]:
    yield HandMade()


def floats(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.float32)


def ints(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (FLOAT, [1.5, -2.0], [1.5, -2.0]),
        (HALF, [1.5, -2.0], [1.5, -2.0]),
        (INT64, [1, -(2**40)], [1, -(2**40)]),
        (BF16, np.array([0x3FC0, 0xC000], np.uint16), [1.5, -2.0]),
        (trt.DataType.FP8, np.array([0x3C, 0xC0], np.uint8), [1.5, -2.0]),
        (trt.DataType.INT8, np.array([3, -128], np.int8), [3, -128]),
        # The first element is the low half: 7 and -8, 1 and -1.
        (trt.DataType.INT4, np.array([0x87, 0xF1], np.uint8), [7, -8, 1, -1]),
        # E2M1: 7 is 6, 8 + 7 is -6, 1 is 0.5, 5 is 3.
        (trt.DataType.FP4, np.array([0xF7, 0x51], np.uint8), [6.0, -6.0, 0.5, 3.0]),
    ],
    ids=str,
)
def test_constant(net: HandMade, dtype: Any, values: Any, expected: list[float]) -> None:
    constant = net.constant(values, dtype, shape=(len(expected),))
    index = net.input("index", (-1,), INT32)
    layer = net.network.add_gather(constant, index, 0)
    reverse = torch.arange(len(expected) - 1, -1, -1, dtype=torch.int32)
    assert net.run(layer, index=reverse).float().tolist() == expected[::-1]


def test_gather_puts_the_indices_in_place_of_the_axis(net: HandMade) -> None:
    data, indices = net.input("data", (2, 3)), net.input("indices", (1, 2), INT32)
    layer = net.network.add_gather(data, indices, 1)
    out = net.run(layer, data=floats([1, 2, 3], [4, 5, 6]), indices=ints([2, 0]))
    assert out.tolist() == [[[3, 1]], [[6, 4]]]


def test_matrix_multiply(net: HandMade) -> None:
    operation = trt.MatrixOperation
    x, weight = net.input("x", (1, -1, 2)), net.constant([[[1, 2], [3, 4], [5, 6]]])
    layer = net.network.add_matrix_multiply(x, operation.NONE, weight, operation.TRANSPOSE)
    out = net.run(layer, x=floats([[1, 10], [0, 1]]))
    assert out.tolist() == [[[21, 43, 65], [2, 4, 6]]]


def test_matrix_multiply_transposes_the_first_too(net: HandMade) -> None:
    operation = trt.MatrixOperation
    a, b = net.input("a", (2, 1)), net.input("b", (2, 2))
    layer = net.network.add_matrix_multiply(a, operation.TRANSPOSE, b, operation.NONE)
    assert net.run(layer, a=floats([2], [3]), b=floats([1, 10], [100, 1000])).tolist() == [
        [302, 3020]
    ]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("SUM", [[3, 1], [0, -2]]),
        ("PROD", [[2, -2], [-16, -8]]),
        ("SUB", [[-1, -3], [-8, -6]]),
        ("DIV", [[0.5, -0.5], [-1, -2]]),
        ("MAX", [[2, 2], [4, 2]]),
        ("MIN", [[1, -1], [-4, -4]]),
    ],
)
def test_elementwise(net: HandMade, operation: str, expected: list[Any]) -> None:
    a, b = net.input("a", (2, 2)), net.input("b", (2, 2))
    layer = net.network.add_elementwise(a, b, getattr(trt.ElementWiseOperation, operation))
    out = net.run(layer, a=floats([1, -1], [-4, -4]), b=floats([2, 2], [4, 2]))
    assert out.tolist() == expected


def test_elementwise_broadcasts_axes_of_size_1(net: HandMade) -> None:
    a, b = net.input("a", (2, 2)), net.constant([[10.0, 100.0]])
    layer = net.network.add_elementwise(a, b, trt.ElementWiseOperation.PROD)
    assert net.run(layer, a=floats([1, 2], [3, 4])).tolist() == [[10, 200], [30, 400]]


def test_elementwise_division_of_integers(net: HandMade) -> None:
    a, b = net.input("a", (2,), INT32), net.input("b", (2,), INT32)
    layer = net.network.add_elementwise(a, b, trt.ElementWiseOperation.FLOOR_DIV)
    assert net.run(layer, a=ints(-7, 7), b=ints(2, 2)).tolist() == [-4, 3]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("SQRT", [0.5, 3]),
        ("RECIP", [4, 1 / 9]),
        ("NEG", [-0.25, -9]),
        ("EXP", [1.2840254, 8103.0839]),
        ("LOG", [-1.3862944, 2.1972246]),
    ],
)
def test_unary(net: HandMade, operation: str, expected: list[float]) -> None:
    layer = net.network.add_unary(net.input("x", (2,)), getattr(trt.UnaryOperation, operation))
    assert net.run(layer, x=floats(0.25, 9)).tolist() == pytest.approx(expected, rel=1e-6)


def test_sigmoid(net: HandMade) -> None:
    layer = net.network.add_activation(net.input("x", (3,)), trt.ActivationType.SIGMOID)
    out = net.run(layer, x=floats(0, math.log(3), -math.log(3)))
    assert out.tolist() == pytest.approx([0.5, 0.75, 0.25])


@pytest.mark.parametrize(
    ("operation", "axes", "keeps", "expected"),
    [
        ("AVG", 0b10, True, [[2], [6]]),
        ("SUM", 0b01, False, [6, 10]),
        ("MAX", 0b11, True, [[7]]),
    ],
)
def test_reduce(net: HandMade, operation: str, axes: int, keeps: bool, expected: Any) -> None:
    kind = getattr(trt.ReduceOperation, operation)
    layer = net.network.add_reduce(net.input("x", (2, 2)), kind, axes, keeps)
    assert net.run(layer, x=floats([1, 3], [5, 7])).tolist() == expected


def test_softmax(net: HandMade) -> None:
    layer = net.network.add_softmax(net.input("x", (2, 2)))
    layer.axes = 0b10
    out = net.run(layer, x=floats([0, math.log(3)], [7, 7]))
    assert out.flatten().tolist() == pytest.approx([0.25, 0.75, 0.5, 0.5])


def test_cast_rounds_to_the_nearest(net: HandMade) -> None:
    """bfloat16 has seven bits of fraction: 1 + 2^-8 lies between 1 and 1 + 2^-7, and 1 is even."""
    layer = net.network.add_cast(net.input("x", (3,)), BF16)
    out = net.run(layer, x=floats(1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7))
    assert (out.dtype, out.tolist()) == (torch.bfloat16, [1, 1 + 2**-6, 1 + 2**-7])


def test_cast_to_a_half_type_does_nothing_in_float32(net: HandMade) -> None:
    layer = net.network.add_cast(net.input("x", (2,)), BF16)
    out = net.run(layer, torch.float32, x=floats(1 + 2**-8, 1e30))
    assert (out.dtype, out.tolist()) == (torch.float32, floats(1 + 2**-8, 1e30).tolist())


def test_cast_to_integers_goes_toward_zero(net: HandMade) -> None:
    layer = net.network.add_cast(net.input("x", (2,)), INT32)
    assert net.run(layer, torch.float32, x=floats(1.9, -1.9)).tolist() == [1, -1]


def test_every_output_is_rounded_to_the_type_of_the_network(net: HandMade) -> None:
    """2048 + 1 is not a float16, and 2049 - 2048 is then 0; in float32 it is 1."""
    a, b = net.input("a", (1,), HALF), net.input("b", (1,), HALF)
    total = net.network.add_elementwise(a, b, trt.ElementWiseOperation.SUM).get_output(0)
    layer = net.network.add_elementwise(total, a, trt.ElementWiseOperation.SUB)
    half = {"a": torch.tensor([2048.0]).half(), "b": torch.tensor([1.0]).half()}
    assert net.run(layer, **half).tolist() == [0]
    in_float32 = Interpreter(trt, net.network, dtype=torch.float32)
    assert in_float32.run({name: x.float() for name, x in half.items()})["out"].tolist() == [1]


def test_matrix_products_of_halves_are_summed_in_float32(net: HandMade) -> None:
    """2048 + 1 + 1 is 2050 if only the sum is rounded, 2048 if each step is."""
    a, b = net.input("a", (1, 3), HALF), net.input("b", (3, 1), HALF)
    none = trt.MatrixOperation.NONE
    layer = net.network.add_matrix_multiply(a, none, b, none)
    ones = torch.ones(3, 1).half()
    assert net.run(layer, a=torch.tensor([[2048.0, 1, 1]]).half(), b=ones).tolist() == [[2050]]


def test_shuffle_transposes_reshapes_and_transposes_again(net: HandMade) -> None:
    layer = net.network.add_shuffle(net.input("x", (2, 3, 2)))
    layer.first_transpose = trt.Permutation([1, 0, 2])  # [3, 2, 2]
    layer.reshape_dims = (0, -1)  # [3, 4]
    layer.second_transpose = trt.Permutation([1, 0])
    out = net.run(layer, x=torch.arange(12.0).reshape(2, 3, 2))
    assert out.tolist() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]


def test_slice_with_a_size_that_is_computed(net: HandMade) -> None:
    layer = net.network.add_slice(net.input("x", (3, 3)), (1, 0), (1, 1), (1, 2))
    layer.set_input(2, net.input("size", (2,), INT64))
    x = floats([1, 2, 3], [4, 5, 6], [7, 8, 9])
    assert net.run(layer, x=x, size=torch.tensor([2, 2])).tolist() == [[4, 6], [7, 9]]


def test_slice_out_of_bounds(net: HandMade) -> None:
    layer = net.network.add_slice(net.input("x", (-1,)), (1,), (2,), (1,))
    with pytest.raises(RuntimeError, match="axis 0 has 2 elements, not 3"):
        net.run(layer, x=floats(1, 2))


def test_shape(net: HandMade) -> None:
    out = net.run(net.network.add_shape(net.input("x", (-1, 3))), x=torch.zeros(5, 3))
    assert (out.dtype, out.tolist()) == (torch.int64, [5, 3])


@pytest.mark.parametrize(
    ("interleaved", "size", "expected"),
    [
        # A quarter turn takes (a, b) to (-b, a); the second pair is turned by nothing.
        (False, 0, [-3, 2, 1, 4]),
        (True, 0, [-2, 1, 3, 4]),
        (False, 2, [-2, 1, 3, 4]),  # channels 2 and 3 are left alone
    ],
)
def test_rotary_embedding(
    net: HandMade, interleaved: bool, size: int, expected: list[float]
) -> None:
    columns = slice(0, size // 2 or None)
    cos = net.constant(np.array([[9, 9], [9, 9], [0, 1]])[:, columns])
    sin = net.constant(np.array([[9, 9], [9, 9], [1, 0]])[:, columns])
    x = net.input("x", (1, 1, 1, 4))
    layer = net.network.add_rotary_embedding(x, cos, sin, interleaved, size)
    layer.set_input(3, net.input("position_ids", (1, 1), INT32))
    out = net.run(layer, x=floats([[[1, 2, 3, 4]]]), position_ids=ints([2]))
    assert out.flatten().tolist() == expected


def test_rotary_embedding_without_position_ids(net: HandMade) -> None:
    """The tables then have a row for each token of each sequence."""
    x, cos, sin = net.input("x", (1, 2, 2, 2)), net.input("c", (1, 2, 1)), net.input("s", (1, 2, 1))
    layer = net.network.add_rotary_embedding(x, cos, sin, False, 0)
    out = net.run(
        layer,
        x=floats([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
        c=floats([[1], [0]]),
        s=floats([[0], [1]]),
    )
    assert out.tolist() == [[[[1, 2], [-4, 3]], [[5, 6], [-8, 7]]]]


def add_kv_cache_update(net: HandMade) -> Any:
    cache, update = net.input("cache", (-1, 1, 4, 1)), net.input("update", (-1, 1, -1, 1))
    write_indices = net.input("write_indices", (-1,), INT32)
    mode = trt.KVCacheMode.LINEAR
    return net.network.add_kv_cache_update(cache, update, write_indices, mode)


def test_kv_cache_update_writes_into_the_input(net: HandMade) -> None:
    cache = torch.zeros(3, 1, 4, 1)
    update = floats([[[1], [2]]], [[[3], [4]]])
    out = net.run(
        add_kv_cache_update(net), cache=cache[1:], update=update, write_indices=ints(2, 1)
    )
    assert cache.squeeze().tolist() == [[0, 0, 0, 0], [0, 0, 1, 2], [0, 3, 4, 0]]
    assert out.data_ptr() == cache[1:].data_ptr()


def test_kv_cache_update_past_the_end(net: HandMade) -> None:
    inputs = {"cache": torch.zeros(1, 1, 4, 1), "update": torch.zeros(1, 1, 2, 1)}
    with pytest.raises(RuntimeError, match="positions 3 to 5 of 4"):
        net.run(add_kv_cache_update(net), **inputs, write_indices=ints(3))


def add_attention(net: HandMade, kind: str, shape: Sequence[int] = (1, 1, 2, 1)) -> Any:
    query = net.input("query", shape)
    key, value = net.input("key", (shape[0], 1, 4, 1)), net.input("value", (shape[0], 1, 4, 1))
    norm = trt.AttentionNormalizationOp.SOFTMAX
    mask = getattr(trt.CausalMaskKind, kind)
    return net.network.add_attention_v2(query, key, value, norm, mask)


VALUES = floats([[[1], [10], [100], [1000]]])
"""Under equal scores the output is the mean of the values seen, which tells which those are."""


def equal_scores(batch: int = 1, heads: int = 1, queries: int = 2) -> dict[str, Any]:
    return {
        "query": torch.zeros(batch, heads, queries, 1),
        "key": torch.ones(batch, 1, 4, 1),
        "value": VALUES.expand(batch, 1, 4, 1),
    }


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NONE", [1111 / 4, 1111 / 4]),
        ("UPPER_LEFT", [1, 11 / 2]),
        ("LOWER_RIGHT", [111 / 3, 1111 / 4]),
    ],
)
def test_attention_masks(net: HandMade, kind: str, expected: list[float]) -> None:
    out = net.run(add_attention(net, kind), **equal_scores())
    assert out.flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NONE", [[11 / 2, 11 / 2], [111 / 3, 111 / 3]]),
        ("UPPER_LEFT", [[1, 11 / 2], [1, 11 / 2]]),
        ("LOWER_RIGHT", [[1, 11 / 2], [11 / 2, 111 / 3]]),
    ],
)
def test_attention_with_key_value_lengths(net: HandMade, kind: str, expected: Any) -> None:
    attention = add_attention(net, kind, (2, 1, 2, 1))
    attention.key_value_lengths = net.input("lengths", (2,), INT32)
    out = net.run(attention, **equal_scores(batch=2), lengths=ints(2, 3))
    assert out.flatten(1).tolist() == [pytest.approx(row) for row in expected]


def test_attention_scores_are_not_scaled(net: HandMade) -> None:
    """Scores 0, 0, 0 and log 3 over values 1, 10, 100, 1000."""
    inputs = equal_scores(queries=1) | {"key": floats([[[0], [0], [0], [1]]])}
    inputs["query"] = floats([[[math.log(3)]]])
    out = net.run(add_attention(net, "LOWER_RIGHT", (1, 1, 1, 1)), **inputs)
    assert out.item() == pytest.approx((1 + 10 + 100 + 3 * 1000) / 6)


def test_attention_shares_a_key_head_among_neighbours(net: HandMade) -> None:
    query = net.input("query", (1, 4, 1, 1))
    key, value = net.input("key", (1, 2, 1, 1)), net.input("value", (1, 2, 1, 1))
    norm, kind = trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE
    attention = net.network.add_attention_v2(query, key, value, norm, kind)
    zeros = {"query": torch.zeros(1, 4, 1, 1), "key": torch.zeros(1, 2, 1, 1)}
    assert net.run(attention, **zeros, value=floats([[[5]], [[7]]])).flatten().tolist() == [
        5,
        5,
        7,
        7,
    ]


def test_attention_with_a_mask(net: HandMade) -> None:
    attention = add_attention(net, "NONE", (1, 1, 1, 1))
    attention.mask = net.input("mask", (1, 1, 1, 4), BOOL)
    mask = torch.tensor([[[[True, False, True, False]]]])
    assert net.run(attention, **equal_scores(queries=1), mask=mask).item() == pytest.approx(50.5)


def test_attention_in_halves_has_its_softmax_in_float32(net: HandMade) -> None:
    """Fifteen values of 2050 and one of 2066, each with 1/16: 2051 is rounded once, to even."""
    shapes = {"query": (1, 1, 1, 1), "key": (1, 1, 16, 1), "value": (1, 1, 16, 1)}
    tensors = [net.input(name, shape, HALF) for name, shape in shapes.items()]
    norm, kind = trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE
    attention = net.network.add_attention_v2(*tensors, norm, kind)
    inputs = {name: torch.zeros(shape).half() for name, shape in shapes.items()}
    inputs["value"] = torch.full(shapes["value"], 2050.0).half()
    inputs["value"][0, 0, 0] = 2066.0
    out = net.run(attention, **inputs)
    assert (out.dtype, out.item()) == (torch.float16, 2052.0)


def test_concatenation_and_select(net: HandMade) -> None:
    a, b = net.input("a", (2, 1)), net.input("b", (2, 2))
    joined = net.network.add_concatenation([a, b])
    joined.axis = 1
    condition = net.input("condition", (1, 3), BOOL)
    zeros = net.constant(np.zeros((2, 3)))
    layer = net.network.add_select(condition, joined.get_output(0), zeros)
    out = net.run(
        layer,
        a=floats([1], [2]),
        b=floats([3, 4], [5, 6]),
        condition=torch.tensor([[True, False, True]]),
    )
    assert out.tolist() == [[1, 0, 4], [2, 0, 6]]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # x / 0.5 is 2.5, 3.5, -1000, 0.6
        ("INT8", [1.0, 2.0, -64.0, 0.5]),
        ("INT4", [1.0, 2.0, -4.0, 0.5]),
        ("FP8", [1.25, 1.75, -224.0, 0.3125]),
        ("FP4", [1.0, 2.0, -3.0, 0.25]),
    ],
)
def test_quantize_and_dequantize_per_tensor(
    net: HandMade, kind: str, expected: list[float]
) -> None:
    """Ties go to the even neighbour, what is out of range to the end of the range."""
    scale = net.constant(0.5)
    quantize = net.network.add_quantize(net.input("x", (1, 4)), scale, getattr(trt.DataType, kind))
    layer = net.network.add_dequantize(quantize.get_output(0), scale, FLOAT)
    out = net.run(layer, torch.float32, x=floats([1.25, 1.75, -500, 0.3]))
    assert out.tolist() == [expected]


def test_quantize_per_channel(net: HandMade) -> None:
    quantize = net.network.add_quantize(
        net.input("x", (2, 2)), net.constant([1.0, 10.0]), trt.DataType.INT8
    )
    quantize.axis = 0
    out = net.run(quantize, x=floats([3, -4], [30, -44]))
    assert (out.dtype, out.tolist()) == (torch.int8, [[3, -4], [3, -4]])


def test_dequantize_by_blocks(net: HandMade) -> None:
    """int4 weights with a scale for every two columns, as AWQ has them for 128."""
    weight = net.constant(
        np.array([0x21, 0x43, 0xFF, 0x77], np.uint8), trt.DataType.INT4, shape=(2, 4)
    )
    layer = net.network.add_dequantize(weight, net.constant([[1.0, 10.0], [100.0, 0.5]]), FLOAT)
    layer.block_shape = (1, 2)
    x = net.input("x", (2, 4))
    total = net.network.add_elementwise(x, layer.get_output(0), trt.ElementWiseOperation.SUM)
    out = net.run(total, x=torch.zeros(2, 4))
    assert out.tolist() == [[1, 2, 30, 40], [-100, -100, 3.5, 3.5]]


def test_what_is_not_interpreted_is_refused_by_name(net: HandMade) -> None:
    layer = net.network.add_topk(net.input("x", (4,)), trt.TopKOperation.MAX, 2, 1)
    layer.name = "best"
    with pytest.raises(NotImplementedError, match="best: layers of kind TOPK"):
        net.run(layer, x=torch.zeros(4))


def test_an_attribute_that_is_not_interpreted_is_refused_by_name(net: HandMade) -> None:
    layer = net.network.add_activation(net.input("x", (4,)), trt.ActivationType.ELU)
    layer.name = "curve"
    with pytest.raises(NotImplementedError, match="curve: ActivationType ELU"):
        net.run(layer, x=torch.zeros(4))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"inputs \[\]; expected \['x'\]"),
        ({"x": torch.zeros(4).half()}, "x is torch.float16; expected torch.float32"),
        ({"x": torch.zeros(5)}, r"x is \(5,\); expected \(4,\)"),
    ],
)
def test_inputs_are_checked(net: HandMade, inputs: dict[str, Any], message: str) -> None:
    layer = net.network.add_unary(net.input("x", (4,)), trt.UnaryOperation.ABS)
    with pytest.raises((ValueError, TypeError), match=message):
        net.run(layer, **inputs)
