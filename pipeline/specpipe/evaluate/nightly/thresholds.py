"""Which thresholds a run crosses, as sentences: by itself, and against the last good run."""

from __future__ import annotations

from dataclasses import dataclass, field

from specpipe.config.nightly import NightlyConfig
from specpipe.evaluate.nightly.record import Run, SpeedUp

_OTHERS = {
    "prompts": "other prompts or answer lengths",
    "num_draft_tokens": "another speculation.num_draft_tokens",
    "served_by": "another way of serving",
    "machine": "another machine",
}


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
    verified = run.verification
    if verified is None:
        return
    if verified.reason is not None:
        judged.reasons.append(f"verification: {verified.reason}")
    elif verified.num_ties and not limits.allow_ties:
        ties = f"{verified.num_ties} numerical tie{'' if verified.num_ties == 1 else 's'}"
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
    for speed_up in run.speed_ups:
        if speed_up.num_failed:
            judged.reasons.append(
                f"{speed_up.num_failed} of {speed_up.num_answers} answers failed at concurrency "
                f"{speed_up.concurrency}: {speed_up.error}"
            )


def _judge_speed(run: Run, last: Run | None, limits: NightlyConfig, judged: Judgement) -> None:
    """Doubt is no alarm: of this run's intervals the upper end counts, of the last's the lower."""
    before: dict[int, SpeedUp] = {}
    if last is not None and run.speed_ups and last.speed_ups:
        if differing := _differing(run, last, ("prompts", "served_by", "machine")):
            judged.notes.append(f"speed is not compared with the last good run: {differing}")
        else:
            before = {speed_up.concurrency: speed_up for speed_up in last.speed_ups}
    for speed_up in run.speed_ups:
        if speed_up.ratio is None:
            judged.notes.append(
                f"no speed-up at concurrency {speed_up.concurrency}: no prompt was answered by both"
            )
            continue
        highest = speed_up.ratio if speed_up.high is None else speed_up.high
        measured = f"speed-up {_figure(speed_up)} at concurrency {speed_up.concurrency}"
        floor = limits.min_speed_up
        if floor is not None and highest < floor:
            judged.reasons.append(f"{measured} is under nightly.min_speed_up {floor:g}")
        earlier, least = before.get(speed_up.concurrency), limits.min_speed_up_ratio
        if earlier is None or earlier.ratio is None or least is None:
            continue
        lowest_before = earlier.ratio if earlier.low is None else earlier.low
        if highest < least * lowest_before:
            judged.reasons.append(
                f"{measured} is {speed_up.ratio / earlier.ratio:.3f} of the last good run's "
                f"{_figure(earlier)}, under nightly.min_speed_up_ratio {least:g}"
            )


def _figure(speed_up: SpeedUp) -> str:
    if speed_up.low is None or speed_up.high is None:
        return f"{speed_up.ratio:.2f}"
    return f"{speed_up.ratio:.2f} ({speed_up.low:.2f} to {speed_up.high:.2f})"


def _judge_sizes(run: Run, last: Run | None, limits: NightlyConfig, judged: Judgement) -> None:
    before = {} if last is None else last.sizes_bytes
    for name, size in run.sizes_bytes.items():
        was = before.get(name)
        if was and size > limits.max_size_ratio * was:
            judged.reasons.append(
                f"size of the {name} is {size:,} bytes, {size / was:.3f} times the last good run's "
                f"{was:,}, over nightly.max_size_ratio {limits.max_size_ratio:g}"
            )


def _differing(run: Run, last: Run, names: tuple[str, ...]) -> str | None:
    """Returns which of these the last good run had otherwise, in words; None where none differ."""
    differences = [
        _OTHERS[name] for name in names if getattr(run.asked, name) != getattr(last.asked, name)
    ]
    return " and ".join(differences) or None
