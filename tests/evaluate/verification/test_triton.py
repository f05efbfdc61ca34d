"""The quickstart pair verified through a real Triton: sound, and with a wrong accept rule in it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy")

from specpipe.build import execution, planning, repositories
from specpipe.build.load import load_config  # noqa: E402
from specpipe.config.sections import PipelineConfig  # noqa: E402
from specpipe.errors import ConfigError  # noqa: E402
from specpipe.evaluate import serving  # noqa: E402
from specpipe.evaluate.verification import record, run  # noqa: E402
from specpipe.evaluate.verification.outcome import VerifyOptions  # noqa: E402
from specpipe.evaluate.verification.repositories import write_as_asked  # noqa: E402
from specpipe.runtimes.launch import Launch  # noqa: E402
from specpipe.runtimes.pair_file import read_pair  # noqa: E402
from specpipe.runtimes.tensorrt_llm import TensorRTLLMRuntime  # noqa: E402
from specpipe.triton.server import launcher  # noqa: E402
from tests.evaluate.verification.conftest import QUICKSTART, record_anew  # noqa: E402
from tests.quiet import Quiet  # noqa: E402
from tests.tensorrt_llm_stand_ins.llm_api import FOLDER  # noqa: E402
from tests.tensorrt_llm_stand_ins.triton_backend.engines import (  # noqa: E402
    triton_with_stand_in,
    write_repository,
)

ROOT = Path(__file__).parents[3]

Copy = Callable[..., PipelineConfig]

_BELIEVES_THE_DRAFT = """
from specpipe.runtimes.pair import torch_sampler as _sampling
from specpipe.speculative.verify import Verified as _Verified

