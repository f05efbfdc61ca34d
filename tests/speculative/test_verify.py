import numpy as np
import pytest

from specpipe.speculative.noise import Purpose, gumbel, uniform
from specpipe.speculative.verify import Verified, verify_by_matching, verify_by_rejection


def rejection(
    draft_token_ids: list[int], draft_probs: np.ndarray, target_probs: np.ndarray, seed: int
) -> Verified:
    rows, vocab_size = target_probs.shape
    return verify_by_rejection(
        draft_token_ids,
        draft_probs,
        target_probs,
        accept_uniform=np.array([uniform(seed, p, Purpose.ACCEPT, 1)[0] for p in range(rows)]),
        recovered_gumbel=np.stack(
            [gumbel(seed, p, Purpose.RECOVERED, vocab_size) for p in range(rows)]
        ),
    )


@pytest.mark.parametrize(
    ("draft", "target", "emitted"),
    [
        ([], [8], (8,)),
        ([1, 2], [1, 2, 3], (1, 2, 3)),
        ([1, 2], [1, 9, 3], (1, 9)),
        ([1, 2], [9, 2, 3], (9,)),
    ],
)
def test_matching_keeps_the_prefix_and_adds_the_target_token(
    draft: list[int], target: list[int], emitted: tuple[int, ...]
) -> None:
    assert verify_by_matching(draft, target) == Verified(emitted)


def test_all_accepted_adds_bonus_token() -> None:
    certain = np.eye(3)
    verified = rejection([0, 1], certain[[0, 1]], certain[[0, 1, 2]], seed=0)
    assert verified == Verified((0, 1, 2))
    assert verified.num_accepted == 2


def test_token_that_target_excludes_is_rejected() -> None:
    verified = rejection([0], np.eye(3)[[0]], np.eye(3)[[1, 2]], seed=0)
    assert verified == Verified((1,))


def test_empty_residual_samples_the_target_row() -> None:
    row = np.array([[0.25, 0.75]])
    target = np.array([[0.25, 0.75 - 1e-17], [0.5, 0.5]])
    # u < 1 accepts always here; u = 1 is what rounding can make of it.
    verified = verify_by_rejection(
        [0], row, target, accept_uniform=np.array([1.0, 1.0]), recovered_gumbel=np.zeros((2, 2))
    )
    assert verified == Verified((1,))


def test_output_has_the_distribution_of_the_target_and_not_of_the_draft() -> None:
    draft = np.array([0.6, 0.3, 0.1, 0.0])
    target = np.array([0.1, 0.3, 0.2, 0.4])
    num_draws = 4_000
    first = np.zeros(4)
    for seed in range(num_draws):
        token = int(np.argmax(np.log(draft + 1e-300) + gumbel(seed, 0, Purpose.DRAFT, 4)))
        verified = rejection([token], draft[None], np.stack([target, target]), seed)
        first[verified.token_ids[0]] += 1
    chi_square = ((first - num_draws * target) ** 2 / (num_draws * target)).sum()
    assert chi_square < 27.0  # 3 degrees of freedom: p < 6e-6 beyond
    wrong = ((first - num_draws * (draft + 0.01)) ** 2 / (num_draws * (draft + 0.01))).sum()
    assert wrong > 200.0
