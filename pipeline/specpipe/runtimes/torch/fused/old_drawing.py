"""Rounds of a sampled request: the buffers and launches that make tokens of scores.

Kernels and letters are in old_sampling.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specpipe.runtimes.torch.fused import old_sampling as kernels
from specpipe.runtimes.torch.fused.decoder import Decoder
from specpipe.runtimes.torch.fused_sizes import ROWS, power_of_2_above
from specpipe.speculative.noise import Purpose
from specpipe.speculative.request import Sampling

_MOST_BLOCKS = 64
_MIN_BLOCK = 1024
_CHUNK = 64
_COLUMNS_A_WARP = 256

_LEVELS, _BINS = kernels.NUM_LEVELS.value, kernels.BINS.value


@dataclass(frozen=True)
class Mode:
    """What of a request's sampling decides which kernels run. Its numbers are on the GPU.

    rejects  draft tokens are accepted by rejection sampling: there is no seed that was asked for
    """

    rejects: bool
    has_top_k: bool
    has_top_p: bool


class Settings:
    """The sampling of the request that runs, on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.numbers = torch.zeros(4, dtype=torch.float64, device=device)
        """temperature, top_k (inf: off), top_p, log(min_p)"""
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)

    def write(self, sampling: Sampling, vocab_size: int) -> Mode:
        """Takes over what a sampled request asks for, and says what it needs."""
        top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else torch.inf
        numbers = [sampling.temperature, top_k, sampling.top_p, sampling.min_p]
        settings = torch.tensor(numbers, dtype=torch.float64)
        settings[3].log_()
        self.numbers.copy_(settings)
        # Its 64 bits, as a signed number.
        seed = sampling.seed - (sampling.seed >> 63 << 64)
        self.seed.copy_(torch.tensor([seed]))
        return Mode(
            rejects=not sampling.is_seeded,
            has_top_k=top_k != torch.inf,
            has_top_p=sampling.top_p < 1.0,
        )


@dataclass(frozen=True)
class Text:
    """Where a round stands in its text: rounds.py.

    first  where the position of the last token stands among positions
    """

    history: Tensor
    positions: Tensor
    first: int


