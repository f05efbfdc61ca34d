"""Pairs that were built once, and copies of them to be changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpipe.config.sections import PipelineConfig
from tests.release.built_pair import build, copied, write_night, write_pair, write_verification


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    """A pair with a good night; not to be changed."""
    pytest.importorskip("torch")
    config = write_pair(tmp_path_factory.mktemp("built"))
    build(config)
    write_verification(config)
    write_night(config)
    return config


@pytest.fixture
def built(built_once: PipelineConfig, tmp_path: Path) -> PipelineConfig:
    """A copy of it. Its large files are links: replace them, and never write into one."""
    return copied(built_once, tmp_path / "moved")
