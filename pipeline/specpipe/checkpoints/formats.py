"""The weight formats: what each is called, what a quantized linear holds, and where it runs.

Sources: TensorRT-LLM, examples/quantization/quantize.py (names), builder.py (what is refused on
compute capability 10.0 to 11.9), docs/source/legacy/reference/support-matrix.md and precision.md;
NVIDIA ModelOpt 0.47, modelopt/torch/export/quant_utils.py (scales, packing). That `int4_awq` and
`w4a8_awq` fall under the builder's refusal was not seen to happen; NVIDIA lists neither there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QuantAlgo = Literal[
    "W8A16",
    "W4A16",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W4A16_GPTQ",
    "W8A8_SQ_PER_CHANNEL",
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "NVFP4",
]
"""What FORMATS has, in the words of TensorRT-LLM's QuantAlgo."""

Axes = Literal["one", "out", "in", "blocks"]
"""The shape of a scale: [1], [out], [in], or [out, in / block]."""

Content = Literal[
    "plain",
    "quantized",
    "weights_scaling_factor",
    "weights_scaling_factor_2",
    "per_channel_scale",
    "activation_scaling_factor",
    "prequant_scaling_factor",
    "kv_cache_scaling_factor",
    "zero",
]
"""What a tensor of a linear is: its plain or its quantized weight, or one of the scales.

quantized                  the weight, multiplied by 1 / prequant where there is one, by 1 / scale,
                           rounded to nearest, ties to even
weights_scaling_factor     what a quantized number is multiplied by; per_channel_scale likewise
weights_scaling_factor_2   what the product is multiplied by in turn (nvfp4), or the scale at which
                           it is rounded to FP8 (w4a8_awq)
activation_scaling_factor  what a rounded activation is multiplied by
prequant_scaling_factor    what activations are multiplied by before all else, per channel
kv_cache_scaling_factor    what a rounded key or value is multiplied by
zero                       what is added to the product of a quantized number and its scale
"""


@dataclass(frozen=True)
class Scale:
    """One scale of a linear: its name, its shape and its dtype, None for the checkpoint's own."""

    content: Content
    axes: Axes
    dtype: str | None = "F32"


_ACTIVATION = Scale("activation_scaling_factor", "one")
_PREQUANT = Scale("prequant_scaling_factor", "in", None)


@dataclass(frozen=True)
class Format:
    """One value of `quantization.format`.

    quant_algo    what a checkpoint's config.json calls it
    min_sm        lowest compute capability that runs it, times 10
    datacenter_blackwell
                  whether the engine builder takes it on compute capability 10.0 to 11.9
    tensorrt_layers
                  whether runtime tensorrt makes layers of it
    fp8_kv_cache  whether it goes with an FP8 KV cache and paged context FMHA
    weight_dtype  of the stored weights, as safetensors spells it; None: they are stored plain, and
                  quantized by the builder of the engine
    packs         the axis of which two numbers share a byte, the first in the low half
    scales        what is stored beside the weight
    block_size    numbers along `in` that share a scale; "set" where the config says how many
    activations   what activations are rounded to
    needs_data    whether its scales are measured on texts
    is_offered    whether a config can ask for it; if not, it is what others quantized
    """

    quant_algo: QuantAlgo
    min_sm: int
    weight_dtype: str | None
    scales: tuple[Scale, ...] = ()
    packs: Literal["out", "in"] | None = None
    block_size: int | Literal["set"] | None = None
    activations: Literal["fp8", "fp8_per_token", "int8", "nvfp4"] | None = None
    needs_data: bool = True
    datacenter_blackwell: bool = False
    fp8_kv_cache: bool = False
    tensorrt_layers: bool = False
    is_offered: bool = True

    @property
    def has_prequant(self) -> bool:
        """Whether activations are multiplied, channel by channel, before all else."""
        return _PREQUANT in self.scales

    def runs_on(self, sm: int) -> bool:
        """Returns whether a GPU of this compute capability, times 10, builds and runs it."""
        return sm >= self.min_sm and (self.datacenter_blackwell or not 100 <= sm < 120)


FORMATS = {
    "fp8": Format(
        "FP8",
        89,
        "F8_E4M3",
        (_ACTIVATION, Scale("weights_scaling_factor", "one")),
        activations="fp8",
        datacenter_blackwell=True,
        fp8_kv_cache=True,
        tensorrt_layers=True,
    ),
    "fp8_pc_pt": Format(
        "FP8_PER_CHANNEL_PER_TOKEN",
        89,
        "F8_E4M3",
        (Scale("per_channel_scale", "out"),),
        activations="fp8_per_token",
        needs_data=False,
    ),
    "int8_sq": Format(
        "W8A8_SQ_PER_CHANNEL",
        80,
        "I8",
        (_ACTIVATION, Scale("weights_scaling_factor", "out"), _PREQUANT),
        activations="int8",
    ),
    "int4_awq": Format(
        "W4A16_AWQ",
        80,
        "I8",
        (Scale("weights_scaling_factor", "blocks", None), _PREQUANT),
        packs="out",
        block_size="set",
        tensorrt_layers=True,
    ),
    "w4a8_awq": Format(
        "W4A8_AWQ",
        89,
        "I8",
        (
            _ACTIVATION,
            Scale("weights_scaling_factor", "blocks", None),
            Scale("weights_scaling_factor_2", "one"),
            _PREQUANT,
        ),
        packs="out",
        block_size="set",
        activations="fp8",
        fp8_kv_cache=True,
    ),
    "int8_wo": Format("W8A16", 80, None, needs_data=False),
    "int4_wo": Format("W4A16", 80, None, needs_data=False),
    "nvfp4": Format(
        "NVFP4",
        100,
        "U8",
        (
            _ACTIVATION,
            Scale("weights_scaling_factor", "blocks", "F8_E4M3"),
            Scale("weights_scaling_factor_2", "one"),
        ),
        packs="in",
        block_size=16,
        activations="nvfp4",
        datacenter_blackwell=True,
        fp8_kv_cache=True,
    ),
    # AWQ and GPTQ with zero points. TensorRT-LLM's W4A16_GPTQ has the weight in the order of a
    # kernel's, and `zero` transposed and rounded to the dtype: its builder does not take this.
    "int4_gptq": Format(
        "W4A16_GPTQ",
        80,
        "I8",
        (Scale("weights_scaling_factor", "blocks", None), Scale("zero", "blocks")),
        packs="out",
        block_size="set",
        needs_data=False,
        is_offered=False,
    ),
}

OFFERED = tuple(name for name, row in FORMATS.items() if row.is_offered)
"""The values of `quantization.format`."""

TENSORRT_FORMATS = tuple(name for name, row in FORMATS.items() if row.tensorrt_layers)

FORMAT_OF_ALGO: dict[str, str] = {row.quant_algo: name for name, row in FORMATS.items()}

E4M3_MAX, E2M1_MAX = 448.0, 6.0
"""The greatest numbers of FP8 (E4M3) and of FP4 (E2M1)."""
