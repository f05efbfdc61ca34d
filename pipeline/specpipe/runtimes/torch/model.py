"""The decoder itself: Llama's, with the variations of the other families.

Letters beyond style: T rows of one forward (the tokens of all its sequences, one after the other),
G query heads per key-value head, C channels (hidden_size), I channels of the MLP
(intermediate_size).

Weights are as layout.py arranges them for this file:

- matrices are [in, out]: MKL multiplies 4 to 40 rows by one up to twice as fast as by [out, in],
  and where it is slow still, packed.py has a copy;
- query heads stand in the order (G, H_kv), so that the heads of N tokens are one axis [N · G] for
  each key-value head: grouped-query attention is plain attention with more rows, without repeats;
- the channels 2i and 2i + 1 of a query or key head are those that rope turns together, so that
  turning a head is one complex multiplication.

Small models spend as much time on calls as on arithmetic. So buffers and views of them are made
once per row count, and operations write into them.

What a family does otherwise, or a quantized checkpoint, is an object or a function that the config
selects when the model is made (the norms of a branch, the activation, how attention scores are
taken, how a linear multiplies), so that the forward of the others makes no call more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specpipe.runtimes.torch.kernel_choice import keeps_input_order
from specpipe.runtimes.torch.kernels import kernel_of
from specpipe.runtimes.torch.kv_cache import AttentionGroup, KVCacheStep
from specpipe.runtimes.torch.model_shape import ModelConfig
from specpipe.runtimes.torch.packed import packed
from specpipe.runtimes.torch.quantized import Multiply, in_checkpoint_order, quantized_linear

_MAX_KEPT_ROWS = 64
"""Buffers of larger forwards (prefill) are not kept; their cost vanishes in the arithmetic."""


Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
"""(queries, keys, values, mask added to the scores or None) → what each query attends to."""


def _attend(config: ModelConfig) -> Attend:
    if config.attention_cap is None:
        return partial(F.scaled_dot_product_attention, scale=config.attention_scale)
    scale = config.score_scale
    return partial(_capped_attention, scale=scale, cap=config.attention_cap)


def _capped_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, scale: float, cap: float
) -> Tensor:
    """Returns attention with scores soft-capped before the mask; the softmax is in float32."""
    scores = torch.matmul(query, keys.transpose(-1, -2)).mul_(scale)
    _soft_cap(scores, cap)
    if mask is not None:
        scores.add_(mask)
    return torch.matmul(torch.softmax(scores, -1, torch.float32).to(values.dtype), values)


def _soft_cap(x: Tensor, cap: float) -> Tensor:
    """Returns cap · tanh(x / cap), computed in place."""
    return x.div_(cap).tanh_().mul_(cap)


def _gelu_tanh(x: Tensor) -> None:
    torch.ops.aten.gelu_(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], object]] = {
    "silu": partial(F.silu, inplace=True),
    "swiglu": partial(F.silu, inplace=True),
    "gelu_pytorch_tanh": _gelu_tanh,
}
"""Each in place, under the names of the unified config."""


class _Norm:
    """RMSNorm over the last axis, as transformers computes it: float32 inside."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight = weight
        self._epsilon = epsilon
        # torch 2.13 has no CPU kernel for it, but makes six calls, 12 µs. In float32 four do, 5 µs:
        # x / sqrt(mean(x²) + ε) · w  =  x / hypot(|x|, sqrt(ε · size)) · (w · sqrt(size))
        self._is_composed = weight.device.type == "cpu" and weight.dtype == torch.float32
        if self._is_composed:
            size = weight.shape[-1]
            self._floor = torch.tensor(math.sqrt(epsilon * size))
            self._scaled_weight = weight * math.sqrt(size)

    def write(self, x: Tensor, out: Tensor, length: Tensor) -> None:
        """Writes the normalized x to `out`, which may be x itself; `length` takes |x|."""
        if self._is_composed:
            torch.linalg.vector_norm(x, 2, -1, True, out=length)
            length.hypot_(self._floor)
            torch.div(x, length, out=out)
            out.mul_(self._scaled_weight)
        else:
            normed = F.rms_norm(x, x.shape[-1:], eps=self._epsilon)
            torch.mul(normed, self._weight, out=out)


