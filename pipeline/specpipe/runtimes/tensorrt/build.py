"""Unified checkpoint → an engine folder of the TensorRT runtime.

The folder holds `config.json` (`version`, `pretrained_config` and `build_config` as trtllm-build
has them, and our own `builder`), `rank0.engine`, and with `engine.weights: beside` the weights in
`rank0_managed_weights.safetensors`. With those beside it, the engine depends on the shape of a
checkpoint alone: other weights of the same shape take no build.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from specpipe.checkpoints.unified import load_unified
from specpipe.checkpoints.unified_config import UnifiedConfig, read_unified_config
from specpipe.errors import EngineBuildError
from specpipe.machine.gpus import gpus_here
from specpipe.machine.own_json import write_object
from specpipe.machine.signals import in_thread
from specpipe.progress import count
from specpipe.roles import Role
from specpipe.runtimes.plan import check_context
from specpipe.runtimes.repository_layout import link_file
from specpipe.runtimes.tensorrt import library as libraries
from specpipe.runtimes.tensorrt import shapes
from specpipe.runtimes.tensorrt.network import build_decoder, check_supported
from specpipe.stage import StageInputs
from specpipe.version import __version__

ENGINE_KIND = {"name": "tensorrt", "format": 1}
"""Stands in an engine's config.json as `runtime`; the format numbers what the network takes."""

CONFIG_NAME, ENGINE_NAME, WEIGHTS_NAME = (
    "config.json",
    "rank0.engine",
    "rank0_managed_weights.safetensors",
)

# NVIDIA TensorRT documentation, Precision Control, "Algorithm Selection and Reproducible Builds";
# two builds of the quickstart pair with tensorrt_rtx, without a GPU, differed in every engine.
_VARIES = {
    "tensorrt": "TensorRT chooses kernels by timing them",
    "tensorrt_rtx": "TensorRT for RTX writes other bytes each time",
}


@dataclass(frozen=True, kw_only=True)
class BuildTensorRTEngine:
    """Builds the network of one checkpoint.

    checkpoint            a unified checkpoint of any number of ranks
    compute_capabilities
            of the GPUs that will run it, as "8.9"; empty for library tensorrt, which builds for the
            GPU that it finds
    weights
            where they are: in the engine, or in a file beside it, which `PlaceWeights` writes
    """

    role: Role
    checkpoint: Path
    max_batch_size: int
    max_seq_len: int
    max_draft_len: int
    max_num_tokens: int
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    library: Literal["tensorrt_rtx", "tensorrt"]
    compute_capabilities: tuple[str, ...]
    weights: Literal["inside", "beside"]
    weight_streaming: bool

    @property
    def name(self) -> str:
        return f"{self.role}/build_{'engine' if self.weights == 'inside' else 'plan'}"

    def inputs(self) -> StageInputs:
        settings = asdict(self)
        del settings["role"], settings["checkpoint"]
        is_whole = self.weights == "inside"
        return StageInputs(
            files=(self.checkpoint if is_whole else self.checkpoint / CONFIG_NAME,),
            settings={"format": ENGINE_KIND["format"], **settings},
            libraries=(libraries.DISTRIBUTIONS[self.library],),
            varies=f"{ENGINE_NAME}, and its digest in {CONFIG_NAME}: {_VARIES[self.library]}",
        )

    def run(self, out: Path) -> None:
        # Deciding whether to build must not take the time that importing NumPy does.
        from specpipe.runtimes.tensorrt.weights import CheckpointWeights, ShapesOnly

        config = read_unified_config(self.checkpoint)
        check_supported(self.role, config, max_seq_len=self.max_seq_len)
        check_context(self.role, config, self.max_seq_len)
        dtype = config.dtype if self.dtype == "auto" else self.dtype
        weights = (
            CheckpointWeights(self.role, load_unified(self.checkpoint), dtype)
            if self.weights == "inside"
            else ShapesOnly(config, dtype)
        )
        builder = self._build(out / ENGINE_NAME, config, weights)
        document = {
            "version": __version__,
            "runtime": ENGINE_KIND,
            "pretrained_config": config.plain(),
            "build_config": {
                "max_batch_size": self.max_batch_size,
                "max_seq_len": self.max_seq_len,
                "max_num_tokens": self.max_num_tokens,
                "max_draft_len": self.max_draft_len,
                "max_beam_width": 1,
                "kv_cache_type": "CONTINUOUS",
                "strongly_typed": True,
                "weight_streaming": self.weight_streaming,
                "dtype": dtype,
            },
            "builder": builder,
        }
        write_object(out / CONFIG_NAME, document)

    def _build(self, path: Path, config: UnifiedConfig, weights: Any) -> dict[str, Any]:
        """Writes the engine and returns what config.json is to say about it."""
        from specpipe.runtimes.tensorrt.graph import Graph, kinds

        trt = libraries.load(self.library)
        logger = libraries.make_logger(trt)
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        graph = Graph(trt, network, weights, weights_are_inputs=self.weights == "beside")
        is_parallel = config.parallel is not None
        capacity = shapes.capacity(self.max_seq_len, self.max_draft_len, is_parallel=is_parallel)
        build_decoder(graph, config, capacity=capacity)
        profiles = shapes.profiles(
            role=self.role,
            max_batch_size=self.max_batch_size,
            max_draft_len=self.max_draft_len,
            max_num_tokens=self.max_num_tokens,
            is_parallel=is_parallel,
        )
        builder_config = self._builder_config(trt, builder, config, profiles, capacity)
        digest = _write_plan(trt, builder, network, builder_config, path)
        if digest is None:
            raise EngineBuildError(
                f"{self.role}: {self.library} {trt.__version__} built no engine:\n"
                f"{libraries.last_errors(logger)}"
            )
        layers, precisions = kinds(network)
        return {
            "library": self.library,
            "library_version": trt.__version__,
            "compute_capabilities": list(self.compute_capabilities) or _this_gpu(),
            "weights": self.weights,
            "weight_streaming": self.weight_streaming,
            "engine": {"bytes": path.stat().st_size, "sha256": digest},
            "capacity": capacity,
            "profiles": [profile.as_json() for profile in profiles],
            "inputs": _tensors(network.get_input, network.num_inputs),
            "outputs": _tensors(network.get_output, network.num_outputs),
            "layers": dict(sorted(layers.items())),
            "precisions": dict(sorted(precisions.items())),
        }

    def _builder_config(
        self, trt: Any, builder: Any, config: UnifiedConfig, profiles: Any, capacity: int
    ) -> Any:
        settings = builder.create_builder_config()
        settings.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        # TF32 would round what is asked to be float32.
        settings.clear_flag(trt.BuilderFlag.TF32)
        if self.weight_streaming:
            settings.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
        if self.compute_capabilities:
            settings.num_compute_capabilities = len(self.compute_capabilities)
            for index, capability in enumerate(self.compute_capabilities):
                member = getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}")
                settings.set_compute_capability(member, index)
        for profile in profiles:
            ranges = builder.create_optimization_profile()
            for name, (low, best, high) in profile.shapes(
                num_layers=config.num_hidden_layers,
                num_kv_heads=config.num_key_value_heads,
                head_size=config.head_size,
                capacity=capacity,
            ).items():
                ranges.set_shape(name, low, best, high)
            settings.add_optimization_profile(ranges)
        return settings


