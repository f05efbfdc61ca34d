"""The quickstart pair verified through a real Triton: sound, and with a wrong accept rule in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy")

from specpipe.config import PipelineConfig  # noqa: E402
from specpipe.errors import ConfigError  # noqa: E402
from specpipe.runtimes.base import Launch  # noqa: E402
from specpipe.runtimes.tensorrt_llm import TensorRTLLMRuntime  # noqa: E402
from specpipe.triton import launcher  # noqa: E402
from specpipe.triton.repository import read_pair  # noqa: E402
from specpipe.verification import record, run, subject  # noqa: E402
from specpipe.verification.controls import write_fixed_repository  # noqa: E402
from specpipe.verification.outcome import Options  # noqa: E402
from tests.tensorrtllm_backend.engines import (  # noqa: E402
    triton_with_stand_in,
    write_repository,
)

Copy = Callable[..., PipelineConfig]

_BELIEVES_THE_DRAFT = """
from specpipe.runtimes.torch import sampling as _sampling
from specpipe.speculative.verify import Verified as _Verified

_sampling.verify_by_matching = lambda draft, target: _Verified((*draft, target[len(draft)]))
"""


def test_a_sound_pair_is_identical_through_triton(copied: Copy) -> None:
    config = copied()
    done = run.verify(config, Options(limit=3, max_tokens=12, distance=0.4))
    assert (done.findings.verdict, done.findings.reason, done.findings.skipped) == (
        "identical",
        None,
        (),
    )
    assert {"greedy, K = 4, 8 at once", "seeded, as served, 8 at once"} <= {
        f"{side.check}, {side.side.name}" for side in done.findings.sides
    }
    assert all(side.num_tokens > 0 for side in done.findings.sides)
    assert len(done.findings.tests) == 10 and not any(
        test.is_flagged for test in done.findings.tests
    )
    assert json.loads(done.path.read_text())["settings"]["served_by"] == "Triton"
    assert record.refusal(config.artifacts_dir) is None


def test_a_server_that_believes_its_draft_is_a_fault(copied: Copy) -> None:
    config = copied()
    model = config.artifacts_dir / "model_repo" / "speculative" / "1" / "model.py"
    model.write_text(_BELIEVES_THE_DRAFT + model.read_text())
    done = run.verify(config, Options(limit=2, max_tokens=12, distance=None))
    verdicts = {f"{side.check}, {side.side.name}": side.verdict for side in done.findings.sides}
    assert verdicts["greedy, target alone, 8 at once"] == "identical"
    assert verdicts["greedy, K = 4, 8 at once"] == "fault"
    # Its rule is the server's own; in this process it is right.
    assert verdicts["greedy, a draft that is always wrong"] == "identical"
    refusal = record.refusal(config.artifacts_dir)
    assert refusal == f"python-code did not pass its verification: {done.findings.reason}"


def test_engines_that_run_in_triton_only_are_scored_by_their_checkpoint(
    copied: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repository for TensorRT-LLM's C++ backend, around the stand-in for it."""
    binary = triton_with_stand_in(tmp_path / "backends")
    if binary is None:
        pytest.skip("this Triton takes no other backends than its own")
    config = copied("engine.dtype=float32")
    shutil.rmtree(config.artifacts_dir / "model_repo")
    shutil.rmtree(config.artifacts_dir / "target" / "engine")
    write_repository(config.artifacts_dir / "model_repo")
    monkeypatch.setattr(subject, "running", partial(launcher.running, binary=binary))
    monkeypatch.setattr(TensorRTLLMRuntime, "launch", lambda *_, **__: Launch())

    done = run.verify(
        config, Options(limit=2, max_tokens=12, num_draft_tokens=(2, 8), distance=0.4)
    )
    assert (done.findings.verdict, done.findings.reason) == ("identical", None)
    assert [f"{side.check}, {side.side.name}" for side in done.findings.sides] == [
        "greedy, target alone, 8 at once",
        "greedy, K = 8, 1 at once",
        "greedy, K = 2, 8 at once",
        "greedy, K = 8, 8 at once",
        "checkpoint, the target's checkpoint, scored",
    ]
    assert done.findings.skipped == (
        "seeded: with runtime tensorrt_llm another K draws another text",
        "the target as its own draft: runtime tensorrt_llm does not run in this process",
        "a draft that is always wrong: only runtime torch has engines to change",
    )
    assert len(done.findings.tests) == 10
    with pytest.raises(ConfigError, match="--in-process: the engines of runtime tensorrt_llm do"):
        run.verify(config, Options(is_in_process=True))


def test_the_repository_with_k_as_asked_leaves_the_artifact_as_it_is(
    copied: Copy, tmp_path: Path
) -> None:
    repository = copied().artifacts_dir / "model_repo"
    before = record.repository_digest(record.record_repository(repository.parent))
    fixed = write_fixed_repository(repository, tmp_path / "fixed")
    assert read_pair(repository).options.adaptive
    assert not read_pair(fixed).options.adaptive
    assert read_pair(fixed).options.num_draft_tokens == 4
    assert record.repository_digest(record.record_repository(repository.parent)) == before
    weights = "speculative/1/target/model.safetensors"
    assert (fixed / weights).samefile(repository / weights)
