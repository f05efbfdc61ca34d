"""Calibrating and quantizing a synthetic Llama, beside NVIDIA's ModelOpt alone on the same input.

    python benchmarks/quantize.py --formats fp8,int4_awq
    python benchmarks/quantize.py --large --folder /data

Makes a checkpoint of random bfloat16 (1 B parameters unless --gigabytes says otherwise), then runs
in turns, each in a process of its own and on the CPU:

ModelOpt    loads the model with transformers, mtq.quantize on the same token ids, text by text, and
            export_hf_checkpoint
specpipe    calibrates and exports a Hugging Face folder: what ModelOpt does
  unified   what the unified checkpoint takes on top, which ModelOpt has no part in

The peak is all memory of the process, mapped files and libraries included.

With --large, a checkpoint of 12 GB goes through calibration, unified checkpoint and export while
the process may have 8 GB (RLIMIT_DATA, which counts the heap and every private mapping that can be
written; that it does is tried first). The same limit holds for ModelOpt, which needs the model in
memory. Needs disk for twice the size of the checkpoint; what is made is removed.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from command import cpu_name
from convert import Measured, Raw, measured, write_checkpoint

from specpipe.build.stages.calibrate import Calibrate
from specpipe.build.stages.export import Export
from specpipe.build.stages.quantize import Quantize
from specpipe.config.sections import QuantizationConfig
from specpipe.quantization.texts import read_texts

TOKENIZER = Path(__file__).parents[1] / "models" / "python-code" / "target"
MODELOPT_CONFIGS = {
    "fp8": "FP8_DEFAULT_CFG",
    "int8_sq": "INT8_SMOOTHQUANT_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "w4a8_awq": "W4A8_AWQ_BETA_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
}
"""What specpipe's formats are called in modelopt.torch.quantization."""

MODELOPT, EXPORT, UNIFIED = "ModelOpt", "specpipe", "  unified"
LARGE_GIGABYTES, LIMIT_GIGABYTES = 12.0, 8.0


def small_numbers(generator: np.random.Generator, shape: tuple[int, ...]) -> Raw:
    """Normal numbers with a standard deviation of 0.02, as trained weights have about."""
    values = 0.02 * generator.standard_normal(shape, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def make_checkpoint(folder: Path, gigabytes: float, hidden_size: int) -> None:
    """Writes the checkpoint with a tokenizer, so that it can read texts."""
    write_checkpoint(folder, round(gigabytes * 1e9), hidden_size=hidden_size, make=small_numbers)
    for path in TOKENIZER.glob("tokenizer*.json"):
        shutil.copyfile(path, folder / path.name)


def run_modelopt(source: Path, out: Path, scheme: QuantizationConfig, dtype: str) -> None:
    import torch
    from modelopt.torch import quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    texts = read_texts(scheme.calibration, source, source).calibration
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)

    def forward_loop(quantized: Any) -> None:
        with torch.no_grad():
            for text in texts:
                quantized(torch.tensor([text]))

    mtq.quantize(model, getattr(mtq, MODELOPT_CONFIGS[scheme.format]), forward_loop)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=str(out))


def run_export(source: Path, out: Path, scheme: QuantizationConfig) -> None:
    scales = _calibrate(source, out, scheme)
    huggingface = out / "huggingface"
    huggingface.mkdir()
    Export(role="target", checkpoint=source, scales=scales, scheme=scheme).run(huggingface)


def run_all(source: Path, out: Path, scheme: QuantizationConfig) -> None:
    run_export(source, out, scheme)
    run_unified(source, out, scheme)


def run_unified(source: Path, out: Path, scheme: QuantizationConfig) -> None:
    """Quantizes with the scales that another process left."""
    checkpoint = out / "checkpoint"
    checkpoint.mkdir()
    scales = out / "scales"
    Quantize(
        role="target",
        checkpoint=source,
        scales=scales if scales.is_dir() else None,
        scheme=scheme,
    ).run(checkpoint)


def _calibrate(source: Path, out: Path, scheme: QuantizationConfig) -> Path | None:
    if not scheme.needs_data:
        return None
    scales = out / "scales"
    scales.mkdir(parents=True)
    Calibrate(role="target", checkpoint=source, scheme=scheme, base_dir=source, device="cpu").run(
        scales
    )
    return scales


