from __future__ import annotations

from collections.abc import Sequence

import torch

from specpipe.runtimes.torch.kv_cache import KVCache, Span

INFINITY = float("inf")


def cache(
    num_slots: int = 4, group_size: int = 1, windows: Sequence[int | None] = (None, None)
) -> KVCache:
    return KVCache(
        windows=windows,
        num_slots=num_slots,
        capacity=32,
        num_kv_heads=1,
        group_size=group_size,
        head_size=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def seen(mask: torch.Tensor | None) -> list[list[int]]:
    """Returns the positions that each row of a mask lets through."""
    assert mask is not None
    rows = mask.reshape(-1, mask.shape[-1])
    assert set(rows.unique().tolist()) <= {0.0, -INFINITY}
    return [torch.nonzero(row == 0).flatten().tolist() for row in rows]


def test_the_lowest_free_slot_is_taken() -> None:
    kv_cache = cache()
    assert [kv_cache.allocate() for _ in range(3)] == [0, 1, 2]
    kv_cache.free(1, 0)
    kv_cache.free(0, 0)
    assert [kv_cache.allocate(), kv_cache.num_free_slots] == [0, 2]


def test_stored_keys_and_values_are_read_back_until_they_are_cleared() -> None:
    kv_cache = cache()
    step = kv_cache.step([Span(2, 0, 2)])
    step.store(1, torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]))
    (group,) = step.groups
    assert group.keys[1].tolist() == [[[[1, 2], [5, 6]]]]
    assert group.values[1].tolist() == [[[[3, 4], [7, 8]]]]
    assert group.keys[0].tolist() == [[[[0, 0], [0, 0]]]]
    kv_cache.clear(2, 1, 2)
    assert group.keys[1].tolist() == [[[[1, 2], [0, 0]]]]


def test_several_spans_are_stored_each_in_its_slot() -> None:
    kv_cache = cache()
    step = kv_cache.step([Span(0, 3, 1), Span(2, 0, 2)])
    step.store(0, torch.tensor([[1.0, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]))
    first, second = step.groups
    assert first.keys[0][0, 0, :, 0].tolist() == [0, 0, 0, 1]
    assert second.values[0][0, 0, :, 0].tolist() == [2, 3]


def test_a_row_sees_the_positions_up_to_its_own() -> None:
    kv_cache = cache(group_size=2)
    (one,) = kv_cache.step([Span(0, 5, 1)]).groups
    assert one.masks == [None, None]
    (few,) = kv_cache.step([Span(0, 1, 2)]).groups
    assert seen(few.masks[0]) == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    (many,) = kv_cache.step([Span(0, 1, 20)]).groups
    assert seen(many.masks[1]) == [list(range(n + 2)) for n in range(20) for _ in range(2)]


def test_neighbours_are_one_group_padded_to_a_rectangle() -> None:
    spans = [Span(0, 2, 1), Span(1, 0, 3), Span(3, 0, 1)]
    pair, single = cache().step(spans).groups
    assert (pair.rows, pair.num_sequences, pair.num_tokens) == (slice(0, 4), 2, 3)
    assert pair.keys[0].shape == (2, 1, 3, 2)
    assert seen(pair.masks[0]) == [[0, 1, 2]] * 3 + [[0], [0, 1], [0, 1, 2]]
    assert pair.padding is not None
    assert pair.padding.rows.tolist() == [0, 0, 0, 1, 2, 3]
    assert pair.padding.kept.tolist() == [0, 3, 4, 5]
    assert (single.rows, single.padding) == (slice(4, 5), None)


def test_a_row_sees_no_further_back_than_its_layers_window() -> None:
    kv_cache = cache(group_size=2, windows=(3, None))
    kv_cache.step([Span(0, 0, 32)]).store(0, torch.arange(32.0).unsqueeze(-1).expand(32, 4))

    (one,) = kv_cache.step([Span(0, 5, 1)]).groups
    assert one.masks == [None, None]
    assert one.keys[0][0, 0, :, 0].tolist() == [3, 4, 5]
    assert [keys.shape[2] for keys in one.keys] == [3, 6]

    (few,) = kv_cache.step([Span(0, 5, 2)]).groups
    assert few.values[0][0, 0, :, 0].tolist() == [3, 4, 5, 6]
    assert seen(few.masks[0]) == [[0, 1, 2], [0, 1, 2], [1, 2, 3], [1, 2, 3]]
    assert seen(few.masks[1]) == [[0, 1, 2, 3, 4, 5]] * 2 + [[0, 1, 2, 3, 4, 5, 6]] * 2

    (many,) = kv_cache.step([Span(0, 1, 20)]).groups
    rows = [list(range(max(0, n - 1), n + 2)) for n in range(20) for _ in range(2)]
    assert seen(many.masks[0]) == rows


def test_neighbours_see_each_their_own_window() -> None:
    spans = [Span(0, 6, 1), Span(1, 4, 3)]
    (group,) = cache(windows=(None, 3)).step(spans).groups
    assert [keys.shape[2] for keys in group.keys] == [7, 5]  # positions from 2 on, and all
    assert seen(group.masks[1]) == [[2, 3, 4]] * 3 + [[0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_a_window_as_long_as_a_slot_is_none() -> None:
    (group,) = cache(windows=(32, 40)).step([Span(0, 5, 1)]).groups
    assert [keys.shape[2] for keys in group.keys] == [6, 6]
    (group,) = cache(windows=(31, 31)).step([Span(0, 31, 1)]).groups
    assert [keys.shape[2] for keys in group.keys] == [31, 31]


def test_equal_counts_need_no_padding() -> None:
    (group,) = cache().step([Span(0, 2, 2), Span(1, 0, 2)]).groups
    assert group.padding is None


def test_prefill_is_attended_by_itself() -> None:
    groups = cache().step([Span(0, 4, 1), Span(1, 0, 20), Span(2, 4, 1), Span(3, 1, 1)]).groups
    assert [group.rows for group in groups] == [slice(0, 1), slice(1, 21), slice(21, 23)]
