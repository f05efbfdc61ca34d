"""Rounds in which tokens are drawn: the buffers and launches that make them of scores.

Kernels, and words and letters, are in sampling.py, cuts.py and rejection.py.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specpipe.runtimes.torch.fused import asked, cuts, rejection, sampling
from specpipe.runtimes.torch.fused.decoder import Decoder
from specpipe.runtimes.torch.fused.host import pinned
from specpipe.runtimes.torch.fused.streams import Members, Streams
from specpipe.runtimes.torch.fused_sizes import ROWS, power_of_2_above
from specpipe.runtimes.torch.round_sizes import Form
from specpipe.speculative.request import Sampling

_MOST_BLOCKS = 64
_MIN_BLOCK = 1024
_COLUMNS_A_WARP = 256
_CHUNK, _TILE = 128, 1024
"""Columns that a program of `narrow` looks at together: one a thread, or several."""

_MOST_PROGRAMS = 512
"""Of `narrow`, which are few for each row where there are many rows: most have nothing to do."""


class Settings:
    """The sampling of each stream, on the GPU."""

    def __init__(self, num_streams: int, device: torch.device) -> None:
        fields = asked.FIELDS.value
        self.table = torch.zeros(num_streams, fields, dtype=torch.int64, device=device)

    def write(self, stream: int, wanted: Sampling, vocab_size: int) -> None:
        """Takes over what a stream asks for, from the next round on; it waits for nothing."""
        numbers = torch.tensor([1.0, 1.0, -torch.inf], dtype=torch.float64)
        top_k, kind = asked.NO_LIMIT.value, asked.GREEDY.value
        if not wanted.is_greedy:
            numbers = torch.tensor(
                [wanted.temperature, wanted.top_p, wanted.min_p], dtype=torch.float64
            )
            numbers[2].log_()
            if 0 < wanted.top_k < vocab_size:
                top_k = wanted.top_k
            kind = asked.MATCHED.value if wanted.is_seeded else asked.REJECTING.value
        # Its 64 bits, as a signed number.
        seed = wanted.seed - (wanted.seed >> 63 << 64)
        settings = torch.cat([numbers.view(torch.int64), torch.tensor([top_k, seed, kind])])
        self.table[stream].copy_(pinned(settings, self.table.device), non_blocking=True)


class Drawing:
    """Draws tokens of rows that a decoder has scored, with their logits."""

    def __init__(
        self, decoder: Decoder, settings: Settings, streams: Streams, is_unused: Tensor
    ) -> None:
        """is_unused  uint8 [V]: of each token id, whether it is never drawn"""
        self._decoder, self._settings, self._streams = decoder, settings, streams
        self._is_unused = is_unused
        self._num_columns = len(is_unused)
        block = min(_MIN_BLOCK, power_of_2_above(self._num_columns))
        while block * _MOST_BLOCKS < self._num_columns:
            block *= 2
        self._block = block
        self._num_blocks = num_blocks = -(-self._num_columns // block)
        self._blocks = power_of_2_above(num_blocks)
        self._num_warps = max(4, block // _COLUMNS_A_WARP)
        self._chunk, self._tile = (
            min(size, power_of_2_above(self._num_columns)) for size in (_CHUNK, _TILE)
        )
        self._num_rows = rows = len(decoder.logits)
        zeros = partial(torch.zeros, device=is_unused.device)
        levels = cuts.ALL_LEVELS.value
        self._states = zeros(levels, rows, cuts.STATE.value, dtype=torch.int64)
        self._counts, self._masses = (
            zeros(levels, rows, cuts.BINS.value, dtype=torch.int64) for _ in range(2)
        )
        self._peaks = zeros(rows, dtype=torch.float64)
        self._noises = zeros(rows, dtype=torch.float64)
        self._limits = zeros(rows, dtype=torch.int64)
        self._last_ids = zeros(rows, dtype=torch.int32)
        self._drawn = zeros(rows, num_blocks, dtype=torch.float64)
        self._drawn_ids = zeros(rows, num_blocks, dtype=torch.int32)
        self._kept_masses = zeros(rows, num_blocks, dtype=torch.float64)
        self._recovered = zeros(rows, num_blocks, dtype=torch.float64)
        self._recovered_ids = zeros(rows, num_blocks, dtype=torch.int32)

    def first_out(self, members: Members, step: int) -> int:
        """Returns where the logits of a draft step begin, which the accept test looks at again."""
        assert not (members.is_parallel and step), "all draft tokens are of one step"
        return step * members.num_places

    def draw_draft(self, members: Members, form: Form, step: int) -> None:
        """Draws draft tokens of rows scored last, and writes them behind the texts.

        They are the draft's, a row of each place; of a parallel draft one for each draft token.
        Their logits are kept: first_out.
        """
        streams = self._streams
        group = members.most if members.is_parallel else 1
        first = self.first_out(members, step)
        num_rows = members.num_places * group
        self._draw(members, form, num_rows, first=first, step=step, group=group, drafts=True)
        self._decoder.launch(
            sampling.propose_drawn, (num_rows,),
            self._drawn, self._drawn_ids, self._peaks, *_arrays(members), streams.last,
            streams.history, first, group, step, self._num_blocks, streams.history.stride(0),
            BLOCKS=self._blocks, num_warps=1,
        )  # fmt: skip

    def draw(self, members: Members, form: Form) -> None:
        """Draws tokens of rows scored last, which are the target's, all that a round has."""
        group = members.most + 1
        num_rows = members.num_places * group
        self._draw(members, form, num_rows, first=0, step=0, group=group, drafts=False)

    def _draw(
        self, members: Members, form: Form, num_rows: int, *, first: int, step: int, group: int,
        drafts: bool,
    ) -> None:  # fmt: skip
        """Finds the best under noise of each block of the rows scored last.

        first  where the first of them stands among logits
        group  rows of a place, from draft position step on
        """
        decoder, settings, arrays = self._decoder, self._settings.table, _arrays(members)
        assert first + num_rows <= self._num_rows
        best, best_ids = decoder.bests(num_rows)
        decoder.launch(
            sampling.peak, (num_rows,),
            best, best_ids, *arrays, self._streams.last, settings, self._peaks, self._noises,
            self._counts, self._masses, self._drawn, self._drawn_ids, first, group, step,
            best.shape[1], len(best), self._num_rows, self._num_blocks,
            DRAFTS=drafts, BESTS=power_of_2_above(len(best)), BLOCKS=self._blocks,
        )  # fmt: skip
        logits_stride = decoder.logits.stride(0)
        num_chunks = -(-self._num_columns // self._chunk)
        num_parts = max(1, min(_MOST_PROGRAMS // num_rows, num_chunks // 2))
        size = self._chunk * -(-num_chunks // num_parts)
        levels = {Form.CUT: cuts.LEVELS.value, Form.CUT_TWICE: cuts.ALL_LEVELS.value}
        for level in range(levels.get(form, 0)):
            decoder.launch(
                cuts.narrow, (num_parts, num_rows),
                decoder.logits, self._is_unused, *arrays, settings, self._peaks, self._states,
                self._counts, self._masses, first, group, step, level, self._num_rows, size,
                self._num_columns, logits_stride,
                DRAFTS=drafts, CHUNK=self._chunk, TILE=self._tile, num_warps=4,
            )  # fmt: skip
        decoder.launch(
            sampling.draw, (self._num_blocks, num_rows),
            decoder.logits, self._is_unused, *arrays, self._streams.last, settings, self._peaks,
            self._noises, self._states, self._counts, self._masses, self._limits, self._last_ids,
            self._drawn, self._drawn_ids, self._kept_masses, first, group, step, self._num_rows,
            self._num_columns, self._num_blocks, logits_stride,
            DRAFTS=drafts, BLOCK=self._block, num_warps=self._num_warps,
        )  # fmt: skip

    def accept(self, draft: Drawing, members: Members, result: Tensor) -> None:
        """Judges draft tokens by the rows that target and draft have drawn from, and moves on.

        result  int32 [places, RESULT]: scoring.move_on
        """
        decoder, streams = self._decoder, self._streams
        judged = (
            decoder.logits, self._peaks, self._limits, self._last_ids, self._kept_masses,
        )  # fmt: skip
        drafted = (
            draft._decoder.logits, draft._peaks, draft._limits, draft._last_ids, draft._kept_masses,
        )  # fmt: skip
        texts = (streams.last, streams.history, self._settings.table)
        strides = (
            streams.history.stride(0), decoder.logits.stride(0), draft._decoder.logits.stride(0),
        )  # fmt: skip
        places, group = members.num_places, members.most + 1
        if members.most:
            decoder.launch(
                rejection.recover, (self._num_blocks, places),
                *judged, *drafted, self._is_unused, draft._is_unused, *_arrays(members), *texts,
                self._recovered, self._recovered_ids, places, group, self._num_columns,
                self._num_blocks, *strides,
                BLOCK=self._block, ROWS=ROWS, BLOCKS=self._blocks,
                IS_PARALLEL=members.is_parallel, num_warps=self._num_warps,
            )  # fmt: skip
        decoder.launch(
            rejection.accept_drawn, (places,),
            *judged, self._drawn, self._drawn_ids, *drafted, self._is_unused, draft._is_unused,
            *_arrays(members), *texts, self._recovered, self._recovered_ids, result, places, group,
            self._num_blocks, *strides,
            ROWS=ROWS, BLOCKS=self._blocks, IS_PARALLEL=members.is_parallel,
        )  # fmt: skip


def _arrays(members: Members) -> tuple[Tensor, Tensor, Tensor]:
    return members.streams, members.num_draft, members.is_copied
