"""The quickstart pair tuned in this process; costs are made up, so that no test is a race."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from specpipe import progress
from specpipe.build import execution, planning
from specpipe.build.load import load_config
from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError, RepositoryError, RuntimeUnavailable
from specpipe.evaluate.report.page import write_report
from specpipe.evaluate.tune import costs, measure, run, workload
from specpipe.evaluate.tune.costs import LoadCosts
from specpipe.evaluate.tune.measure import Cell
from specpipe.evaluate.tune.outcome import TuneOptions, Tuning
from specpipe.evaluate.verification.record import repository_digest
from specpipe.machine.manifest import manifest_path, read_manifest, record_files
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.torch import TorchRuntime
from tests.evaluate.tune.conftest import QUICKSTART, ROOT
from tests.quiet import Quiet
from tests.recorder import Recorder
from tests.toy import write_parallel_draft

TARGET = str(ROOT / "models" / "python-code" / "target")
OPTIONS = TuneOptions(limit=3, max_tokens=24, concurrencies=(1, 4), rounds=2, num_best=1)


def tune(
    config: PipelineConfig,
    options: TuneOptions = OPTIONS,
    report: Callable[[str], None] = lambda line: None,
) -> Tuning:
    return run.tune(config, options, report=report, reporter=Quiet())


@pytest.fixture
def even_costs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every draft costs a tenth of the target, and verification nothing; counts the timings."""
    timed: list[int] = []

    def made_up(
        pair: object, prompt: object, *, batch_sizes: Sequence[int], max_draft_len: int, **_: Any
    ) -> list[LoadCosts]:
        timed.append(max_draft_len)
        return [
            LoadCosts(size, 0.1, {0: 1.0, max_draft_len: 1.0}, 0.0, 0.0) for size in batch_sizes
        ]

    monkeypatch.setattr(costs, "measure", made_up)
    return timed


@pytest.fixture
def even_speed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """With 4 draft tokens the pair is half as fast again, at a concurrency of 1, and slower at 4;
    lists what was measured.
    """
    cells: list[tuple[int, int, int]] = []

    def made_up(
        endpoint: object,
        questions: object,
        *,
        concurrency: int,
        num_draft_tokens: int,
        round_number: int,
    ) -> Cell:
        cells.append((concurrency, round_number, num_draft_tokens))
        faster = 1.5 if concurrency == 1 else 0.8
        return Cell(
            concurrency,
            num_draft_tokens,
            round_number,
            100,
            2.0 / (faster if num_draft_tokens else 1.0),
        )

    monkeypatch.setattr(measure, "measure_cell", made_up)
    return cells


def test_tuned_for_real(config: PipelineConfig, tmp_path: Path) -> None:
    recorder, said = Recorder(), list[str]()
    with progress.shown(recorder):
        tuning = tune(
            config, dataclasses.replace(OPTIONS, rounds=1, time_limit_s=0.0), report=said.append
        )
    assert said[0] == (
        "to measure: 2 draft lengths at each of 2 loads, in 1 rounds of 3 prompts; "
        "then, for 0 s at most, until it is certain what pays"
    )
    assert [count.done for count in recorder.counts if count.unit == "rounds"] == [4]
    assert all(count.done == count.total for count in recorder.counts)
    own = tuning.own
    assert own.acceptance is not None
    assert own.best is None and len(own.doubts) == 2  # one round is no certainty, at neither load
    assert tuning.forms == ()
    assert own.acceptance.num_prompts == 3
    assert list(own.kinds) == ["code"]
    # Each prompt's 24 tokens: one a step of the target, and the accepted ones.
    assert own.acceptance.num_steps + own.acceptance.num_accepted_tokens <= 3 * 24
    assert own.acceptance.positions[0].num_accepted > 0
    assert {(p.concurrency, p.num_draft_tokens) for p in own.predictions} == {
        (load, length) for load in (1, 4) for length in (1, 2, 3, 4)
    }
    assert len(own.measurements) == 2  # the best prediction at each of two loads
    data = json.loads(tuning.path.read_text())
    assert (data["kind"], data["pair"], data["format"]) == ("tune", "python-code", 1)
    assert data["prompts"]["count"] == 3
    assert data["settings"]["concurrencies"] == [1, 4]
    (draft,) = data["drafts"]
    files = record_files(config.artifacts_dir / "model_repo")
    assert draft["digest"] == repository_digest(files)
    assert [p["position"] for p in draft["acceptance"]["positions"]] == [1, 2, 3, 4]
    assert [load["batch_size"] for load in draft["costs"]] == [1, 4]
    assert sorted(path.name for path in tuning.path.parent.iterdir()) == ["tune.json"]
    assert not (config.artifacts_dir / ".tune").exists()
    pytest.importorskip("matplotlib")
    figures = write_report(config.artifacts_dir, tmp_path).figures
    assert [path.name for path in figures] == ["acceptance.png", "speed-up.png"]


