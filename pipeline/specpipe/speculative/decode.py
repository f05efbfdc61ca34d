"""The draft-verify loop in its plainest form: one request, no KV cache, NumPy.

It is the specification that the batched loops of the runtimes are tested against. K draft tokens, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from specpipe.speculative.guide import allowed_ids
from specpipe.speculative.log_probs import likeliest, log_softmax
from specpipe.speculative.noise import Floats, Purpose, gumbel, uniform
from specpipe.speculative.request import Chunk, Request
from specpipe.speculative.state import RequestState
from specpipe.speculative.verify import Verified, verify_by_matching, verify_by_rejection
from specpipe.speculative.warp import softmax, warp

UNUSABLE_LOGITS = "the target model returned NaN, or no token is allowed here"


class LanguageModel(Protocol):
    """A causal language model."""

    def logits(self, token_ids: Sequence[int], num_rows: int) -> Floats:
        """Returns raw logits [num_rows, V], those after each of the last num_rows tokens."""


def decode(
    state: RequestState,
    target: LanguageModel,
    draft: LanguageModel | None = None,
    *,
    mask_token_id: int | None = None,
) -> Iterator[Chunk]:
    """Runs one request to its end and yields what each step emits.

    mask_token_id  of a draft that proposes all of its tokens in one pass; None: one by one

    Its draft tokens are those that its guide forces, its prediction's where that is followed, else
    those of the draft.
    A draft row with a NaN ends the draft there; a target row with one ends the request with an
    error when the output gets to it, and so does one of a prompt whose log-probabilities are asked
    for.
    """
    if state.num_unscored_tokens and not _score_prompt(state, target):
        yield state.finish("error", UNUSABLE_LOGITS)
        return
    if state.request.max_tokens == 0:
        yield state.finish("length")
    while not state.is_finished:
        draft_token_ids = state.drafts.forced()
        forced = set(range(len(draft_token_ids)))
        predicted = [] if forced else state.drafts.predict()
        is_predicted, limit = bool(predicted), 0
        draft_token_ids += predicted
        scores_of: dict[int, Floats] = {}  # of the draft's choices, by place
        if draft is not None and not is_predicted:
            limit = state.drafts.num_after_forced(len(forced))
            scores_of = _draft(state, draft, limit, draft_token_ids, forced, mask_token_id)
        raw = target.logits([*state.token_ids, *draft_token_ids], len(draft_token_ids) + 1)
        rows = [_masked(state, row, draft_token_ids[:i]) for i, row in enumerate(raw)]
        draft_scores = [
            scores_of.get(place, _certain(token_id, raw.shape[1]))
            for place, token_id in enumerate(draft_token_ids)
        ]
        num_usable = next((i for i, row in enumerate(rows) if not _is_usable(row)), len(rows))
        if num_usable == 0:
            yield state.finish("error", UNUSABLE_LOGITS)
            return
        # A later row counts only if the draft tokens before it stand, which the next step decides.
        rows, draft_token_ids = rows[:num_usable], draft_token_ids[: num_usable - 1]
        draft_scores = draft_scores[: len(draft_token_ids)]
        if not draft_token_ids and (limit or draft is None) and not is_predicted:
            state.drafts.skip("off_by_config" if draft is None else "draft_failed")
        scores = np.stack([_warp(state, row, draft_token_ids[:i]) for i, row in enumerate(rows)])
        verified = _verify(
            state.request, len(state.token_ids), draft_token_ids, draft_scores, scores
        )
        log_probs = [log_softmax(row) for row in raw[: len(verified.token_ids)]]
        yield state.accept(
            verified.token_ids,
            [float(row[i]) for row, i in zip(log_probs, verified.token_ids, strict=True)],
            [likeliest(row, state.request.num_top_log_probs) for row in log_probs],
            num_draft_tokens=len(draft_token_ids),
            is_copied=is_predicted,
            is_predicted=is_predicted,
            forced=forced,
        )


def _score_prompt(state: RequestState, target: LanguageModel) -> bool:
    """Gives the request the log-probabilities of its prompt; False where a row is unusable."""
    prompt = state.request.prompt_token_ids
    rows = target.logits(prompt[:-1], len(prompt) - 1)
    if not all(map(_is_usable, rows)):
        return False
    log_probs = [log_softmax(row) for row in rows]
    state.score_prompt(
        [float(row[i]) for row, i in zip(log_probs, prompt[1:], strict=True)],
        [likeliest(row, state.request.num_top_log_probs) for row in log_probs],
    )
    return True


def _draft(
    state: RequestState,
    draft: LanguageModel,
    num_draft_tokens: int,
    token_ids: list[int],
    forced: set[int],
    mask_token_id: int | None,
) -> dict[int, Floats]:
    """Adds draft tokens to those that are there, and at which places others are forced.

    Returns the scores [V] of each choice of the draft, which are num_draft_tokens at most. In one
    pass its rows are of as many places, and those of forced tokens are left out.
    """
    scores: dict[int, Floats] = {}
    first, rows = len(token_ids), None
    if mask_token_id is not None and num_draft_tokens:
        masks = [mask_token_id] * (num_draft_tokens - 1)
        rows = draft.logits([*state.token_ids, *token_ids, *masks], num_draft_tokens)
        rows[:, mask_token_id : mask_token_id + 1] = -np.inf
    while state.drafts.has_room_behind(len(token_ids)):
        num_taken = len(scores) if rows is None else len(token_ids) - first
        if num_taken >= num_draft_tokens:
            break
        if state.matcher is not None and state.matcher.mask(token_ids) is None:
            break  # nothing that is drafted there could stand
        if rows is None:
            row = draft.logits([*state.token_ids, *token_ids], 1)[0]
        else:
            row = rows[num_taken]
        row = _masked(state, row, token_ids)
        if not _is_usable(row):
            break
        place = len(token_ids)
        scores[place] = _warp(state, row, token_ids)
        position = len(state.token_ids) + place
        token_ids.append(_choose(state.request, scores[place], position, Purpose.DRAFT))
        more = state.drafts.forced(token_ids)
        forced.update(range(place + 1, place + 1 + len(more)))
        token_ids += more
    return scores


def _verify(
    request: Request,
    position: int,
    draft_token_ids: list[int],
    draft_scores: list[Floats],
    target_scores: Floats,
) -> Verified:
    """Returns what the accept test lets out.

    position is the place of the first draft token; target_scores [K + 1, V].
    """
    positions = range(position, position + len(target_scores))
    sampling = request.sampling
    if sampling.is_greedy or sampling.is_seeded:
        return verify_by_matching(
            draft_token_ids,
            [
                _choose(request, row, at, Purpose.TOKEN)
                for at, row in zip(positions, target_scores, strict=True)
            ],
        )
    vocab_size = target_scores.shape[1]
    return verify_by_rejection(
        draft_token_ids,
        softmax(np.stack(draft_scores)) if draft_scores else np.empty((0, vocab_size)),
        softmax(target_scores),
        accept_uniform=np.array(
            [uniform(sampling.seed, p, Purpose.ACCEPT, 1)[0] for p in positions]
        ),
        recovered_gumbel=np.stack(
            [gumbel(sampling.seed, p, Purpose.RECOVERED, vocab_size) for p in positions]
        ),
    )


def _choose(request: Request, scores: Floats, position: int, purpose: Purpose) -> int:
    """Returns one token id by scores [V]; a seeded request has one noise for draft and target."""
    sampling = request.sampling
    if sampling.is_greedy:
        return int(np.argmax(scores))
    noise = gumbel(
        sampling.seed, position, Purpose.TOKEN if sampling.is_seeded else purpose, scores.size
    )
    return int(np.argmax(scores + noise))


def _masked(state: RequestState, logits: Floats, draft_token_ids: Sequence[int]) -> Floats:
    """Returns logits [V] less what the guide does not allow behind draft tokens."""
    mask = None if state.matcher is None else state.matcher.mask(draft_token_ids)
    return logits if mask is None else np.where(allowed_ids(mask, logits.size), logits, -np.inf)


def _warp(state: RequestState, logits: Floats, draft_token_ids: Sequence[int]) -> Floats:
    request = state.request
    return warp(
        logits,
        request.sampling,
        prompt=request.prompt_token_ids,
        output=[*state.output_token_ids, *draft_token_ids],
        end_token_ids=request.end_token_ids,
    )


def _certain(token_id: int, vocab_size: int) -> Floats:
    """Returns the scores [V] of a copied token, which is drawn with probability 1."""
    scores = np.full(vocab_size, -np.inf)
    scores[token_id] = 0.0
    return scores


def _is_usable(logits: Floats) -> bool:
    """Returns whether there is no NaN, and a token with a finite score."""
    return bool(np.isfinite(logits.max()))
