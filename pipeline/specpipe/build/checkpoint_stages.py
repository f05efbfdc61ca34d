"""The stages from a checkpoint to what a runtime reads of it."""

from __future__ import annotations

from specpipe.build.stages.calibrate import Calibrate
from specpipe.build.stages.convert import Convert
from specpipe.build.stages.export import Export
from specpipe.build.stages.quantize import Quantize
from specpipe.checkpoints.trtllm_build import fit_trtllm_build
from specpipe.machine.libraries import require_installed
from specpipe.quantization.quantized_config import check_export
from specpipe.runtimes.plan import EngineStages, PairPlan, Side
from specpipe.stage import PlannedStage, naming


def side_stages(pair: PairPlan, side: Side, engine: EngineStages) -> tuple[PlannedStage, ...]:
    """Returns all stages from a Hugging Face checkpoint to its engine."""
    if engine.reads == "folder":
        return engine.stages
    return *_checkpoint_stages(pair, side, engine), *engine.stages


def _checkpoint_stages(
    pair: PairPlan, side: Side, engine: EngineStages
) -> tuple[PlannedStage, ...]:
    """The stages to what an engine is made of; the config may ask for an export besides.

    A plain checkpoint is converted, and so is one that is quantized already. The last stage of one
    that the config quantizes makes what the engine reads.
    """
    huggingface = engine.reads == "huggingface"
    unified = pair.measures or not huggingface  # what quantization costs is measured on it
    # Set only where it changes something, so that no other checkpoint is made again.
    for_trtllm_build = engine.is_by_trtllm_build and fit_trtllm_build(side.unified) != side.unified
    scheme = side.checkpoint.quantization
    if scheme is None:
        convert = Convert(
            side.role,
            side.folder,
            tp_size=side.checkpoint.tp_size,
            pp_size=side.checkpoint.pp_size,
            limits=side.limits,
            for_trtllm_build=for_trtllm_build,
        )
        # Plain weights are raw bytes; those of others are taken apart in torch.
        require = None if side.unified.format is None else _require_torch
        return (PlannedStage(convert, side.artifacts.checkpoint, side.fetch, require),)
    if scheme.export or huggingface:
        with naming(side.role):
            check_export(side.unified)
    stages = []
    scales = side.artifacts.scales if scheme.needs_data else None
    if scales is not None:
        calibrate = Calibrate(
            role=side.role,
            checkpoint=side.folder,
            scheme=scheme,
            base_dir=side.base_dir,
            limits=side.limits,
        )
        stages.append(PlannedStage(calibrate, scales, side.fetch, calibrate.require))
    export = Export(
        role=side.role,
        checkpoint=side.folder,
        scales=scales,
        scheme=scheme,
        limits=side.limits,
    )
    exported = PlannedStage(export, side.artifacts.huggingface, side.fetch, _require_torch)
    if scheme.export and not huggingface:
        stages.append(exported)
    if unified:
        quantize = Quantize(
            role=side.role,
            checkpoint=side.folder,
            scales=scales,
            scheme=scheme,
            tp_size=side.checkpoint.tp_size,
            pp_size=side.checkpoint.pp_size,
            limits=side.limits,
            for_trtllm_build=for_trtllm_build,
        )
        stages.append(PlannedStage(quantize, side.artifacts.checkpoint, side.fetch, _require_torch))
    if huggingface:
        stages.append(exported)
    return tuple(stages)


def _require_torch() -> None:
    require_installed("quantization", "torch", extra="quantize")
