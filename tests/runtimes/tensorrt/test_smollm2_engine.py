"""A real model, SmolLM2-135M-Instruct: its engine, and the numbers of its network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specpipe.build.stages.convert import convert
from tests.runtimes.tensorrt.engines import build_engine
from tests.runtimes.tensorrt.networks import (
    InterpretedDecoder,
    SideBySide,
    build_network,
    prefill_decode_verify,
)
from tests.runtimes.torch.engines import load_engine
from tests.test_smollm2 import checkpoint  # noqa: F401  a fixture

pytestmark = pytest.mark.slow

TOLERANCE = 3e-5  # float32, relative to the largest logit
ROUNDED = 5e-2  # bfloat16; either side rounds, and not at the same places


@pytest.fixture(scope="module")
def unified(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    folder = tmp_path_factory.mktemp("unified")
    convert(checkpoint, folder)
    return folder


@pytest.mark.parametrize("weights", ["inside", "beside"])
def test_builds(unified: Path, weights: str, tmp_path: Path) -> None:
    engine = build_engine(
        unified,
        tmp_path / "engine",
        dtype="bfloat16",
        weights=weights,
        max_seq_len=512,
        max_num_tokens=512,
        compute_capabilities=("8.0", "8.6", "8.9", "12.0", "12.1"),
    )
    builder = json.loads((engine / "config.json").read_text())["builder"]
    assert builder["layers"]["attention_output"] == 30
    # 134.5 million weights of two bytes; the head is the embedding.
    size = builder["engine"]["bytes"] - (269_030_000 if weights == "inside" else 0)
    assert 0 < size < 50_000_000


def test_logits_equal_those_of_the_torch_runtime(
    checkpoint: Path,  # noqa: F811
    unified: Path,
    tmp_path: Path,
) -> None:
    engine = load_engine(checkpoint, tmp_path, dtype="float32")
    decoder = InterpretedDecoder(build_network(unified, dtype="float32"))
    prefill_decode_verify(SideBySide(decoder, engine, tolerance=TOLERANCE))


def test_rounded_logits_are_near_those_of_the_torch_runtime(
    checkpoint: Path,  # noqa: F811
    unified: Path,
    tmp_path: Path,
) -> None:
    engine = load_engine(checkpoint, tmp_path, dtype="bfloat16")
    decoder = InterpretedDecoder(build_network(unified), evaluated_in=None)
    prefill_decode_verify(SideBySide(decoder, engine, tolerance=ROUNDED))
