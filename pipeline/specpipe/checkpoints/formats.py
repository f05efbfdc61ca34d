"""The weight formats: what each is called, what a quantized linear holds, and where it runs.

Sources: TensorRT-LLM, examples/quantization/quantize.py (names), builder.py (what is refused on
compute capability 10.0 to 11.9), docs/source/legacy/reference/support-matrix.md and precision.md;
NVIDIA ModelOpt 0.47, modelopt/torch/export/quant_utils.py (scales, packing).
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

Numbers = Literal["e4m3", "e2m1", "int8", "int4"]
"""What weights are rounded to: quantization/numbers.py."""

Activations = Literal["fp8", "fp8_per_token", "int8", "nvfp4"]
"""What activations are rounded to."""

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


Measured = Literal["input_amax", "weight_amax", "weight_amax_2", "prequant", "kv_amax"]
"""What calibration measures: quantization/scales.py."""

E4M3_MAX, E2M1_MAX, INT8_MAX = 448.0, 6.0, 127.0
"""The greatest numbers of FP8 (E4M3), of FP4 (E2M1) and of int8 that a scale is chosen for."""

AWQ_BLOCK_SIZES = (128, 64, 32, 16)
"""Those that are proposed where a model does not fit another, the first that fits."""


@dataclass(frozen=True)
class Scale:
    """One scale of a linear.

    dtype     None: the checkpoint's own
    measured  what it is made of, where that is measured; else it is reckoned from the weights
    greatest  what the measured number becomes when it is divided by the scale
    """

    content: Content
    axes: Axes
    dtype: str | None = "F32"
    measured: Measured | None = None
    greatest: float = 1.0

    @property
    def is_shared(self) -> bool:
        """True if all outputs of a linear have the same, and so the parts of a fused one."""
        return self.axes in ("one", "in")


_PREQUANT = Scale("prequant_scaling_factor", "in", None, "prequant")
_INT4_SCALE = Scale("weights_scaling_factor", "blocks", None)


def _activation(greatest: float) -> Scale:
    return Scale("activation_scaling_factor", "one", "F32", "input_amax", greatest)


@dataclass(frozen=True)
class Format:
    """One value of `quantization.format`.

    quant_algo    what a checkpoint's config.json calls it
    min_sm        lowest compute capability that runs it, times 10
    weights       what weights are rounded to
    scales        what is stored beside the weight
    is_stored     whether weights are stored so; if not, they are stored plain, and quantized by
                  whoever builds from them
    block_size    numbers along `in` that share a scale; "set" where the config says how many
    activations   what activations are rounded to
    also_means    the module besides linears that TensorRT-LLM would quantize too, and that no
                  checkpoint has scales for (quantization/quantize.py, quantize_layers and
                  fp8_rowwise_quantize)
    datacenter_blackwell
                  whether the engine builder takes it on compute capability 10.0 to 11.9
    tensorrt_layers
                  whether runtime tensorrt makes layers of it
    fp8_kv_cache  whether it goes with an FP8 KV cache and paged context FMHA
    is_offered    whether a config can ask for it; if not, it is what others quantized
    """

    quant_algo: QuantAlgo
    min_sm: int
    weights: Numbers
    scales: tuple[Scale, ...] = ()
    is_stored: bool = True
    block_size: int | Literal["set"] | None = None
    activations: Activations | None = None
    also_means: str | None = None
    datacenter_blackwell: bool = False
    fp8_kv_cache: bool = False
    tensorrt_layers: bool = False
    is_offered: bool = True

    @property
    def bits(self) -> Literal[4, 8]:
        """Of one number of a weight."""
        return 4 if self.weights in ("int4", "e2m1") else 8

    @property
    def weight_dtype(self) -> str | None:
        """Of the stored weights, as safetensors spells it; None: they are stored plain."""
        dtypes = {"e4m3": "F8_E4M3", "e2m1": "U8", "int8": "I8", "int4": "I8"}
        return dtypes[self.weights] if self.is_stored else None

    @property
    def packs(self) -> Literal["out", "in"] | None:
        """The axis of which two stored numbers share a byte, the first in the low half."""
        if not self.is_stored or self.bits == 8:
            return None
        return "out" if self.weights == "int4" else "in"

    @property
    def has_prequant(self) -> bool:
        """Whether activations are multiplied, channel by channel, before all else."""
        return _PREQUANT in self.scales

    @property
    def is_awq(self) -> bool:
        """True if what activations are multiplied by is searched for: AWQ, arXiv:2306.00978."""
        return self.has_prequant and self.weights == "int4"

    @property
    def measured(self) -> tuple[Measured, ...]:
        """What calibration measures of every linear; nothing where no data is needed."""
        return tuple(scale.measured for scale in self.scales if scale.measured is not None)

    @property
    def needs_data(self) -> bool:
        """True if its scales are measured on texts."""
        return bool(self.measured)

    def scale(self, content: Content) -> Scale | None:
        """Returns the scale of that name; None if it has none."""
        return next((scale for scale in self.scales if scale.content == content), None)

    def runs_on(self, sm: int) -> bool:
        """Returns whether a GPU of this compute capability, times 10, builds and runs it."""
        return sm >= self.min_sm and (self.datacenter_blackwell or not 100 <= sm < 120)


FORMATS = {
    "fp8": Format(
        "FP8",
        89,
        "e4m3",
        (
            _activation(E4M3_MAX),
            Scale("weights_scaling_factor", "one", "F32", "weight_amax", E4M3_MAX),
        ),
        activations="fp8",
        datacenter_blackwell=True,
        fp8_kv_cache=True,
        tensorrt_layers=True,
    ),
    "fp8_pc_pt": Format(
        "FP8_PER_CHANNEL_PER_TOKEN",
        89,
        "e4m3",
        (Scale("per_channel_scale", "out"),),
        activations="fp8_per_token",
        also_means="transformer.ln_f",
    ),
    "int8_sq": Format(
        "W8A8_SQ_PER_CHANNEL",
        80,
        "int8",
        (_activation(INT8_MAX), Scale("weights_scaling_factor", "out"), _PREQUANT),
        activations="int8",
    ),
    "int4_awq": Format(
        "W4A16_AWQ",
        80,
        "int4",
        (_INT4_SCALE, _PREQUANT),
        block_size="set",
        tensorrt_layers=True,
    ),
    "w4a8_awq": Format(
        "W4A8_AWQ",
        89,
        "int4",
        (
            _activation(E4M3_MAX),
            _INT4_SCALE,
            Scale("weights_scaling_factor_2", "one", "F32", "weight_amax_2", E4M3_MAX),
            _PREQUANT,
        ),
        block_size="set",
        activations="fp8",
        fp8_kv_cache=True,
    ),
    "int8_wo": Format(
        "W8A16", 80, "int8", is_stored=False, also_means="transformer.vocab_embedding"
    ),
    "int4_wo": Format(
        "W4A16", 80, "int4", is_stored=False, also_means="transformer.vocab_embedding"
    ),
    "nvfp4": Format(
        "NVFP4",
        100,
        "e2m1",
        (
            _activation(E2M1_MAX * E4M3_MAX),
            Scale("weights_scaling_factor", "blocks", "F8_E4M3"),
            Scale("weights_scaling_factor_2", "one", "F32", "weight_amax", E2M1_MAX * E4M3_MAX),
        ),
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
        "int4",
        (_INT4_SCALE, Scale("zero", "blocks")),
        block_size="set",
        is_offered=False,
    ),
}

OFFERED = tuple(name for name, row in FORMATS.items() if row.is_offered)
"""The values of `quantization.format`."""

TENSORRT_FORMATS = tuple(name for name, row in FORMATS.items() if row.tensorrt_layers)

FORMAT_OF_ALGO: dict[str, str] = {made.quant_algo: name for name, made in FORMATS.items()}
