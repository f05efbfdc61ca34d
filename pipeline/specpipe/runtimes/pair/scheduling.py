"""What each request of a step gets: a draft-verify round, or a piece of its prompt read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specpipe.runtimes.pair.drafting import RunningSequences
from specpipe.runtimes.pair.engine import Engine, Logits
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.sampler import Sampler

GATHERS_FROM = 16
"""Requests that decode for each step that a prompt may wait; simulated: benchmarks/notes.md,
"Prompts that wait for each other".
"""


@dataclass(frozen=True)
class Piece:
    """Tokens of a prompt that the target reads in a step.

    is_scored  whether it says how likely the token after each of them is
    """

    running: RunningSequences
    token_ids: list[int]
    is_scored: bool = False


class Gathering:
    """Holds prompts back while many requests decode, so that several are read at once.

    A prompt is read in the time of a round or two, most of it that of the weights, which several
    share. What is lost by waiting is the rounds of those that wait: one of many.
    """

    def __init__(self) -> None:
        self._num_waited = 0  # steps, of all that wait

    def holds(
        self,
        num_tokens: Sequence[int],
        num_decoding: int,
        options: PairOptions,
        *,
        is_busy: bool = False,
    ) -> bool:
        """Returns whether prompts of which nothing is read yet, of so many tokens, wait a step.

        is_busy  they must: others are being read
        """
        is_enough = sum(num_tokens) >= options.max_num_tokens
        is_due = is_enough or self._num_waited >= num_decoding // GATHERS_FROM
        if not num_tokens or (is_due and not is_busy):
            self._num_waited = 0
            return False
        self._num_waited += len(num_tokens)
        return True


def num_uncached(running: RunningSequences, target: Engine) -> int:
    """Returns how many accepted tokens the target has not cached yet."""
    return len(running.state.token_ids) - target.length(running.target_sequence)


def uncached(running: RunningSequences, target: Engine) -> list[int]:
    """Returns those tokens; one in a running decode."""
    return running.state.token_ids[target.length(running.target_sequence) :]


def schedule(
    running_requests: Sequence[RunningSequences],
    target: Engine,
    options: PairOptions,
    *,
    joins: Callable[[RunningSequences], bool] = lambda running: False,
) -> tuple[list[RunningSequences], list[Piece]]:
    """Returns who decodes in a step, and pieces of the others' prompts.

    A prompt that is read to its end in a step decodes in it, unless its request joins the rounds of
    others: then all but its last token is read.

    Prompts get no more than max_num_tokens, and of those that are scored as many as the target can
    give rows of logits for, beside those of the requests that decode. A prompt is scored but for
    its last token, which is left for the first round.
    """
    decoding: list[RunningSequences] = []
    prefill: list[Piece] = []
    num_tokens = options.max_num_tokens
    is_scored = [r.state.num_unscored_tokens > 0 for r in running_requests]
    num_decoding = is_scored.count(False)
    num_logits = target.max_logits - num_decoding * (options.num_draft_tokens + 1)
    for running, scores in zip(running_requests, is_scored, strict=True):
        unread = uncached(running, target)
        size = len(unread)
        if scores and size - 1 > running.state.num_unscored_tokens:  # of what it scored, it has
            size -= 1 + running.state.num_unscored_tokens  # lost the keys and values
            scores = False
        elif scores:
            size = min(running.state.num_unscored_tokens, num_logits, target.max_logits_of_sequence)
            num_logits -= size
        elif size == 1:
            decoding.append(running)
            continue
        elif joins(running):
            size -= 1
        piece = unread[: min(size, num_tokens)]
        num_tokens -= len(piece)
        if len(piece) == len(unread):
            decoding.append(running)
        elif piece:
            prefill.append(Piece(running, piece, is_scored=scores))
    return decoding, prefill


def score(pieces: Sequence[Piece], logits: Logits, sampler: Sampler) -> list[RunningSequences]:
    """Tells requests how likely the tokens of their prompts are, by the rows of the scored pieces.

    Returns those that had an unusable row.
    """
    failed = []
    first = 0
    for piece in pieces:
        if not piece.is_scored:
            continue
        state, stop = piece.running.state, first + len(piece.token_ids)
        at = len(state.request.prompt_token_ids) - state.num_unscored_tokens
        following = state.token_ids[at : at + len(piece.token_ids)]
        scored = sampler.score(logits[first:stop], following, state.request.num_top_log_probs)
        if scored is None:
            failed.append(piece.running)
        else:
            state.score_prompt(scored.log_probs, scored.top_log_probs)
        first = stop
    return failed
