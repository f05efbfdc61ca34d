"""The process that measures one side: told what on stdin, answers on stdout, a line of JSON each.

    python -m benchmarks.load.worker

The first line is a Process, answered when it is loaded; each further one a Point.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from benchmarks.load.closed_loop import Load
from benchmarks.load.loop import Loop, NoFigures
from benchmarks.load.sides import Point, Process, Side

_WARM_UP_TOKENS = 24


def load(process: Process) -> Side:
    """Loads a side; only what it needs is imported."""
    if process.side == "ours":
        from benchmarks.load import ours

        return ours.load(process)
    if process.side == "vllm":
        from benchmarks.load.vllm_side import VLLM

        return VLLM(process)
    from benchmarks.load.through_triton import ThroughTriton

    return ThroughTriton(process)


class Measurements:
    """The points of one side. It remembers the first whole answer to each prompt."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._wanted: dict[tuple[int, ...], list[int]] = {}
        self._warm: set[tuple[str, int]] = set()

    def measure(self, point: Point) -> dict[str, Any]:
        """Runs a point, behind a short one where its setting is new; returns its figures."""
        load = point.load
        if (point.setting, load.streams) not in self._warm:
            self._warm.add((point.setting, load.streams))
            short = Load(load.streams, 2 * load.streams, min(_WARM_UP_TOKENS, load.max_tokens))
            self._side.run(point.setting, short.loop(point.prompts))
        loop = load.loop(point.prompts)
        counts = self._side.run(point.setting, loop)
        num_tokens = sum(answer.max_tokens for answer in loop.answers)
        num_passes = num_tokens - counts.num_accepted
        return {
            **loop.figures(),
            "acceptance_length": num_tokens / num_passes,
            "draft_tokens_a_pass": counts.num_drafted / num_passes,
            "num_cached": counts.num_cached,
            "num_preempted": counts.num_preempted,
            "num_late": counts.num_late,
            "num_different": self._num_different(loop, load.max_tokens),
        }

    def _num_different(self, loop: Loop, max_tokens: int) -> int:
        """Counts answers that do not begin as the first whole one to their prompt did."""
        num_different = 0
        for answer in loop.answers:
            if answer.max_tokens == max_tokens:
                self._wanted.setdefault(tuple(answer.prompt), answer.token_ids)
        for answer in loop.answers:
            wanted = self._wanted.get(tuple(answer.prompt), answer.token_ids)
            both = zip(wanted, answer.token_ids, strict=False)
            num_different += any(a != b for a, b in both)
        return num_different


def serve(
    told: TextIO, say: Callable[[Mapping[str, Any]], None], load: Callable[[Process], Side] = load
) -> None:
    """Answers line by line until there are no more."""
    process = Process(**json.loads(told.readline()))
    start = time.perf_counter()
    try:
        side = load(process)
    except Exception as exc:
        traceback.print_exc()
        say({"error": f"{type(exc).__name__}: {exc}"})
        return
    say({"start_seconds": time.perf_counter() - start, "about": side.about, **_machine()})
    measurements = Measurements(side)
    for line in told:
        try:
            say(measurements.measure(Point.from_json(json.loads(line))))
        except NoFigures as exc:
            say({"failed": str(exc)})
        except Exception as exc:  # its engine may be in any state now
            traceback.print_exc()
            say({"error": f"{type(exc).__name__}: {exc}"})
            return


def _machine() -> dict[str, str]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    return {"gpu": gpu, "torch": torch.__version__}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints is no answer

    def say(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    serve(sys.stdin, say)


if __name__ == "__main__":
    main()
