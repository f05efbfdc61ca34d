"""Nights of the quickstart pair in CI-sized form: what is rebuilt, what is caught, what is kept."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

import huggingface_hub  # noqa: E402
import torch  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from specpipe.build import (
    planning,
)
from specpipe.build.load import load_config  # noqa: E402
from specpipe.cli.lock import lock as lock_command  # noqa: E402
from specpipe.cli.nightly import nightly  # noqa: E402
from specpipe.evaluate.nightly import facts, latency, record  # noqa: E402
from specpipe.evaluate.nightly.all import run_all  # noqa: E402
from specpipe.evaluate.nightly.record import CheckpointUsed, Run  # noqa: E402
from specpipe.evaluate.nightly.run import Finished, NightlyOptions, _PairRun  # noqa: E402
from specpipe.evaluate.report import page  # noqa: E402
from specpipe.evaluate.verification import run as verification  # noqa: E402
from specpipe.evaluate.verification.outcome import Findings, Verification  # noqa: E402
from specpipe.evaluate.verification.verdict import TieThreshold  # noqa: E402
from specpipe.machine.manifest import manifest_path, read_manifest, record_files  # noqa: E402
from specpipe.stores.promoted import write_promotion  # noqa: E402
from specpipe.stores.store import Promotion  # noqa: E402
from specpipe.version import __version__  # noqa: E402
from tests.evaluate.nightly.recorded import speed_up  # noqa: E402

MODELS = Path(__file__).parents[3] / "models" / "python-code"

YAML = """
name: pair
draft: {checkpoint: draft}
target: {checkpoint: target}
engine: {max_batch_size: 4, max_seq_len: 256}
# A response for each step, so that acceptance is known by position through Triton, too.
serving: {stream_interval_ms: 0}
# A test must not fail for a machine that is busy: no thresholds on speed.
nightly: {num_prompts: 3, max_tokens: 12, concurrencies: [2], rounds: 1, min_speed_up: null,
          min_speed_up_ratio: null, max_latency_ratio: null}
"""

STAGES = [
    "check",
    "draft/convert",
    "target/convert",
    "draft/build_engine",
    "target/build_engine",
    "package",
]


def run(folder: Path, **options: Any) -> Finished:
    (done,) = run_many([folder / "pair.yaml"], **options)
    return done


def run_many(paths: Sequence[Path], **options: Any) -> list[Finished]:
    return run_all(
        paths, [], NightlyOptions(**{"is_in_process": True, **options}), report=lambda line: None
    )


def rebuilt(found: Run) -> dict[str, tuple[str, ...]]:
    return {stage.stage: stage.reasons for stage in found.stages if stage.reasons}


def history(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "engines" / "pair" / "results" / "nightly.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A pair after its first night; not to be changed."""
    folder = tmp_path_factory.mktemp("first")
    shutil.copytree(MODELS, folder, dirs_exist_ok=True)
    (folder / "pair.yaml").write_text(YAML)
    return folder, run(folder)


@pytest.fixture
def folder(first: tuple[Path, Finished], tmp_path: Path) -> Path:
    """A copy of that pair, to be changed. The results came from another folder: all is hashed."""
    shutil.copytree(first[0], tmp_path / "pair")
    return tmp_path / "pair"


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws nothing."""
    monkeypatch.setattr(page, "write_report", lambda folder: None)


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that finds nothing wrong at once."""
    findings = Findings(
        sides=(), tests=(), gate=None, threshold=TieThreshold(dtype="float32"), skipped=()
    )
    monkeypatch.setattr(
        verification, "verify", lambda *args, **kwargs: Verification(findings, Path())
    )


