"""Which thresholds a run crosses, as sentences: by itself, and against the last good run."""

from __future__ import annotations

from dataclasses import dataclass, field

from specpipe.config.nightly import NightlyConfig
from specpipe.evaluate.nightly.record import Run, SpeedUp


@dataclass(frozen=True)
class Judgement:
    """reasons: what is crossed; notes: what could not be compared."""

    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge(run: Run, last: Run | None, limits: NightlyConfig) -> Judgement:
    """Returns which thresholds a run crosses; without a last good run, absolute ones alone."""
    judged = Judgement()
    _judge_output(run, limits, judged)
    _judge_acceptance(run, last, limits, judged)
    _judge_answers(run, judged)
    _judge_speed(run, last, limits, judged)
    _judge_sizes(run, last, limits, judged)
    if last is None:
        judged.notes.append("no last good run: nothing to compare with")
    return judged


def is_too_slow(run: Run, last: Run | None, limits: NightlyConfig) -> bool:
    """Returns whether a threshold on speed is crossed."""
    judged = Judgement()
    _judge_speed(run, last, limits, judged)
    return bool(judged.reasons)


def _judge_output(run: Run, limits: NightlyConfig, judged: Judgement) -> None:
    found = run.verification
    if found is None:
        return
    if found.reason is not None:
        judged.reasons.append(f"verification: {found.reason}")
    elif found.num_ties and not limits.allow_ties:
        ties = "1 numerical tie" if found.num_ties == 1 else f"{found.num_ties} numerical ties"
        judged.reasons.append(f"verification: {ties}, and nightly.allow_ties is false")


def _judge_acceptance(run: Run, last: Run | None, limits: NightlyConfig, judged: Judgement) -> None:
    if run.acceptance is None:
        return
    rate = run.acceptance.rate
    floor = limits.min_acceptance_rate
    if floor is not None and rate < floor:
        judged.reasons.append(
            f"acceptance rate {rate:.3f} is under nightly.min_acceptance_rate {floor:g}"
        )
    if last is None or last.acceptance is None:
        return
    before = last.acceptance.rate
    if differing := _differing(run, last, ("prompts", "num_draft_tokens")):
        judged.notes.append(f"acceptance is not compared with the last good run: {differing}")
    elif rate < limits.min_acceptance_ratio * before:
        judged.reasons.append(
            f"acceptance rate {rate:.3f} is {rate / before:.3f} of the last good run's "
            f"{before:.3f}, under nightly.min_acceptance_ratio {limits.min_acceptance_ratio:g}"
        )


def _judge_answers(run: Run, judged: Judgement) -> None:
    for found in run.speed_ups:
        if found.num_failed:
            judged.reasons.append(
                f"{found.num_failed} of {found.num_answers} answers failed at concurrency "
                f"{found.concurrency}: {found.error}"
            )


def _judge_speed(run: Run, last: Run | None, limits: NightlyConfig, judged: Judgement) -> None:
    """Doubt is no alarm: of this run's intervals the upper end counts, of the last's the lower."""
    before: dict[int, SpeedUp] = {}
    if last is not None and run.speed_ups and last.speed_ups:
        if differing := _differing(run, last, ("prompts", "served_by", "machine")):
            judged.notes.append(f"speed is not compared with the last good run: {differing}")
        else:
            before = {found.concurrency: found for found in last.speed_ups}
    for found in run.speed_ups:
        if found.ratio is None:
            judged.notes.append(
                f"no speed-up at concurrency {found.concurrency}: no prompt was answered by both"
            )
            continue
        highest = found.ratio if found.high is None else found.high
        what = f"speed-up {_figure(found)} at concurrency {found.concurrency}"
        floor = limits.min_speed_up
        if floor is not None and highest < floor:
            judged.reasons.append(f"{what} is under nightly.min_speed_up {floor:g}")
        was, least = before.get(found.concurrency), limits.min_speed_up_ratio
        if was is None or was.ratio is None or least is None:
            continue
        lowest_before = was.ratio if was.low is None else was.low
        if highest < least * lowest_before:
            judged.reasons.append(
                f"{what} is {found.ratio / was.ratio:.3f} of the last good run's {_figure(was)}, "
                f"under nightly.min_speed_up_ratio {least:g}"
            )


def _figure(found: SpeedUp) -> str:
    if found.low is None or found.high is None:
        return f"{found.ratio:.2f}"
    return f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


def _judge_sizes(run: Run, last: Run | None, limits: NightlyConfig, judged: Judgement) -> None:
    before = {} if last is None else last.sizes_bytes
    for name, size in run.sizes_bytes.items():
        was = before.get(name)
        if was and size > limits.max_size_ratio * was:
            judged.reasons.append(
                f"size of the {name} is {size:,} bytes, {size / was:.3f} times the last good run's "
                f"{was:,}, over nightly.max_size_ratio {limits.max_size_ratio:g}"
            )


_OTHERS = {
    "prompts": "other prompts or answer lengths",
    "num_draft_tokens": "another speculation.num_draft_tokens",
    "served_by": "another way of serving",
    "machine": "another machine",
}


def _differing(run: Run, last: Run, names: tuple[str, ...]) -> str | None:
    """Returns which of these the last good run had otherwise, in words; None where none differ."""
    others = [
        _OTHERS[name] for name in names if getattr(run.asked, name) != getattr(last.asked, name)
    ]
    return " and ".join(others) or None
