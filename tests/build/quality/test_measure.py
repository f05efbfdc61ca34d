"""The stages that measure what quantization costs, and the whole road on the quickstart pair."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from specpipe.build import cache
from specpipe.build.pairing import check_pair
from specpipe.build.quality.measure import CheckQuality, Measure, MeasuredSide
from specpipe.build.quality.quality import PairLimits, cut_prompts, measure_acceptance
from specpipe.build.quality.report import ModelForm, ModelQuality, PairingAcceptance, QualityReport
from specpipe.build.stages.convert import convert
from specpipe.build.stages.quantize import quantize
from specpipe.checkpoints.checkpoint import read_blocks, read_safetensors_header
from specpipe.cli import group as cli
from specpipe.config.sections import QualityConfig, QuantizationConfig
from specpipe.errors import EngineBuildError, RuntimeUnavailable, SpecpipeError
from specpipe.roles import Role
from specpipe.runtimes.torch.build import BuildTorchEngine
from specpipe.runtimes.torch.engine import TorchEngine
from specpipe.text.tokenizer import Tokenizer
from tests.fake_nvml import Device, be
from tests.quantization.checkpoints import write_scales
from tests.toy import write_tensors

PAIR = Path(__file__).parents[3] / "models" / "python-code"

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "import os\nimport sys\n\nfor name in os.listdir('.'):\n    print(name)\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "with open(path) as file:\n    for line in file:\n        print(line.strip())\n",
    "def test_sum(values):\n    total = 0\n    for value in values:\n        total += value\n",
]
"""Five of them, so that those held out, which are every eighth, differ."""


@dataclass(frozen=True)
class Made:
    """A draft and a target, each quantized to `formats[role]`, and the stage that measures them."""

    stage: Measure
    folder: Path

    def run(self) -> QualityReport:
        out = self.folder / "quality"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        self.stage.run(out)
        assert sorted(path.name for path in out.iterdir()) == ["report.json", "report.txt"]
        return QualityReport.read(out / "report.json")


def make(folder: Path, *, num_draft_tokens: int = 4, **formats: dict[str, Any]) -> Made:
    """Quantizes the quickstart pair with scales that nothing measured: activations up to 448."""
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 4))
    sides: dict[Role, MeasuredSide] = {}
    for role in ("draft", "target"):
        settings = formats.get(role)
        side = MeasuredSide(
            role=role, folder=PAIR / role, checkpoint=None, calibration=None, base_dir=folder
        )
        if settings is not None:
            scheme = QuantizationConfig.model_validate(
                {**settings, "calibration": {"data": "texts.jsonl"}}
            )
            checkpoint = folder / role
            checkpoint.mkdir()
            scales = write_scales(folder / f"{role}-scales", side.folder, scheme)
            if scales is not None:
                set_amax(scales / "scales.safetensors", 448.0)
            quantize(side.folder, scales, checkpoint, scheme)
            side = replace(side, checkpoint=checkpoint, calibration=scheme.calibration)
        sides[role] = side
    contract = folder / "pair.json"
    contract.write_text(check_pair(PAIR / "draft", PAIR / "target").to_json())
    stage = Measure(
        draft=sides["draft"],
        target=sides["target"],
        contract=contract,
        num_draft_tokens=num_draft_tokens,
        device="cpu",
    )
    return Made(stage, folder)


def set_amax(path: Path, amax: float) -> None:
    """Sets the greatest activation, key and value of every linear."""
    tensors = {}
    for name, info in read_safetensors_header(path).items():
        (raw,) = (block.copy() for block in read_blocks(info))
        if name.endswith((".input_amax", ".kv_amax")):
            raw = np.array([amax], np.float32).view(np.uint32)
        tensors[name] = raw
    path.unlink()
    write_tensors(path, tensors, dtype="F32")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The draft in int4 weights, which cost much; the target in fp8."""
    folder = tmp_path_factory.mktemp("pair")
    target = {"format": "fp8", "kv_cache": "fp8"}
    return make(folder, draft={"format": "int4_wo"}, target=target)


