"""The weight formats of NVIDIA's quantization: what each is called, and where it runs.

Sources: TensorRT-LLM, examples/quantization/quantize.py (names), builder.py (what is refused on
compute capability 10.0 to 11.9), docs/source/legacy/reference/support-matrix.md and precision.md.
That `int4_awq` and `w4a8_awq` fall under the builder's refusal there was not seen to happen; NVIDIA
lists neither for those GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """One value of `quantization.format`.

    quant_algo    what a checkpoint's config.json calls it
    min_sm        lowest compute capability that runs it, times 10
    datacenter_blackwell
                  whether the engine builder takes it on compute capability 10.0 to 11.9
    fp8_kv_cache  whether it goes with an FP8 KV cache and paged context FMHA
    block_size    whether its weights share scales in blocks of `awq_block_size`
    """

    quant_algo: str
    min_sm: int
    datacenter_blackwell: bool = False
    fp8_kv_cache: bool = False
    block_size: bool = False

    def runs_on(self, sm: int) -> bool:
        """True if a GPU of this compute capability, times 10, builds and runs it."""
        return sm >= self.min_sm and (self.datacenter_blackwell or not 100 <= sm < 120)


FORMATS = {
    "fp8": Format("FP8", 89, datacenter_blackwell=True, fp8_kv_cache=True),
    "fp8_pc_pt": Format("FP8_PER_CHANNEL_PER_TOKEN", 89),
    "int8_sq": Format("W8A8_SQ_PER_CHANNEL", 80),
    "int4_awq": Format("W4A16_AWQ", 80, block_size=True),
    "w4a8_awq": Format("W4A8_AWQ", 89, fp8_kv_cache=True, block_size=True),
    "int8_wo": Format("W8A16", 80),
    "int4_wo": Format("W4A16", 80),
    "nvfp4": Format("NVFP4", 100, datacenter_blackwell=True, fp8_kv_cache=True),
}

AWQ_VOCAB_MULTIPLE = 64
"""Exporting AWQ weights adds rows to the vocabulary up to a multiple of this, and says so in
`vocab_size` (NVIDIA ModelOpt, modelopt/torch/export/postprocess.py)."""


def exported_vocab_size(vocab_size: int, format_name: str | None) -> int:
    """Returns the `vocab_size` of the checkpoint that quantization writes."""
    if format_name is None or not FORMATS[format_name].block_size:
        return vocab_size
    return -(-vocab_size // AWQ_VOCAB_MULTIPLE) * AWQ_VOCAB_MULTIPLE
