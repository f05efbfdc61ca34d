"""Repositories around engines that only Triton runs: what a control changes, and what not."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc")

from specpipe.errors import RuntimeUnavailable  # noqa: E402
from specpipe.evaluate.verification import record  # noqa: E402
from specpipe.evaluate.verification.repositories import as_asked, write_own_draft, write_wrong_draft  # noqa: E402
from specpipe.runtimes.config_pbtxt import read_config  # noqa: E402
from specpipe.runtimes.pair.pair import PairOptions  # noqa: E402
from specpipe.runtimes.pair_file import read_pair  # noqa: E402
from tests.runtimes.tensorrt_llm.engines.folders import package, pair_options  # noqa: E402


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A draft on GPU 0 and a target on two others, neither of which can run here."""
    options = pair_options(
        target_world_size=2, target_gpu_ids=[1, 2], draft_gpu_ids=[0], draft_world_size=1
    )
    return package(tmp_path, options)


def parameter(repository: Path, model: str, name: str) -> str:
    value: str = read_config(repository / model / "config.pbtxt").parameters[name].string_value
    return value


def test_the_target_as_its_own_draft_has_its_engine_and_its_gpus(
    repository: Path, tmp_path: Path
) -> None:
    assert parameter(repository, "draft", "gpu_device_ids") == "0"
    own = write_own_draft(repository, tmp_path / "own")
    for role in ("draft", "target"):
        config = own / role / "1" / "engine" / "config.json"
        assert config.samefile(repository / "target" / "1" / "engine" / "config.json")
        assert parameter(own, role, "gpu_device_ids") == "1,2"
        assert parameter(own, role, "max_tokens_in_paged_kv_cache") == "4608"
    settings = read_pair(own).options.runtime_settings
    assert (settings["draft_world_size"], settings["target_world_size"]) == (2, 2)
    assert not read_pair(own).options.adaptive
    assert parameter(repository, "draft", "gpu_device_ids") == "0"


def test_as_asked_nothing_adapts_and_nothing_is_copied() -> None:
    options = PairOptions(num_draft_tokens=4, schedule=((1, 4), (3, 2)), prompt_lookup=True)
    assert as_asked(options) == PairOptions(num_draft_tokens=4, adaptive=False)


def test_a_wrong_draft_takes_the_same_requests_and_loads_no_engine(
    repository: Path, tmp_path: Path
) -> None:
    before = record.repository_digest(record.record_repository(repository.parent))
    wrong = write_wrong_draft(repository, tmp_path / "wrong")
    served = read_config(repository / "draft" / "config.pbtxt")
    config = read_config(wrong / "draft" / "config.pbtxt")
    assert (served.backend, config.backend) == ("tensorrtllm", "python")
    assert list(config.input) == list(served.input)
    assert list(config.output) == list(served.output)
    assert dict(config.parameters).keys() == {"vocab_size"}
    assert (wrong / "draft" / "1" / "model.py").read_text() == (
        "from specpipe.evaluate.verification.wrong_draft import TritonPythonModel\n"
    )
    assert (wrong / "target" / "config.pbtxt").samefile(repository / "target" / "config.pbtxt")
    assert record.repository_digest(record.record_repository(repository.parent)) == before


def test_a_pair_without_a_draft_of_its_own_takes_no_wrong_one(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "draft" / "config.pbtxt").unlink()
    with pytest.raises(RuntimeUnavailable) as caught:
        write_wrong_draft(repository, tmp_path / "wrong")
    assert str(caught.value) == (
        "its library drafts by itself, and takes no draft tokens from elsewhere"
    )


def test_the_tokens_of_a_wrong_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """7919 = 79 * 100 + 19: positions 3, 4 and 5 give 57, 76 and 95 of 100 ids."""
    name = "triton_python_backend_utils"  # Triton's own, which `answer` does not need
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    wrong_draft = importlib.import_module("specpipe.evaluate.verification.wrong_draft")
    tensors = {
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[3]], np.int32),
    }
    found = wrong_draft.answer(tensors, 100)
    np.testing.assert_array_equal(found["output_ids"], [[[57, 76, 95]]])
    np.testing.assert_array_equal(found["sequence_length"], [[3]])
