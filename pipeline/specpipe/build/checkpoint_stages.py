"""The stages from a checkpoint to what a runtime reads of it."""

from __future__ import annotations

from specpipe.build.stages.calibrate import Calibrate
from specpipe.build.stages.convert import Convert
from specpipe.build.stages.export import Export
from specpipe.build.stages.quantize import Quantize
from specpipe.quantization.quantized_config import check_export
from specpipe.runtimes.plan import EngineStages, PairPlan, Side, checkpoint_dir, huggingface_dir
from specpipe.runtimes.runtime import require_installed
from specpipe.stage import PlannedStage, naming


def side_stages(pair: PairPlan, side: Side, engine: EngineStages) -> tuple[PlannedStage, ...]:
    """Returns all stages from a Hugging Face checkpoint to its engine."""
    if engine.reads == "folder":
        return engine.stages
    return *_checkpoint_stages(pair, side, engine.reads == "huggingface"), *engine.stages


def _checkpoint_stages(pair: PairPlan, side: Side, huggingface: bool) -> tuple[PlannedStage, ...]:
    """Returns the stages to what an engine is made of; the config may ask for an export besides.

    A plain checkpoint is converted, and so is one that is quantized already. The last stage of one
    that the config quantizes makes what the engine reads.
    """
    unified = pair.measures or not huggingface  # what quantization costs is measured on it
    scheme = side.checkpoint.quantization
    if scheme is None:
        convert = Convert(
            side.role,
            side.folder,
            tp_size=side.checkpoint.tp_size,
            pp_size=side.checkpoint.pp_size,
            limits=side.limits,
        )
        # Plain weights are raw bytes; those of others are taken apart in torch.
        require = None if side.unified.format is None else _require_torch
        return (PlannedStage(convert, checkpoint_dir(side), side.fetch, require),)
    if scheme.export or huggingface:
        with naming(side.role):
            check_export(side.unified)
    stages = []
    scales = side.artifacts / "scales" if scheme.needs_data else None
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
    exported = PlannedStage(export, huggingface_dir(side), side.fetch, _require_torch)
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
        )
        stages.append(PlannedStage(quantize, checkpoint_dir(side), side.fetch, _require_torch))
    if huggingface:
        stages.append(exported)
    return tuple(stages)


def _require_torch() -> None:
    require_installed("quantization", "torch", extra="quantize")
