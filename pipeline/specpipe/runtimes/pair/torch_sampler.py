"""Warping, drawing and the accept test for many requests at once: `speculative/` in batched torch.

R rows (one per position to decide), V vocabulary. Scores are float64, so that a choice differs from
the NumPy specification only where that would be a tie. Plain greedy requests take none of this:
they are one argmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specpipe.runtimes.pair.engine import Engine
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.sampler import Drafted, RoundResult, Scored
from specpipe.runtimes.pair.torch_log_probs import greatest, likeliest
from specpipe.speculative import noise
from specpipe.speculative.guide import Matcher, allowed_ids
from specpipe.speculative.noise import KEY_INCREMENTS, MASK_32, MULTIPLIERS, NUM_ROUNDS, Purpose
from specpipe.speculative.request import Request, Sampling
from specpipe.speculative.verify import verify_by_matching
from specpipe.speculative.warp import banned_token_ids

_FIRST_SORTED = 128
"""Scores of each row that are sorted at first, then 8 times as many while a cut lies beyond. A
guess.
"""


class Row(NamedTuple):
    """One position to decide: the token after `output` of a request, draft tokens included."""

    request: Request
    output: list[int]

    @property
    def position(self) -> int:
        """The place of the token in prompt and output."""
        return len(self.request.prompt_token_ids) + len(self.output)

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def is_plain(self) -> bool:
        """Whether the token is the argmax of the raw logits."""
        return self.sampling.is_greedy and not self.sampling.changes_scores


class TorchSampler:
    """The `Sampler` over torch logits; vocab_size is what draft and target have in common."""

    def __init__(
        self,
        vocab_size: int,
        unused_token_ids: Sequence[tuple[int, int]] = (),
        *,
        mask_token_id: int | None = None,
    ) -> None:
        """mask_token_id  the draft never proposes it, whatever it is to the target, if anything"""
        self._vocab_size = vocab_size
        self._mask = slice(0) if mask_token_id is None else slice(mask_token_id, mask_token_id + 1)
        self._unused = [(a, min(b, vocab_size)) for a, b in unused_token_ids if a < vocab_size]

    @classmethod
    def of(cls, draft: Engine, target: Engine, options: PairOptions) -> TorchSampler:
        """Returns the sampler of two engines and how they serve."""
        parallel = options.parallel
        return cls(
            min(draft.vocab_size, target.vocab_size),
            options.unused_token_ids,
            mask_token_id=None if parallel is None else parallel.mask_token_id,
        )

    @torch.inference_mode()
    def draft(self, logits: torch.Tensor, drafted: Sequence[Drafted]) -> list[bool]:
        rows = [_row(d, d.token_ids) for d in drafted]
        logits = self._draftable_columns(logits)
        ended = mask_rows(logits, [(d.state.matcher, d.token_ids) for d in drafted])
        logits[ended] = -torch.inf  # nothing that is drafted there could stand
        choices = _Choices(logits, rows, Purpose.DRAFT)
        for index, (draft, row) in enumerate(zip(drafted, rows, strict=True)):
            if not choices.is_usable[index]:
                continue
            draft.token_ids.append(choices.token_ids[index])
            if not _is_matched(row.sampling):
                draft.probs[len(draft.token_ids) - 1] = choices.probs(index)
        return choices.is_usable

    @torch.inference_mode()
    def draft_in_pass(
        self, logits: torch.Tensor, drafted: Sequence[Drafted], lengths: Sequence[int]
    ) -> None:
        logits = self._draftable_columns(logits)
        best, token_ids = greatest(logits)
        left: list[tuple[Drafted, int, int]] = []  # the next row of each, and that after its last
        for draft, stop, length in zip(drafted, accumulate(lengths), lengths, strict=True):
            if draft.state.matcher is not None or not _row(draft, []).is_plain:
                left.append((draft, stop - length, stop))
                continue
            rows = takewhile(lambda row: math.isfinite(best[row]), range(stop - length, stop))
            draft.token_ids.extend(token_ids[row] for row in rows)
        while left:
            has_token = self.draft(logits[[row for _, row, _ in left]], [d for d, *_ in left])
            left = [
                (draft, following, stop)
                for (draft, row, stop), is_drafted in zip(left, has_token, strict=True)
                if is_drafted and (following := row + 1 + len(draft.add_forced())) < stop
            ]

    @torch.inference_mode()
    def verify(self, logits: torch.Tensor, drafted: Sequence[Drafted]) -> list[RoundResult]:
        rows = [_row(d, d.token_ids[:i]) for d in drafted for i in range(len(d.token_ids) + 1)]
        raw = logits.clone() if any(d.state.request.has_log_probs for d in drafted) else logits
        logits = self._usable_columns(logits)
        if any(d.state.matcher is not None for d in drafted):
            mask_rows(
                logits,
                [
                    (d.state.matcher, d.token_ids[:i])
                    for d in drafted
                    for i in range(len(d.token_ids) + 1)
                ],
            )
        choices = _Choices(logits, rows, Purpose.RECOVERED)
        results = []
        first = 0
        for draft in drafted:
            end = first + len(draft.token_ids) + 1
            result = _verify(draft, choices, first, end)
            if draft.state.request.has_log_probs and result.token_ids is not None:
                scored = self._scored(
                    raw[first : first + len(result.token_ids)],
                    result.token_ids,
                    draft.state.request.num_top_log_probs,
                )
                result = result._replace(**vars(scored))
            results.append(result)
            first = end
        return results

    @torch.inference_mode()
    def score(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> Scored | None:
        scored = self._scored(logits, token_ids, num_top)
        return None if any(map(math.isnan, scored.log_probs)) else scored

    def _scored(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> Scored:
        """Returns log-softmax in float32 of raw logits [N, V], at N tokens and at the likeliest.

        Ids that cannot be emitted have their part of the sum, and are never among the likeliest.
        """
        log_probs = logits.float().log_softmax(dim=-1)
        index = torch.tensor(list(token_ids), device=logits.device)[:, None]
        own = log_probs.gather(1, index)[:, 0].tolist()
        return Scored(own, likeliest(self._usable_columns(log_probs), num_top) if num_top else ())

    def _draftable_columns(self, logits: torch.Tensor) -> torch.Tensor:
        """The same, of ids that the draft may propose."""
        logits = self._usable_columns(logits)
        logits[:, self._mask] = -torch.inf
        return logits

    def _usable_columns(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, V] of ids that all three have; writes into its argument."""
        logits = logits[:, : self._vocab_size]
        for start, stop in self._unused:
            logits[:, start:stop] = -torch.inf
        return logits


