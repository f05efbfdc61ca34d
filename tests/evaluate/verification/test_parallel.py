"""The quickstart pair with a draft that proposes several tokens in one pass, built and verified."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy")

from specpipe.build import execution, planning  # noqa: E402
from specpipe.build.load import load_config  # noqa: E402
from specpipe.checkpoints.parallel_draft import ParallelDraft  # noqa: E402
from specpipe.config.sections import PipelineConfig  # noqa: E402
from specpipe.evaluate.verification import run  # noqa: E402
from specpipe.evaluate.verification.outcome import VerifyOptions  # noqa: E402
from specpipe.runtimes.pair_file import read_pair  # noqa: E402
from tests.evaluate.verification.conftest import QUICKSTART  # noqa: E402
from tests.quiet import Quiet  # noqa: E402
from tests.toy import write_parallel_draft  # noqa: E402

MODELS = QUICKSTART.parents[1] / "models" / "python-code"
MASK = 4096  # the first row of the draft that the target has not


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    """The pair, built with a quantized draft that is exported, too."""
    folder = tmp_path_factory.mktemp("parallel")
    draft = write_parallel_draft(MODELS / "draft", folder / "draft")
    overrides = [
        f"output_dir={folder / 'engines'}",
        f"draft.checkpoint={draft}",
        "draft.quantization={format: fp8_pc_pt, export: true}",
        "quality.measure=false",
        "speculation.num_draft_tokens=8",
    ]
    config = load_config(QUICKSTART, overrides)
    execution.run(planning.plan(config), Quiet())
    return config


def test_all_that_is_built_says_how_it_drafts(config: PipelineConfig) -> None:
    assert read_pair(config.artifacts.repository).options.parallel == ParallelDraft(MASK, 8)
    draft = config.artifacts.side("draft")
    assert json.loads((draft.huggingface / "config.json").read_text())["pard_token"] == MASK
    engine = json.loads((draft.engine / "config.json").read_text())
    assert engine["pretrained_config"]["specpipe_num_draft_tokens"] == 8


@pytest.mark.parametrize("distance", [None, pytest.param(0.4, marks=pytest.mark.slow)])
def test_a_sound_pair_is_identical_on_every_side(
    config: PipelineConfig, distance: float | None
) -> None:
    """Controls included: the target as its own draft, and a draft that is always wrong."""
    options = VerifyOptions(
        limit=1, max_tokens=8, num_draft_tokens=(8,), is_in_process=True, distance=distance
    )
    found = run.verify(config, options).findings
    assert (found.verdict, found.reason) == ("identical", None)
    names = {side.side.name for side in found.sides}
    assert {"K = 8, 8 at once", "as served, 8 at once", "a draft that is always wrong"} <= names
