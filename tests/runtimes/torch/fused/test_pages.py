from __future__ import annotations

import pytest
import torch

from specpipe.runtimes.torch.fused.pages import PagedKVCache
from specpipe.runtimes.torch.fused_sizes import pages_of


def cache(num_slots: int = 2, capacity: int = 150, num_pages: int | None = None) -> PagedKVCache:
    return PagedKVCache(
        num_layers=2,
        num_slots=num_slots,
        capacity=capacity,
        num_kv_heads=2,
        head_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_pages=num_pages,
    )


def pages(kv_cache: PagedKVCache, slot: int) -> list[int]:
    return kv_cache.table[slot].tolist()


@pytest.mark.parametrize(("num_positions", "num_pages"), [(1, 1), (64, 1), (65, 2), (150, 3)])
def test_pages_hold_64_positions(num_positions: int, num_pages: int) -> None:
    assert pages_of(num_positions) == num_pages


def test_all_slots_can_be_full_at_once() -> None:
    kv_cache = cache()
    assert [tuple(keys.shape) for keys in kv_cache.keys] == [(6, 2, 64, 4)] * 2
    assert [tuple(values.shape) for values in kv_cache.values] == [(6, 2, 64, 4)] * 2
    slots = []
    for _ in range(2):
        assert kv_cache.can_hold(150)
        slots.append(kv_cache.allocate(150))
    assert slots == [0, 1]
    assert [pages(kv_cache, slot) for slot in slots] == [[0, 1, 2], [3, 4, 5]]
    assert not kv_cache.can_hold(1)
    assert kv_cache.pool.num_free_slots == 0


def test_a_short_sequence_takes_the_pages_that_it_needs() -> None:
    kv_cache = cache()
    assert kv_cache.allocate(64) == 0
    assert kv_cache.allocate(65) == 1
    assert pages(kv_cache, 0)[:1] == [0]
    assert pages(kv_cache, 1)[:2] == [1, 2]


def test_slots_and_pages_come_back() -> None:
    kv_cache = cache()
    kv_cache.allocate(100)
    kv_cache.allocate(150)
    kv_cache.free(0)
    assert kv_cache.can_hold(150)
    assert kv_cache.allocate(150) == 0
    held = pages(kv_cache, 0) + pages(kv_cache, 1)
    assert sorted(held) == [0, 1, 2, 3, 4, 5]
    kv_cache.free(1)
    kv_cache.free(0)
    assert kv_cache.pool.num_free_slots == 2
    first, second = kv_cache.allocate(150), kv_cache.allocate(150)
    assert sorted(pages(kv_cache, first) + pages(kv_cache, second)) == [0, 1, 2, 3, 4, 5]


def test_freeing_leaves_the_pages_of_others_alone() -> None:
    kv_cache = cache()
    kv_cache.allocate(150)
    kv_cache.allocate(100)
    before = pages(kv_cache, 1)
    kv_cache.free(0)
    kv_cache.allocate(20)
    assert pages(kv_cache, 1) == before


def test_fewer_pages_than_all_slots_could_have_go_to_who_grows() -> None:
    kv_cache = cache(num_pages=4)
    assert kv_cache.keys[0].shape[0] == 4
    first, second = kv_cache.allocate(1), kv_cache.allocate(64)
    assert kv_cache.grow(first, 65)
    assert kv_cache.grow(second, 128)
    assert kv_cache.grow(second, 100)  # which it has
    assert not kv_cache.grow(first, 129)
    assert [pages(kv_cache, slot)[:2] for slot in (first, second)] == [[0, 2], [1, 3]]
    assert kv_cache.capacity(first) == 128
    kv_cache.free(second)
    assert kv_cache.grow(first, 129)
    assert pages(kv_cache, first) == [0, 2, 1]


def test_shared_pages_stand_before_a_sequences_own() -> None:
    kv_cache = cache()
    first, second = kv_cache.allocate(150), kv_cache.allocate(64)
    kv_cache.pool.name(first, 0, b"a")
    assert kv_cache.share(second, [b"a", b"b"]) == 1
    assert kv_cache.grow(second, 65)
    assert pages(kv_cache, second)[:2] == [0, 3]
