from __future__ import annotations

import cmath

import pytest
import torch

from specpipe.errors import CheckpointError
from specpipe.runtimes.torch.rotary import Rotary
from tests.toy import LLAMA3_SCALING

LLAMA3 = {"rope_type": "llama3", **LLAMA3_SCALING}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.1,
    "beta_fast": 4.0,
    "beta_slow": 0.25,
    "truncate": True,
}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "attention_factor": 1.25,
    "short_factor": [1.0, 2.0, 1.0, 1.0],
    "long_factor": [2.0, 4.0, 4.0, 8.0],
}


def frequencies(rotary: Rotary, length: int = 1) -> list[float]:
    return [round(f, 6) for f in rotary.inverse_frequencies(torch.tensor([length]))[0].tolist()]


def test_plain_frequencies() -> None:
    assert frequencies(Rotary(8, 8, 10000.0)) == [1.0, 0.1, 0.01, 0.001]


def test_linear_scaling_divides_every_frequency() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    assert frequencies(Rotary(8, 8, 10000.0, linear)) == [0.25, 0.025, 0.0025, 0.00025]


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    assert frequencies(Rotary(16, 16, 10000.0, LLAMA3)) == [
        1.0,
        0.244385,
        0.013042,
        0.003953,
        0.00125,
        0.000395,
        0.000125,
        0.00004,
    ]


def test_dynamic_scaling_starts_beyond_the_original_length() -> None:
    rotary = Rotary(8, 8, 10000.0, DYNAMIC)
    assert frequencies(rotary, 64) == [1.0, 0.1, 0.01, 0.001]
    # base · (4 · 128 / 64 - 3)^(8 / 6) = 10000 · 5^(4 / 3)
    assert frequencies(rotary, 128) == [1.0, 0.05848, 0.00342, 0.0002]


def test_dynamic_table_turns_a_prompt_as_one_text_and_later_tokens_by_their_own() -> None:
    rotary = Rotary(8, 8, 10000.0, DYNAMIC)
    table = rotary.table(256, text_length=128)
    assert table.shape == (256, 1, 4)
    for position, length in ((0, 128), (70, 128), (127, 128), (128, 129), (200, 201)):
        angles = position * rotary.inverse_frequencies(torch.tensor([length]))
        assert torch.allclose(table[position], torch.complex(angles.cos(), angles.sin()))


def test_only_a_long_prompt_needs_a_dynamic_table_of_its_own() -> None:
    def length(rotary: Rotary, prompt_length: int) -> int:
        return rotary.text_length(prompt_length=prompt_length, max_tokens=500)

    assert length(Rotary(8, 8, 10000.0, DYNAMIC), 65) == 65
    assert length(Rotary(8, 8, 10000.0, DYNAMIC), 64) == 0
    assert length(Rotary(16, 16, 10000.0, LLAMA3), 400) == 0
    assert length(Rotary(8, 8, 10000.0), 400) == 0


def test_yarn_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    # 8 · ln(64 / (2π · 4)) / (2 ln 10000) = 0.41, … 0.25 …) = 1.61: the ramp goes from 0 to 2.
    rotary = Rotary(8, 8, 10000.0, YARN)
    assert frequencies(rotary) == [1.0, 0.0625, 0.0025, 0.00025]
    # Not rounded, it goes from 0.4059 to 1.6100: at 1 it is 0.49337.
    rotary = Rotary(8, 8, 10000.0, YARN | {"truncate": False})
    assert frequencies(rotary) == [1.0, 0.062998, 0.0025, 0.00025]


def test_longrope_scaling_has_factors_for_short_and_for_long_texts() -> None:
    rotary = Rotary(8, 8, 10000.0, LONGROPE)
    assert frequencies(rotary, 64) == [1.0, 0.05, 0.01, 0.001]
    assert frequencies(rotary, 65) == [0.5, 0.025, 0.0025, 0.000125]


def test_longrope_goes_by_what_the_sequence_may_grow_to() -> None:
    rotary = Rotary(8, 8, 10000.0, LONGROPE)
    assert rotary.text_length(prompt_length=3, max_tokens=64) == 0
    assert rotary.text_length(prompt_length=3, max_tokens=65) == 65
    assert rotary.text_length(prompt_length=90, max_tokens=200) == 65
    for text_length, frequency in ((0, 0.05), (65, 0.025)):
        rotation = complex(rotary.table(4, text_length=text_length)[3, 0, 1])
        assert abs(rotation - 1.25 * cmath.exp(3j * frequency)) < 1e-6


def test_channels_that_are_not_turned_are_multiplied_by_one() -> None:
    table = Rotary(16, 8, 10000.0, LONGROPE).table(5)
    assert table.shape == (5, 1, 8)
    assert torch.equal(table[:, :, 4:], torch.ones(5, 1, 4, dtype=torch.complex64))
    assert torch.allclose(table[:, :, :4].abs(), torch.tensor(1.25))
    assert torch.equal(table[:, :, :4], Rotary(8, 8, 10000.0, LONGROPE).table(5))


def test_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError) as caught:
        Rotary(8, 8, 10000.0, {"rope_type": "spiral", "factor": 4.0})
    assert str(caught.value) == (
        "rope type 'spiral' is not supported; "
        "supported: default, linear, dynamic, llama3, yarn, longrope"
    )