def test_the_schedule_is_what_measured_best(
    config: PipelineConfig, even_costs: object, even_speed: list[tuple[int, int, int]]
) -> None:
    tuning = tune(config)
    # In turns, each round in the other order.
    (length,) = {k for _, _, k in even_speed} - {0}
    assert even_speed == [
        (load, round_number, k)
        for load in (1, 4)
        for round_number, order in ((0, (0, length)), (1, (length, 0)))
        for k in order
    ]
    assert tuning.own.best == {1: length, 4: 0}
    assert tuning.own.schedule == ((1, length), (2, 0))
    assert [m.speed_up for m in tuning.own.measurements] == pytest.approx([1.5, 0.8])


@pytest.mark.parametrize("pass_s", [None, {4: 0.1}])
def test_others_are_told_of_a_draft_that_proposes_in_one_pass(
    config: PipelineConfig,
    even_speed: object,
    pass_s: dict[int, float] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [LoadCosts(size, 0.1, {0: 1.0, 4: 1.0}, 0.0, 0.0, pass_s) for size in (1, 4)]
    monkeypatch.setattr(costs, "measure", lambda *_, **__: found)
    vllm = tune(config).forms[-1].text
    assert vllm is not None
    assert json.loads(vllm).get("parallel_drafting", False) == (pass_s is not None)


def test_rounds_are_taken_until_it_is_certain_what_pays(
    config: PipelineConfig, even_costs: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round at concurrency 1 is disturbed, so that more follow there alone."""
    asked: list[tuple[int, int]] = []

    def made_up(*_: Any, concurrency: int, num_draft_tokens: int, round_number: int) -> Cell:
        asked.append((concurrency, round_number))
        faster = 99.0 if (concurrency, round_number) == (1, 0) else 1.4 + 0.001 * round_number
        stream_s = 2.0 / (faster if num_draft_tokens else 1.0)
        return Cell(concurrency, num_draft_tokens, round_number, 100, stream_s)

    monkeypatch.setattr(measure, "measure_cell", made_up)
    tuning = tune(config)
    rounds = {load: {number for at, number in asked if at == load} for load in (1, 4)}
    assert rounds[4] == {0, 1}
    assert len(rounds[1]) > 2 and rounds[1] == set(range(len(rounds[1])))
    assert tuning.own.best is not None and tuning.own.best[1] > 0

    cut_short = tune(config, dataclasses.replace(OPTIONS, time_limit_s=0.0))
    assert cut_short.own.best is None and cut_short.own.schedule is None
    (doubt,) = cut_short.own.doubts
    assert doubt.startswith("concurrency 1, K = ") and "which cannot be: a step gives" in doubt


def test_a_good_draft_is_ranked_before_a_bad_one(
    config: PipelineConfig,
    random_draft: Path,
    even_costs: list[int],
    even_speed: list[tuple[int, int, int]],
) -> None:
    """At equal costs the target itself is the best draft there is, and random weights the worst."""
    tuning = tune(
        config,
        dataclasses.replace(OPTIONS, candidates=(str(random_draft), TARGET), max_draft_len=2),
    )
    own = config.draft.checkpoint
    assert [draft.checkpoint for draft in tuning.drafts] == [TARGET, own, str(random_draft)]
    best, middle, worst = (draft.acceptance for draft in tuning.drafts)
    assert best is not None and middle is not None and worst is not None
    assert best.alpha == pytest.approx(1.0, abs=0.02)
    assert worst.alpha is not None and worst.alpha < 0.02
    # 3 tokens in 1.2 plain steps; 1 token in 1.1, where one draft token does the least harm
    assert tuning.drafts[0].score == pytest.approx(2.5, rel=0.02)
    assert tuning.drafts[2].score == pytest.approx(1 / 1.1, rel=0.02)
    assert even_costs == [2, 2, 2]
    # Measured are the pair's own draft and the best one.
    assert [bool(draft.measurements) for draft in tuning.drafts] == [True, True, False]
    assert not (config.artifacts_dir / ".tune").exists()


def test_a_draft_that_cannot_be_paired_is_named_last(
    config: PipelineConfig,
    random_draft: Path,
    tmp_path: Path,
    even_costs: object,
    even_speed: object,
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in random_draft.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    tuning = tune(config, dataclasses.replace(OPTIONS, candidates=(str(other),)))
    last = tuning.drafts[-1]
    assert last.checkpoint == str(other)
    assert last.acceptance is None and last.score == 0.0
    assert last.reason is not None and "cannot be paired" in last.reason


def test_a_parallel_draft_is_ranked_beside_others(
    config: PipelineConfig, tmp_path: Path, even_costs: object, even_speed: object
) -> None:
    """The own draft, as if it knew masks: its first token is as good, the others are not."""
    parallel = write_parallel_draft(
        ROOT / "models" / "python-code" / "draft", tmp_path / "parallel", num_draft_tokens=4
    )
    tuning = tune(config, dataclasses.replace(OPTIONS, candidates=(str(parallel),)))
    assert [draft.is_own for draft in tuning.drafts] == [True, False]
    own, other = (draft.acceptance for draft in tuning.drafts)
    assert own is not None and other is not None
    assert other.rates[0] == pytest.approx(own.rates[0], abs=0.2)  # of other steps
    assert other.rates[1] < own.rates[1] / 2


def test_more_draft_tokens_than_were_built_for(
    config: PipelineConfig, even_costs: list[int], even_speed: object
) -> None:
    tuning = tune(config, dataclasses.replace(OPTIONS, max_draft_len=6))
    assert even_costs == [6]
    assert tuning.own.acceptance is not None
    assert len(tuning.own.acceptance.positions) == 6
    packaged = config.artifacts_dir / "model_repo" / "speculative" / "1" / "pair.json"
    assert json.loads(packaged.read_text())["options"]["num_draft_tokens"] == 4


class Interrupted(Exception):
    """What ends a run in the middle of a cell."""


def test_an_interrupted_run_goes_on_where_it_was(
    config: PipelineConfig,
    monkeypatch: pytest.MonkeyPatch,
    even_costs: list[int],
    even_speed: list[tuple[int, int, int]],
) -> None:
    """Stopped in the second round at concurrency 1, one of whose two sides was measured."""
    made_up = measure.measure_cell

    def stops(*args: Any, **kwargs: Any) -> Cell:
        if len(even_speed) == 3:
            raise Interrupted
        return made_up(*args, **kwargs)

    monkeypatch.setattr(measure, "measure_cell", stops)
    with pytest.raises(Interrupted):
        tune(config)
    result = config.artifacts_dir / "results" / "tune.json"
    before = result.stat().st_mtime_ns if result.exists() else None
    assert even_costs == [4]
    first = list(even_speed)
    assert [(load, number) for load, number, _ in first] == [(1, 0), (1, 0), (1, 1)]

    even_speed.clear()
    monkeypatch.setattr(measure, "measure_cell", made_up)
    monkeypatch.setattr(run, "run_requests", None)  # acceptance is not measured again
    said: list[str] = []
    tuning = tune(config, report=said.append)
    assert said[0].startswith("going on with the run of ")
    assert even_costs == [4]
    # The whole second round, since its sides were to run one after the other.
    assert [(load, number) for load, number, _ in even_speed] == [
        *[(1, 1)] * 2,
        *[(4, 0)] * 2,
        *[(4, 1)] * 2,
    ]
    assert [(m.concurrency, m.speed_up) for m in tuning.own.measurements] == [
        (1, pytest.approx(1.5)),
        (4, pytest.approx(0.8)),
    ]
    assert result.stat().st_mtime_ns != before
    assert not (config.artifacts_dir / "results" / "tune.unfinished.json").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": 20}, "starting anew: settings.max_tokens was 24, is now 20"),
        ({"resumes": False}, None),
    ],
)
def test_otherwise_an_interrupted_run_starts_anew(
    config: PipelineConfig,
    monkeypatch: pytest.MonkeyPatch,
    even_costs: list[int],
    even_speed: object,
    change: dict[str, Any],
    says: str | None,
) -> None:
    made_up = measure.measure_cell

    def stops(*args: Any, **kwargs: Any) -> Cell:
        raise Interrupted

    monkeypatch.setattr(measure, "measure_cell", stops)
    with pytest.raises(Interrupted):
        tune(config, dataclasses.replace(OPTIONS, resumes=False))
    monkeypatch.setattr(measure, "measure_cell", made_up)
    said: list[str] = []
    tune(config, dataclasses.replace(OPTIONS, **change), report=said.append)
    assert [line for line in said if "anew" in line or "going on" in line] == (
        [says] if says else []
    )
    assert even_costs == [4, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"concurrencies": (1, 9)},
            "--concurrency 9: expected 1 to 8 (engine.max_batch_size); more requests would only "
            "wait",
        ),
        (
            {"candidates": (TARGET, TARGET)},
            f"--candidate {TARGET}: there is a draft of that name already; give each once, and "
            "not the pair's own",
        ),
    ],
)
def test_refused(config: PipelineConfig, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tune(config, dataclasses.replace(OPTIONS, **change))
    assert str(caught.value) == message


def test_nothing_is_copied_while_the_draft_is_measured(
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    even_costs: object,
    even_speed: object,
) -> None:
    shutil.copytree(built, tmp_path / "engines")
    overrides = [f"output_dir={tmp_path / 'engines'}", "speculation.prompt_lookup=true"]
    config = load_config(QUICKSTART, overrides)
    packaged = config.artifacts_dir / "model_repo" / "speculative" / "1" / "pair.json"
    pair = PairFile.read(packaged)
    served = dataclasses.replace(pair.options, prompt_lookup=True)
    packaged.unlink()
    packaged.write_text(PairFile(pair.runtime, served).to_json())
    repository = config.artifacts_dir / "model_repo"
    manifest = read_manifest(repository)
    assert manifest is not None
    dataclasses.replace(manifest, outputs=record_files(repository)).write(manifest_path(repository))
    loaded: list[PairOptions] = []

    class Noted(TorchRuntime):
        def load_pair(self, draft: Path, target: Path, options: PairOptions, *rest: Any) -> Any:
            loaded.append(options)
            return super().load_pair(draft, target, options, *rest)

    monkeypatch.setattr(workload, "load_runtime", lambda name: Noted())
    said: list[str] = []
    tune(config, report=said.append)
    assert said[0] == "speculation.prompt_lookup is off while the draft is measured"
    assert [(options.prompt_lookup, options.adaptive) for options in loaded] == [(False, False)] * 2


def test_without_drafting_there_is_nothing_to_tune(built: Path) -> None:
    config = load_config(QUICKSTART, [f"output_dir={built}", "speculation.num_draft_tokens=0"])
    with pytest.raises(ConfigError, match="is 0: there is nothing to tune; give --max-draft-len"):
        tune(config)


def test_an_unbuilt_pair_is_refused(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [f"output_dir={tmp_path}"])
    with pytest.raises(RepositoryError, match="run `specpipe build --config"):
        tune(config)


def test_tensorrt_llm_does_not_run_in_this_process() -> None:
    config = load_config(ROOT / "configs" / "llama-70b-fp8.yaml")
    with pytest.raises(RuntimeUnavailable, match="--set engine.runtime=torch"):
        tune(config)


def test_loads_double_up_to_the_largest_batch(built: Path, config: PipelineConfig) -> None:
    assert run._loads(config, TuneOptions()) == (1, 2, 4, 8)
    twelve = load_config(QUICKSTART, [f"output_dir={built}", "engine.max_batch_size=12"])
    assert run._loads(twelve, TuneOptions()) == (1, 2, 4, 8, 12)
    assert run._loads(config, TuneOptions(concurrencies=(4, 1, 4))) == (1, 4)


def test_a_prompt_that_does_not_fit_is_named(config: PipelineConfig, tmp_path: Path) -> None:
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"name": "novel", "prompt": "word and " * 2000}) + "\n")
    with pytest.raises(ConfigError, match="prompt novel has .* tokens; prompt and answer together"):
        tune(config, dataclasses.replace(OPTIONS, prompts=str(prompts)))


def test_the_artifact_is_left_as_it_was(
    config: PipelineConfig, even_costs: object, even_speed: object
) -> None:
    tune(config, dataclasses.replace(OPTIONS, max_draft_len=6))
    assert [r.reasons for r in execution.preview(planning.plan(config))] == [()] * 6


def test_a_schedule_packages_the_pair_again_and_nothing_else(config: PipelineConfig) -> None:
    level = "{from_batch_size: 2, num_draft_tokens: 1}"
    scheduled = load_config(
        QUICKSTART,
        [f"output_dir={config.output_dir}", f"speculation.schedule=[{level}]"],
    )
    reports = execution.preview(planning.plan(scheduled))
    assert {r.stage: r.reasons for r in reports if r.reasons} == {
        "package": ("schedule was [], is now [[2, 1]]",)
    }
