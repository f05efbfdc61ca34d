"""One trial: lone runs, the crowd, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.bits.asked import Asked, lone
from benchmarks.bits.crowd import Crowd, Room, Told, run_alone, run_crowd
from benchmarks.bits.faults import Fault, different, is_repeatable, unsound
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.speculative.request import Request

_MOST_NEIGHBOURS = 12  # that are shown of a fault
_MOST_AGAIN = 20  # requests with a fault that are run alone once more


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    faults   of requests, each with what it says about where to look
    of_pair  what is wrong with the pair when all is over
    """

    crowd: Crowd
    faults: list[tuple[Fault, str]]
    of_pair: list[str]
    asked: Sequence[Asked]

    @property
    def is_right(self) -> bool:
        return not self.faults and not self.of_pair

    def counts(self) -> dict[str, int]:
        """Returns what there was of everything: a crowd that lacks something shows little."""
        counts: Counter[str] = Counter()
        for told in self.crowd.told.values():
            if told.last is None or told.last.statistics is None:
                continue
            counts[str(told.last.finish_reason)] += 1
            counts["tokens"] += len(told.token_ids)
            counts["draft tokens"] += told.last.statistics.total_draft_tokens
            counts["accepted"] += told.last.statistics.total_accepted_draft_tokens
            counts["found cached"] += told.last.statistics.num_cached_input_tokens
            counts["gave way"] += told.last.statistics.num_preemptions
        return {
            "requests": len(self.crowd.told),
            "steps": self.crowd.num_steps,
            "most at once": self.crowd.most_at_once,
            **dict(sorted(counts.items())),
        }

    def report(self, most: int = 20) -> str:
        """Returns what was found, at most so many faults of requests in full."""
        lines = [", ".join(f"{name} {count}" for name, count in self.counts().items())]
        lines += [f"the pair: {what}" for what in self.of_pair]
        kinds = Counter(self._kind(fault) for fault, _ in self.faults)
        lines += [f"{count} x {kind}" for kind, count in kinds.most_common()]
        for fault, where in self.faults[:most]:
            lines.append(f"{fault.request_id}: {fault.what}\n{where}")
        return "\n".join(lines)

    def _kind(self, fault: Fault) -> str:
        kind = next(a.kind for a in self.asked if a.request.request_id == fault.request_id)
        return f"{kind}: {fault.what.partition(':')[0]}"


def try_pair(
    pair: EnginePair,
    asked: Sequence[Asked],
    *,
    vocab_size: int,
    max_waiting: int = 32,
    tolerance: float | None = None,
) -> Outcome:
    """Runs each request alone, then all of them as they come and go, and compares.

    tolerance  of log-probabilities; None: they are equal bit for bit
    """
    before = _rooms(pair)
    lone_runs = LoneRuns(pair)
    for one in asked:
        if is_repeatable(one.request):
            lone_runs.of(one.request)
    crowd = run_crowd(pair, asked, max_waiting=max_waiting)
    of_pair = _faults_of_pair(pair, crowd, before)
    faults: list[tuple[Fault, str]] = []
    for one in asked:
        told = crowd.of(one.request.request_id)
        fault = unsound(one, told, vocab_size=vocab_size)
        if fault is None and is_repeatable(one.request) and not crowd.is_stuck:
            expected = lone_runs.of(one.request, is_cancelled=told.reason == "cancelled")
            fault = different(one, told, expected, tolerance=tolerance)
        if fault is not None:
            where = _where(fault, one, crowd, asked)
            if not crowd.is_stuck and len(faults) < _MOST_AGAIN:
                where = f"{where}\n  {_again(pair, lone_runs, one, tolerance)}"
            faults.append((fault, where))
    return Outcome(crowd, faults, of_pair, asked)


