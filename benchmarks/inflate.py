"""Makes a small trained checkpoint as large as another model, without changing what it computes.

    python benchmarks/inflate.py models/python-code/target /data/target-7b --size 7b
    python benchmarks/inflate.py models/python-code/draft /data/draft --size 896,24,7,4864

A pair made so accepts as many draft tokens as the small pair and costs what a large one does: a
speed measured on it is that of real acceptance. What is added never reaches the logits:

hidden size         new channels of the residual stream are zero, as nothing writes to them; the
                    mean that an RMSNorm takes is over more channels then, which its weight (times
                    sqrt(small / large)) and its epsilon (times small / large) undo; norms of heads
                    (Qwen 3) have the same epsilon and change by what little this is to them
heads, MLP          new ones are computed, and multiplied by zeros of o_proj and down_proj
layers              all of their o_proj and down_proj is zero
everything else     random, as zeros take a GPU less power to move and so may take less time

The size of a head, the query heads per KV head, the vocabulary and the rotary embedding stay. Every
family but Gemma 2 can be inflated. Tensors are made one at a time on the device that is to hold
them, so that a model which no disk here has room for can be made straight in a GPU's memory.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specpipe.checkpoints.checkpoint import (
    CONFIG_NAME,
    ELEMENT_BYTES,
    INDEX_NAME,
    create_safetensors,
    open_checkpoint,
    raw_dtype,
)
from specpipe.checkpoints.families import EMBEDDING, HEAD
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.rules import Part
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.checkpoints.unified_layout import part_shape, source_rows, tensor_rules
from specpipe.errors import CheckpointError, ConfigError, SpecpipeError

SHARD_BYTES = 2_000_000_000
_STD = 0.02
"""Of added weights. Trained ones have more, so that the largest numbers of a quantized matrix and
of its input stay those of the small model."""


@dataclass(frozen=True)
class Size:
    """What a model is inflated to; there are as many query heads for a KV head as before."""

    hidden_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    intermediate_size: int


SIZES = {
    "0.4b": Size(896, 24, 7, 4864),
    "0.5b": Size(1024, 24, 8, 5632),
    "7b": Size(4096, 32, 16, 14336),
    "32b": Size(5120, 64, 16, 29184),
}
"""Named for their parameters with heads of 64, two query heads for a KV head in the first two and
four in the others, and 4,096 tokens: 0.38, 0.49, 7.00 and 32.07 billion. The last two have the KV
cache of Llama 3 8B and Qwen2.5 32B: 1,024 channels a layer."""


def inflated_config(
    config: Mapping[str, Any], size: Size, *, max_position_embeddings: int | None = None
) -> dict[str, Any]:
    """Returns the `config.json` of the inflated model.

    config  that of the small one, as either transformers 4.57 or 5.x spells it
    max_position_embeddings
            more positions than the model was trained for, to measure with long contexts; positions
            that it had compute what they did
    """
    small = unified_config(config)
    _check_size(small, size)
    inflated = dict(config) | {
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_hidden_layers,
        "num_attention_heads": size.num_key_value_heads * _group_size(small),
        "num_key_value_heads": size.num_key_value_heads,
        "intermediate_size": size.intermediate_size,
        "head_dim": small.head_size,
        "rms_norm_eps": small.norm_epsilon * small.hidden_size / size.hidden_size,
    }
    if config.get("layer_types"):
        num_added = size.num_hidden_layers - small.num_hidden_layers
        inflated["layer_types"] = [*config["layer_types"], *["full_attention"] * num_added]
    if max_position_embeddings is not None:
        if small.rotary_scaling is not None:
            raise ConfigError(
                "the checkpoint scales its rotary embedding by its number of positions; "
                "leave max_position_embeddings as it is"
            )
        inflated["max_position_embeddings"] = max_position_embeddings
    return inflated


def inflated_tensors(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | Callable[[str], Tensor],
    size: Size,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Iterator[tuple[str, Tensor]]:
    """Yields name and weights of every Hugging Face tensor of the inflated model.

    config   the small model's `config.json`
    tensors  its weights by their Hugging Face names, on any device
    seed     of the added weights; on one kind of device the same seed, name and size give the same

    Each tensor is made when it is asked for, on the device, in its dtype and without a copy beside
    it. A model whose head is its embedding has no tensor for the head, as in its checkpoint.
    """
    small = unified_config(config)
    large = unified_config(inflated_config(config, size))
    read = tensors if callable(tensors) else tensors.__getitem__
    norm_scale = math.sqrt(small.hidden_size / large.hidden_size)
    small_parts = _hf_tensors(small)
    for name, parts in _hf_tensors(large).items():
        tensor = torch.empty(_shape(large, parts), dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        _fill(tensor, parts[0], generator)
        if name in small_parts:
            trained = read(name)
            if trained.shape != (expected := _shape(small, parts)):
                raise CheckpointError(
                    f"{name} has shape {tuple(trained.shape)}, config.json wants {expected}"
                )
            if _is_hidden_norm(parts[0]):
                trained = trained.float() * norm_scale
            for part in parts:
                rows = _rows(small, part, trained)
                corner = _rows(large, part, tensor)[tuple(slice(size) for size in rows.shape)]
                corner.copy_(rows)
        yield name, tensor


def num_parameters(config: Mapping[str, Any]) -> int:
    """Counts the weights of a model by its `config.json`; a tied head is the embedding."""
    unified = unified_config(config)
    return sum(math.prod(_shape(unified, parts)) for parts in _hf_tensors(unified).values())


def open_source(folder: Path) -> tuple[Mapping[str, Any], Callable[[str], Tensor]]:
    """Opens a checkpoint folder; returns its `config.json` and what reads one of its tensors."""
    checkpoint = open_checkpoint(folder)

    def read(name: str) -> Tensor:
        if name not in checkpoint.tensors:
            raise CheckpointError(f"{folder} has no tensor {name}, which its config.json wants")
        with safe_open(checkpoint.tensors[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return checkpoint.config, read


def write_inflated(
    source: Path,
    out: Path,
    size: Size,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    max_position_embeddings: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Inflates a checkpoint folder into a new one, in its own dtype, with its tokenizer.

    The folder has its name when it is complete. One tensor is in memory at a time.
    """
    config, read = open_source(source)
    inflated = inflated_config(config, size, max_position_embeddings=max_position_embeddings)
    unified = unified_config(inflated)
    stored = unified.plain_dtype
    shapes = {name: _shape(unified, parts) for name, parts in _hf_tensors(unified).items()}
    tensor_bytes = {
        name: math.prod(shape) * ELEMENT_BYTES[stored] for name, shape in shapes.items()
    }
    num_bytes = sum(tensor_bytes.values())
    unfinished = out.with_name(f"{out.name}.unfinished")
    for path in (out, unfinished):
        if path.exists():
            raise ConfigError(f"{path} is there already; remove it or choose another name")
    out.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(out.parent).free) < num_bytes:
        raise ConfigError(
            f"{out.parent} has {free / 1e9:.1f} GB free, {num_bytes / 1e9:.1f} GB are needed"
        )
    made = inflated_tensors(
        config, read, size, device=device, dtype=getattr(torch, unified.dtype), seed=seed
    )
    shards = _shards(tensor_bytes, shard_bytes)
    weight_map: dict[str, str] = {}
    unfinished.mkdir()
    try:
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            weight_map |= dict.fromkeys(names, file)
            header = {name: (stored, shapes[name]) for name in names}
            with create_safetensors(unfinished / file, header) as writer:
                for name, tensor in (next(made) for _ in names):
                    raw = tensor.cpu().view(torch.uint8).numpy().view(raw_dtype(stored))
                    writer.write(name, raw)
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        _write_json(unfinished / INDEX_NAME, index)
        _write_json(unfinished / CONFIG_NAME, inflated)
        for path in _small_files(source):
            shutil.copyfile(path, unfinished / path.name)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    unfinished.rename(out)