@pytest.fixture
def quick(passing: None, unreported: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """That, and a benchmark that measures nothing."""
    monkeypatch.setattr(_PairRun, "_bench", lambda self, asked: None)
    monkeypatch.setattr(facts, "speed_ups", lambda measured: [])
    monkeypatch.setattr(latency, "latencies", lambda measured: [])


def test_first_night_builds_everything_and_becomes_the_last_good_run(
    first: tuple[Path, Finished],
) -> None:
    folder, done = first
    found = done.run
    assert (found.outcome, found.reasons, done.last) == ("good", [], None)
    assert found.notes == ["no run before this one: nothing to compare with"]
    assert rebuilt(found) == dict.fromkeys(STAGES, ("not built yet",))
    assert found.verification is not None and found.verification.verdict == "identical"
    assert found.acceptance is not None and 0.1 < found.acceptance.rate < 0.9
    prompts = found.acceptance.prompts
    assert [prompt.kind for prompt in prompts] == ["code"] * 3
    for total in ("num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(prompt, total) for prompt in prompts) == getattr(found.acceptance, total)
    for prompt in prompts:
        assert sum(prompt.accepted_at) == prompt.num_accepted_tokens
        assert prompt.judged_at[1:] == tuple(
            min(judged, accepted)
            for judged, accepted in zip(prompt.judged_at[1:], prompt.accepted_at, strict=False)
        )
    assert {latency.concurrency for latency in found.latencies} == {2}
    assert len(found.latencies) == 4
    assert [speed_up.concurrency for speed_up in found.speed_ups] == [2]
    assert found.speed_ups[0].num_answers == 6 and found.speed_ups[0].num_failed == 0
    # 5.5 and 0.9 million weights in float32 take 22 and 3.6 MB.
    sizes = {name: round(size / 1e6) for name, size in found.sizes_bytes.items()}
    assert sizes == {"draft engine": 4, "target engine": 22, "repository": 26}
    assert [used.revision for used in found.checkpoints.values()] == [None, None]
    assert record.read_last_good(folder / "engines/pair/results/nightly.json") == found
    verified = json.loads((folder / "engines/pair/verification.json").read_text())
    assert found.repository == verified["repository"]["digest"]
    report = folder / "engines/pair/report"
    html = (report / "report.html").read_text()
    assert '<span class="value">lossless</span>' in html and 'id="figure-ratio"' in html
    assert (report / "ratio.png").is_file()
    bench = json.loads((folder / "engines/pair/results/nightly-bench.json").read_text())
    assert (bench["kind"], [load["concurrency"] for load in bench["loads"]]) == ("bench", [2])


def test_unchanged_inputs_rebuild_nothing(
    first: tuple[Path, Finished], folder: Path, unreported: None
) -> None:
    done = run(folder)
    assert (done.run.outcome, done.run.reasons, done.run.notes) == ("good", [], [])
    assert [stage.stage for stage in done.run.stages] == STAGES
    assert rebuilt(done.run) == {}
    assert done.last == first[1].run
    assert done.run.compared_with == first[1].run.made_at
    for name in ("checkpoints", "acceptance", "sizes_bytes"):
        assert getattr(done.run, name) == getattr(first[1].run, name)
    assert [line["outcome"] for line in history(folder)] == ["good", "good"]


def test_a_swapped_draft_is_caught_by_its_acceptance(
    first: tuple[Path, Finished], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "draft" / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (0.1 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    summaries = [tmp_path / "summary.md", tmp_path / "of_the_job.md"]
    summaries[1].write_text("of an earlier step\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summaries[1]))

    result = CliRunner().invoke(
        nightly, [str(folder / "pair.yaml"), "--in-process", f"--summary={summaries[0]}"]
    )

    assert result.exit_code == 1
    line = history(folder)[-1]
    before = first[1].run.acceptance
    assert before is not None
    now = line["acceptance"]["num_accepted_tokens"] / line["acceptance"]["num_draft_tokens"]
    assert now < 0.1
    assert line["outcome"] == "bad"
    (sentence,) = line["reasons"]
    assert re.fullmatch(
        rf"acceptance rate fell to {now / before.rate:.3f} \([\d.]+ to [\d.]+\) of the last good "
        rf"run's, from {before.rate:.3f} to {now:.3f}; nightly\.min_acceptance_ratio is 0\.95",
        sentence,
    )
    assert line["changes"] == ["draft: other model.safetensors"]
    changed = "changed since the last good run: draft: other model.safetensors"
    assert result.stderr.splitlines()[-2:] == [f"Error: pair: {sentence}", f"pair: {changed}"]
    assert line["verification"]["verdict"] == "identical"  # it is lossless all the same
    assert {stage["stage"] for stage in line["stages"] if stage["reasons"]} == {
        "draft/convert", "draft/build_engine", "package",
    }  # fmt: skip
    last_good = record.read_last_good(folder / "engines/pair/results/nightly.json")
    assert last_good == first[1].run
    text = summaries[0].read_text()
    assert f"- {sentence}\n- {changed}\n- rebuilt draft/convert: input {path} changed\n" in text
    assert result.stdout == text
    assert summaries[1].read_text() == "of an earlier step\n" + text


def test_a_trained_draft_is_held_against_what_is_promoted(
    first: tuple[Path, Finished], folder: Path, tmp_path: Path, unreported: None
) -> None:
    """A parallel one whose mask was never trained: lossless, and with 0.99 as the floor bad."""
    trained = tmp_path / "trained"
    shutil.copytree(folder / "draft", trained)
    said = json.loads((trained / "config.json").read_text()) | {"pard_token": 1}
    (trained / "config.json").write_text(json.dumps(said))
    pair = folder / "engines" / "pair"
    version = pair / "versions" / "7" / "results"
    version.mkdir(parents=True)
    (pair / "results" / "nightly.json").rename(version / "nightly.json")
    promotion = Promotion(number=7, digest="d" * 64, promoted_at="2026-11-26T02:23:00+00:00")
    write_promotion(pair / "promoted.json", promotion)

    command = [str(folder / "pair.yaml"), "--in-process", "--set", f"draft.checkpoint={trained}"]
    command += ["--set", "nightly.min_acceptance_rate=0.99"]
    assert CliRunner().invoke(nightly, command).exit_code == 1
    line = history(folder)[-1]
    assert (line["compared_version"], line["verification"]["verdict"]) == (7, "identical")
    assert line["changes"][0] == "draft: other config.json"
    assert any("under nightly.min_acceptance_rate 0.99" in reason for reason in line["reasons"])
    (note,) = (note for note in line["notes"] if "not compared" in note)
    assert note.startswith("acceptance is not compared with version 7: another kind of draft")


def test_an_engine_that_is_not_the_target_is_a_fault_and_is_not_timed(
    folder: Path, unreported: None
) -> None:
    """As a builder with a bug would leave it: what is recorded is what is there."""
    repository = folder / "engines" / "pair" / "model_repo"
    weights = repository / "speculative" / "1" / "target" / "model.safetensors"
    tensors = load_file(weights)
    name = next(n for n, t in tensors.items() if t.ndim == 2 and "layers.1." in n)
    tensors[name] = tensors[name] * 2.0
    weights.unlink()  # a link to the engine's own file
    save_file(tensors, weights)
    manifest = read_manifest(repository)
    assert manifest is not None
    replace(manifest, outputs=record_files(repository)).write(manifest_path(repository))

    found = run(folder).run
    assert (found.outcome, rebuilt(found), found.speed_ups) == ("bad", {}, [])
    assert found.verification is not None and found.verification.verdict == "fault"
    assert found.reasons[0] == f"verification: {found.verification.reason}"
    assert "the target's checkpoint" in found.reasons[0]


def test_damage_on_the_disk_is_mended_and_told(folder: Path, quick: None) -> None:
    engine = folder / "engines" / "pair" / "target" / "engine" / "model.safetensors"
    status, whole = engine.stat(), engine.read_bytes()
    with engine.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 0x40]))
    os.utime(engine, ns=(status.st_atime_ns, status.st_mtime_ns))

    found = run(folder).run
    assert (found.outcome, found.reasons) == ("good", [])
    damaged = "damaged: file model.safetensors is not what was built"
    assert rebuilt(found)["target/build_engine"] == (damaged,)
    served = folder / "engines/pair/model_repo/speculative/1/target/model.safetensors"
    assert engine.read_bytes() == whole == served.read_bytes()


def test_a_config_that_cannot_be_built_does_not_stop_the_others(folder: Path, quick: None) -> None:
    (folder / "lost.yaml").write_text(
        "name: lost\ndraft: {checkpoint: a/b/c}\ntarget: {checkpoint: target}\n"
    )
    (folder / "mistyped.yaml").write_text("nme: pair\n")
    shutil.copy(folder / "pair.yaml", folder / "twin.yaml")
    names = ["lost", "mistyped", "pair", "twin"]
    done = run_many([folder / f"{name}.yaml" for name in names])
    assert [(d.run.pair, d.run.outcome) for d in done] == [
        ("lost", "unfinished"), ("mistyped", "unfinished"), ("pair", "good"), ("twin", "unfinished")
    ]  # fmt: skip
    assert done[0].run.reasons == [f"draft.checkpoint a/b/c: there is no folder {folder}/a/b/c"]
    assert "nme is not a setting" in done[1].run.reasons[0]
    assert done[3].run.reasons == [
        f"{folder}/twin.yaml and {folder}/pair.yaml are both named pair, with one folder for both: "
        "give one of them another name"
    ]
    results = folder / "engines" / "lost" / "results"
    assert [path.name for path in results.glob("nightly*")] == ["nightly.jsonl"]


def test_through_triton(first: tuple[Path, Finished], folder: Path, unreported: None) -> None:
    found = run(folder, is_in_process=False).run
    assert found.acceptance == first[1].run.acceptance  # by prompt and position
    assert (found.outcome, found.reasons) == ("good", [])
    assert found.notes == ["speed is not compared with the last good run: another way of serving"]
    assert found.speed_ups[0].num_answers == 6 and found.speed_ups[0].num_failed == 0


def test_the_baseline_can_lie_elsewhere_or_nowhere(
    first: tuple[Path, Finished], folder: Path, tmp_path: Path, quick: None
) -> None:
    baseline = first[0] / "engines"
    shutil.rmtree(folder / "engines" / "pair" / "results")
    assert run(folder).last is None
    assert run(folder, baseline=baseline).last == first[1].run
    assert run(folder, baseline=tmp_path).last is None
    assert run(folder, is_new_baseline=True).last is None


def test_what_is_promoted_is_compared_with_and_what_is_locked_is_built(
    first: tuple[Path, Finished], folder: Path, quick: None
) -> None:
    """By the command: the promoted version goes before the last good run; both are of one pair."""
    pair, command = folder / "engines" / "pair", [str(folder / "pair.yaml"), "--in-process"]
    version = pair / "versions" / "7" / "results" / "nightly.json"
    version.parent.mkdir(parents=True)
    # Half as large, and by another specpipe: so the version and not the last good run is taken.
    data = json.loads((first[0] / "engines/pair/results/nightly.json").read_text())
    size = data["sizes_bytes"]["repository"]
    data["sizes_bytes"]["repository"] = size // 2
    data["made_from"]["versions"]["specpipe"] = "0.0.1"
    version.write_text(json.dumps(data))
    promotion = Promotion(number=7, digest="d" * 64, promoted_at="2026-11-26T02:23:00+00:00")
    write_promotion(pair / "promoted.json", promotion)
    lock = CliRunner().invoke(lock_command, ["--config", command[0]])
    assert lock.exit_code == 0, lock.output

    result = CliRunner().invoke(nightly, [*command, "--locked"])
    assert result.exit_code == 1
    line = history(folder)[-1]
    assert (line["compared_version"], line["compared_with"]) == (7, data["made_at"])
    assert line["reasons"] == [
        f"size of the repository is {size:,} bytes, 2.000 times version 7's {size // 2:,}, over "
        "nightly.max_size_ratio 1.1"
    ]
    assert line["changes"] == [f"specpipe 0.0.1 → {__version__}"]

    version.unlink()
    result = CliRunner().invoke(nightly, [*command, "--set", "engine.max_batch_size=2", "--locked"])
    assert result.exit_code == 1
    line = history(folder)[-1]
    assert line["outcome"] == "unfinished" and line["compared_version"] is None
    assert line["notes"] == [
        "version 7 is promoted, but was published without a nightly run to compare with"
    ]
    (reason,) = line["reasons"]
    assert reason.startswith(f"{folder}/pair.lock has something else locked, so nothing is built:")
    assert "package: max_batch_size 4 → 2" in line["changes"]


def test_a_damaged_last_good_run_is_said(folder: Path, quick: None) -> None:
    path = folder / "engines" / "pair" / "results" / "nightly.json"
    path.write_text("{")
    found = run(folder).run
    assert found.outcome == "unfinished"
    assert found.reasons[0].startswith(f"{path} cannot be read (")


@pytest.mark.parametrize(
    "ratios, outcome, interval",
    [
        # A tenth about each: the first is under 0.9 as a whole, and so are all of the second line.
        ([0.5, 1.3], "good", (0.4, 1.4)),
        ([0.5, 0.6, 0.7], "bad", (0.4, 0.8)),
    ],
    ids=["was busy", "is slower"],
)
def test_a_crossed_speed_is_measured_again(
    folder: Path,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    ratios: list[float],
    outcome: str,
    interval: tuple[float, float],
) -> None:
    text = (folder / "pair.yaml").read_text().replace("min_speed_up: null", "min_speed_up: 0.9")
    (folder / "pair.yaml").write_text(text)
    measured = iter([[speed_up(2, ratio, ratio - 0.1, ratio + 0.1)] for ratio in ratios])
    monkeypatch.setattr(facts, "speed_ups", lambda _: next(measured))
    found = run(folder).run
    assert (found.outcome, next(measured, None)) == (outcome, None)
    assert [note for note in found.notes if "again" in note] == [
        f"speed was measured again; measurement {number}: {ratio:.2f} at concurrency 2"
        for number, ratio in enumerate(ratios[:-1], start=1)
    ]
    low, high = (pytest.approx(end) for end in interval)
    assert found.speed_ups == [speed_up(2, ratios[-1], low, high)]


def test_a_bug_in_one_run_is_kept_and_the_next_one_goes_on(
    folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder / "other.yaml"
    other.write_text((folder / "pair.yaml").read_text().replace("name: pair", "name: other"))
    stubbed = verification.verify

    def verify(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.name == "pair":
            raise ZeroDivisionError("division by zero")
        return stubbed(config, *args, **kwargs)

    monkeypatch.setattr(verification, "verify", verify)
    done = run_many([folder / "pair.yaml", other])
    assert [d.run.outcome for d in done] == ["unfinished", "good"]
    (reason,) = done[0].run.reasons
    assert re.fullmatch(
        r"a fault of specpipe itself, in evaluate/nightly/run\.py:\d+: ZeroDivisionError: "
        "division by zero; `specpipe --debug` before the command shows more, .*",
        reason,
    )
    assert done[1].run.reasons == []
    assert history(folder)[-1]["reasons"] == [reason]


def test_an_interrupted_run_leaves_nothing(
    folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    before = history(folder)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(verification, "verify", verify)
        with pytest.raises(KeyboardInterrupt):
            run(folder)
    assert history(folder) == before
    assert run(folder).run.outcome == "good"  # the lock is free again


def test_a_repository_that_changes_while_it_is_measured_gives_no_numbers(
    folder: Path, passing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = folder / "engines" / "pair" / "model_repo"
    options = repository / "speculative" / "1" / "pair.json"
    really_served = _PairRun._served

    def served(self: Any) -> Any:
        options.write_text(options.read_text() + "\n")
        return really_served(self)

    monkeypatch.setattr(_PairRun, "_served", served)
    found = run(folder).run
    assert found.outcome == "unfinished"
    assert found.reasons == [
        f"{repository.parent} was changed while it was measured (speculative/1/pair.json changed): "
        "run `specpipe nightly` again"
    ]


def test_digests_are_of_the_files_that_the_engines_were_made_from(folder: Path) -> None:
    config = load_config(folder / "pair.yaml")
    used = facts.checkpoints_used(config, planning.plan(config))
    for role in ("draft", "target"):
        lines = [
            f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
            for path in sorted((folder / role).iterdir())
        ]
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        assert used[role] == CheckpointUsed(checkpoint=role, revision=None, digest=digest)


def test_a_branch_that_names_another_commit_is_fetched_and_built(
    folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = {"first": "a" * 40, "second": "b" * 40}
    for name, commit in commits.items():
        shutil.copytree(folder / "draft", folder / "hub" / commit)
        settings = json.loads((folder / "hub" / commit / "generation_config.json").read_text())
        text = json.dumps({**settings, "temperature": 0.5 if name == "second" else 0.25})
        (folder / "hub" / commit / "generation_config.json").write_text(text)
    names = "first"
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repo_id, *, revision, **patterns: str(
            folder / "hub" / (revision if revision in commits.values() else commits[names])
        ),
    )
    # The hub tells no digests, so that weights are fetched for them; it is not to be looked for.
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", lambda *args, **kwargs: iter(()))
    text = (folder / "pair.yaml").read_text().replace("checkpoint: draft", "checkpoint: org/draft")
    (folder / "pair.yaml").write_text(text)

    before = run(folder).run
    assert before.checkpoints["draft"].revision == "a" * 40
    assert rebuilt(run(folder).run) == {}
    names = "second"
    after = run(folder).run
    assert after.checkpoints["draft"].revision == "b" * 40
    assert after.changes[0] == (
        f"draft: commit {'a' * 12} → {'b' * 12}; other generation_config.json"
    )
    assert after.checkpoints["draft"].digest != before.checkpoints["draft"].digest
    assert (
        f"input {folder}/hub/{'b' * 40}/generation_config.json changed" in rebuilt(after)["check"]
    )
