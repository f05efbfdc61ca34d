"""A quantized pair: its own logits are those of the quantized target, roundings included."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")

from specpipe.build import execution, planning  # noqa: E402
from specpipe.build.load import load_config  # noqa: E402
from specpipe.config.sections import PipelineConfig  # noqa: E402
from specpipe.errors import ConfigError  # noqa: E402
from specpipe.evaluate.verification import run  # noqa: E402
from specpipe.evaluate.verification.outcome import VerifyOptions  # noqa: E402
from specpipe.evaluate.verification.scorer import engine_rounding, open_scorer, rows_of  # noqa: E402
from tests.evaluate.verification.conftest import QUICKSTART, record_anew  # noqa: E402
from tests.evaluate.verification.test_run import by_name, verified  # noqa: E402
from tests.evaluate.verification.test_scorer import TEXTS, change_weights  # noqa: E402
from tests.quiet import Quiet  # noqa: E402


def build(output_dir: Path, target: str, draft: str = "int8_wo") -> PipelineConfig:
    """The quickstart pair in formats that need no calibration."""
    config = load_config(
        QUICKSTART,
        [
            f"output_dir={output_dir}",
            f"draft.quantization={{format: {draft}}}",
            f"target.quantization={{format: {target}}}",
            "quality.measure=false",
        ],
    )
    execution.run(planning.plan(config), Quiet())
    return config


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    return build(tmp_path_factory.mktemp("quantized"), "fp8_pc_pt")


def test_the_target_is_scored_as_it_is_quantized(built: PipelineConfig, tmp_path: Path) -> None:
    """FP8 numbers have 3 bits after the first, so that plain logits are some hundredths away."""
    plain = load_config(QUICKSTART, [f"output_dir={tmp_path}"])
    execution.run(planning.plan(plain), Quiet())
    with open_scorer(built) as scorer:
        rows = rows_of(scorer, TEXTS[0])
        assert (scorer.dtype, scorer.rounding) == ("float32", "activations to FP8")
    with open_scorer(plain) as scorer:
        difference = np.abs(rows - rows_of(scorer, TEXTS[0]))
        assert scorer.rounding is None
    assert 0.01 < np.median(difference[np.isfinite(difference)]) < 1.0


def test_a_quantized_pair_differs_from_itself_in_ties_only(built: PipelineConfig) -> None:
    done = verified(built)
    assert done.findings.verdict in ("identical", "tie")
    assert "seeded, a draft that is always wrong" in by_name(done)
    threshold = done.findings.threshold
    assert threshold.dtype == "float32" and 1e-3 < threshold.block_difference < 2.0
    assert str(threshold).endswith(
        "move by between block shapes (it rounds activations to FP8, so that a last digit becomes "
        "a whole step)"
    )
    assert json.loads(done.path.read_text())["threshold"]["rounding"] == "activations to FP8"


def test_a_quantized_engine_with_other_weights_is_a_fault(
    built: PipelineConfig, tmp_path: Path
) -> None:
    shutil.copytree(built.artifacts_dir.parent, tmp_path, dirs_exist_ok=True)
    config = built.model_copy(update={"output_dir": tmp_path})
    change_weights(config.artifacts_dir / "model_repo/speculative/1/target")
    record_anew(config, moved_from=built.artifacts_dir)
    done = verified(config, limit=2)
    assert by_name(done)["checkpoint, the target's checkpoint, scored"] == "fault"


def test_float32_is_refused_where_rounding_makes_steps(built: PipelineConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        run.verify(built, VerifyOptions(limit=1, is_float32=True, distance=None))
    assert str(caught.value) == (
        "--float32: the target rounds activations to FP8, which makes a whole step of what differs "
        "in the last place, so that its logits move by more than 1e-4 in float32, too; leave it out"
    )


def test_float32_holds_for_quantized_weights_and_a_draft_that_rounds(tmp_path: Path) -> None:
    config = build(tmp_path, "int4_wo", draft="fp8_pc_pt")
    done = run.verify(config, VerifyOptions(limit=1, max_tokens=12, is_float32=True, distance=None))
    assert (done.findings.verdict, done.findings.threshold.fixed) == ("identical", 1e-4)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_algo": None, "kv_cache_quant_algo": None}, None),
        ({"quant_algo": "W4A16_AWQ"}, None),
        ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, "activations to INT8"),
        ({"quant_algo": "NVFP4"}, "activations to FP4"),
        (
            {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
            "activations to FP8 and its KV cache to FP8",
        ),
        ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "its KV cache to FP8"),
    ],
)
def test_what_an_engine_rounds_while_it_runs(
    tmp_path: Path, quantization: dict[str, Any], words: str | None
) -> None:
    config = {
        "runtime": {"name": "torch", "format": 1},
        "pretrained_config": {"quantization": quantization},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert engine_rounding(tmp_path) == words
