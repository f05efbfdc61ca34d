"""The target's memory where it is too little for all that run: then the youngest gives way.

It waits again, at its place in the queue, with all that it has been told, and is computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specpipe.errors import ConfigError
from specpipe.runtimes.pair.admission import Waiting
from specpipe.runtimes.pair.drafting import RunningSequences
from specpipe.runtimes.pair.engine import Engine, SequenceId
from specpipe.runtimes.pair.pair import Preempted
from specpipe.runtimes.pair.room import Room
from specpipe.speculative.request import Request
from specpipe.speculative.state import RequestState


class TargetMemory:
    """The room of a target, and who gets it."""

    LEAST_SHARED = 256
    """Tokens that one request reads and another is to read, for which the latter waits: a guess. An
    H200 reads them of 7 B in 9 ms.
    """

    def __init__(self, target: Engine, max_seq_len: int, *, reuses: bool) -> None:
        """max_seq_len is a request's; raises ConfigError where one alone would not fit."""
        if target.pages is not None and not target.can_admit(max_seq_len):
            raise ConfigError(
                f"the target's KV cache has room for {target.pages.capacity_tokens} tokens, too "
                f"little for one request of {max_seq_len} (engine.max_seq_len) and what rounds "
                "write beyond: give it more memory, or lower that"
            )
        self._target, self._reuses = target, reuses and target.pages is not None
        self.room = Room(target, max_seq_len=max_seq_len, reuses=reuses)
        self.preempted = Preempted()

    def make(self, waiting: Waiting, running: Sequence[RunningSequences]) -> SequenceId | None:
        """Makes the sequence of a request that is next; None: there is no room for it yet.

        There is once those that run can go on for a while beside it.
        """
        request, state = waiting.request, waiting.state
        prompt_length = len(request.prompt_token_ids)
        return self.room.make(
            request,
            prompt_length if state is None else len(state.token_ids),
            num_beside=sum(min(r.state.num_tokens_left, Room.AHEAD) for r in running),
            reuses=not self._is_read_as_a_whole(request, state),
        )

    @staticmethod
    def _is_read_as_a_whole(request: Request, state: RequestState | None) -> bool:
        """Returns whether a prompt has tokens that are still to be scored."""
        if state is None:
            return request.return_prompt_log_probs
        return state.num_unscored_tokens > 0

    def is_being_read(self, waiting: Waiting, running: Sequence[RunningSequences]) -> bool:
        """Returns whether one that runs is reading what a request's prompt begins with, so that it
        would find it cached a little later. It waits for none that came after it.
        """
        if not self._reuses or self._is_read_as_a_whole(waiting.request, waiting.state):
            return False
        prompt, salt = waiting.request.prompt_token_ids, waiting.request.cache_salt
        for other in running:
            request = other.state.request
            num_shared = self._target.length(other.target_sequence) + self.LEAST_SHARED
            if (
                min(len(prompt), len(request.prompt_token_ids)) > num_shared
                and salt == request.cache_salt
                and other.waiting < waiting
                and not self._is_read_as_a_whole(request, other.state)
                and prompt[:num_shared] == request.prompt_token_ids[:num_shared]
            ):
                return True
        return False

    def start(self, running: RunningSequences) -> None:
        """Notes what a request that begins, or goes on, has cached already."""
        state, waiting = running.state, running.waiting
        running.num_begun = len(state.token_ids)
        running.num_reused = self._target.length(running.target_sequence)
        if waiting.state is None:
            state.num_cached_input_tokens = running.num_reused
            return
        num_again = max(waiting.num_cached - running.num_reused, 0)
        self.preempted = replace(self.preempted, num_tokens=self.preempted.num_tokens + num_again)

    def give_way(self, running: RunningSequences) -> Waiting:
        """Has a request keep what it needs to go on later, before its sequences are freed."""
        state, waiting = running.state, running.waiting
        running.gave_way = True
        waiting.state, waiting.num_cached = state, self._target.length(running.target_sequence)
        state.num_preemptions += 1
        num_requests = self.preempted.num_requests + 1
        self.preempted = replace(self.preempted, num_requests=num_requests)
        return waiting


def youngest(running: Sequence[RunningSequences], to: RunningSequences) -> RunningSequences:
    """Returns who gives way to a request that lacks room, itself if there is none younger.

    So the oldest always goes on. Of those that have given way before and have emitted nothing
    since none does again, if there is another.
    """
    assert len(running) > 1, "a request alone has all the room that there is"
    younger = sorted((r for r in running if r.waiting > to.waiting), key=lambda r: r.waiting)
    if not younger:
        return to
    return next((r for r in reversed(younger) if r.has_gone_on), younger[-1])