class _Linear:
    """A matrix [in, out] and perhaps a bias."""

    def __init__(self, weights: Mapping[str, Tensor], name: str) -> None:
        self._weight = weights[f"{name}.weight"]
        self._bias = weights.get(f"{name}.bias")
        self._packed = packed(self._weight, self._bias)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Writes x · W + b to `out`."""
        if self._packed is not None and len(x) > 1:
            out.copy_(self._packed(x))
        elif self._bias is None:
            torch.mm(x, self._weight, out=out)
        else:
            torch.addmm(self._bias, x, self._weight, out=out)

    def add(self, x: Tensor, buffers: _Buffers) -> None:
        """Adds x · W + b to the hidden states."""
        if self._packed is not None and len(x) > 1:
            buffers.hidden.add_(self._packed(x))
            return
        buffers.hidden.addmm_(x, self._weight)
        if self._bias is not None:
            buffers.hidden.add_(self._bias)


class _QuantizedLinear:
    """A linear that quantized.py or kernels.py multiplies."""

    def __init__(self, multiply: Multiply) -> None:
        self._multiply = multiply

    def write(self, x: Tensor, out: Tensor) -> None:
        self._multiply(x, out)

    def add(self, x: Tensor, buffers: _Buffers) -> None:
        self._multiply(x, buffers.normed)
        buffers.hidden.add_(buffers.normed)


_AnyLinear = _Linear | _QuantizedLinear


class _SideBySide:
    """Two linears of one input that are not quantized alike; each writes a half of the output."""

    def __init__(self, left: _AnyLinear, right: _AnyLinear) -> None:
        self._linears = left, right

    def write(self, x: Tensor, out: Tensor) -> None:
        for linear, half in zip(self._linears, out.chunk(2, dim=1), strict=True):
            linear.write(x, half)


class _NormedLinear:
    """A linear layer whose output is normalized before it is added to the hidden states."""

    def __init__(self, linear: _AnyLinear, norm: _Norm) -> None:
        self._linear = linear
        self._norm = norm

    def add(self, x: Tensor, buffers: _Buffers) -> None:
        self._linear.write(x, buffers.normed)
        self._norm.write(buffers.normed, buffers.normed, buffers.length)
        buffers.hidden.add_(buffers.normed)


class _Layer:
    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], n: int) -> None:
        prefix = f"layers.{n}"
        epsilon = config.norm_epsilon
        self.attention_norm = _Norm(weights[f"{prefix}.attention_norm.weight"], epsilon)
        self.qkv = _linear(config, weights, f"{prefix}.qkv")
        self.dense = _branch_end(config, weights, f"{prefix}.dense")
        self.mlp_norm = _Norm(weights[f"{prefix}.mlp_norm.weight"], epsilon)
        self.mlp_in = _mlp_in(config, weights, prefix)
        self.mlp_out = _branch_end(config, weights, f"{prefix}.mlp_out")
        self.head_norm: _Norm | None = None
        if config.has_qk_norm:
            q, k = (weights[f"{prefix}.{name}_norm.weight"] for name in "qk")
            per_head = [q] * config.num_heads + [k] * config.num_kv_heads
            self.head_norm = _Norm(torch.stack(per_head), epsilon)


def _branch_end(
    config: ModelConfig, weights: Mapping[str, Tensor], name: str
) -> _AnyLinear | _NormedLinear:
    linear = _linear(config, weights, name)
    if config.has_branch_norms:
        return _NormedLinear(linear, _Norm(weights[f"{name}_norm.weight"], config.norm_epsilon))
    return linear


def _mlp_in(
    config: ModelConfig, weights: Mapping[str, Tensor], prefix: str
) -> _AnyLinear | _SideBySide:
    if f"{prefix}.mlp_in.weight" in weights:
        return _linear(config, weights, f"{prefix}.mlp_in")
    left, right = (_linear(config, weights, f"{prefix}.mlp_{name}") for name in ("fc", "gate"))
    return _SideBySide(left, right)


def _linear(config: ModelConfig, weights: Mapping[str, Tensor], name: str) -> _AnyLinear:
    format_name = config.formats.get(name)
    if format_name is None:
        return _Linear(weights, name)
    multiply = quantized_linear(format_name, weights, name)
    if multiply is None:
        return _Linear(weights, name)
    if name.endswith(".dense") and keeps_input_order(format_name, kernel_of(weights, name)):
        multiply = in_checkpoint_order(multiply, config.group_size, config.head_size)
    return _QuantizedLinear(multiply)


class _Buffers:
    """The intermediate tensors of a forward of T rows, and the views of them that layers use."""

    def __init__(self, config: ModelConfig, num_rows: int, like: Tensor) -> None:
        def rows(*shape: int) -> Tensor:
            return torch.empty(num_rows, *shape, dtype=like.dtype, device=like.device)

        query_size, key_size, head_size = config.query_size, config.key_size, config.head_size
        num_rotated = config.num_heads + config.num_kv_heads
        self.hidden = rows(config.hidden_size)
        self.normed = rows(config.hidden_size)
        self.length = rows(1)
        self.head_length = rows(num_rotated, 1)
        self.qkv = rows(query_size + 2 * key_size)
        self.query = rows(query_size)
        self.attention = rows(query_size)
        self.mlp = rows(2 * config.intermediate_size)
        self.fc, self.gate = self.mlp.chunk(2, dim=1)

        self.key_value = self.qkv[:, query_size:]
        pairs = (-1, head_size // 2, 2)
        self.heads = self.qkv[:, : query_size + key_size].unflatten(1, (num_rotated, head_size))
        self.raw_query = self.qkv[:, :query_size].unflatten(1, pairs)
        self.key = self.qkv[:, query_size:-key_size].unflatten(1, pairs)
        self.query_pairs = self.query.unflatten(1, pairs)
        if like.dtype == torch.float32:
            self.raw_query = torch.view_as_complex(self.raw_query)
            self.key = torch.view_as_complex(self.key)
            self.query_pairs = torch.view_as_complex(self.query_pairs)


class _Attention:
    """The attention of one group of sequences, from the query buffer to the attention buffer."""

    def __init__(
        self, group: AttentionGroup, config: ModelConfig, attend: Attend, buffers: _Buffers
    ) -> None:
        self._group = group
        self._attend = attend
        self._shape = (
            group.num_sequences,
            group.num_tokens * config.group_size,
            config.num_kv_heads,
            config.head_size,
        )
        self._query = buffers.query[group.rows]
        self._out = buffers.attention[group.rows]
        if group.padding is None:
            self._heads = self._query.view(self._shape).transpose(1, 2)
            self._out_heads = self._out.view(self._shape)

    def run(self, layer: int) -> None:
        group = self._group
        if group.padding is None:
            heads = self._heads
        else:
            padded = self._query.index_select(0, group.padding.rows)
            heads = padded.view(self._shape).transpose(1, 2)
        result = self._attend(
            heads, group.keys[layer], group.values[layer], group.masks[layer]
        ).transpose(1, 2)
        if group.padding is None:
            self._out_heads.copy_(result)
        else:
            padded = result.reshape(-1, self._out.shape[1])
            torch.index_select(padded, 0, group.padding.kept, out=self._out)


class Model:
    """The weights of one decoder, and its forward; keys and values live in a KVCacheStep."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self._head = weights["head.weight"]
        self._packed_head = packed(self._head)
        self._quantized_head: _AnyLinear | None = None
        if "head" in config.formats:
            self._quantized_head = _linear(config, weights, "head")
        self._embedding = weights.get("embedding.weight")
        self._layers = [_Layer(config, weights, n) for n in range(config.num_layers)]
        self._norm = _Norm(weights["norm.weight"], config.norm_epsilon)
        self._attend = _attend(config)
        self._activate = _ACTIVATIONS[config.activation]
        self._buffers: dict[int, _Buffers] = {}
        scales = [weights.get(f"layers.{n}.kv_cache.scale") for n in range(config.num_layers)]
        self.kv_cache_scales = [scale for scale in scales if scale is not None]

    def forward(self, token_ids: Tensor, rotations: Tensor, step: KVCacheStep) -> Tensor:
        """Runs T tokens through all layers and stores their keys and values.

        token_ids [T], rotations [T, 1, D / 2] complex. Returns the last hidden states [T, C], a
        buffer that the next forward overwrites.
        """
        buffers = self._buffers_for(len(token_ids))
        self._embed(token_ids, buffers.hidden)
        attentions = [
            _Attention(group, self.config, self._attend, buffers) for group in step.groups
        ]
        for index, layer in enumerate(self._layers):
            layer.attention_norm.write(buffers.hidden, buffers.normed, buffers.length)
            layer.qkv.write(buffers.normed, buffers.qkv)
            if layer.head_norm is not None:
                layer.head_norm.write(buffers.heads, buffers.heads, buffers.head_length)
            _rotate(buffers.raw_query, rotations, buffers.query_pairs)
            _rotate(buffers.key, rotations, buffers.key)
            step.store(index, buffers.key_value)
            for attention in attentions:
                attention.run(index)
            layer.dense.add(buffers.attention, buffers)
            layer.mlp_norm.write(buffers.hidden, buffers.normed, buffers.length)
            layer.mlp_in.write(buffers.normed, buffers.mlp)
            self._activate(buffers.fc)
            buffers.fc.mul_(buffers.gate)
            layer.mlp_out.add(buffers.fc, buffers)
        return buffers.hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores the vocabulary for hidden states [T, C]: float32 [T, V]."""
        normed = torch.empty_like(hidden)
        self._norm.write(hidden, normed, hidden.new_empty(len(hidden), 1))
        if self._quantized_head is None and self._packed_head is not None and len(hidden) > 1:
            logits = self._packed_head(normed)
        elif self._quantized_head is None:
            logits = torch.mm(normed, self._head).float()
        else:
            scores = normed.new_empty(len(normed), self.config.vocab_size)
            self._quantized_head.write(normed, scores)
            logits = scores.float()
        if self.config.logits_cap is not None:
            _soft_cap(logits, self.config.logits_cap)
        return logits

    def _embed(self, token_ids: Tensor, out: Tensor) -> None:
        if self._embedding is not None:
            torch.index_select(self._embedding, 0, token_ids, out=out)
        else:  # the head, [C, V], is the same matrix
            out.copy_(self._head.index_select(1, token_ids).t())
        if self.config.embedding_scale is not None:
            out.mul_(self.config.embedding_scale)

    def _buffers_for(self, num_rows: int) -> _Buffers:
        buffers = self._buffers.get(num_rows)
        if buffers is None:
            like = self._head if self._embedding is None else self._embedding
            buffers = _Buffers(self.config, num_rows, like)
            if num_rows <= _MAX_KEPT_ROWS:
                self._buffers[num_rows] = buffers
        return buffers


def _rotate(x: Tensor, rotations: Tensor, out: Tensor) -> None:
    """Turns every pair of channels; half precision is turned in float32, pairs last."""
    if x.is_complex():
        torch.mul(x, rotations, out=out)
    else:
        turned = torch.view_as_complex(x.float()) * rotations
        out.copy_(torch.view_as_real(turned))
