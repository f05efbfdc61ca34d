"""The verdict: what was compared, where streams part, and how samples are distributed."""

from __future__ import annotations

from collections.abc import Iterator

from specpipe.evaluate.report import conditions
from specpipe.evaluate.report.artifact import Artifact, Json
from specpipe.evaluate.report.blocks import (
    UNKNOWN,
    Block,
    Column,
    Missing,
    Notice,
    Paragraph,
    Table,
    Tone,
    count,
    number,
    percent,
)


def blocks(artifact: Artifact) -> Iterator[Block]:
    """Yields the verdict, and everything that it rests on."""
    verification = artifact.verification
    if verification is None:
        yield Missing("The output was not verified.", artifact.command("verify"))
        return
    yield from _verdict(artifact, verification)
    yield _checks(artifact, verification)
    yield _ties(verification)
    faults = _divergences(verification, "faults")
    if faults.rows:
        yield faults
    if verification["sampling"] is not None:
        yield from _distributions(verification["sampling"])
    if verification["gate"] is not None:
        yield from _gate(verification["gate"])
    for sentence in verification.get("notes", ()):  # those of earlier versions have none
        yield Paragraph(f"Note: {sentence}")
    for sentence in verification["skipped"]:
        yield Paragraph(f"Left out: {sentence}")


def _verdict(artifact: Artifact, verification: Json) -> Iterator[Block]:
    if artifact.changed:
        yield Notice(
            f"The repository is not the one that was verified: {artifact.changed[0]}"
            f"{f' and {len(artifact.changed) - 1} more' if len(artifact.changed) > 1 else ''}. "
            f"Run `{artifact.command('verify')}` again.",
            "bad",
        )
    if verification["reason"] is not None:
        yield Notice(f"Failed: {verification['reason']}", "bad")
    elif verification["verdict"] == "identical":
        yield Notice("Every answer is, token for token, that of the target alone.", "good")
    else:
        num_ties = verification["num_ties"]
        are = "is a numerical tie" if num_ties == 1 else "are numerical ties"
        yield Notice(
            "Every answer is, token for token, that of the target alone, but for "
            f"{num_ties} which {are}: there the target's own arithmetic decides differently from "
            "one batch shape to another.",
            "good",
        )


def _checks(artifact: Artifact, verification: Json) -> Table:
    return Table(
        "Answers compared with those of the target alone",
        (
            Column("check", is_text=True),
            Column("side", is_text=True),
            Column("verdict", is_text=True),
            Column("identical", "answers"),
            Column("ties", "answers"),
            Column("faults", "answers"),
            Column("compared", "tokens"),
            Column("drafted", "tokens"),
            Column("accepted", "%"),
        ),
        [
            [
                check["check"],
                check["side"],
                check["verdict"],
                str(check["num_identical"]),
                str(len(check["ties"])),
                str(len(check["faults"])),
                count(check["num_tokens"]),
                count(check["total_draft_tokens"]),
                percent(_rate(check)),
            ]
            for check in verification["checks"]
        ],
        note=f"{conditions.of_verification(artifact, verification)}. A tie is "
        f"{verification['threshold']['rule']}.",
    )


def _rate(check: Json) -> float | None:
    drafted = check["total_draft_tokens"]
    return check["total_accepted_draft_tokens"] / drafted if drafted else None


def _ties(verification: Json) -> Block:
    table = _divergences(verification, "ties")
    return table if table.rows else Paragraph("Numerical ties: none.")


def _divergences(verification: Json, kind: str) -> Table:
    """Returns the ties, or the faults, of all checks: where two streams part, and by how much."""
    rows = [
        [
            f"{check['check']}, {check['side']}",
            divergence["prompt"],
            _figure(divergence.get("position")),
            _token(divergence, "expected_id"),
            _token(divergence, "found_id"),
            _figure(divergence.get("margin")),
            _figure(divergence.get("in_ulps")),
            _figure(divergence.get("threshold")),
            *([divergence["reason"] or ""] if kind == "faults" else []),
        ]
        for check in verification["checks"]
        for divergence in check[kind]
    ]
    return Table(
        "Numerical ties" if kind == "ties" else "Faults",
        (
            Column("side", is_text=True),
            Column("prompt", is_text=True),
            Column("position", "output token"),
            Column("target alone", "token id"),
            Column("found", "token id"),
            Column("margin", "logit"),
            Column("margin", "units in the last place"),
            Column("threshold", "logit"),
            *([Column("reason", is_text=True)] if kind == "faults" else []),
        ),
        rows,
        note="Position: of the first difference, from 0; what comes after it says nothing.",
    )


def _figure(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _token(divergence: Json, key: str) -> str:
    if key not in divergence:
        return UNKNOWN
    return "end" if divergence[key] is None else str(divergence[key])


def _distributions(sampling: Json) -> Iterator[Block]:
    tests = sampling["tests"]
    num_flagged = sum(test["is_flagged"] for test in tests)
    yield Paragraph(
        f"Unseeded sampling: {num_flagged} of {len(tests)} tests found another distribution than "
        f"the target's. One at a total-variation distance of {sampling['distance']:g} is found "
        f"with a probability of {sampling['power']:g}, a right one is called wrong with "
        f"{sampling['false_alarm']:g} in all tests together ({sampling['correction']}'s "
        "correction)."
    )
    yield Table(
        "Tests of unseeded sampling",
        (
            Column("test", is_text=True),
            Column("asked", "answers"),
            Column("bins"),
            Column("distance", "total variation"),
            Column("p"),
            Column("result", is_text=True),
        ),
        [
            [
                test["test"],
                count(test["num_samples"]),
                str(test["num_bins"]),
                number(test["distance"], 3),
                _figure(test["p_value"]),
                "flagged" if test["is_flagged"] else "passed",
            ]
            for test in tests
        ],
        is_folded=True,
        note="Distance: of the sample, chance included.",
    )


def _gate(gate: Json) -> Iterator[Block]:
    tone: Tone = "good" if gate["reason"] is None else "bad"
    yield Notice(
        f"Quality gate {gate['source']}: {gate['num_right']} of {gate['num_prompts']} answers are "
        f"right, without speculation {gate['num_right_target_alone']}."
        + (f" Closed: {gate['reason']}." if gate["reason"] else ""),
        tone,
    )
