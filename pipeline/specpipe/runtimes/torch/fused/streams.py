"""The texts of all sequences that are in rounds, on the GPU, and who takes part in a round.

A stream is a sequence that has joined; it has the number of the target's slot. The host never
reads what is here: rounds move it on, and tell what they emitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Streams:
    """What rounds start from and leave behind.

    history      int32 [streams, capacity]: tokens by position, and behind them what is drafted
    last         int32 [streams]: the position of the last token of the text
    draft_slots  int32 [streams]: the row of the draft's page table
    """

    history: Tensor
    last: Tensor
    draft_slots: Tensor


@dataclass(frozen=True)
class Members:
    """Who takes part in a round, by place; a round is recorded for a number of places.

    At some places nobody takes part, but num_draft + 1 tokens of a text are read: of stream
    -2 - streams, from position is_copied on.

    streams    int32 [places]: -1 for nobody
    num_draft  int32 [places]: draft tokens of each, drafted or copied
    is_copied  int32 [places]: 1 where they are copied
    most       the draft tokens that the round has room for. A place has most + 1 rows of the
               target's launch, one after the other; those beyond its own draft tokens are nobody's
    is_packed  who copies more than most has the places behind its own, too: there streams is
               -2 - stream, num_draft + 1 the rows, and -is_copied the draft position of the first
    is_parallel
               the draft proposes all draft tokens in one launch, by the last most of 2 most rows
               of each place
    """

    streams: Tensor
    num_draft: Tensor
    is_copied: Tensor
    most: int
    is_packed: bool = False
    is_parallel: bool = False

    @property
    def num_places(self) -> int:
        return len(self.streams)
