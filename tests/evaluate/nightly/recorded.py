"""Runs as they were recorded, for tests that judge or print them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from specpipe.evaluate.nightly.record import (
    Accepted,
    CheckpointUsed,
    Conditions,
    Latency,
    PromptAccepted,
    Quality,
    Run,
    SpeedUp,
    StageRun,
    VerificationResult,
)

ASKED = Conditions(
    prompts="5f0c", num_draft_tokens=4, served_by="Triton", machine="Xeon (8 cores), 1 x H100"
)


def speed_up(concurrency: int, ratio: float, low: float, high: float) -> SpeedUp:
    return SpeedUp(
        concurrency=concurrency, ratio=ratio, low=low, high=high, num_answers=32, num_failed=0
    )


def accepted(rates: Sequence[float], kinds: Sequence[str] = ("code",)) -> Accepted:
    """Prompts with 100 steps of 2 draft tokens each, where each is accepted at the prompt's rate.

    Kinds take turns.
    """
    prompts = []
    for number, rate in enumerate(rates):
        first, second = round(100 * rate), round(100 * rate * rate)
        prompts.append(
            PromptAccepted(
                prompt=f"p{number}",
                kind=kinds[number % len(kinds)],
                num_draft_tokens=200,
                num_accepted_tokens=first + second,
                judged_at=(100, first),
                accepted_at=(first, second),
            )
        )
    return Accepted(
        num_draft_tokens=sum(p.num_draft_tokens for p in prompts),
        num_accepted_tokens=sum(p.num_accepted_tokens for p in prompts),
        prompts=tuple(prompts),
    )


def latency(percentile: Literal[50, 99], ms: float, low: float, high: float) -> Latency:
    return Latency(
        concurrency=8, what="first token", percentile=percentile, ms=ms, low=low, high=high
    )


QUALITY = Quality(
    format="fp8",
    perplexity_ratio=1.01,
    mean_kl=0.02,
    top1_agreement=0.96,
    measured_on="32 texts; cuda, bfloat16",
)


def good_run() -> Run:
    """A good run: 540 of 1000 draft tokens accepted, a target engine of 20 MB."""
    return Run(
        pair="code",
        config="configs/code.yaml",
        made_at="2026-11-26T02:23:00+00:00",
        outcome="good",
        checkpoints={
            "draft": CheckpointUsed(checkpoint="org/draft", revision="0a1b", digest="d" * 64),
            "target": CheckpointUsed(checkpoint="../target", revision=None, digest="e" * 64),
        },
        stages=[StageRun(stage="check", reasons=(), duration_s=0.0)],
        asked=ASKED,
        verification=VerificationResult(verdict="identical", reason=None, num_ties=0),
        acceptance=Accepted(num_draft_tokens=1000, num_accepted_tokens=540),
        speed_ups=[speed_up(1, 1.5, 1.4, 1.6), speed_up(8, 1.2, 1.1, 1.3)],
        latencies=[latency(50, 20.0, 18.0, 22.0), latency(99, 50.0, 40.0, 60.0)],
        quality={"target": QUALITY},
        sizes_bytes={
            "draft engine": 4_000_000,
            "target engine": 20_000_000,
            "repository": 25_000_000,
        },
    )


def next_run() -> Run:
    """The same a night later, not yet judged."""
    return replace(good_run(), made_at="2026-11-27T02:23:00+00:00", outcome="unfinished")
