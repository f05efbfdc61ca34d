"""One request that runs alone, in rounds that the device makes without the host.

EnginePair runs any number of requests, and asks the device for logits in every step. A device that
can draft, verify and accept by itself needs to be asked for nothing while one request runs: it gets
its next round before the last one has ended, and is never idle. It does not matter when such
rounds begin or stop: the text is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.sampler import RoundResult
from specpipe.speculative.adaptive import StepCosts, most_draft_tokens
from specpipe.speculative.request import Sampling
from specpipe.speculative.state import RequestState

MOST_UNDER_WAY = 2
"""Rounds launched and not yet taken: one that runs, and one for when it ends."""


class Rounds(Protocol):
    """Draft-verify rounds of one sequence at a time, on the engines of a pair."""

    @property
    def costs(self) -> StepCosts | None:
        """What rounds cost by draft length; None where that was not measured."""

    def begin(
        self,
        token_ids: Sequence[int],
        *,
        target_sequence: int,
        draft_sequence: int | None,
        sampling: Sampling,
    ) -> None:
        """Starts with a text of which the target has cached all but the last token.

        Before a round that drafts, the draft must have read that much too, or one token less.
        Without a draft_sequence rounds must have no draft tokens.
        """

    @property
    def copy_costs(self) -> StepCosts | None:
        """What rounds cost whose draft tokens are copied; None where there are no such rounds."""

    def launch(self, num_draft_tokens: int, *, num_positions: int, is_copied: bool = False) -> None:
        """Begins a round as soon as the last one has ended, and does not wait for it.

        num_positions  what its text may have reached by its end
        is_copied      its draft tokens are copied from the text, as PromptLookup does
        """

    def take(self) -> RoundResult:
        """Waits for the oldest round under way and returns what it let out."""

    def drop(self) -> None:
        """Waits for all rounds under way and forgets them."""


@dataclass(frozen=True)
class StreamRound:
    """A round of the stream, and how many tokens the draft has cached after it.

    num_draft_cached  None: as many as before
    """

    result: RoundResult
    num_drafted: int
    is_copied: bool
    num_draft_cached: int | None


@dataclass(frozen=True)
class _Launched:
    num_draft_tokens: int
    is_copied: bool = False


class SingleStream:
    """The request that has the device for itself, while there is one."""

    def __init__(self, rounds: Rounds, options: PairOptions, *, is_adaptive: bool) -> None:
        self._rounds = rounds
        self._most = most_draft_tokens(options.schedule, 1)
        self._costs = rounds.costs if is_adaptive else None
        self._copy_costs = rounds.copy_costs if options.prompt_lookup and is_adaptive else None
        self._state: RequestState | None = None
        self._has_draft = False
        self._under_way: deque[_Launched] = deque()

    def runs(self, state: RequestState) -> bool:
        """Returns whether the stream is that of this request."""
        return self._state is state

    @staticmethod
    def can_run(state: RequestState) -> bool:
        """Returns whether a request wants tokens alone, chosen by the model's scores alone, and has
        now no better draft tokens than the device's.
        """
        request = state.request
        return not (
            request.sampling.changes_scores
            or request.has_log_probs
            or request.return_prompt_log_probs
            or request.guide
            or state.drafts.follows_prediction
        )

    def may_draft(self, state: RequestState) -> bool:
        """Returns whether a request, or else the load that it is alone, lets the draft draft."""
        return state.drafts.is_speculative and (state.drafts.names_draft_length or self._most != 0)

    def begin(
        self,
        state: RequestState,
        *,
        target_sequence: int,
        draft_sequence: int | None,
        reads_meanwhile: bool = False,
    ) -> None:
        """Takes a request over, whose text is cached as Rounds.begin wants it.

        reads_meanwhile  the draft lacks much of the text, and reads it before the next step. Where
                         the draft length is ours to choose, rounds without draft tokens are
                         launched at once: they keep the device busy while the host gets that ready
        """
        self._state = state
        self._has_draft = draft_sequence is not None
        self._rounds.begin(
            state.token_ids,
            target_sequence=target_sequence,
            draft_sequence=draft_sequence,
            sampling=state.request.sampling,
        )
        if reads_meanwhile and not self._is_fixed(state):
            state.drafts.skip("not_ready")
            while len(self._under_way) < MOST_UNDER_WAY and not self._is_sure_to_end(state):
                self._launch(state, _Launched(0))

    def end(self) -> None:
        """Lets the request go; rounds under way count for nothing."""
        self._rounds.drop()
        self._under_way.clear()
        self._state = None

    def step(self) -> StreamRound:
        """Keeps the device busy, and takes in the oldest round."""
        state = self._state
        assert state is not None
        while len(self._under_way) < MOST_UNDER_WAY and not (
            self._is_sure_to_end(state) or self._depends(state)
        ):
            self._launch(state, self._next(state))
        launched = self._under_way.popleft()
        result = self._rounds.take()
        num_drafted, num_cached = launched.num_draft_tokens, None
        if num_drafted and not launched.is_copied and result.token_ids is not None:
            # The draft read all of the text and of its own tokens, but the last of those.
            before = len(state.token_ids)
            num_cached = min(before - 1 + num_drafted, before - 1 + len(result.token_ids))
        return StreamRound(result, num_drafted, launched.is_copied, num_cached)

    def _is_sure_to_end(self, state: RequestState) -> bool:
        """Returns whether the rounds under way, of one token at least, emit all that is wanted."""
        num_tokens_left = state.request.max_tokens - state.num_output_tokens
        return 0 < num_tokens_left <= len(self._under_way)

    def _is_fixed(self, state: RequestState) -> bool:
        """Returns whether the draft length of a request is not ours to choose."""
        return self._costs is None or state.drafts.names_draft_length

    def _depends(self, state: RequestState) -> bool:
        """Returns whether a fixed draft length may be less when the rounds under way are taken.

        So it is near the end of a text. Where the accept test rejects draft tokens, what is drawn
        depends on which tokens are drafted: those must be the same ones as in single steps.
        """
        if not self._is_fixed(state) or not self._has_draft:
            return False
        ahead = self._most_tokens_under_way()
        choose = state.drafts.next_num_draft_tokens
        lengths = {choose(most=self._most, num_ahead=n) for n in (0, ahead)}
        return len(lengths) > 1

    def _most_tokens_under_way(self) -> int:
        return sum(launched.num_draft_tokens + 1 for launched in self._under_way)

    def _next(self, state: RequestState) -> _Launched:
        """Returns the round to launch."""
        drafts = state.drafts
        if self._copy_costs is not None:
            drafting = self._costs if self._has_draft else None
            num_copied = drafts.next_num_copied_tokens(self._copy_costs, drafting, most=self._most)
            if num_copied:
                return _Launched(num_copied, is_copied=True)
        if not self._has_draft:
            drafts.skip("no_room", most=self._most)
            return _Launched(0)
        # A trial is one round: the next drafts only once its result is known.
        is_drafting = any(r.num_draft_tokens and not r.is_copied for r in self._under_way)
        if is_drafting and drafts.is_on_trial:
            return _Launched(0)
        return _Launched(drafts.next_num_draft_tokens(self._costs, most=self._most))

    def _launch(self, state: RequestState, launched: _Launched) -> None:
        num_ahead = self._most_tokens_under_way() + launched.num_draft_tokens + 1
        self._rounds.launch(
            launched.num_draft_tokens,
            num_positions=len(state.token_ids) + num_ahead,
            is_copied=launched.is_copied,
        )
        self._under_way.append(launched)
