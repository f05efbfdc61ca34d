"""What came of a training: README.md, report.html and training.json of the trained checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specpipe.machine.own_json import read_object, write_object
from specpipe.training.acceptance import Gain, Measured, compare

RECORD_NAME = "training.json"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A trained draft, and how much longer its steps are than those of the config's.

    record    what it was made from (run.py: `_record`)
    data      what each collection says of itself, and how many texts were used for what
    gains     on the held-out answers of each kind
    before    figures of the config's draft of each kind, as `Counts.to_json` has them; so `after`
    losses    step and mean loss since the one before; lengths: step and acceptance length
    best_step of the checkpoint that was kept
    """

    record: Mapping[str, Any]
    data: Mapping[str, Any]
    gains: Mapping[str, Gain]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    losses: Sequence[tuple[int, float]]
    lengths: Sequence[tuple[int, float]]
    best_step: int

    @classmethod
    def of(
        cls,
        before: Measured,
        after: Measured,
        history: Sequence[Mapping[str, Any]],
        *,
        record: Mapping[str, Any],
        data: Mapping[str, Any],
        best_step: int,
    ) -> Outcome:
        """Returns the outcome of two measurements, and of what the Trainer logged."""
        old, new = before.kinds(), after.kinds()
        return cls(
            record=record,
            data=data,
            gains={kind: compare(old[kind], new[kind]) for kind in old},
            before=before.to_json(),
            after=after.to_json(),
            losses=_logged(history, "loss"),
            lengths=_logged(history, "eval_acceptance_length"),
            best_step=best_step,
        )

    @classmethod
    def read(cls, folder: Path) -> Outcome:
        """Reads training.json of a trained draft; OSError, ValueError or TypeError if it cannot."""
        fields = read_object(folder / RECORD_NAME)
        fields["gains"] = {kind: Gain(**gain) for kind, gain in fields["gains"].items()}
        return cls(**fields)

    def write(self, folder: Path) -> None:
        """Writes training.json, which holds no time: the same training writes the same bytes."""
        write_object(folder / RECORD_NAME, self.to_json())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _logged(history: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(entry["step"], round(entry[key], 5)) for entry in history if key in entry]