class LoneRuns:
    """What requests are told that have the pair for themselves; those that are alike run once."""

    def __init__(self, pair: EnginePair) -> None:
        self._pair = pair
        self._told: dict[Request, Told] = {}

    def of(self, request: Request, *, is_cancelled: bool = False) -> Told:
        """Returns what the target alone tells, to a request that ends by itself."""
        return self.as_asked(lone(request, is_cancelled=is_cancelled))

    def as_asked(self, request: Request) -> Told:
        """Returns what a request is told with its own draft length, and nothing of its prompt
        cached.
        """
        key = replace(request, request_id="", cache_salt="")
        if key not in self._told:
            asked = replace(key, request_id="alone", cache_salt=f"alone {len(self._told)}")
            self._told[key] = run_alone(self._pair, asked)
        return self._told[key]


def _rooms(pair: EnginePair) -> dict[str, Room]:
    return {role: Room.of(engine) for role, engine in pair.engines.items()}


def _faults_of_pair(pair: EnginePair, crowd: Crowd, before: dict[str, Room]) -> list[str]:
    """Returns what a pair has not given back, or told to nobody."""
    if crowd.is_stuck:
        return ["it has work, and does none"]
    found = [f"{n} chunks for request {i}, which is none" for i, n in crowd.unknown.items()]
    occupancy = pair.occupancy()
    num_tokens = sum(use.num_tokens for use in occupancy.kv_caches.values())
    if occupancy.num_running or occupancy.num_waiting or num_tokens:
        found.append(
            f"with nothing to do it runs {occupancy.num_running} requests, {occupancy.num_waiting} "
            f"wait, and its caches hold {num_tokens} tokens"
        )
    late = occupancy.late_work
    if late.num_compilations or late.num_recordings:
        found.append(
            f"while requests waited it compiled {late.num_compilations} kernels and recorded "
            f"{late.num_recordings} launches"
        )
    for role, room in _rooms(pair).items():
        if room != before[role]:
            found.append(f"{role}: room for {room}, at the start for {before[role]}")
    return found


def _where(fault: Fault, one: Asked, crowd: Crowd, asked: Sequence[Asked]) -> str:
    """Returns what may have to do with a fault: the request, and who was there."""
    told = crowd.of(fault.request_id)
    step = told.step_of(0 if fault.place is None else fault.place)
    beside = crowd.beside(fault.request_id, step)
    kinds = {a.request.request_id: a for a in asked}
    lines = [
        f"  {_described(one)}",
        f"  came before step {told.joined}, first chunk in "
        f"{told.steps[0] if told.steps else 'none'}, this in {step}, last in "
        f"{told.steps[-1] if told.steps else 'none'}, beside {len(beside)}:",
    ]
    lines += [f"    {other}: {_described(kinds[other])}" for other in beside[:_MOST_NEIGHBOURS]]
    return "\n".join(lines)


def _described(one: Asked) -> str:
    request = one.request
    drafts = "adaptive" if request.num_draft_tokens is None else f"K {request.num_draft_tokens}"
    text = f"{one.kind}, {drafts}, {len(request.prompt_token_ids)} + {request.max_tokens} tokens"
    return text if one.cancelled_after is None else f"{text}, cancelled"


def _again(
    pair: EnginePair,
    lone_runs: LoneRuns,
    one: Asked,
    tolerance: float | None,
) -> str:
    """Says whether a request is told the same wrong thing with the pair for itself."""
    if not is_repeatable(one.request):
        return "not repeatable"
    alone = replace(one, cancelled_after=None)
    expected = lone_runs.of(one.request)
    found = different(alone, lone_runs.as_asked(one.request), expected, tolerance=tolerance)
    if found is not None:
        return f"alone, with its own draft tokens, too: {found.what}"
    again = replace(lone(one.request), request_id="again", cache_salt="again")
    target_again = run_alone(pair, again)
    if (found := different(alone, target_again, expected, tolerance=tolerance)) is not None:
        return f"alone, without draft tokens, it is another now: {found.what}"
    return "alone, with its own draft tokens, it is right: it takes company"
