"""Decoders for tests: a checkpoint's TensorRT network, interpreted beside the torch runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt_rtx as trt
import torch
from numpy.typing import NDArray
from torch import Tensor

from specpipe.checkpoints.unified import load_unified
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.runtimes.tensorrt import shapes
from specpipe.runtimes.tensorrt.graph import Graph
from specpipe.runtimes.tensorrt.network import build_decoder
from specpipe.runtimes.tensorrt.weights import CheckpointWeights, ShapesOnly
from specpipe.runtimes.torch.engine import TorchEngine
from tests.runtimes.tensorrt.interpreter import Interpreter
from tests.runtimes.tensorrt.layers import DTYPES
from tests.runtimes.torch.engines import load_engine
from tests.toy import write_toy_checkpoint

NUM_SLOTS, MAX_SEQ_LEN, MAX_DRAFT_LEN = 4, 320, 8


def make_toy(
    folder: Path,
    family: str = "llama",
    *,
    torch_dtype: str = "float32",
    max_seq_len: int = MAX_SEQ_LEN,
    max_draft_len: int = MAX_DRAFT_LEN,
    **overrides: Any,
) -> tuple[Path, TorchEngine]:
    """Writes a toy; returns its unified checkpoint and the torch runtime's engine of it."""
    checkpoint = write_toy_checkpoint(folder / "hf", family, **overrides)
    settings = {"max_seq_len": max_seq_len, "max_draft_len": max_draft_len}
    engine = load_engine(checkpoint, folder, dtype=torch_dtype, **settings)
    return folder / "checkpoint", engine


@dataclass(frozen=True)
class Network:
    """A finished network, and what must live as long as it does.

    weights  what a network whose weights are inputs gets with them, by name
    """

    definition: Any
    config: UnifiedConfig
    capacity: int
    weights: Mapping[str, Tensor]
    alive: tuple[Any, ...]


def build_network(
    checkpoint: Path,
    *,
    dtype: str = "bfloat16",
    weights_are_inputs: bool = False,
    max_seq_len: int = MAX_SEQ_LEN,
    max_draft_len: int = MAX_DRAFT_LEN,
    graph_class: type[Graph] = Graph,
) -> Network:
    """Makes the network of a unified checkpoint as a build does, and no engine of it."""
    unified = load_unified(checkpoint)
    numbers = CheckpointWeights("target", unified, dtype)
    given = ShapesOnly(unified.config, dtype) if weights_are_inputs else numbers
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    graph = graph_class(trt, definition, given, weights_are_inputs=weights_are_inputs)
    capacity = shapes.capacity(max_seq_len, max_draft_len)
    build_decoder(graph, unified.config, capacity=capacity)
    inputs = {definition.get_input(i).name: i for i in range(definition.num_inputs)}
    return Network(
        definition=definition,
        config=unified.config,
        capacity=capacity,
        weights={
            name: _shaped_like(definition.get_input(inputs[name]), numbers, dtype)
            for name in numbers.used()
            if name in inputs
        },
        alive=(builder, graph),
    )


def _shaped_like(tensor: Any, weights: CheckpointWeights, dtype: str) -> Tensor:
    stored = torch.from_numpy(weights.array(tensor.name).copy())
    return stored.view(getattr(torch, dtype)).reshape(tuple(tensor.shape))


