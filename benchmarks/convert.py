"""Conversion of a synthetic Llama beside a plain copy of the same files, on the same disk.

    python benchmarks/convert.py --gigabytes 8 --folder /data

Makes a checkpoint of random bfloat16 in shards of about 2 GB, then copies it (shutil.copyfile) and
converts it for one rank and for two, in turns, each in a process of its own. Before every turn the
pages of the shards are dropped from the page cache, so that all sides read the disk; every file
written is synced to the disk within the time. The last row is the whole stage of `specpipe build`,
which also takes SHA-256 of what it reads and writes. The peak is that of RssAnon + RssFile. Needs
disk for twice the size; what is made is removed. Nothing else should keep the disk busy.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from command import cpu_name

from specpipe.build import cache
from specpipe.build.stages.convert import Convert, convert
from specpipe.checkpoints.checkpoint import INDEX_NAME, create_safetensors
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.unified_layout import part_shape, tensor_rules

SHARD_BYTES = 2_000_000_000
COPY = "plain copy"
Shapes = dict[str, tuple[int, ...]]
Raw = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Measured:
    """What a call took, in a process of its own.

    start_bytes, peak_bytes  the most that RssAnon + RssFile came to before the call, and by its end
    read_bytes               what the call read from files, the page cache included
    """

    seconds: float
    start_bytes: int
    peak_bytes: int
    read_bytes: int


def measured(do: Callable[..., object], *arguments: Any) -> Measured:
    """Calls a function in a fresh process."""
    spawn = multiprocessing.get_context("spawn")  # a fork would start with our memory
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_measure, do, arguments).result()


def _measure(do: Callable[..., object], arguments: tuple[Any, ...]) -> Measured:
    start_bytes, read_bytes = _proc_number("status", "VmHWM") * 1024, _proc_number("io", "rchar")
    start = time.perf_counter()
    do(*arguments)
    return Measured(
        time.perf_counter() - start,
        start_bytes,
        _proc_number("status", "VmHWM") * 1024,
        _proc_number("io", "rchar") - read_bytes,
    )


def _proc_number(file: str, key: str) -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def random_bits(generator: np.random.Generator, shape: tuple[int, ...]) -> Raw:
    """Any bfloat16 below 2, since none that is infinite or no number is converted."""
    bits = np.frombuffer(generator.bytes(2 * math.prod(shape)), np.uint16).reshape(shape)
    return bits & np.uint16(0xBFFF)


def write_checkpoint(
    folder: Path,
    num_bytes: int,
    *,
    hidden_size: int = 4096,
    shard_bytes: int = SHARD_BYTES,
    make: Callable[[np.random.Generator, tuple[int, ...]], Raw] = random_bits,
) -> Shapes:
    """Writes a Llama of about this size; returns its tensors' shapes.

    The shape of a layer is that of Llama 3 8B for a hidden size of 4096, and scales with it. `make`
    gives the raw bfloat16 of a block of rows.
    """
    num_heads = hidden_size // 128
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 32000,
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 7 // 2,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 4),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }
    one = _bytes_of(_shapes(config))
    layer = _bytes_of(_shapes({**config, "num_hidden_layers": 2})) - one
    config["num_hidden_layers"] = max(1, 1 + round((num_bytes - one) / layer))
    shapes = _shapes(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shards: list[Shapes] = [{}]
    for name, shape in shapes.items():
        if shards[-1] and _bytes_of({**shards[-1], name: shape}) > shard_bytes:
            shards.append({})
        shards[-1][name] = shape
    generator = np.random.default_rng(0)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        header = {name: ("BF16", shape) for name, shape in shard.items()}
        with create_safetensors(folder / file, header) as writer:
            for name, shape in shard.items():
                rows = max(1, (4 << 20) // math.prod(shape[1:]))
                for row in range(0, shape[0], rows):
                    block = (min(rows, shape[0] - row), *shape[1:])
                    writer.write_rows(name, row, make(generator, block))
    index = {"metadata": {"total_size": _bytes_of(shapes)}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return shapes


def _shapes(hf_config: dict[str, Any]) -> Shapes:
    config = unified_config(hf_config)
    return {
        part.source.format(n=layer): part_shape(config, part)
        for rule, layer in tensor_rules(config)
        for part in rule.parts
    }


def _bytes_of(shapes: Shapes) -> int:
    return sum(2 * math.prod(shape) for shape in shapes.values())


def copy_files(source: Path, out: Path) -> None:
    out.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, out / path.name)
    _sync(out)


def convert_files(source: Path, out: Path, tp_size: int) -> None:
    out.mkdir()
    convert(source, out, tp_size=tp_size)
    _sync(out)


def build_stage(source: Path, out: Path) -> None:
    cache.build(Convert("target", source), out)
    _sync(out)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def drop_from_page_cache(folder: Path) -> None:
    os.sync()  # only clean pages can be dropped
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="specpipe-convert-", dir=arguments.folder) as work:
        run(Path(work), arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.folder is not None and not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder} is no folder")
    return arguments


def run(work: Path, arguments: argparse.Namespace) -> None:
    source, out = work / "checkpoint", work / "out"
    num_bytes = round(arguments.gigabytes * 1e9)
    if (free := shutil.disk_usage(work).free) < 2.2 * num_bytes:
        raise SystemExit(
            f"{work} has {free / 1e9:.1f} GB free, {2.2 * num_bytes / 1e9:.1f} GB are needed; "
            "name another folder with --folder"
        )
    shapes = write_checkpoint(source, num_bytes)
    sides: dict[str, tuple[Any, ...]] = {
        COPY: (copy_files, source, out),
        "convert, 1 rank": (convert_files, source, out, 1),
        "convert, 2 ranks": (convert_files, source, out, 2),
        "stage, 1 rank": (build_stage, source, out),
    }
    results: dict[str, list[Measured]] = {side: [] for side in sides}
    for _ in range(arguments.rounds):
        for side, call in sides.items():
            drop_from_page_cache(source)
            results[side].append(measured(*call))
            shutil.rmtree(out)
    print_report(source, shapes, results)


def print_report(source: Path, shapes: Shapes, results: dict[str, list[Measured]]) -> None:
    shards = list(source.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in shards)
    largest = max(2 * math.prod(shape) for shape in shapes.values())
    print(f"machine: {cpu_name()}, {len(os.sched_getaffinity(0))} cores")
    print(
        f"checkpoint: Llama, {size / 1e9:.2f} GB of bfloat16 in {len(shards)} shards, "
        f"largest tensor {largest / 1e6:.0f} MB"
    )
    print("read from the disk (page cache dropped), written and synced, sides in turns\n")
    rounds = len(results[COPY])
    print(f"{'GB/s':18}{'median':>8}{'/ copy':>8}{'peak MB':>9}   {rounds} rounds")
    copied = statistics.median(size / one.seconds for one in results[COPY])
    for side, all_measured in results.items():
        rates = [size / one.seconds for one in all_measured]
        median, peak = statistics.median(rates), max(one.peak_bytes for one in all_measured)
        each = "  ".join(f"{rate / 1e9:.2f}" for rate in rates)
        print(f"{side:18}{median / 1e9:8.2f}{median / copied:8.2f}{peak / 1e6:9.0f}   {each}")


if __name__ == "__main__":
    main()
