"""The tensors of a unified checkpoint: their rules, their shapes, and what each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specpipe.checkpoints.checkpoint import RawArray
from specpipe.checkpoints.families import FAMILIES
from specpipe.checkpoints.quantized_rules import kv_cache_rule, quantized_rules
from specpipe.checkpoints.rules import Part, PipelineStage, TensorRule
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.errors import CheckpointError, show

_MOST_LAYERS = 1 << 16  # the most that serving.limits.max_num_layers may be


@dataclass(frozen=True)
class UnifiedTensor:
    """One tensor of the whole model, and where its pieces lie."""

    name: str
    rule: TensorRule
    layer: int | None
    pp_rank: int
    local_name: str


def unified_tensors(config: UnifiedConfig) -> Iterator[UnifiedTensor]:
    """Yields every tensor of the model in the order of the forward pass.

    `name` counts layers over the whole model, `local_name` within the pipeline stage.
    """
    pp_size = config.mapping.pp_size
    stages = [pipeline_layers(config, pp_rank) for pp_rank in range(pp_size)]
    stage_of = {layer: rank for rank, layers in enumerate(stages) for layer in layers}
    for rule, layer in tensor_rules(config):
        if layer is None:
            pp_rank = 0 if rule.stage == "first" else pp_size - 1
            yield UnifiedTensor(rule.name, rule, None, pp_rank, rule.name)
        else:
            pp_rank = stage_of[layer]
            name = rule.name.format(n=layer)
            local_name = rule.name.format(n=layer - stages[pp_rank].start)
            yield UnifiedTensor(name, rule, layer, pp_rank, local_name)


def tensor_rules(config: UnifiedConfig) -> Iterator[tuple[TensorRule, int | None]]:
    """Yields the rules that hold for a unified config, each layer's with the number of the layer.

    The order is that of the forward pass, and of the tensors in the rank files.
    """
    if config.num_hidden_layers > _MOST_LAYERS:  # the artifact may be another's work
        raise CheckpointError(
            f"config.json: num_hidden_layers is {show(config.num_hidden_layers)}, expected at "
            f"most {_MOST_LAYERS}"
        )
    rules = [
        rule
        for rule in FAMILIES[config.architecture].tensors
        if rule.when is None or getattr(config, rule.when)
    ]
    kv_cache = kv_cache_rule(config)

    def of_stage(
        stage: PipelineStage, layer: int | None
    ) -> Iterator[tuple[TensorRule, int | None]]:
        for rule in rules:
            if rule.stage == stage:
                yield from ((made, layer) for made in quantized_rules(config, rule, layer))

    yield from of_stage("first", None)
    for layer in range(config.num_hidden_layers):
        yield from of_stage("layer", layer)
        if kv_cache is not None:
            yield kv_cache, layer
    yield from of_stage("last", None)


def part_shape(config: UnifiedConfig, part: Part) -> tuple[int, ...]:
    """Returns the shape of a part for this config."""
    sizes = _sizes(config)
    return tuple(_size(sizes, name) for name in part.shape)


def whole_shape(config: UnifiedConfig, rule: TensorRule) -> tuple[int, ...]:
    """Returns the shape of one unified tensor, merged from all ranks."""
    return _joined([part_shape(config, part) for part in rule.parts])


def source_rows(config: UnifiedConfig, part: Part) -> tuple[int, int]:
    """Returns how many rows a part's Hugging Face tensor has, and at which the part begins."""
    before = _num_rows(config, part.before)
    return before + _num_rows(config, part.shape[:1]) + _num_rows(config, part.after), before


def stored_dtype(config: UnifiedConfig, rule: TensorRule) -> str:
    """Returns the dtype of a unified tensor, as safetensors spells it."""
    if rule.parts[0].one_plus:
        return config.one_plus_dtype
    return rule.dtype or config.plain_dtype


def pipeline_layers(config: UnifiedConfig, pp_rank: int) -> range:
    """Returns the layers of one pipeline stage; the first stages take the layers left over.

    As TensorRT-LLM 1.x divides them (mapping.py, pp_layers).
    """
    size, num_left_over = divmod(config.num_hidden_layers, config.mapping.pp_size)
    start = pp_rank * size + min(pp_rank, num_left_over)
    return range(start, start + size + (pp_rank < num_left_over))


def piece_shape(config: UnifiedConfig, part: Part) -> tuple[int, ...]:
    """Returns the shape of one rank's piece of a part."""
    rows, *columns = part_shape(config, part)
    tp_size = config.mapping.tp_size
    if part.split == "rows":
        return (rows // tp_size, *columns)
    if part.split == "columns":
        return (rows, columns[0] // tp_size)
    if part.split == "kv_heads":
        return (max(rows // tp_size, rows // config.num_key_value_heads), *columns)
    if part.split == "vocab":
        return (-(-rows // tp_size), *columns)
    return (rows, *columns)


def rank_shape(config: UnifiedConfig, rule: TensorRule) -> tuple[int, ...]:
    """Returns the shape of one unified tensor on one rank."""
    return _joined([piece_shape(config, part) for part in rule.parts])


def first_row(config: UnifiedConfig, part: Part, tp_rank: int) -> int:
    """Returns the row of the whole part at which a rank's piece begins."""
    if part.split == "kv_heads":
        # Ranks 0 … tp/kv - 1 hold head 0, the next as many head 1, as their query heads need.
        num_heads = config.num_key_value_heads
        head = tp_rank * num_heads // config.mapping.tp_size
        return head * (part_shape(config, part)[0] // num_heads)
    return tp_rank * piece_shape(config, part)[0] if part.split in ("rows", "vocab") else 0


def piece_of(
    config: UnifiedConfig, part: Part, row: int, block: RawArray, tp_rank: int
) -> tuple[int, RawArray]:
    """Cuts out of a part's rows from `row` on what belongs to a rank.

    Returns it with its first row within the rank's piece.
    """
    shape = piece_shape(config, part)
    if part.split == "columns":
        return row, block[:, tp_rank * shape[1] : (tp_rank + 1) * shape[1]]
    first = first_row(config, part, tp_rank)
    start, stop = max(row, first), min(row + len(block), first + shape[0])
    return max(start - first, 0), block[start - row : max(stop - row, start - row)]


def _joined(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape of parts that stand one below the other."""
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _size(sizes: Mapping[str, int], name: str) -> int:
    """Returns a size by its name, which may be divided by a number or another size."""
    whole, _, divisor = name.partition("/")
    size = int(whole) if whole.isdigit() else sizes[whole]
    if not divisor:
        return size
    return size // (int(divisor) if divisor.isdigit() else sizes[divisor])


def _sizes(config: UnifiedConfig) -> dict[str, int]:
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "head_size": config.head_size,
        "heads": config.query_size,
        "kv_heads": config.key_size,
        "block": config.quantization.block_size or 1,
    }


def _num_rows(config: UnifiedConfig, names: tuple[str, ...]) -> int:
    sizes = _sizes(config)
    return sum(sizes[name] for name in names)
