"""The decoder as a TensorRT network: Llama's, which Mistral, Qwen2 and Qwen3 share.

Letters: shapes.py. C channels (hidden_size). Half precision is left where transformers leaves it:
norms, rotary embedding, the activation and the softmax are computed in float32, and so are logits
returned. TensorRT fuses what lies between two matrix products, conversions included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specpipe.checkpoints.formats import TENSORRT_FORMATS
from specpipe.checkpoints.quantized_rules import is_quantized, shares_embedding
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.errors import EngineBuildError
from specpipe.runtimes.tensorrt import shapes
from specpipe.runtimes.tensorrt.graph import Graph, ITensor

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_EMBEDDING, _HEAD = "transformer.vocab_embedding", "lm_head"


def check_supported(role: str, config: UnifiedConfig, *, max_seq_len: int) -> None:
    """Raises EngineBuildError for a unified config that this network would compute otherwise."""
    architecture = config.architecture
    if architecture not in ARCHITECTURES:
        raise EngineBuildError(
            f"{role}: runtime 'tensorrt' does not build {architecture}; it builds "
            f"{', '.join(ARCHITECTURES)}; engine.runtime torch runs it"
        )
    algorithms = config.quantization
    if config.format is not None and config.format not in TENSORRT_FORMATS:
        raise EngineBuildError(
            f"{role}: quant_algo {algorithms.quant_algo} is not supported by runtime "
            f"'tensorrt', which builds {' and '.join(TENSORRT_FORMATS)}; engine.runtime torch and "
            "tensorrt_llm run it"
        )
    if algorithms.kv_cache_quant_algo is not None:
        raise EngineBuildError(
            f"{role}: kv_cache_quant_algo {algorithms.kv_cache_quant_algo} is not supported by "
            "runtime 'tensorrt': the library's KV cache takes floating-point types only; "
            "engine.runtime torch and tensorrt_llm run it"
        )
    window = config.sliding_window
    if window is not None and window < max_seq_len:
        raise EngineBuildError(
            f"{role}: its attention sees {window} tokens, and TensorRT's attention layer has no "
            f"window; set engine.max_seq_len to at most {window}, or engine.runtime torch"
        )
    scaling = config.rotary_scaling or {"rope_type": "default"}
    original = scaling.get("original_max_position_embeddings", max_seq_len)
    if scaling["rope_type"] in ("dynamic", "longrope") and max_seq_len > original:
        raise EngineBuildError(
            f"{role}: rope type '{scaling['rope_type']}' turns a text otherwise once it is longer "
            f"than {original} tokens, and an engine has one table of rotations; set "
            f"engine.max_seq_len to at most {original}, or engine.runtime torch"
        )


@dataclass(frozen=True)
class _Step:
    """What every layer of one forward needs besides the hidden states.

    cos, sin       float32 [S, rotary size / 2]
    query_shape, key_shape
                   the shape of the queries [B, H, N, D] and of keys or values, as tensors
    """

    position_ids: ITensor
    write_indices: ITensor
    key_value_lengths: ITensor
    cos: ITensor
    sin: ITensor
    query_shape: ITensor
    key_shape: ITensor


def build_decoder(graph: Graph, config: UnifiedConfig, *, capacity: int) -> None:
    """Adds inputs, layers and outputs of a whole decoder, as shapes.py lists them."""
    input_ids = graph.input(shapes.INPUT_IDS, graph.int32, (-1, -1))
    step = _step(graph, config, input_ids, capacity)
    logits_indices = graph.input(shapes.LOGITS_INDICES, graph.int32, (-1,))
    with graph.scope("embedding"):
        hidden = graph.gather(graph.weight(f"{_EMBEDDING}.weight", rank=2), input_ids)
    for layer in range(config.num_hidden_layers):
        with graph.scope(f"layers.{layer}"):
            hidden = _layer(graph, config, hidden, layer, step, capacity)
    with graph.scope("head"):
        rows = graph.gather(graph.reshape(hidden, (-1, config.hidden_size)), logits_indices)
        normed = _rms_norm(graph, rows, "transformer.ln_f", config.norm_epsilon)
        logits = graph.cast(_linear(graph, config, normed, _head(config)), graph.float32)
    graph.output(logits, shapes.LOGITS)


def _head(config: UnifiedConfig) -> str:
    """Returns the name of the head; a tied one is the embedding, which an engine holds once."""
    return _EMBEDDING if shares_embedding(config) else _HEAD


def _step(graph: Graph, config: UnifiedConfig, input_ids: ITensor, capacity: int) -> _Step:
    cos, sin = rotary_tables(config, capacity)
    with graph.scope("step"):
        sizes = graph.gather(graph.shape(input_ids), graph.constant([0, 0, 1, 1], graph.int64))
        variable = graph.multiply(sizes, graph.constant([1, 0, 1, 0], graph.int64))

        def heads(count: int) -> ITensor:
            """Returns the shape [B, count, N, D]."""
            fixed = graph.constant([0, count, 0, config.head_size], graph.int64)
            return graph.add(variable, fixed)

        return _Step(
            # The rotary layer of TensorRT for RTX is documented for int64.
            position_ids=graph.cast(
                graph.input(shapes.POSITION_IDS, graph.int32, (-1, -1)), graph.int64
            ),
            write_indices=graph.input(shapes.WRITE_INDICES, graph.int32, (-1,)),
            key_value_lengths=graph.input(shapes.KEY_VALUE_LENGTHS, graph.int32, (-1,)),
            cos=graph.constant(cos, graph.float32, "cos"),
            sin=graph.constant(sin, graph.float32, "sin"),
            query_shape=heads(config.num_attention_heads),
            key_shape=heads(config.num_key_value_heads),
        )


def rotary_tables(config: UnifiedConfig, capacity: int) -> tuple[Any, Any]:
    """Returns cosines and sines of the positions, float32 [capacity, rotary size / 2] each."""
    from specpipe.runtimes.torch.rotary import Rotary  # torch takes a second to import

    size = config.rotary_embedding_dim
    rotary = Rotary(config.head_size, size, config.rotary_base, config.rotary_scaling)
    table = rotary.table(capacity)[:, 0, : size // 2]
    return table.real.numpy(), table.imag.numpy()


def _layer(
    graph: Graph, config: UnifiedConfig, hidden: ITensor, n: int, step: _Step, capacity: int
) -> ITensor:
    """Returns the hidden states [B, N, C] after one layer."""
    prefix = f"transformer.layers.{n}"
    epsilon = config.norm_epsilon
    with graph.scope("attention"):
        normed = _rms_norm(graph, hidden, f"{prefix}.input_layernorm", epsilon)
        attended = _attention(graph, config, normed, n, step, capacity)
        hidden = graph.add(hidden, attended)
    with graph.scope("mlp"):
        normed = _rms_norm(graph, hidden, f"{prefix}.post_layernorm", epsilon)
        return graph.add(hidden, _mlp(graph, config, normed, f"{prefix}.mlp"))


def _attention(
    graph: Graph, config: UnifiedConfig, x: ITensor, n: int, step: _Step, capacity: int
) -> ITensor:
    """Returns grouped-query attention [B, N, C] over the KV cache, which it writes first."""
    prefix = f"transformer.layers.{n}.attention"
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_size = config.head_size
    qkv = _linear(graph, config, x, f"{prefix}.qkv")
    heads = graph.reshape(qkv, (0, 0, num_heads + 2 * num_kv_heads, head_size), after=(0, 2, 1, 3))
    query = graph.slice(heads, (0, 0, 0, 0), step.query_shape)
    key = graph.slice(heads, (0, num_heads, 0, 0), step.key_shape)
    value = graph.slice(heads, (0, num_heads + num_kv_heads, 0, 0), step.key_shape)
    if config.qk_layernorm:
        query = _rms_norm(graph, query, f"{prefix}.q_layernorm", config.norm_epsilon)
        key = _rms_norm(graph, key, f"{prefix}.k_layernorm", config.norm_epsilon)
    size = config.rotary_embedding_dim
    scale = graph.scalar(head_size**-0.5, rank=4)
    query = graph.cast(graph.multiply(_rotate(graph, query, step, size), scale), graph.dtype)
    key = graph.cast(_rotate(graph, key, step, size), graph.dtype)
    caches = []
    for name, update in ((f"key_cache.{n}", key), (f"value_cache.{n}", value)):
        cache = graph.input(name, graph.dtype, (-1, num_kv_heads, capacity, head_size))
        caches.append(graph.update_kv_cache(cache, update, step.write_indices))
        graph.output(caches[-1], f"{name}.out")
    attended = graph.attention(query, caches[0], caches[1], step.key_value_lengths)
    joined = graph.reshape(attended, (0, 0, num_heads * head_size), before=(0, 2, 1, 3))
    return _linear(graph, config, joined, f"{prefix}.dense")


def _rotate(graph: Graph, x: ITensor, step: _Step, size: int) -> ITensor:
    """Returns x [B, heads, N, D] rotated; in float32, so that far positions keep their angle."""
    x = graph.cast(x, graph.float32)
    return graph.rotary_embedding(x, step.cos, step.sin, step.position_ids, size)


def _mlp(graph: Graph, config: UnifiedConfig, x: ITensor, prefix: str) -> ITensor:
    """Returns silu(x · fc) · (x · gate) · proj; `fc` is TensorRT-LLM's name for gate_proj."""
    activated = graph.cast(_linear(graph, config, x, f"{prefix}.fc"), graph.float32)
    activated = graph.cast(graph.multiply(activated, graph.sigmoid(activated)), graph.dtype)
    gated = graph.multiply(activated, _linear(graph, config, x, f"{prefix}.gate"))
    return _linear(graph, config, gated, f"{prefix}.proj")


