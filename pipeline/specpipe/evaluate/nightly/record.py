"""What a nightly run leaves beside the artifact: the last good run, and a line for every run.

results/nightly.json    the last good run; replaced by a good one, and by nothing else
results/nightly.jsonl   all runs in short, oldest first, a line each
results/.nightly.lock   held while a run goes on; a second one waits
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock
from pydantic import Field, TypeAdapter, ValidationError

from specpipe.build import cache
from specpipe.errors import RepositoryError
from specpipe.evaluate.results import read_result, write_result
from specpipe.machine.artifacts import Artifacts
from specpipe.machine.signals import deferred
from specpipe.machine.whole_file import written_whole

NIGHTLY_KIND = "nightly"

RunOutcome = Literal["good", "bad", "unfinished"]
"""What became of a run: good; under a threshold; or a step of it could not be done."""


@dataclass(frozen=True, kw_only=True)
class CheckpointUsed:
    """A checkpoint as the engines were made from it.

    revision  the commit of a hub id; None for a folder
    digest    SHA-256 over the names and contents of the files that were read
    """

    checkpoint: str
    revision: str | None
    digest: str


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """A stage of the build; without reasons it was up to date."""

    stage: str
    reasons: tuple[str, ...]
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class VerificationResult:
    """What verification came to; reason is a sentence for a fault."""

    verdict: Literal["identical", "tie", "fault"]
    reason: str | None
    num_ties: int


Count = Annotated[int, Field(ge=0, lt=1 << 53)]
"""Of tokens; a run comes with a version, too, which anybody may have made."""


@dataclass(frozen=True, kw_only=True)
class PromptAccepted:
    """Draft tokens of one prompt's answer.

    judged_at, accepted_at  by position in the step, from the first; empty where steps are not known
    """

    prompt: str
    kind: str
    num_draft_tokens: Count
    num_accepted_tokens: Count
    judged_at: tuple[Count, ...] = ()
    accepted_at: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        judged = (self.num_draft_tokens, *self.judged_at)
        accepted = (self.num_accepted_tokens, *self.accepted_at)
        if len(judged) != len(accepted) or any(map(operator.lt, judged, accepted)):
            raise ValueError("more was accepted than judged")


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Draft tokens of greedy answers at the full draft length, which no clock has a part in.

    prompts  in their order; empty in what an earlier specpipe wrote
    """

    num_draft_tokens: Count
    num_accepted_tokens: Count
    prompts: tuple[PromptAccepted, ...] = ()

    def __post_init__(self) -> None:
        if self.num_accepted_tokens > self.num_draft_tokens or not self.num_draft_tokens:
            raise ValueError("more was accepted than drafted, or nothing was drafted")

    @property
    def rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Rate as served / rate of the target alone, with the interval of the ratio.

    ratio       None when no prompt was answered by both
    num_failed  answers of either side that failed or were cut; error is the most frequent reason
    """

    concurrency: int
    ratio: float | None
    low: float | None
    high: float | None
    num_answers: int
    num_failed: int
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Latency:
    """A percentile of what users wait for, with the pair as it is served, and its interval.

    what       the first token of an answer; or one of the later ones, which is an answer's time
               after its first output by the tokens that came in it
    low, high  None with fewer than two prompts
    """

    concurrency: int
    what: Literal["first token", "later token"]
    percentile: Literal[50, 99]
    ms: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What quantization costs a model, as the build measured it against the plain form.

    measured_on  texts, the digest of their file where it is known, device and dtype
    """

    format: str
    perplexity_ratio: float
    mean_kl: float
    top1_agreement: float
    measured_on: str


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the numbers depend on besides the artifact: runs with other values are not compared.

    prompts            digest of the prompts, the lengths of their answers included
    is_parallel_draft  whether the draft proposes its tokens in one pass, for which it may guess
                       less and be faster
    """

    prompts: str
    num_draft_tokens: int
    served_by: str
    machine: str
    is_parallel_draft: bool = False


@dataclass(kw_only=True)
class Run:
    """One nightly run of one pair, filled in as it goes on; None is what it did not get to.

    reasons           why it is not good, a sentence each
    notes             what is worth knowing beside them, as what could not be compared and why
    compared_with     when the run was made that this one is compared with
    compared_version  the version that it belongs to; None: it is the last good run
    changes           what differs in what the two were made from and with, a phrase each
    made_from         what decides what is built and measured: a lock, and more versions
    repository        digest of the repository that was verified and measured
    """

    pair: str
    config: str
    made_at: str
    outcome: RunOutcome = "unfinished"
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared_with: str | None = None
    compared_version: int | None = None
    changes: list[str] = field(default_factory=list)
    made_from: dict[str, Any] = field(default_factory=dict)
    repository: str | None = None
    checkpoints: dict[str, CheckpointUsed] = field(default_factory=dict)
    stages: list[StageRun] = field(default_factory=list)
    asked: Conditions | None = None
    verification: VerificationResult | None = None
    acceptance: Accepted | None = None
    speed_ups: list[SpeedUp] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)
    quality: dict[str, Quality] = field(default_factory=dict)
    sizes_bytes: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = _RUNS.dump_python(self, mode="json")
        return data


_RUNS = TypeAdapter(Run)


def read_last_good(path: Path) -> Run | None:
    """Returns a last good run; None where there is none, RepositoryError where it is damaged."""
    if not path.exists():
        return None
    data = read_result(path, NIGHTLY_KIND)
    try:
        run = _RUNS.validate_python(data)  # without what the header says beside, for readers
        if run.outcome != "good" or run.asked is None:
            raise ValueError(f"outcome {run.outcome!r} is not that of a good run")
    except ValueError as exc:
        fault = exc.errors(include_url=False)[0] if isinstance(exc, ValidationError) else None
        why = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" if fault else exc
        raise RepositoryError(
            f"{path} is not what `specpipe nightly` writes ({why}): remove it, and the next good "
            "run takes its place"
        ) from exc
    return run


def keep(artifacts_dir: Path, header: dict[str, Any], run: Run) -> None:
    """Adds a run to the history, which the caller has `locked`; a good one is the last good run."""
    data = {**header, **run.to_json()}
    path = Artifacts(artifacts_dir).result("nightly")
    with deferred():  # both, or neither
        if run.outcome == "good":
            write_result(path, data)
        # What two runs are compared by would make the history long; it has what came of that.
        line = {**data, "made_from": {}, "acceptance": _in_short(run.acceptance)}
        _add_line(path.with_suffix(".jsonl"), json.dumps(line, ensure_ascii=False, allow_nan=False))


def _in_short(accepted: Accepted | None) -> dict[str, int] | None:
    if accepted is None:
        return None
    return {
        "num_draft_tokens": accepted.num_draft_tokens,
        "num_accepted_tokens": accepted.num_accepted_tokens,
    }


def _add_line(path: Path, line: str) -> None:
    """Adds a line to a file as a whole: an interrupted run leaves no half of one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    with written_whole(path) as staged:
        staged.write_text(f"{text}{line}\n", encoding="utf-8")


@contextmanager
def locked(artifacts_dir: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Keeps other nightly runs of a pair waiting; on_wait is called when this one has to."""
    folder = Artifacts(artifacts_dir).result("nightly").parent
    folder.mkdir(parents=True, exist_ok=True)
    with cache.locked(FileLock(folder / ".nightly.lock"), on_wait):
        yield
