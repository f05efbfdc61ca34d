"""An interpreter of a finished TensorRT network: evaluates its layers one by one with torch.

It stands in for the GPU that a TensorRT engine needs, and reads nothing but the library's
`INetworkDefinition`: layers, their inputs, attributes and constants. What a layer means is taken
from NVIDIA's documentation ("TensorRT Operators" and "Working with Transformers"), which the
docstrings below name. It interprets decoders, so a layer or an attribute that they do not have is
refused by name.

What tensorrt_rtx 1.7.1 shows of a network, as seen there:

- `network.get_layer(i)` is a plain ILayer; setting its `__class__` makes the attributes of its kind
  readable. `IActivationLayer.type` then hides `ILayer.type`.
- Every call for a tensor returns one and the same Python object as long as it is alive, so tensors
  are told apart by identity; names may repeat.
- An attention is two layers, ATTENTION_INPUT and ATTENTION_OUTPUT; the `attention` of either has
  the inputs and attributes.
- `weights` of a constant is a NumPy array if NumPy has the type, else the library's own `Weights`,
  whose elements only its C++ fields lead to (NvInferRuntimeBase.h: type, values, count).
- Permutations have eight entries; those past the rank mean nothing. `block_shape` of a quantize
  layer cannot be read where it was not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.runtimes.tensorrt.layers import DTYPES, KINDS, Operation

_COMPUTED = ("FLOAT", "HALF", "BF16")
"""Types that computation happens in; the other floating types are only what numbers are kept in."""


@dataclass(frozen=True)
class _Step:
    name: str
    operation: Operation
    inputs: tuple[int | None, ...]
    output: int
    dtype: torch.dtype
    keeps_inputs: bool


class Interpreter:
    """Evaluates a network of the library `trt`.

    dtype  what FLOAT, HALF and BF16 are computed and kept in. None: computed in float32, each
           layer's output rounded to the type that the network gives it, so the rounding of a GPU
           except for what it fuses. torch.float32: kept in float32, so that a cast to a half type
           does nothing, and the network's arithmetic can be compared closely.
    """

    def __init__(self, trt: Any, network: Any, *, dtype: torch.dtype | None = None) -> None:
        self._trt, self._dtype = trt, dtype
        self._tensors: list[Any] = []
        """Keeps the tensors' Python objects alive: they are told apart by identity."""
        self._inputs = [network.get_input(i) for i in range(network.num_inputs)]
        self._outputs = [network.get_output(i) for i in range(network.num_outputs)]
        self._constants: dict[int, Tensor] = {}
        self._steps: list[_Step] = []
        for layer in map(network.get_layer, range(network.num_layers)):
            if layer.type.name == "ATTENTION_INPUT":
                continue  # read at the other end
            step = self._step(layer)
            if step.inputs:
                self._steps.append(step)
            else:
                self._constants[step.output] = _widened(step.operation().to(step.dtype))

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the outputs by name; KV caches among the inputs are updated in place."""
        names = {tensor.name for tensor in self._inputs}
        if set(inputs) != names:
            raise ValueError(f"inputs {sorted(inputs)}; expected {sorted(names)}")
        values = dict(self._constants)
        for tensor in self._inputs:
            values[id(tensor)] = self._checked(tensor, inputs[tensor.name])
        for step in self._steps:
            given = [None if key is None else values[key] for key in step.inputs]
            if not step.keeps_inputs:
                given = [None if value is None else _widened(value) for value in given]
            try:
                values[step.output] = step.operation(*given).to(step.dtype)
            except Exception as exc:
                raise RuntimeError(f"{step.name}: {exc}") from exc
        return {tensor.name: values[id(tensor)] for tensor in self._outputs}

    def _checked(self, tensor: Any, value: Tensor) -> Tensor:
        shape, dtype = tuple(tensor.shape), self._kept(tensor.dtype)
        if value.dtype != dtype:
            raise TypeError(f"{tensor.name} is {value.dtype}; expected {dtype}")
        fits = len(shape) == value.ndim and all(
            size in (-1, given) for size, given in zip(shape, value.shape, strict=True)
        )
        if not fits:
            raise ValueError(f"{tensor.name} is {tuple(value.shape)}; expected {shape}")
        return value

    def _kept(self, dtype: Any) -> torch.dtype:
        if self._dtype is not None and dtype.name in _COMPUTED:
            return self._dtype
        if dtype.name not in DTYPES:
            raise NotImplementedError(f"tensors of type {dtype.name} are not interpreted")
        return DTYPES[dtype.name]

    def _step(self, layer: Any) -> _Step:
        kind = layer.type.name
        if kind not in KINDS:
            raise NotImplementedError(f"{layer.name}: layers of kind {kind} are not interpreted")
        class_name, make = KINDS[kind]
        layer.__class__ = getattr(self._trt, class_name)
        output = layer.get_output(0)
        if kind == "ATTENTION_OUTPUT":
            attention = layer.attention
            inputs = [*(attention.get_input(i) for i in range(3)), attention.mask]
            inputs.append(attention.key_value_lengths)
        else:
            inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
        self._tensors += [*inputs, output]
        try:
            operation = make(layer)
        except NotImplementedError as exc:
            raise NotImplementedError(f"{layer.name}: {exc}") from exc
        return _Step(
            name=layer.name,
            operation=operation,
            inputs=tuple(None if tensor is None else id(tensor) for tensor in inputs),
            output=id(output),
            dtype=self._kept(output.dtype),
            keeps_inputs=kind == "KV_CACHE_UPDATE",
        )


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value
