"""A network on a GPU: its memory, and one call that runs it.

What TensorRT asks for (ICudaEngine, IExecutionContext): the output of a KV cache update has the
address of its input; a context runs one profile, and keeps shapes and addresses from run to run.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specpipe.checkpoints.checkpoint import read_blocks, read_safetensors_header
from specpipe.checkpoints.unified_config import DTYPES
from specpipe.errors import CheckpointError, EngineMismatch, RuntimeUnavailable
from specpipe.runtimes.tensorrt import library as libraries
from specpipe.runtimes.tensorrt import shapes
from specpipe.runtimes.tensorrt.build import ENGINE_NAME, WEIGHTS_NAME
from specpipe.runtimes.tensorrt.cuda import Cuda, SharedArrays
from specpipe.runtimes.tensorrt.engine import Int32s, LogitRows, step_inputs
from specpipe.runtimes.tensorrt.engine_config import TensorRTEngineSpec
from specpipe.runtimes.tensorrt.shapes import Profile

KERNELS_NAME = f".{ENGINE_NAME}.kernels"
"""What TensorRT for RTX compiled on this GPU; hidden, as it is no part of the artifact."""


class CudaRunner:
    """The `Runner` of a loaded engine: its KV cache, all it reads and writes, and one stream."""

    def __init__(self, spec: TensorRTEngineSpec, device: int, *, trt: Any, cuda: Cuda) -> None:
        """Loads an engine; that it was built for this GPU and library was checked before."""
        self._spec, self._device, self._trt, self._cuda = spec, device, trt, cuda
        self._logger = libraries.make_logger(trt)
        cuda("cudaSetDevice", device)
        with ExitStack() as resources:
            self._stream = cuda("cudaStreamCreate")
            resources.callback(cuda, "cudaStreamDestroy", self._stream)
            self._inputs = SharedArrays(cuda, resources, _input_sizes(spec), np.int32)
            most_rows = max(profile.logits[2] for profile in spec.profiles)
            sizes = {shapes.LOGITS: most_rows * spec.vocab_size}
            self._logits = SharedArrays(cuda, resources, sizes, np.float32)
            self._cache_bytes = spec.max_batch_size * spec.slot_bytes
            self._caches = cuda.allocate(resources, len(spec.cache_names) * self._cache_bytes)
            self._weights = self._upload_weights(resources)
            self._runtime = trt.Runtime(self._logger)
            self._engine = self._deserialize()
            self._config, self._kernels = self._configure()
            self._contexts = [self._context(index) for index in range(len(spec.profiles))]
            cuda("cudaStreamSynchronize", self._stream)
            self._resources = resources.pop_all()

    def run(
        self, first_slot: int, input_ids: Int32s, write_indices: Int32s, logits_indices: Int32s
    ) -> LogitRows:
        self._cuda("cudaSetDevice", self._device)  # each thread has its own
        inputs = step_inputs(input_ids, write_indices, logits_indices)
        batch_size, num_tokens = input_ids.shape
        context = self._context_for(batch_size, num_tokens, len(logits_indices))
        for name, values in inputs.items():
            self._set_shape(context, name, values.shape)
            self._inputs.host[name][: values.size] = values.reshape(-1)
        if context.batch_size != batch_size:
            shape = (batch_size, *self._spec.inputs[self._spec.cache_names[0]][1:])
            for name in self._spec.cache_names:
                self._set_shape(context, name, shape)
            context.batch_size = batch_size
        if context.first_slot != first_slot:
            for name, address in self._cache_addresses(first_slot):
                self._set_address(context, name, address)
                self._set_address(context, f"{name}.out", address)
            context.first_slot = first_slot
        self._inputs.to_device(self._stream)
        self._check(context.execution.execute_async_v3(self._stream), "did not run")
        self._logits.to_host(self._stream, len(logits_indices) * self._spec.vocab_size)
        self._cuda("cudaStreamSynchronize", self._stream)
        logits: LogitRows = self._logits.host[shapes.LOGITS].reshape(-1, self._spec.vocab_size)
        return logits[: len(logits_indices)]

    def clear(self, slot: int, start: int, stop: int) -> None:
        self._cuda("cudaSetDevice", self._device)
        row_bytes = self._spec.row_bytes
        for _, address in self._cache_addresses(slot):
            self._cuda(
                "cudaMemset2DAsync",
                address + start * row_bytes,
                self._spec.capacity * row_bytes,  # from one head to the next
                0,
                (stop - start) * row_bytes,
                self._spec.num_kv_heads,
                self._stream,
            )

    def close(self) -> None:
        self._cuda("cudaSetDevice", self._device)
        self.keep_kernels()
        self._contexts.clear()
        self._config = self._kernels = self._engine = self._runtime = None
        self._resources.close()

    def keep_kernels(self) -> None:
        """Writes what was compiled on this GPU beside the engine, for the next start.

        Where that cannot be written, the next start compiles again.
        """
        if self._kernels is None:
            return
        path = self._spec.folder / KERNELS_NAME
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            partial.write_bytes(self._kernels.serialize())
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _upload_weights(self, resources: ExitStack) -> dict[str, int]:
        """Copies the weights that lie beside the engine to the GPU; returns their addresses."""
        if self._spec.weights_bytes is None:
            return {}
        path = self._spec.folder / WEIGHTS_NAME
        try:
            tensors = read_safetensors_header(path)
        except CheckpointError as exc:
            raise EngineMismatch(f"{exc}; build the engine again") from exc
        addresses = {}
        for name in self._spec.weight_names:
            info = tensors.get(name)
            expected = math.prod(self._spec.inputs[name]), DTYPES[self._spec.dtype]
            if info is None or (math.prod(info.shape), info.dtype) != expected:
                raise EngineMismatch(f"{path} has no {name} as the engine takes it: build it again")
            addresses[name] = address = self._cuda.allocate(resources, info.num_bytes)
            for block in read_blocks(info):
                self._cuda.copy(address, block.ctypes.data, block.nbytes, "HostToDevice")
                address += block.nbytes
        return addresses

    def _deserialize(self) -> Any:
        path = self._spec.folder / ENGINE_NAME
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan,
        ):
            engine = self._runtime.deserialize_cuda_engine(plan)
        self._check(engine is not None, "was not loaded")
        return engine

    def _configure(self) -> tuple[Any, Any]:
        """Returns how contexts are made, and the kernels that they find or compile, if kept."""
        if self._spec.weight_streaming:
            # What is free now is all for weights: the KV caches are there already.
            budget = self._engine.get_weight_streaming_automatic_budget()
            self._engine.weight_streaming_budget_v2 = budget
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            self._trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        )
        if not hasattr(config, "create_runtime_cache"):
            return config, None  # TensorRT compiles nothing where it runs
        kernels = config.create_runtime_cache()
        with suppress(OSError):
            # False, which means compiling again, for those of another GPU, driver or version.
            kernels.deserialize((self._spec.folder / KERNELS_NAME).read_bytes())
        self._check(config.set_runtime_cache(kernels), "took no runtime cache")
        return config, kernels

    def _context(self, index: int) -> _Context:
        """Makes the context of a profile, with the addresses that stay."""
        execution = self._engine.create_execution_context(self._config)
        self._check(execution is not None, "got no execution context")
        chosen = execution.set_optimization_profile_async(index, self._stream)
        self._check(chosen, f"has no profile {index}")
        context = _Context(execution, self._spec.profiles[index])
        addresses = self._inputs.addresses | self._logits.addresses | self._weights
        for name, address in addresses.items():
            self._set_address(context, name, address)
        return context

    def _context_for(self, *sizes: int) -> _Context:
        """Returns the first context whose profile has B, N and R."""
        for context in self._contexts:
            profile = context.profile
            ranges = (profile.batch, profile.tokens, profile.logits)
            if all(low <= n <= high for n, (low, _, high) in zip(sizes, ranges, strict=True)):
                return context
        raise AssertionError(f"no profile has B, N, R = {sizes}")

    def _cache_addresses(self, slot: int) -> Iterator[tuple[str, int]]:
        """Yields each KV cache and where a slot of it begins."""
        for index, name in enumerate(self._spec.cache_names):
            yield name, self._caches + index * self._cache_bytes + slot * self._spec.slot_bytes

    def _set_shape(self, context: _Context, name: str, shape: tuple[int, ...]) -> None:
        if context.shapes.get(name) != shape:
            self._check(context.execution.set_input_shape(name, shape), f"refused {name} {shape}")
            context.shapes[name] = shape

    def _set_address(self, context: _Context, name: str, address: int) -> None:
        self._check(context.execution.set_tensor_address(name, address), f"has no tensor {name}")

    def _check(self, is_done: bool, fault: str) -> None:
        if not is_done:
            raise RuntimeUnavailable(
                f"the engine of {self._spec.folder} {fault}:\n{libraries.last_errors(self._logger)}"
            )


@dataclass
class _Context:
    """An execution context of one profile, with the shapes and addresses that it keeps."""

    execution: Any
    profile: Profile
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    batch_size: int | None = None
    first_slot: int | None = None


def _input_sizes(spec: TensorRTEngineSpec) -> dict[str, int]:
    """Returns the greatest number of elements of each input of a run."""
    sizes: dict[str, int] = {}
    for profile in spec.profiles:
        batch, tokens, rows = profile.batch[2], profile.tokens[2], profile.logits[2]
        for name, size in (
            (shapes.INPUT_IDS, batch * tokens),
            (shapes.POSITION_IDS, batch * tokens),
            (shapes.WRITE_INDICES, batch),
            (shapes.KEY_VALUE_LENGTHS, batch),
            (shapes.LOGITS_INDICES, rows),
        ):
            sizes[name] = max(size, sizes.get(name, 0))
    return sizes