_sampling.verify_by_matching = lambda draft, target: _Verified((*draft, target[len(draft)]))
"""


def test_a_sound_pair_is_identical_through_triton(copied: Copy) -> None:
    config = copied()
    done = run.verify(config, VerifyOptions(limit=3, max_tokens=12, distance=0.4))
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
    data = json.loads(done.path.read_text())
    assert data["settings"]["served_by"] == "Triton"
    assert re.fullmatch(r"\d+\.\d+\.\d+", data["versions"]["triton"])
    assert record.verification_fault(config.artifacts_dir) is None


def test_a_server_that_believes_its_draft_is_a_fault(copied: Copy) -> None:
    config = copied()
    model = config.artifacts_dir / "model_repo" / "speculative" / "1" / "model.py"
    model.write_text(_BELIEVES_THE_DRAFT + model.read_text())
    record_anew(config)
    done = run.verify(config, VerifyOptions(limit=2, max_tokens=12, distance=None))
    verdicts = {f"{side.check}, {side.side.name}": side.verdict for side in done.findings.sides}
    assert verdicts["greedy, target alone, 8 at once"] == "identical"
    assert verdicts["greedy, K = 4, 8 at once"] == "fault"
    # Its rule is the server's own; in this process it is right.
    assert verdicts["greedy, a draft that is always wrong"] == "identical"
    refusal = record.verification_fault(config.artifacts_dir)
    assert refusal == f"python-code did not pass its verification: {done.findings.reason}"


@pytest.mark.slow
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
    (config.artifacts_dir / "target" / "engine.manifest.json").unlink()
    write_repository(config.artifacts_dir / "model_repo")
    record_anew(config)
    monkeypatch.setattr(serving, "running", partial(launcher.running, binary=binary))
    monkeypatch.setattr(TensorRTLLMRuntime, "launch", lambda *_, **__: Launch())

    done = run.verify(
        config, VerifyOptions(limit=2, max_tokens=12, num_draft_tokens=(2, 8), distance=0.4)
    )
    assert (done.findings.verdict, done.findings.reason) == ("identical", None)
    assert [f"{side.check}, {side.side.name}" for side in done.findings.sides] == [
        "greedy, target alone, 8 at once",
        "greedy, K = 8, 1 at once",
        "greedy, K = 2, 8 at once",
        "greedy, K = 8, 8 at once",
        "greedy, the target as its own draft",
        "greedy, a draft that is always wrong",
        "checkpoint, the target's checkpoint, scored",
    ]
    own, wrong = done.findings.sides[-3:-1]
    assert own.num_accepted_tokens == own.num_draft_tokens > 0
    assert (wrong.num_accepted_tokens, wrong.num_draft_tokens > own.num_draft_tokens) == (0, True)
    assert done.findings.skipped == (
        "seeded: runtime tensorrt_llm promises no text that is the same for every K",
    )
    assert len(done.findings.tests) == 10
    with pytest.raises(ConfigError, match="--in-process: the engines of runtime tensorrt_llm do"):
        run.verify(config, VerifyOptions(is_in_process=True))


def test_the_repository_with_k_as_asked_leaves_the_artifact_as_it_is(
    copied: Copy, tmp_path: Path
) -> None:
    repository = copied().artifacts_dir / "model_repo"
    before = record.repository_digest(record.record_repository(repository.parent))
    fixed = write_as_asked(repository, tmp_path / "fixed")
    assert read_pair(repository).options.adaptive
    assert not read_pair(fixed).options.adaptive
    assert read_pair(fixed).options.num_draft_tokens == 4
    assert record.repository_digest(record.record_repository(repository.parent)) == before
    weights = "speculative/1/target/model.safetensors"
    assert (fixed / weights).samefile(repository / weights)


_FAKE_LIBRARY = f"""\
import sys
sys.path[:0] = [{str(FOLDER)!r}, {str(ROOT)!r}]
"""


@pytest.mark.slow
def test_a_library_that_drafts_in_every_step_is_asked_for_the_target_alone_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-LLM's backend pytorch, around the fake of it, with a target that specpipe quantized.

    It serves Hugging Face's layout, so the scorer converts that.
    """
    config = load_config(
        QUICKSTART,
        [
            f"output_dir={tmp_path}",
            "engine={runtime: tensorrt_llm, max_seq_len: 1024, tensorrt_llm: {backend: pytorch}}",
            "target.quantization={format: fp8_pc_pt}",
            "quality.measure=false",
        ],
    )
    execution.run(planning.plan(config), Quiet())
    model = repositories.built_repository(config) / "speculative" / "1" / "model.py"
    model.write_text(_FAKE_LIBRARY + model.read_text())
    record_anew(config)
    gate = tmp_path / "gate.jsonl"
    gate.write_text(json.dumps({"prompt": "import os\nimport sy", "regex": "."}) + "\n")

    done = run.verify(config, VerifyOptions(limit=2, max_tokens=8, distance=0.4, gate=gate))
    findings = done.findings
    assert (findings.reason, [f"{side.check}, {side.side.name}" for side in findings.sides]) == (
        None,
        [
            "greedy, target alone, 8 at once",
            "greedy, K = 4, 1 at once",
            "greedy, K = 4, 8 at once",
            "greedy, the target as its own draft",
            "checkpoint, the target's checkpoint, scored",
        ],
    )
    assert findings.sides[3].num_accepted_tokens > 0.8 * findings.sides[3].num_draft_tokens
    assert findings.threshold.rounding == "activations to FP8"
    assert findings.gate is not None
    assert (findings.gate.num_right, findings.gate.num_right_target_alone) == (1, 1)
    assert findings.notes == (
        "this pair drafts 4 tokens in every step, whatever a request asks for: the target alone "
        "was asked in a server of its own",
    )
    seeded, sampling, wrong = findings.skipped
    assert seeded.startswith("seeded: runtime tensorrt_llm promises no text")
    assert sampling.startswith("unseeded sampling: the server refuses it: temperature is 1.0: ")
    assert wrong == (
        "a draft that is always wrong: its library drafts by itself, and takes no draft tokens "
        "from elsewhere"
    )
