"""Holds a checkpoint against table.yaml: what TensorRT-LLM's builder would find in it.

Nothing here knows specpipe; the checkpoint's own config.json says what model it is, how it is split
and how it is quantized.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open

_OWN = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]


@cache
def table() -> dict[str, Any]:
    text = (Path(__file__).parent / "table.yaml").read_text(encoding="utf-8")
    read: dict[str, Any] = yaml.safe_load(text)
    return read


def faults(checkpoint: Path) -> list[str]:
    """Says what the builder would miss, ignore or take for another thing; [] if all fits."""
    config = json.loads((checkpoint / "config.json").read_bytes())
    files = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    ranks = range(config["mapping"]["world_size"])
    if files != sorted(f"rank{rank}.safetensors" for rank in ranks):
        return [f"the rank files are {files}"]
    found = []
    for rank in ranks:
        tree = Tree(config, rank)
        held = tree.loaded(_tensors(checkpoint / f"rank{rank}.safetensors"))
        found += [f"rank{rank}: {fault}" for fault in (*tree.lost, *_differences(tree, held))]
    return found


def _tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: Tensor(found.get_dtype(), tuple(found.get_shape()))
            for name, found in slices.items()
        }


def _differences(tree: Tree, held: Mapping[str, Tensor]) -> Iterator[str]:
    exempt = {name: other for name, other in table()["may_be_missing"].items() if name != "source"}
    for name, expected in sorted(tree.parameters.items()):
        if name not in held:
            if exempt.get(name) not in held:
                yield f"{name} is missing"
        elif held[name] != expected:
            yield f"{name} is {held[name]}, expected {expected}"
    allowed = tuple(tree.loading.get("surplus", ()))
    for name in sorted(held.keys() - tree.parameters.keys()):
        if not name.endswith(allowed):
            yield f"{name} is ignored"


@dataclass
class Tree:
    """The parameters of one rank, by the names that its file has them under.

    lost  arguments that a class which takes another one's place does not take over
    """

    config: Row
    rank: int
    parameters: dict[str, Tensor] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        mapping, quantization = self.config["mapping"], self.config["quantization"]
        self._ranks = mapping["tp_size"]
        self._algo: str | None = quantization["quant_algo"]
        self._excluded: list[str] = quantization.get("exclude_modules", [])
        pp_size, pp_rank = mapping["pp_size"], self.rank // self._ranks
        self._words = self._sizes()
        model = next(
            model
            for model in table()["models"]
            if self.config["architecture"] in model["architectures"]
        )
        stages = {None, *(["first"] if pp_rank == 0 else [])}
        stages |= {"last"} if pp_rank == pp_size - 1 else set()
        for name, row in model["modules"].items():
            if row.get("stage") in stages:
                self._add(name, row)
        size, longer = divmod(self.config["num_hidden_layers"], pp_size)
        for layer in range(size + (pp_rank < longer)):
            for name, row in model["layer"].items():
                if "when" not in row or self.config.get(row["when"]):
                    self._add(f"transformer.layers.{layer}.{name}", row)

    @property
    def loading(self) -> Row:
        found: Row = table()["loading"].get(self._algo, {})
        return found

    def loaded(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what becomes of a rank file's tensors before they are held against the tree."""
        made: dict[str, Tensor] = {}
        rows = [*table()["loading"]["any"]["rows"], *self.loading.get("rows", ())]
        for name, tensor in tensors.items():
            row = next((row for row in rows if self._is_for(row, name, tensor)), None)
            if row is None:
                made[name] = tensor
                continue
            sizes = dict(zip(("rows", "columns"), tensor.shape, strict=False))
            stem = name.removesuffix(row["ends"])
            for part in row["becomes"]:
                shape = tuple(_size(sizes, text) for text in part["shape"])
                made[stem + part["name"]] = Tensor(self._dtype(part, tensor.dtype), shape)
        return made

    def _is_for(self, row: Row, name: str, tensor: Tensor) -> bool:
        if not name.endswith(row["ends"]) or row.get("dtype", tensor.dtype) != tensor.dtype:
            return False
        named = self.loading.get("only")
        if named is None or row not in self.loading["rows"]:
            return True
        return any(word in name for word in named) and not self._is_excluded(name)

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._excluded)

    def _class_of(self, name: str, row: Row) -> str:
        plain: str = row["class"]
        if self._algo is None:
            return plain
        quantization = table()["quantizations"][self._algo]
        never = quantization.get("never", ())
        if self._is_excluded(name) or any(fnmatchcase(name, pattern) for pattern in never):
            return plain
        replaced: str = quantization["replaced"].get(plain, plain)
        return replaced

    def _add(self, name: str, row: Row) -> None:
        made = table()["classes"][self._class_of(name, row)]
        if "children" not in made:
            self._add_parameters(name, row, made)
            return
        arguments = {
            argument
            for argument, when in row.get("arguments", {}).items()
            if when == "always" or self.config.get(when)
        }
        for argument in sorted(arguments - set(made.get("takes", arguments))):
            self.lost.append(f"{name} loses its {argument}")
        for child, child_row in made["children"].items():
            if "when" not in child_row or child_row["when"] in arguments:
                key = row.get(child_row.get("bias"))
                self._add(f"{name}.{child}", {**child_row, "bias": key})
        if made.get("is_attention") and self.config["quantization"]["kv_cache_quant_algo"]:
            self._add_parameters(name, row, table()["kv_cache"])

    def _add_parameters(self, name: str, row: Row, made: Row) -> None:
        words = self._words | {"size": self._words.get(row.get("size", ""), 0)}
        multiple = made.get("multiple", {}).get(self._algo, 1)
        if multiple > 1 and "group" in words:
            multiple = max(multiple, words["group"])
        for side in ("in", "out"):
            if side in row:
                fill = multiple * self._ranks
                words[side] = -(-self._words[row[side]] // fill) * fill
                if made["split"] == side:
                    words[side] //= self._ranks
        for parameter, stored in made["parameters"].items():
            if parameter == "bias" and not self.config.get(row.get("bias") or ""):
                continue
            if stored.get("only", self._algo) != self._algo:
                continue
            shape = stored["shape"]
            if isinstance(shape, dict):
                shape = shape[self._algo]
            self.parameters[f"{name}.{parameter}"] = Tensor(
                self._dtype(stored, ""), tuple(_size(words, text) for text in shape)
            )

    def _dtype(self, row: Row, otherwise: str) -> str:
        dtype: str = row.get("dtype", otherwise)
        return _OWN[self.config["dtype"]] if dtype == "own" else dtype

    def _sizes(self) -> dict[str, int]:
        config, ranks = self.config, self._ranks
        heads, head_size = config["num_attention_heads"], config["head_size"]
        local_heads = heads // ranks + 2 * -(-config["num_key_value_heads"] // ranks)
        vocab, hidden = config["vocab_size"], config["hidden_size"]
        words = {
            "hidden": hidden,
            "intermediate": config["intermediate_size"],
            "activated": config["intermediate_size"] * (1 + (config["hidden_act"] == "swiglu")),
            "head_size": head_size,
            "heads": heads * head_size,
            "qkv": ranks * local_heads * head_size,
            "vocab": vocab,
            "padded_vocab": -(-vocab // ranks) * ranks,
            "local_vocab": vocab,
            "local_hidden": hidden,
        }
        if config["use_parallel_embedding"]:
            sharded = ("local_vocab", "local_hidden")[config["embedding_sharding_dim"]]
            words[sharded] = -(-words[sharded] // ranks)
        if self._algo in ("W4A16_AWQ", "W4A8_AWQ"):
            words["group"] = config["quantization"]["group_size"]
        return words


def _size(words: Mapping[str, int], text: str | int) -> int:
    """Counts `in/16^4`: words, divided by words or numbers, filled up to a multiple."""
    if isinstance(text, int):
        return text
    first, *rest = re.split(r"([/^])", text)
    size = words[first]
    for sign, other in zip(rest[::2], rest[1::2], strict=True):
        by = int(other) if other.isdigit() else words[other]
        size = size // by if sign == "/" else -(-size // by) * by
    return size
