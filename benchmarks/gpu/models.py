"""Models for benchmarks.gpu: a small checkpoint, inflated in a GPU's memory, as its engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.gpu.tensors import RoundedFormat, engine_tensors, rounded_config
from benchmarks.inflate import Size, inflated_config, inflated_tensors, num_parameters, open_source
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.runtimes.torch.engine import TorchEngine, TorchEngineSpec, avoid_cudnn_attention
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.weights import Weights, load_weights, unsupported
from specpipe.runtimes.torch.memory import estimate_memory
from specpipe.runtimes.torch.model import Model
from specpipe.runtimes.torch.model_shape import ModelConfig

_STD = 0.02


@dataclass(frozen=True)
class Source:
    """A checkpoint folder, and what it is inflated to; None: it stays small.

    positions  the most of the inflated one; None: as many as the small one has
    """

    folder: Path
    size: Size | None
    device: torch.device
    dtype: torch.dtype
    positions: int | None = None

    @cached_property
    def hf_config(self) -> dict[str, Any]:
        config, _ = open_source(self.folder)
        if self.size is None:
            return dict(config)
        return inflated_config(config, self.size, max_position_embeddings=self.positions)

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.hf_config)

    def config(self, rounded: RoundedFormat | None = None) -> UnifiedConfig:
        """The unified config; plain, or with its layers' linears in a format."""
        config = unified_config(self.hf_config)
        return config if rounded is None else rounded_config(config, rounded)

    def why_not_fp8(self) -> str | None:
        """Says what keeps the fused kernels from running it in FP8; None: they do."""
        config = ModelConfig.from_unified(self.config("fp8"))
        rounded = torch.empty(0, dtype=torch.float8_e4m3fn)  # all that they ask about it
        names, _ = engine_tensors(self.config(), iter(()))
        weights = {n: rounded for n in names if n.removesuffix(".weight") in config.formats}
        return unsupported(config, weights.get)

    def made(self) -> Iterator[tuple[str, Tensor]]:
        """Makes its Hugging Face tensors, one at a time, on the device."""
        config, read = open_source(self.folder)
        size = self.size
        if size is None:  # inflating to its own size only reads
            unified = self.config()
            size = Size(*(getattr(unified, field.name) for field in fields(Size)))
        return inflated_tensors(config, read, size, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class FusedModel:
    """A model whose weights are on the device; engines are made of it as they are needed."""

    unified: UnifiedConfig
    config: ModelConfig
    weights: Weights
    device: torch.device
    dtype: torch.dtype

    @classmethod
    @torch.inference_mode()
    def make(cls, source: Source, rounded: RoundedFormat | None = None) -> FusedModel:
        unified = source.config(rounded)
        config = ModelConfig.from_unified(unified)
        _, read = engine_tensors(unified, source.made())
        weights = load_weights(config, read)
        return cls(unified, config, weights, source.device, source.dtype)

    def engine(
        self,
        *,
        max_seq_len: int,
        max_draft_len: int,
        max_batch_size: int = 1,
        kv_cache_tokens: int | None = None,
    ) -> FusedEngine:
        """An engine with a KV cache of its own, of so many tokens or of all that it can need."""
        spec = _spec(
            self.unified,
            self.device,
            self.dtype,
            max_seq_len=max_seq_len,
            max_draft_len=max_draft_len,
            max_batch_size=max_batch_size,
        )
        with torch.inference_mode():
            return FusedEngine(replace(spec, kv_cache_tokens=kv_cache_tokens), self.weights)

    @property
    def weight_bytes(self) -> int:
        """What a step reads of the weights: all but an embedding that is not the head as well."""
        num_bytes = _tensor_bytes(self.weights)
        if self.weights.embedding is not self.weights.head.weight:
            num_bytes -= self.weights.embedding.nbytes
        return num_bytes

    @torch.inference_mode()
    def spoil(self) -> None:
        """Replaces all matrices by noise: a draft whose tokens are worth nothing."""
        for tensor in _tensors(self.weights):
            if tensor.dim() == 2:
                tensor.normal_(0.0, _STD)


def plain_engine(
    source: Source, *, max_seq_len: int, max_draft_len: int = 0, max_batch_size: int = 1
) -> TorchEngine:
    """The engine that the fused one is compared with."""
    avoid_cudnn_attention(source.device)
    unified = source.config()
    with torch.inference_mode():
        names, read = engine_tensors(unified, source.made())
        # The head, if it is the embedding, is made before all others.
        tensors = {
            name: read(name) for name in sorted(names, key=lambda name: name != "head.weight")
        }
        spec = _spec(
            unified,
            source.device,
            source.dtype,
            max_seq_len=max_seq_len,
            max_draft_len=max_draft_len,
            max_batch_size=max_batch_size,
        )
        return TorchEngine(spec, Model(spec.model, cast("dict[str, Tensor]", tensors)))


def _spec(
    unified: UnifiedConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_seq_len: int,
    **limits: int,
) -> TorchEngineSpec:
    memory = estimate_memory(
        unified,
        dtype=str(dtype).removeprefix("torch."),
        max_seq_len=max_seq_len,
        max_num_tokens=max_seq_len,
        **limits,
    )
    return TorchEngineSpec(
        model=ModelConfig.from_unified(unified),
        dtype=dtype,
        device=device,
        max_seq_len=max_seq_len,
        memory=memory,
        **limits,
    )


def _tensors(weights: Any) -> Iterator[Tensor]:
    """Yields every tensor of a tree of dataclasses once."""
    seen: set[int] = set()

    def walk(node: Any) -> Iterator[Tensor]:
        if isinstance(node, Tensor):
            if id(node) not in seen:
                seen.add(id(node))
                yield node
        elif isinstance(node, tuple):
            for item in node:
                yield from walk(item)
        elif is_dataclass(node):
            for field in fields(node):
                yield from walk(getattr(node, field.name))

    return walk(weights)


def _tensor_bytes(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in _tensors(weights))
