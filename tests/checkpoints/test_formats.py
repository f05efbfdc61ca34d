"""The table of formats, and what repeats its names."""

from __future__ import annotations

from typing import get_args

from specpipe.checkpoints.formats import FORMATS, OFFERED, QuantAlgo
from specpipe.config.sections import QuantizationConfig
from specpipe.runtimes.tensorrt_llm.formats import SUPPORT


def test_the_formats_of_the_configuration_are_those_that_are_offered() -> None:
    assert get_args(QuantizationConfig.model_fields["format"].annotation) == OFFERED


def test_every_algorithm_has_a_row() -> None:
    algorithms = [row.quant_algo for row in FORMATS.values()]
    assert sorted(algorithms) == sorted(get_args(QuantAlgo))


def test_tensorrt_llm_says_of_every_format_what_it_does() -> None:
    assert SUPPORT.keys() == FORMATS.keys()


def test_what_is_measured_of_a_linear() -> None:
    assert {name: row.measured for name, row in FORMATS.items()} == {
        "fp8": ("input_amax", "weight_amax"),
        "fp8_pc_pt": (),
        "int8_sq": ("input_amax", "prequant"),
        "int4_awq": ("prequant",),
        "w4a8_awq": ("input_amax", "weight_amax_2", "prequant"),
        "int8_wo": (),
        "int4_wo": (),
        "nvfp4": ("input_amax", "weight_amax"),
        "int4_gptq": (),
    }


def test_how_weights_are_stored() -> None:
    assert {name: (row.weight_dtype, row.packs) for name, row in FORMATS.items()} == {
        "fp8": ("F8_E4M3", None),
        "fp8_pc_pt": ("F8_E4M3", None),
        "int8_sq": ("I8", None),
        "int4_awq": ("I8", "out"),
        "w4a8_awq": ("I8", "out"),
        "int8_wo": (None, None),
        "int4_wo": (None, None),
        "nvfp4": ("U8", "in"),
        "int4_gptq": ("I8", "out"),
    }
