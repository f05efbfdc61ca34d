"""Compiles the kernels of a decoder with quantized weights as compile_kernels.py does; prints JSON.

Run by test_quantized.py in a process of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import cast

import torch

from specpipe.runtimes.torch.fused.decoder import Rows
from specpipe.runtimes.torch.fused.linear import Kind, Linear, int4_block
from specpipe.runtimes.torch.fused.weights import Weights
from tests.runtimes.torch.fused import compile_kernels

_META = torch.device("meta")
_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_per_token": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
_TYPES = {torch.float8_e4m3fn: "*fp8e4nv", torch.int8: "*i8"}


def quantized(linear: Linear, kind: Kind, group: int) -> Linear:
    """A linear of the same size and of a kind, without numbers."""
    columns, channels = linear.num_columns, linear.num_channels
    in_one = 2 if kind == "int4" else 1
    weight = torch.empty(columns, channels // in_one, dtype=_DTYPES[kind], device=_META)
    scale = torch.empty((channels // group, columns) if group else (columns,), device=_META)
    block = int4_block(channels, group) if kind == "int4" else 0
    return Linear(weight, None, kind, scale, block=block)


def launches_of(model: str, kind: Kind, group: int) -> list[compile_kernels.Launch]:
    def change(plain: Weights) -> Weights:
        (layer,) = plain.layers
        layer = replace(
            layer,
            qkv=quantized(layer.qkv, kind, group),
            dense=quantized(layer.dense, kind, group),
            mlp_in=quantized(layer.mlp_in, kind, group),
            mlp_out=quantized(layer.mlp_out, kind, group),
        )
        return Weights(plain.embedding, (layer,), plain.norm, quantized(plain.head, kind, group))

    decoder = compile_kernels.recording_decoder(model, change=change)
    integers = torch.empty(128, dtype=torch.int32, device=_META)
    decoder.layers(Rows(integers[:5], integers, integers, num_rows=5, group=5, is_long=False))
    decoder.score(5, writes_logits=True)
    return decoder.launches


if __name__ == "__main__":
    model, kind, group = sys.argv[1:]
    compile_kernels._TYPES.update(_TYPES)
    launches = launches_of(model, cast(Kind, kind), int(group))
    print(
        json.dumps(
            [
                compile_kernels.facts(launch.kernel.__name__, launch, 90)
                for launch in launches
                if launch.kernel.__name__ not in ("embed", "attention")
            ]
        )
    )
