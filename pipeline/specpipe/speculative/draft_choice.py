"""What one request drafts in its next step: how many tokens, drafted or copied, or why none."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specpipe.speculative.adaptive import (
    DraftLength,
    StepCosts,
    can_pay,
    expected_tokens,
    num_worth_copying,
    promise,
)
from specpipe.speculative.draft_status import PASSING, DraftStatus
from specpipe.speculative.guide import Matcher
from specpipe.speculative.lookup import CopyOdds, PromptLookup
from specpipe.speculative.prediction import Prediction
from specpipe.speculative.request import Request, RequestLimits


class DraftChoice:
    """A loop asks before each step; `RequestState.accept` tells what came of it."""

    def __init__(
        self,
        request: Request,
        limits: RequestLimits,
        token_ids: Sequence[int],
        *,
        draft_length: DraftLength | None = None,
        copy_odds: CopyOdds | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """token_ids are prompt and output of the request, which grow while it runs.

        draft_length adapts the draft length to acceptance and costs; None keeps it fixed.
        copy_odds  of draft tokens that are copied from the text; None: there are none
        matcher    which knows what the request's guide forces, and what it allows to copy
        """
        self._request, self._limits, self._token_ids = request, limits, token_ids
        self._draft_length, self._matcher = draft_length, matcher
        wanted = request.num_draft_tokens
        self.max_num_draft_tokens = limits.max_num_draft_tokens if wanted is None else wanted
        """The most that a step of this request drafts."""
        self.is_speculative = self.max_num_draft_tokens > 0
        """False for a request that will never draft."""
        self.names_draft_length = wanted is not None
        """True for a request that is drafted as it says, neither less by acceptance nor by load."""
        self._copy_odds = copy_odds if self.is_speculative else None
        self._lookup: PromptLookup | None = None
        self._prediction: Prediction | None = None
        if self.is_speculative and request.prediction_token_ids:
            self._prediction = Prediction(request.prediction_token_ids)
        self._num_followed = num_prompt_tokens = len(request.prompt_token_ids)
        num_output_tokens = limits.num_tokens_left(request, num_prompt_tokens)
        self._end_length = num_prompt_tokens + num_output_tokens
        self.status: DraftStatus = "not_started" if request.max_tokens else "too_short"
        if not self.is_speculative:
            is_configured = limits.max_num_draft_tokens > 0
            self.status = "off_by_request" if is_configured else "off_by_config"

    @property
    def is_on_trial(self) -> bool:
        """True when the last draft length was chosen to see whether drafting pays again."""
        return self._draft_length is not None and self._draft_length.is_trial

    @property
    def draft_length(self) -> DraftLength | None:
        """What adapts the draft length; None: nothing does."""
        return self._draft_length

    def next_num_draft_tokens(
        self,
        costs: StepCosts | None = None,
        *,
        most: int | None = None,
        num_ahead: int = 0,
        num_sure: int | None = None,
    ) -> int:
        """How many tokens to draft in the next step; 0 makes it a plain one-token step.

        Never more than could be emitted beside the target's own token, nor than the draft's context
        holds. Costs, and `most`, what the load allows, are for requests that name no draft length.
        num_ahead says how many tokens there may be by then that were not yet accepted here, and
        num_sure how many at least; None: all of them.
        """
        if num_sure is None:
            num_sure = num_ahead
        limit = self._draft_limit(most, num_ahead, num_sure)
        if limit < 1:
            self._note(self._why_none(most, num_ahead, num_sure))
            return 0
        if self.names_draft_length or self._draft_length is None or costs is None:
            return limit
        chosen = self._draft_length.choose(limit, costs)
        if not chosen:
            self._note("does_not_pay")
        return chosen

    def skip(self, reason: DraftStatus, *, most: int | None = None) -> None:
        """Tells the request why a step drafts nothing, unless it has a reason of its own."""
        if self.status == reason and most is None and self._draft_room() > 0:
            return  # told before; many requests ask in every step
        self._note(self._why_none(most) or reason)

    def copy_limit(self, num_sure: int = 0) -> int:
        """The most draft tokens that may be copied from the text in the next step; 0: none.

        Neither the draft's context nor what the load allows limits them: both are of the draft.
        num_sure  tokens that there are at least by then, and were not yet accepted here
        """
        if self._copy_odds is None or self._draft_length is None:
            return 0
        return max(self._token_limit(num_sure), 0)

    def num_matched(self) -> int:
        """Returns how many tokens at the end of the text match those before what would be copied.

        The text is followed from the first time on that this is asked.
        """
        lookup = self._lookup
        if lookup is None:
            lookup = PromptLookup(self._request.prompt_token_ids, self._copy_odds)
            self._lookup = lookup
        lookup.extend(self._token_ids[lookup.length :])
        return lookup.num_matched

    def next_num_copied_tokens(
        self, copying: StepCosts, drafting: StepCosts | None, *, most: int | None = None
    ) -> int:
        """How many draft tokens to copy from the text in the next step; 0: it is not to copy any.

        So it is where drafting promises more, and where the request cannot copy. drafting is None
        while there is no draft, and `most` limits what it drafts. A named draft length is copied
        in full, or drafted.
        """
        limit = self.copy_limit()
        if not can_pay(limit, copying):
            return 0
        return self._num_to_copy(
            self.expected_tokens(is_copied=True), limit, copying, drafting, most
        )

    def copy(self, num_tokens: int) -> list[int]:
        """Returns as many draft tokens as `next_num_copied_tokens` said, copied from the text."""
        assert self._lookup is not None
        return self._allowed(self._lookup.copy(num_tokens))

    def forced(self, after: Sequence[int] = ()) -> list[int]:
        """Returns draft tokens that the request's guide leaves no choice of, behind those that the
        next step has already. They cost no draft step.
        """
        if self._matcher is None:
            return []
        return self._matcher.forced(self._token_limit() - len(after), after)

    def has_room_behind(self, num_draft_tokens: int) -> bool:
        """Returns whether the draft may draft one more behind so many draft tokens of a step."""
        has_use = num_draft_tokens < self._token_limit()
        return has_use and self._draft_room(num_draft_tokens) > 0

    def num_after_forced(
        self, num_forced: int, costs: StepCosts | None = None, *, most: int | None = None
    ) -> int:
        """How many tokens to draft behind those that are forced, which count as draft tokens."""
        if num_forced and not self.has_room_behind(num_forced):
            return 0
        return self.next_num_draft_tokens(costs, most=most, num_ahead=num_forced)

    @property
    def follows_prediction(self) -> bool:
        """Whether the output is where its prediction more likely than not says what comes next."""
        return self._prediction is not None and bool(self._predicted(1))

    def predict(
        self,
        copying: StepCosts | None = None,
        drafting: StepCosts | None = None,
        *,
        most: int | None = None,
    ) -> list[int]:
        """Returns draft tokens for the next step from the request's prediction.

        None are returned where drafting promises more. Costs and limits are those of
        `next_num_copied_tokens`; without costs, what more likely than not stands is copied.
        """
        predicted = self._predicted(self._token_limit())
        if not predicted or self._prediction is None or copying is None:
            return predicted
        expected = self.expected_tokens(is_copied=True, is_predicted=True)
        return predicted[: self._num_to_copy(expected, len(predicted), copying, drafting, most)]

    def expected_tokens(
        self, *, is_copied: bool = False, is_predicted: bool = False
    ) -> Sequence[float]:
        """What a step of an adaptive request should emit, by its draft tokens, none first.

        is_copied  they are the text's, or if is_predicted those of the prediction
        """
        if is_copied and not is_predicted:
            assert self._copy_odds is not None
            expected: list[float] = self._copy_odds.expected_tokens([self.num_matched()], [0])[
                0
            ].tolist()
            return expected
        source = self._prediction if is_predicted else self._draft_length
        assert source is not None
        a = source.acceptance_probability
        return [expected_tokens(a, k) for k in range(self.max_num_draft_tokens + 1)]

    def observe(
        self,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        *,
        is_copied: bool,
        forced: Collection[int] = (),
    ) -> None:
        """Takes in what a step accepted of its draft tokens; at which places they were forced."""
        num_accepted = num_accepted_tokens
        if forced:
            num_accepted = sum(place not in forced for place in range(num_accepted_tokens))
            is_rejected = num_draft_tokens > num_accepted_tokens not in forced
            is_copied = is_copied or num_accepted + is_rejected == 0  # no own one was judged
            num_draft_tokens = num_accepted + is_rejected
        if num_draft_tokens or forced:
            is_trial = not is_copied and self.is_on_trial
            self._note("does_not_pay" if is_trial else "drafted")
        if self._draft_length is None:
            return
        if is_copied:
            self._draft_length.observe_others(num_accepted_tokens + 1)
        else:
            self._draft_length.observe(
                num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted
            )

    def _predicted(self, num_tokens: int) -> list[int]:
        if self._prediction is None:
            return []
        self._prediction.extend(self._token_ids[self._num_followed :])
        self._num_followed = len(self._token_ids)
        is_likely = self._prediction.acceptance_probability > 0.5
        return self._allowed(self._prediction.copy(num_tokens)) if is_likely else []

    def _allowed(self, token_ids: list[int]) -> list[int]:
        """Returns what of copied tokens the guide would let stand."""
        if self._matcher is None or not token_ids:
            return token_ids
        return token_ids[: self._matcher.num_allowed(token_ids)]

    def _num_to_copy(
        self,
        expected: Sequence[float],
        limit: int,
        copying: StepCosts,
        drafting: StepCosts | None,
        most: int | None,
    ) -> int:
        """Returns how many draft tokens, up to limit, to copy instead of drafting."""
        assert self._draft_length is not None
        draft_limit = self._draft_limit(most)
        if self.names_draft_length:
            drafted = copied = 0.0
            if drafting is not None and draft_limit > 0:
                a = self._draft_length.acceptance_probability
                drafted = promise(a, draft_limit, drafting)
            if limit > 0:
                copied = expected[limit] / copying.time(limit)
            return limit if copied > drafted else 0
        promised = 1.0
        if drafting is not None:
            promised = self._draft_length.promise(draft_limit, drafting)
        return num_worth_copying(expected, limit, copying, instead_of=promised)

    def _token_limit(self, num_ahead: int = 0) -> int:
        """The most draft tokens that the request has a use for; less than 1: none."""
        num_left = self._end_length - len(self._token_ids)
        return min(self.max_num_draft_tokens, num_left - num_ahead - 1)

    def _draft_limit(self, most: int | None, num_ahead: int = 0, num_sure: int = 0) -> int:
        """The same, of those that the draft has room for and the load allows."""
        limit = min(self._token_limit(num_sure), self._draft_room(num_ahead))
        return limit if most is None or self.names_draft_length else min(limit, most)

    def _draft_room(self, num_ahead: int = 0) -> int:
        """The most draft tokens that the draft's context has room for."""
        return self._limits.draft_max_seq_len - len(self._token_ids) - num_ahead + 1

    def _why_none(
        self, most: int | None, num_ahead: int = 0, num_sure: int = 0
    ) -> DraftStatus | None:
        """What leaves no draft token to `_draft_limit`; None where there is one."""
        if self._token_limit(num_sure) < 1:
            return "too_short"
        if self._draft_room(num_ahead) < 1:
            return "no_room"
        return None if self._draft_limit(most, num_ahead, num_sure) > 0 else "off_by_schedule"

    def _note(self, status: DraftStatus | None) -> None:
        """Keeps what the last step says of drafting, unless it is of that step alone."""
        is_passing = status in PASSING and self.status != "not_started"
        if status is not None and self.is_speculative and not is_passing:
            self.status = status
