"""What a verification was asked for and what it found, and the JSON of both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.evaluate.verification import distribution
from specpipe.evaluate.verification.exact import SideResult
from specpipe.evaluate.verification.gate import GateResult
from specpipe.evaluate.verification.verdict import TieThreshold, Verdict, worst


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What is verified, and how closely.

    prompts           a built-in set's name or a file; the first `limit` of it
    is_chat           whether each text is asked as a user's message, in the chat template
    max_tokens        of an answer, where its prompt does not say
    num_draft_tokens  every K to try; none: 1, half of the packaged K, and all of it
    is_strict         whether a numerical tie fails as well
    is_float32        whether both checkpoints are run by runtime torch in float32, where a margin
                      above 1e-4 is no tie
    is_in_process     whether the pair runs in this process instead of a Triton
    distance          total-variation distance that unseeded sampling is tested for; None: not at
                      all
    gate              file of prompts with expected answers
    """

    prompts: str = "code"
    limit: int | None = None
    is_chat: bool = False
    max_tokens: int = 64
    num_draft_tokens: tuple[int, ...] = ()
    is_strict: bool = False
    is_float32: bool = False
    is_in_process: bool = False
    distance: float | None = 0.1
    gate: Path | None = None
    gate_pass_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that was judged.

    distance  total-variation distance that unseeded sampling was tested for
    notes     what is worth knowing of how it was done, a sentence each
    skipped   what was not judged, and why, a sentence each
    """

    sides: tuple[SideResult, ...]
    tests: tuple[distribution.Finding, ...]
    gate: GateResult | None
    threshold: TieThreshold
    distance: float | None = None
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    is_strict: bool = False

    @property
    def num_ties(self) -> int:
        return sum(len(side.ties) for side in self.sides)

    @property
    def faults(self) -> list[str]:
        """A sentence for each fault."""
        sentences = [
            f"{side.check}, {side.side.name}: {side.reason}"
            for side in self.sides
            if side.verdict == "fault"
        ]
        sentences += [reason for test in self.tests if (reason := distribution.reason(test))]
        if self.gate is not None and self.gate.reason is not None:
            sentences.append(self.gate.reason)
        return sentences

    @property
    def verdict(self) -> Verdict:
        return "fault" if self.faults else worst(side.verdict for side in self.sides)

    @property
    def reason(self) -> str | None:
        """Why the verification failed, as a sentence; None when it passed."""
        if self.faults:
            return self.faults[0]
        if self.num_ties and self.is_strict:
            ties = "tie" if self.num_ties == 1 else "ties"
            return f"{self.num_ties} numerical {ties}, and --strict allows none"
        return None

    def to_json(self) -> dict[str, Any]:
        sampling = {
            "distance": self.distance,
            "power": distribution.POWER,
            "false_alarm": distribution.FALSE_ALARM,
            "correction": "Holm",
            "tests": [test.to_json() for test in self.tests],
        }
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "num_faults": len(self.faults),
            "num_ties": self.num_ties,
            "threshold": {**dataclasses.asdict(self.threshold), "rule": str(self.threshold)},
            "checks": [side.to_json() for side in self.sides],
            "sampling": sampling if self.tests else None,
            "gate": None if self.gate is None else self.gate.to_json(),
            "notes": list(self.notes),
            "skipped": list(self.skipped),
        }


@dataclass(frozen=True)
class Verification:
    """The findings, and the file that they were written to; title says what was verified."""

    findings: Findings
    path: Path
    title: str = ""
