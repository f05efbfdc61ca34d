"""Whole engines and pairs over the networks that are built, evaluated by the interpreter."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx as trt
import torch

from specpipe.runtimes.pair.engine import Engine
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.tensorrt import shapes
from specpipe.runtimes.tensorrt.build import BuildTensorRTEngine, PlaceWeights
from specpipe.runtimes.tensorrt.cuda import Cuda
from specpipe.runtimes.tensorrt.cuda_runner import CudaRunner
from specpipe.runtimes.tensorrt.engine import TensorRTEngine
from specpipe.runtimes.tensorrt.engine_config import TensorRTEngineSpec
from specpipe.runtimes.torch.engine import TorchEngine
from specpipe.runtimes.torch.pair import pair_of
from specpipe.speculative.request import GREEDY, Request, Sampling
from specpipe.text.tokenizer import Tokenizer
from tests.runtimes.table_engine import ids, run
from tests.runtimes.tensorrt.gpus import HostGpu
from tests.runtimes.tensorrt.interpreter import Interpreter
from tests.runtimes.tensorrt.layers import DTYPES
from tests.runtimes.tensorrt.networks import (
    InterpretedDecoder,
    Network,
    build_network,
    make_toy,
)
from tests.runtimes.tensorrt.table_library import TableContext, TableLibrary, write_engine
from tests.runtimes.torch.engines import load_engine
from tests.speculative.table import TableModel, target_rule

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "models" / "python-code"
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (ROOT / "benchmarks" / "prompts.jsonl").read_text().splitlines()
][:5]
PROMPT_LENGTHS = (3, 118, 32, 100, 17)
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=11, is_seeded=True)
MAX_SEQ_LEN, MAX_DRAFT_LEN, MAX_BATCH_SIZE, MAX_NUM_TOKENS = 256, 4, 3, 32
TOLERANCE = 1e-3  # float32, relative to the largest logit


class InterpretedRunner(InterpretedDecoder):
    """A decoder's network as the `Runner` of an engine."""

    def clear(self, slot: int, start: int, stop: int) -> None:
        for cache in self._caches.values():
            cache[slot, :, start:stop] = 0

    def close(self) -> None:
        pass


def interpreted(checkpoint: Path, work: Path, torch_engine: TorchEngine) -> TensorRTEngine:
    """The engine of a unified checkpoint, with the limits of another runtime's."""
    limits = {"max_seq_len": MAX_SEQ_LEN, "max_draft_len": MAX_DRAFT_LEN}
    network = build_network(checkpoint, dtype="float32", **limits)
    spec = TensorRTEngineSpec.read(
        write_engine(
            work,
            vocab_size=torch_engine.vocab_size,
            max_batch_size=MAX_BATCH_SIZE,
            max_num_tokens=MAX_NUM_TOKENS,
            **limits,
        )
    )
    assert spec.capacity == network.capacity
    return TensorRTEngine(spec, InterpretedRunner(network, num_slots=MAX_BATCH_SIZE))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_slots_and_padding_change_nothing(family: str, tmp_path: Path) -> None:
    """What a pair may do with sequences, at random, beside the torch runtime."""
    checkpoint, yardstick = make_toy(
        tmp_path, family, max_seq_len=MAX_SEQ_LEN, max_draft_len=MAX_DRAFT_LEN
    )
    engine = interpreted(checkpoint, tmp_path / "tensorrt", yardstick)
    draw = random.Random(family)
    sequences: list[tuple[int, int]] = []
    num_compared = 0
    for _ in range(80):
        if len(sequences) < MAX_BATCH_SIZE and draw.random() < 0.3:
            sequences.append(
                tuple(e.allocate(prompt_length=9, max_tokens=9) for e in (engine, yardstick))  # type: ignore[arg-type]
            )
        if sequences and draw.random() < 0.1:
            a, b = sequences.pop(draw.randrange(len(sequences)))
            engine.free(a)
            yardstick.free(b)
        taking = draw.sample(sequences, draw.randint(0, len(sequences)))
        lengths = [draw.choice([1, 1, 2, 4, 5, 17, 40]) for _ in taking]
        if not taking or any(engine.length(a) > MAX_SEQ_LEN - 40 for a, _ in taking):
            continue
        tokens = [draw.choices(range(256), k=length) for length in lengths]
        scored = [draw.randint(0, min(length, MAX_DRAFT_LEN + 1)) for length in lengths]
        found, expected = (
            e.forward([(pair[i], ids) for pair, ids in zip(taking, tokens, strict=True)], scored)
            for i, e in enumerate((engine, yardstick))
        )
        assert found.shape == expected.shape == (sum(scored), 256)
        if sum(scored):
            assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
            num_compared += 1
        for a, b in taking:
            length = engine.length(a) - draw.randint(0, MAX_DRAFT_LEN)
            if length >= 0:
                engine.truncate(a, length)
                yardstick.truncate(b, length)
            assert engine.length(a) == yardstick.length(b)
    assert num_compared > 30


