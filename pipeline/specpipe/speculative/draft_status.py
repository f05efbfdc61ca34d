"""Why a request drafted, or why it did not: one word, in its last response."""

from __future__ import annotations

from typing import Literal

DraftStatus = Literal[
    "drafted",
    "off_by_request",
    "off_by_config",
    "off_by_schedule",
    "does_not_pay",
    "no_room",
    "draft_failed",
    "not_verified",
    "too_short",
    "not_ready",
    "nothing_proposed",
    "not_started",
    "decided_by_engine",
]
"""What holds at the end of a request; the counts show whether anything was drafted before.

drafted            drafting was on
off_by_request     the request names 0 draft tokens
off_by_config      speculation.num_draft_tokens is 0: the target alone
off_by_schedule    speculation.schedule allows none at this load
does_not_pay       the adaptive choice finds no gain, by acceptance, costs and load; it may have
                   tried now and then
no_room            the draft's context or its KV cache has no room for the text
draft_failed       the draft model gave no usable number, or made the target give none
not_verified       the engine dropped the draft tokens under load, and went on by itself
too_short          no step had a use for a draft token: the target gives the last one itself
not_ready          the draft had yet to read the text, or what a plain step costs was being timed
nothing_proposed   the draft ended the text at once
not_started        the request ended before its first step
decided_by_engine  TensorRT-LLM drafts by itself and does not report it; counts are inferred
"""

PASSING: tuple[DraftStatus, ...] = ("too_short", "not_ready", "nothing_proposed")
"""Reasons of single steps, reported only where the request has no other."""
