"""The batched rules against their specification in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specpipe.runtimes.pair.torch_sampler import Row, philox, uniform_at, warp
from specpipe.speculative import noise
from specpipe.speculative import warp as specification
from specpipe.speculative.noise import Purpose
from specpipe.speculative.request import Request, Sampling


def test_philox_in_torch_has_the_bits_of_the_specification() -> None:
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, size=(4, 3, 50), dtype=np.uint64)
    keys = rng.integers(0, 2**32, size=(2, 3, 1), dtype=np.uint64)
    counters[:, 0], keys[:, 0] = 2**32 - 1, 2**32 - 1
    expected = noise.philox(counters, keys)
    found = philox(
        tuple(torch.from_numpy(c.astype(np.int64)) for c in counters),
        tuple(torch.from_numpy(k.astype(np.int64)) for k in keys),
    )
    assert [f.tolist() for f in found] == expected.tolist()


@pytest.mark.gpu
def test_noise_on_a_gpu_has_the_bits_of_the_specification() -> None:
    seeds, positions = [0, 2**63 + 12345, 2**64 - 1], [0, 7, 2**32 + 1]
    ids = torch.arange(1001).expand(3, -1)
    for purpose in Purpose:
        found = uniform_at(seeds, positions, purpose, ids.cuda()).cpu()
        for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
            expected = noise.uniform(seed, position, purpose, 1001)
            assert found[row].numpy().tobytes() == expected.tobytes()


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_k=5),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=0.9, min_p=0.2),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
    Sampling(temperature=2.0, top_k=1),
    Sampling(repetition_penalty=1.4),
    Sampling(temperature=1.1, presence_penalty=0.7, frequency_penalty=-0.2, top_k=30),
    Sampling(temperature=1.0, min_tokens=9, bad_words=((3,), (1, 2), (2, 2, 8))),
    Sampling(temperature=1.0, top_k=10_000, top_p=0.999),
    Sampling(temperature=5.0, top_p=0.95),
    Sampling(temperature=5.0, top_k=300, top_p=0.95),
]


@pytest.mark.parametrize("vocab_size", [64, 2000])  # 2000: more than is sorted at first
@pytest.mark.parametrize("has_ties", [False, True])
def test_warped_rows_equal_the_specification(has_ties: bool, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=3.0, size=(len(SETTINGS), vocab_size)).astype(np.float32)
    if has_ties:
        logits = np.round(logits)
    rows = [
        Row(
            Request(
                request_id="r",
                prompt_token_ids=(1, 2, 2),
                max_tokens=9,
                sampling=sampling,
                end_token_ids=frozenset({0, 5}),
            ),
            output=[2, 2, 9, 1],
        )
        for sampling in SETTINGS
    ]
    scores = warp(torch.from_numpy(logits), rows).numpy()
    for row, sampling in enumerate(SETTINGS):
        expected = specification.warp(
            logits[row], sampling, prompt=(1, 2, 2), output=[2, 2, 9, 1], end_token_ids={0, 5}
        )
        np.testing.assert_allclose(scores[row], expected, rtol=1e-12, err_msg=str(sampling))
