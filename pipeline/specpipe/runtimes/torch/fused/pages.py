"""Keys and values in pages that sequences take as they need them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specpipe.runtimes.torch.fused.host import pinned
from specpipe.runtimes.torch.fused_sizes import PAGE, pages_of


class PagedKVCache:
    """Pages for `num_slots` sequences; a sequence's slot is its row of the page table.

    keys, values  one tensor a layer, [pages, H_kv, PAGE, D]
    table         int32 [num_slots, pages of a sequence]: where its positions lie, PAGE by PAGE

    Pages keep what they held: readers stop at the last position of their sequence.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        capacity: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """capacity  positions that a sequence can have; all slots can be full at once"""
        pages_each = pages_of(capacity)
        shape = (num_slots * pages_each, num_kv_heads, PAGE, head_size)
        self.keys: Sequence[Tensor] = self._pool(num_layers, shape, dtype, device)
        self.values: Sequence[Tensor] = self._pool(num_layers, shape, dtype, device)
        self.table = torch.zeros(num_slots, pages_each, dtype=torch.int32, device=device)
        self._free_pages = list(range(shape[0]))[::-1]
        self._free_slots = list(range(num_slots))[::-1]
        self._pages: dict[int, list[int]] = {}

    @staticmethod
    def _pool(
        num_layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def can_hold(self, num_positions: int) -> bool:
        """Says whether a sequence of so many positions finds a slot and pages now."""
        return bool(self._free_slots) and pages_of(num_positions) <= len(self._free_pages)

    def allocate(self, num_positions: int) -> int:
        """Takes a slot and the pages of so many positions; `can_hold` must say so."""
        slot = self._free_slots.pop()
        pages = [self._free_pages.pop() for _ in range(pages_of(num_positions))]
        self._pages[slot] = pages
        row = pinned(torch.tensor(pages, dtype=torch.int32), self.table.device)
        self.table[slot, : len(pages)].copy_(row, non_blocking=True)
        return slot

    def free(self, slot: int) -> None:
        """Gives a slot and its pages to others."""
        self._free_pages.extend(reversed(self._pages.pop(slot)))
        self._free_slots.append(slot)
