"""The sections of a unified `config.json`: how a model is split, and how it is quantized."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specpipe.quantization.formats import FORMAT_OF_ALGO, FORMATS, QuantAlgo

Count = Annotated[int, Field(ge=1)]

_NEVER_QUANTIZED: dict[QuantAlgo | None, str] = {
    "W8A16": "transformer.vocab_embedding",
    "W4A16": "transformer.vocab_embedding",
    "FP8_PER_CHANNEL_PER_TOKEN": "transformer.ln_f",
}
"""What TensorRT-LLM would quantize too, by algorithm; no checkpoint has scales for it."""


class Section(BaseModel):
    """Strict and frozen; what checks it is made when the first one is, to import fast."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    def plain(self) -> dict[str, Any]:
        """Returns what config.json says: the keys that were given, as JSON has them."""
        return self.model_dump(exclude_unset=True)


class ParallelMapping(Section):
    """How the model is split; ranks of tensor parallelism lie next to each other."""

    world_size: Count
    tp_size: Count
    pp_size: Count
    cp_size: Count = 1
    moe_tp_size: int = 1
    moe_ep_size: int = 1
    moe_cluster_size: int = 1
    gpus_per_node: int = 8
    attn_tp_size: int = -1
    attn_cp_size: int = -1
    auto_parallel: bool = False

    @classmethod
    def of(cls, tp_size: int, pp_size: int) -> ParallelMapping:
        """Returns the mapping over this many ranks."""
        return cls(world_size=tp_size * pp_size, tp_size=tp_size, pp_size=pp_size)

    @model_validator(mode="after")
    def _check_world_size(self) -> ParallelMapping:
        if self.world_size != self.tp_size * self.pp_size * self.cp_size:
            raise ValueError("world_size is not tp_size times pp_size times cp_size")
        return self


class Quantization(Section):
    """How linears and KV cache are quantized: QuantConfig, without settings of single layers."""

    quant_algo: QuantAlgo | None = None
    kv_cache_quant_algo: Literal["FP8", "INT8", "NVFP4"] | None = None
    group_size: int | None = 128
    smoothquant_val: float = 0.5
    clamp_val: list[float] | None = None
    use_meta_recipe: bool = False
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: list[str] | None = None
    mamba_ssm_cache_dtype: str | None = None

    @property
    def format(self) -> str | None:
        """The one of FORMATS that the linears have; None for plain ones."""
        return None if self.quant_algo is None else FORMAT_OF_ALGO[self.quant_algo]

    @property
    def block_size(self) -> int | None:
        """How many numbers of a weight share a scale; None where no blocks do."""
        size = None if self.format is None else FORMATS[self.format].block_size
        return self.group_size if size == "set" else size

    @model_validator(mode="after")
    def _check_excluded(self) -> Quantization:
        """A list takes the place of TensorRT-LLM's own, in which these are."""
        module, excluded = _NEVER_QUANTIZED.get(self.quant_algo), self.exclude_modules
        if module is None or excluded is None:
            return self
        if not any(fnmatchcase(module, name) for name in excluded):
            raise ValueError(f"exclude_modules lacks {module}")
        return self


PLAIN = Quantization(quant_algo=None, kv_cache_quant_algo=None)
"""The `quantization` of a checkpoint in which nothing is quantized."""
