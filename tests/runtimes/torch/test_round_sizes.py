"""Which rounds are recorded, and which of them runs what is asked for."""

from __future__ import annotations

import pytest

from specpipe.runtimes.torch.round_sizes import RoundSizes


def test_rounds_are_of_few_sizes_that_fill_launches() -> None:
    def places(sizes: RoundSizes, *lengths: int) -> dict[int, list[int]]:
        return {most: [p for p, k in sizes.shapes() if k == most] for most in lengths}

    # Of six members, and what is read beside them.
    assert places(RoundSizes.of(6, 4), 0, 1, 2, 3, 4) == {
        0: [1, 2, 6, 16, 32, 64, 128],
        1: [1, 2, 6, 8, 16, 32, 64],
        2: [1, 2, 5, 6, 10, 21, 42],
        3: [1, 2, 4, 6, 8, 16, 32],
        4: [1, 2, 3, 6, 12, 25],
    }
    assert places(RoundSizes.of(1, 2), 0, 1, 2) == {0: [1, 16, 32, 64, 128], 1: [1], 2: [1]}
    sizes = RoundSizes.of(200, 15)
    assert sizes.max_members == 200
    assert sizes.rows == 256
    assert [most for places, most in sizes.shapes() if places == 1] == list(range(16))
    assert places(sizes, 0, 1, 2, 4, 8, 15) == {
        0: [1, 2, 16, 32, 64, 128, 200, 256],
        1: [1, 2, 8, 16, 32, 64, 128],
        2: [1, 2, 5, 10, 21, 42, 85],
        4: [1, 2, 3, 6, 12, 25, 51],
        8: [1, 2, 3, 7, 14, 28],
        15: [1, 2, 4, 8, 16],
    }


def test_many_have_fewer_tokens_of_a_parallel_draft_than_there_are_rows_to_verify() -> None:
    """It has two rows for each. In no round have more members rows than it has."""
    sizes = RoundSizes.of(128, 8, is_parallel=True)
    assert sizes.draft_groups(8) == [16]
    assert [p for p, most in sizes.shapes() if most == 8] == [1, 2, 3, 7, 14, 16]
    assert {n: sizes.most_draft_tokens(n) for n in (16, 17, 32, 64, 65, 128)} == {
        16: 8, 17: 6, 32: 4, 64: 2, 65: 1, 128: 1
    }  # fmt: skip


def test_a_parallel_draft_reads_what_it_lacks_where_its_launch_has_rows_for_it() -> None:
    sizes = RoundSizes.of(128, 15, is_parallel=True)
    assert [sizes.reaching(1, 3, num_unread) for num_unread in (4, 7, 9)] == [3, 6, 8]
    assert sizes.reaching(1, 3, 10) == 3  # 18 rows are two tiles
    assert sizes.reaching(16, 1, 3) == 1
    assert sizes.reaching(16, 1, 17) == 1
    assert RoundSizes.of(128, 15).reaching(1, 3, 9) == 3


@pytest.mark.parametrize(
    ("num_members", "num_draft_tokens", "places", "length"),
    [(1, 5, 1, 5), (2, 5, 2, 6), (3, 4, 3, 4), (9, 7, 14, 8), (100, 0, 128, 0), (40, 2, 42, 2)],
)
def test_a_round_runs_in_the_least_size_that_holds_it(
    num_members: int, num_draft_tokens: int, places: int, length: int
) -> None:
    sizes = RoundSizes.of(128, 15)
    assert sizes.length(num_members, num_draft_tokens) == length
    assert sizes.places(num_members, length) == places


@pytest.mark.parametrize(
    ("num_copied", "places", "most"),
    [
        ([0] * 3, 16, 0),
        ([8], 1, 8),
        ([8, 8], 2, 8),
        ([8, 0, 0], 8, 1),
        ([1] * 9, 16, 1),
        ([8] * 7, 7, 8),  # 35 places of two rows would be as wide
        ([8] * 6 + [0] * 2, 32, 1),
        ([8] * 12 + [0] * 4, 64, 1),
        ([15, *[0] * 56], 64, 1),
    ],
)
def test_copies_are_packed_where_that_takes_fewer_rows(
    num_copied: list[int], places: int, most: int
) -> None:
    assert RoundSizes.of(128, 15).copying(num_copied) == (places, most)


def test_rounds_are_packed_beyond_the_members_that_there_may_be() -> None:
    assert RoundSizes.of(8, 8).packed == [8, 16, 32, 64, 128]
    assert RoundSizes.of(8, 8).most_places == 256
    assert RoundSizes.of(8, 1).packed == RoundSizes.of(8, 0).packed == []
    assert RoundSizes.of(8, 1).most_places == 128


@pytest.mark.parametrize("max_batch_size", [1, 2, 3, 7, 48, 128, 300])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 5, 15])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_every_round_has_a_size_that_fits_a_launch(
    max_batch_size: int, num_draft_tokens: int, is_parallel: bool
) -> None:
    sizes = RoundSizes.of(max_batch_size, num_draft_tokens, is_parallel=is_parallel)
    shapes = sizes.shapes()
    for places, most in shapes:
        assert all(places * g <= sizes.rows for g in (most + 1, *sizes.draft_groups(most)))
    mosts = [sizes.most_draft_tokens(n) for n in range(1, sizes.max_members + 1)]
    assert mosts == sorted(mosts, reverse=True)
    assert mosts[0] == num_draft_tokens
    for num_members, most in enumerate(mosts, 1):
        for k in range(most + 1):
            length = sizes.length(num_members, k)
            assert (sizes.places(num_members, length), length) in shapes
            most_read, nums_pieces = sizes.reading(num_members, k)
            assert nums_pieces == sorted(nums_pieces)
            for num_pieces in filter(None, nums_pieces):
                assert most_read == sizes.length(num_members + 1, k)
                assert (sizes.places(num_members + num_pieces, most_read), most_read) in shapes


@pytest.mark.parametrize(
    ("num_members", "num_draft_tokens", "nums_pieces", "most"),
    [
        (0, 0, [16, 32, 64, 128, 256], 0),
        (8, 0, [8, 24, 56, 120, 248], 0),
        (1, 5, [1, 3, 8, 17, 35], 6),
        (8, 2, [2, 13, 34, 77], 2),
        (42, 2, [0, 43], 2),
        (85, 2, [0], 2),
        (128, 0, [0, 128], 0),
    ],
)
def test_what_is_read_fills_launches(
    num_members: int, num_draft_tokens: int, nums_pieces: list[int], most: int
) -> None:
    sizes = RoundSizes.of(128, 8)
    assert sizes.reading(num_members, num_draft_tokens) == (most, nums_pieces)
