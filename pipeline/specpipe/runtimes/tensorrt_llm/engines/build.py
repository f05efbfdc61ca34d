"""Unified checkpoint → engine, by `trtllm-build`.

The engine's folder holds what the builder writes (`config.json`, `rank{i}.engine` and its timing
cache) and `specpipe.json`: the versions and the GPU that serving has to find again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.checkpoints.unified_config import read_unified_config
from specpipe.config.tensorrt_llm_versions import release
from specpipe.errors import CheckpointError, EngineBuildError
from specpipe.runtimes.plan import EngineStages, Side
from specpipe.runtimes.tensorrt_llm.capabilities import capabilities
from specpipe.runtimes.tensorrt_llm.engines import toolbox
from specpipe.runtimes.tensorrt_llm.engines.build_flags import BuildSpec, arguments, as_settings
from specpipe.runtimes.tensorrt_llm.engines.engine_config import (
    FACTS_NAME,
    BuiltEngine,
    Wanted,
    check_built,
)
from specpipe.runtimes.tensorrt_llm.engines.refusals import check_plan, dtype_fault
from specpipe.runtimes.tensorrt_llm.engines.toolbox import BUILDER, File, Tool, Word
from specpipe.runtimes.tensorrt_llm.engines.trtllm_build_log import explain
from specpipe.runtimes.tensorrt_llm.plan import PairPlan
from specpipe.stage import PlannedStage, StageInputs

require = toolbox.require


def engine_stages(
    pair: PairPlan,
) -> tuple[EngineStages, EngineStages]:
    """Plans both engines; raises EngineBuildError for what TensorRT-LLM cannot do."""
    known = capabilities(pair)
    check_plan(pair, known)
    draft, target = pair.draft, pair.target
    return _stages(pair, draft, known["draft"]), _stages(pair, target, known["target"])


def _stages(pair: PairPlan, side: Side, compute_capability: str | None) -> EngineStages:
    settings = pair.engine.tensorrt_llm
    build = BuildEngine(
        checkpoint=side.artifacts.checkpoint,
        spec=BuildSpec(
            role=side.role,
            version=settings.version,
            max_batch_size=pair.engine.max_batch_size,
            max_seq_len=pair.max_seq_len_of(side),
            max_num_tokens=pair.engine.max_num_tokens,
            num_draft_tokens=pair.num_draft_tokens if side.role == "target" else 0,
            quant_algo=side.unified.quantization.quant_algo,
            kv_cache_quant_algo=side.unified.quantization.kv_cache_quant_algo,
            gather_logits=settings.acceptance == "logits",
            flags=settings.build,
            extra_args=settings.extra_build_args,
        ),
        world_size=side.checkpoint.world_size,
        image=settings.build_image,
        gpu_ids=settings.gpu_ids(side.role, side.checkpoint.world_size),
        compute_capability=compute_capability,
    )
    engine = PlannedStage(
        build,
        side.artifacts.engine,
        require=require,
        commands=build.commands,
        tool_facts=build.tool_facts,
    )
    return EngineStages(is_by_trtllm_build=True, stages=(engine,))


@dataclass(frozen=True, kw_only=True)
class BuildEngine:
    """Builds the engine of one role, and holds what came out against what a pair needs.

    image               where `trtllm-build` is taken from if it is not on the PATH
    compute_capability  of the GPU that will serve, as "9.0"; None if it is not known
    """

    checkpoint: Path
    spec: BuildSpec
    world_size: int
    image: str
    gpu_ids: tuple[int, ...]
    compute_capability: str | None

    @property
    def name(self) -> str:
        return f"{self.spec.role}/build_engine"

    def inputs(self) -> StageInputs:
        cache = self.spec.flags.input_timing_cache
        return StageInputs(
            files=(self.checkpoint, *((cache,) if cache is not None else ())),
            settings={
                "version": self.spec.version,
                "image": self.image,
                "compute_capability": self.compute_capability,
                "flags": as_settings(self.spec),
            },
            # NVIDIA TensorRT documentation, Precision Control, "Algorithm Selection and
            # Reproducible Builds".
            varies=f"rank*.engine and the timing cache: {BUILDER} chooses kernels by timing them",
        )

    def tool_facts(self) -> dict[str, str]:
        """Returns the image's digest where docker builds, else the versions of what is here."""
        if not toolbox.is_native():
            return {"image_digest": toolbox.image_digest(self.image) or "unknown"}
        found = toolbox.versions(self._tool())
        return {
            "image_digest": "unknown",  # from within, an image does not tell
            **{name: version or "unknown" for name, version in found.items()},
        }

    def commands(self, out: Path) -> Sequence[Sequence[str]]:
        """Returns the command line that `run` calls."""
        return [self._tool().command_line(self._words(out))]

    def run(self, out: Path) -> None:
        role = self.spec.role
        wanted = self._wanted()
        versions = self._versions()
        outcome = self._tool().run(self._words(out))
        if outcome.exit_code:
            cause = explain(role, outcome.exit_code, outcome.lines)
            raise EngineBuildError(f"{role}: {BUILDER} failed: {cause}")
        engine = check_built(out, wanted)
        text = json.dumps(self._facts(versions, engine), indent=2) + "\n"
        (out / FACTS_NAME).write_text(text, encoding="utf-8")

    def _tool(self) -> Tool:
        return Tool(self.spec.role, "build_engine", self.image, self.gpu_ids)

    def _words(self, out: Path) -> list[Word]:
        cache = self.spec.flags.input_timing_cache
        line = arguments(
            self.spec,
            checkpoint=File(self.checkpoint, "checkpoint"),
            out=File(out, "engine", is_output=True),
            timing_cache=None if cache is None else File(cache, "timing.cache"),
        )
        return [BUILDER, *line]

    def _versions(self) -> dict[str, str | None]:
        """Asks the builder's Python for what will build; refuses another TensorRT-LLM.

        Where it does not tell, the version table does, unless the image is the user's own.
        """
        known = release(self.spec.version)
        is_known_image = toolbox.is_native() or self.image == known.image
        found = toolbox.versions(self._tool())
        installed = found["tensorrt_llm"]
        if installed is not None and installed != self.spec.version:
            place = "on the PATH" if toolbox.is_native() else f"in {self.image}"
            raise EngineBuildError(
                f"{self.spec.role}: {BUILDER} {place} is of TensorRT-LLM {installed}, but "
                f"engine.tensorrt_llm.version is {self.spec.version}: set that to {installed}, or "
                "engine.tensorrt_llm.image to an image that has it"
            )
        return {
            "tensorrt": found["tensorrt"] or (known.tensorrt if is_known_image else None),
            "cuda": found["cuda"] or (known.cuda if is_known_image else None),
        }

    def _facts(self, versions: Mapping[str, str | None], engine: BuiltEngine) -> dict[str, Any]:
        return {
            "tensorrt_llm": engine.version,
            "tensorrt": versions["tensorrt"],
            "cuda": versions["cuda"],
            "compute_capability": self.compute_capability,
            "world_size": engine.world_size,
            "max_batch_size": engine.max_batch_size,
        }

    def _wanted(self) -> Wanted:
        """Reads the checkpoint's config.json; raises what makes it unfit before hours of work."""
        spec = self.spec
        try:
            config = read_unified_config(self.checkpoint)
        except CheckpointError as exc:
            raise EngineBuildError(f"{spec.role}: {exc}") from exc
        fault = dtype_fault(spec.role, config.dtype)
        if fault is not None:
            raise EngineBuildError(fault)
        return Wanted(
            role=spec.role,
            version=spec.version,
            world_size=self.world_size,
            vocab_size=config.vocab_size,
            quant_algo=config.quantization.quant_algo,
            kv_cache_quant_algo=config.quantization.kv_cache_quant_algo,
            max_batch_size=spec.max_batch_size,
            max_seq_len=spec.max_seq_len,
            num_draft_tokens=spec.num_draft_tokens,
            logits_dtype=spec.flags.logits_dtype,
            acceptance="logits" if spec.gather_logits else "exact",
        )
