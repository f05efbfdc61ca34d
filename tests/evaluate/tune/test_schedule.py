from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from specpipe.build.load import load_config
from specpipe.evaluate.tune import schedule
from specpipe.speculative.adaptive import most_draft_tokens


@pytest.mark.parametrize(
    ("speed_ups", "best"),
    [
        ({1: 1.2, 2: 1.5, 4: 1.4}, 2),
        ({1: 0.9, 2: 0.8}, 0),
        ({1: 1.015, 2: 1.01}, 0),  # less than is worth it
        ({2: 1.499, 4: 1.5}, 2),  # no difference: the shorter one
        ({2: 1.48, 4: 1.5}, 4),
        ({}, 0),
    ],
)
def test_pick(speed_ups: dict[int, float], best: int) -> None:
    assert schedule.pick(speed_ups) == best


@pytest.mark.parametrize(
    ("best", "steps"),
    [
        ({1: 4, 2: 4, 4: 2, 8: 0}, ((1, 4), (3, 2), (5, 0))),
        ({4: 3}, ((1, 3),)),
        ({1: 0, 4: 2}, ((1, 0), (2, 2))),
        ({8: 1, 1: 4, 4: 1}, ((1, 4), (2, 1))),
    ],
)
def test_between_two_loads_the_higher_one_decides(
    best: dict[int, int], steps: tuple[tuple[int, int], ...]
) -> None:
    found = schedule.from_loads(best)
    assert found == steps
    for load, length in best.items():
        assert most_draft_tokens(found, load) == length


def test_yaml_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    text = schedule.to_yaml(((1, 4), (3, 0)))
    assert text == (
        "schedule:\n"
        "  - {from_batch_size: 1, num_draft_tokens: 4}\n"
        "  - {from_batch_size: 3, num_draft_tokens: 0}\n"
    )
    indented = "".join(f"  {line}\n" for line in text.splitlines())
    path.write_text(
        f"name: x\ndraft: {{checkpoint: d}}\ntarget: {{checkpoint: t}}\nspeculation:\n{indented}"
    )
    assert load_config(path).speculation.limits == ((1, 4), (3, 0))


def test_forms_of_others() -> None:
    lowest, later, vllm = schedule.server_settings({1: 4, 2: 4, 4: 2, 8: 0}, "org/draft")
    # {1: 4, 3: 2, 5: 0}: from 1, from 3, from 5 on
    assert lowest.text is not None and later.text is not None and vllm.text is not None
    assert yaml.safe_load(lowest.text) == {
        "max_draft_len": 4,
        "draft_len_schedule": {1: 4, 3: 2, 5: 0},
    }
    # up to 2, up to 4, up to 8
    assert yaml.safe_load(later.text) == {
        "max_draft_len": 4,
        "draft_len_schedule": {2: 4, 4: 2, 8: 0},
    }
    assert json.loads(vllm.text) == {
        "method": "draft_model",
        "model": "org/draft",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 4, 2], [5, 8, 0]],
    }
    assert [form.name for form in (lowest, later, vllm)] == [
        "TensorRT-LLM 1.2",
        "TensorRT-LLM 1.3",
        "vLLM 0.24.0",
    ]


def test_forms_for_a_draft_that_proposes_in_one_pass() -> None:
    """The keys that vLLM's and TensorRT-LLM's documentation have for PARD."""
    lowest, later, vllm = schedule.server_settings({1: 8, 4: 2}, "d", is_parallel=True)
    assert lowest.text is None and "one pass" in lowest.note
    assert later.text is not None and vllm.text is not None
    assert yaml.safe_load(later.text) == {
        "decoding_type": "PARD",
        "max_draft_len": 8,
        "draft_len_schedule": {1: 8, 4: 2},
    }
    assert json.loads(vllm.text) == {
        "method": "draft_model",
        "model": "d",
        "parallel_drafting": True,
        "num_speculative_tokens": 8,
        "num_speculative_tokens_per_batch_size": [[1, 1, 8], [2, 4, 2]],
    }


def test_tensorrt_llm_never_drafts_more_than_at_the_lowest_load() -> None:
    lowest, later, vllm = schedule.server_settings({1: 1, 4: 3, 8: 2}, "d")
    assert lowest.text is not None and "{1: 1}" in lowest.text
    assert later.text is not None and "{8: 1}" in later.text
    assert "so 1 is the most" in lowest.note
    assert vllm.text is not None
    assert json.loads(vllm.text)["num_speculative_tokens"] == 3


def test_where_drafting_does_not_pay_there_is_no_form() -> None:
    forms = schedule.server_settings({1: 0, 8: 0}, "d")
    assert [form.text for form in forms] == [None, None, None]
    first, _, vllm = schedule.server_settings({1: 0, 8: 2}, "d")
    assert first.text is None
    assert vllm.text is not None
    assert json.loads(vllm.text)["num_speculative_tokens_per_batch_size"] == [[1, 1, 0], [2, 8, 2]]
