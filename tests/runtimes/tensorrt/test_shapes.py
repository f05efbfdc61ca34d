from __future__ import annotations

import json
from typing import Any

import pytest

from specpipe.runtimes.tensorrt import shapes
from specpipe.runtimes.tensorrt.shapes import Profile


@pytest.mark.parametrize(
    ("max_seq_len", "max_draft_len", "expected"),
    [
        (1024, 4, 1040),  # 1024 + 5 + 5, up to a multiple of 8
        (1024, 3, 1032),
        (64, 0, 72),
        (32, 3, 40),
        (1, 1, 8),
    ],
)
def test_capacity(max_seq_len: int, max_draft_len: int, expected: int) -> None:
    assert shapes.capacity(max_seq_len, max_draft_len) == expected


@pytest.mark.parametrize(("max_draft_len", "rows"), [(0, 1), (1, 2), (2, 4), (8, 16)])
def test_a_draft_that_proposes_in_one_pass_reads_what_was_accepted_and_masks(
    max_draft_len: int, rows: int
) -> None:
    """K tokens and the target's own, and K - 1 masks; without masks what a target verifies."""
    assert shapes.max_rows(max_draft_len, is_parallel=True) == rows
    assert shapes.max_rows(max_draft_len, is_parallel=False) == max_draft_len + 1
    capacity = shapes.capacity(1024, max_draft_len, is_parallel=True)
    assert capacity % 8 == 0 and 0 <= capacity - 1024 - 2 * rows < 8


def test_a_slot_is_aligned_whatever_the_model() -> None:
    """The smallest row is one key head of 16 channels of 2 bytes."""
    for max_seq_len in range(1, 100):
        assert shapes.capacity(max_seq_len, 4) * 16 * 2 % 256 == 0


def test_names_of_the_caches() -> None:
    assert list(shapes.cache_names(2)) == [
        "key_cache.0",
        "value_cache.0",
        "key_cache.1",
        "value_cache.1",
    ]


LIMITS = {"max_batch_size": 8, "max_draft_len": 4, "max_num_tokens": 2048}


def test_profiles_of_a_target() -> None:
    """Best where it verifies one sequence, and reads a prompt of 128 tokens."""
    assert shapes.profiles(role="target", **LIMITS) == (
        Profile("decode", batch=(1, 1, 8), tokens=(1, 5, 5), logits=(1, 5, 40)),
        Profile("prefill", batch=(1, 1, 1), tokens=(1, 128, 2048), logits=(1, 1, 5)),
    )


def test_profiles_of_a_draft() -> None:
    """Best where it decodes one sequence."""
    assert shapes.profiles(role="draft", **LIMITS) == (
        Profile("decode", batch=(1, 1, 8), tokens=(1, 1, 5), logits=(1, 1, 40)),
        Profile("prefill", batch=(1, 1, 1), tokens=(1, 128, 2048), logits=(1, 1, 5)),
    )


def test_profiles_of_a_draft_that_proposes_in_one_pass() -> None:
    """It scores as many rows as a target, of more; best are two tokens to read, and masks."""
    assert shapes.profiles(role="draft", **LIMITS, is_parallel=True) == (
        Profile("decode", batch=(1, 1, 8), tokens=(1, 5, 8), logits=(1, 5, 40)),
        Profile("prefill", batch=(1, 1, 1), tokens=(1, 128, 2048), logits=(1, 1, 5)),
    )


@pytest.mark.parametrize(
    ("limits", "decode", "prefill"),
    [
        # Without draft tokens there is a row for each sequence.
        (
            {"max_batch_size": 1, "max_draft_len": 0, "max_num_tokens": 64},
            Profile("decode", (1, 1, 1), (1, 1, 1), (1, 1, 1)),
            Profile("prefill", (1, 1, 1), (1, 64, 64), (1, 1, 1)),
        ),
        # A prompt is read in pieces of no less than what verification takes.
        (
            {"max_batch_size": 2, "max_draft_len": 7, "max_num_tokens": 4},
            Profile("decode", (1, 1, 2), (1, 8, 8), (1, 8, 16)),
            Profile("prefill", (1, 1, 1), (1, 8, 8), (1, 1, 8)),
        ),
    ],
)
def test_profiles_at_the_edge(limits: dict[str, int], decode: Profile, prefill: Profile) -> None:
    assert shapes.profiles(role="target", **limits) == (decode, prefill)


def test_shapes_of_a_profile() -> None:
    profile = Profile("decode", batch=(1, 2, 8), tokens=(1, 5, 5), logits=(1, 10, 40))
    cache = [[1, 3, 40, 16], [2, 3, 40, 16], [8, 3, 40, 16]]
    assert profile.shapes(num_layers=2, num_kv_heads=3, head_size=16, capacity=40) == {
        "input_ids": [[1, 1], [2, 5], [8, 5]],
        "position_ids": [[1, 1], [2, 5], [8, 5]],
        "write_indices": [[1], [2], [8]],
        "key_value_lengths": [[1], [2], [8]],
        "logits_indices": [[1], [10], [40]],
        "key_cache.0": cache,
        "value_cache.0": cache,
        "key_cache.1": cache,
        "value_cache.1": cache,
    }


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_profile_survives_json(role: str) -> None:
    for profile in shapes.profiles(role=role, **LIMITS):
        stored: dict[str, Any] = json.loads(json.dumps(profile.as_json()))
        assert Profile.from_json(stored) == profile