class InterpretedDecoder:
    """Runs a decoder's network in the interpreter, over the KV cache of some slots.

    evaluated_in  torch.float32, or None to round as the network's types do

    What the caches hold at first must not matter; it is some number, as in memory that was used
    before.
    """

    def __init__(
        self,
        network: Network,
        *,
        num_slots: int = NUM_SLOTS,
        evaluated_in: torch.dtype | None = torch.float32,
    ) -> None:
        self._network = network
        self._interpreter = Interpreter(trt, network.definition, dtype=evaluated_in)
        config = network.config
        shape = (num_slots, config.num_key_value_heads, network.capacity, config.head_size)
        definition, generator = network.definition, torch.Generator().manual_seed(0)
        types = {
            tensor.name: DTYPES[tensor.dtype.name]
            for tensor in map(definition.get_input, range(definition.num_inputs))
        }
        self._caches = {
            name: (100 * torch.randn(shape, generator=generator)).to(evaluated_in or types[name])
            for name in shapes.cache_names(config.num_hidden_layers)
        }
        self._weights = {
            name: weight if evaluated_in is None else weight.to(evaluated_in)
            for name, weight in network.weights.items()
        }

    def run(
        self,
        first_slot: int,
        input_ids: NDArray[np.int32],
        write_indices: NDArray[np.int32],
        logits_indices: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """Runs the rows of input_ids [B, N] in B slots from the first one on.

        Returns the logits [R, V] of the rows b · N + n that logits_indices [R] names.
        """
        inputs = self.inputs(input_ids, write_indices, logits_indices)
        caches = {
            name: cache[first_slot : first_slot + len(input_ids)]
            for name, cache in self._caches.items()
        }
        outputs = self._interpreter.run({**inputs, **caches, **self._weights})
        logits: NDArray[np.float32] = outputs[shapes.LOGITS].numpy()
        return logits

    def inputs(
        self,
        input_ids: NDArray[np.int32],
        write_indices: NDArray[np.int32],
        logits_indices: NDArray[np.int32],
    ) -> dict[str, Tensor]:
        """Returns what the network takes beside caches and weights: shapes.py."""
        _, num_tokens = input_ids.shape
        arrays = {
            shapes.INPUT_IDS: input_ids,
            shapes.POSITION_IDS: write_indices[:, None] + np.arange(num_tokens, dtype=np.int32),
            shapes.WRITE_INDICES: write_indices,
            shapes.KEY_VALUE_LENGTHS: write_indices + np.int32(num_tokens),
            shapes.LOGITS_INDICES: logits_indices,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class SideBySide:
    """The same sequences in the interpreted decoder and in the torch runtime, step by step.

    A step raises AssertionError where logits are apart by more than `tolerance`, relative to the
    largest of the step. Sequences are named by their slots. `worst` is the greatest difference.
    """

    def __init__(
        self, decoder: InterpretedDecoder, engine: TorchEngine, *, tolerance: float
    ) -> None:
        self._decoder, self._engine, self._tolerance = decoder, engine, tolerance
        self._sequences: dict[int, int] = {}
        self._random = np.random.default_rng(0)
        self.worst = 0.0

    def length(self, slot: int) -> int:
        sequence = self._sequences.get(slot)
        return 0 if sequence is None else self._engine.length(sequence)

    def start(self, slot: int, *, prompt_length: int = 1) -> None:
        max_tokens = self._engine.max_seq_len
        self._sequences[slot] = self._engine.allocate(
            prompt_length=prompt_length, max_tokens=max_tokens
        )

    def truncate(self, slot: int, length: int) -> None:
        self._engine.truncate(self._sequences[slot], length)

    def free(self, slot: int) -> None:
        self._engine.free(self._sequences.pop(slot))

    def step(self, batch: Mapping[int, int]) -> None:
        """Appends so many random tokens to each sequence, in one forward over all their slots.

        Rows are padded on the right with random tokens, and slots between that do not take part
        are padding from their length on.
        """
        first, last, num_tokens = min(batch), max(batch), max(batch.values())
        slots = range(first, last + 1)
        input_ids = self._random.integers(0, self._engine.vocab_size, (len(slots), num_tokens))
        lengths = np.array([self.length(slot) for slot in slots], np.int32)
        rows = [
            row * num_tokens + n
            for row, slot in enumerate(slots)
            for n in range(batch.get(slot, 0))
        ]
        logits = self._decoder.run(
            first, input_ids.astype(np.int32), lengths, np.array(rows, np.int32)
        )
        given = [
            (self._sequences[slot], list(map(int, input_ids[slot - first, : batch[slot]])))
            for slot in slots
            if slot in batch
        ]
        expected = self._engine.forward(given, [len(tokens) for _, tokens in given]).numpy()
        self._compare(logits, expected)

    def _compare(self, logits: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        assert logits.shape == expected.shape and logits.dtype == expected.dtype
        difference = float(np.abs(logits - expected).max() / np.abs(expected).max())
        # Written so that NaN fails.
        assert difference <= self._tolerance, f"logits differ by {difference:.2g}"
        self.worst = max(self.worst, difference)


def prefill_decode_verify(pair: SideBySide, *, longest: int = 40) -> None:
    """Takes sequences of different lengths through all that a pair does with an engine."""
    pair.start(1, prompt_length=longest)
    for chunk in (longest - 24, 16, 8):  # a prompt in pieces
        pair.step({1: chunk})
    for slot, length in ((0, 5), (3, 9)):
        pair.start(slot, prompt_length=length)
        pair.step({slot: length})
    pair.step({0: 1, 1: 1, 3: 1})  # decode; slot 2 is free
    pair.step({0: 3, 1: 5, 3: 1})  # verification, each with drafts of its own number
    pair.truncate(1, pair.length(1) - 2)
    pair.truncate(0, pair.length(0) - 1)
    pair.step({0: 1, 3: 1})  # slot 1 runs and sits out
    pair.start(2, prompt_length=7)
    pair.step({2: 7})  # where until now there was padding
    pair.step({0: 2, 1: 4, 2: 1, 3: 5})
    pair.step({0: 1, 1: 1, 2: 1, 3: 1})
    for slot in range(4):
        pair.free(slot)
