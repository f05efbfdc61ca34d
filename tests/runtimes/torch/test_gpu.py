from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specpipe.runtimes.torch.engine import TorchEngine
from tests.runtimes.torch.engines import load_engine
from tests.toy import write_toy_checkpoint

pytestmark = pytest.mark.gpu


def logits_of(engine: TorchEngine) -> Tensor:
    """Prefill, then steps of three sequences with different token counts, and a gap between two."""
    draw = random.Random(1)
    sequences = [engine.allocate(prompt_length=40, max_tokens=200) for _ in range(4)]
    engine.free(sequences.pop(2))
    parts = []
    for sequence, count in zip(sequences, (40, 3, 25), strict=True):
        prompt = draw.choices(range(256), k=count)
        parts.append(engine.forward([(sequence, prompt)], [count]))
    for counts in ((1, 1, 1), (5, 5, 5), (4, 1, 2)):
        batch = [
            (sequence, draw.choices(range(256), k=count))
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        parts.append(engine.forward(batch, counts))
    return torch.cat(parts).cpu()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 2e-4), ("bfloat16", 0.03), ("float16", 0.005)]
)
def test_a_gpu_computes_what_a_cpu_does(
    family: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    folder = write_toy_checkpoint(tmp_path / "hf", family, num_key_value_heads=1)
    expected = logits_of(load_engine(folder, tmp_path / "cpu"))
    logits = logits_of(load_engine(folder, tmp_path / "gpu", dtype=dtype, device="cuda"))
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