@pytest.fixture(scope="module")
def report(made: Made) -> QualityReport:
    return made.run()


def test_every_form_of_both_models_is_there(report: QualityReport) -> None:
    draft, target = report.models
    assert [form.name for form in draft.forms] == ["plain", "int4_wo"]
    assert [form.name for form in target.forms] == ["plain", "fp8 + fp8 KV"]
    assert target.plain.weights_bytes == 10_951_168  # 5,475,584 parameters
    assert [form.kv_cache_bytes_per_token for form in target.forms] == [3072, 1536]
    assert draft.texts == target.texts
    assert draft.texts is not None and draft.texts.startswith("17 texts of texts.jsonl with ")
    assert report.engines == "cpu, float32"


def test_every_pairing_of_forms_drafts(report: QualityReport, made: Made) -> None:
    """Each pairing on its own, from the checkpoints, by a test that knows which it is."""
    # Three of twenty texts are held out.
    assert (report.num_prompts, report.num_draft_tokens) == (9, 4)
    tokenizer = Tokenizer.load(PAIR / "target")
    prompts = cut_prompts([tokenizer.encode(TEXTS[n % 5]) for n in (0, 8, 16)])
    limits = PairLimits(num_draft_tokens=4, end_token_ids=frozenset({0}))
    expected = []
    for draft_name, draft in (("plain", None), ("int4_wo", made.folder / "draft")):
        for target_name, target in (("plain", None), ("fp8 + fp8 KV", made.folder / "target")):
            work = made.folder / f"{draft_name} {target_name}"
            engines = engine("draft", draft, work), engine("target", target, work)
            counts = measure_acceptance(*engines, prompts, limits)
            expected.append(PairingAcceptance.of(draft_name, target_name, counts))
    assert list(report.acceptance) == expected
    assert len({(a.num_draft_tokens, a.num_accepted_tokens) for a in expected}) == 4
    assert all(0 < a.num_accepted_tokens < a.num_draft_tokens <= 9 * 118 for a in expected)


def engine(role: Role, checkpoint: Path | None, work: Path) -> TorchEngine:
    """An engine of a quantized checkpoint, or of the plain one."""
    if checkpoint is None:
        checkpoint = work / f"{role}-checkpoint"
        checkpoint.mkdir(parents=True)
        convert(PAIR / role, checkpoint)
    folder = work / role
    folder.mkdir(parents=True)
    BuildTorchEngine(
        role=role,
        checkpoint=checkpoint,
        max_batch_size=8,
        max_seq_len=200,
        max_draft_len=4,
        max_num_tokens=256,
        device="cpu",
    ).run(folder)
    return TorchEngine.load(folder)


def test_costs_are_in_proportion_and_the_texts_are_known_words(report: QualityReport) -> None:
    draft, target = (model.divergence for model in report.models)
    assert draft is not None and target is not None
    assert draft.num_positions == target.num_positions
    assert 0.2 > draft.mean_kl > 2 * target.mean_kl > 0  # four bits and eight
    assert 0.7 < draft.top1_agreement < target.top1_agreement < 1
    assert 2 < target.plain_perplexity < draft.plain_perplexity < 200
    assert 0.8 < target.perplexity_ratio < 1.25


def test_scales_of_one_everywhere_are_a_warning(report: QualityReport, made: Made) -> None:
    assert report.warnings == (
        "all KV cache scales of the target are exactly 1, as where nothing was calibrated: keys "
        "and values beyond 448 are cut off, small ones are lost",
    )
    text = (made.folder / "quality" / "report.txt").read_text()
    assert text.endswith(f"warning: {report.warnings[0]}\n")


def test_the_same_inputs_give_the_same_report(report: QualityReport, made: Made) -> None:
    assert made.run() == report


