"""The quickstart pair verified in this process: sound, and with one fault at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy")

from click.testing import CliRunner  # noqa: E402

from specpipe import progress  # noqa: E402
from specpipe.cli.group import main  # noqa: E402
from specpipe.cli.verify import verify  # noqa: E402
from specpipe.config.sections import PipelineConfig  # noqa: E402
from specpipe.errors import ConfigError, RepositoryError  # noqa: E402
from specpipe.evaluate.verification import judge, record, run  # noqa: E402
from specpipe.evaluate.verification.outcome import Findings, Verification, VerifyOptions  # noqa: E402
from specpipe.evaluate.verification.summary import summary  # noqa: E402
from specpipe.runtimes.pair import torch_sampler as torch_sampling  # noqa: E402
from specpipe.runtimes.pair_file import PairFile  # noqa: E402
from specpipe.speculative.verify import Verified  # noqa: E402
from specpipe.triton.server import launcher  # noqa: E402
from tests.evaluate.verification.conftest import QUICKSTART, record_anew  # noqa: E402
from tests.evaluate.verification.test_scorer import change_weights  # noqa: E402
from tests.recorder import Recorder  # noqa: E402

Copy = Callable[..., PipelineConfig]

SMALL = {
    "limit": 2,
    "max_tokens": 8,
    "num_draft_tokens": (4,),
    "is_in_process": True,
    "distance": None,
}


def verified(config: PipelineConfig, **options: Any) -> Verification:
    return run.verify(config, VerifyOptions(**{**SMALL, **options}))


def by_name(done: Verification) -> dict[str, str]:
    return {f"{side.check}, {side.side.name}": side.verdict for side in done.findings.sides}


def test_a_sound_pair_is_identical_on_every_side(copied: Copy) -> None:
    config = copied()
    recorder = Recorder()
    with progress.shown(recorder):
        done = verified(config, limit=3, max_tokens=12, num_draft_tokens=(), distance=0.4)
    assert all(count.done == count.total for count in recorder.counts)
    counts = Counter((count.phase, count.unit, count.total) for count in recorder.counts)
    assert counts["verify", "sides", 18] == counts["sampling", "tests", 10] == 1
    assert counts["greedy: K = 1, 8 at once", "answers", 3] == 1
    assert (
        done.findings.verdict,
        done.findings.reason,
        done.findings.num_ties,
        done.findings.skipped,
    ) == ("identical", None, 0, ())
    sides = [
        "target alone, 8 at once",
        "K = 4, 1 at once",
        "K = 1, 8 at once",
        "K = 2, 8 at once",
        "K = 4, 8 at once",
        "as served, 8 at once",
        "the target as its own draft",
        "a draft that is always wrong",
    ]
    assert by_name(done) == dict.fromkeys(
        [f"{check}, {side}" for check in ("greedy", "seeded") for side in sides]
        + ["checkpoint, the target's checkpoint, scored"],
        "identical",
    )
    assert len(done.findings.tests) == 10
    assert done.path == config.artifacts_dir / "verification.json"
    assert record.verification_fault(config.artifacts_dir) is None
    assert not [p for p in config.artifacts_dir.iterdir() if p.name.startswith(".verify")]

    data = json.loads(done.path.read_text())
    assert {key: data[key] for key in ("format", "kind", "pair", "verdict", "reason")} == {
        "format": 1, "kind": "verify", "pair": "python-code", "verdict": "identical",
        "reason": None,
    }  # fmt: skip
    assert data["prompts"]["count"] == 3 and len(data["prompts"]["digest"]) == 64
    assert set(data["versions"]) >= {"specpipe", "torch", "scipy"}
    assert "cpu" in data["machine"]
    assert data["settings"]["num_draft_tokens"] == [1, 2, 4]
    assert data["settings"]["served_by"] == "this process"
    assert data["threshold"]["dtype"] == "float32"
    assert 0 < data["threshold"]["block_difference"] < 1e-4
    assert (data["sampling"]["distance"], data["sampling"]["power"]) == (0.4, 0.9)
    assert data["repository"]["digest"] == record.repository_digest(
        record.record_repository(config.artifacts_dir)
    )

    lines = summary(done)
    assert lines[0] == (
        "python-code with runtime torch, in this process: 3 prompts of code, "
        f"{sum(check['num_tokens'] for check in data['checks'])} tokens compared with those of the "
        "target alone"
    )
    assert "greedy, the target as its own draft" in lines[7]
    assert lines[7].split("  ")[-1].startswith("3 of 3 identical; 1.00 of ")
    assert any(line.startswith("a tie is a margin of at most one unit") for line in lines)
    assert lines[-1] == "verdict: identical (verification.json)"


def test_a_pair_that_copies_is_asked_one_at_a_time_too(copied: Copy) -> None:
    config = copied("speculation.prompt_lookup=true")
    packaged = config.artifacts_dir / "model_repo" / "speculative" / "1" / "pair.json"
    pair = PairFile.read(packaged)
    served = replace(pair.options, prompt_lookup=True)
    packaged.write_text(PairFile(pair.runtime, served).to_json())
    record_anew(config)
    done = verified(config)
    assert done.findings.verdict == "identical"
    assert [name for name in by_name(done) if "as served" in name] == [
        f"{check}, as served, {load} at once" for check in ("greedy", "seeded") for load in (1, 8)
    ]


def serve(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[list[Path], str]:
    """What the command would serve, and what it says."""
    served: list[Path] = []
    monkeypatch.setattr(launcher, "serve", lambda folder, *_, **__: served.append(folder))
    sets = ["--set", f"output_dir={config.artifacts_dir.parent}"]
    result = CliRunner().invoke(main, ["serve", "--config", str(QUICKSTART), *sets, *arguments])
    return served, result.stderr


def accepts_everything(draft: Sequence[int], target: Sequence[int]) -> Verified:
    """Believes the draft."""
    return Verified((*draft, target[len(draft)]))


def test_a_wrong_accept_rule_is_a_fault_and_is_not_served(
    copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sampling, "verify_by_matching", accepts_everything)
    config = copied()
    done = verified(config)
    assert done.findings.verdict == "fault"
    verdicts = by_name(done)
    assert verdicts["greedy, target alone, 8 at once"] == "identical"
    assert verdicts["greedy, K = 4, 8 at once"] == "fault"
    assert verdicts["greedy, a draft that is always wrong"] == "fault"
    assert verdicts["checkpoint, the target's checkpoint, scored"] == "identical"
    assert done.findings.reason is not None
    assert done.findings.reason.startswith("greedy, K = 4, 1 at once: prompt ")
    refusal = f"python-code did not pass its verification: {done.findings.reason}"
    assert record.verification_fault(config.artifacts_dir) == refusal
    monkeypatch.undo()
    assert serve(config, monkeypatch) == (
        [],
        f"Error: {refusal}, or serve it as it is with --allow-unverified\n",
    )
    assert serve(config, monkeypatch, "--allow-unverified") == (
        [config.artifacts_dir / "model_repo"],
        f"warning: {refusal}; allowed by --allow-unverified\nstarting Triton ...\n",
    )
    assert verified(config).findings.verdict == "identical"
    assert record.verification_fault(config.artifacts_dir) is None


def test_an_engine_with_other_weights_is_a_fault_though_it_equals_itself(copied: Copy) -> None:
    config = copied()
    change_weights(config.artifacts_dir / "model_repo" / "speculative" / "1" / "target")
    record_anew(config)
    done = verified(config)
    verdicts = by_name(done)
    assert verdicts["greedy, K = 4, 8 at once"] == "identical"
    assert verdicts["checkpoint, the target's checkpoint, scored"] == "fault"
    assert done.findings.reason is not None
    assert done.findings.reason.startswith("checkpoint, the target's checkpoint, scored: prompt ")


def test_a_draft_with_other_weights_is_slower_and_not_wrong(copied: Copy) -> None:
    config = copied()
    change_weights(config.artifacts_dir / "model_repo" / "speculative" / "1" / "draft")
    record_anew(config)
    assert verified(config).findings.verdict == "identical"


def test_a_swapped_engine_after_the_verification_is_not_served(copied: Copy) -> None:
    config = copied()
    verified(config)
    change_weights(config.artifacts_dir / "model_repo" / "speculative" / "1" / "draft")
    assert record.verification_fault(config.artifacts_dir) == (
        "python-code was changed since it was verified (speculative/1/draft/model.safetensors "
        "changed): run `specpipe verify` again"
    )


def test_float32_verifies_both_checkpoints_by_the_torch_runtime(copied: Copy) -> None:
    """The quickstart's engines are float32 on a CPU, so this is the artifact's own verification."""
    config = copied()
    done = verified(config, is_float32=True, is_in_process=False)
    assert done.findings.verdict == "identical"
    assert done.path.name == "verification.json"
    assert str(done.findings.threshold) == "a margin of at most 0.0001"
    assert "greedy, as served, 8 at once" not in by_name(done)


def test_float32_of_other_engines_leaves_the_artifacts_verdict_alone(copied: Copy) -> None:
    """With more draft tokens than its engines were built for, others are built for the time."""
    config = copied()
    done = verified(config, is_float32=True, num_draft_tokens=(6,))
    assert done.findings.verdict == "identical"
    assert done.path == config.artifacts_dir / "results" / "verify-float32.json"
    assert not (config.artifacts_dir / "verification.json").exists()


def test_a_gate_is_asked_with_speculation_and_without(copied: Copy, tmp_path: Path) -> None:
    gate = tmp_path / "gate.jsonl"
    lines = [{"prompt": "import os\nimport sy", "regex": "."}, {"prompt": "x = 1", "exact": "?"}]
    gate.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = verified(copied(), gate=gate, gate_pass_rate=1.0)
    assert done.findings.gate is not None
    assert (done.findings.gate.num_right, done.findings.gate.num_right_target_alone) == (1, 1)
    assert (done.findings.verdict, done.findings.reason) == (
        "fault",
        "1 of 2 answers of the gate are right, less than the share of 1 that is asked for",
    )
    data = json.loads(done.path.read_text())["gate"]
    assert (data["source"], data["num_prompts"]) == (str(gate), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_draft_tokens": (9,)},
            "--num-draft-tokens 9: this pair drafts between 1 and 4 tokens",
        ),
        (
            {"max_tokens": 1},
            "code: answers of one token are never drafted; let them have 2 at least (--max-tokens)",
        ),
        (
            {"is_chat": True},
            "prompt running_mean is a conversation, and the target has no chat template: ask it as "
            "a text, without --chat",
        ),
        (
            {"prompts": "no-such-set"},
            "no-such-set is no set of prompts: expected one of chat, code",
        ),
    ],
)
def test_what_cannot_be_verified_is_refused(
    copied: Copy, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        verified(copied(), **options)
    assert str(caught.value).startswith(message)


def test_answers_that_show_little_are_told(copied: Copy, tmp_path: Path) -> None:
    prompts = tmp_path / "short.jsonl"
    lines = [
        {"prompt": "import os\nimport ", "max_tokens": 2},
        {"prompt": "def f(", "max_tokens": 2},
    ]
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = verified(copied(), prompts=str(prompts))
    assert done.findings.notes == (
        "the greedy answers of the target to 2 prompts have 4 tokens in all, which shows little: "
        "ask other prompts, or a chat model with --chat",
    )
    assert any(line.startswith("note: the greedy answers") for line in summary(done))


def test_an_over_long_prompt_is_refused_by_name(copied: Copy, tmp_path: Path) -> None:
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"name": "novel", "prompt": "x = 1\n" * 1000}))
    with pytest.raises(ConfigError, match="prompt novel has .* may have 1024 .engine.max_seq_len."):
        verified(copied(), prompts=str(prompts))


def test_a_repository_that_is_built_meanwhile_has_no_verdict(
    copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copied()

    def late(self: run._Run) -> Findings:
        findings = asks(self)
        change_weights(config.artifacts_dir / "model_repo" / "speculative" / "1" / "draft")
        return findings

    asks = run._Run.run
    monkeypatch.setattr(run._Run, "run", late)
    with pytest.raises(RepositoryError, match="model_repo was changed while it was verified"):
        verified(config, limit=1)
    assert not (config.artifacts_dir / "verification.json").exists()


def test_what_was_not_built_is_refused(copied: Copy) -> None:
    with pytest.raises(RepositoryError, match="does not exist: run `specpipe build --config"):
        verified(copied("name=another"))


def command(config: PipelineConfig, *arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(
        verify,
        ["--config", str(QUICKSTART), "--set", f"output_dir={config.artifacts_dir.parent}",
         "--in-process", "--limit", "1", "--max-tokens", "8", "--no-sampling", *arguments],
    )  # fmt: skip
    return result.exit_code, result.stdout, result.stderr


def test_the_command_prints_the_verdict_and_exits_with_0(copied: Copy) -> None:
    code, printed, log = command(copied(), "--num-draft-tokens", "1,4")
    assert code == 0
    assert printed.splitlines()[-1] == "verdict: identical (verification.json)"
    assert "left out: unseeded sampling: not asked for" in printed
    assert "greedy: K = 4, 8 at once" in log


def test_the_command_exits_with_1_and_one_sentence_on_a_fault(
    copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sampling, "verify_by_matching", accepts_everything)
    code, printed, log = command(copied())
    assert code == 1
    assert "verdict: fault (verification.json)" in printed
    (error,) = [line for line in log.splitlines() if line.startswith("Error: ")]
    assert error.startswith("Error: verification failed: greedy, K = 4, 1 at once: prompt ")


def test_the_command_prints_json_without_the_list_of_files(copied: Copy) -> None:
    code, printed, _ = command(copied(), "--json")
    data = json.loads(printed)
    assert code == 0
    assert data["verdict"] == "identical"
    assert list(data["repository"]) == ["digest"]


def test_settings_without_effect_are_usage_errors(copied: Copy) -> None:
    config = copied()
    code, _, log = command(config, "--distance", "0.2")  # which says --no-sampling
    assert code == 2
    assert "Error: --distance has no effect with --no-sampling." in log
    code, _, log = command(config, "--gate-pass-rate", "0.5")
    assert code == 2
    assert "Error: --gate-pass-rate has no effect without --gate." in log


def test_strict_fails_on_ties(copied: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A threshold that is wide enough for every difference makes ties of a wrong rule's faults."""
    monkeypatch.setattr(torch_sampling, "verify_by_matching", accepts_everything)
    monkeypatch.setattr(judge, "FLOAT32_MARGIN", 1e3)
    monkeypatch.setattr("specpipe.evaluate.verification.draft_counts.MAX_WRONG_ACCEPTANCE", 1.0)
    config = copied()
    done = verified(config, is_float32=True)
    assert (done.findings.verdict, done.findings.reason) == ("tie", None)
    assert done.findings.num_ties > 0
    (line, *_) = [line for line in summary(done) if line.startswith("tie: greedy, ")]
    assert line.endswith(" times")
    strict = verified(config, is_float32=True, is_strict=True)
    assert strict.findings.verdict == "tie"
    assert (
        strict.findings.reason
        == f"{strict.findings.num_ties} numerical ties, and --strict allows none"
    )
