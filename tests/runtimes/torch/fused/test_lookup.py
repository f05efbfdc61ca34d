"""Prompt lookup on the GPU against that of the host."""

from __future__ import annotations

import random

import pytest
import torch

from specpipe.runtimes.torch.fused import lookup
from specpipe.runtimes.torch.fused_sizes import ROWS
from specpipe.speculative.lookup import PromptLookup
from tests.runtimes.torch.fused.kernel_inputs import integers, launch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")


def copied(text: list[int], num_tokens: int, block: int) -> list[int]:
    """What the kernel writes behind a text; it must leave the rest as it is."""
    # What stands behind a text is of rounds that were not accepted: the tokens of its end.
    behind = (text[-4:] * ROWS)[: 2 * ROWS]
    history = integers(*behind, *text, *behind).view(1, -1)
    others = [7] * len(behind)  # of another stream, which drafts
    texts = torch.cat([history[:, len(behind) :], integers(*others, *text).view(1, -1)])
    untouched = texts[1].tolist()
    launch(
        lookup.copy_draft, (3,),
        integers(1, -1, 0), integers(2, 2, num_tokens), integers(0, 1, 1), texts,
        integers(len(text) - 1, len(text) - 1), texts.stride(0),
        BLOCK=block, ROWS=ROWS,
    )  # fmt: skip
    assert texts[1].tolist() == untouched
    history = texts[0]
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
