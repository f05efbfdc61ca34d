import numpy as np
import pytest

from specpipe.speculative.noise import Purpose, gumbel, philox, uniform, uniform_at


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        # The known answers of Random123 1.09, kat_vectors, philox4x32 10.
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            0xFFFFFFFFFFFFFFFF,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], seed: int, words: tuple[int, ...]) -> None:
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint64)
    assert tuple(philox(np.array(counter, dtype=np.uint64), key).tolist()) == words


def test_noise_of_an_id_does_not_depend_on_the_vocabulary_size() -> None:
    small, large = (uniform(7, 3, Purpose.TOKEN, n) for n in (5, 1000))
    assert small.tolist() == large[:5].tolist()


def test_noise_at_some_ids_is_that_of_the_whole_vocabulary() -> None:
    ids = np.array([[0, 3, 998, 5], [7, 7, 1, 2]])
    rows = uniform_at([5, 2**64 - 1], [0, 2**40], Purpose.DRAFT, ids)
    for row, seed, position in ((0, 5, 0), (1, 2**64 - 1, 2**40)):
        whole = uniform(seed, position, Purpose.DRAFT, 1000)
        assert rows[row].tolist() == whole[ids[row]].tolist()


def test_noise_differs_by_seed_position_and_purpose() -> None:
    draws = [
        uniform(seed, position, purpose, 8).tobytes()
        for seed in (0, 1, 2**63)
        for position in (0, 1, 2**32)
        for purpose in Purpose
    ]
    assert len(set(draws)) == len(draws)


def test_uniform_is_uniform_and_open() -> None:
    u = uniform(11, 0, Purpose.TOKEN, 100_000)
    assert u.min() > 0.0 and u.max() < 1.0
    counts, _ = np.histogram(u, bins=50, range=(0.0, 1.0))
    chi_square = ((counts - 2000.0) ** 2 / 2000.0).sum()
    assert chi_square < 100.0  # 49 degrees of freedom: p < 2e-5 beyond


def test_gumbel_max_draws_from_the_distribution() -> None:
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    draws = [
        int(np.argmax(np.log(probs) + gumbel(seed, 9, Purpose.TOKEN, 4))) for seed in range(20_000)
    ]
    counts = np.bincount(draws, minlength=4)
    chi_square = ((counts - 20_000 * probs) ** 2 / (20_000 * probs)).sum()
    assert chi_square < 27.0  # 3 degrees of freedom: p < 6e-6 beyond