@dataclass(frozen=True, kw_only=True)
class PlaceWeights:
    """Puts the weights of a checkpoint beside an engine that was built for its shape."""

    role: Role
    plan: Path
    checkpoint: Path

    @property
    def name(self) -> str:
        return f"{self.role}/place_weights"

    def inputs(self) -> StageInputs:
        return StageInputs(files=(self.plan, self.checkpoint), settings={})

    def run(self, out: Path) -> None:
        from specpipe.runtimes.tensorrt.weights import CheckpointWeights

        document = json.loads((self.plan / CONFIG_NAME).read_bytes())
        checkpoint = load_unified(self.checkpoint)
        weights = CheckpointWeights(self.role, checkpoint, document["build_config"]["dtype"])
        weights.place(out / WEIGHTS_NAME)
        link_file(self.plan / ENGINE_NAME, out / ENGINE_NAME)
        document["builder"]["weights_bytes"] = (out / WEIGHTS_NAME).stat().st_size
        write_object(out / CONFIG_NAME, document)


def _write_plan(trt: Any, builder: Any, network: Any, config: Any, path: Path) -> str | None:
    """Builds into a file, piece by piece; returns its SHA-256, None where the library failed."""
    digest = hashlib.sha256()
    with path.open("wb") as file, count(None, "steps") as steps:

        class Writer(trt.IStreamWriter):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.IStreamWriter.__init__(self)

            def write(self, data: bytes) -> int:
                digest.update(data)
                return file.write(data)

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.IProgressMonitor.__init__(self)
                self._whole = ""

            def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:
                if parent is None:
                    self._whole = name
                    steps.expect(num_steps)

            def step_complete(self, name: str, step: int) -> bool:
                if name == self._whole:
                    steps.advance()
                return True

            def phase_finish(self, name: str) -> None: ...

        def build() -> Any:
            writer, config.progress_monitor = Writer(), Monitor()
            return builder.build_serialized_network_to_stream(network, config, writer)

        is_built = in_thread(build)
    return digest.hexdigest() if is_built else None


def _tensors(get: Any, count: int) -> list[dict[str, Any]]:
    return [
        {"name": tensor.name, "dtype": tensor.dtype.name.lower(), "shape": list(tensor.shape)}
        for tensor in map(get, range(count))
    ]


def _this_gpu() -> list[str]:
    return sorted({gpu.compute_capability for gpu in gpus_here()})[:1]
