"""The quickstart pair, built once for all tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specpipe.build import execution, planning
from specpipe.build.load import load_config
from specpipe.config.sections import PipelineConfig
from specpipe.machine.manifest import MANIFEST_SUFFIX, InputRecord, read_manifest, record_files
from tests.quiet import Quiet

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def record_anew(config: PipelineConfig, moved_from: Path | None = None) -> None:
    """Makes the manifests of a changed pair fit it, as a builder with a bug would leave them."""

    def here(path: str) -> Path:
        if moved_from is not None and Path(path).is_relative_to(moved_from):
            return config.artifacts_dir / Path(path).relative_to(moved_from)
        return Path(path)

    for path in config.artifacts_dir.rglob(f"*{MANIFEST_SUFFIX}"):
        artifact = path.with_name(path.name.removesuffix(MANIFEST_SUFFIX))
        found = read_manifest(artifact)
        assert found is not None
        paths = [here(read.path) for read in found.inputs]
        inputs = [InputRecord(str(path), record_files(path)) for path in paths]
        replace(found, inputs=tuple(inputs), outputs=record_files(artifact)).write(path)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a build; not to be changed."""
    pytest.importorskip("torch")
    output_dir = tmp_path_factory.mktemp("engines")
    config = load_config(QUICKSTART, [f"output_dir={output_dir}"])
    execution.run(planning.plan(config), Quiet())
    return output_dir


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Callable[..., PipelineConfig]:
    """Copies the built pair for a test that writes there, or breaks it; returns its config."""

    def copy(*overrides: str) -> PipelineConfig:
        shutil.copytree(built, tmp_path / "engines", dirs_exist_ok=True)
        config = load_config(QUICKSTART, [f"output_dir={tmp_path / 'engines'}", *overrides])
        for path in config.artifacts_dir.rglob(f"*{MANIFEST_SUFFIX}"):
            path.write_text(path.read_text().replace(f"{built}/", f"{tmp_path / 'engines'}/"))
        return config

    return copy
