"""The quickstart pair, built once for all tests of this folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specpipe.build import execution, planning
from specpipe.build.load import load_config
from specpipe.config.sections import PipelineConfig
from specpipe.text.files import TOKENIZER_FILES
from tests.quiet import Quiet
from tests.toy import write_toy_checkpoint

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output_dir of the build."""
    output_dir = tmp_path_factory.mktemp("engines")
    config = load_config(QUICKSTART, [f"output_dir={output_dir}"])
    execution.run(planning.plan(config), Quiet())
    return output_dir


@pytest.fixture
def config(built: Path) -> PipelineConfig:
    return load_config(QUICKSTART, [f"output_dir={built}"])


@pytest.fixture(scope="session")
def random_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with the pair's tokenizer and random weights."""
    target = ROOT / "models" / "python-code" / "target"
    folder = tmp_path_factory.mktemp("checkpoints") / "random"
    write_toy_checkpoint(
        folder,
        vocab_size=4096,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    for name in TOKENIZER_FILES:
        if name != "config.json" and (target / name).is_file():
            shutil.copyfile(target / name, folder / name)
    return folder
