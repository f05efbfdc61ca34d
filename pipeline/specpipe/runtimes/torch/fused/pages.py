"""Keys and values in pages that sequences take as they need them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specpipe.runtimes.torch.fused.host import pinned
from specpipe.runtimes.torch.fused_sizes import PAGE, pages_of
from specpipe.runtimes.torch.page_pool import PageKey, PagePool


class PagedKVCache:
    """Pages for `num_slots` sequences; a sequence's slot is its row of the page table.

    keys, values  one tensor a layer, [pages, H_kv, PAGE, D]
    table         int32 [num_slots, pages of a sequence]: where its positions lie, PAGE by PAGE
    pool          who has which page

    Pages keep what they held: readers stop at the last position of their sequence. The table is
    changed behind what the device was given before, and nothing waits for it.
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
        num_pages: int | None = None,
    ) -> None:
        """capacity   positions that a sequence can have
        num_pages  of all sequences; None: all slots can be full at once
        """
        pages_each = pages_of(capacity)
        if num_pages is None:
            num_pages = num_slots * pages_each
        shape = (num_pages, num_kv_heads, PAGE, head_size)
        self.keys: Sequence[Tensor] = self._of_layers(num_layers, shape, dtype, device)
        self.values: Sequence[Tensor] = self._of_layers(num_layers, shape, dtype, device)
        self.table = torch.zeros(num_slots, pages_each, dtype=torch.int32, device=device)
        self.pool = PagePool(num_pages=num_pages, num_slots=num_slots)

    @staticmethod
    def _of_layers(
        num_layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def can_hold(self, num_positions: int) -> bool:
        """Says whether a sequence of so many positions finds a slot and pages now."""
        return self.pool.can_hold(pages_of(num_positions))

    def allocate(self, num_positions: int) -> int:
        """Takes a slot and the pages of so many positions; `can_hold` must say so."""
        slot = self.pool.allocate(pages_of(num_positions))
        self._write(slot, 0)
        return slot

    def grow(self, slot: int, num_positions: int) -> bool:
        """Gives a sequence pages of so many positions in all; False, and no change, without."""
        num_before, num_pages = len(self.pool.pages(slot)), pages_of(num_positions)
        if num_pages <= num_before:  # soon said: it is asked before each step
            return True
        if not self.pool.grow(slot, num_pages):
            return False
        self._write(slot, num_before)
        return True

    def share(self, slot: int, keys: Sequence[PageKey]) -> int:
        """Lets a sequence begin with the pages of these keys; returns how many there are."""
        num_shared = self.pool.share(slot, keys)
        self._write(slot, 0, num_shared)
        return num_shared

    def capacity(self, slot: int) -> int:
        """Returns how many positions the pages of a sequence have."""
        return PAGE * len(self.pool.pages(slot))

    def free(self, slot: int) -> None:
        """Gives a slot and its pages to others."""
        self.pool.free(slot)

    @torch.inference_mode()
    def _write(self, slot: int, first: int, stop: int | None = None) -> None:
        """Enters pages of a sequence into the table, those with the numbers from first to stop."""
        pages = self.pool.pages(slot)[first:stop]
        if len(pages) == 1:  # mostly, and a number needs no memory that the GPU copies from
            self.table[slot, first].fill_(pages[0])
        elif pages:
            row = pinned(torch.tensor(pages, dtype=torch.int32), self.table.device)
            self.table[slot, first : first + len(pages)].copy_(row, non_blocking=True)
