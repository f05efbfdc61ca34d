"""The batched rules against their specification in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specpipe.runtimes.pair.sampler import Drafted
from specpipe.runtimes.pair.torch_log_probs import greatest
from specpipe.runtimes.pair.torch_sampler import Row, TorchSampler, philox, uniform_at, warp
from specpipe.speculative import noise
from specpipe.speculative import warp as specification
from specpipe.speculative.log_probs import likeliest, log_softmax
from specpipe.speculative.noise import Purpose
from specpipe.speculative.request import Request, Sampling
from specpipe.speculative.verify import verify_by_rejection
from tests.speculative.table import new_state, request


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
    Sampling(logit_bias=((9, 1e30), (4, -2.5), (9, -3.0))),
    Sampling(temperature=0.6, logit_bias=((0, 5.0), (60, -1e38), (2, 0.25)), top_p=0.9),
    Sampling(presence_penalty=0.5, logit_bias=((2, 1.0),), bad_words=((2,),)),
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


@pytest.mark.parametrize("vocab_size", [500, 3000])  # 3000: more than all are looked at
@pytest.mark.parametrize("has_ties", [False, True])
def test_the_likeliest_tokens_are_those_of_the_specification(
    has_ties: bool, vocab_size: int
) -> None:
    """Likeliest first, and of equal ones the lower id, also where a cut goes through them."""
    logits = np.random.default_rng(0).normal(scale=3.0, size=(6, vocab_size)).astype(np.float32)
    logits[2, -25:] += 20.0  # in the last block, which is not whole
    if has_ties:
        logits = np.round(logits)
    token_ids = [0, 7, 499, 3, 3, 250]
    scored = TorchSampler(vocab_size).score(torch.from_numpy(logits), token_ids, 20)
    assert scored is not None
    for row, token_id, own, top in zip(
        logits, token_ids, scored.log_probs, scored.top_log_probs, strict=True
    ):
        expected = likeliest(log_softmax(row), 20)
        assert own == pytest.approx(log_softmax(row)[token_id], abs=1e-5)
        assert [i for i, _ in top] == [i for i, _ in expected]
        assert [p for _, p in top] == pytest.approx([p for _, p in expected], abs=1e-5)


def test_what_cannot_be_emitted_is_never_among_the_likeliest() -> None:
    """Of 8 ids the draft lacks the last and no tokenizer entry uses 2 and 3."""
    logits = torch.tensor([[1.0, 0.0, 9.0, 9.0, 3.0, 1.0, 2.0, 9.0]])
    scored = TorchSampler(7, ((2, 4),)).score(logits, [4], 20)
    assert scored is not None
    assert [i for i, _ in scored.top_log_probs[0]] == [4, 6, 0, 5, 1]
    # They have their part of the sum all the same.
    assert scored.log_probs == pytest.approx([3.0 - np.log(np.exp(logits.numpy()).sum())])


def test_the_greatest_of_a_row_is_the_first_of_equal_ones_or_a_nan() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [
        [1.0, 3.0, 3.0, 2.0],
        [9.0, nan, inf, nan],
        [-inf, -inf, -inf, -inf],
        [0.0, 1.0, 2.0, inf],
    ]
    columns = torch.tensor([[*row, 99.0] for row in rows])[:, :4]  # as of a common vocabulary
    best, token_ids = greatest(columns)
    assert token_ids == [1, 1, 0, 3]
    assert [str(value) for value in best] == ["3.0", "nan", "-inf", "inf"]


def test_a_row_with_nan_scores_nothing() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 7] = torch.nan
    assert TorchSampler(7).score(logits, [1, 2, 3], 2) is None


def test_what_is_copied_without_a_seed_leaves_the_distribution_of_the_target() -> None:
    """Each token as the specification has it, where the draft is certain; and in all as often."""
    rng = np.random.default_rng(5)
    num_answers = 1500
    logits = rng.normal(size=(3, 6)).astype(np.float32)
    copied = logits[:2].argmax(axis=1).tolist()
    probs = specification.softmax(logits.astype(np.float64))
    prompt_length = 5
    drafted = [
        Drafted(
            new_state(
                request(prompt_length=prompt_length, sampling=Sampling(temperature=1.0, seed=seed))
            ),
            list(copied),
            is_copied=True,
        )
        for seed in range(num_answers)
    ]
    rows = torch.from_numpy(logits).repeat(num_answers, 1)
    found = [result.token_ids or [] for result in TorchSampler(6).verify(rows, drafted)]
    positions = range(prompt_length, prompt_length + 3)
    for seed in range(0, num_answers, 10):
        wanted = verify_by_rejection(
            copied,
            np.eye(6)[copied],
            probs,
            accept_uniform=np.array(
                [noise.uniform(seed, at, Purpose.ACCEPT, 1)[0] for at in positions]
            ),
            recovered_gumbel=np.stack(
                [noise.gumbel(seed, at, Purpose.RECOVERED, 6) for at in positions]
            ),
        )
        assert tuple(found[seed]) == wanted.token_ids
    for place in range(3):
        tokens = [token_ids[place] for token_ids in found if len(token_ids) > place]
        expected = len(tokens) * probs[place]
        counts = np.bincount(tokens, minlength=6)
        # 5 degrees of freedom: p < 2e-6 beyond.
        assert ((counts - expected) ** 2 / expected).sum() < 35.0
        assert len(tokens) > 100
