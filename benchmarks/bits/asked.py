"""What benchmarks.bits asks, when, and what it takes back: all of it follows from one seed.

Requests share their prompts in part, and their settings are drawn one by one, so that every kind of
request meets every other. Moments are counted in steps of the pair, never in seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specpipe.speculative.guide import Guide
from specpipe.speculative.request import GREEDY, Request, Sampling

_EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 256, 257)
"""Lengths of prompts about the bounds of pages and chunks."""

_IDLE_SHARE = 0.03  # of requests that come once nothing runs any more
_BURST_SHARES = (0.2, 0.7, 1.0)  # of those after it that come with the one before
_MOST_STEPS_BETWEEN = 6
_CANCELLED_SHARE = 0.2  # some of them have ended by then
_SPECIAL_SHARE = 0.3
_STOPPED_SHARE = 0.2  # that have a stop string
_PREFIXED_SHARE = 0.7
_SALTS = ("", "", "", "tenant")  # where prompts begin alike


@dataclass(frozen=True, kw_only=True)
class Material:
    """What requests are made of.

    text           of which prompts are pieces
    prefixes       that most prompts begin with, one of them each, if there are any
    num_questions  prompts that there are
    stop_strings   texts that now and then come in an answer
    guides         by name; those that come to an end, so that max_tokens need not be reached
    """

    text: Sequence[int]
    prefixes: Sequence[Sequence[int]] = ()
    num_questions: int
    max_prompt_tokens: int
    max_tokens: int
    max_num_draft_tokens: int
    vocab_size: int
    end_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    guides: Mapping[str, Guide] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A request, and when it comes and goes.

    kind             what it is, for people
    steps_after      steps between the request before and this; None: it comes to an idle pair
    cancelled_after  steps after which it is taken back; None: it is not
    """

    request: Request
    kind: str
    steps_after: int | None
    cancelled_after: int | None = None


def ask(seed: int, number: int, material: Material) -> list[Asked]:
    """Returns so many requests in the order in which they come."""
    rng = random.Random(seed)
    prompts = [_prompt(rng, material) for _ in range(material.num_questions)]
    burst_share = _BURST_SHARES[1]
    asked = []
    for n in range(number):
        request, kind = _request(rng, str(n), rng.choice(prompts), material)
        steps_after: int | None = rng.randint(1, _MOST_STEPS_BETWEEN)
        if rng.random() < _IDLE_SHARE:
            steps_after, burst_share = None, rng.choice(_BURST_SHARES)
        elif rng.random() < burst_share:
            steps_after = 0
        is_cancelled = rng.random() < _CANCELLED_SHARE
        cancelled_after = rng.randrange(-(-material.max_tokens // 3)) if is_cancelled else None
        asked.append(Asked(request, kind, steps_after, cancelled_after))
    return asked


def only(asked: Sequence[Asked], request_ids: Collection[str]) -> list[Asked]:
    """Returns those requests, each in its step as far as others do not decide that."""
    kept: list[Asked] = []
    steps: int | None = 0
    for one in asked:
        if one.steps_after is None:
            steps = None
        elif steps is not None:
            steps += one.steps_after
        if one.request.request_id in request_ids:
            kept.append(replace(one, steps_after=steps))
            steps = 0
    return kept


def lone(request: Request, *, is_cancelled: bool = False) -> Request:
    """Returns the request that says what another should: without draft tokens, by itself.

    What was held back for a stop string is let out when a request is cancelled, so the text that
    this was a part of has none.
    """
    asked = replace(request, num_draft_tokens=0)
    return replace(asked, stop_strings=()) if is_cancelled else asked


def _prompt(rng: random.Random, material: Material) -> tuple[int, ...]:
    most = min(material.max_prompt_tokens, len(material.text))
    length = round(math.exp(rng.uniform(0.0, math.log(most))))
    if rng.random() < 0.2:
        length = rng.choice([edge for edge in _EDGES if edge <= most])
    start = rng.randrange(len(material.text) - length + 1)
    prompt = tuple(material.text[start : start + length])
    if material.prefixes and rng.random() < _PREFIXED_SHARE:
        return (*rng.choice(material.prefixes), *prompt)[:most]
    return prompt


def _request(
    rng: random.Random, request_id: str, prompt: tuple[int, ...], material: Material
) -> tuple[Request, str]:
    """Returns a request, and what kind of one it is."""
    sampling = _sampling(rng)
    settings: dict[str, Any] = {}
    special = "plain"
    if rng.random() < _SPECIAL_SHARE:
        special, settings, changed = _special(rng, material)
        sampling = replace(sampling, **changed)
    if material.stop_strings and rng.random() < _STOPPED_SHARE:
        settings["stop_strings"] = (rng.choice(material.stop_strings),)
    plain = {
        "request_id": request_id,
        "prompt_token_ids": prompt,
        "max_tokens": rng.randint(1, material.max_tokens),
        "sampling": sampling,
        "num_draft_tokens": rng.choice([None, *range(material.max_num_draft_tokens + 1)]),
        "end_token_ids": material.end_token_ids,
        "cache_salt": rng.choice(_SALTS) if material.prefixes else "",
    }
    request = Request(**{**plain, **settings})
    how = "seeded" if sampling.is_seeded else "unseeded"
    return request, f"{'greedy' if sampling.is_greedy else how}, {special}"


def _sampling(rng: random.Random) -> Sampling:
    if rng.random() < 0.4:
        return GREEDY
    return Sampling(
        temperature=rng.choice([0.3, 0.8, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 5, 50]),
        top_p=rng.choice([1.0, 0.95, 0.7]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.getrandbits(64),
        is_seeded=rng.random() < 2 / 3,
    )


def _special(rng: random.Random, material: Material) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Returns the name of a special wish, and what it sets of the request and of its sampling."""
    some = [rng.randrange(material.vocab_size) for _ in range(20)]
    at = rng.randrange(max(len(material.text) - material.max_tokens, 1))
    kinds: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (
            "log-probabilities",
            {"return_log_probs": True, "num_top_log_probs": rng.choice([0, 4])},
            {},
        ),
        ("prompt scored", {"return_log_probs": True, "return_prompt_log_probs": True}, {}),
        ("prompt scored alone", {"return_prompt_log_probs": True, "max_tokens": 0}, {}),
        (
            "penalties",
            {},
            {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
        ),
        ("bias", {"return_log_probs": True}, {"logit_bias": tuple((i, 1.5) for i in some)}),
        ("bad words", {}, {"bad_words": tuple((i,) for i in some)}),
        ("min_tokens", {}, {"min_tokens": rng.randint(1, 8)}),
        (
            "prediction",
            {"prediction_token_ids": tuple(material.text[at : at + material.max_tokens])},
            {},
        ),
    ]
    if material.guides:
        name = rng.choice(list(material.guides))
        kinds.append((f"guide {name}", {"guide": material.guides[name]}, {}))
    return rng.choice(kinds)
