from __future__ import annotations

from typing import Any

import pytest

from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.parallel_draft import ParallelDraft
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.errors import CheckpointError
from tests.toy import toy_config


def test_a_parallel_draft_stays_one_in_the_unified_checkpoint() -> None:
    config = unified_config(toy_config(pard_token=250, specpipe_num_draft_tokens=8))
    assert config.parallel == ParallelDraft(250, 8)
    assert UnifiedConfig.from_json(config.plain()).parallel == ParallelDraft(250, 8)
    assert unified_config(toy_config(pard_token=0)).parallel == ParallelDraft(0, None)


def test_other_checkpoints_say_nothing_of_it() -> None:
    config = unified_config(toy_config(specpipe_num_draft_tokens=8))
    assert config.parallel is None
    assert config.plain() == unified_config(toy_config(pard_token=None)).plain()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"pard_token": 256},
            "config.json: pard_token is 256, but vocab_size 256: the mask token has no embedding "
            "row",
        ),
        (
            {"pard_token": "x"},
            "config.json: pard_token is 'x', expected a whole number of at least 0",
        ),
        (
            {"pard_token": 250, "specpipe_num_draft_tokens": 0},
            "config.json: specpipe_num_draft_tokens is 0, expected a whole number of at least 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        unified_config(toy_config(**keys))
    assert str(caught.value) == message
