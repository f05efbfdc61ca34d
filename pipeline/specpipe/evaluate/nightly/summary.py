"""What came of nightly runs, in Markdown: a table, and a section for each pair."""

from __future__ import annotations

import html
from collections.abc import Sequence

from specpipe.evaluate.nightly.acceptance import acceptance_figures
from specpipe.evaluate.nightly.intervals import Estimate
from specpipe.evaluate.nightly.record import Latency, Run, SpeedUp
from specpipe.evaluate.nightly.run import Finished
from specpipe.evaluate.nightly.thresholds import compared_acceptance, compared_name

_COLUMNS = ("pair", "result", "rebuilt", "verdict", "acceptance", "speed-up", "repository")


def write_summary(runs: Sequence[Finished]) -> str:
    """Returns the summary of some runs."""
    num_good = sum(finished.run.outcome == "good" for finished in runs)
    lines = [
        f"## specpipe nightly: {num_good} of {len(runs)} good",
        "",
        _row(_COLUMNS),
        _row(["---"] * len(_COLUMNS)),
        *(_row(_cells(finished)) for finished in runs),
    ]
    if any(finished.last for finished in runs):
        lines += ["", "In brackets: the run that it is compared with."]
    for finished in runs:
        lines += ["", *_section(finished)]
    return "\n".join(lines) + "\n"


def _cells(finished: Finished) -> list[str]:
    run, last = finished.run, finished.last
    return [
        run.pair,
        run.outcome if run.outcome == "good" else f"**{run.outcome}**",
        _rebuilt(run),
        _verdict(run),
        _with_earlier(_acceptance(run), _acceptance(last)),
        _speed(run, last),
        _with_earlier(_size(run), _size(last)),
    ]


def _row(cells: Sequence[str]) -> str:
    escaped = " | ".join(cell.replace("|", r"\|") for cell in cells)
    return f"| {escaped} |"


def _with_earlier(now: str, before: str) -> str:
    return now if "-" in (now, before) else f"{now} ({before})"


def _rebuilt(run: Run) -> str:
    if not run.stages:
        return "-"
    num_rebuilt = sum(bool(stage.reasons) for stage in run.stages)
    return f"{num_rebuilt} of {len(run.stages)} stages" if num_rebuilt else "nothing"


def _verdict(run: Run) -> str:
    verified = run.verification
    if verified is None:
        return "-"
    return f"tie ({verified.num_ties})" if verified.verdict == "tie" else verified.verdict


def _acceptance(run: Run | None) -> str:
    return "-" if run is None or run.acceptance is None else f"{run.acceptance.rate:.3f}"


def _speed(run: Run, last: Run | None) -> str:
    before = {} if last is None else {s.concurrency: _ratio(s) for s in last.speed_ups}
    cells = [
        f"{s.concurrency}: {_with_earlier(_ratio(s), before.get(s.concurrency, '-'))}"
        for s in run.speed_ups
    ]
    return "<br>".join(cells) or "-"


def _ratio(speed_up: SpeedUp) -> str:
    return "-" if speed_up.ratio is None else f"{speed_up.ratio:.2f}"


def _size(run: Run | None) -> str:
    size = None if run is None else run.sizes_bytes.get("repository")
    return "-" if size is None else f"{size / 1e6:.1f} MB"


def _section(finished: Finished) -> list[str]:
    run, last = finished.run, finished.last
    items = [
        *run.reasons,
        *([what_changed(run)] if run.changes else []),
        *(f"rebuilt {stage.stage}: {why}" for stage in run.stages for why in stage.reasons),
        *run.notes,
    ]
    if last is not None and not last.made_from:
        items.append(f"{compared_name(run)} does not say what it was made from")
    items += [f"speed-up at concurrency {_interval(speed_up)}" for speed_up in run.speed_ups]
    items += [_wait(latency) for latency in run.latencies]
    for role, quality in run.quality.items():
        items.append(
            f"{role} in {quality.format}: {quality.perplexity_ratio:.4g} times the perplexity of "
            f"its plain form, mean KL {quality.mean_kl:.4g} nats, top-1 agreement "
            f"{quality.top1_agreement:.4g}"
        )
    for role, used in run.checkpoints.items():
        commit = f", commit {used.revision}" if used.revision else ""
        items.append(f"{role}: {used.checkpoint}{commit}, SHA-256 {used.digest[:16]}")
    return [
        f"### {run.pair}: {run.outcome}",
        "",
        _origin(run),
        "",
        *map(_item, items),
        *_acceptance_table(run, last),
    ]


def what_changed(run: Run) -> str:
    """Returns what is not what it was for the compared run, as a line."""
    return f"changed since {compared_name(run)}: {'; '.join(run.changes)}"


def _acceptance_table(run: Run, last: Run | None) -> list[str]:
    if run.acceptance is None or not run.acceptance.prompts:
        return []
    figures = acceptance_figures(run.acceptance, compared_acceptance(run, last))
    rows = [(f.what, _shown(f.now), _shown(f.before), _shown(f.ratio)) for f in figures]
    before = "before" if last is None else compared_name(run)
    return [
        "",
        _row(("acceptance, with 95 % intervals", "this run", before, "ratio")),
        _row(["---"] * 4),
        *(_row([html.escape(cell, quote=False) for cell in row]) for row in rows),
    ]


def _shown(estimate: Estimate | None) -> str:
    return "-" if estimate is None else str(estimate)


def _wait(latency: Latency) -> str:
    text = (
        f"p{latency.percentile} of the {latency.what} at concurrency {latency.concurrency}: "
        f"{latency.ms:.1f} ms"
    )
    if latency.low is None or latency.high is None:
        return text
    return f"{text}, 95 % interval {latency.low:.1f} to {latency.high:.1f}"


def _interval(speed_up: SpeedUp) -> str:
    text = f"{speed_up.concurrency}: {_ratio(speed_up)}"
    if speed_up.low is None or speed_up.high is None:
        return text
    return f"{text}, 95 % interval {speed_up.low:.2f} to {speed_up.high:.2f}"


def _origin(run: Run) -> str:
    parts = [run.config, run.made_at]
    if run.compared_with is not None:
        parts.append(f"compared with {compared_name(run)}, of {run.compared_with}")
    if run.asked is not None:
        parts.append(f"served by {run.asked.served_by} on {run.asked.machine}")
    return " · ".join(html.escape(part, quote=False) for part in parts)


def _item(text: str) -> str:
    """Returns an item of a list; angle brackets, which tokens have, are shown as they are."""
    return "- " + html.escape(text, quote=False).replace("\n", "\n  ")
