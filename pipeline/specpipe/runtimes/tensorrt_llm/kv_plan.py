"""How much of the GPUs' memory each engine takes, and how large its KV cache is.

The plan: a KV cache holds `engine.max_batch_size` sequences of the engine's full length, so every
request that the pair admits keeps its blocks from step to step. It is written as a number of tokens
(`max_tokens_in_paged_kv_cache`) and not as a fraction: the backend takes a fraction of what is free
when an engine loads, so with two engines on one GPU it would depend on which of them loads first,
and the first would take what the second needs for its weights. A number of tokens says the same in
either order. The fraction is written too, as a ceiling (0.9, TensorRT-LLM's own default): what it
leaves is the reserve.

Sources: TensorRT-LLM@b35ac1b6, cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp
(calculateMaxNumBlocks: the smaller of tokens and fraction, rounded up to blocks) and
trtGptModelInflightBatching.cpp (clampWindowSizesToFitAtLeastOneSequence: a cache for less than one
sequence shortens max_seq_len with only a warning). Bytes were computed, and compared with no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specpipe.checkpoints.checkpoint import ELEMENT_BYTES, QUANT_CONFIG_NAME, read_config
from specpipe.checkpoints.family_config import named_dtype
from specpipe.checkpoints.formats import FORMAT_OF_ALGO
from specpipe.checkpoints.rules import TensorRule
from specpipe.checkpoints.sizes import kv_cache_bytes_per_token, tensor_bytes
from specpipe.checkpoints.unified_config import DTYPES, UnifiedConfig
from specpipe.checkpoints.unified_layout import pipeline_layers, tensor_rules
from specpipe.checkpoints.unified_sections import NEVER_QUANTIZED, Quantization
from specpipe.errors import EngineBuildError
from specpipe.machine.gpus import gpus_here
from specpipe.machine.memory import MemoryEstimate, format_bytes
from specpipe.runtimes.engine_description import quantization_of

if TYPE_CHECKING:
    from specpipe.roles import Role
    from specpipe.runtimes.plan import Side
    from specpipe.runtimes.tensorrt_llm.plan import PairPlan

DEFAULT_FRACTION = 0.9
"""TensorRT-LLM's own; of the memory that is free when an engine loads."""

_KV_ALGORITHM_BYTES = {"FP8": 1, "INT8": 1}

_RUNTIME_BYTES = 750 * 10**6
"""A rank's CUDA context, kernels, libraries and communication buffers. A guess, not measured."""


@dataclass(frozen=True)
class CachePlan:
    """The KV cache of one engine.

    tokens           what `max_tokens_in_paged_kv_cache` says
    bytes_per_token  on the rank that takes most
    """

    tokens: int
    bytes_per_token: int

    @property
    def rank_bytes(self) -> int:
        """Bytes on the rank that takes most."""
        return self.tokens * self.bytes_per_token


