"""`python -m tests.fuzz`: looks for inputs that do anything but be accepted or refused.

Each target runs in a process of its own. What fails is put into the corpus, which test_fuzz.py
tries again in every run of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from tests.fuzz import engines
from tests.fuzz.trial import IN_MEMORY, Counts, Trial, bounded_memory, inputs_of, keep

_GRACE_S = 60  # for the last input of a target, before its process counts as hung


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="of all targets together")
    parser.add_argument("--target", action="append", metavar="NAME", help="left out: all")
    parser.add_argument("--seed", type=int, help="left out: another in each run")
    parser.add_argument("--engine", choices=("atheris", "hypothesis"))
    args = parser.parse_args()
    start = time.monotonic()
    has_atheris = importlib.util.find_spec("atheris") is not None
    engine = args.engine or ("atheris" if has_atheris else "hypothesis")
    seed = random.randrange(1, 2**31) if args.seed is None else args.seed
    print(f"--engine {engine} --seed {seed}", flush=True)
    names = args.target or list(_targets(engine).TARGETS)  # imported once, then forked
    row = "{:20} {:>9} {:>9} {:>9} {:>9}".format
    print(row("target", "inputs", "accepted", "refused", "findings"), flush=True)
    all_counts = []
    for number, name in enumerate(names):
        now = time.monotonic()
        end = now + max(0, start + args.seconds - now) / (len(names) - number)
        all_counts.append(_fuzz(name, engine, seed, end))
        print(row(name, *vars(all_counts[-1]).values()), flush=True)
    sums = [sum(column) for column in zip(*(vars(c).values() for c in all_counts), strict=True)]
    print(row("all", *sums))
    return 1 if sums[-1] else 0


def _targets(engine: str) -> Any:
    """Imports the targets, and with them the code that they try, as the engine needs it."""
    instrumented: Any = contextlib.nullcontext()
    if engine == "atheris":
        import atheris

        instrumented = atheris.instrument_imports(include=["specpipe"])
    with contextlib.redirect_stderr(io.StringIO()), instrumented:  # it lists each module
        from tests.fuzz import targets
    return targets


def _fuzz(name: str, engine: str, seed: int, end: float) -> Counts:
    """Fuzzes one target; that its process dies or hangs is a finding of the last input."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as made:
        folder = Path(made)
        child = os.fork()
        if child == 0:
            _run(name, engine, seed, end, folder)
        status = _wait(child, end + _GRACE_S)
        lines = (folder / "log").read_text(errors="replace").splitlines()
        counts = folder / "counts"
        total = Counts(**json.loads(counts.read_text())) if counts.exists() else Counts()
        if status != 0:
            total.findings += 1
            last = keep(name, (folder / "input").read_bytes())
            print(*lines[-20:], sep="\n")
            print(f"{name}: its process {'hung' if status is None else 'died'}: {last}")
        for line in lines:
            if line.startswith(f"{name}: "):
                print(line)
        return total


def _wait(child: int, end: float) -> int | None:
    while time.monotonic() < end:
        if (found := os.waitpid(child, os.WNOHANG)) != (0, 0):
            return found[1]
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run(name: str, engine: str, seed: int, end: float, folder: Path) -> NoReturn:
    """The process of one target."""
    status = 1
    try:
        with (folder / "log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        logging.disable(logging.CRITICAL)  # the log of the code would tell again what is counted
        tempfile.tempdir = str(folder)
        targets = _targets(engine)
        trial = Trial(name, targets.TARGETS[name], folder)
        known = [*targets.SEEDS[name], *inputs_of(name)]
        for data in known:  # what is imported and made only once
            trial.run(data)
        with bounded_memory():
            if engine == "atheris":
                engines.with_atheris(trial, known, seed, end, folder)
            engines.with_hypothesis(trial, known, seed, end)
        trial.write()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
