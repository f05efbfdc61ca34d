"""Where the inputs come from: atheris, which is guided by what they reach, or Hypothesis."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from pathlib import Path
from random import Random

import hypothesis
from hypothesis import strategies as st

from tests.fuzz.mutation import mutate
from tests.fuzz.trial import MAX_BYTES, Trial


def with_atheris(trial: Trial, known: list[bytes], seed: int, end: float, folder: Path) -> None:
    """Fuzzes until `end` by the monotonic clock, and ends the process."""
    import atheris

    corpus = folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(known):
        (corpus / str(number)).write_bytes(data)

    def run(data: bytes) -> None:
        trial.run(data)

    def custom_mutator(data: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        # What is new to atheris is most often refused early: half begins with what is whole.
        return mutate(random.choice((data, random.choice(known))), random)[:max_size]

    settings = {
        "max_total_time": max(1, round(end - time.monotonic())),
        "max_len": MAX_BYTES,
        "seed": seed % 2**31 or 1,  # 0 is another each time
        "timeout": 60,
        "rss_limit_mb": 0,  # bounded_memory
        "artifact_prefix": f"{folder}/",
    }
    arguments = [f"-{key}={value}" for key, value in settings.items()]
    atheris.Setup([sys.argv[0], *arguments, str(corpus)], run, custom_mutator=custom_mutator)
    atheris.Fuzz()


def with_hypothesis(trial: Trial, known: list[bytes], seed: int, end: float) -> None:
    """Fuzzes until `end` by the monotonic clock."""
    for number in itertools.count(seed):
        if time.monotonic() >= end:
            return
        with contextlib.suppress(_Failed, hypothesis.errors.Flaky):  # it is kept; time was over
            _batch(trial, known, number, end)


def _batch(trial: Trial, known: list[bytes], number: int, end: float) -> None:
    """Tries a hundred inputs, and if one fails, shorter ones that fail at the same place."""
    before = set(trial.places)

    @hypothesis.seed(number)
    @hypothesis.settings(
        max_examples=100,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
    )
    @hypothesis.given(st.sampled_from(known), st.randoms(use_true_random=False))
    def test(data: bytes, random: Random) -> None:
        if time.monotonic() < end:
            outcome = trial.run(mutate(data, random)[:MAX_BYTES])
            if outcome.fault is not None and outcome.place not in before:
                raise _Failed

    test()


class _Failed(Exception):
    pass
