"""Every checkpoint that is written for trtllm-build, held against the table of what that expects.

What can be planned has to fit; and what is refused must not, so that nothing is refused in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from specpipe.build.load import load_config
from specpipe.build.planning import plan
from specpipe.build.stages.convert import Convert
from specpipe.build.stages.export import export
from specpipe.build.stages.quantize import Quantize
from specpipe.config.sections import QuantizationConfig
from specpipe.errors import SpecpipeError
from tests.quantization.checkpoints import write_scales
from tests.tensorrt_llm_module_trees.tree import faults, table
from tests.toy import write_toy_checkpoint

# The least that blocks of 128 on two ranks divide. Layers and vocabulary do not split evenly.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 3}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}
LONGROPE |= {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"dtype": "float16"},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "phi3": {},
    "phi3 with longrope": {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 256,
    },
    "gemma2": {"sliding_window": 512},
    "gemma2 with biases": {
        "attention_bias": True,
        "tie_word_embeddings": False,
        "sliding_window": 512,
        "dtype": "float16",
    },
}
FORMATS = ["fp8", "fp8_pc_pt", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo", "nvfp4"]
WITH_KV_CACHE = ("fp8", "w4a8_awq", "nvfp4")


@dataclass(frozen=True)
class Case:
    model: str
    scheme: Mapping[str, Any] = field(default_factory=dict)
    tp_size: int = 1
    pp_size: int = 1
    vocab_size: int = 251

    def __str__(self) -> str:
        scheme = "-".join(map(str, self.scheme.values())) or "plain"
        return f"{self.model}-{scheme}-{self.tp_size}x{self.pp_size}"

    @property
    def format(self) -> str | None:
        return self.scheme.get("format")

    @property
    def is_known_to_misfit(self) -> bool:
        """What TensorRT-LLM cannot build, or would compute something else from."""
        no_rowwise = self.model in ("qwen3", "phi3 with longrope") or "gemma2" in self.model
        return (
            ("phi3" in self.model and self.pp_size > 1)
            or (self.format == "fp8_pc_pt" and (no_rowwise or "exclude" in self.scheme))
            or (
                "quantize_lm_head" in self.scheme
                and self.format in ("fp8_pc_pt", "int8_wo", "int4_wo")
            )
        )


def cases() -> Iterator[Case]:
    for model in MODELS:
        whole = (2, 1) if "phi3" in model else (2, 2)
        for ranks in ((1, 1), (2, 1), (1, 2), (2, 2)):
            yield Case(model, {}, *ranks)
        for name in FORMATS:
            yield Case(model, {"format": name})
            yield Case(model, {"format": name}, *whole)
        for name in WITH_KV_CACHE:
            yield Case(model, {"format": name, "kv_cache": "fp8"}, *whole)
    for model in ("llama with biases", "phi3", "gemma2"):
        whole = (2, 1) if model == "phi3" else (2, 2)
        for name in FORMATS:
            for exclude in ("*.mlp.proj", "*.attention.*"):
                yield Case(model, {"format": name, "exclude": [exclude]}, *whole)
            yield Case(model, {"format": name, "quantize_lm_head": True}, *whole, vocab_size=256)
    yield Case("llama", {}, tp_size=4)  # fewer KV heads than ranks


class Toys:
    """Writes each model, and what calibration would measure of it, once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[tuple[str, int], Path] = {}
        self._scales: dict[str, Path | None] = {}

    def model(self, case: Case) -> Path:
        key = case.model, case.vocab_size
        if key not in self._models:
            sizes = {**SIZES, "vocab_size": case.vocab_size, **MODELS[case.model]}
            folder = self._folder / f"{case.model}-{case.vocab_size}"
            self._models[key] = write_toy_checkpoint(folder, case.model.split()[0], **sizes)
        return self._models[key]

    def scales(self, case: Case) -> Path | None:
        key = f"{case.model}-{sorted(case.scheme.items())}"
        if key not in self._scales:
            scheme = QuantizationConfig.model_validate(case.scheme)
            folder = self._folder / f"scales-{len(self._scales)}"
            self._scales[key] = write_scales(folder, self.model(case), scheme)
        return self._scales[key]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("toys"))


def planned(case: Case, checkpoint: Path, folder: Path) -> Convert | Quantize:
    """Returns the stage that a build would make the target's checkpoint with."""
    split = {"tp_size": case.tp_size, "pp_size": case.pp_size}
    quantization = {"quantization": case.scheme} if case.scheme else {}
    config = {
        "name": "toy",
        "draft": {"checkpoint": str(checkpoint)},
        "target": {"checkpoint": str(checkpoint), **split, **quantization},
        "engine": {"runtime": "tensorrt_llm", "max_seq_len": 128},
        "quality": {"measure": False},
    }
    path = folder / "pair.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    stages = [made.stage for made in plan(load_config(path))]
    made = [stage for stage in stages if isinstance(stage, Convert | Quantize)]
    return next(stage for stage in made if stage.role == "target")


def in_spite_of_refusal(case: Case, checkpoint: Path) -> Convert | Quantize:
    split = {"tp_size": case.tp_size, "pp_size": case.pp_size}
    if not case.scheme:
        return Convert("target", checkpoint, **split)
    scheme = QuantizationConfig.model_validate(case.scheme)
    return Quantize("target", checkpoint, None, scheme, **split)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_a_checkpoint_fits_or_is_refused(case: Case, toys: Toys, tmp_path: Path) -> None:
    model = toys.model(case)
    try:
        stage = planned(case, model, tmp_path)
        is_refused = False
    except SpecpipeError:
        stage = in_spite_of_refusal(case, model)
        is_refused = True
    if isinstance(stage, Quantize):
        stage = replace(stage, scales=toys.scales(case))
    out = tmp_path / "checkpoint"
    out.mkdir()
    stage.run(out)
    found = faults(out)
    assert bool(found) == is_refused, found
    assert is_refused == case.is_known_to_misfit


@pytest.mark.parametrize("model", ["llama with biases", "phi3", "gemma2"])
@pytest.mark.parametrize("format", ["fp8", "fp8_pc_pt", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4"])
def test_a_checkpoint_that_others_quantized_fits_or_is_refused(
    model: str, format: str, toys: Toys, tmp_path: Path
) -> None:
    ours = Case(model, {"format": format})
    scheme = QuantizationConfig.model_validate(ours.scheme)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    export(toys.model(ours), toys.scales(ours), theirs, scheme)
    case = replace(ours, scheme={}, tp_size=2)
    if ours.is_known_to_misfit:
        with pytest.raises(SpecpipeError, match="does not go with"):
            planned(case, theirs, tmp_path)
        return
    out = tmp_path / "checkpoint"
    out.mkdir()
    planned(case, theirs, tmp_path).run(out)
    assert faults(out) == []


def test_every_row_of_the_table_has_its_source() -> None:
    known = table()["sources"]
    assert all(
        row["file"].startswith("tensorrt_llm/") and ("id" in row) != ("commit" in row)
        for row in known.values()
    )
    rows = [*table()["models"], table()["kv_cache"], table()["may_be_missing"]]
    for section in ("classes", "quantizations", "loading", "formulas"):
        rows += table()[section].values()
    assert {row["source"] for row in rows} == known.keys()
