"""How long a built pair takes from the start of a process until it is ready.

    python benchmarks/start.py --config configs/mine.yaml

The first process finds no kernels on disk and compiles them; the others read what it wrote. Each
imports all that it needs, loads both engines, records and times what requests will need, and says
that it is ready. Engines of plain torch compile nothing: there the first is as the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from command import run_command
from measure import QUICKSTART, load_pair, load_tokenizer

from specpipe.build.load import load_config

_READY = "ready after "


def main() -> None:
    arguments = parse_arguments()
    if arguments.once:
        load_once(arguments.config)
        return
    with tempfile.TemporaryDirectory(prefix="specpipe-kernels-") as kernels:
        first, *later = [start(arguments.config, kernels) for _ in range(1 + arguments.times)]
    print(f"first start   {first:6.1f} s (goal: 120 for 7 B on a GPU)")
    shown = ", ".join(f"{seconds:.1f}" for seconds in later)
    print(f"later starts  {statistics.median(later):6.1f} s (goal: 20; {shown})")


def start(config: Path, kernels: str) -> float:
    """Starts a process that loads the pair; returns the seconds until it said that it is ready."""
    command = [sys.executable, __file__, "--once", "--config", str(config)]
    environment = {**os.environ, "TRITON_CACHE_DIR": kernels}
    begun = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(_READY):
                seconds = time.perf_counter() - begun
                print(f"{seconds:.1f} s, {line.strip()} of its loading", file=sys.stderr)
                child.kill()
                return seconds
        raise SystemExit(f"the pair was not loaded: exit status {child.wait()}")


def load_once(path: Path) -> None:
    """Loads the pair, says so, and waits to be ended."""
    config = load_config(path)
    begun = time.perf_counter()
    load_pair(config, load_tokenizer(config))
    print(f"{_READY}{time.perf_counter() - begun:.1f} s", flush=True)
    time.sleep(60)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--times", type=int, default=2, help="later starts")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
