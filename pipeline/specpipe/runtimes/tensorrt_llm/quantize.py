"""Hugging Face folder → quantized unified checkpoint, by NVIDIA's own script in its image.

The script is examples/quantization/quantize.py of TensorRT-LLM, a shell over ModelOpt; it needs a
GPU. Where the Triton images have it was read from their Dockerfiles of 2026 and not tried.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.checkpoint import CONFIG_NAME, checkpoint_files
from specpipe.errors import EngineBuildError, RuntimeUnavailable
from specpipe.runtimes.tensorrt_llm.formats import FORMATS, exported_vocab_size
from specpipe.runtimes.tensorrt_llm.toolbox import File, Tool, Word, interpreter, is_native
from specpipe.runtimes.tensorrt_llm.trtllm_build_log import explain
from specpipe.stages.base import Role, StageInputs
from specpipe.tokenizer_files import TOKENIZER_FILES

if TYPE_CHECKING:
    from specpipe.config import QuantizationConfig

SCRIPT = "/app/examples/quantization/quantize.py"

_TOKENIZER_MAX_SEQ_LEN = 2048  # the script's default, said where it can be seen


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Calibrates one checkpoint and writes its quantized weights, split for TP and PP.

    vocab_size    embedding rows of the Hugging Face checkpoint
    logits_dtype  what the result's config.json shall say; ModelOpt writes float16 for a bfloat16
                  model (modelopt/torch/export/model_config_export.py)
    """

    role: Role
    checkpoint: Path
    scheme: QuantizationConfig
    tp_size: int
    pp_size: int
    vocab_size: int
    logits_dtype: str
    version: str
    image: str
    gpu_ids: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.role}/quantize"

    def inputs(self) -> StageInputs:
        tokenizer = (self.checkpoint / name for name in TOKENIZER_FILES if name != CONFIG_NAME)
        return StageInputs(
            files=(
                *checkpoint_files(self.checkpoint),
                *(path for path in tokenizer if path.is_file()),
                *self._dataset(),
            ),
            settings={
                "quantization": self.scheme.model_dump(mode="json"),
                "tp_size": self.tp_size,
                "pp_size": self.pp_size,
                "logits_dtype": self.logits_dtype,
                "version": self.version,
                "image": self.image,
            },
        )

    def commands(self, out: Path) -> Sequence[Sequence[str]]:
        """Returns the command line that `run` calls."""
        return [self._tool().command_line(self._words(out))]

    def run(self, out: Path) -> None:
        if is_native() and not Path(SCRIPT).is_file():
            raise RuntimeUnavailable(
                f"{self.role}: quantization needs {SCRIPT} of NVIDIA's image, which is not here; "
                "run specpipe in that image, or where docker is and trtllm-build is not"
            )
        outcome = self._tool().run(self._words(out))
        if outcome.exit_code:
            cause = explain(self.role, outcome.exit_code, outcome.lines)
            raise EngineBuildError(f"{self.role}: quantization failed: {cause}")
        self._check(out)

    def _tool(self) -> Tool:
        return Tool(self.role, "quantize", self.image, self.gpu_ids)

    def _words(self, out: Path) -> list[Word]:
        scheme, calibration = self.scheme, self.scheme.calibration
        model, inside = _model_folder(self.checkpoint)
        dataset = self._dataset()
        words: list[Word] = [interpreter(), SCRIPT, "--model_dir"]
        words += [File(model, "model", inside=inside), "--output_dir"]
        words += [File(out, "checkpoint", is_output=True)]
        words += ["--qformat", scheme.format]
        if scheme.kv_cache is not None:
            words += ["--kv_cache_dtype", scheme.kv_cache]
        words += ["--dtype", "auto", "--device", "cuda", "--device_map", "auto"]
        words += ["--calib_dataset"]
        words += [File(dataset[0], "calibration") if dataset else calibration.dataset]
        words += ["--calib_size", str(calibration.num_samples)]
        words += ["--calib_max_seq_length", str(calibration.max_seq_len)]
        words += ["--tokenizer_max_seq_length", str(_TOKENIZER_MAX_SEQ_LEN)]
        words += ["--batch_size", str(calibration.batch_size)]
        words += ["--awq_block_size", str(scheme.awq_block_size)]
        words += ["--tp_size", str(self.tp_size), "--pp_size", str(self.pp_size)]
        words += ["--cp_size", "1", "--seed", str(calibration.seed)]
        return [*words, "--quantize_lm_head"] if scheme.quantize_lm_head else words

    def _dataset(self) -> tuple[Path, ...]:
        """The folder of the calibration texts, where it is one of this machine."""
        path = Path(self.scheme.calibration.dataset)
        return (path,) if path.is_absolute() else ()

    def _check(self, out: Path) -> None:
        """Holds what the script wrote against what was asked for, and mends its config.json.

        Mended are `logits_dtype`, which `trtllm-build` may set freely, and a KV cache type that
        nobody asked for: an older ModelOpt leaves FP8 there with int4_awq, and the builder then
        switches off paged context FMHA. Scales that are left over for it are ignored.
        """
        path = out / CONFIG_NAME
        try:
            config: dict[str, Any] = json.loads(path.read_bytes())
            quantization: dict[str, Any] = config["quantization"]
            faults = self._faults(config, quantization, out)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise EngineBuildError(
                f"{self.role}: quantization ended well, but {path.name} of its checkpoint cannot "
                f"be read ({type(exc).__name__}: {exc})"
            ) from exc
        if faults:
            lines = "".join(f"\n  - {fault}" for fault in faults)
            raise EngineBuildError(
                f"{self.role}: quantization ended well, but not with what was asked for:{lines}"
            )
        quantization["kv_cache_quant_algo"] = _kv_cache_algo(self.scheme)
        config["logits_dtype"] = self.logits_dtype
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _faults(
        self, config: Mapping[str, Any], quantization: Mapping[str, Any], out: Path
    ) -> list[str]:
        faults = []
        algo = FORMATS[self.scheme.format].quant_algo
        if quantization.get("quant_algo") != algo:
            faults.append(
                f"quant_algo is {quantization.get('quant_algo')}, but {self.role}.quantization."
                f"format {self.scheme.format} is {algo}"
            )
        wanted = _kv_cache_algo(self.scheme)
        if wanted is not None and quantization.get("kv_cache_quant_algo") != wanted:
            faults.append(
                f"kv_cache_quant_algo is {quantization.get('kv_cache_quant_algo')}, not {wanted}"
            )
        rows = exported_vocab_size(self.vocab_size, self.scheme.format)
        if config["vocab_size"] != rows:
            faults.append(
                f"the vocabulary has {config['vocab_size']} rows, expected {rows} "
                f"({self.vocab_size} before)"
            )
        world_size = self.tp_size * self.pp_size
        if config["mapping"]["world_size"] != world_size:
            faults.append(f"it is for {config['mapping']['world_size']} ranks, not {world_size}")
        for rank in range(world_size):
            if not (out / f"rank{rank}.safetensors").is_file():
                faults.append(f"rank{rank}.safetensors is missing")
        return faults


def _kv_cache_algo(scheme: QuantizationConfig) -> str | None:
    return None if scheme.kv_cache is None else scheme.kv_cache.upper()


def _model_folder(checkpoint: Path) -> tuple[Path, str]:
    """Returns the folder to mount, and where in it the checkpoint is.

    The files of a hub snapshot are links into the folder of its blobs, which a container has to
    see as well.
    """
    folder = checkpoint.resolve()
    targets = [path.resolve() for path in folder.iterdir()]
    whole = Path(os.path.commonpath([folder, *targets]))
    if whole == Path(whole.anchor):
        raise EngineBuildError(
            f"{checkpoint} links to files all over this machine, which a container cannot be given "
            "in one piece: copy the checkpoint into one folder"
        )
    return whole, folder.relative_to(whole).as_posix()
