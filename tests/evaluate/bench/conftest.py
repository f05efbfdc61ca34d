"""The quickstart pair, built once; K is as asked, since an adaptive one is 0 on a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpipe.build import execution, planning
from specpipe.build.load import load_config
from specpipe.config.sections import PipelineConfig
from tests.quiet import Quiet

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    """The config of a pair that is built."""
    folder = tmp_path_factory.mktemp("engines")
    overrides = [f"output_dir={folder}", "speculation.adaptive=false"]
    config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    execution.run(planning.plan(config), Quiet())
    return config