class InterpretedContext(TableContext):
    """An execution context of an engine as built: its network, over the memory that is bound."""

    def run(self, addresses: Mapping[str, int], sizes: Mapping[str, tuple[int, ...]]) -> None:
        definition = self.engine.library.network.definition  # type: ignore[attr-defined]
        inputs = {}
        for index in range(definition.num_inputs):
            tensor = definition.get_input(index)
            shape = sizes.get(tensor.name, tuple(tensor.shape))
            inputs[tensor.name] = at(addresses[tensor.name], shape, DTYPES[tensor.dtype.name])
        logits = Interpreter(trt, definition).run(inputs)[shapes.LOGITS]
        at(addresses[shapes.LOGITS], tuple(logits.shape), torch.float32).copy_(logits)


class InterpretedLibrary(TableLibrary):
    """TensorRT with one engine, whose network is interpreted."""

    def __init__(self, gpu: HostGpu, spec: TensorRTEngineSpec, network: Network) -> None:
        super().__init__(gpu, {"": TableModel(target_rule, spec.vocab_size)})
        self.context_class = InterpretedContext
        self.spec, self.network = spec, network

    def plan_of(self, data: bytes) -> Mapping[str, Any]:
        spec = self.spec
        ranges = [
            profile.shapes(
                num_layers=spec.num_layers,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                capacity=spec.capacity,
            )
            for profile in spec.profiles
        ]
        return {"model": "", "profiles": ranges, "weights": self.network.weights}


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory as a tensor."""
    data = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


@pytest.mark.parametrize(("weights", "dtype"), [("inside", "float32"), ("beside", "bfloat16")])
def test_the_memory_that_is_bound_is_what_the_network_takes(
    weights: Any, dtype: Any, tmp_path: Path
) -> None:
    """An engine folder as built, through everything but CUDA and TensorRT themselves."""
    limits = {"max_seq_len": MAX_SEQ_LEN, "max_draft_len": MAX_DRAFT_LEN}
    checkpoint, _ = make_toy(tmp_path, "qwen2", **limits)
    plan, engine = tmp_path / "plan", tmp_path / "placed"
    plan.mkdir()
    engine.mkdir()
    BuildTensorRTEngine(
        role="target",
        checkpoint=checkpoint,
        max_batch_size=MAX_BATCH_SIZE,
        max_num_tokens=MAX_NUM_TOKENS,
        dtype=dtype,
        library="tensorrt_rtx",
        compute_capabilities=("8.9",),
        weights=weights,
        weight_streaming=False,
        **limits,
    ).run(plan)
    if weights == "beside":
        PlaceWeights(role="target", plan=plan, checkpoint=checkpoint).run(engine)
    else:
        engine = plan
    spec = TensorRTEngineSpec.read(engine)
    network = build_network(
        checkpoint, dtype=dtype, weights_are_inputs=weights == "beside", **limits
    )
    gpu = HostGpu()
    library = InterpretedLibrary(gpu, spec, network)
    bound = TensorRTEngine(spec, CudaRunner(spec, 0, trt=library, cuda=Cuda(gpu)))
    direct = InterpretedRunner(network, num_slots=MAX_BATCH_SIZE, evaluated_in=None)
    yardstick = TensorRTEngine(spec, direct)
    sequences = [
        [e.allocate(prompt_length=40, max_tokens=90) for e in (bound, yardstick)] for _ in range(3)
    ]
    for step in ({1: 37}, {2: 3}, {1: 1, 2: 5}, {0: 2}, {0: 5, 2: 2}, {0: 1, 1: 1, 2: 1}):
        found, expected = (
            e.forward(
                [(sequences[n][i], list(range(9, 9 + length))) for n, length in step.items()],
                [min(length, 5) for length in step.values()],
            )
            for i, e in enumerate((bound, yardstick))
        )
        assert torch.equal(found, expected)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Engine, Engine]]:
    """Draft and target of the quickstart in float32, by what runs them."""
    found: dict[str, list[Engine]] = {"torch": [], "tensorrt": []}
    for role in ("draft", "target"):
        work = tmp_path_factory.mktemp(role)
        yardstick = load_engine(
            QUICKSTART / role, work / "torch", dtype="float32", max_seq_len=MAX_SEQ_LEN
        )
        found["torch"].append(yardstick)
        checkpoint = work / "torch" / "checkpoint"
        found["tensorrt"].append(interpreted(checkpoint, work / "tensorrt", yardstick))
    return {name: (draft, target) for name, (draft, target) in found.items()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(QUICKSTART / "target")


def answers(
    engines: tuple[Engine, Engine],
    tokenizer: Tokenizer,
    sampling: Sampling,
    *,
    num_draft_tokens: int,
    at_once: int,
) -> list[list[int]]:
    options = PairOptions(
        num_draft_tokens=MAX_DRAFT_LEN,
        adaptive=False,
        max_batch_size=at_once,
        max_seq_len=MAX_SEQ_LEN,
        max_num_tokens=MAX_NUM_TOKENS,
    )
    pair: EnginePair = pair_of(*engines, options, tokenizer.detokenizer)
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=tuple(tokenizer.encode(prompt)[:length]),
            max_tokens=12 + index,
            num_draft_tokens=num_draft_tokens,
            sampling=dataclasses.replace(sampling, seed=sampling.seed + index),
            end_token_ids=tokenizer.end_token_ids,
        )
        for index, (prompt, length) in enumerate(zip(PROMPTS, PROMPT_LENGTHS, strict=True))
    ]
    chunks = run(pair, requests)
    return [ids(chunks[request.request_id]) for request in requests]


@pytest.fixture(scope="module")
def target_alone(
    engines: dict[str, tuple[Engine, Engine]], tokenizer: Tokenizer
) -> dict[str, list[list[int]]]:
    """What the target answers by itself under the torch runtime, one request at a time."""
    return {
        name: answers(engines["torch"], tokenizer, sampling, num_draft_tokens=0, at_once=1)
        for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED))
    }


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
def test_greedy_output_is_that_of_the_target_alone(
    engines: dict[str, tuple[Engine, Engine]],
    tokenizer: Tokenizer,
    target_alone: dict[str, list[list[int]]],
    num_draft_tokens: int,
    at_once: int,
) -> None:
    found = answers(
        engines["tensorrt"],
        tokenizer,
        GREEDY,
        num_draft_tokens=num_draft_tokens,
        at_once=at_once,
    )
    assert found == target_alone["greedy"]


def test_seeded_output_is_that_of_the_target_alone(
    engines: dict[str, tuple[Engine, Engine]],
    tokenizer: Tokenizer,
    target_alone: dict[str, list[list[int]]],
) -> None:
    found = answers(engines["tensorrt"], tokenizer, SEEDED, num_draft_tokens=4, at_once=3)
    assert found == target_alone["seeded"]
    assert found != target_alone["greedy"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
