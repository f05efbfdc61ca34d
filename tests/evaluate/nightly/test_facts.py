"""nightly/facts.py and latency.py: what is kept of a build and of a benchmark."""

from __future__ import annotations

from pathlib import Path

from specpipe.build.quality.report import (
    REPORT_JSON,
    Divergence,
    ModelForm,
    ModelQuality,
    QualityReport,
)
from specpipe.evaluate.nightly.facts import quality
from specpipe.evaluate.nightly.latency import estimate
from specpipe.evaluate.nightly.record import Quality
from specpipe.machine.artifacts import Artifacts


def test_quality_is_that_of_what_is_quantized(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path)
    assert quality(artifacts, {}) == {}  # nothing is quantized, or it was not measured
    plain = ModelForm("plain", 100, 8)
    divergence = Divergence(
        num_positions=50, plain_perplexity=2.0, perplexity=2.1, mean_kl=0.02, top1_agreement=0.96
    )
    fp8 = ModelForm("fp8", 50, 8)
    report = QualityReport(
        models=(
            ModelQuality("draft", plain),
            ModelQuality("target", plain, fp8, divergence, "32 texts"),
        ),
        engines="cuda, bfloat16",
    )
    artifacts.quality.mkdir()
    (artifacts.quality / REPORT_JSON).write_text(report.to_json())
    assert quality(artifacts, {"calibration": {"target": "4" * 64}}) == {
        "target": Quality(
            format="fp8",
            perplexity_ratio=1.05,
            mean_kl=0.02,
            top1_agreement=0.96,
            measured_on=f"32 texts; {'4' * 64}; cuda, bfloat16",
        )
    }


def test_a_percentiles_interval_holds_each_round() -> None:
    """Ten prompts alike, in a round of 10 ms and one of 30: drawing prompts alone shows nothing."""
    found = estimate([[10.0, 30.0]] * 10, 4, "first token", 50)
    assert (found.ms, found.low, found.high) == (20.0, 10.0, 30.0)
    found = estimate([[10.0 + n] for n in range(10)], 4, "later token", 50)
    assert found.ms == 14.5
    assert found.low is not None and found.high is not None
    assert 10 < found.low < 14.5 < found.high < 19
    alone = estimate([[10.0, 30.0]], 4, "first token", 99)
    assert (alone.low, alone.high) == (None, None)
