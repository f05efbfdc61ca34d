"""The quickstart pair, built once for all tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specpipe import pipeline
from specpipe.config import PipelineConfig, load_config
from tests.quiet import Quiet

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a build; not to be changed."""
    pytest.importorskip("torch")
    output_dir = tmp_path_factory.mktemp("engines")
    config = load_config(QUICKSTART, [f"output_dir={output_dir}"])
    pipeline.run(pipeline.plan(config), Quiet())
    return output_dir


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Callable[..., PipelineConfig]:
    """Copies the built pair for a test that writes there, or breaks it; returns its config."""

    def copy(*overrides: str) -> PipelineConfig:
        shutil.copytree(built, tmp_path / "engines", dirs_exist_ok=True)
        return load_config(QUICKSTART, [f"output_dir={tmp_path / 'engines'}", *overrides])

    return copy