def limited(num_bytes: int, do: Callable[..., object], *arguments: Any) -> None:
    """Calls a function while this process may have that much memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    with suppress(MemoryError):
        np.ones(num_bytes, np.uint8)
        raise SystemExit(f"a limit of {num_bytes} bytes is not kept here: use another kernel")
    do(*arguments)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="specpipe-quantize-", dir=arguments.folder) as work:
        (run_large if arguments.large else run)(Path(work), arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default="fp8,int4_awq", help="separated by commas")
    parser.add_argument("--gigabytes", type=float, help="of bfloat16; default: 2, large: 12")
    parser.add_argument("--hidden-size", type=int, help="default: 2048, large: 4096")
    parser.add_argument("--limit", type=float, default=LIMIT_GIGABYTES, help="GB, for --large")
    parser.add_argument("--large", action="store_true", help="a checkpoint larger than memory")
    parser.add_argument("--samples", type=int, default=32, help="texts, every eighth held out")
    parser.add_argument("--max-seq-len", type=int, default=512, help="tokens of each text")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of the model in ModelOpt; specpipe takes float32"
    )
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def scheme_of(name: str, arguments: argparse.Namespace) -> QuantizationConfig:
    calibration = {"num_samples": arguments.samples, "max_seq_len": arguments.max_seq_len}
    return QuantizationConfig.model_validate({"format": name, "calibration": calibration})


def run(work: Path, arguments: argparse.Namespace) -> None:
    source, out = work / "checkpoint", work / "out"
    check_disk(work, arguments.gigabytes or 2.0)
    make_checkpoint(source, arguments.gigabytes or 2.0, arguments.hidden_size or 2048)
    print_head(source, arguments)
    print(f"{'':22}{'seconds':>9}{'/ ModelOpt':>12}{'peak GB':>9}{'/ weights':>11}")
    for name in arguments.formats.split(","):
        scheme = scheme_of(name, arguments)
        sides: dict[str, tuple[Any, ...]] = {
            MODELOPT: (run_modelopt, source, out, scheme, arguments.dtype),
            EXPORT: (run_export, source, out, scheme),
            UNIFIED: (run_unified, source, out, scheme),  # after EXPORT, whose scales it reads
        }
        if name not in MODELOPT_CONFIGS:
            del sides[MODELOPT]
        results: dict[str, list[Measured]] = {side: [] for side in sides}
        for _ in range(arguments.rounds):
            for side, call in sides.items():
                if side != UNIFIED:
                    shutil.rmtree(out, ignore_errors=True)
                    out.mkdir()
                results[side].append(measured(*call))
        print_results(name, source, results)


def run_large(work: Path, arguments: argparse.Namespace) -> None:
    source, out = work / "checkpoint", work / "out"
    check_disk(work, arguments.gigabytes or LARGE_GIGABYTES)
    make_checkpoint(source, arguments.gigabytes or LARGE_GIGABYTES, arguments.hidden_size or 4096)
    print_head(source, arguments)
    limit = round(arguments.limit * 1e9)
    print(f"limit: {limit / 1e9:.1f} GB (RLIMIT_DATA)\n")
    for name in arguments.formats.split(","):
        scheme = scheme_of(name, arguments)
        sides: dict[str, tuple[Any, ...]] = {
            EXPORT: (run_all, source, out, scheme),
            MODELOPT: (run_modelopt, source, out, scheme, arguments.dtype),
        }
        if name not in MODELOPT_CONFIGS:
            del sides[MODELOPT]
        for side, call in sides.items():
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            start = time.perf_counter()
            try:
                found = measured(limited, limit, *call)
                what = f"done in {found.seconds:.0f} s, peak {found.peak_bytes / 1e9:.2f} GB"
            except (MemoryError, RuntimeError, BrokenProcessPool) as exc:
                last_line = str(exc).strip().splitlines()[-1:] or [type(exc).__name__]
                what = f"failed after {time.perf_counter() - start:.0f} s: {last_line[0][:80]}"
            print(f"{name:10}{side:12}{what}", flush=True)


def check_disk(work: Path, gigabytes: float) -> None:
    if (free := shutil.disk_usage(work).free) < 2.5e9 * gigabytes:
        raise SystemExit(
            f"{work} has {free / 1e9:.1f} GB free, {2.5 * gigabytes:.1f} GB are needed; "
            "name another folder with --folder"
        )


def size_of(source: Path) -> int:
    return sum(path.stat().st_size for path in source.glob("*.safetensors"))


def print_head(source: Path, arguments: argparse.Namespace) -> None:
    print(f"machine: {cpu_name()}, {len(os.sched_getaffinity(0))} cores")
    print(
        f"checkpoint: Llama, {size_of(source) / 2e9:.2f} B parameters, "
        f"{size_of(source) / 1e9:.2f} GB of bfloat16; {arguments.samples} texts of specpipe's own "
        f"set, up to {arguments.max_seq_len} tokens each"
    )
    versions = ", ".join(f"{n} {version(n)}" for n in ("nvidia-modelopt", "torch", "transformers"))
    print(f"ModelOpt computes in {arguments.dtype}, specpipe in float32; {versions}\n", flush=True)


def print_results(name: str, source: Path, results: dict[str, list[Measured]]) -> None:
    seconds = {
        side: statistics.median(one.seconds for one in all_measured)
        for side, all_measured in results.items()
    }
    for side, all_measured in results.items():
        peak = max(one.peak_bytes for one in all_measured)
        ratio = f"{seconds[side] / seconds[MODELOPT]:.2f}" if MODELOPT in seconds else "-"
        print(
            f"{name:10}{side:12}{seconds[side]:9.1f}{ratio:>12}{peak / 1e9:9.2f}"
            f"{peak / size_of(source):11.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
