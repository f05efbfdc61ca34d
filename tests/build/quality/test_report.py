"""The report as people and programs see it, and the limits that it is held against."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specpipe.build.quality.report import (
    Divergence,
    ModelForm,
    ModelQuality,
    PairingAcceptance,
    QualityReport,
    limit_faults,
    to_text,
)
from specpipe.config.sections import QualityConfig
from specpipe.speculative.metrics import AcceptanceCounts

TEXTS = "112 texts of own.jsonl with 9,000 tokens, and 16 with 1,216 held out"
DRAFT = ModelQuality(
    "draft",
    ModelForm("plain", 1_787_136, 512),
    ModelForm("int4_awq", 1_264_384, 512),
    Divergence(1200, 9.5, 9.975, 0.0625, 0.9),
    TEXTS,
)
TARGET = ModelQuality(
    "target",
    ModelForm("plain", 10_951_168, 3072),
    ModelForm("fp8 + fp8 KV", 6_536_448, 1536),
    Divergence(1200, 5.25, 5.25, 0.00125, 0.9875),
    TEXTS,
)
REPORT = QualityReport(
    (DRAFT, TARGET),
    "cpu, float32",
    num_draft_tokens=4,
    num_prompts=16,
    acceptance=(
        PairingAcceptance("plain", "plain", 1000, 500),
        PairingAcceptance("plain", "fp8 + fp8 KV", 1000, 490, 0.0123),
        PairingAcceptance("int4_awq", "plain", 1100, 440),
        PairingAcceptance("int4_awq", "fp8 + fp8 KV", 1100, 462),
    ),
)
BROKEN = "all KV cache scales of the target are exactly 1"


def test_the_table() -> None:
    assert to_text(replace(REPORT, warnings=(BROKEN,))) == (
        "model   format        weights  KV/token  perplexity  mean KL, nats  top-1 agreement\n"
        "draft   plain          1.8 MB    0.5 kB       9.500              -                -\n"
        "draft   int4_awq       1.3 MB    0.5 kB       9.975        0.06250           90.00%\n"
        "target  plain         11.0 MB    3.1 kB       5.250              -                -\n"
        "target  fp8 + fp8 KV   6.5 MB    1.5 kB       5.250        0.00125           98.75%\n"
        "\n"
        "acceptance rate      target plain       target fp8 + fp8 KV\n"
        "draft plain      0.500 (500/1000)  0.490 ± 0.012 (490/1000)\n"
        "draft int4_awq   0.400 (440/1100)          0.420 (462/1100)\n"
        "16 prompts, greedy, K = 4; as configured / plain: 0.840\n"
        "\n"
        f"texts of draft and target: {TEXTS}\n"
        "measured with the torch runtime: cpu, float32\n"
        f"warning: {BROKEN}\n"
    )


def test_a_model_that_is_not_quantized_is_only_listed() -> None:
    report = QualityReport(
        (ModelQuality("draft", DRAFT.plain), replace(TARGET, texts="own")), "cuda, bfloat16"
    )
    assert to_text(report) == (
        "model   format        weights  KV/token  perplexity  mean KL, nats  top-1 agreement\n"
        "draft   plain          1.8 MB    0.5 kB           -              -                -\n"
        "target  plain         11.0 MB    3.1 kB       5.250              -                -\n"
        "target  fp8 + fp8 KV   6.5 MB    1.5 kB       5.250        0.00125           98.75%\n"
        "\n"
        "texts of target: own\n"
        "measured with the torch runtime: cuda, bfloat16\n"
    )


def test_json_tells_ratios_too_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(REPORT.to_json())
    values = json.loads(path.read_bytes())
    assert values["models"][0]["divergence"]["perplexity_ratio"] == pytest.approx(1.05)
    assert values["models"][1]["quantized"] == {
        "name": "fp8 + fp8 KV",
        "weights_bytes": 6536448,
        "kv_cache_bytes_per_token": 1536,
    }
    assert [pairing["acceptance_rate"] for pairing in values["acceptance"]] == [
        0.5,
        0.49,
        0.4,
        0.42,
    ]
    assert values["acceptance_ratio"] == pytest.approx(0.84)
    assert QualityReport.read(path) == REPORT


def test_the_error_of_a_rate_by_hand() -> None:
    counts = [
        AcceptanceCounts(num_draft_tokens=drafted, num_accepted_tokens=accepted)
        for drafted, accepted in ((10, 8), (10, 2), (20, 10))
    ]
    # 20 of 40; off the rate by 3, -3 and 0: the root of 18 * 3 / 2, over 40.
    found = PairingAcceptance.of("plain", "fp8", counts)
    assert (found.num_draft_tokens, found.num_accepted_tokens, found.rate) == (40, 20, 0.5)
    assert found.standard_error == pytest.approx(27**0.5 / 40)
    assert PairingAcceptance.of("plain", "fp8", counts[:1]) == PairingAcceptance(
        "plain", "fp8", 10, 8
    )
    assert PairingAcceptance.of("a", "b", [AcceptanceCounts()] * 2) == PairingAcceptance(
        "a", "b", 0, 0
    )


def limits(**given: float) -> QualityConfig:
    return QualityConfig.model_validate(given)


def test_what_costs_too_much_names_figure_limit_and_setting() -> None:
    given = limits(
        max_mean_kl=0.05,
        min_top1_agreement=0.95,
        max_perplexity_ratio=1.04,
        min_acceptance_ratio=0.9,
    )
    assert list(limit_faults(REPORT, given)) == [
        "the draft in int4_awq has a mean KL of 0.0625 nats to its plain form; quality.max_mean_kl "
        "is 0.05",
        "the draft in int4_awq agrees with its plain form on the likeliest token at 0.9 of the "
        "positions; quality.min_top1_agreement is 0.95",
        "the draft in int4_awq has 1.05 times the perplexity of its plain form; "
        "quality.max_perplexity_ratio is 1.04",
        "the acceptance rate is 0.84 times that of the plain pair; quality.min_acceptance_ratio "
        "is 0.9",
    ]


def test_limits_that_are_met_exactly_are_kept() -> None:
    exact = limits(
        max_mean_kl=0.0625,
        min_top1_agreement=0.9,
        max_perplexity_ratio=1.05,
        min_acceptance_ratio=0.84,
    )
    assert list(limit_faults(REPORT, exact)) == []
    assert list(limit_faults(REPORT, QualityConfig())) == []


def test_a_plain_pair_that_accepts_nothing_has_nothing_to_lose() -> None:
    nothing = replace(
        REPORT,
        acceptance=(PairingAcceptance("plain", "plain", 90, 0), PairingAcceptance("a", "b", 90, 1)),
    )
    assert nothing.acceptance_ratio is None
    assert list(limit_faults(nothing, limits(min_acceptance_ratio=0.9))) == []
