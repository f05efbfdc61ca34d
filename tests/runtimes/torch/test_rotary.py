from __future__ import annotations

import pytest
import torch

from specpipe.errors import CheckpointError
from specpipe.runtimes.torch.rotary import Rotary

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}


def frequencies(rotary: Rotary, length: int = 1) -> list[float]:
    return [round(f, 6) for f in rotary.inverse_frequencies(torch.tensor([length]))[0].tolist()]


def test_plain_frequencies() -> None:
    assert frequencies(Rotary(8, 10000.0)) == [1.0, 0.1, 0.01, 0.001]


def test_linear_scaling_divides_every_frequency() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    assert frequencies(Rotary(8, 10000.0, linear)) == [0.25, 0.025, 0.0025, 0.00025]


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    assert frequencies(Rotary(16, 10000.0, LLAMA3)) == [
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
    rotary = Rotary(8, 10000.0, DYNAMIC)
    assert frequencies(rotary, 64) == [1.0, 0.1, 0.01, 0.001]
    # base · (4 · 128 / 64 - 3)^(8 / 6) = 10000 · 5^(4 / 3)
    assert frequencies(rotary, 128) == [1.0, 0.05848, 0.00342, 0.0002]


def test_dynamic_table_turns_a_prompt_as_one_text_and_later_tokens_by_their_own() -> None:
    rotary = Rotary(8, 10000.0, DYNAMIC)
    table = rotary.table(256, prompt_length=128)
    assert table.shape == (256, 1, 4)
    for position, length in ((0, 128), (70, 128), (127, 128), (128, 129), (200, 201)):
        angles = position * rotary.inverse_frequencies(torch.tensor([length]))
        assert torch.allclose(table[position], torch.complex(angles.cos(), angles.sin()))


def test_only_a_long_prompt_needs_a_table_of_its_own() -> None:
    assert Rotary(8, 10000.0, DYNAMIC).depends_on(65)
    assert not Rotary(8, 10000.0, DYNAMIC).depends_on(64)
    assert not Rotary(8, 10000.0, LLAMA3).depends_on(500)


def test_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="rope type 'yarn' is not supported; supported: defa"):
        Rotary(8, 10000.0, {"rope_type": "yarn", "factor": 4.0})
