"""The draft length for each load, from what was measured, and the settings of others that say it.

A load is a number of requests that decode at once. What is best at a measured load holds from just
above the measured one below it: between two loads the higher one decides, at which drafting pays
less, and above the highest nothing changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specpipe.config.rewriting import to_lines
from specpipe.speculative.adaptive import Schedule

if TYPE_CHECKING:
    from specpipe.evaluate.tune.measure import Measurement

_WORTHWHILE = 1.02
"""A gain below this is not worth a second model, which costs memory. A guess."""

_TIE = 0.01  # speed-ups that differ by less are equal, and fewer draft tokens better. A guess.

VLLM_VERSION = "0.24.0"
"""The release that brought `num_speculative_tokens_per_batch_size` (pull request 32374)."""


def pick(speed_ups: Mapping[int, float]) -> int:
    """Returns the draft length to allow at one load, by measured speed-ups of each; 0: none."""
    best = max(speed_ups.values(), default=0.0)
    if best < _WORTHWHILE:
        return 0
    return min(length for length, speed_up in speed_ups.items() if speed_up >= best - _TIE)


def doubt(measurements: Sequence[Measurement]) -> str | None:
    """Returns why what `pick` chooses at one load may be chance, as a sentence; None: it is not.

    It is certain where the choice pays, or nothing does, with 95% for each measurement, or where
    every speed-up is known closely. What cannot be is no measurement.
    """
    for m in measurements:
        at = f"concurrency {m.concurrency}, K = {m.num_draft_tokens}: measured {m.speed_up:.2f}"
        if not m.is_possible:
            return (
                f"{at}, which cannot be: a step gives {m.tokens_a_step:.2f} tokens at most, and no "
                "speed-up is more; other work disturbed the measurement"
            )
        if m.low is None or m.high is None:
            return f"{at} in a single round, which may be chance"
    picked = pick({m.num_draft_tokens: m.speed_up for m in measurements})
    pays = any(m.num_draft_tokens == picked and (m.low or 0.0) > 1.0 for m in measurements)
    never_pays = not picked and all((m.high or math.inf) < _WORTHWHILE for m in measurements)
    if pays or never_pays or all(m.is_close for m in measurements):
        return None
    widest = max(measurements, key=lambda m: (m.high or math.inf) / (m.low or 1.0))
    return (
        f"concurrency {widest.concurrency}, K = {widest.num_draft_tokens}: measured "
        f"{widest.speed_up:.2f}, with 95% between {widest.low:.2f} and {widest.high:.2f}, which "
        "leaves open what pays"
    )


def from_loads(best: Mapping[int, int]) -> Schedule:
    """Returns the table that `speculative` uses, from the best draft length at each load."""
    steps: list[tuple[int, int]] = []
    from_batch_size = 1
    for load in sorted(best):
        if not steps or steps[-1][1] != best[load]:
            steps.append((from_batch_size, best[load]))
        from_batch_size = load + 1
    return tuple(steps)


def to_settings(schedule: Schedule) -> dict[str, Any]:
    """Returns the schedule as a setting of `speculation`."""
    levels = [{"from_batch_size": size, "num_draft_tokens": length} for size, length in schedule]
    return {"schedule": levels}


def to_yaml(schedule: Schedule) -> str:
    """Returns the schedule as the YAML of a pair has it, below `speculation:`."""
    return to_lines(to_settings(schedule))


@dataclass(frozen=True)
class ServerSetting:
    """A setting of another program, and what is to be known about it; no text: it has no form."""

    name: str
    text: str | None
    note: str


def server_settings(
    best: Mapping[int, int], draft: str, *, is_parallel: bool = False
) -> list[ServerSetting]:
    """Returns the schedule for TensorRT-LLM's LLM API and vLLM; `draft` names the checkpoint.

    is_parallel  it proposes all of its tokens in one pass
    """
    return [
        *_tensorrt_llm(best, is_parallel=is_parallel),
        _vllm(best, draft, is_parallel=is_parallel),
    ]


def _tensorrt_llm(best: Mapping[int, int], *, is_parallel: bool) -> list[ServerSetting]:
    """Returns `draft_len_schedule` of `DraftTargetDecodingConfig`, of which there are two.

    1.2: each key is the smallest batch size of its length, and 1 must be among them with
    max_draft_len (tensorrt_llm/llmapi/llm_args.py, 1.2.1). From 1.3 on (pull request 10860) each
    key is the largest one, the smallest key must have max_draft_len, and nothing is drafted above
    the last. Neither drafts more at a higher load than at the lowest. A draft that proposes in one
    pass is another class, `PARDDecodingConfig`, from 1.3.0rc7 on (pull request 11438).
    """
    loads = sorted(best)
    most = best[loads[0]]
    lowest, later = "TensorRT-LLM 1.2", "TensorRT-LLM 1.3"
    if most == 0:
        note = "drafting does not pay at the lowest load: leave speculative_config out"
        return [ServerSetting(lowest, None, note), ServerSetting(later, None, note)]
    capped = {load: min(best[load], most) for load in loads}
    note = ""
    if capped != dict(best):
        note = f"; it cannot draft more than at the lowest load, so {most} is the most"
    steps = from_loads(capped)
    of_lowest = ServerSetting(
        lowest, _speculative_config(most, dict(steps)), f"from that batch size on{note}"
    )
    of_later = ServerSetting(
        later,
        _speculative_config(most, _upper_bounds(capped)),
        f"up to that batch size, and nothing above the last{note}",
    )
    if is_parallel:
        of_lowest = ServerSetting(lowest, None, "it has no draft that proposes in one pass")
        of_later = replace(of_later, text=f"decoding_type: PARD\n{of_later.text}")
    return [of_lowest, of_later]


def _speculative_config(max_draft_len: int, schedule: Mapping[int, int]) -> str:
    table = ", ".join(f"{size}: {length}" for size, length in schedule.items())
    return f"max_draft_len: {max_draft_len}\ndraft_len_schedule: {{{table}}}\n"


def _upper_bounds(best: Mapping[int, int]) -> dict[int, int]:
    """Returns the last load of each run of equal lengths."""
    loads = sorted(best)
    return {
        load: best[load]
        for load, following in zip(loads, [*loads[1:], None], strict=True)
        if following is None or best[following] != best[load]
    }


def _vllm(best: Mapping[int, int], draft: str, *, is_parallel: bool) -> ServerSetting:
    """Returns `--speculative-config`: [first batch size, last one, K] (vLLM,
    docs/features/speculative_decoding/dynamic_speculative_decoding.md).
    """
    name = f"vLLM {VLLM_VERSION}"
    most = max(best.values())
    if most == 0:
        return ServerSetting(
            name, None, "drafting does not pay at any load: leave --speculative-config out"
        )
    ranges = []
    first = 1
    for last, length in _upper_bounds(best).items():
        ranges.append([first, last, length])
        first = last + 1
    config: dict[str, Any] = {
        "method": "draft_model",
        "model": draft,
        **({"parallel_drafting": True} if is_parallel else {}),
        "num_speculative_tokens": most,
        "num_speculative_tokens_per_batch_size": ranges,
    }
    return ServerSetting(
        name,
        json.dumps(config),
        "batch sizes from, to; before this release num_speculative_tokens is all there is; vLLM "
        "documents the table as tested with EAGLE and DFlash drafts only",
    )
