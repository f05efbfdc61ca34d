"""What `specpipe tune` is asked for, and what it found."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specpipe.evaluate.prompts import PromptSet
from specpipe.evaluate.tune import model, schedule
from specpipe.evaluate.tune.acceptance import AcceptanceEstimate
from specpipe.evaluate.tune.costs import LoadCosts
from specpipe.evaluate.tune.measure import Measurement
from specpipe.evaluate.tune.model import Prediction
from specpipe.speculative.adaptive import Schedule


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is tuned, and on what.

    prompts        a built-in set's name or a file; the first `limit` of it
    is_chat        whether each text is asked as a user's message, in the chat template
    max_tokens     of an answer, where its prompt does not say
    temperature    0: greedy
    concurrencies  loads to tune for; none: 1, 2, 4 … up to engine.max_batch_size
    max_draft_len  the largest K; None: speculation.num_draft_tokens
    candidates     checkpoints of other drafts
    num_best       draft lengths that are measured at each load
    rounds         of every measurement, at least
    time_limit_s   for more rounds, which are taken until what pays is certain
    resumes        whether an interrupted run is gone on with
    """

    prompts: str = "code"
    limit: int | None = None
    is_chat: bool = False
    max_tokens: int = 64
    temperature: float = 0.0
    concurrencies: tuple[int, ...] = ()
    max_draft_len: int | None = None
    candidates: tuple[str, ...] = ()
    num_best: int = 2
    rounds: int = 3
    time_limit_s: float = 300.0
    resumes: bool = True


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What came of one draft; a refused one has nothing but the reason.

    digest   of the pair that was measured, as verification.json has that of the repository
    score    geometric mean, over the loads, of the best predicted speed-up
    best     the draft length for each load, from what was measured; None where nothing was, or
             where it is not certain
    doubts   for each load that is not certain, a sentence
    """

    checkpoint: str
    is_own: bool
    reason: str | None = None
    digest: str | None = None
    acceptance: AcceptanceEstimate | None = None
    kinds: dict[str, AcceptanceEstimate] = dataclasses.field(default_factory=dict)
    costs: tuple[LoadCosts, ...] = ()
    memory_bound: model.MemoryBound | None = None
    predictions: tuple[Prediction, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    best: dict[int, int] | None = None
    doubts: tuple[str, ...] = ()

    @property
    def score(self) -> float:
        loads = {prediction.concurrency for prediction in self.predictions}
        if not loads:
            return 0.0
        tops = [
            max(p.speed_up for p in self.predictions if p.concurrency == load) for load in loads
        ]
        return math.exp(sum(math.log(top) for top in tops) / len(tops))

    @property
    def schedule(self) -> Schedule | None:
        return None if self.best is None else schedule.from_loads(self.best)

    def to_json(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint,
            "is_own": self.is_own,
            "reason": self.reason,
            "digest": self.digest,
            "score": self.score,
            "acceptance": None if self.acceptance is None else self.acceptance.to_json(),
            "kinds": {kind: acceptance.to_json() for kind, acceptance in self.kinds.items()},
            "costs": [load.to_json() for load in self.costs],
            "memory_bound": None if self.memory_bound is None else asdict(self.memory_bound),
            "predictions": [asdict(prediction) for prediction in self.predictions],
            "measurements": [asdict(measurement) for measurement in self.measurements],
            "best": None if self.best is None else list(self.best.items()),
            "schedule": self.schedule,
            "doubts": list(self.doubts),
        }


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The whole result; drafts are ranked, the best one first."""

    drafts: tuple[Tuned, ...]
    forms: tuple[schedule.ServerSetting, ...]
    prompts: PromptSet
    path: Path

    @property
    def own(self) -> Tuned:
        return next(draft for draft in self.drafts if draft.is_own)