def _check_size(small: UnifiedConfig, size: Size) -> None:
    if small.architecture == "Gemma2ForCausalLM":
        raise ConfigError(
            "Gemma2ForCausalLM scales its embeddings by its hidden size and cannot be inflated"
        )
    num_heads = size.num_key_value_heads * _group_size(small)
    if small.architecture == "LlamaForCausalLM" and size.hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size {size.hidden_size} is not a multiple of {num_heads} query heads "
            f"({size.num_key_value_heads} KV heads): transformers loads no such Llama"
        )
    for field in fields(size):
        wanted, given = getattr(size, field.name), getattr(small, field.name)
        if wanted < given:
            raise ConfigError(
                f"{field.name} {wanted} is less than the checkpoint's {given}: a model can be "
                "inflated, not shrunk"
            )


def _group_size(config: UnifiedConfig) -> int:
    """Returns how many query heads a KV head has."""
    return config.num_attention_heads // config.num_key_value_heads


def _hf_tensors(config: UnifiedConfig) -> dict[str, list[Part]]:
    """Returns the parts that each tensor of the Hugging Face checkpoint has, in unified order.

    Phi-3 keeps queries, keys and values in one tensor, and both inputs of its MLP.
    """
    tensors: dict[str, list[Part]] = {}
    for rule, layer in tensor_rules(config):
        for part in rule.parts:
            name = part.source.format(n=layer)
            if name != HEAD or not config.tie_word_embeddings:
                tensors.setdefault(name, []).append(part)
    return tensors


