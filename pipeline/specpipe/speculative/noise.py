"""Randomness as a pure function of (seed, position, purpose): no state, no order of calls.

The bits are Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the
seed is the key, and the counter holds (token id // 4, position, purpose); its four words serve four
token ids. Any runtime that computes the same integers draws the same noise, whatever its batch or
device.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
MASK_32 = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a draw decides. Two decisions at one position must not share their noise."""

    TOKEN = 0  # the token at this position, drafted or verified: the coupling of seeded requests
    DRAFT = 1  # the draft token of an unseeded request
    ACCEPT = 2  # whether that draft token is accepted
    RECOVERED = 3  # the token of the target after a rejection, or the bonus token


def philox(counters: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 over counters [4, ...] of 32-bit words; as many words come back."""
    c0, c1, c2, c3 = counters
    k0, k1 = seed & MASK_32, (seed >> 32) & MASK_32
    mask, shift = np.uint64(MASK_32), np.uint64(32)
    m0, m1 = (np.uint64(m) for m in MULTIPLIERS)
    for _ in range(NUM_ROUNDS):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (
            (p1 >> shift) ^ c1 ^ np.uint64(k0),
            p1 & mask,
            (p0 >> shift) ^ c3 ^ np.uint64(k1),
            p0 & mask,
        )
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & MASK_32, (k1 + KEY_INCREMENTS[1]) & MASK_32
    return np.stack([c0, c1, c2, c3])


def uniform(seed: int, position: int, purpose: Purpose, size: int) -> Floats:
    """Uniform numbers [size] strictly between 0 and 1, one per token id; 32 bits each."""
    blocks = np.arange((size + 3) // 4, dtype=np.uint64)
    counters = np.stack(
        [
            blocks,
            np.full_like(blocks, position & MASK_32),
            np.full_like(blocks, position >> 32),
            np.full_like(blocks, purpose),
        ]
    )
    words = philox(counters, seed).T.reshape(-1)[:size]
    return (words.astype(np.float64) + 0.5) * 2.0**-32


def gumbel(seed: int, position: int, purpose: Purpose, size: int) -> Floats:
    """Standard Gumbel noise [size]: argmax(log p + gumbel) is distributed as p."""
    noise: Floats = -np.log(-np.log(uniform(seed, position, purpose, size)))
    return noise
