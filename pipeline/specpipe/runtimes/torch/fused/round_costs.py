"""What rounds cost on the GPU that is here, by members and draft tokens."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from specpipe.runtimes.pair.costs import most_tokens
from specpipe.runtimes.pair.rounds import MOST_UNDER_WAY, Member, Rounds
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.streams import Streams
from specpipe.runtimes.torch.round_sizes import RoundSizes
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.request import GREEDY

_TIMED_ROUNDS = 9
_CONTEXT = 256

Costs = dict[int, StepCosts]
"""By members."""


def measured_costs(
    rounds: Rounds,
    sizes: RoundSizes,
    draft: FusedEngine,
    target: FusedEngine,
    streams: Streams,
    *,
    copies: bool,
) -> tuple[Costs, Costs]:
    """Times rounds that draft, and if copies says so those of one member that copy.

    On a GPU, while no request runs.
    """
    context = min(_CONTEXT, draft.max_seq_len, target.max_seq_len)
    for engine in (draft, target):
        context = most_tokens(engine, sizes.max_members, context)
    limits = {"prompt_length": context, "max_tokens": context}
    sequences: list[tuple[int, int]] = []
    drafting: dict[tuple[int, int], float] = {}
    copying: dict[tuple[int, int], float] = {}
    for num_members, most in sizes.timed():
        while len(sequences) < num_members:
            joined = target.allocate(**limits), draft.allocate(**limits)
            sequences.append(joined)
            rounds.join(joined[0], [0] * context, GREEDY)
            rounds.give_draft(*joined)
        for is_copied in (False, True)[: 1 + (copies and num_members == 1)]:
            members = [Member(target, most, context, is_copied) for target, _ in sequences]
            seconds = copying if is_copied else drafting
            seconds[num_members, most] = _seconds(rounds, members, streams, context)
    for of_target, of_draft in sequences:
        rounds.leave(of_target)
        target.free(of_target)
        draft.free(of_draft)
    return costs_of(sizes, drafting), costs_of(replace(sizes, max_members=1), copying)


def costs_of(sizes: RoundSizes, seconds: Mapping[tuple[int, int], float]) -> Costs:
    """Returns what rounds of each number of members cost by draft length.

    seconds  by members and draft tokens, as of `timed`: others cost what the next greater ones do
    """
    costs = {}
    for num_members in range(1, sizes.max_members + 1) if seconds else ():
        verify = []
        for num_draft_tokens in range(sizes.most_draft_tokens(num_members) + 1):
            length = sizes.length(num_members, num_draft_tokens)
            timed = min(num for num, most in seconds if num >= num_members and most == length)
            verify.append(max(seconds[timed, length] / seconds[timed, 0] - 1.0, 0.0))
        # Drafting is in the time of a round, so the draft's own step costs nothing more.
        plain = min(num for num, most in seconds if num >= num_members and not most)
        costs[num_members] = StepCosts(0.0, verify, seconds[plain, 0])
    return costs


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
