"""What a unified tensor is made of: rules that conversion, quantization and merging back read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specpipe.checkpoints.formats import Content

PipelineStage = Literal["layer", "first", "last"]
"""The pipeline stage that holds a tensor: that of its layer, the first or the last."""

Split = Literal["none", "rows", "columns", "kv_heads", "vocab"]
"""How a tensor is divided over the TP ranks.

none      every rank holds all of it
rows      equal blocks of rows, rank by rank
columns   equal blocks of columns
kv_heads  rows of whole KV heads; with fewer heads than ranks, neighbouring ranks share a copy
vocab     equal blocks of rows after zero rows were added to make them equal
"""


@dataclass(frozen=True)
class Part:
    """One Hugging Face tensor, or some rows of it, inside a unified tensor.

    The parts of a unified tensor are concatenated along rows.

    source    the name of the Hugging Face tensor, with `{n}` for the layer
    shape     the unified config's sizes by name; "1", or one divided: "hidden/2", "hidden/block"
    before    sizes of the rows that the source has before those of the part, `after` likewise
    one_plus  1 + the source, in float32: bfloat16 would lose the last bits of the source, which
              only trtllm-build asks for
    content   what of a linear it is; all of one linear have its weight's source
    """

    source: str
    shape: tuple[str, ...]
    split: Split = "none"
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    one_plus: bool = False
    content: Content = "plain"


@dataclass(frozen=True)
class TensorRule:
    """One unified tensor.

    name   with `{n}` for the layer, where the tensor belongs to one
    stage  the pipeline stage that holds it: that of its layer, the first or the last
    when   the key of the unified config that must be true for the tensor to exist
    dtype  as safetensors spells it; None for the checkpoint's own
    """

    name: str
    parts: tuple[Part, ...]
    stage: PipelineStage = "layer"
    when: str | None = None
    dtype: str | None = None