def mask_rows(logits: torch.Tensor, rows: Sequence[tuple[Matcher | None, list[int]]]) -> list[int]:
    """Excludes what guides do not allow, in place: rows of logits [R, V] by matcher, and by the
    draft tokens before each. Rows without one cost nothing.

    Returns those that the output cannot get to.
    """
    found = {i: m.mask(token_ids) for i, (m, token_ids) in enumerate(rows) if m is not None}
    masks = {index: mask for index, mask in found.items() if mask is not None}
    if not masks:
        return list(found)
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        for index, mask in masks.items():
            excluded = torch.from_numpy(~allowed_ids(mask, vocab_size))
            logits[index].masked_fill_(excluded, -torch.inf)
    else:
        places = torch.tensor(list(masks), device=logits.device)
        excluded = ~_allowed_ids(np.stack(list(masks.values())), vocab_size, logits.device)
        logits[places] = logits[places].masked_fill(excluded, -torch.inf)
    return [index for index in found if index not in masks]


def _allowed_ids(
    masks: npt.NDArray[np.int32], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Returns [R, V] what masks [R, words] allow; what goes to the device is a bit for each id."""
    words = torch.from_numpy(masks).to(device)
    bits = torch.arange(32, dtype=torch.int32, device=device)
    is_allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab_size]
    num_beyond = vocab_size - is_allowed.shape[1]
    return torch.nn.functional.pad(is_allowed, (0, num_beyond))


def _row(drafted: Drafted, draft_token_ids: list[int]) -> Row:
    request = drafted.state.request
    if request.sampling.is_greedy and not request.sampling.changes_scores:
        return Row(request, draft_token_ids)  # nothing looks at the output
    return Row(request, [*drafted.state.output_token_ids, *draft_token_ids])


def _is_matched(sampling: Sampling) -> bool:
    """Returns whether draft tokens are accepted by matching; False for rejection sampling."""
    return sampling.is_greedy or sampling.is_seeded


class _Choices:
    """The token that each row would choose by itself, and the scores behind it."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[Row], purpose: Purpose) -> None:
        best, self.token_ids = greatest(logits)
        self.is_usable = [math.isfinite(value) for value in best]
        self.rows = rows
        warped = [i for i, row in enumerate(rows) if not row.is_plain and self.is_usable[i]]
        self._place = {index: place for place, index in enumerate(warped)}
        if not warped:
            return
        warped_rows = [rows[i] for i in warped]
        self._scores = warp(logits[warped], warped_rows)
        is_usable = self._scores.max(dim=-1).values.isfinite().tolist()
        for index, token_id, usable in zip(
            warped, _draw(self._scores, warped_rows, purpose), is_usable, strict=True
        ):
            self.token_ids[index] = token_id
            self.is_usable[index] = usable

    def probs(self, index: int) -> torch.Tensor:
        """Returns the probabilities [V] that row index draws from."""
        return self._scores[self._place[index]].softmax(dim=-1)


def _verify(drafted: Drafted, choices: _Choices, first: int, end: int) -> RoundResult:
    """Returns the accept test of one request, on rows first ... end of choices."""
    usable = choices.is_usable[first:end]
    num_rows = usable.index(False) if False in usable else len(usable)
    if num_rows == 0:
        return RoundResult(None)
    # A later row counts only if the draft tokens before it stand, which the next step decides.
    token_ids = drafted.token_ids[: num_rows - 1]
    if _is_matched(drafted.state.request.sampling):
        verified = verify_by_matching(token_ids, choices.token_ids[first : first + num_rows])
        return RoundResult(verified.token_ids, num_draft_tokens=len(token_ids))
    accepted: list[int] = []
    for place, token_id in enumerate(token_ids):
        index = first + place
        row = choices.rows[index]
        target_probs = choices.probs(index)
        draft_probs = drafted.probs.get(place)
        if draft_probs is None:
            draft_probs = _certain(token_id, target_probs)
        accept = float(noise.uniform(row.sampling.seed, row.position, Purpose.ACCEPT, 1)[0])
        if accept * draft_probs[token_id] < target_probs[token_id]:
            accepted.append(token_id)
            continue
        residual = (target_probs - draft_probs).clamp_min(0.0)
        weights = residual if residual.sum() > 0 else target_probs
        accepted += _draw(weights.log()[None], [row], Purpose.RECOVERED)
        return RoundResult(accepted, num_draft_tokens=len(token_ids))
    bonus = choices.token_ids[first + len(accepted)]
    return RoundResult([*accepted, bonus], num_draft_tokens=len(token_ids))


def _certain(token_id: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the probabilities [V] of a copied token."""
    probs = torch.zeros_like(like)
    probs[token_id] = 1.0
    return probs


def warp(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Returns scores [R, V] in float64 of raw logits [R, V], as `speculative/warp.py` does."""
    scores = logits.double()
    for index, row in enumerate(rows):
        if row.sampling.changes_scores:
            _penalize_and_ban(scores[index], row)
    sampled = [row.sampling for row in rows if not row.sampling.is_greedy]
    if not sampled:
        return scores
    column = _columns(scores.device, rows)
    untempered = scores
    scores = untempered / column([row.sampling.temperature or 1.0 for row in rows], torch.float64)
    if any(sampling.top_k > 0 or sampling.top_p < 1.0 for sampling in sampled):
        _truncate(scores, rows)
    if any(sampling.min_p > 0.0 for sampling in sampled):
        min_p = column([row.sampling.min_p for row in rows], torch.float64)
        floor = scores.max(dim=-1, keepdim=True).values + min_p.log()
        scores.masked_fill_(scores < floor, -torch.inf)
    if len(sampled) == len(rows):
        return scores
    is_greedy = column([row.sampling.is_greedy for row in rows], torch.bool)
    return untempered.where(is_greedy, scores)


def _penalize_and_ban(scores: torch.Tensor, row: Row) -> None:
    """Applies penalties and bans of one row, in place on its scores [V]."""
    sampling, prompt, output = row.sampling, row.request.prompt_token_ids, row.output
    if sampling.repetition_penalty != 1.0:
        used_ids = torch.tensor(sorted({*prompt, *output}), device=scores.device)
        s = scores[used_ids]
        scores[used_ids] = torch.where(
            s > 0, s / sampling.repetition_penalty, s * sampling.repetition_penalty
        )
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = torch.unique(torch.tensor(output, device=scores.device), return_counts=True)
        scores[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts.double()
    if sampling.biases:
        biased_ids = torch.tensor(list(sampling.biases), device=scores.device)
        biases = list(sampling.biases.values())
        scores[biased_ids] += torch.tensor(biases, dtype=torch.float64, device=scores.device)
    banned = banned_token_ids(sampling.bad_words, prompt, output)
    if len(output) < sampling.min_tokens:
        banned += [i for i in row.request.end_token_ids if i < len(scores)]
    if banned:
        scores[torch.tensor(banned, device=scores.device)] = -torch.inf


def _truncate(scores: torch.Tensor, rows: Sequence[Row]) -> None:
    """Applies top-k, then top-p, in place; of equal scores at a cut the lower ids stay.

    Only the best scores of each row are sorted, as many as it takes to find where all rows are cut.
    """
    vocab_size = scores.shape[-1]
    column = _columns(scores.device, rows)
    top_k = column([row.sampling.top_k or vocab_size for row in rows], torch.int64)
    top_p = column([row.sampling.top_p for row in rows], torch.float64)
    size = _FIRST_SORTED
    while True:
        size = min(size, vocab_size)
        best = scores.topk(size, dim=-1).values
        rank = torch.arange(size, device=scores.device)
        best.masked_fill_(rank >= top_k, -torch.inf)
        has_all_of_top_k = top_k <= size
        total = torch.where(
            has_all_of_top_k,
            best.logsumexp(dim=-1, keepdim=True),
            scores.logsumexp(dim=-1, keepdim=True),
        )
        probs = (best - total).exp()
        before = probs.cumsum(dim=-1) - probs
        is_kept = (rank < top_k) & ((before < top_p) | (top_p >= 1.0))
        num_kept = is_kept.sum(dim=-1, keepdim=True)
        is_off = (top_k >= vocab_size) & (top_p >= 1.0)
        if size == vocab_size or (has_all_of_top_k | is_off | (num_kept < size)).all():
            break
        size *= 8
    cut = best.gather(-1, num_kept - 1).masked_fill_(is_off, -torch.inf)
    excluded = scores < cut
    is_tied = scores == cut
    num_tied_kept = num_kept - (scores > cut).sum(dim=-1, keepdim=True)
    if (~is_off & (is_tied.sum(dim=-1, keepdim=True) > num_tied_kept)).any():
        excluded |= ~is_off & is_tied & (is_tied.cumsum(dim=-1) > num_tied_kept)
    scores.masked_fill_(excluded, -torch.inf)


def _columns(
    device: torch.device, rows: Sequence[Row]
) -> Callable[[Sequence[float], torch.dtype], torch.Tensor]:
    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    return column


def _draw(scores: torch.Tensor, rows: Sequence[Row], purpose: Purpose) -> list[int]:
    """Returns a token id for each row of scores [R, V]: the best, for sampled rows under noise.

    A seeded row draws with the same noise whatever the purpose, so that draft and target agree.
    """
    token_ids: list[int] = scores.argmax(dim=-1).tolist()
    noisy = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    if not noisy:
        return token_ids
    scores = scores[noisy]
    # Noise is only needed where a token is left to draw.
    num_left = int((scores > -torch.inf).sum(dim=-1).max())
    best, candidates = scores.topk(max(num_left, 1), dim=-1)
    for purpose_used, is_seeded in ((Purpose.TOKEN, True), (purpose, False)):
        places = [n for n, i in enumerate(noisy) if rows[i].sampling.is_seeded == is_seeded]
        if places:
            chosen = [rows[noisy[n]] for n in places]
            u = uniform_at(
                [row.sampling.seed for row in chosen],
                [row.position for row in chosen],
                purpose_used,
                candidates[places],
            )
            best[places] -= (-u.log()).log()
    drawn = candidates.gather(-1, best.argmax(dim=-1, keepdim=True))[:, 0].tolist()
    for index, token_id in zip(noisy, drawn, strict=True):
        token_ids[index] = token_id
    return token_ids


def uniform_at(
    seeds: Sequence[int], positions: Sequence[int], purpose: Purpose, token_ids: torch.Tensor
) -> torch.Tensor:
    """Returns `noise.uniform_at` at token ids [R, C], bit for bit on any device."""
    if token_ids.device.type == "cpu":
        return torch.from_numpy(noise.uniform_at(seeds, positions, purpose, token_ids.numpy()))
    device = token_ids.device

    def words(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)[:, None]

    word = token_ids % 4
    counters = (
        token_ids // 4,
        words([p & MASK_32 for p in positions]),
        words([p >> 32 for p in positions]),
        words([int(purpose)] * len(seeds)),
    )
    keys = words([s & MASK_32 for s in seeds]), words([s >> 32 for s in seeds])
    bits = torch.stack(philox(counters, keys), dim=-1).gather(-1, word[..., None])[..., 0]
    return (bits.double() + 0.5) * 2.0**-32


def philox(
    counters: tuple[torch.Tensor, ...], keys: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Returns the words of Philox4x32-10, on int64 tensors of 32-bit words, which broadcast."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counters)
    k0, k1 = keys
    for _ in range(NUM_ROUNDS):
        # int64 products wrap, but their 64 bits are those of the unsigned ones.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK_32) ^ c1 ^ k0,
            p1 & MASK_32,
            ((p0 >> 32) & MASK_32) ^ c3 ^ k1,
            p0 & MASK_32,
        )
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & MASK_32, (k1 + KEY_INCREMENTS[1]) & MASK_32
    return c0, c1, c2, c3