def test_one_quantized_model_is_compared_and_the_other_listed(tmp_path: Path) -> None:
    found = make(tmp_path, target={"format": "int4_wo"}).run()
    draft, target = found.models
    assert (draft.quantized, draft.divergence) == (None, None)
    assert target.divergence is not None
    assert [(a.draft, a.target) for a in found.acceptance] == [
        ("plain", "plain"),
        ("plain", "int4_wo"),
    ]
    assert found.warnings == ()


def test_without_drafting_there_is_no_acceptance(tmp_path: Path) -> None:
    found = make(tmp_path, num_draft_tokens=0, draft={"format": "int8_wo"}).run()
    assert (found.acceptance, found.num_prompts) == ((), 0)


def test_a_scale_that_is_wrong_shows(tmp_path: Path, report: QualityReport) -> None:
    """A target whose scales are half of what they should be is another model, and says so."""
    broken = make(tmp_path, target={"format": "fp8"})
    path = tmp_path / "target" / "rank0.safetensors"
    for name, info in read_safetensors_header(path).items():
        if name.endswith("weights_scaling_factor"):
            (raw,) = (block.copy() for block in read_blocks(info))
            with path.open("r+b") as file:
                file.seek(info.offset)
                file.write((raw.view(np.float32) / 2).tobytes())
    found, right = broken.run().models[1].divergence, report.models[1].divergence
    assert found is not None and right is not None
    assert found.mean_kl > 0.5 > 5 * right.mean_kl
    assert found.top1_agreement < right.top1_agreement


def test_what_the_report_depends_on(made: Made) -> None:
    inputs = made.stage.inputs()
    assert {path.name for path in inputs.files} >= {
        "pair.json",
        "texts.jsonl",
        "model.safetensors",
        "tokenizer.json",
        "target",
    }
    assert inputs.settings["num_draft_tokens"] == 4
    assert inputs.settings["calibration"]["target"]["data"] == "texts.jsonl"
    assert set(inputs.settings["calibration"]) == {"draft", "target"}


