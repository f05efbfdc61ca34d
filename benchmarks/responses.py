"""What streaming through Triton costs, and what gathering chunks saves, side by side.

    python -m benchmarks.responses --streams 1,8,32
    python -m benchmarks.responses --config configs/quickstart.yaml --streams 1,8

Each setting of `serving.stream_interval_ms` is a server; they are asked in turns, answers are
streamed over gRPC by this process. Without --config a pair without models is served, whose rounds
take --round-ms, the last --host-ms of which keep its interpreter busy: then all that is not a round
is the server. Cores that others use as well make all of it slower: compare what one run says, and
times of CPU.

A line: tokens/s of the steady part (closed_loop.py) · tokens a response · between two responses of
a stream, median and 99th percentile · first token · ms of CPU for a token, by process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import run_command
from benchmarks.load import tick_pair
from benchmarks.load.closed_loop import ClosedLoop, Load
from benchmarks.load.prompts import prompt_set
from benchmarks.load.sides import Process
from benchmarks.load.through_triton import ThroughTriton
from specpipe.build.load import load_config
from specpipe.build.repositories import built_repository
from specpipe.build.stages.package import models_folder
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION
from specpipe.text.tokenizer import Tokenizer
from specpipe.triton import repository
from specpipe.triton.server import launcher, processes
from specpipe.triton.server.server import Server

_ROOT = Path(__file__).parents[1]
_TOKENIZER = _ROOT / "models" / "python-code" / "target"
_SETTING = "adaptive"
_WARM_UP_TOKENS = 8


class Measured:
    """One server, and what was measured of it: figures by the number of streams."""

    def __init__(self, server: Server, tokenizer: Path) -> None:
        self._session = server.triton.pid
        options = {"url": server.grpc_url}
        process = Process("triton", (_SETTING,), str(tokenizer), "", options=options)
        self._side = ThroughTriton(process)
        self.runs: dict[int, list[dict[str, Any]]] = {}

    def run(self, load: Load, prompts: list[list[int]]) -> None:
        if load.streams not in self.runs:
            self._ask(dataclasses.replace(load, max_tokens=_WARM_UP_TOKENS), prompts)
        before = self._cpu_s()
        loop = self._ask(load, prompts)
        cpu_s = self._cpu_s()
        cpu_s.subtract(before)
        num_tokens = sum(sum(answer.counts) for answer in loop.answers)
        num_responses = sum(len(answer.counts) for answer in loop.answers)
        figures = loop.figures()
        figures["tokens_a_response"] = num_tokens / num_responses
        figures["cpu_ms"] = {name: 1e3 * of / num_tokens for name, of in cpu_s.items()}
        self.runs.setdefault(load.streams, []).append(figures)

    def _ask(self, load: Load, prompts: list[list[int]]) -> ClosedLoop:
        loop = load.loop(prompts)
        self._side.run(_SETTING, loop)
        return loop

    def _cpu_s(self) -> Counter[str]:
        found: Counter[str] = Counter(client=time.process_time())  # type: ignore[arg-type]
        for process in processes.of_session(self._session):
            name = processes.model_name(process) if processes.runs_model(process) else "triton"
            found[name] += process.cpu_s  # type: ignore[assignment]
        return found

    def told(self, streams: int) -> str:
        runs = self.runs[streams]

        def middle(*keys: str) -> float:
            values: list[Any] = runs
            for key in keys:
                values = [value[key] for value in values]
            return float(median(values))

        cpu = " ".join(f"{name} {middle('cpu_ms', name):.2f}" for name in sorted(runs[0]["cpu_ms"]))
        return (
            f"{middle('tokens_per_second'):7,.0f} tokens/s  {middle('tokens_a_response'):5.2f} "
            f"a response  gap {middle('chunk_gap', 'p50_ms'):5.1f} / "
            f"{middle('chunk_gap', 'p99_ms'):5.1f} ms  first "
            f"{middle('first_token', 'p50_ms'):6.1f} ms  CPU {cpu}"
        )


def main() -> None:
    arguments = parse_arguments()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.config is None:
            tick_pair.set_times(arguments.round_ms / 1e3, arguments.host_ms / 1e3)
            source = write_tick_repository(folder)
        else:
            source = built_repository(load_config(arguments.config))
        tokenizer = source / SPECULATIVE / VERSION / "tokenizer"
        sides = {
            name: Measured(stack.enter_context(served(source, folder / name, ms)), tokenizer)
            for name, ms in arguments.intervals.items()
        }
        prompts = prompt_set(Tokenizer.load(tokenizer), "files", number=64, length=128)
        for _ in range(arguments.rounds):
            for streams in arguments.streams:
                load = Load(streams, max(4 * streams, 8), arguments.max_tokens)
                for side in sides.values():
                    side.run(load, prompts)
    for streams in arguments.streams:
        for name, side in sides.items():
            print(f"{streams:3} streams  {name:>8}  {side.told(streams)}")


@contextlib.contextmanager
def served(source: Path, copy: Path, interval_ms: float | None) -> Iterator[Server]:
    """Serves a copy of a repository with another interval."""
    shutil.copytree(source, copy)
    path = copy / SPECULATIVE / VERSION / "pair.json"
    pair = PairFile.read(path)
    interval_s = None if interval_ms is None else interval_ms / 1e3
    options = dataclasses.replace(pair.options, stream_interval_s=interval_s)
    path.write_text(dataclasses.replace(pair, options=options).to_json())
    with launcher.running(copy) as server:
        yield server


def write_tick_repository(folder: Path) -> Path:
    """A repository whose process of `speculative` loads a TickPair."""
    engine, out = folder / "engine", folder / "model_repo"
    engine.mkdir()
    build_config = {"max_batch_size": 512, "max_seq_len": 1024, "max_draft_len": 4}
    (engine / "config.json").write_text(json.dumps({"build_config": build_config}))
    out.mkdir()
    repository.write(
        out,
        models=models_folder(),
        draft_engine=engine,
        target_engine=engine,
        tokenizer=_TOKENIZER,
        pair=PairFile("torch", PairOptions(max_batch_size=512, max_queue_size=512)),
    )
    model = out / SPECULATIVE / VERSION / "model.py"
    register = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r})\n"
        "from benchmarks.load import tick_pair; tick_pair.register()\n"
    )
    model.write_text(register + model.read_text())
    return out


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="a built pair; left out: one without models")
    parser.add_argument("--round-ms", type=float, default=8.0)
    parser.add_argument("--host-ms", type=float, default=1.0)
    parser.add_argument("--streams", type=_numbers, default=(1, 8, 32))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--intervals", type=_intervals, default=_intervals("adaptive,0"), help="ms, or adaptive"
    )
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def _numbers(told: str) -> tuple[int, ...]:
    return tuple(int(number) for number in told.split(","))


def _intervals(told: str) -> dict[str, float | None]:
    return {name: None if name == "adaptive" else float(name) for name in told.split(",")}


if __name__ == "__main__":
    run_command(main)