def plan_cache(pair: PairPlan, side: Side) -> CachePlan:
    """Plans the KV cache of one engine.

    Raises EngineBuildError when the config asks for less than one sequence needs.
    """
    parameters = pair.engine.tensorrt_llm.parameters
    block = pair.engine.tensorrt_llm.build.tokens_per_block
    # The longest sequence, and a copy of the last block that it shares with an earlier request.
    num_blocks = -(-engine_max_seq_len(pair, side) // block) + 1
    tokens = parameters.max_tokens_in_paged_kv_cache
    if tokens is None:
        tokens = pair.engine.max_batch_size * num_blocks * block
    elif tokens < num_blocks * block:
        raise EngineBuildError(
            f"engine.tensorrt_llm.parameters.max_tokens_in_paged_kv_cache is {tokens}, but one "
            f"sequence of the {side.role} needs {num_blocks * block}: raise it, or lower "
            "engine.max_seq_len"
        )
    checkpoint = side.checkpoint
    bytes_per_token = kv_cache_bytes_per_token(
        _stored_config(side), tp_size=checkpoint.tp_size, pp_size=checkpoint.pp_size
    )
    return CachePlan(tokens, bytes_per_token)


def engine_max_seq_len(pair: PairPlan, side: Side) -> int:
    """Tokens of an engine's longest sequence; the builder adds the draft tokens to the target's."""
    added = pair.num_draft_tokens if side.role == "target" else 0
    return pair.max_seq_len_of(side) + added


def cache_fraction(pair: PairPlan) -> float:
    """The most of the free memory that a KV cache may take."""
    fraction = pair.engine.tensorrt_llm.kv_cache_free_gpu_mem_fraction
    return DEFAULT_FRACTION if fraction is None else fraction


def estimate_memory(pair: PairPlan, side: Side) -> MemoryEstimate:
    """Estimates what an engine takes on all of its GPUs together; an even split over the ranks.

    Raises EngineBuildError where the pair cannot be served as configured. With backend `pytorch`
    the KV caches are those that the same number of requests needs: that backend takes what is free.
    """
    rank = rank_memory(pair, side)
    world_size = side.checkpoint.world_size
    return MemoryEstimate(
        weights_bytes=rank.weights_bytes * world_size,
        kv_cache_bytes=rank.kv_cache_bytes * world_size,
        workspace_bytes=rank.workspace_bytes * world_size,
    )


def rank_memory(pair: PairPlan, side: Side) -> MemoryEstimate:
    """Estimates what an engine takes on the GPU of the rank that takes most."""
    config = _stored_config(side)
    pp_size = side.checkpoint.pp_size
    return MemoryEstimate(
        weights_bytes=max(_weights_bytes(config, rank) for rank in range(pp_size)),
        kv_cache_bytes=plan_cache(pair, side).rank_bytes,
        workspace_bytes=_workspace_bytes(pair, side, config),
    )


def memory_by_gpu(pair: PairPlan, side: Side) -> dict[int, MemoryEstimate]:
    """Estimates what each rank of an engine takes, by the number of its GPU."""
    config, cache = _stored_config(side), plan_cache(pair, side)
    tp_size = side.checkpoint.tp_size
    stages = [
        MemoryEstimate(
            weights_bytes=_weights_bytes(config, pp_rank),
            kv_cache_bytes=cache.tokens
            * kv_cache_bytes_per_token(
                config, tp_size=tp_size, pp_size=side.checkpoint.pp_size, pp_rank=pp_rank
            ),
            workspace_bytes=_workspace_bytes(pair, side, config),
        )
        for pp_rank in range(side.checkpoint.pp_size)
    ]
    return {gpu: stages[rank // tp_size] for rank, gpu in enumerate(_gpu_ids(pair, side))}


def check_gpus(pair: PairPlan) -> None:
    """Raises EngineBuildError where weights and KV caches alone are more than a GPU here has.

    Where the driver tells nothing, nothing is known of the GPUs, and nothing is refused.
    """
    memory = {side.role: rank_memory(pair, side) for side in (pair.draft, pair.target)}
    for gpu, size in enumerate(found.memory_bytes for found in gpus_here()):
        roles = [side.role for side in (pair.draft, pair.target) if gpu in _gpu_ids(pair, side)]
        needed = sum(memory[role].weights_bytes + memory[role].kv_cache_bytes for role in roles)
        if 0 < size < needed:
            raise EngineBuildError(
                f"GPU {gpu} has {format_bytes(size)}, but weights and KV caches alone take "
                f"{format_bytes(needed)} there ({', '.join(_shares(memory, roles))}): lower "
                "engine.max_batch_size or engine.max_seq_len, quantize a checkpoint, or give the "
                "engines other GPUs (engine.tensorrt_llm.draft_gpu_ids, target_gpu_ids)"
            )


def _shares(memory: Mapping[Role, MemoryEstimate], roles: list[Role]) -> Iterator[str]:
    for role in roles:
        weights, cache = memory[role].weights_bytes, memory[role].kv_cache_bytes
        yield f"{role}: {format_bytes(weights)} weights, {format_bytes(cache)} KV cache"


def _gpu_ids(pair: PairPlan, side: Side) -> tuple[int, ...]:
    return pair.engine.tensorrt_llm.gpu_ids(side.role, side.checkpoint.world_size)


def _stored_config(side: Side) -> UnifiedConfig:
    """The unified config as the engine stores its numbers.

    Of a checkpoint that ModelOpt quantized, and that is read as it is, hf_quant_config.json tells.
    """
    hf_config = read_config(side.folder, allow_quantized=True, limits=side.limits)
    # Half precision is as large, whichever.
    stored = {"dtype": named_dtype(hf_config)}
    config = side.unified.model_copy(update=stored)
    if config.format is not None:
        return config
    try:
        found = json.loads((side.folder / QUANT_CONFIG_NAME).read_bytes())["quantization"]
        algo = found.get("quant_algo")
        quantization = Quantization(
            quant_algo=algo if algo in FORMAT_OF_ALGO else None,
            kv_cache_quant_algo=None if found.get("kv_cache_quant_algo") is None else "FP8",
            group_size=found.get("group_size") or 128,
            exclude_modules=["lm_head", *NEVER_QUANTIZED],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return config
    return config.quantized(quantization)


def _weights_bytes(config: UnifiedConfig, pp_rank: int) -> int:
    """Weights of one rank of a pipeline stage."""
    layers = pipeline_layers(config, pp_rank)
    is_first, is_last = pp_rank == 0, pp_rank == config.mapping.pp_size - 1
    return sum(
        tensor_bytes(config, rule, layer, tp_size=config.mapping.tp_size)
        for rule, layer in tensor_rules(config)
        if _is_on(rule, layer, layers, is_first=is_first, is_last=is_last)
    )


def _is_on(
    rule: TensorRule, layer: int | None, layers: range, *, is_first: bool, is_last: bool
) -> bool:
    if layer is not None:
        return layer in layers
    return is_first if rule.stage == "first" else is_last


def _workspace_bytes(pair: PairPlan, side: Side, config: UnifiedConfig) -> int:
    """What is left: activations of one forward, and logits with the sampler's copies of them."""
    tp_size = side.checkpoint.tp_size
    sharded = config.query_size + config.intermediate_size
    row = 4 * config.hidden_size + 3 * sharded // tp_size
    element_bytes = ELEMENT_BYTES[config.plain_dtype]
    activations = pair.engine.max_num_tokens * row * element_bytes
    rows = pair.engine.max_batch_size * (pair.num_draft_tokens + 1 if side.role == "target" else 1)
    logits = 3 * 4 * rows * config.vocab_size
    return activations + logits + _RUNTIME_BYTES


def kv_bytes_per_token(config: Mapping[str, Any], *, tp_size: int = 1) -> int | None:
    """Returns the bytes that a built engine's config tells, None where it does not tell all.

    Bytes on all GPUs together: ranks that outnumber the heads hold copies.
    """
    algorithm = quantization_of(config).get("kv_cache_quant_algo")
    element = (
        ELEMENT_BYTES.get(DTYPES.get(str(config.get("dtype")), ""))
        if algorithm is None
        else _KV_ALGORITHM_BYTES.get(algorithm)
    )
    sizes = [config.get(k) for k in ("num_hidden_layers", "num_key_value_heads", "head_size")]
    if element is None or None in sizes:
        return None
    num_layers, num_kv_heads, head_size = map(int, sizes)  # type: ignore[arg-type]
    return 2 * element * num_layers * -(-num_kv_heads // tp_size) * tp_size * head_size