class Drawing:
    """Draws tokens of rows that a decoder has scored, with their logits."""

    def __init__(
        self, decoder: Decoder, settings: Settings, text: Text, is_unused: Tensor, *, num_rows: int
    ) -> None:
        """num_rows   of a round
        is_unused  uint8 [V]: of each token id, whether it is never drawn
        """
        self._decoder, self._settings, self._text = decoder, settings, text
        self._is_unused = is_unused
        self._num_columns = len(is_unused)
        self._num_rows = num_rows
        block = min(_MIN_BLOCK, power_of_2_above(self._num_columns))
        while block * _MOST_BLOCKS < self._num_columns:
            block *= 2
        self._block = block
        self._num_blocks = num_blocks = -(-self._num_columns // block)
        self._blocks = power_of_2_above(num_blocks)
        device = is_unused.device

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._keys = zeros(num_rows, self._num_columns, dtype=torch.int64)
        self.masses = zeros(num_rows, self._num_columns)
        self.peaks = zeros(num_rows)
        self._states = zeros(_LEVELS, num_rows, kernels.STATE.value)
        bins = (_LEVELS, num_rows, num_blocks, _BINS)
        self._bin_counts, self._bin_masses = zeros(*bins, dtype=torch.int32), zeros(*bins)
        self.kept_masses = zeros(num_rows, num_blocks)
        self._best = zeros(num_rows, num_blocks)
        self._best_ids = zeros(num_rows, num_blocks, dtype=torch.int32)
        self._recovered = zeros(num_blocks)
        self._recovered_ids = zeros(num_blocks, dtype=torch.int32)

    def draw(self, mode: Mode, purpose: Purpose, *, first_row: int, num_rows: int) -> None:
        """Draws tokens from the rows scored last, which are those from first_row on of a round."""
        if not mode.rejects:
            purpose = Purpose.TOKEN  # whatever for, so that draft and target agree
        decoder, block = self._decoder, self._block
        numbers, num_columns = self._settings.numbers, self._num_columns
        grid = (self._num_blocks, num_rows)
        num_warps = max(4, block // _COLUMNS_A_WARP)
        decoder.launch(
            kernels.weigh, grid,
            decoder.logits, decoder.best, self._is_unused, numbers, self._keys, self.masses,
            self.peaks, first_row, num_columns, len(decoder.best), decoder.config.vocab_size,
            ROWS=ROWS, BESTS=power_of_2_above(len(decoder.best)), BLOCK=block,
            num_warps=num_warps,
        )  # fmt: skip
        if mode.has_top_k:
            self._cut(kernels.NEXT_LEVEL.value, grid, first_row)
            if mode.has_top_p:
                self._cut(kernels.TOP_P_OF_TOP_K.value, grid, first_row)
        elif mode.has_top_p:
            self._cut(kernels.TOP_P.value, grid, first_row)
        decoder.launch(
            kernels.draw, grid,
            decoder.logits, self._keys, self.masses, self.peaks, numbers, self._settings.seed,
            self._text.positions, self._states, self._bin_counts, self._bin_masses, self._best,
            self._best_ids, self.kept_masses, first_row, int(purpose), self._num_rows, num_columns,
            self._num_blocks, decoder.config.vocab_size,
            FIRST=self._text.first, BLOCK=block, BLOCKS=self._blocks,
            IS_CUT=mode.has_top_k or mode.has_top_p, REJECTS=mode.rejects, num_warps=num_warps,
        )  # fmt: skip

    def _cut(self, step: int, grid: tuple[int, int], first_row: int) -> None:
        """Finds the cut that a step of `narrow`, the second, looks for."""
        first = kernels.FIRST_LEVEL.value
        steps = [first, step, *[kernels.NEXT_LEVEL.value] * (_LEVELS - 2)]
        for level, at in enumerate(steps):
            if at == first and step == kernels.TOP_P_OF_TOP_K.value:
                continue  # as it was for top-k
            self._decoder.launch(
                kernels.narrow, grid,
                self._keys, self.masses, self._settings.numbers, self._states, self._bin_counts,
                self._bin_masses, first_row, level, self._num_rows, self._num_columns,
                self._num_blocks,
                BLOCK=self._block, CHUNK=min(_CHUNK, self._block), BLOCKS=self._blocks, STEP=at,
                num_warps=8,
            )  # fmt: skip

    def propose(self, row: int) -> None:
        """Takes the token drawn in a row as a draft token."""
        text = self._text
        self._decoder.launch(
            kernels.propose_drawn, (1,),
            self._best, self._best_ids, self.peaks, text.history, text.positions, row,
            self._num_blocks, FIRST=text.first, BLOCKS=self._blocks,
        )  # fmt: skip

    def accept(self, draft: Drawing, mode: Mode, result: Tensor, num_draft_tokens: int) -> None:
        """Judges draft tokens by the rows drawn: sampling.accept_drawn."""
        decoder, seed, text = self._decoder, self._settings.seed, self._text
        if mode.rejects and num_draft_tokens:
            decoder.launch(
                kernels.recover, (self._num_blocks,),
                self.masses, self.kept_masses, self.peaks, draft.masses, draft.kept_masses,
                draft.peaks, seed, text.history, text.positions, self._recovered,
                self._recovered_ids, num_draft_tokens, self._num_columns, self._num_blocks,
                FIRST=text.first, BLOCK=self._block, ROWS=ROWS, BLOCKS=self._blocks,
                num_warps=max(4, self._block // _COLUMNS_A_WARP),
            )  # fmt: skip
        decoder.launch(
            kernels.accept_drawn, (1,),
            self._best, self._best_ids, self.masses, self.kept_masses, self.peaks, draft.masses,
            draft.kept_masses, draft.peaks, self._recovered, self._recovered_ids, seed,
            text.history, text.positions, result, num_draft_tokens, self._num_columns,
            self._num_blocks,
            FIRST=text.first, NUM_POSITIONS=len(text.positions), ROWS=ROWS, BLOCKS=self._blocks,
            REJECTS=mode.rejects,
        )  # fmt: skip
