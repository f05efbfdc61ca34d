"""What TensorRT-LLM does with each format, beyond what its row of FORMATS says.

Sources: TensorRT-LLM, quantization/layers.py (sizes that are filled up; read as of 1.x, and not
run), kernels/cutlass_kernels/fpA_intB_gemm (blocks of 64 and 128), quantization/quantize.py (which
modules a format replaces), models/convert_utils.py (weight_only_quantize_dict), useful-build-time-
flags.md (the GEMM plugin), and tensorrt_llm/_torch/modules/linear.py (get_quant_method) of 1.1 or
later for what backend pytorch reads; for 1.0 it was not seen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FormatSupport:
    """What its two backends do with one format.

    is_read        whether backend pytorch reads it in Hugging Face's layout
    multiple       what the builder fills inputs and outputs on each rank up to multiples of, or of
                   a block where that is more, while the checkpoint has as many as its model
    block_sizes    numbers that may share a scale, of a format where the config says how many
    whole_modules  whether it is given to whole attention and MLP modules
    has_head       whether a head can be of it; in weight-only formats its module would be replaced,
                   but its tensor stays plain
    gemm_plugin    what is best for matrix products where the config does not say
    """

    is_read: bool = False
    multiple: int | None = None
    block_sizes: tuple[int, ...] = ()
    whole_modules: bool = False
    has_head: bool = True
    gemm_plugin: str = "auto"


SUPPORT = {
    "fp8": FormatSupport(is_read=True, gemm_plugin="disable"),
    "fp8_pc_pt": FormatSupport(
        is_read=True, whole_modules=True, has_head=False, gemm_plugin="disable"
    ),
    "int8_sq": FormatSupport(),
    "int4_awq": FormatSupport(is_read=True, multiple=64, block_sizes=(64, 128)),
    "w4a8_awq": FormatSupport(is_read=True, multiple=128, block_sizes=(128,)),
    "int8_wo": FormatSupport(multiple=64, has_head=False),
    "int4_wo": FormatSupport(multiple=64, has_head=False),
    "nvfp4": FormatSupport(is_read=True, gemm_plugin="nvfp4"),
    "int4_gptq": FormatSupport(),
}

FORMATS_READ = tuple(name for name, support in SUPPORT.items() if support.is_read)
"""What backend pytorch reads."""
