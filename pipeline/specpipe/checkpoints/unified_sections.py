"""The sections of a unified `config.json`: how a model is split, and how it is quantized."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specpipe.checkpoints.formats import FORMAT_OF_ALGO, FORMATS, Activations, Format, QuantAlgo

Count = Annotated[int, Field(ge=1)]

NEVER_QUANTIZED = ("*vocab_embedding", "*ln_f")
"""What stands in every `exclude_modules` besides linears. Without them TensorRT-LLM would quantize
the embedding in weight-only formats and the last norm in fp8_pc_pt; and an empty list means to it
that nothing is said (quantization/quantize.py, quantize_layers and fp8_rowwise_quantize)."""


class UnifiedSection(BaseModel):
    """Strict and frozen; what checks it is made when the first one is, to import fast."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    def plain(self) -> dict[str, Any]:
        """Returns what config.json says: the keys that were given, as JSON has them."""
        return self.model_dump(exclude_unset=True)


class ParallelMapping(UnifiedSection):
    """How the model is split: what specpipe writes of Mapping."""

    world_size: Count
    tp_size: Count
    pp_size: Count
    cp_size: Count = 1

    @classmethod
    def of(cls, tp_size: int, pp_size: int) -> ParallelMapping:
        """Returns the mapping over this many ranks."""
        return cls(world_size=tp_size * pp_size, tp_size=tp_size, pp_size=pp_size)

    @model_validator(mode="after")
    def _check_world_size(self) -> ParallelMapping:
        if self.world_size != self.tp_size * self.pp_size * self.cp_size:
            raise ValueError("world_size is not tp_size times pp_size times cp_size")
        return self


class Quantization(UnifiedSection):
    """How linears and KV cache are quantized: what specpipe writes of QuantConfig."""

    quant_algo: QuantAlgo | None = None
    kv_cache_quant_algo: Literal["FP8", "INT8", "NVFP4"] | None = None
    group_size: int | None = 128
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: list[str] | None = None

    @classmethod
    def of(
        cls, format: str, *, fp8_kv_cache: bool, group_size: int | None, excluded: Iterable[str]
    ) -> Quantization:
        """Returns the section of a format, with the keys that it has use for.

        group_size  how many numbers share a scale, of a format where the config says so
        excluded    patterns of linears that stay plain
        """
        row = FORMATS[format]
        keys: dict[str, Any] = {}
        if row.block_size is not None:
            size = group_size if row.block_size == "set" else row.block_size
            keys = {"group_size": size, "has_zero_point": row.scale("zero") is not None}
        if row.has_prequant:
            keys["pre_quant_scale"] = True
        return cls(
            quant_algo=row.quant_algo,
            kv_cache_quant_algo="FP8" if fp8_kv_cache else None,
            **keys,
            exclude_modules=[*excluded, *NEVER_QUANTIZED],
        )

    @property
    def format(self) -> str | None:
        """The one of FORMATS that the linears have; None for plain ones."""
        return None if self.quant_algo is None else FORMAT_OF_ALGO[self.quant_algo]

    @property
    def row(self) -> Format | None:
        """What FORMATS says of it; None for plain linears."""
        return None if self.format is None else FORMATS[self.format]

    @property
    def block_size(self) -> int | None:
        """How many numbers of a weight share a scale; None where no blocks do."""
        size = None if self.row is None else self.row.block_size
        return self.group_size if size == "set" else size

    @property
    def activations(self) -> Activations | None:
        """What activations are rounded to; None where they stay as they are."""
        return None if self.row is None else self.row.activations

    @model_validator(mode="after")
    def _check_excluded(self) -> Quantization:
        """A list takes the place of TensorRT-LLM's own, in which these are."""
        module = None if self.row is None else self.row.also_means
        excluded = self.exclude_modules
        if (
            module is None
            or excluded is None
            or any(fnmatchcase(module, name) for name in excluded)
        ):
            return self
        raise ValueError(f"exclude_modules lacks {module}")


UNQUANTIZED = Quantization(quant_algo=None, kv_cache_quant_algo=None)
"""The `quantization` of a checkpoint in which nothing is quantized."""
