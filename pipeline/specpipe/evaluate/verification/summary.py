"""What `specpipe verify` found, in words for a terminal."""

from __future__ import annotations

from specpipe.errors import plural
from specpipe.evaluate.verification import distribution
from specpipe.evaluate.verification.exact import SideResult
from specpipe.evaluate.verification.outcome import Verification
from specpipe.machine.columns import aligned


def summary(verification: Verification) -> list[str]:
    """Returns what a reader wants to know, line by line."""
    findings = verification.findings
    lines = [verification.title] if verification.title else []
    lines += aligned([(_label(side), _counts(side)) for side in findings.sides], texts=(0, 1))
    # One near tie shows on many sides.
    ties: dict[str, int] = {}
    for side in findings.sides:
        for differing in side.ties:
            tie = f"tie: {side.check}, {differing.case}: {differing.comparison.divergence}"
            ties[tie] = ties.get(tie, 0) + 1
    lines += [f"{tie}, {plural(number, 'time')}" for tie, number in ties.items()]
    for side in findings.sides:
        for differing in side.faults:
            lines.append(f"fault: {_label(side)}, {differing.case}: {differing.comparison.reason}")
        lines += [f"note: {_label(side)}: {note}" for note in side.notes]
    lines.append(f"a tie is {findings.threshold}")
    if findings.tests:
        flagged = sum(test.is_flagged for test in findings.tests)
        farthest = max(test.distance for test in findings.tests)
        lines.append(
            f"sampling: {flagged} of {len(findings.tests)} tests flagged, "
            f"{findings.tests[0].plan.num_samples} answers each; distances up to {farthest:.3f}, "
            "chance included"
        )
        lines.append(
            f"  (a distribution at distance {findings.distance:g} from the target's is flagged "
            f"with a probability of {distribution.POWER:g}, a right one with "
            f"{distribution.FALSE_ALARM:g} in all tests together)"
        )
    if findings.gate is not None:
        gate = findings.gate
        lines.append(
            f"gate: {gate.num_right} of {gate.num_prompts} answers right, without speculation "
            f"{gate.num_right_target_alone}"
            + (f"; lost with it: {', '.join(gate.lost)}" if gate.lost else "")
        )
    lines += [f"note: {sentence}" for sentence in findings.notes]
    lines += [f"left out: {sentence}" for sentence in findings.skipped]
    lines.append(f"verdict: {findings.verdict} ({verification.path.name})")
    return lines


def _label(side: SideResult) -> str:
    return f"{side.check}, {side.side.name}"


def _counts(side: SideResult) -> str:
    num_prompts = side.num_identical + len(side.ties) + len(side.faults)
    text = f"{side.num_identical} of {num_prompts} identical"
    if side.ties:
        text += f", {plural(len(side.ties), 'tie')}"
    if side.faults:
        text += f", {plural(len(side.faults), 'fault')}"
    if side.num_draft_tokens:
        rate = side.num_accepted_tokens / side.num_draft_tokens
        text += f"; {rate:.2f} of {side.num_draft_tokens} draft tokens accepted"
    return text
