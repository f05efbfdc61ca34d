"""Texts that rounds read beside their members, and which rounds read and do nothing else.

A round that reads takes longer than one of its members alone, but far less than both by themselves:
most of the time is that of the weights. So all that there is room for is read at once. Where
members leave little room, every second round is one of readings.
"""

from __future__ import annotations

from collections.abc import Callable

from specpipe.runtimes.pair.engine import Engine
from specpipe.runtimes.pair.rounds import Reading, Rounds
from specpipe.runtimes.pair.stream_drafts import Stream

_LITTLE = 1 / 4
"""Of what a round of readings alone has room for: who has less beside members waits for one."""


class Readings:
    """The requests that have joined with more than their last token to be read, the oldest first.

    What was launched is taken as cached.
    """

    def __init__(
        self,
        rounds: Rounds,
        target: Engine,
        max_num_tokens: int,
        *,
        begins: Callable[[Stream], bool],
    ) -> None:
        """max_num_tokens  that a round reads
        begins          says whether a request may be a member of the round that has read its text
        """
        self._rounds, self._target, self._max_num_tokens = rounds, target, max_num_tokens
        self._begins = begins
        self._streams: dict[Stream, None] = {}
        self._little: int | None = None
        """Tokens that the last round had room for, if that was little."""

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._streams

    def add(self, stream: Stream) -> None:
        """Takes in a request."""
        self._streams[stream] = None

    def remove(self, stream: Stream) -> None:
        """Forgets a request, if it is here."""
        self._streams.pop(stream, None)

    @property
    def are_next(self) -> bool:
        """Whether the next round is theirs alone."""
        return self._little is not None and self._little < sum(map(self._num_unread, self._streams))

    def _num_unread(self, stream: Stream) -> int:
        num_cached = self._target.length(stream.running.target_sequence)
        return len(stream.state.token_ids) - 1 - num_cached

    def choose(self, num_members: int, num_draft_tokens: int) -> tuple[list[Reading], list[Stream]]:
        """Returns what a round reads, and who is to be in it as well, without draft tokens.

        num_draft_tokens  the most of its members
        """
        room = self._rounds.reading_room(num_members, num_draft_tokens)
        is_little = room.num_tokens < _LITTLE * self._rounds.reading_room(0, 0).num_tokens
        self._little = room.num_tokens if is_little else None
        readings: list[Reading] = []
        beginning: list[Stream] = []
        num_tokens = self._max_num_tokens
        for stream in list(self._streams):
            sequence, num_unread = stream.running.target_sequence, self._num_unread(stream)
            num_read = min(num_unread, room.num_tokens, num_tokens)
            if not num_read:
                break
            readings.append(Reading(sequence, self._target.length(sequence), num_read))
            self._target.skip(sequence, num_read)
            room, num_tokens = room.less(num_read), num_tokens - num_read
            if num_read == num_unread:
                self.remove(stream)
                if room.num_pieces and self._begins(stream):
                    beginning.append(stream)
                    room = room.less(1)
        return readings, beginning
