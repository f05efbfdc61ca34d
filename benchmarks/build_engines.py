"""What engines of runtime `tensorrt` cost to build: seconds and memory; no GPU is used.

    python benchmarks/build_engines.py --smollm2 /data/SmolLM2-135M

Each build is that of `specpipe build` (conversion, digests and manifests included) in a process of
its own, which imports the library within the time. Three tables:

engines  from checkpoint to engine, with the weights inside and beside, and again once the weights
         have changed; "random" is a model of random weights, which starts as a unified checkpoint
memory   the most memory of that process, above what it has once the library is loaded, as a
         multiple of the weights
depth    models of random weights, and a straight line through what they cost; by processor time,
         which says more where the cores are not idle

A goal is what is aimed at. Nothing else should keep the cores busy.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from command import cpu_name
from measure import ROOT

from specpipe.build import cache
from specpipe.build.stages.convert import Convert
from specpipe.checkpoints.checkpoint import RawArray, read_safetensors_header
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.rules import Part
from specpipe.checkpoints.unified import write_unified
from specpipe.checkpoints.unified_layout import part_shape
from specpipe.runtimes.runtime import load_runtime
from specpipe.runtimes.tensorrt import library
from specpipe.runtimes.tensorrt.build import BuildTensorRTEngine, PlaceWeights
from specpipe.stage import Stage

LIBRARY = "tensorrt_rtx"
PAIR = ROOT / "models" / "python-code"
Weights = Literal["inside", "beside"]


@dataclass(frozen=True)
class Model:
    """A checkpoint to build from; goal_s is what is aimed at, from checkpoint to engine."""

    name: str
    checkpoint: Path
    max_seq_len: int
    is_unified: bool = False
    goal_s: float | None = None


@dataclass(frozen=True)
class Measured:
    """What the stages of one build took, in a process of its own.

    cpu_seconds             processor time of all its threads
    idle_bytes, peak_bytes  resident once the library is loaded, and the most until the end
    """

    seconds: float
    cpu_seconds: float
    idle_bytes: int
    peak_bytes: int

    @property
    def above_idle_bytes(self) -> int:
        return self.peak_bytes - self.idle_bytes


@dataclass(frozen=True)
class Builds:
    """A build, and the one after it that finds other weights of the same shape."""

    first: Measured
    rebuilt: Measured
    weights_bytes: int

    @property
    def ratio(self) -> float:
        """The time of the second build in those of the first."""
        return self.rebuilt.seconds / self.first.seconds


def stages_of(model: Model, out: Path, weights: Weights) -> Iterator[tuple[Stage, Path]]:
    """Yields what `specpipe build` would run, in order."""
    unified = model.checkpoint
    if not model.is_unified:
        unified = out / "checkpoint"
        yield Convert("target", model.checkpoint), unified
    plan = out / ("engine" if weights == "inside" else "plan")
    build = BuildTensorRTEngine(
        role="target",
        checkpoint=unified,
        max_batch_size=8,
        max_seq_len=model.max_seq_len,
        max_draft_len=4,
        max_num_tokens=1024,
        dtype="auto",
        library=LIBRARY,
        compute_capabilities=("8.0", "8.6", "8.9", "12.0", "12.1"),
        weights=weights,
        weight_streaming=False,
    )
    yield build, plan
    if weights == "beside":
        yield PlaceWeights(role="target", plan=plan, checkpoint=unified), out / "engine"


def build(model: Model, out: Path, weights: Weights) -> Measured:
    """Builds what is stale, in a fresh process."""
    spawn = multiprocessing.get_context("spawn")  # a fork would start with our memory
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_build, model, out, weights).result()


def _build(model: Model, out: Path, weights: Weights) -> Measured:
    start, idle_bytes = time.perf_counter(), 0
    for stage, artifact in stages_of(model, out, weights):
        if isinstance(stage, BuildTensorRTEngine) and cache.stale_reasons(stage, artifact):
            trt = library.load(LIBRARY)
            trt.Builder(library.make_logger(trt))  # starts the library up; the stage makes its own
            idle_bytes = _resident_bytes("VmRSS")
        cache.build(stage, artifact)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time()
    return Measured(seconds, cpu_seconds, idle_bytes, _resident_bytes("VmHWM"))


def _resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def build_twice(model: Model, work: Path, weights: Weights) -> Builds:
    """Builds from a copy of the checkpoint, changes a weight in it and builds again."""
    copied, out = replace(model, checkpoint=work / "copy"), work / "out"
    shutil.copytree(model.checkpoint, copied.checkpoint)
    out.mkdir()
    try:
        first = build(copied, out, weights)
        described = load_runtime("tensorrt").describe(out / "engine")
        assert described is not None and described.memory.weights_bytes is not None
        change_a_weight(min(copied.checkpoint.glob("*.safetensors")))
        return Builds(first, build(copied, out, weights), described.memory.weights_bytes)
    finally:
        shutil.rmtree(copied.checkpoint)
        shutil.rmtree(out)


def build_once(model: Model, work: Path) -> Measured:
    out = work / "out"
    out.mkdir()
    try:
        return build(model, out, "inside")
    finally:
        shutil.rmtree(out)


def change_a_weight(path: Path) -> None:
    """Changes the last bit of the first number of a safetensors file."""
    offset = min(info.offset for info in read_safetensors_header(path).values())
    with path.open("r+b") as file:
        file.seek(offset)
        first = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([first ^ 1]))


def write_random(folder: Path, *, num_layers: int, hidden_size: int) -> Path:
    """Writes a unified Llama of bfloat16; no two tensors are equal, or the library keeps one."""
    config = unified_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "vocab_size": 8192,
            "hidden_size": hidden_size,
            "intermediate_size": hidden_size * 11 // 4,
            "num_hidden_layers": num_layers,
            "num_attention_heads": hidden_size // 64,
            "num_key_value_heads": hidden_size // 256,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
        }
    )

    def read(part: Part, layer: int | None, start: int, stop: int) -> Iterable[RawArray]:
        shape = (stop - start, *part_shape(config, part)[1:])
        seed = zlib.crc32(f"{part.source} {layer} {start}".encode())
        bits = np.random.default_rng(seed).integers(1 << 16, size=shape, dtype=np.uint16)
        return [bits & 0x807F | 0x3C80]  # any sign and mantissa, exponent -6: 0.016 to 0.031

    folder.mkdir()
    write_unified(folder, config, read)
    return folder


def main() -> None:
    arguments = parse_arguments()
    library.require(LIBRARY)
    print(
        f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores; {LIBRARY} "
        f"{library.load(LIBRARY).__version__}; median of {arguments.rounds}"
    )
    with tempfile.TemporaryDirectory(prefix="specpipe-build-", dir=arguments.folder) as work:
        random = Model(
            f"random, {arguments.layers_of_random} x {arguments.hidden_size}",
            write_random(
                Path(work) / "random",
                num_layers=arguments.layers_of_random,
                hidden_size=arguments.hidden_size,
            ),
            max_seq_len=1024,
            is_unified=True,
        )
        print_engines([*models(arguments.smollm2), random], Path(work), arguments.rounds)
        if arguments.layers:
            print_layers(arguments.layers, Path(work), arguments.rounds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M; left out: no row")
    parser.add_argument("--layers-of-random", type=int, default=12, metavar="L")
    parser.add_argument("--hidden-size", type=int, default=2048, metavar="C")
    parser.add_argument("--layers", type=int, nargs="*", default=[6, 12, 24, 48], metavar="L")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    return parser.parse_args()


def models(smollm2: Path | None) -> Iterator[Model]:
    yield Model("quickstart draft", PAIR / "draft", max_seq_len=1024)
    yield Model("quickstart target", PAIR / "target", max_seq_len=1024, goal_s=3.0)
    if smollm2 is None:
        print("SmolLM2-135M is left out: name its folder with --smollm2")
    else:
        dtype = json.loads((smollm2 / "config.json").read_text()).get("dtype", "float32")
        yield Model(f"SmolLM2-135M, {dtype}", smollm2, max_seq_len=2048, goal_s=15.0)


def print_engines(found: list[Model], work: Path, rounds: int) -> None:
    print("\nfrom checkpoint to engine, seconds; again: with other weights of the same shape\n")
    print(
        _row("", "weights", "inside", "goal", "again", "ratio", "beside", "again", "ratio", "goal")
    )
    rows = []
    for model in found:
        inside, beside = (
            [build_twice(model, work, weights) for _ in range(rounds)]
            for weights in ("inside", "beside")
        )
        rows.append((model.name, inside, beside))
        size = f"{inside[0].weights_bytes / 1e6:.1f} MB"
        goal = f"{model.goal_s:.0f}" if model.goal_s is not None else ""
        print(_row(model.name, size, _first(inside), goal, *_again(inside), *_both(beside), "0.30"))
    print("\npeak memory above the idle library's, in MB and as a multiple of the weights\n")
    print(_row("", "weights", "idle", "inside", "ratio", "beside", "ratio", "goal"))
    for name, inside, beside in rows:
        size_bytes = inside[0].weights_bytes
        memory = (
            cell
            for builds in (inside, beside)
            for bytes_ in [statistics.median(one.first.above_idle_bytes for one in builds)]
            for cell in (f"{bytes_ / 1e6:.0f}", f"{bytes_ / size_bytes:.2f}")
        )
        idle = f"{inside[0].first.idle_bytes / 1e6:.0f}"
        goal = "3" if size_bytes >= 500e6 else ""
        print(_row(name, f"{size_bytes / 1e6:.1f} MB", idle, *memory, goal))


def _row(name: str, *cells: str) -> str:
    return f"{name:22}" + "".join(f"{cell:>10}" for cell in cells)


def _first(builds: list[Builds]) -> str:
    return f"{statistics.median(one.first.seconds for one in builds):.1f}"


def _again(builds: list[Builds]) -> tuple[str, str]:
    """Seconds of the second build, and its ratio to the first."""
    return (
        f"{statistics.median(one.rebuilt.seconds for one in builds):.1f}",
        f"{statistics.median(one.ratio for one in builds):.2f}",
    )


def _both(builds: list[Builds]) -> tuple[str, ...]:
    return _first(builds), *_again(builds)


def print_layers(counts: list[int], work: Path, rounds: int) -> None:
    print("\ndepth: random weights, hidden size 512, weights inside\n")
    print(_row("layers", "weights", "seconds", "of CPU", "a layer", "MB above"))
    seconds, memory = [], []
    for count in counts:
        folder = write_random(work / "depth", num_layers=count, hidden_size=512)
        model = Model(f"{count} layers", folder, max_seq_len=1024, is_unified=True)
        found = [build_once(model, work) for _ in range(rounds)]
        tensors = read_safetensors_header(folder / "rank0.safetensors").values()
        shutil.rmtree(folder)
        seconds.append(statistics.median(one.cpu_seconds for one in found))
        memory.append(statistics.median(one.above_idle_bytes for one in found) / 1e6)
        print(
            _row(
                f"{count}",
                f"{sum(tensor.num_bytes for tensor in tensors) / 1e6:.1f} MB",
                f"{statistics.median(one.seconds for one in found):.1f}",
                f"{seconds[-1]:.1f}",
                f"{seconds[-1] / count:.3f}",
                f"{memory[-1]:.0f}",
            )
        )
    if len(counts) > 2:
        print(f"\nof CPU: {fit(counts, seconds, 's')}\nmemory: {fit(counts, memory, 'MB')}")


def fit(counts: list[int], values: list[float], unit: str) -> str:
    """Describes the straight line through values over numbers of layers."""
    slope, constant = np.polyfit(counts, values, 1)
    off = max(
        abs(value - (constant + slope * count)) / value
        for count, value in zip(counts, values, strict=True)
    )
    growth = values[-1] / counts[-1] / (values[1] / counts[1])
    return (
        f"{constant:.1f} {unit} + {slope:.2f} {unit} a layer, at most {off:.0%} off; a layer of "
        f"{counts[-1]} / a layer of {counts[1]}: {growth:.2f} (linear: at most 1)"
    )


if __name__ == "__main__":
    main()
