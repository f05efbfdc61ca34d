"""benchmarks/command.py: what a benchmark ends in when it cannot run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.bits.__main__ import main as bits
from benchmarks.gpu.__main__ import main as gpu
from benchmarks.gpu_load import main as gpu_load
from benchmarks.parallel_draft import main as parallel_draft
from specpipe.errors import RuntimeUnavailable

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (bits, []),
        (gpu, []),
        (gpu_load, ["--ours", "alone"]),
        (gpu_load, ["--vllm", "alone", "--inflated", "I", "--device", "cpu"]),
        (parallel_draft, ["--parallel-draft", "P", "--device", "cuda"]),
    ],
)
def test_a_benchmark_without_its_gpu_is_refused_at_once(
    main: Callable[[list[str]], int], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeUnavailable, match="--device cuda: torch .* finds no GPU here"):
        main(words)


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ("return 3", 3, ""),
        ("raise SystemExit('too little room')", 1, "too little room\n"),
        ("raise RuntimeUnavailable('no GPU')", 1, "Error: no GPU\n"),
    ],
)
def test_what_stops_a_benchmark_is_a_sentence(body: str, status: int, told: str) -> None:
    code = f"""
from benchmarks.command import run_command
from specpipe.errors import RuntimeUnavailable
def main():
    {body}
run_command(main)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, told)
