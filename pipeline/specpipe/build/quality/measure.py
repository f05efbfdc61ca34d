"""Plain and quantized checkpoints → what quantization costs, and whether that is too much.

Two stages, so that other limits need no new measurement:

quality         report.json and report.txt
quality_limits  kept.json, if nothing costs more than the config allows
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specpipe.build.pairing import PairContract
from specpipe.build.quality.report import (
    PLAIN_FORM,
    REPORT_JSON,
    REPORT_TEXT,
    ModelForm,
    ModelQuality,
    PairingAcceptance,
    QualityReport,
    limit_faults,
    to_text,
)
from specpipe.build.stages.convert import convert
from specpipe.checkpoints.checkpoint import QUANTIZATION_KEYS, checkpoint_files, read_config
from specpipe.checkpoints.family_config import named_dtype, unified_config
from specpipe.checkpoints.files import is_there
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.sizes import kv_cache_bytes_per_token, weights_bytes
from specpipe.checkpoints.unified import load_unified
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.errors import EngineBuildError, RuntimeUnavailable
from specpipe.machine.gpus import gpus_with_memory
from specpipe.machine.memory import format_bytes, total_bytes
from specpipe.progress import phase
from specpipe.quantization.texts import TokenIds, data_file, read_texts
from specpipe.roles import Role
from specpipe.runtimes.runtime import load_runtime
from specpipe.runtimes.torch.build import BuildTorchEngine, compute_dtype
from specpipe.stage import StageInputs, naming
from specpipe.text.files import TOKENIZER_FILES

if TYPE_CHECKING:
    from specpipe.config.sections import CalibrationConfig, QualityConfig
    from specpipe.runtimes.torch.engine import TorchEngine
    from specpipe.speculative.metrics import AcceptanceCounts

QUALITY_FOLDER = "quality"
"""The name of the stage that measures."""

_KV_SCALE = ".kv_cache_scaling_factor"


@dataclass(frozen=True, kw_only=True)
class MeasuredSide:
    """One model of the pair.

    folder       the Hugging Face checkpoint
    checkpoint   the quantized unified checkpoint; None where the config quantizes nothing
    calibration  where the texts are that it is measured on; None likewise
    base_dir     where the paths of calibration data start
    limits       what the files of the checkpoint may hold
    """

    role: Role
    folder: Path
    checkpoint: Path | None
    calibration: CalibrationConfig | None
    base_dir: Path
    limits: FileLimits = FILE_LIMITS


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Runs both models in both forms on the texts held out, with the torch runtime.

    contract       pair.json of the stage check
    dtype, device  what the engines compute in, and where, as the engine section has them
    """

    draft: MeasuredSide
    target: MeasuredSide
    contract: Path
    num_draft_tokens: int
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"

    name = QUALITY_FOLDER

    def inputs(self) -> StageInputs:
        files = [self.contract]
        calibration: dict[str, Any] = {}
        for side in (self.draft, self.target):
            files += checkpoint_files(side.folder)
            if side.checkpoint is None or side.calibration is None:
                continue
            files.append(side.checkpoint)
            files += (path for name in TOKENIZER_FILES if is_there(path := side.folder / name))
            files.append(data_file(side.calibration, side.base_dir))
            calibration[side.role] = side.calibration.model_dump(mode="json")
        return StageInputs(
            files=tuple(dict.fromkeys(files)),
            settings={
                "num_draft_tokens": self.num_draft_tokens,
                "dtype": self.dtype,
                "device": self.device,
                "calibration": calibration,
            },
            libraries=("tokenizers", "torch"),
        )

    def require(self) -> None:
        """Raises where torch is missing, or where both models unquantized are larger than memory.

        Later it would be found only after hours: what comes before holds one layer at a time.
        """
        load_runtime("torch").require()
        gpus = () if self.device == "cpu" else gpus_with_memory()
        memory = gpus[0].memory_bytes if gpus else total_bytes()
        needed = sum(
            _plain_bytes(side, self.dtype, "cuda" if gpus else "cpu")
            for side in (self.draft, self.target)
        )
        if memory is not None and needed > memory:
            raise RuntimeUnavailable(
                "to measure what quantization costs, both models have to run unquantized, too: "
                f"{format_bytes(needed)} of weights, where {'the GPU' if gpus else 'this machine'} "
                f"has {format_bytes(memory)}; set quality.measure to false to build without"
            )

    def run(self, out: Path) -> None:
        work = out / "work"
        work.mkdir()
        try:
            report = _Measurement(self, work).report()
        except RuntimeUnavailable as exc:
            raise RuntimeUnavailable(
                "what quantization costs cannot be measured here, where both models would have to "
                f"run in both forms ({exc}); set quality.measure to false to build without"
            ) from exc
        finally:
            shutil.rmtree(work)
        (out / REPORT_JSON).write_text(report.to_json(), encoding="utf-8")
        (out / REPORT_TEXT).write_text(to_text(report), encoding="utf-8")


