"""Keys and values of all running sequences, and how one forward reads and writes them.

Each sequence has a slot of `capacity` positions, taken when it is allocated. Only the engine knows
of slots; above it a sequence is an opaque id, so that paging can come here without a change
elsewhere.

A forward attends its sequences in groups: neighbouring slots are one tensor, so that a few tokens
of each of them need one call. Letter beyond style: G query heads per key-value head.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specpipe.runtimes.torch.quantized import round_to_fp8

_MAX_GROUPED_TOKENS = 16
"""A sequence with more tokens in one forward (prefill) is attended by itself."""


@dataclass(frozen=True)
class Span:
    """What one sequence adds in a forward: `num_tokens` positions from `start` on, in its slot."""

    slot: int
    start: int
    num_tokens: int

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class Padding:
    """How sequences with different token counts become one rectangle, and are taken out again.

    rows  [B · N] the group's row that stands at each place; any, where there is none
    kept  the places that hold a row, in order
    """

    rows: Tensor
    kept: Tensor


@dataclass(frozen=True)
class AttentionGroup:
    """Sequences that one attention call handles, each with up to N tokens.

    rows    the forward's rows that belong to the group
    keys    one tensor per layer, [B, H_kv, positions, D]; values alike
    masks   one per layer, added to the scores, [B or 1, 1, N · G, positions]; None where all
            positions are seen
    """

    rows: slice
    num_sequences: int
    num_tokens: int
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    masks: Sequence[Tensor | None]
    padding: Padding | None


@dataclass(frozen=True)
class KVCacheStep:
    """The part of the KV cache that one forward touches."""

    groups: Sequence[AttentionGroup]
    destinations: Sequence[Tensor]
    rows: Tensor | None

    def store(self, layer: int, key_value: Tensor) -> None:
        """Stores one layer's keys and values, [T, 2 · H_kv · D]."""
        if self.rows is None:
            self.destinations[layer].copy_(key_value)
        else:
            self.destinations[layer].index_copy_(0, self.rows, key_value)


@dataclass(frozen=True)
class _FP8Step(KVCacheStep):
    """A step of a cache that holds what FP8 numbers can, in the engine's dtype."""

    scales: Sequence[Tensor]

    def store(self, layer: int, key_value: Tensor) -> None:
        super().store(layer, round_to_fp8(key_value, self.scales[layer]).to(key_value.dtype))


