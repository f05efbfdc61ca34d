"""Which models the fused kernels run, and their weights as those kernels read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from specpipe.checkpoints.formats import FORMATS
from specpipe.runtimes.torch.fused.kernels import ACTIVATIONS
from specpipe.runtimes.torch.fused.linear import (
    Linear,
    Read,
    are_alike,
    joined,
    read_linear,
    stored_kind,
)
from specpipe.runtimes.torch.fused.tiles import MIN_BLOCK
from specpipe.runtimes.torch.model_shape import ModelConfig

_MIN_HEAD_SIZE, _MAX_HEAD_SIZE = 16, 128

_FORMATS = ("fp8", "fp8_pc_pt", "w4a8_awq", "int8_wo", "int4_wo", "int4_awq")


def unsupported(config: ModelConfig, read: Read | None = None) -> str | None:
    """Says what about a model the fused kernels cannot do; None: they run it.

    read  its tensors, of which matrices need no numbers (device "meta"); without it, quantized
          linears count as unsupported
    """
    if config.has_branch_norms:
        return "norms behind attention and MLP"
    if config.attention_cap is not None or config.logits_cap is not None:
        return "capped scores"
    if config.rotary.kind in ("dynamic", "longrope"):
        return f"rope type {config.rotary.kind}, whose table depends on the request"
    if config.activation not in ACTIVATIONS:
        return f"activation {config.activation}"
    head_size = config.head_size
    if head_size & (head_size - 1) or not _MIN_HEAD_SIZE <= head_size <= _MAX_HEAD_SIZE:
        return f"heads of {head_size} channels"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % (2 * MIN_BLOCK):
            return f"{name} {getattr(config, name)}, which {2 * MIN_BLOCK} does not divide"
    return _unsupported_linears(config, read)


def _unsupported_linears(config: ModelConfig, read: Read | None) -> str | None:
    unknown = sorted(set(config.formats.values()).difference(() if read is None else _FORMATS))
    if unknown:
        return f"linears in {', '.join(unknown)}"
    if read is None:
        return None
    for name, format_name in config.formats.items():
        weight = read(f"{name}.weight")
        rounds = FORMATS[format_name].activations is not None
        if rounds and weight is not None and stored_kind(weight) == "plain":
            return f"{name} in {format_name}, which is emulated"
    for n in range(config.num_layers):
        halves = _mlp_halves(config, read, n)
        if halves is not None and not are_alike(*halves):
            return f"layers.{n}.mlp_fc and mlp_gate, which do not round their input alike"
    return None


@dataclass(frozen=True)
class Layer:
    """One layer; the norms of query and key heads are those of models that have them.

    Norms before a linear have its gain in them.
    """

    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    dense: Linear
    mlp_norm: Tensor
    mlp_in: Linear
    mlp_out: Linear


@dataclass(frozen=True)
class Weights:
    """A whole decoder: embedding and head are [V, C], and may be one tensor."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear


def load_weights(config: ModelConfig, read: Read) -> Weights:
    """Arranges an engine's weights (layout.py), of which at most one is there a second time.

    read  returns tensors on the device
    """

    def wanted(name: str) -> Tensor:
        tensor = read(name)
        if tensor is None:
            raise KeyError(name)
        return tensor

    def linear(name: str) -> Linear:
        made = read_linear(read, name, config.formats.get(name))
        if made is None:
            raise KeyError(f"{name}.weight")
        return made

    def layers() -> Iterator[Layer]:
        for n in range(config.num_layers):
            of = f"layers.{n}"
            halves = _mlp_halves(config, read, n)
            mlp_in = linear(f"{of}.mlp_in") if halves is None else joined(*halves)
            attention_norm, qkv = _normed(
                wanted(f"{of}.attention_norm.weight"), linear(f"{of}.qkv")
            )
            mlp_norm, mlp_in = _normed(wanted(f"{of}.mlp_norm.weight"), mlp_in)
            yield Layer(
                attention_norm=attention_norm,
                qkv=qkv,
                query_norm=read(f"{of}.q_norm.weight"),
                key_norm=read(f"{of}.k_norm.weight"),
                dense=linear(f"{of}.dense"),
                mlp_norm=mlp_norm,
                mlp_in=mlp_in,
                mlp_out=linear(f"{of}.mlp_out"),
            )

    norm, head = _normed(wanted("norm.weight"), linear("head"))
    embedding = read("embedding.weight")
    return Weights(
        embedding=head.weight if embedding is None else embedding,
        layers=tuple(layers()),
        norm=norm,
        head=head,
    )


def _mlp_halves(config: ModelConfig, read: Read, n: int) -> tuple[Linear, Linear] | None:
    """Returns gate and up projections that the engine has apart."""
    names = [f"layers.{n}.mlp_{half}" for half in ("fc", "gate")]
    fc, gate = (read_linear(read, name, config.formats.get(name)) for name in names)
    return None if fc is None or gate is None else (fc, gate)


def _normed(norm: Tensor, linear: Linear) -> tuple[Tensor, Linear]:
    """Moves what a linear's inputs are multiplied by into the weights of the norm before it."""
    if linear.gain is None:
        return norm, linear
    return norm.float() * linear.gain.float(), replace(linear, gain=None)
