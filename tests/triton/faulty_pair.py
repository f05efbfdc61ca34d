"""The real pair behind a target that can be slowed and broken while it serves, with a diary.

A folder is the way in and out: `pause` holds the seconds that each forward waits first, `raise` and
`nan` the number of forwards until one raises or returns NaN; `hang` the seconds that postprocessing
waits with each chunk. While `hold` is not 0 no request gets another token, and all else goes on: a
state can be seen, however slow this machine is. Where `holds_at_notice` is not 0, postprocessing
sets `hold` when it notices a cancellation. `diary` gets a line for every sequence that is made or
freed, every forward, and every cancellation that postprocessing notices.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specpipe.runtimes.pair.pair import DetokenizerFactory, PairOptions
from specpipe.triton.repository import contents


class Controls:
    """A test's hold on the pair, from either side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, **values: float) -> None:
        for name, value in values.items():
            made = self.folder / f"{name}.new"
            made.write_text(str(value))
            made.rename(self.folder / name)

    def get(self, name: str) -> float:
        try:
            return float((self.folder / name).read_text())
        except FileNotFoundError:
            return 0.0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Requests come, start and go meanwhile, and none gets another token."""
        self.set(hold=1)
        try:
            yield
        finally:
            self.set(hold=0)

    def is_due(self, name: str) -> bool:
        """Counts down; True once, at the end."""
        left = self.get(name)
        if left:
            self.set(**{name: left - 1})
        return left == 1

    def note(self, event: str) -> None:
        with (self.folder / "diary").open("a") as diary:
            diary.write(f"{event}\n")

    def diary(self) -> list[str]:
        try:
            return (self.folder / "diary").read_text().split()
        except FileNotFoundError:
            return []

    def num_sequences(self) -> int:
        """How many sequences hold KV cache of the target."""
        diary = self.diary()
        return diary.count("made") - diary.count("freed")


class FaultyEngine:
    """The target's engine, or trouble."""

    def __init__(self, engine: Any, controls: Controls) -> None:
        self._engine = engine
        self._controls = controls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def allocate(self, **settings: int) -> int:
        self._controls.note("made")
        return int(self._engine.allocate(**settings))

    def free(self, sequence: int) -> None:
        self._engine.free(sequence)
        self._controls.note("freed")

    def forward(self, batch: Sequence[Any], num_logits: Sequence[int]) -> Any:
        time.sleep(self._controls.get("pause"))
        self._controls.note("forward")
        if self._controls.is_due("raise"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        logits = self._engine.forward(batch, num_logits)
        return logits * float("nan") if self._controls.is_due("nan") else logits


class FaultyRuntime:
    def __init__(self, name: str, controls: Controls) -> None:
        self._runtime = _load_runtime(name)
        self._controls = controls

    def load_pair(
        self,
        draft: Path,
        target: Path,
        options: PairOptions,
        detokenizer: DetokenizerFactory,
        guides: Any = None,
    ) -> Any:
        pair: Any = self._runtime.load_pair(draft, target, options, detokenizer, guides)
        target = FaultyEngine(pair._target, self._controls)
        pair._target = pair._steps._target = pair._memory.room._engine = target
        run_round = pair._round

        def run_round_unless_held() -> None:
            if self._controls.get("hold"):
                time.sleep(0.01)
            else:
                run_round()

        pair._round = run_round_unless_held
        return pair


_load_runtime = contents.load_runtime


def register(folder: str) -> None:
    """For `speculative`: makes its process load the pair with its faults."""
    controls = Controls(Path(folder))
    controls.note(f"process:{os.getpid()}")
    contents.load_runtime = lambda name: FaultyRuntime(name, controls)  # type: ignore[assignment,return-value]


def noting(model: Any, folder: str) -> Any:
    """For `postprocessing`: its model, which waits as told and writes down the cancellations."""

    class Noting(model):  # type: ignore[misc]
        def execute(self, requests: Any) -> Any:
            time.sleep(Controls(Path(folder)).get("hang"))
            return super().execute(requests)

        def _cancel(self, stream_id: Any) -> None:
            controls = Controls(Path(folder))
            if controls.get("holds_at_notice"):
                controls.set(hold=1)
            controls.note("noticed")
            super()._cancel(stream_id)

    return Noting