@dataclass(frozen=True)
class CheckQuality:
    """Fails where a report shows that quantization costs more than the config allows."""

    report: Path
    limits: QualityConfig

    name = "quality_limits"

    def inputs(self) -> StageInputs:
        return StageInputs(
            files=(self.report,), settings=self.limits.model_dump(exclude={"measure"})
        )

    def run(self, out: Path) -> None:
        report = QualityReport.read(self.report)
        exceeded = list(limit_faults(report, self.limits))
        if exceeded:
            lines = "".join(f"\n  - {line}" for line in exceeded)
            raise EngineBuildError(
                f"quantization costs more than the config allows:{lines}\n"
                "Choose another format, exclude layers (quantization.exclude), calibrate on more "
                "texts like yours, or raise the limits"
            )
        kept = self.limits.model_dump(exclude={"measure"}, exclude_none=True)
        (out / "kept.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Engine:
    """A form of a model as an engine folder, and its unified config."""

    form: ModelForm
    folder: Path


class _Measurement:
    """One run of `Measure`; everything it needs on the way lies in `work`."""

    def __init__(self, stage: Measure, work: Path) -> None:
        self._stage, self._work = stage, work
        text = stage.contract.read_text(encoding="utf-8")
        self._contract = PairContract.from_json(text)
        self._held_out: dict[Role, tuple[TokenIds, ...]] = {}
        self._described: dict[Role, str] = {}
        for side in (stage.draft, stage.target):
            if side.calibration is not None:
                with naming(side.role):
                    texts = read_texts(side.calibration, side.base_dir, side.folder, side.limits)
                self._held_out[side.role] = texts.held_out
                self._described[side.role] = texts.description
        assert self._held_out, "a pair in which nothing is quantized was measured"

    def report(self) -> QualityReport:
        from specpipe.build.quality.quality import cut_prompts

        models = []
        engines: dict[Role, list[_Engine]] = {}
        for side in (self._stage.draft, self._stage.target):
            with naming(side.role):
                engines[side.role] = list(self._build(side))
                models.append(self._compare(side.role, engines[side.role]))
        prompts = cut_prompts(self._held_out.get("target") or self._held_out["draft"])
        has_draft = self._stage.num_draft_tokens > 0
        return QualityReport(
            models=tuple(models),
            engines=_engine_words(engines["target"][0].folder),
            num_draft_tokens=self._stage.num_draft_tokens,
            num_prompts=len(prompts) if has_draft else 0,
            acceptance=self._acceptance(engines, prompts) if has_draft else (),
            warnings=tuple(self._warnings()),
        )

    def _build(self, side: MeasuredSide) -> Iterator[_Engine]:
        """Yields an engine of each form, the unquantized one first."""
        plain = self._work / "checkpoint"
        plain.mkdir()
        convert(side.folder, plain, limits=side.limits)
        yield self._build_form(side.role, plain)
        shutil.rmtree(plain)
        if side.checkpoint is not None:
            yield self._build_form(side.role, side.checkpoint)

    def _build_form(self, role: Role, checkpoint: Path) -> _Engine:
        from specpipe.build.quality.quality import MAX_BATCH_SIZE, MAX_NUM_TOKENS

        config = load_unified(checkpoint).config
        form = form_of(config)
        folder = self._work / f"{role} {form.name}"
        folder.mkdir()
        BuildTorchEngine(
            role=role,
            checkpoint=checkpoint,
            max_batch_size=MAX_BATCH_SIZE,
            max_seq_len=self._max_seq_len(role),
            max_draft_len=self._stage.num_draft_tokens,
            max_num_tokens=MAX_NUM_TOKENS,
            dtype=self._stage.dtype,
            device=self._stage.device,
        ).run(folder)
        return _Engine(form, folder)

    def _max_seq_len(self, role: Role) -> int:
        """Returns the tokens of the longest text and of the longest answer together."""
        from specpipe.build.quality.quality import MAX_OUTPUT_TOKENS

        contract = self._contract
        context = contract.draft_max_seq_len if role == "draft" else contract.target_max_seq_len
        longest = max(len(text) for texts in self._held_out.values() for text in texts)
        return min(longest + MAX_OUTPUT_TOKENS, context)

    def _compare(self, role: Role, engines: list[_Engine]) -> ModelQuality:
        from specpipe.build.quality.quality import compare, record

        if role not in self._held_out:
            return ModelQuality(role, engines[0].form)
        texts, logits = self._held_out[role], self._work / "logits"
        plain, quantized = engines
        with phase(f"quality: {role}, {plain.form.name}"):
            record(_load(plain.folder), texts, logits)
        with phase(f"quality: {role}, {quantized.form.name}"):
            divergence = compare(_load(quantized.folder), texts, logits)
        logits.unlink()
        return ModelQuality(role, plain.form, quantized.form, divergence, self._described[role])

    def _acceptance(
        self, engines: Mapping[Role, list[_Engine]], prompts: list[tuple[int, ...]]
    ) -> tuple[PairingAcceptance, ...]:
        from specpipe.build.quality.quality import PairLimits, measure_acceptance

        limits = PairLimits(
            num_draft_tokens=self._stage.num_draft_tokens,
            end_token_ids=frozenset(self._contract.end_token_ids),
            unused_token_ids=self._contract.unused_token_ids,
            parallel=self._contract.parallel,
        )

        def against(target: TorchEngine) -> list[list[AcceptanceCounts]]:
            return [
                measure_acceptance(_load(draft.folder), target, prompts, limits)
                for draft in engines["draft"]
            ]

        with phase("quality: acceptance"):
            columns = [against(_load(target.folder)) for target in engines["target"]]
        return tuple(
            PairingAcceptance.of(draft.form.name, target.form.name, columns[column][row])
            for row, draft in enumerate(engines["draft"])
            for column, target in enumerate(engines["target"])
        )

    def _warnings(self) -> Iterator[str]:
        for side in (self._stage.draft, self._stage.target):
            if side.checkpoint is None:
                continue
            checkpoint = load_unified(side.checkpoint)
            scales = [
                float(checkpoint.tensor(name).data.view("<f4")[0])
                for name in checkpoint.names()
                if name.endswith(_KV_SCALE)
            ]
            if scales and all(scale == 1.0 for scale in scales):
                yield (
                    f"all KV cache scales of the {side.role} are exactly 1, as where nothing was "
                    "calibrated: keys and values beyond 448 are cut off, small ones are lost"
                )


def _plain_bytes(side: MeasuredSide, dtype: str, device: str) -> int:
    """Returns the bytes of a checkpoint's weights in the dtype that an engine would have."""
    config = read_config(side.folder, allow_quantized=True, limits=side.limits)
    plain = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    wanted = compute_dtype(dtype, device, named_dtype(plain))
    return weights_bytes(unified_config({**plain, "dtype": wanted}, limits=side.limits))


def form_of(config: UnifiedConfig) -> ModelForm:
    """Returns the name and the sizes of the form that a unified config describes."""
    names = [config.format or PLAIN_FORM]
    if config.quantization.kv_cache_quant_algo is not None:
        names.append("fp8 KV")
    return ModelForm(" + ".join(names), weights_bytes(config), kv_cache_bytes_per_token(config))


def _load(folder: Path) -> TorchEngine:
    """Returns an engine, loaded after the memory of those before it is freed."""
    import torch

    from specpipe.runtimes.torch.engine import TorchEngine

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return TorchEngine.load(folder)


def _engine_words(folder: Path) -> str:
    build = json.loads((folder / "config.json").read_bytes())["build_config"]
    return f"{build['device']}, {build['dtype']}"
