"""A stand-in for TensorRT whose engines are rules, so that every mistake with memory shows.

It has what the runtime uses of the library, and does what NVIDIA documents of it: a call that is
refused returns False or None and logs why. An engine keeps token ids where keys and values would
be, reads them back from there, and scores them with a model of `tests/speculative/table.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.parallel_draft import MASK_KEY, ParallelDraft
from specpipe.runtimes.pair.pair import Pair, PairOptions
from specpipe.runtimes.tensorrt import shapes
from specpipe.runtimes.tensorrt.build import ENGINE_KIND
from specpipe.runtimes.tensorrt.cuda import Cuda
from specpipe.runtimes.tensorrt.cuda_runner import CudaRunner
from specpipe.runtimes.tensorrt.engine import TensorRTEngine
from specpipe.runtimes.tensorrt.engine_config import TensorRTEngineSpec
from specpipe.runtimes.torch.pair import pair_of
from tests.runtimes.table_engine import HasLogits
from tests.runtimes.tensorrt.gpus import Gpu, HostGpu
from tests.speculative.table import WordDetokenizer
from tests.toy import toy_config

VERSION = "1.7.1.116"
NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE = 2, 2, 8

UNIFIED = unified_config(
    toy_config(
        dtype="float32",
        num_hidden_layers=NUM_LAYERS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        tie_word_embeddings=True,
    )
).plain()


def write_engine(
    folder: Path,
    model: str = "target",
    *,
    vocab_size: int = 104,
    max_batch_size: int = 4,
    max_seq_len: int = 500,
    max_draft_len: int = 8,
    max_num_tokens: int = 16,
    mask_token_id: int | None = None,
    weights: Mapping[str, Sequence[int]] | None = None,
    **builder: Any,
) -> Path:
    """Writes an engine's folder as a build does; the engine is of the model of that name.

    mask_token_id  of a draft that proposes in one pass
    weights  shape of each, for weights that are inputs
    builder  entries of config.json's `builder` that are to be otherwise
    """
    folder.mkdir(parents=True)
    profiles = shapes.profiles(
        role="target",
        max_batch_size=max_batch_size,
        max_draft_len=max_draft_len,
        max_num_tokens=max_num_tokens,
        is_parallel=mask_token_id is not None,
    )
    capacity = shapes.capacity(max_seq_len, max_draft_len, is_parallel=mask_token_id is not None)
    said = {} if mask_token_id is None else {MASK_KEY: mask_token_id}
    ranges = [
        profile.shapes(
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            head_size=HEAD_SIZE,
            capacity=capacity,
        )
        for profile in profiles
    ]
    weights = weights or {}
    plan = {
        "model": model,
        "capacity": capacity,
        "profiles": ranges,
        "weights": dict(weights),
    }
    (folder / "rank0.engine").write_text(json.dumps(plan))
    data = (folder / "rank0.engine").read_bytes()
    varying = {name: [-1] * len(shape) for name, (_, _, shape) in ranges[0].items()}
    varying |= {
        name: [-1, NUM_KV_HEADS, capacity, HEAD_SIZE] for name in shapes.cache_names(NUM_LAYERS)
    }
    config = {
        "version": "0.1",
        "runtime": ENGINE_KIND,
        "pretrained_config": UNIFIED | {"vocab_size": vocab_size} | said,
        "build_config": {
            "max_batch_size": max_batch_size,
            "max_seq_len": max_seq_len,
            "max_num_tokens": max_num_tokens,
            "max_draft_len": max_draft_len,
            "dtype": "float32",
        },
        "builder": {
            "library": "tensorrt_rtx",
            "library_version": VERSION,
            "compute_capabilities": ["8.0", "8.6", "8.9", "12.0", "12.1"],
            "weights": "beside" if weights else "inside",
            "weight_streaming": False,
            "engine": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
            "capacity": capacity,
            "profiles": [profile.as_json() for profile in profiles],
            "inputs": [
                {"name": name, "dtype": "float", "shape": list(shape)}
                for name, shape in {**varying, **weights}.items()
            ],
            **builder,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class TableLibrary:
    """Stands for the module `tensorrt_rtx`."""

    __version__ = VERSION
    ExecutionContextAllocationStrategy = SimpleNamespace(ON_PROFILE_CHANGE="on profile change")

    class ILogger:
        ERROR, INTERNAL_ERROR = "error", "internal error"

    def __init__(
        self, gpu: Gpu, models: Mapping[str, HasLogits], *, compiles_when_run: bool = True
    ) -> None:
        """TensorRT for RTX compiles kernels when it runs; TensorRT has them in the engine."""
        self.gpu, self.models, self.compiles_when_run = gpu, models, compiles_when_run
        self.context_class = TableContext
        self.engines: list[TableEngine] = []

    def Runtime(self, logger: Any) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda data: self._load(bytes(data), logger))

    def _load(self, data: bytes, logger: Any) -> TableEngine | None:
        try:
            plan = self.plan_of(data)
        except ValueError:
            logger.log("error", "header.magicTag is not that of an engine")
            return None
        self.engines.append(TableEngine(self, plan, logger))
        return self.engines[-1]

    def plan_of(self, data: bytes) -> Mapping[str, Any]:
        """What the engine of these bytes takes, as `write_engine` wrote it."""
        plan: Mapping[str, Any] = json.loads(data)
        return plan


class TableEngine:
    """Stands for an ICudaEngine."""

    def __init__(self, library: TableLibrary, plan: Mapping[str, Any], logger: Any) -> None:
        self.library, self.plan, self.logger = library, plan, logger
        self.model = library.models[plan["model"]]
        self.cache_names = [name for name in plan["profiles"][0] if "_cache." in name]
        self.contexts: list[TableContext] = []
        self.weight_streaming_budget_v2: int | None = None

    def get_weight_streaming_automatic_budget(self) -> int:
        return 12345

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(strategy=None, cache=None)
        config.set_execution_context_allocation_strategy = lambda s: setattr(config, "strategy", s)
        if self.library.compiles_when_run:
            config.create_runtime_cache = lambda: RuntimeCache(self)
            config.set_runtime_cache = lambda cache: setattr(config, "cache", cache) or True
        return config

    def create_execution_context(self, config: Any) -> TableContext:
        assert config.strategy == "on profile change"
        assert (config.cache is not None) == self.library.compiles_when_run
        self.contexts.append(self.library.context_class(self))
        return self.contexts[-1]


class RuntimeCache:
    """Stands for an IRuntimeCache; each execution compiles a kernel."""

    def __init__(self, engine: TableEngine) -> None:
        self.engine, self.read = engine, b""

    def deserialize(self, data: bytes) -> bool:
        self.read = data
        return data.startswith(b"kernels")

    def serialize(self) -> memoryview:
        return memoryview(b"kernels of %d runs" % sum(c.num_runs for c in self.engine.contexts))


class TableContext:
    """Stands for an IExecutionContext."""

    def __init__(self, engine: TableEngine) -> None:
        self.engine, self.gpu = engine, engine.library.gpu
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profile: int | None = None
        self.num_runs = 0
        self.num_calls = 0
        """Of what sets a shape or an address."""

    def set_optimization_profile_async(self, index: int, stream: Any) -> bool:
        if index >= len(self.engine.plan["profiles"]):
            return self._refused(f"there is no profile {index}")
        self.profile = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.num_calls += 1
        assert self.profile is not None
        least, _, greatest = self.engine.plan["profiles"][self.profile].get(name, ([], [], []))
        fits = len(shape) == len(least) and all(
            low <= size <= high for low, size, high in zip(least, shape, greatest, strict=True)
        )
        if not fits:
            return self._refused(f"{name} {shape} is outside profile {self.profile}")
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.num_calls += 1
        if name not in self._tensors():
            return self._refused(f"there is no tensor {name}")
        if address % 256:
            return self._refused(f"{address:#x}, the address of {name}, is not aligned")
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: Any) -> bool:
        inputs = self.engine.plan["profiles"][0]
        if missing := sorted({*inputs} - {*self.shapes}):
            return self._refused(f"the shapes of {missing} are not set")
        if missing := sorted(self._tensors() - {*self.addresses}):
            return self._refused(f"the addresses of {missing} are not set")
        for name in self.engine.cache_names:
            if self.addresses[name] != self.addresses[f"{name}.out"]:
                return self._refused(f"{name} and its output should alias, but addresses differ")
        bound, sizes = dict(self.addresses), dict(self.shapes)
        self.gpu.enqueue(stream, lambda: self.run(bound, sizes))
        self.num_runs += 1
        return True

    def _tensors(self) -> set[str]:
        caches = {f"{name}.out" for name in self.engine.cache_names}
        plan = self.engine.plan
        return {*plan["profiles"][0], *plan["weights"], *caches, shapes.LOGITS}

    def run(self, addresses: Mapping[str, int], sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Does what was asked of the stream, with the shapes and addresses of then."""

        def read(name: str, dtype: type[Any]) -> np.ndarray:
            data = self.gpu.read(addresses[name], 4 * prod(sizes[name]))
            return np.frombuffer(data, dtype).reshape(sizes[name]).copy()

        ids, positions = read(shapes.INPUT_IDS, np.int32), read(shapes.POSITION_IDS, np.int32)
        starts, rows = read(shapes.WRITE_INDICES, np.int32), read(shapes.LOGITS_INDICES, np.int32)
        batch_size, num_tokens = ids.shape
        capacity = self.engine.plan["capacity"]
        assert (positions == starts[:, None] + np.arange(num_tokens)).all()
        assert (read(shapes.KEY_VALUE_LENGTHS, np.int32) == starts + num_tokens).all()
        assert (starts >= 0).all() and (starts + num_tokens <= capacity).all()
        assert ((ids >= 0) & (ids < self.engine.model.vocab_size)).all()
        caches = {name: read(name, np.float32) for name in self.engine.cache_names}
        for index, (name, cache) in enumerate(caches.items()):
            for b, start in enumerate(starts):
                cache[b, :, start : start + num_tokens] = ids[b, None, :, None] * (index + 1)
            self.gpu.write(addresses[name], cache.tobytes())
        logits = [self._score(caches, int(row) // num_tokens, int(row), positions) for row in rows]
        self.gpu.write(addresses[shapes.LOGITS], np.stack(logits).astype(np.float32).tobytes())

    def _score(
        self, caches: Mapping[str, np.ndarray], b: int, row: int, positions: np.ndarray
    ) -> np.ndarray:
        """The logits of a row; a NaN anywhere in its slot comes through, as 0 times NaN does."""
        if any(np.isnan(cache[b]).any() for cache in caches.values()):
            return np.full(self.engine.model.vocab_size, np.nan)
        length = positions.reshape(-1)[row] + 1
        text = [cache[b, :, :length] / (index + 1) for index, cache in enumerate(caches.values())]
        token_ids = text[0][0, :, 0]
        assert all((kept == token_ids[None, :, None]).all() for kept in text)
        return self.engine.model.logits([int(i) for i in token_ids], 1)[0]

    def _refused(self, why: str) -> bool:
        self.engine.logger.log("error", why)
        return False


@contextmanager
def tensorrt_pair(
    folder: Path, target: HasLogits, draft: HasLogits, detokenizer: Any = None, **options: Any
) -> Iterator[Pair]:
    """A pair whose engines the TensorRT runtime runs on a GPU in host memory."""
    gpu = HostGpu()
    trt = TableLibrary(gpu, {"target": target, "draft": draft})
    settings = {"max_batch_size": 4, "max_seq_len": 500, "max_num_tokens": 16, "adaptive": False}
    parallel: ParallelDraft | None = options.get("parallel")
    masks = {"draft": None if parallel is None else parallel.mask_token_id, "target": None}
    specs = {
        role: TensorRTEngineSpec.read(
            write_engine(
                folder / role, role, vocab_size=model.vocab_size, mask_token_id=masks[role]
            )
        )
        for role, model in (("draft", draft), ("target", target))
    }
    runners = {role: CudaRunner(spec, 0, trt=trt, cuda=Cuda(gpu)) for role, spec in specs.items()}
    engines = {role: TensorRTEngine(specs[role], runner) for role, runner in runners.items()}
    pair = pair_of(
        engines["draft"],
        engines["target"],
        PairOptions(**{**settings, **options}),  # type: ignore[arg-type]
        detokenizer or (lambda prompt, **_: WordDetokenizer()),
    )
    yield pair
    assert all(engine.can_admit(1) for engine in engines.values())
    for runner in runners.values():
        runner.close()
    assert (gpu.device_memory, gpu.host_memory, gpu.streams) == ({}, {}, {})
