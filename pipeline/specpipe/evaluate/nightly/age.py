"""How old the last good run of a pair is: nothing else tells that nights are not run at all."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from specpipe.config.sections import PipelineConfig
from specpipe.errors import show
from specpipe.evaluate.nightly.record import read_last_good

_ADVICE = "see whether `specpipe nightly` runs at all"
_CLOCK_ERROR = timedelta(minutes=5)  # by which clocks of two machines may differ


def age_fault(config: PipelineConfig, hours: float, now: datetime | None = None) -> str | None:
    """Returns why the last good run will not do, as a sentence; None where it is young enough."""
    path = config.artifacts.result("nightly")
    run = read_last_good(path)
    if run is None:
        return f"{config.name}: there is no good run, {path} does not exist: {_ADVICE}"
    try:
        made_at = datetime.fromisoformat(run.made_at)
        age = (now or datetime.now(timezone.utc)) - made_at
    except (TypeError, ValueError):  # no time, or one without its zone
        return f"{config.name}: {path} was made at {show(run.made_at)}, which is no time: {_ADVICE}"
    if age < -_CLOCK_ERROR:
        return (
            f"{config.name}: the last good run is of {run.made_at}, which is still to come: set "
            "the clock of this machine, or of the one that made it"
        )
    age_hours = age / timedelta(hours=1)
    if age_hours > hours:
        return (
            f"{config.name}: the last good run is {age_hours:.0f} hours old, of "
            f"{run.made_at}; {hours:g} are allowed: {_ADVICE}"
        )
    return None
