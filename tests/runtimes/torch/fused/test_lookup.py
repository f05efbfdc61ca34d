"""Prompt lookup on the GPU against that of the host."""

from __future__ import annotations

import random

import pytest
import torch

from specpipe.runtimes.torch.fused import lookup
from specpipe.runtimes.torch.fused_sizes import ROWS
from specpipe.speculative.lookup import PromptLookup
from tests.runtimes.torch.fused.kernel_inputs import DEVICE, integers, launch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

_FIRST = 3


def copied(text: list[int], num_tokens: int, block: int) -> list[int]:
    """What the kernel writes behind a text; it must leave the rest as it is."""
    # What stands behind a text is of rounds that were not accepted: the tokens of its end.
    behind = (text[-4:] * ROWS)[: 2 * ROWS]
    history = integers(*text, *behind)
    positions = torch.arange(8, dtype=torch.int32, device=DEVICE) + len(text) - 1 - _FIRST
    launch(
        lookup.copy_draft, (1,),
        history, positions, num_tokens,
        FIRST=_FIRST, BLOCK=block, ROWS=ROWS,
    )  # fmt: skip
    end = len(text) + num_tokens
    assert history[: len(text)].tolist() == text
    assert history[end:].tolist() == behind[num_tokens:]
    return history[len(text) : end].tolist()


@pytest.mark.parametrize("num_ids", [2, 5, 40])
@pytest.mark.parametrize("block", [16, 128])
def test_it_copies_what_the_host_does(num_ids: int, block: int) -> None:
    rng = random.Random(num_ids)
    for length in (1, 2, 3, 4, 5, 15, 16, 17, 18, 33, 70, 129):
        text = [rng.randrange(num_ids) for _ in range(length)]
        for num_tokens in (1, 4, 15):
            assert copied(text, num_tokens, block) == PromptLookup(text).copy(num_tokens)


def test_the_latest_of_the_longest_matches_counts_in_whatever_block_it_is() -> None:
    text = [7] * 200
    text[20:24], text[60:63], text[150:154], text[196:] = (
        [1, 2, 3, 50],
        [2, 3, 60],
        [1, 2, 3, 70],
        [8, 1, 2, 3],
    )
    assert copied(text, 2, 32) == [70, 7]
    text[150] = 9
    assert copied(text, 2, 32) == [50, 7]