def _linear(graph: Graph, config: UnifiedConfig, x: ITensor, name: str) -> ITensor:
    """Returns x · Wᵀ + b, with x and W rounded as the format of a quantized linear has it."""
    rank = len(x.shape)
    with graph.scope(name.rpartition(".")[2]):
        weight = graph.weight(f"{name}.weight", rank=rank)
        if is_quantized(config, name):
            x, weight = _quantized(graph, config, x, weight, name)
        y = graph.matmul(x, weight)
        bias = f"{name}.bias"
        return graph.add(y, graph.weight(bias, rank=rank)) if graph.has_weight(bias) else y


def _quantized(
    graph: Graph, config: UnifiedConfig, x: ITensor, weight: ITensor, name: str
) -> tuple[ITensor, ITensor]:
    """Returns the factors of a quantized linear, whose making TensorRT fuses with the product."""
    rank = len(x.shape)
    if config.quantization.activations == "fp8":
        x = graph.round_fp8(x, graph.weight(f"{name}.activation_scaling_factor", rank=1))
        scale = graph.weight(f"{name}.weights_scaling_factor", rank=1)
        return x, graph.dequantize(weight, scale)
    x = graph.multiply(x, graph.weight(f"{name}.prequant_scaling_factor", rank=rank))
    return x, graph.dequantize(weight, graph.weight(f"{name}.weights_scaling_factor", rank=rank))


def _rms_norm(graph: Graph, x: ITensor, name: str, epsilon: float) -> ITensor:
    """Returns x / sqrt(mean(x²) + ε) · w, rounded as in transformers, where w comes last."""
    rank = len(x.shape)
    with graph.scope(name.rpartition(".")[2]):
        wide = graph.cast(x, graph.float32)
        mean_square = graph.mean(graph.multiply(wide, wide))
        length = graph.reciprocal_sqrt(graph.add(mean_square, graph.scalar(epsilon, rank=rank)))
        normed = graph.cast(graph.multiply(wide, length), graph.dtype)
        return graph.multiply(normed, graph.weight(f"{name}.weight", rank=rank))
