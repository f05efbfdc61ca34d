"""What rounds cost on the GPU that is here, by members and draft tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from specpipe.runtimes.pair.rounds import MOST_UNDER_WAY, Member, Rounds
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.streams import Streams
from specpipe.runtimes.torch.round_sizes import RoundSizes
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.request import GREEDY

_TIMED_ROUNDS = 5
_CONTEXT = 256

Costs = dict[int, StepCosts]
"""By places."""


def measured_costs(
    rounds: Rounds,
    sizes: RoundSizes,
    draft: FusedEngine,
    target: FusedEngine,
    streams: Streams,
    *,
    copies: bool,
) -> tuple[Costs, Costs]:
    """Times rounds that draft, and that copy if copies says so; on a GPU, while no request runs."""
    context = min(_CONTEXT, draft.max_seq_len, target.max_seq_len)
    limits = {"prompt_length": context, "max_tokens": context}
    costs: Costs = {}
    copy_costs: Costs = {}
    sequences: list[tuple[int, int]] = []

    def seconds(num_draft_tokens: int, *, is_copied: bool = False) -> float:
        members = [
            Member(sequence, num_draft_tokens, context, is_copied) for sequence, _ in sequences
        ]
        return _seconds(rounds, members, streams, context)

    for places in sorted({places for places, _ in sizes.shapes()}):
        while len(sequences) < places:
            joined = target.allocate(**limits), draft.allocate(**limits)
            sequences.append(joined)
            rounds.join(joined[0], [0] * context, GREEDY)
            rounds.give_draft(*joined)
        lengths = sizes.lengths(places)
        plain, *drafting = [seconds(k) for k in lengths]
        costs[places] = _costs(lengths, [plain, *drafting])
        if copies:
            copying = [seconds(k, is_copied=True) for k in lengths[1:]]
            copy_costs[places] = _costs(lengths, [plain, *copying])
    for of_target, of_draft in sequences:
        rounds.leave(of_target)
        target.free(of_target)
        draft.free(of_draft)
    return costs, copy_costs


def _seconds(rounds: Rounds, members: Sequence[Member], streams: Streams, context: int) -> float:
    """The median seconds of a round while the next one waits for it."""
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for number in range(1 + _TIMED_ROUNDS):
        if number >= MOST_UNDER_WAY:
            rounds.take()
        streams.last.fill_(context - 1)  # each of them starts there
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        rounds.launch(members)
        end.record()
        marks.append((start, end))
    rounds.drop()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) / 1e3 for start, end in marks[1:]))


def _costs(lengths: Sequence[int], seconds: Sequence[float]) -> StepCosts:
    """What rounds of 0, 1, 2 ... draft tokens cost, by their seconds and those of a plain one."""
    plain = seconds[0]
    verify = []
    for num_draft_tokens in range(lengths[-1] + 1):
        index = next(i for i, k in enumerate(lengths) if k >= num_draft_tokens)
        verify.append(max(seconds[index] / plain - 1.0, 0.0))
    # Drafting is in the time of a round, so the draft's own step costs nothing more.
    return StepCosts(0.0, verify)
