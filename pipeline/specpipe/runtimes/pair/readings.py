"""Texts that rounds read beside their members, and which rounds read and do nothing else.

A round that reads takes longer than one of its members alone, but far less than both by themselves:
most of the time is that of the weights. Rows that its launch has anyway cost nothing, and those of
a wider launch are worth their time where half of them are used; what is left is read by the next
round. Where members leave little room, a round between theirs is of readings alone as soon as there
is enough to fill it, and in any case before long: each that is read waits, but each member does
while it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specpipe.runtimes.pair.engine import Engine
from specpipe.runtimes.pair.rounds import Member, Reading, ReadingRoom, Rounds
from specpipe.runtimes.pair.scheduling import GATHERS_FROM
from specpipe.runtimes.pair.stream_drafts import Stream

_LEAST_WAIT = 2
"""Rounds of however few members that may leave something to be read before that is late."""


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
        self._num_waited = 0
        """Rounds of members that have left something to be read, one after the other."""
        self._may_wait = 0
        """How many of them may, by the last round's members."""
        self._has_little_room = False
        """Whether those left little."""

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
        if not self._streams or not self._has_little_room:
            return False
        return self._is_late or self._num_unread >= self._rounds.reading_rooms(())[-1].num_tokens

    @property
    def _is_late(self) -> bool:
        return self._num_waited >= self._may_wait

    @property
    def _num_unread(self) -> int:
        return sum(map(self._num_unread_of, self._streams))

    def _num_unread_of(self, stream: Stream) -> int:
        num_cached = self._target.length(stream.running.target_sequence)
        return len(stream.state.token_ids) - 1 - num_cached

    def choose(self, members: Sequence[Member]) -> tuple[list[Reading], list[Stream]]:
        """Returns what a round reads, and who is to be in it as well, without draft tokens."""
        if not self._streams:
            self._num_waited, self._has_little_room = 0, False
            return [], []
        rooms = self._rounds.reading_rooms(members)
        alone = self._rounds.reading_rooms(())[-1]
        self._has_little_room = 2 * rooms[-1].num_tokens < alone.num_tokens
        self._may_wait = max(len(members) // GATHERS_FROM, _LEAST_WAIT) if members else 0
        room = self._room(rooms)
        num_tokens = self._max_num_tokens
        readings: list[Reading] = []
        beginning: list[Stream] = []
        for stream in list(self._streams):
            sequence, num_unread = stream.running.target_sequence, self._num_unread_of(stream)
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
        self._num_waited = self._num_waited + 1 if self._streams and members else 0
        return readings, beginning

    def _room(self, rooms: Sequence[ReadingRoom]) -> ReadingRoom:
        """Returns the greatest of which half is used that the one before has not.

        All of it may be left for the next round, unless that has no members, or it is late.
        """
        num_wanted = min(self._num_unread, self._max_num_tokens) + len(self._streams)
        chosen = rooms[0]
        for room in rooms[1:]:
            num_left = num_wanted - chosen.num_tokens
            num_more = room.num_tokens - chosen.num_tokens
            if num_left <= 0 or (2 * num_left < num_more and not self._is_late):
                break
            chosen = room
        return chosen
