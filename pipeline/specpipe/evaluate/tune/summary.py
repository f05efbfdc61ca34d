"""What `specpipe tune` found, in words and tables for a terminal."""

from __future__ import annotations

from specpipe.evaluate.tune.acceptance import AcceptanceEstimate
from specpipe.evaluate.tune.costs import LoadCosts
from specpipe.evaluate.tune.measure import doubt
from specpipe.evaluate.tune.outcome import Tuned, Tuning
from specpipe.evaluate.tune.schedule import to_yaml
from specpipe.machine.columns import aligned

NO_CERTAINTY = (
    "what pays at each load is not certain yet; tune again when this machine is quiet, or with a "
    "longer --time-limit"
)


def summary(tuning: Tuning) -> list[str]:
    """Returns what a reader wants to know, line by line."""
    lines: list[str] = []
    for draft in tuning.drafts:
        lines += [*_draft(draft, tuning.prompts.source), ""]
    if len(tuning.drafts) > 1:
        lines += [*_ranking(tuning), ""]
    return [*lines, *_schedule(tuning)]


def _draft(draft: Tuned, source: str) -> list[str]:
    if draft.acceptance is None:
        return [f"draft {draft.checkpoint}: cannot be paired: {draft.reason}"]
    alpha = "none" if draft.acceptance.alpha is None else f"{draft.acceptance.alpha:.2f}"
    lines = [
        f"draft {draft.checkpoint}: {draft.acceptance.num_prompts} prompts of {source}, "
        f"{draft.acceptance.num_steps} steps; alpha {alpha}"
    ]
    lines += _acceptance("all", draft.acceptance)
    if len(draft.kinds) > 1:
        for kind, acceptance in draft.kinds.items():
            lines += _acceptance(kind, acceptance)
    lines += ["", *_costs(draft), "", *_speed_ups(draft)]
    if warning := doubt((m.lowest, m.highest) for m in draft.measurements):
        lines += ["", warning]
    return lines


def _acceptance(name: str, acceptance: AcceptanceEstimate) -> list[str]:
    rows = [
        ["position", *(str(p.position) for p in acceptance.positions)],
        ["accepted / judged", *(f"{p.num_accepted}/{p.num_judged}" for p in acceptance.positions)],
        ["rate", *(_number(p.rate) for p in acceptance.positions)],
        ["95% interval", *(_interval(p.low, p.high) for p in acceptance.positions)],
        ["tokens a step", *(_number(e.tokens) for e in acceptance.expected)],
    ]
    return [f"acceptance, {name}", *aligned(rows)]


def _costs(draft: Tuned) -> list[str]:
    lengths = list(draft.costs[0].verify_s)
    drafting = "draft step" if draft.costs[0].pass_s is None else "draft pass"
    rows = [["concurrency", drafting, *(f"K = {length}" for length in lengths), "rest of a step"]]
    rows += [
        [
            str(load.batch_size),
            " to ".join(map(_ms, _draft_seconds(load))),
            *(_ms(seconds) for seconds in load.verify_s.values()),
            f"{_ms(load.plain_rest_s)} to {_ms(load.drafting_rest_s)}",
        ]
        for load in draft.costs
    ]
    lines = [f"milliseconds of a {drafting}, and of the target verifying K draft tokens"]
    lines += aligned(rows)
    if draft.memory_bound is not None:
        for role, line in (
            ("target", draft.memory_bound.target),
            ("draft", draft.memory_bound.draft),
        ):
            lines.append(
                f"{role}: {_ms(line.intercept)} ms + {_ms(line.slope)} ms a row, at most "
                f"{line.max_relative_error:.0%} from what was measured"
            )
    return lines


def _draft_seconds(load: LoadCosts) -> list[float]:
    """Returns the seconds of a draft step, or of a pass for the fewest and for the most tokens."""
    if load.pass_s is None:
        return [load.draft_s]
    return [load.pass_s[min(load.pass_s)], load.pass_s[max(load.pass_s)]]


def _speed_ups(draft: Tuned) -> list[str]:
    measured = {(m.concurrency, m.num_draft_tokens): m for m in draft.measurements}
    rows = [
        ["concurrency", "K", "tokens a step", "published", "a + b rows", "predicted", "measured"]
    ]
    for p in draft.predictions:
        measurement = measured.get((p.concurrency, p.num_draft_tokens))
        shown = "" if measurement is None else f"{measurement.speed_up:.2f}"
        if measurement is not None:
            shown += f" ({_interval(measurement.lowest, measurement.highest)})"
        rows.append(
            [
                str(p.concurrency),
                str(p.num_draft_tokens),
                *map(_number, (p.expected_tokens, p.published, p.memory_bound, p.speed_up)),
                shown,
            ]
        )
    return ["speed over that of the target alone (lowest and highest round)", *aligned(rows)]


def _ranking(tuning: Tuning) -> list[str]:
    lines = ["drafts by predicted speed-up, the mean over all loads"]
    for place, draft in enumerate(tuning.drafts, start=1):
        own = ", the pair's own" if draft.is_own else ""
        score = f"{draft.score:.2f}" if draft.acceptance is not None else "cannot be paired"
        lines.append(f"{place}. {draft.checkpoint}{own}: {score}")
    first = tuning.drafts[0]
    if not first.is_own:
        lines.append(
            f"{first.checkpoint} is better than the pair's own: name it as draft.checkpoint, build "
            "and tune again"
        )
    return lines


def _schedule(tuning: Tuning) -> list[str]:
    own = tuning.own
    if own.schedule is None or own.best is None:
        return [f"nothing is recommended: {NO_CERTAINTY}", *own.doubts]
    best = ", ".join(f"{length} at {load}" for load, length in own.best.items())
    lines = [f"draft tokens that pay, by concurrency: {best}"]
    if not any(own.best.values()):
        lines.append("drafting pays at no load: serve with speculation.num_draft_tokens 0")
    lines += ["", "for this pair (--write puts it there), below speculation:"]
    lines += to_yaml(own.schedule).splitlines()
    for form in tuning.forms:
        lines.append("")
        if form.text is None:
            lines.append(f"{form.name}: {form.note}")
        else:
            lines += [f"{form.name} ({form.note}):", *form.text.splitlines()]
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.2f}-{high:.2f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