def _shape(config: UnifiedConfig, parts: list[Part]) -> tuple[int, ...]:
    num_rows, _ = source_rows(config, parts[0])
    return (num_rows, *part_shape(config, parts[0])[1:])


def _rows(config: UnifiedConfig, part: Part, tensor: Tensor) -> Tensor:
    """Returns the rows of a Hugging Face tensor that a part is."""
    _, start = source_rows(config, part)
    return tensor[start : start + part_shape(config, part)[0]]


def _is_norm(part: Part) -> bool:
    return part.source.endswith("norm.weight")


def _is_hidden_norm(part: Part) -> bool:
    return _is_norm(part) and part.shape == ("hidden",)


def _fill(tensor: Tensor, part: Part, generator: torch.Generator) -> None:
    """Fills a tensor as if all of it were added."""
    if _is_norm(part):
        tensor.normal_(1.0, _STD, generator=generator)
    elif part.source == EMBEDDING or part.shape[0] == "hidden":  # what writes the residual stream
        tensor.zero_()
    else:
        tensor.normal_(0.0, _STD, generator=generator)


def _shards(tensor_bytes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Divides tensors into files of about the same size, in order."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in tensor_bytes.items():
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _small_files(source: Path) -> Iterator[Path]:
    """Yields the files of a checkpoint that inflating does not change, those of its tokenizer."""
    for path in sorted(source.iterdir()):
        is_small = path.suffix in {".json", ".jinja", ".model", ".txt"}
        if is_small and path.is_file() and path.name not in (CONFIG_NAME, INDEX_NAME):
            yield path


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def size_of(text: str) -> Size:
    """Reads a size: a name, or its four numbers separated by commas."""
    if text in SIZES:
        return SIZES[text]
    try:
        return Size(*(int(number) for number in text.split(",")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"'{text}' is neither {', '.join(SIZES)} nor four numbers: hidden size, layers, "
            "KV heads, intermediate size"
        ) from None


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a checkpoint folder")
    parser.add_argument("out", type=Path, help="the folder to write")
    names = ", ".join(f"{name} ({','.join(map(str, astuple(s)))})" for name, s in SIZES.items())
    parser.add_argument(
        "--size",
        type=size_of,
        required=True,
        help=f"hidden size,layers,KV heads,intermediate size, or one of {names}",
    )
    parser.add_argument("--positions", type=int, help="max_position_embeddings; default: as it is")
    parser.add_argument("--seed", type=int, default=0, help="of the added weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    try:
        write_inflated(
            arguments.source,
            arguments.out,
            arguments.size,
            device=arguments.device,
            seed=arguments.seed,
            max_position_embeddings=arguments.positions,
        )
    except SpecpipeError as exc:
        raise SystemExit(f"Error: {exc}") from exc
    config = json.loads((arguments.out / CONFIG_NAME).read_bytes())
    print(f"{arguments.out}: {num_parameters(config) / 1e9:.2f} B parameters")


if __name__ == "__main__":
    main()
