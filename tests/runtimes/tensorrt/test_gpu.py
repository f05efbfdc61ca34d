"""The quickstart pair on a GPU that TensorRT for RTX runs on: what is built is what runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specpipe.machine.gpus import gpus_here
from specpipe.runtimes.pair.engine import Engine
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.runtime import load_runtime
from specpipe.runtimes.tensorrt.build import BuildTensorRTEngine
from specpipe.runtimes.tensorrt.cuda_runner import KERNELS_NAME
from specpipe.runtimes.tensorrt.fit import buildable, named
from specpipe.speculative.request import Request
from specpipe.text.tokenizer import Tokenizer
from tests.runtimes.table_engine import ids, run
from tests.runtimes.torch.engines import build_engine

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "models" / "python-code"
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (ROOT / "benchmarks" / "prompts.jsonl").read_text().splitlines()
][:8]
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.03}  # relative to the largest logit
OPTIONS = PairOptions(num_draft_tokens=4, adaptive=False)


@pytest.fixture(scope="module")
def capability() -> str:
    """The compute capability of the first GPU that an engine can be built for."""
    pytest.importorskip("tensorrt_rtx")
    pytest.importorskip("cuda.bindings.runtime")
    found = gpus_here()
    if not (capabilities := buildable(found)):
        pytest.skip(f"TensorRT for RTX does not run on {', '.join(named(found)) or 'this GPU'}")
    return capabilities[0]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(QUICKSTART / "target")


@pytest.fixture(scope="module", params=TOLERANCES)
def folder(
    request: pytest.FixtureRequest, capability: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """{draft,target}/{torch,tensorrt}: the torch runtime's engines are float32."""
    folder = tmp_path_factory.mktemp(request.param)
    limits = {"max_batch_size": 8, "max_seq_len": 1024, "max_draft_len": 4, "max_num_tokens": 256}
    for role in ("draft", "target"):
        torch_engine = build_engine(
            QUICKSTART / role, folder / role / "torch", dtype="float32", **limits
        )
        engine = folder / role / "tensorrt"
        engine.mkdir()
        BuildTensorRTEngine(
            role=role,  # type: ignore[arg-type]
            checkpoint=torch_engine.parent / "checkpoint",
            dtype=request.param,
            library="tensorrt_rtx",
            compute_capabilities=(capability,),
            weights="inside",
            weight_streaming=False,
            **limits,
        ).run(engine)
    return folder


@pytest.fixture(scope="module")
def pairs(folder: Path, tokenizer: Tokenizer) -> Iterator[dict[str, EnginePair]]:
    """The pair under both runtimes; that of torch computes on the CPU."""
    found = {}
    for name, engine in (("torch", "torch/engine"), ("tensorrt", "tensorrt")):
        pair = load_runtime(name).load_pair(
            folder / "draft" / engine, folder / "target" / engine, OPTIONS, tokenizer.detokenizer
        )
        assert isinstance(pair, EnginePair)
        found[name] = pair
    yield found
    for pair in found.values():
        pair.close()


def answers(pair: EnginePair, tokenizer: Tokenizer, num_draft_tokens: int) -> list[list[int]]:
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=tuple(tokenizer.encode(prompt)),
            max_tokens=32,
            num_draft_tokens=num_draft_tokens,
            end_token_ids=tokenizer.end_token_ids,
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    chunks = run(pair, requests)
    return [ids(chunks[request.request_id]) for request in requests]


def logits_of(engine: Engine, prompts: list[list[int]]) -> torch.Tensor:
    """Prefill of prompts of different lengths, then steps of some of them, and verification."""
    sequences = [engine.allocate(prompt_length=len(p), max_tokens=1000) for p in prompts]
    parts = []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        parts.append(engine.forward([(sequence, prompt[:-12])], [1]).clone())
    for first, counts in ((12, (1, 1, 1, 1)), (11, (5, 1, 0, 3)), (6, (2, 0, 4, 5))):
        batch = [
            (sequence, prompt[-first : count - first])
            for sequence, prompt, count in zip(sequences, prompts, counts, strict=True)
            if count
        ]
        asked = [len(tokens) for _, tokens in batch]
        parts.append(engine.forward(batch, asked).clone())
    for sequence in sequences:
        engine.free(sequence)
    return torch.cat(parts)


@pytest.mark.parametrize("role", ["draft", "target"])
def test_logits_are_those_of_the_torch_runtime(
    folder: Path, pairs: dict[str, EnginePair], tokenizer: Tokenizer, role: str
) -> None:
    prompts = [tokenizer.encode(prompt)[: 20 + 30 * n] for n, prompt in enumerate(PROMPTS[:4])]
    found, expected = (
        logits_of(getattr(pairs[name], f"_{role}"), prompts) for name in ("tensorrt", "torch")
    )
    tolerance = next(t for dtype, t in TOLERANCES.items() if folder.name.startswith(dtype))
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_greedy_output_is_that_of_the_target_alone(
    folder: Path, pairs: dict[str, EnginePair], tokenizer: Tokenizer, num_draft_tokens: int
) -> None:
    if not folder.name.startswith("float32"):
        pytest.skip("half precision has ties, which a block of another shape may break otherwise")
    alone = answers(pairs["tensorrt"], tokenizer, 0)
    assert answers(pairs["tensorrt"], tokenizer, num_draft_tokens) == alone
    assert alone == answers(pairs["torch"], tokenizer, 0)


def test_compiled_kernels_are_kept(folder: Path, pairs: dict[str, EnginePair]) -> None:
    for role in ("draft", "target"):
        assert (folder / role / "tensorrt" / KERNELS_NAME).stat().st_size > 0
