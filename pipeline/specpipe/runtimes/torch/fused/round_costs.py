"""What rounds cost on the GPU that is here, by members and draft tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from specpipe.runtimes.pair.costs import most_tokens, settled
from specpipe.runtimes.pair.rounds import MOST_UNDER_WAY, Member, Rounds
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.streams import Streams
from specpipe.runtimes.torch.fused_sizes import width_of
from specpipe.runtimes.torch.round_sizes import PACKED, RoundSizes
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.request import GREEDY

_TIMED_TOGETHER, _MOST_TIMES = 2, 5
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
) -> tuple[Costs, Costs, Mapping[int, float]]:
    """Times rounds that draft, and if copies says so those that copy, and packed ones by places.

    On a GPU, while no request runs.
    """
    context = min(_CONTEXT, draft.max_seq_len, target.max_seq_len)
    for engine in (draft, target):
        context = most_tokens(engine, sizes.max_members, context)
    limits = {"prompt_length": context, "max_tokens": context}
    sequences: list[tuple[int, int]] = []
    drafting: dict[tuple[int, int], float] = {}
    copying: dict[tuple[int, int], float] = {}
    for num_members, most in sizes.shapes():  # the fullest of each kind of round
        if num_members > sizes.max_members:  # it is there for what is read beside them
            continue
        while len(sequences) < num_members:
            joined = target.allocate(**limits), draft.allocate(**limits)
            sequences.append(joined)
            rounds.join(joined[0], [0] * context, GREEDY)
            rounds.give_draft(*joined)
        for is_copied in (False, True)[: 1 + (copies and most > 0)]:
            members = [Member(target, most, context, is_copied) for target, _ in sequences]
            seconds = copying if is_copied else drafting
            seconds[num_members, most] = settled(_seconds(rounds, members, streams, context))
        if copies and not most:
            copying[num_members, 0] = drafting[num_members, 0]
    for of_target, of_draft in sequences:
        rounds.leave(of_target)
        target.free(of_target)
        draft.free(of_draft)
    packed = packed_costs_of(sizes, copying)
    return costs_of(sizes, drafting), costs_of(sizes, copying), packed


def packed_costs_of(
    sizes: RoundSizes, copying: Mapping[tuple[int, int], float]
) -> Mapping[int, float]:
    """Returns the seconds of packed rounds by places: the most of those that are as wide.

    copying  of rounds that copy, by members and draft tokens
    """
    by_width: dict[int, float] = {}
    for (num_members, most), seconds in copying.items():
        if most:
            width = width_of(num_members * (most + 1))
            by_width[width] = max(by_width.get(width, 0.0), seconds)
    widths = {places: width_of(places * (PACKED + 1)) for places in sizes.packed}
    return {places: by_width[width] for places, width in widths.items() if width in by_width}


def costs_of(sizes: RoundSizes, seconds: Mapping[tuple[int, int], float]) -> Costs:
    """Returns what rounds of each number of members cost by draft length.

    seconds  by members and draft tokens, as of `shapes`: others cost what the next greater ones do,
             less the time of the texts that they have not
    """
    plain = sorted(num for num, most in seconds if not most)
    per_text = 0.0  # the two or three least kinds read all weights in launches of one width
    if len(plain) > 2:
        per_text = (seconds[plain[2], 0] - seconds[plain[1], 0]) / (plain[2] - plain[1])

    def time(num_members: int, length: int) -> float:
        places = min(num for num, most in seconds if num >= num_members and most == length)
        return seconds[places, length] - max(per_text, 0.0) * (places - num_members)

    costs = {}
    for num_members in range(1, sizes.max_members + 1) if seconds else ():
        lengths = range(sizes.most_draft_tokens(num_members) + 1)
        times = [time(num_members, sizes.length(num_members, length)) for length in lengths]
        # Drafting is in the time of a round, so the draft's own step costs nothing more.
        verify = [max(each / times[0] - 1.0, 0.0) for each in times]
        costs[num_members] = StepCosts(0.0, verify, times[0])
    return costs


def _seconds(
    rounds: Rounds, members: Sequence[Member], streams: Streams, context: int
) -> Iterator[float]:
    """Yields times of a round while the next one waits for it."""
    for _ in range(_MOST_TIMES):
        marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for number in range(1 + _TIMED_TOGETHER):
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
        for start, end in marks[1:]:  # before the first the GPU was idle
            yield start.elapsed_time(end) / 1e3
