"""The folder of models that Triton is given: names, and what points to a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specpipe.runtimes.config_pbtxt import parameter, read_config
from specpipe.triton.server import served_models
from specpipe.triton.server.served_models import Version

CONFIGS = {
    "ensemble": """
        platform: "ensemble"
        ensemble_scheduling { step { model_name: "speculative" model_version: -1 } }
    """,
    "speculative": """
        name: "speculative"  backend: "python"
        parameters { key: "target_model_name" value { string_value: "target" } }
        parameters { key: "tokenizer_dir" value { string_value: "target" } }
        parameters { key: "executor_worker_path" value { string_value: "/opt/target/worker" } }
    """,
    "postprocessing": """
        backend: "python"
        parameters { key: "cancels" value { string_value: "speculative" } }
    """,
    "target": """
        backend: "tensorrtllm"
        parameters { key: "gpt_model_path" value { string_value: "target/1/engine" } }
    """,
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, config in CONFIGS.items():
        version = tmp_path / "built" / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(name)
        (version.parent / "config.pbtxt").write_text(config)
    return tmp_path / "built"


def described(folder: Path) -> dict[str, Any]:
    """What each config says, of that which may name a model."""
    found = {}
    for path in sorted(folder.iterdir()):
        config = read_config(path / "config.pbtxt")
        found[config.name] = [
            *(step.model_name for step in config.ensemble_scheduling.step),
            *(parameter(config, key) for key in sorted(config.parameters)),
        ]
        assert path.name == config.name
    return found


def test_a_version_with_a_number_has_it_in_every_name_but_the_ensembles(
    repository: Path, tmp_path: Path
) -> None:
    served_models.write(tmp_path / "served", Version(repository, 7))
    assert described(tmp_path / "served") == {
        "ensemble": ["speculative_7"],
        "postprocessing_7": ["speculative_7"],
        "speculative_7": ["/opt/target/worker", "target_7", "target"],
        "target_7": ["target_7/1/engine"],
    }
    assert (tmp_path / "served" / "target_7" / "1" / "model.py").read_text() == "target"
    versions = [path.name for path in (tmp_path / "served" / "ensemble").iterdir() if path.is_dir()]
    assert versions == ["7"]


def test_a_pair_without_a_number_is_served_under_its_own_names(
    repository: Path, tmp_path: Path
) -> None:
    served_models.write(tmp_path / "served", Version(repository))
    assert described(tmp_path / "served") == described_as_built(repository)
    assert (tmp_path / "served" / "ensemble" / "1").is_dir()


def described_as_built(repository: Path) -> dict[str, Any]:
    return {
        "ensemble": ["speculative"],
        "postprocessing": ["speculative"],
        "speculative": ["/opt/target/worker", "target", "target"],
        "target": ["target/1/engine"],
    }


def test_the_ensemble_is_pointed_to_another_version_alone(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "served"
    served_models.write(out, Version(repository))
    served_models.write_inner(out, Version(repository, 8))
    served_models.write_ensemble(out, Version(repository, 8), "ensemble")
    assert read_config(out / "ensemble" / "config.pbtxt").ensemble_scheduling.step[
        0
    ].model_name == ("speculative_8")
    assert [path.name for path in (out / "ensemble").iterdir() if path.is_dir()] == ["8"]
    served_models.remove(out, *Version(repository).names.values())
    assert set(described(out)) == {"ensemble", "postprocessing_8", "speculative_8", "target_8"}
