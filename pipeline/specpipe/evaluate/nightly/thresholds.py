"""Which thresholds a run crosses, as sentences: by itself, and against a run that was good.

That is the run of the promoted version, or the last good one; which of them, the sentences say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specpipe.config.nightly import NightlyConfig
from specpipe.errors import plural
from specpipe.evaluate.nightly.acceptance import AcceptanceFigure, acceptance_figures
from specpipe.evaluate.nightly.record import Accepted, Latency, Quality, Run, SpeedUp

_OTHERS = {
    "prompts": "other prompts or answer lengths",
    "num_draft_tokens": "another speculation.num_draft_tokens",
    "is_parallel_draft": "another kind of draft (one pass for all tokens, or one for each)",
    "served_by": "another way of serving",
    "machine": "another machine",
}
_ACCEPTANCE_CONDITIONS = ("prompts", "num_draft_tokens", "is_parallel_draft")
_SPEED_CONDITIONS = ("prompts", "served_by", "machine")


@dataclass(frozen=True)
class Judgement:
    """reasons: what is crossed; notes: what could not be compared."""

    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge(run: Run, last: Run | None, limits: NightlyConfig) -> Judgement:
    """Returns which thresholds a run crosses; without a run before it, absolute ones alone."""
    judged = Judgement()
    _judge_output(run, last, limits, judged)
    _judge_acceptance(run, last, limits, judged)
    _judge_quality(run, last, limits, judged)
    _judge_answers(run, judged)
    _judge_speed(run, last, limits, judged)
    _judge_latencies(run, last, limits, judged)
    _judge_sizes(run, last, limits, judged)
    if last is None:
        judged.notes.append("no run before this one: nothing to compare with")
    return judged


def is_too_slow(run: Run, last: Run | None, limits: NightlyConfig) -> bool:
    """Returns whether a threshold on speed is crossed."""
    judged = Judgement()
    _judge_speed(run, last, limits, judged)
    _judge_latencies(run, last, limits, judged)
    return bool(judged.reasons)


def compared_name(run: Run) -> str:
    """Returns what a run is compared with, as sentences call it."""
    if run.compared_version is None:
        return "the last good run"
    return f"version {run.compared_version}"


def compared_acceptance(run: Run, last: Run | None) -> Accepted | None:
    """Returns the acceptance of the run before where it was asked for alike, of a draft alike."""
    if last is None or _differing(run, last, _ACCEPTANCE_CONDITIONS):
        return None
    return last.acceptance


def _judge_output(run: Run, last: Run | None, limits: NightlyConfig, judged: Judgement) -> None:
    verified = run.verification
    if verified is None:
        return
    if verified.reason is not None:
        judged.reasons.append(f"verification: {verified.reason}")
    elif verified.num_ties and not limits.allow_ties:
        ties = plural(verified.num_ties, "numerical tie")
        judged.reasons.append(f"verification: {ties}, and nightly.allow_ties is false")
    elif (
        last is not None
        and last.verification is not None
        and verified.verdict != last.verification.verdict
    ):
        judged.notes.append(
            f"verification: the verdict of {compared_name(run)} was "
            f"{last.verification.verdict}, this one's is {verified.verdict}"
        )


def _judge_acceptance(run: Run, last: Run | None, limits: NightlyConfig, judged: Judgement) -> None:
    """The floor is for these prompts as they are, the ratio for prompts of their kind."""
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
    if differing := _differing(run, last, _ACCEPTANCE_CONDITIONS):
        judged.notes.append(f"acceptance is not compared with {compared_name(run)}: {differing}")
        return
    least = limits.min_acceptance_ratio
    if not last.acceptance.prompts or not run.acceptance.prompts:
        # Totals alone, as an earlier specpipe kept them.
        before = last.acceptance.rate
        if rate < least * before:
            judged.reasons.append(
                f"acceptance rate {rate:.3f} is {rate / before:.3f} of {compared_name(run)}'s "
                f"{before:.3f}, under nightly.min_acceptance_ratio {least:g}"
            )
        return
    crossed = [
        figure
        for figure in acceptance_figures(run.acceptance, last.acceptance)
        if figure.ratio is not None and figure.ratio.high is not None and figure.ratio.high < least
    ]
    # What is true of all prompts is true of most positions and kinds as well.
    for figure in crossed[:1] if crossed and crossed[0].is_total else crossed:
        judged.reasons.append(_acceptance_fell(figure, run, least))


def _acceptance_fell(figure: AcceptanceFigure, run: Run, least: float) -> str:
    assert figure.before is not None
    where = "" if figure.is_total else f" at {figure.what}"
    return (
        f"acceptance rate{where} fell to {figure.ratio} of {compared_name(run)}'s, from "
        f"{figure.before.value:.3f} to {figure.now.value:.3f}; nightly.min_acceptance_ratio is "
        f"{least:g}"
    )


def _judge_quality(run: Run, last: Run | None, limits: NightlyConfig, judged: Judgement) -> None:
    """The same texts give the same figures, so that any step past a threshold is one."""
    for role, now in run.quality.items():
        before = None if last is None else last.quality.get(role)
        if before is None:
            continue
        if (now.format, now.measured_on) != (before.format, before.measured_on):
            judged.notes.append(
                f"quality of the {role} is not compared with {compared_name(run)}: another format, "
                "other texts, or another device"
            )
            continue
        for figure in _worse(now, before, limits):
            judged.reasons.append(f"quality of the {role}: {figure}")


def _worse(now: Quality, before: Quality, limits: NightlyConfig) -> list[str]:
    """Returns the figures that are past a threshold, a sentence each."""
    figures = (
        ("perplexity by that of its plain form", "perplexity_ratio", "max_perplexity_ratio"),
        ("mean KL to its plain form", "mean_kl", "max_kl_ratio"),
        ("top-1 agreement with its plain form", "top1_agreement", "min_top1_ratio"),
    )
    sentences = []
    for words, name, setting in figures:
        value, was, limit = getattr(now, name), getattr(before, name), getattr(limits, setting)
        if was <= 0:
            continue
        if value < limit * was if setting.startswith("min_") else value > limit * was:
            sentences.append(
                f"{words} was {was:.4g}, is {value:.4g}; nightly.{setting} is {limit:g}"
            )
    return sentences


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
        if differing := _differing(run, last, _SPEED_CONDITIONS):
            judged.notes.append(f"speed is not compared with {compared_name(run)}: {differing}")
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
                f"{measured} is {speed_up.ratio / earlier.ratio:.3f} of {compared_name(run)}'s "
                f"{_figure(earlier)}, under nightly.min_speed_up_ratio {least:g}"
            )


def _figure(speed_up: SpeedUp) -> str:
    if speed_up.low is None or speed_up.high is None:
        return f"{speed_up.ratio:.2f}"
    return f"{speed_up.ratio:.2f} ({speed_up.low:.2f} to {speed_up.high:.2f})"


def _judge_latencies(run: Run, last: Run | None, limits: NightlyConfig, judged: Judgement) -> None:
    """Doubt is no alarm here either: the lower end counts, against the upper end before."""
    most = limits.max_latency_ratio
    if last is None or most is None or _differing(run, last, _SPEED_CONDITIONS):
        return  # that speed is not compared is said once
    before = {_key(latency): latency for latency in last.latencies}
    for latency in run.latencies:
        earlier = before.get(_key(latency))
        if earlier is None:
            continue
        lowest = latency.ms if latency.low is None else latency.low
        if lowest > most * (earlier.ms if earlier.high is None else earlier.high):
            judged.reasons.append(
                f"p{latency.percentile} of the {latency.what} at concurrency "
                f"{latency.concurrency} is {_milliseconds(latency)}, {latency.ms / earlier.ms:.2f} "
                f"times {compared_name(run)}'s {_milliseconds(earlier)}; nightly.max_latency_ratio "
                f"is {most:g}"
            )


def _key(latency: Latency) -> tuple[int, str, int]:
    return latency.concurrency, latency.what, latency.percentile


def _milliseconds(latency: Latency) -> str:
    if latency.low is None or latency.high is None:
        return f"{latency.ms:.1f} ms"
    return f"{latency.ms:.1f} ms ({latency.low:.1f} to {latency.high:.1f})"


def _judge_sizes(run: Run, last: Run | None, limits: NightlyConfig, judged: Judgement) -> None:
    before = {} if last is None else last.sizes_bytes
    for name, size in run.sizes_bytes.items():
        was = before.get(name)
        if was and size > limits.max_size_ratio * was:
            judged.reasons.append(
                f"size of the {name} is {size:,} bytes, {size / was:.3f} times "
                f"{compared_name(run)}'s {was:,}, over nightly.max_size_ratio "
                f"{limits.max_size_ratio:g}"
            )


def _differing(run: Run, last: Run, names: tuple[str, ...]) -> str | None:
    """Returns which of these the last good run had otherwise, in words; None where none differ."""
    differences = [
        _OTHERS[name] for name in names if getattr(run.asked, name) != getattr(last.asked, name)
    ]
    return " and ".join(differences) or None
