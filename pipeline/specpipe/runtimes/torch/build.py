"""Unified checkpoint → an engine folder of the torch runtime.

The folder holds `config.json` (`version`, `pretrained_config` and `build_config`, as trtllm-build
has them) and `model.safetensors`, arranged as model.py computes with it: loading converts nothing
but the int4 weights of a GPU, whose packing is torch's own. `build_config` has a `kernel` where
one of torch's multiplies by quantized weights; else they are emulated, which any device can. It has
`kv_cache_tokens` where `engine.kv_cache_memory` says how many tokens all sequences have together.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from specpipe.checkpoints.unified import load_unified
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.errors import CheckpointError, EngineBuildError
from specpipe.machine.own_json import write_object
from specpipe.roles import Role
from specpipe.runtimes.engine_description import ENGINE_CONFIG
from specpipe.runtimes.plan import check_context
from specpipe.stage import StageInputs
from specpipe.version import __version__

ENGINE_KIND = {"name": "torch", "format": 1}
"""Stands in an engine's config.json as `runtime`; the format numbers the layout of its weights."""

WEIGHTS_NAME = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class BuildTorchEngine:
    """Merges the ranks of a unified checkpoint and arranges the weights for the torch runtime."""

    role: Role
    checkpoint: Path
    max_batch_size: int
    max_seq_len: int
    max_draft_len: int
    max_num_tokens: int
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kv_cache_tokens: int | None = None

    @property
    def name(self) -> str:
        return f"{self.role}/build_engine"

    def inputs(self) -> StageInputs:
        settings = asdict(self)
        del settings["role"], settings["checkpoint"]
        if self.kv_cache_tokens is None:
            del settings["kv_cache_tokens"]  # engines of an older version are no others
        return StageInputs(
            files=(self.checkpoint,), settings={"format": ENGINE_KIND["format"], **settings}
        )

    def run(self, out: Path) -> None:
        # Deciding whether to build must not take the seconds that importing torch does.
        from specpipe.quantization.device import choose_device
        from specpipe.runtimes.torch.kernels import usable_kernel
        from specpipe.runtimes.torch.layout import write_weights

        checkpoint = load_unified(self.checkpoint)
        self._check(checkpoint.config)
        device = choose_device(self.device)
        if device == "cpu" and self.kv_cache_tokens is not None:
            raise EngineBuildError(
                f"{self.role}: engine.kv_cache_memory has no effect on a CPU, and torch sees no "
                "GPU here: leave it out"
            )
        dtype = compute_dtype(self.dtype, device, checkpoint.config.dtype)
        build_config: dict[str, Any] = {
            "max_batch_size": self.max_batch_size,
            "max_seq_len": self.max_seq_len,
            "max_num_tokens": self.max_num_tokens,
            "max_draft_len": self.max_draft_len,
            "max_beam_width": 1,
            "kv_cache_type": "CONTINUOUS",
            "dtype": dtype,
            "device": device,
        }
        if self.kv_cache_tokens is not None:
            build_config["kv_cache_tokens"] = self.kv_cache_tokens
        kernel = None if device == "cpu" else usable_kernel(checkpoint.config.quantization)
        if kernel is not None:
            build_config["kernel"] = kernel
        try:
            write_weights(out / WEIGHTS_NAME, checkpoint, dtype, kernel)
        except CheckpointError as exc:
            raise EngineBuildError(f"{self.role}: {exc}") from exc
        config = {
            "version": __version__,
            "runtime": ENGINE_KIND,
            "pretrained_config": checkpoint.config.plain(),
            "build_config": build_config,
        }
        write_object(out / ENGINE_CONFIG, config)

    def _check(self, config: UnifiedConfig) -> None:
        """Refuses what the engine would compute otherwise than the checkpoint means it."""
        quantization = config.quantization
        kv_cache = quantization.kv_cache_quant_algo
        if kv_cache not in (None, "FP8"):
            raise EngineBuildError(
                f"{self.role}: kv_cache_quant_algo {kv_cache} is not supported by runtime 'torch'; "
                "supported: FP8, or none"
            )
        row = quantization.row
        if quantization.has_zero_point and (row is None or row.scale("zero") is None):
            raise EngineBuildError(
                f"{self.role}: has_zero_point true is not supported with quant_algo "
                f"{quantization.quant_algo}; such weights are W4A16_GPTQ in a unified checkpoint"
            )
        check_context(self.role, config, self.max_seq_len)


def compute_dtype(dtype: str, device: str, checkpoint_dtype: str) -> str:
    """Returns what an engine computes in; "auto": float32 on a CPU, else the checkpoint's dtype."""
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else checkpoint_dtype
