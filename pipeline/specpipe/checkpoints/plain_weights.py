"""The weights of a plain Hugging Face folder, matched with the tables of its family.

What `convert` writes as it is and `quantize` rounds further: rows in the dtype of config.json.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specpipe.checkpoints.checkpoint import (
    HFCheckpoint,
    RawArray,
    TensorInfo,
    brief,
    open_checkpoint,
    read_blocks,
)
from specpipe.checkpoints.families import EMBEDDING, HEAD, IGNORED_SUFFIXES
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.rules import Part
from specpipe.checkpoints.trtllm_build import fit_trtllm_build
from specpipe.checkpoints.unified_config import DTYPES, UnifiedConfig
from specpipe.checkpoints.unified_layout import part_shape, source_rows, tensor_rules
from specpipe.checkpoints.weight_values import from_float32, in_tensor, rounded, to_float32
from specpipe.errors import CheckpointError


@dataclass(frozen=True)
class PlainWeights:
    """A Hugging Face folder that holds exactly the tensors of its config; none has been read.

    config   the unified config, of plain weights
    tensors  where each Hugging Face tensor lies; a tied head lies where the embedding does
    """

    folder: Path
    config: UnifiedConfig
    tensors: Mapping[str, TensorInfo]

    def rows(self, part: Part, layer: int | None, start: int, stop: int) -> Iterator[RawArray]:
        """Yields rows of a plain part in `stored_dtype`, as `write_unified` asks for them."""
        first = source_rows(self.config, part)[1] + start
        for block in self.blocks(part.source.format(n=layer), first, stop - start):
            yield self._one_plus(block) if part.one_plus else block

    def blocks(self, name: str, start: int, count: int) -> Iterator[RawArray]:
        """Yields rows of a Hugging Face tensor in the dtype of config.json.

        They come in blocks of about 1 MiB, each of which may overwrite the one before. What is NaN,
        infinite or beyond that dtype is refused.
        """
        info = self.tensors[name]
        dtype = self.config.plain_dtype
        wider = "bfloat16" if dtype == "F16" else "float32"
        row = start
        for block in read_blocks(info.rows(start, count)):
            place = in_tensor(f"{info.file}: {name}", row)
            cure = f"set dtype to {wider} in config.json"
            yield rounded(block, info.dtype, dtype, place, cure=cure)
            row += len(block)

    def _one_plus(self, block: RawArray) -> RawArray:
        """Returns 1 + a tensor as transformers computes it, in float32; rounds that once, if ever.

        What a dtype holds, it holds with 1 added.
        """
        total = np.float32(1) + to_float32(block, self.config.plain_dtype)
        return from_float32(total, self.config.one_plus_dtype)


def open_weights(
    checkpoint: Path,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    limits: FileLimits = FILE_LIMITS,
    for_trtllm_build: bool = False,
) -> PlainWeights:
    """Opens a plain Hugging Face folder; refuses all that can be refused without its weights.

    One weight is read: a tied head that is stored too, which must be the embedding.
    """
    source = open_checkpoint(checkpoint, limits=limits)
    config = config_of(source, source.config, tp_size=tp_size, pp_size=pp_size, limits=limits)
    return match_weights(source, fit_trtllm_build(config) if for_trtllm_build else config)


def config_of(
    source: HFCheckpoint,
    hf_config: Mapping[str, Any],
    *,
    tp_size: int,
    pp_size: int,
    limits: FileLimits,
) -> UnifiedConfig:
    """Returns the unified config of an open folder; its embedding decides a dtype that is left out.

    hf_config  that of the folder, without what says how it is quantized
    """
    if not (hf_config.get("dtype") or hf_config.get("torch_dtype")):
        hf_config = {**hf_config, "dtype": _stored_dtype(source)}
    try:
        return unified_config(hf_config, tp_size=tp_size, pp_size=pp_size, limits=limits)
    except CheckpointError as exc:
        raise CheckpointError(f"{source.folder}: {exc}") from exc


def match_weights(
    source: HFCheckpoint, config: UnifiedConfig, others: Collection[str] = ()
) -> PlainWeights:
    """Finds the plain tensors of a unified config in an open folder, and nothing else.

    others  names that have another use; where a config has linears quantized, theirs
    """
    tensors = _match(source, config, others)
    is_tied = config.tie_word_embeddings and HEAD in tensors
    if is_tied and tensors[HEAD] != tensors[EMBEDDING]:
        _check_tied(source, tensors)
    return PlainWeights(source.folder, config, tensors)


def _stored_dtype(source: HFCheckpoint) -> str:
    """Returns the dtype of the embedding, for a config.json that names none."""
    info = source.tensors.get(EMBEDDING)
    names = {stored: name for name, stored in DTYPES.items()}
    return names.get(info.dtype, info.dtype) if info else "float32"


def _match(
    source: HFCheckpoint, config: UnifiedConfig, others: Collection[str]
) -> dict[str, TensorInfo]:
    """Finds every tensor that the config calls for; refuses missing, surplus and misshapen ones."""
    if config.num_hidden_layers > len(source.tensors):
        raise CheckpointError(
            f"{source.folder} has {len(source.tensors)} tensors, too few for the "
            f"{config.num_hidden_layers} layers of its config.json"
        )
    matched: dict[str, TensorInfo] = {}
    missing: list[str] = []
    for rule, layer in tensor_rules(config):
        for part in rule.parts:
            if part.content != "plain":
                continue
            name = part.source.format(n=layer)
            info = source.tensors.get(name)
            if info is None and name == HEAD and config.tie_word_embeddings:
                info = source.tensors.get(EMBEDDING)
            if info is None:
                if name not in missing:
                    missing.append(name)
                continue
            expected = (source_rows(config, part)[0], *part_shape(config, part)[1:])
            if info.shape != expected:
                raise CheckpointError(
                    f"{source.folder}: {name} has shape {list(info.shape)}, "
                    f"but config.json makes it {list(expected)}"
                )
            if info.dtype not in DTYPES.values():
                raise CheckpointError(
                    f"{source.folder}: {name} has dtype {info.dtype}, which no plain checkpoint "
                    "has; use the checkpoint that it was quantized from"
                )
            matched[name] = info
    if missing == [HEAD]:
        raise CheckpointError(
            f"{source.folder} has no {HEAD}, but tie_word_embeddings is false in config.json; "
            "set it to true if the head is the embedding, else download the weights again"
        )
    if missing:
        raise CheckpointError(
            f"{source.folder} lacks {len(missing)} tensors of its config.json: {brief(missing)}"
        )
    surplus = sorted(
        name
        for name in source.tensors.keys() - matched.keys() - set(others)
        if not name.endswith(IGNORED_SUFFIXES)
    )
    if surplus:
        raise CheckpointError(
            f"{source.folder} holds {len(surplus)} tensors for which {config.architecture} "
            f"with this config.json has no use: {brief(surplus)}"
        )
    return matched


def _check_tied(source: HFCheckpoint, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuses a head that is said to be the embedding, is stored all the same, and differs."""
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    if head.dtype != embedding.dtype or not all(
        np.array_equal(ours, theirs)
        for ours, theirs in zip(read_blocks(head), read_blocks(embedding), strict=True)
    ):
        raise CheckpointError(
            f"{source.folder}: tie_word_embeddings is true in config.json, but {HEAD} differs from "
            f"{EMBEDDING}; set it to false if the head was trained, else delete the tensor"
        )
