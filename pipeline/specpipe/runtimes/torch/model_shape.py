"""The shape of a decoder, from the unified checkpoint's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.runtimes.torch.quantized import linear_formats
from specpipe.runtimes.torch.rotary import Rotary


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, from the unified checkpoint's `config.json`.

    activation         of the MLP, in TensorRT-LLM's spelling; swiglu has its two halves fused
    windows            one per layer: tokens that a position sees; None where it sees all
    has_branch_norms   whether the outputs of attention and MLP are normalized too
    attention_scale    of the scores; None for 1 / sqrt(D)
    attention_cap      caps the scores, as logits_cap does the logits: x → cap · tanh(x / cap)
    embedding_scale    of the embeddings, None for 1
    formats            of the linears that are quantized, by their names in the engine
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_epsilon: float
    has_qk_norm: bool
    rotary: Rotary
    activation: str
    windows: tuple[int | None, ...]
    has_branch_norms: bool
    attention_scale: float | None
    attention_cap: float | None
    logits_cap: float | None
    embedding_scale: float | None
    formats: Mapping[str, str]

    @classmethod
    def from_unified(cls, config: UnifiedConfig) -> ModelConfig:
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_size,
            norm_epsilon=config.norm_epsilon,
            has_qk_norm=config.qk_layernorm,
            rotary=Rotary(
                config.head_size,
                config.rotary_embedding_dim,
                config.rotary_base,
                config.rotary_scaling,
            ),
            activation=config.hidden_act,
            windows=config.windows,
            has_branch_norms=config.has_branch_norms,
            attention_scale=config.attention_scale,
            attention_cap=config.attention_cap,
            logits_cap=config.logits_cap,
            embedding_scale=config.embedding_scale,
            formats=linear_formats(config),
        )

    @property
    def score_scale(self) -> float:
        """What scores of attention are multiplied by."""
        return self.attention_scale or self.head_size**-0.5

    @property
    def group_size(self) -> int:
        """G: query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Channels of one token's keys, or of its values."""
        return self.num_kv_heads * self.head_size
