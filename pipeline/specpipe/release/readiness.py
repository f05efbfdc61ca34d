"""What stands in the way of publishing a pair: it is proved, and what is built is what was proved.

That the files are those that were built, and that the YAML still says so, is checked where a
version is put together (built.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.errors import RepositoryError, show
from specpipe.evaluate.verification import record as verification

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig


@dataclass(frozen=True)
class Objection:
    """Why a pair is not published, as a sentence.

    is_unproved  whether nobody has looked, which `--allow-unproved` lets through; what was found
                 to be bad, nothing does
    """

    sentence: str
    is_unproved: bool


def objection(config: PipelineConfig, repository_digest: str) -> Objection | None:
    """Returns why the last proof of a pair does not let it be published; None where it does.

    The proof is the last nightly run; for a pair that never had one, its verification.
    """
    proof = verification.read(config.artifacts_dir)
    run = _last_run(config.artifacts.result("nightly").with_suffix(".jsonl"))
    again = f"run `specpipe nightly {config.source}`"
    if run is None:
        if proof is None:
            return Objection(f"{config.name} was never verified: {again} first", True)
        return None
    what = f"the last nightly run of {config.name}, of {show(run.get('made_at'))},"
    if (of := run.get("repository")) not in (None, repository_digest):
        return Objection(f"{what} was of another build: {again} again", True)
    if run.get("outcome") != "good":
        reasons = run.get("reasons") or ["it does not say why"]
        return Objection(
            f"{what} is {show(run.get('outcome'))} ({show(reasons[0])}): mend that, and {again} "
            "again",
            False,
        )
    if of is None:
        return Objection(f"{what} does not say of which build it was: {again} again", True)
    return None


def _last_run(path: Path) -> dict[str, Any] | None:
    """Returns the last run of a history; None where there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        run = json.loads(lines[-1]) if lines else {}
        if not isinstance(run, dict):
            raise ValueError("its last line holds no JSON object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as exc:
        raise RepositoryError(
            f"{path} is not what `specpipe nightly` writes ({show(exc)}): remove it, and run that "
            "again"
        ) from exc
    return run
