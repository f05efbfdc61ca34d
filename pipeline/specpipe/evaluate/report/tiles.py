"""The few numbers on top of the page."""

from __future__ import annotations

from collections.abc import Iterator

from specpipe.evaluate.report.artifact import Artifact, own_draft
from specpipe.evaluate.report.blocks import UNKNOWN, Tile, Tone, interval, percent, size
from specpipe.roles import ROLES

_VERDICT_TONES: dict[str, Tone] = {"identical": "good", "tie": "good", "fault": "bad"}
_OUTCOME_TONES: dict[str, Tone] = {"gain": "good", "loss": "bad"}


def tiles(artifact: Artifact) -> Iterator[Tile]:
    """Yields verdict, speed-up, acceptance, sizes."""
    yield _verdict_tile(artifact)
    yield _speed_tile(artifact)
    yield _acceptance_tile(artifact)
    yield _size_tile(artifact)


def _verdict_tile(artifact: Artifact) -> Tile:
    verification = artifact.verification
    if verification is None:
        return Tile("Verdict", "not verified")
    if artifact.changed:
        return Tile("Verdict", "outdated", "changed since it was verified", "bad")
    if verification["reason"] is not None:
        return Tile("Verdict", "failed", verification["reason"], "bad")
    num_ties = verification["num_ties"]
    note = f"{num_ties} numerical tie{'s' if num_ties > 1 else ''}" if num_ties else "no difference"
    return Tile("Verdict", "lossless", note, _VERDICT_TONES[verification["verdict"]])


def _speed_tile(artifact: Artifact) -> Tile:
    bench = artifact.bench
    compared = [] if bench is None else [load["comparison"] for load in bench["loads"]]
    comparisons = [c for c in compared if c is not None]
    if not comparisons:
        return Tile("Speed-up", UNKNOWN, "not measured")
    comparisons.sort(key=lambda c: float(c["ratio"]))
    worst, best = comparisons[0], comparisons[-1]
    within = interval(best["low"], best["high"])
    note = f"at concurrency {best['concurrency']}"
    note += "" if within == UNKNOWN else f" (95 %: {within})"
    if worst is not best:
        note += f"; lowest {worst['ratio']:.2f} × at {worst['concurrency']}"
    tone = _OUTCOME_TONES.get(best["outcome"], "neutral")
    return Tile("Best speed-up", f"{best['ratio']:.2f} ×", note, tone)


def _acceptance_tile(artifact: Artifact) -> Tile:
    if artifact.tune is not None:
        acceptance = own_draft(artifact.tune)["acceptance"]
        packaged = artifact.options.get("num_draft_tokens")
        expected = {e["num_draft_tokens"]: e["tokens"] for e in acceptance["expected"]}
        length = packaged if packaged in expected else max(expected)
        share = percent(acceptance["alpha"])
        note = f"with K = {length}; {share} % of judged draft tokens are accepted"
        return Tile("Tokens a step", f"{expected[length]:.2f}", note)
    if artifact.verification is not None:
        drafting = [
            check
            for check in artifact.verification["checks"]
            if (check["check"], check["kind"]) == ("greedy", "speculation")
            and check["num_draft_tokens"]
            and check["total_draft_tokens"]
        ]
        if drafting:
            # The rate depends on K, and K as served on the clock: so that of the longest.
            longest = max(drafting, key=lambda check: int(check["num_draft_tokens"]))
            rate = longest["total_accepted_draft_tokens"] / longest["total_draft_tokens"]
            note = f"accepted / drafted tokens, greedy, K = {longest['num_draft_tokens']}"
            return Tile("Acceptance rate", f"{percent(rate)} %", note)
    return Tile("Acceptance", UNKNOWN, "not measured")


def _size_tile(artifact: Artifact) -> Tile:
    sizes = {
        role: built.size_bytes
        for role in ROLES
        for built in artifact.built
        if built.path.startswith(f"{role}/")
    }  # the last of each role is its engine
    if len(sizes) < len(ROLES):
        return Tile("Engines", UNKNOWN)
    note = f"target {size(sizes['target'])}, draft {size(sizes['draft'])}"
    return Tile("Engines", size(sum(sizes.values())), note)
