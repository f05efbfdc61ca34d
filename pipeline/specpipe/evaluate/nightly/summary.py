"""What came of nightly runs, in Markdown: a table, and a section for each pair."""

from __future__ import annotations

import html
from collections.abc import Sequence

from specpipe.evaluate.nightly.record import Run, SpeedUp
from specpipe.evaluate.nightly.run import Finished

_COLUMNS = ("pair", "result", "rebuilt", "verdict", "acceptance", "speed-up", "repository")


def write_summary(done: Sequence[Finished]) -> str:
    """Returns the summary of some runs."""
    num_good = sum(finished.run.outcome == "good" for finished in done)
    lines = [
        f"## specpipe nightly: {num_good} of {len(done)} good",
        "",
        _row(_COLUMNS),
        _row(["---"] * len(_COLUMNS)),
        *(_row(_cells(finished)) for finished in done),
    ]
    if any(finished.last for finished in done):
        lines += ["", "In brackets: the last good run."]
    for finished in done:
        lines += ["", *_section(finished)]
    return "\n".join(lines) + "\n"


def _cells(finished: Finished) -> list[str]:
    run, last = finished.run, finished.last
    return [
        run.pair,
        run.outcome if run.outcome == "good" else f"**{run.outcome}**",
        _rebuilt(run),
        _verdict(run),
        _beside(_acceptance(run), _acceptance(last)),
        _speed(run, last),
        _beside(_size(run), _size(last)),
    ]


def _row(cells: Sequence[str]) -> str:
    escaped = " | ".join(cell.replace("|", r"\|") for cell in cells)
    return f"| {escaped} |"


def _beside(now: str, before: str) -> str:
    return now if "-" in (now, before) else f"{now} ({before})"


def _rebuilt(run: Run) -> str:
    if not run.stages:
        return "-"
    num_rebuilt = sum(bool(stage.reasons) for stage in run.stages)
    return f"{num_rebuilt} of {len(run.stages)} stages" if num_rebuilt else "nothing"


def _verdict(run: Run) -> str:
    found = run.verification
    if found is None:
        return "-"
    return f"{found.verdict} ({found.num_ties})" if found.verdict == "tie" else found.verdict


def _acceptance(run: Run | None) -> str:
    return "-" if run is None or run.acceptance is None else f"{run.acceptance.rate:.3f}"


def _speed(run: Run, last: Run | None) -> str:
    before = {} if last is None else {found.concurrency: found for found in last.speed_ups}
    cells = [
        f"{found.concurrency}: {_beside(_ratio(found), _ratio(before.get(found.concurrency)))}"
        for found in run.speed_ups
    ]
    return "<br>".join(cells) or "-"


def _ratio(found: SpeedUp | None) -> str:
    return "-" if found is None or found.ratio is None else f"{found.ratio:.2f}"


def _size(run: Run | None) -> str:
    size = None if run is None else run.sizes_bytes.get("repository")
    return "-" if size is None else f"{size / 1e6:.1f} MB"


def _section(finished: Finished) -> list[str]:
    run = finished.run
    items = [
        *run.reasons,
        *(f"rebuilt {stage.stage}: {why}" for stage in run.stages for why in stage.reasons),
        *run.notes,
        *(f"speed-up at concurrency {_interval(found)}" for found in run.speed_ups),
    ]
    for role, used in run.checkpoints.items():
        commit = f", commit {used.revision}" if used.revision else ""
        items.append(f"{role}: {used.checkpoint}{commit}, SHA-256 {used.digest[:16]}")
    return [f"### {run.pair}: {run.outcome}", "", _origin(run), "", *map(_item, items)]


def _interval(found: SpeedUp) -> str:
    text = f"{found.concurrency}: {_ratio(found)}"
    if found.low is None or found.high is None:
        return text
    return f"{text}, 95 % interval {found.low:.2f} to {found.high:.2f}"


def _origin(run: Run) -> str:
    parts = [run.config, run.made_at]
    if run.compared_with is not None:
        parts.append(f"compared with the run of {run.compared_with}")
    if run.asked is not None:
        parts.append(f"served by {run.asked.served_by} on {run.asked.machine}")
    return " · ".join(html.escape(part, quote=False) for part in parts)


def _item(text: str) -> str:
    """Returns an item of a list; angle brackets, which tokens have, are shown as they are."""
    return "- " + html.escape(text, quote=False).replace("\n", "\n  ")