@dataclass(frozen=True)
class _View:
    """What some rows see of some slots through one sliding window: for all layers, or none."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    mask: Tensor | None


class KVCache:
    """Slots for the keys and values of `num_slots` sequences.

    windows     one per layer: how many positions a row sees, its own included; None where it sees
                all
    fp8_scales  one [1] per layer, of a cache that is quantized to FP8: its numbers are rounded to
                the scale's multiples that FP8 has when they are stored; none: they are not

    Positions that hold nothing are zero, never stale: attention gives a masked position the weight
    0, and 0 · NaN of an earlier sequence would be NaN.
    """

    def __init__(
        self,
        *,
        windows: Sequence[int | None],
        num_slots: int,
        capacity: int,
        num_kv_heads: int,
        group_size: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8_scales: Sequence[Tensor] = (),
    ) -> None:
        self.capacity = capacity
        self._make_step: Callable[..., KVCacheStep] = KVCacheStep
        if fp8_scales:
            self._make_step = partial(_FP8Step, scales=fp8_scales)
        self._group_size = group_size
        # A window as long as a slot is none.
        self._windows = [None if (w or capacity) >= capacity else w for w in windows]
        self._kinds = tuple(dict.fromkeys(self._windows))
        self._free_slots = list(range(num_slots))  # a heap: the lowest first, so that few have gaps
        row_size = 2 * num_kv_heads * head_size
        # A position's keys and values lie together, so that one copy stores a token.
        self._cells = torch.zeros(
            len(windows), num_slots, capacity, row_size, dtype=dtype, device=device
        )
        cells = self._cells.unflatten(-1, (2, num_kv_heads, head_size))
        self._heads = cells.permute(0, 1, 3, 4, 2, 5)  # [L, slots, 2, H_kv, capacity, D]
        self._flat = self._cells.flatten(1, 2).unbind(0)
        self._positions = torch.arange(capacity, device=device)
        self._zero = torch.zeros((), dtype=dtype, device=device)
        self._minus_infinity = torch.full((), float("-inf"), dtype=dtype, device=device)
        self._last_rows_masks = {kind: self._make_last_rows_mask(kind) for kind in self._kinds}

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def allocate(self) -> int:
        """Takes the lowest free slot."""
        return heapq.heappop(self._free_slots)

    def free(self, slot: int, length: int) -> None:
        """Gives a slot back whose first `length` positions were used."""
        self.clear(slot, 0, length)
        heapq.heappush(self._free_slots, slot)

    def clear(self, slot: int, start: int, stop: int) -> None:
        """Forgets the positions from `start` to `stop`."""
        self._cells[:, slot, start:stop].zero_()

    def step(self, spans: Sequence[Span]) -> KVCacheStep:
        """Prepares a forward over these spans, in the order of its rows; slots ascend."""
        if len(spans) == 1:
            (span,) = spans
            destinations = self._cells[:, span.slot, span.start : span.stop].unbind(0)
            return self._make_step([self._single(span, 0)], destinations, None)
        rows = [
            span.slot * self.capacity + position
            for span in spans
            for position in range(span.start, span.stop)
        ]
        groups: list[AttentionGroup] = []
        first_row = 0
        for members in _neighbours(spans):
            if len(members) == 1:
                group = self._single(members[0], first_row)
            else:
                group = self._several(members, first_row)
            groups.append(group)
            first_row = group.rows.stop
        return self._make_step(groups, self._flat, self._indices(rows))

    def _single(self, span: Span, first_row: int) -> AttentionGroup:
        return self._group(
            [self._single_view(span, window) for window in self._kinds],
            rows=slice(first_row, first_row + span.num_tokens),
            num_sequences=1,
            num_tokens=span.num_tokens,
            padding=None,
        )

    def _single_view(self, span: Span, window: int | None) -> _View:
        first = _first_seen(span, window)
        keys, values = self._layers(slice(span.slot, span.slot + 1), first, span.stop)
        return _View(keys, values, self._single_mask(span, first, window))

    def _several(self, spans: Sequence[Span], first_row: int) -> AttentionGroup:
        num_tokens = max(span.num_tokens for span in spans)
        num_rows = sum(span.num_tokens for span in spans)
        # A row sees up to its own position. Padding sees as far as a first row: no position at all
        # would give NaN.
        last_seen = self._indices(
            [
                span.start + (n if n < span.num_tokens else 0)
                for span in spans
                for n in range(num_tokens)
                for _ in range(self._group_size)
            ]
        ).unsqueeze(-1)
        return self._group(
            [self._several_view(spans, last_seen, window) for window in self._kinds],
            rows=slice(first_row, first_row + num_rows),
            num_sequences=len(spans),
            num_tokens=num_tokens,
            padding=self._padding(spans, num_tokens, num_rows),
        )

    def _several_view(self, spans: Sequence[Span], last_seen: Tensor, window: int | None) -> _View:
        first = min(_first_seen(span, window) for span in spans)
        stop = max(span.stop for span in spans)
        keys, values = self._layers(slice(spans[0].slot, spans[-1].slot + 1), first, stop)
        mask = self._mask(self._positions[first:stop], last_seen, window)
        return _View(keys, values, mask.view(len(spans), 1, -1, stop - first))

    def _group(
        self,
        views: Sequence[_View],
        *,
        rows: slice,
        num_sequences: int,
        num_tokens: int,
        padding: Padding | None,
    ) -> AttentionGroup:
        """Gives each layer its part of the view that belongs to its window."""
        keys, values, masks = views[0].keys, views[0].values, [views[0].mask] * len(self._windows)
        if len(views) > 1:
            by_window = dict(zip(self._kinds, views, strict=True))
            chosen = [by_window[window] for window in self._windows]
            keys = [view.keys[layer] for layer, view in enumerate(chosen)]
            values = [view.values[layer] for layer, view in enumerate(chosen)]
            masks = [view.mask for view in chosen]
        return AttentionGroup(rows, num_sequences, num_tokens, keys, values, masks, padding)

    def _layers(
        self, slots: slice, first: int, stop: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Returns some keys of some slots, one tensor per layer, and the values."""
        keys, values = self._heads[:, slots, :, :, first:stop].unbind(2)
        return keys.unbind(0), values.unbind(0)

    def _padding(self, spans: Sequence[Span], num_tokens: int, num_rows: int) -> Padding | None:
        if len(spans) * num_tokens == num_rows:
            return None
        rows: list[int] = []
        used_places: list[int] = []
        row = 0
        for index, span in enumerate(spans):
            place = index * num_tokens
            used_places.extend(range(place, place + span.num_tokens))
            rows.extend(range(row, row + span.num_tokens))
            rows.extend([row] * (num_tokens - span.num_tokens))
            row += span.num_tokens
        return Padding(self._indices(rows), self._indices(used_places))

    def _single_mask(self, span: Span, first: int, window: int | None) -> Tensor | None:
        if span.num_tokens == 1:
            return None
        if span.num_tokens <= _MAX_GROUPED_TOKENS:
            column = self.capacity - span.start
            num_rows = span.num_tokens * self._group_size
            mask = self._last_rows_masks[window]
            return mask[:num_rows, column + first : self.capacity + span.num_tokens]
        positions = self._positions[first : span.stop]
        mask = self._mask(positions, positions[span.start - first :].unsqueeze(-1), window)
        return mask.repeat_interleave(self._group_size, dim=0)

    def _make_last_rows_mask(self, window: int | None) -> Tensor:
        """Returns a mask of which every short span's is a part.

        Row n (G times) sees the columns up to `capacity` + n; a span that starts at position p
        takes the columns from `capacity` - p on.
        """
        device = self._cells.device
        columns = torch.arange(self.capacity + _MAX_GROUPED_TOKENS, device=device)
        mask = self._mask(columns, columns[self.capacity :].unsqueeze(-1), window)
        return mask.repeat_interleave(self._group_size, dim=0)

    def _mask(self, positions: Tensor, last_seen: Tensor, window: int | None) -> Tensor:
        """Returns [rows, positions]: 0 where a row sees a position, minus infinity elsewhere."""
        is_seen = positions <= last_seen
        if window is not None:
            is_seen &= positions > last_seen - window
        return torch.where(is_seen, self._zero, self._minus_infinity)

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self._cells.device)


def _first_seen(span: Span, window: int | None) -> int:
    """Returns the first position that a row of the span sees."""
    return 0 if window is None else max(0, span.start - window + 1)


def _neighbours(spans: Sequence[Span]) -> list[list[Span]]:
    """Divides spans into runs of adjacent slots with few tokens each; prefill stands alone."""
    groups: list[list[Span]] = []
    previous: Span | None = None
    for span in spans:
        if (
            previous is not None
            and span.slot == previous.slot + 1
            and max(span.num_tokens, previous.num_tokens) <= _MAX_GROUPED_TOKENS
        ):
            groups[-1].append(span)
        else:
            groups.append([span])
        previous = span
    return groups