def test_too_little_memory_says_what_to_do(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpipe.runtimes.torch.engine.available_bytes", lambda: 1000)
    out = made.folder / "no-memory"
    out.mkdir()
    with pytest.raises(RuntimeUnavailable) as caught:
        made.stage.run(out)
    message = str(caught.value)
    assert message.startswith("what quantization costs cannot be measured here, where both models")
    assert message.endswith("; set quality.measure to false to build without")
    assert list(out.iterdir()) == []


def test_a_pair_larger_than_memory_is_refused_before_anything_runs(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.stage.require()
    monkeypatch.setattr("specpipe.build.quality.measure.total_bytes", lambda: 25_000_000)
    with pytest.raises(RuntimeUnavailable) as caught:
        made.stage.require()
    # In float32, as on a CPU: 4 bytes for each of 893,568 and 5,475,584 parameters.
    assert str(caught.value) == (
        "to measure what quantization costs, both models have to run unquantized, too: 25.5 MB of "
        "weights, where this machine has 25.0 MB; set quality.measure to false to build without"
    )
    be(monkeypatch, Device(total_mib=12))
    monkeypatch.setattr("specpipe.build.quality.measure.total_bytes", lambda: None)
    made.stage.require()  # it is to run on the CPU, of which nothing is known
    with pytest.raises(RuntimeUnavailable, match="12.7 MB of weights, where the GPU has 12.6 MB"):
        replace(made.stage, device="auto").require()


def limited(tmp_path: Path, **given: float) -> CheckQuality:
    report = QualityReport(
        (ModelQuality("draft", ModelForm("plain", 10, 2)),),
        "cpu, float32",
        acceptance=(
            PairingAcceptance("plain", "plain", 100, 50),
            PairingAcceptance("plain", "nvfp4", 100, 30),
        ),
    )
    path = tmp_path / "quality" / "report.json"
    path.parent.mkdir()
    path.write_text(report.to_json())
    return CheckQuality(path, QualityConfig.model_validate(given))


def test_a_crossed_limit_fails_the_build(tmp_path: Path) -> None:
    stage = limited(tmp_path, min_acceptance_ratio=0.75)
    artifact = tmp_path / "quality_limits"
    with pytest.raises(EngineBuildError) as caught:
        cache.build(stage, artifact)
    assert str(caught.value) == (
        "quantization costs more than the config allows:\n"
        "  - the acceptance rate is 0.6 times that of the plain pair; quality.min_acceptance_ratio "
        "is 0.75\n"
        "Choose another format, exclude layers (quantization.exclude), calibrate on more texts "
        "like yours, or raise the limits"
    )
    assert not artifact.exists()


def test_other_limits_need_no_new_measurement(tmp_path: Path) -> None:
    stage = limited(tmp_path, min_acceptance_ratio=0.5)
    artifact = tmp_path / "quality_limits"
    cache.build(stage, artifact)
    assert json.loads((artifact / "kept.json").read_bytes()) == {"min_acceptance_ratio": 0.5}
    stricter = replace(stage, limits=QualityConfig(min_acceptance_ratio=0.55))
    assert cache.stale_reasons(stricter, artifact) == ["min_acceptance_ratio was 0.5, is now 0.55"]


def test_a_failure_says_whose_it_is(made: Made, tmp_path: Path) -> None:
    calibration = made.stage.draft.calibration
    assert calibration is not None
    missing = calibration.model_copy(update={"data": "gone.jsonl"})
    stage = replace(made.stage, draft=replace(made.stage.draft, calibration=missing))
    with pytest.raises(SpecpipeError, match=r"^draft: calibration.data: .*gone.jsonl does not exi"):
        stage.run(tmp_path)


def quickstart(folder: Path, draft: str, target: str, **more: Any) -> Path:
    """A YAML that quantizes the quickstart pair, calibrated on a few texts."""
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 8)
    )
    data = "calibration: {data: texts.jsonl}"
    path = folder / "pair.yaml"
    path.write_text(
        "name: pair\n"
        f"draft: {{checkpoint: {PAIR / 'draft'}, quantization: {{{draft}, {data}}}}}\n"
        f"target: {{checkpoint: {PAIR / 'target'}, quantization: {{{target}, {data}}}}}\n"
        "engine: {runtime: torch, device: cpu, max_batch_size: 2, max_seq_len: 256}\n"
        f"quality: {json.dumps(more)}\n"
    )
    return path


@pytest.fixture
def quiet_log() -> Any:
    """What ModelOpt does to the logging of others must not reach other tests."""
    before = logging.root.level, logging.root.handlers[:]
    yield
    logging.root.level, logging.root.handlers[:] = before


def test_a_build_prints_the_report_and_fails_by_its_limits(tmp_path: Path, quiet_log: None) -> None:
    config = quickstart(
        tmp_path,
        "format: int4_awq, awq_block_size: 32",
        "format: fp8, kv_cache: fp8",
        min_acceptance_ratio=0.1,
    )
    command = ["build", "--config", str(config)]
    built = run(command)
    assert built.exit_code == 0, built.stderr
    assert built.stdout == f"{tmp_path}/engines/pair/model_repo\n"
    text = (tmp_path / "engines" / "pair" / "quality" / "report.txt").read_text()
    assert text in built.stderr
    found = QualityReport.read(tmp_path / "engines" / "pair" / "quality" / "report.json")
    draft, target = (model.divergence for model in found.models)
    assert draft is not None and target is not None
    assert 0.005 < draft.mean_kl < 0.3 and draft.top1_agreement > 0.7  # four bits
    assert 0 < target.mean_kl < 0.1 and target.top1_agreement > 0.85  # eight
    assert found.warnings == ()

    strict = run([*command, "--set", "quality.max_mean_kl=0.001"])
    assert strict.exit_code == 1
    assert "quality: up to date\n" in strict.stderr  # nothing is measured again
    assert text in strict.stderr
    assert strict.stderr.splitlines()[-2].startswith(
        "  - the target in fp8 + fp8 KV has a mean KL of "
    )


def run(arguments: Sequence[str]) -> Any:
    return CliRunner().invoke(cli.main, list(arguments), catch_exceptions=False)
