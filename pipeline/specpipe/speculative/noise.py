"""Randomness as a pure function of (seed, position, purpose): no state, no order of calls.

The bits are Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the
seed is the key, and the counter holds (token id // 4, position, purpose); its four words serve four
token ids. Any runtime that computes the same integers draws the same noise, whatever its batch or
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Of Philox4x32-10, as the paper has them.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10

MASK_32 = 0xFFFFFFFF  # the low word of 64 bits


class Purpose(IntEnum):
    """What a draw decides. Two decisions at one position must not share their noise."""

    TOKEN = 0  # the token at this position, drafted or verified: the coupling of seeded requests
    DRAFT = 1  # the draft token of an unseeded request
    ACCEPT = 2  # whether that draft token is accepted
    RECOVERED = 3  # the token of the target after a rejection, or the bonus token


Words = npt.NDArray[np.uint64]
"""32-bit words, held in 64 bits."""


def philox(counters: Words, keys: Words) -> Words:
    """Returns the words [4, ...] of Philox4x32-10 for counters [4, ...] and keys [2, ...]."""
    mask, shift = np.uint64(MASK_32), np.uint64(32)
    multipliers = np.array(MULTIPLIERS, np.uint64).reshape(2, *[1] * (counters.ndim - 1))
    increments = np.array(KEY_INCREMENTS, np.uint64).reshape(2, *[1] * (keys.ndim - 1))
    even, odd = counters[::2], counters[1::2]
    for _ in range(NUM_ROUNDS):
        products = (even * multipliers)[::-1]
        even, odd = (products >> shift) ^ odd ^ keys, products & mask
        keys = (keys + increments) & mask
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(seed: int, position: int, purpose: Purpose, size: int) -> Floats:
    """Returns numbers [size] strictly between 0 and 1, one per token id; 32 bits each."""
    token_ids = np.arange(0, size, 4)[None]
    words = _words([seed], [position], purpose, token_ids)
    return _to_unit_interval(words[:, 0].T.reshape(-1)[:size])


def uniform_at(
    seeds: Sequence[int],
    positions: Sequence[int],
    purpose: Purpose,
    token_ids: npt.NDArray[np.int64],
) -> Floats:
    """Returns `uniform` at some token ids [R, C] only; row r has seeds[r] and positions[r]."""
    words = _words(seeds, positions, purpose, token_ids)
    chosen = np.take_along_axis(words, (token_ids % 4)[None], axis=0)[0]
    return _to_unit_interval(chosen)


def gumbel(seed: int, position: int, purpose: Purpose, size: int) -> Floats:
    """Returns standard Gumbel noise [size]: argmax(log p + gumbel) is distributed as p."""
    noise: Floats = -np.log(-np.log(uniform(seed, position, purpose, size)))
    return noise


def _words(
    seeds: Sequence[int],
    positions: Sequence[int],
    purpose: Purpose,
    token_ids: npt.NDArray[np.int64],
) -> Words:
    """Returns the four words [4, R, C] of the block that each token id [R, C] is in."""
    blocks = (token_ids // 4).astype(np.uint64)
    place = np.array([(p & MASK_32, p >> 32) for p in positions], np.uint64).T[..., None]
    counters = np.empty((4, *np.broadcast_shapes(blocks.shape, (len(seeds), 1))), np.uint64)
    counters[0], counters[1], counters[2], counters[3] = blocks, *place, purpose
    keys = np.array([(s & MASK_32, s >> 32) for s in seeds], np.uint64).T[..., None]
    return philox(counters, keys)


def _to_unit_interval(words: Words) -> Floats:
    return (words.astype(np.float64) + 0.5) * 2.0**-32
