"""config/nightly.py: defaults, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpipe.build.load import load_config
from specpipe.config.nightly import NightlyConfig
from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError


def load(tmp_path: Path, nightly: str) -> PipelineConfig:
    path = tmp_path / "pair.yaml"
    path.write_text(
        f"name: pair\ndraft: {{checkpoint: d}}\ntarget: {{checkpoint: t}}\nnightly: {nightly}\n"
    )
    return load_config(path)


def test_thresholds_are_there_without_a_word_about_them(tmp_path: Path) -> None:
    limits = load(tmp_path, "{}").nightly
    assert limits == NightlyConfig()
    assert (limits.min_acceptance_ratio, limits.min_acceptance_rate) == (0.95, None)
    assert (limits.min_speed_up, limits.min_speed_up_ratio) == (0.9, 0.8)
    assert (limits.max_size_ratio, limits.allow_ties) == (1.1, True)


def test_thresholds_on_speed_can_be_taken_away(tmp_path: Path) -> None:
    limits = load(tmp_path, "{min_speed_up: null, concurrencies: [2]}").nightly
    assert (limits.min_speed_up, limits.concurrencies) == (None, (2,))


@pytest.mark.parametrize(
    "nightly, message",
    [
        (
            "{min_acceptance_ratio: 95}",
            "nightly.min_acceptance_ratio is 95: expected a number from 0 to 1",
        ),
        ("{num_prompts: 1}", "nightly.num_prompts is 1: expected a whole number of at least 2"),
        (
            "{min_gate_pass_rate: 0.9}",
            "nightly.min_gate_pass_rate is 0.9: expected nothing, as there is no nightly.gate",
        ),
    ],
)
def test_what_has_no_sense_is_refused(tmp_path: Path, nightly: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, nightly)
    assert str(caught.value) == f"{tmp_path}/pair.yaml:4: {message}"
