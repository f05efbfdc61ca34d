"""The tensors of each decoder: which Hugging Face tensors make up each unified one.

One `TensorRule` per unified tensor: its name, the tensors that it is concatenated from, and how
each is split over the tensor-parallel ranks. Converting and merging back both read these tables,
plain weights here and quantized ones with their scales alike.

Names and splits: TensorRT-LLM's checkpoint format, release lines 0.16 to 1.2. Note that `mlp.fc`
is Hugging Face's gate_proj and `mlp.gate` its up_proj. With the activation swiglu (Phi-3) there is
no `mlp.gate`: `mlp.fc` holds up_proj, then gate_proj.
"""

from __future__ import annotations

from dataclasses import replace

from specpipe.checkpoints.rules import Part, PipelineStage, Split, TensorRule


def _linear(
    name: str, parts: tuple[Part, ...], bias_when: str | None = None
) -> tuple[TensorRule, ...]:
    """Returns the rules of a linear layer: its weight and, if it can have one, its bias.

    A bias has its weight's rows. Where the weight is split by columns, each rank adds the bias
    after the all-reduce (TensorRT-LLM, layers/linear.py, RowLinear), so every rank holds all of it.
    """
    weight = TensorRule(
        f"{name}.weight",
        tuple(replace(part, source=f"{part.source}.weight") for part in parts),
    )
    if bias_when is None:
        return (weight,)
    bias_parts = tuple(
        Part(
            f"{part.source}.bias",
            part.shape[:1],
            "none" if part.split == "columns" else part.split,
        )
        for part in parts
    )
    return weight, TensorRule(f"{name}.bias", bias_parts, when=bias_when)


def _norm(
    name: str,
    source: str,
    size: str = "hidden",
    when: str | None = None,
    *,
    stage: PipelineStage = "layer",
    one_plus: bool = False,
) -> TensorRule:
    part = Part(f"{source}.weight", (size,), one_plus=one_plus)
    return TensorRule(f"{name}.weight", (part,), stage, when)


_UNIFIED_LAYER = "transformer.layers.{n}"

_HF_LAYER = "model.layers.{n}"


def _embedding(split: Split = "none") -> TensorRule:
    part = Part("model.embed_tokens.weight", ("vocab", "hidden"), split)
    return TensorRule("transformer.vocab_embedding.weight", (part,), stage="first")


_QKV = _linear(
    f"{_UNIFIED_LAYER}.attention.qkv",
    (
        Part(f"{_HF_LAYER}.self_attn.q_proj", ("heads", "hidden"), "rows"),
        Part(f"{_HF_LAYER}.self_attn.k_proj", ("kv_heads", "hidden"), "kv_heads"),
        Part(f"{_HF_LAYER}.self_attn.v_proj", ("kv_heads", "hidden"), "kv_heads"),
    ),
    bias_when="attn_bias",
)

_HEAD_NORMS = tuple(
    _norm(
        f"{_UNIFIED_LAYER}.attention.{letter}_layernorm",
        f"{_HF_LAYER}.self_attn.{letter}_norm",
        "head_size",
        when="qk_layernorm",
    )
    for letter in "qk"
)

_DENSE = _linear(
    f"{_UNIFIED_LAYER}.attention.dense",
    (Part(f"{_HF_LAYER}.self_attn.o_proj", ("hidden", "heads"), "columns"),),
    bias_when="attn_dense_bias",
)

_MLP_IN = (
    *_linear(
        f"{_UNIFIED_LAYER}.mlp.fc",
        (Part(f"{_HF_LAYER}.mlp.gate_proj", ("intermediate", "hidden"), "rows"),),
        bias_when="mlp_bias",
    ),
    *_linear(
        f"{_UNIFIED_LAYER}.mlp.gate",
        (Part(f"{_HF_LAYER}.mlp.up_proj", ("intermediate", "hidden"), "rows"),),
        bias_when="mlp_bias",
    ),
)

_MLP_OUT = _linear(
    f"{_UNIFIED_LAYER}.mlp.proj",
    (Part(f"{_HF_LAYER}.mlp.down_proj", ("hidden", "intermediate"), "columns"),),
    bias_when="mlp_bias",
)

_HEAD = TensorRule(
    "lm_head.weight", (Part("lm_head.weight", ("vocab", "hidden"), "vocab"),), stage="last"
)

LLAMA_DECODER: tuple[TensorRule, ...] = (
    _embedding(),
    _norm(f"{_UNIFIED_LAYER}.input_layernorm", f"{_HF_LAYER}.input_layernorm"),
    *_QKV,
    *_HEAD_NORMS,
    *_DENSE,
    _norm(f"{_UNIFIED_LAYER}.post_layernorm", f"{_HF_LAYER}.post_attention_layernorm"),
    *_MLP_IN,
    *_MLP_OUT,
    _norm("transformer.ln_f", "model.norm", stage="last"),
    _HEAD,
)
"""Llama's decoder, which Mistral, Qwen2 and Qwen3 share up to biases and q/k norms."""

_QKV_PROJ, _GATE_UP_PROJ = f"{_HF_LAYER}.self_attn.qkv_proj", f"{_HF_LAYER}.mlp.gate_up_proj"

PHI3_DECODER: tuple[TensorRule, ...] = (
    _embedding(),
    _norm(f"{_UNIFIED_LAYER}.input_layernorm", f"{_HF_LAYER}.input_layernorm"),
    *_linear(
        f"{_UNIFIED_LAYER}.attention.qkv",
        (
            Part(_QKV_PROJ, ("heads", "hidden"), "rows", (), ("kv_heads", "kv_heads")),
            Part(_QKV_PROJ, ("kv_heads", "hidden"), "kv_heads", ("heads",), ("kv_heads",)),
            Part(_QKV_PROJ, ("kv_heads", "hidden"), "kv_heads", ("heads", "kv_heads")),
        ),
    ),
    *_DENSE,
    _norm(f"{_UNIFIED_LAYER}.post_layernorm", f"{_HF_LAYER}.post_attention_layernorm"),
    # The halves change places: TensorRT-LLM, models/phi3/convert.py.
    *_linear(
        f"{_UNIFIED_LAYER}.mlp.fc",
        (
            Part(_GATE_UP_PROJ, ("intermediate", "hidden"), "rows", ("intermediate",)),
            Part(_GATE_UP_PROJ, ("intermediate", "hidden"), "rows", (), ("intermediate",)),
        ),
    ),
    *_MLP_OUT,
    _norm("transformer.ln_f", "model.norm", stage="last"),
    _HEAD,
)

GEMMA2_DECODER: tuple[TensorRule, ...] = (
    _embedding("vocab"),
    _norm(f"{_UNIFIED_LAYER}.input_layernorm", f"{_HF_LAYER}.input_layernorm", one_plus=True),
    *_QKV,
    *_DENSE,
    _norm(
        f"{_UNIFIED_LAYER}.post_layernorm", f"{_HF_LAYER}.post_attention_layernorm", one_plus=True
    ),
    *(
        _norm(f"{_UNIFIED_LAYER}.{name}", f"{_HF_LAYER}.{name}", one_plus=True)
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    ),
    *_MLP_IN,
    *_MLP_OUT,
    _norm("transformer.ln_f", "model.norm", stage="last", one_plus=True),
    _HEAD,
)
