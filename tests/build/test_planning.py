from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from specpipe.build import execution, planning, repositories
from specpipe.build.load import load_config
from specpipe.build.planning import Plan
from specpipe.checkpoints.source import Source
from specpipe.config.sections import PipelineConfig
from specpipe.errors import CheckpointError, ConfigError, RepositoryError, SpecpipeError
from specpipe.roles import Role
from specpipe.stage import PlannedStage, StageInputs

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@dataclass(frozen=True)
class Upper:
    """Writes its inputs in capitals, or only their number."""

    name: str
    files: tuple[Path, ...]
    counts: bool = False

    def inputs(self) -> StageInputs:
        return StageInputs(files=self.files, settings={"counts": self.counts})

    def run(self, out: Path) -> None:
        text = "".join(path.read_text() for path in self.files)
        if "bad" in text:
            raise SpecpipeError(f"{self.name}: bad input")
        (out / "text").write_text(str(len(text)) if self.counts else text.upper())


@dataclass
class Heard:
    lines: list[str] = field(default_factory=list)
    plans: list[list[str]] = field(default_factory=list)

    def planned(self, reports: Sequence[execution.StageReport]) -> None:
        self.plans.append([report.stage for report in reports if report.reasons])

    def started(self, stage: str, reasons: Sequence[str]) -> None:
        self.lines += [f"{stage}: {reason}" for reason in reasons]

    def waiting(self, stage: str) -> None:
        self.lines.append(f"{stage} waits")

    def finished(self, report: execution.StageReport) -> None:
        self.lines.append(f"{report.stage} {'built' if report.reasons else 'up to date'}")


@pytest.fixture
def stages(tmp_path: Path) -> Plan:
    """Two roads that meet: draft/count → join ← target/copy."""
    for name in ("draft", "target"):
        (tmp_path / name).write_text(f"{name} text ")
    count, copy, join = (tmp_path / "out" / name for name in ("count", "copy", "join"))
    return (
        PlannedStage(Upper("draft/count", (tmp_path / "draft",), counts=True), count),
        PlannedStage(Upper("target/copy", (tmp_path / "target",)), copy),
        PlannedStage(Upper("join", (count / "text", copy / "text")), join),
    )


def reasons(reports: Sequence[execution.StageReport]) -> dict[str, tuple[str, ...]]:
    return {report.stage: report.reasons for report in reports}


def test_first_run_builds_in_order_and_second_does_nothing(stages: Plan, tmp_path: Path) -> None:
    heard = Heard()
    execution.run(stages, heard)
    assert heard.lines == [
        "draft/count: not built yet",
        "draft/count built",
        "target/copy: not built yet",
        "target/copy built",
        "join: not built yet",
        "join built",
    ]
    assert heard.plans == [["draft/count", "target/copy", "join"]]
    assert (tmp_path / "out" / "join" / "text").read_text() == "11TARGET TEXT "
    again = Heard()
    assert reasons(execution.run(stages, again)) == {
        "draft/count": (),
        "target/copy": (),
        "join": (),
    }
    assert again.lines == ["draft/count up to date", "target/copy up to date", "join up to date"]
    assert again.plans == [[]]


def test_preview_names_what_runs_and_makes_nothing(stages: Plan, tmp_path: Path) -> None:
    assert reasons(execution.preview(stages)) == {
        "draft/count": ("not built yet",),
        "target/copy": ("not built yet",),
        "join": ("not built yet",),
    }
    assert not (tmp_path / "out").exists()


def test_one_changed_input_rebuilds_its_road_alone(stages: Plan, tmp_path: Path) -> None:
    execution.run(stages, Heard())
    (tmp_path / "target").write_text("other text ")
    changed = f"input {tmp_path}/target changed"
    assert reasons(execution.preview(stages)) == {
        "draft/count": (),
        "target/copy": (changed,),
        "join": ("upstream target/copy runs",),
    }
    assert reasons(execution.run(stages, Heard())) == {
        "draft/count": (),
        "target/copy": (changed,),
        "join": (f"input {tmp_path}/out/copy/text changed",),
    }


def test_stage_with_equal_output_does_not_run_the_next(stages: Plan, tmp_path: Path) -> None:
    execution.run(stages, Heard())
    (tmp_path / "draft").write_text("DRAFT TEXT ")
    assert reasons(execution.run(stages, Heard())) == {
        "draft/count": (f"input {tmp_path}/draft changed",),
        "target/copy": (),
        "join": (),
    }


def test_failed_build_resumes_at_its_stage(stages: Plan, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("bad")
    with pytest.raises(SpecpipeError, match="^target/copy: bad input$"):
        execution.run(stages, Heard())
    assert not (tmp_path / "out" / "copy").exists()
    (tmp_path / "target").write_text("good")
    assert reasons(execution.run(stages, Heard())) == {
        "draft/count": (),
        "target/copy": ("not built yet",),
        "join": ("not built yet",),
    }


def test_fetch_happens_only_before_a_stage_that_runs(tmp_path: Path) -> None:
    fetched = []

    @dataclass(frozen=True)
    class Fetch(planning.Fetch):
        def __call__(self) -> None:
            fetched.append(self.role)
            (tmp_path / "weights").write_text("weights")

    stage = Upper("draft/convert", (tmp_path / "weights",))
    planned = PlannedStage(stage, tmp_path / "out", Fetch("a/b", "0" * 40, tmp_path, "draft"))
    for _ in range(2):
        execution.run((planned,), Heard())
    assert fetched == ["draft"]


def quickstart(*overrides: str) -> PipelineConfig:
    return load_config(QUICKSTART, overrides)


def test_plan_of_the_quickstart() -> None:
    config = quickstart("output_dir=/built")
    stages = planning.plan(config)
    assert [(planned.name, str(planned.artifact)) for planned in stages] == [
        ("check", "/built/python-code/check"),
        ("draft/convert", "/built/python-code/draft/checkpoint"),
        ("target/convert", "/built/python-code/target/checkpoint"),
        ("draft/build_engine", "/built/python-code/draft/engine"),
        ("target/build_engine", "/built/python-code/target/engine"),
        ("package", "/built/python-code/model_repo"),
    ]
    reads = {
        planned.name: [other.name for other in stages if planned.reads(other)] for planned in stages
    }
    assert reads == {
        "check": [],
        "draft/convert": [],
        "target/convert": [],
        "draft/build_engine": ["draft/convert"],
        "target/build_engine": ["target/convert"],
        "package": ["check", "draft/build_engine", "target/build_engine"],
    }


def settings_of(stages: Plan, name: str) -> dict[str, object]:
    return dict(next(p for p in stages if p.name == name).stage.inputs().settings)


def test_max_seq_len_left_out_is_the_context_of_the_target() -> None:
    stages = planning.plan(quickstart("engine.max_seq_len=null"))
    assert settings_of(stages, "target/build_engine")["max_seq_len"] == 1024
    assert settings_of(stages, "draft/build_engine")["max_seq_len"] == 1024


def test_max_seq_len_over_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        planning.plan(quickstart("engine.max_seq_len=2048"))
    assert str(caught.value) == (
        f"{QUICKSTART}: engine.max_seq_len is 2048: expected at most 1024,"
        " the context length of the target ../models/python-code/target"
    )


def test_a_dtype_that_no_build_takes_is_refused_before_one(tmp_path: Path) -> None:
    folder = shutil.copytree(QUICKSTART.parents[1] / "models/python-code/draft", tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "auto"}))
    with pytest.raises(CheckpointError) as caught:
        planning.check(quickstart(f"draft.checkpoint={folder}"))
    assert str(caught.value) == (
        f"draft {folder}: config.json: dtype 'auto' is not supported; "
        "supported: float32, bfloat16, float16"
    )


def test_serving_an_outdated_build_is_told(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [f"output_dir={tmp_path}"])
    assert repositories.outdated(config)[0] == "check: not built yet"


def test_serving_needs_no_checkpoint(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [f"output_dir={tmp_path}", "draft.checkpoint=gone"])
    assert repositories.outdated(config) == []


def test_one_draft_setting_changes_the_draft_stages_alone() -> None:
    before, after = planning.plan(quickstart()), planning.plan(quickstart("draft.tp_size=2"))
    changed = [
        old.name
        for old, new in zip(before, after, strict=True)
        if old.stage.inputs() != new.stage.inputs()
    ]
    assert changed == ["draft/convert"]


def test_how_a_pair_speculates_and_streams_changes_what_is_packaged_alone() -> None:
    before, after = (
        planning.plan(quickstart(*overrides))
        for overrides in ((), ("speculation.prompt_lookup=true", "serving.stream_interval_ms=40"))
    )
    changed = [
        old.name
        for old, new in zip(before, after, strict=True)
        if old.stage.inputs() != new.stage.inputs()
    ]
    assert changed == ["package"]
    found = [settings_of(stages, "package") for stages in (before, after)]
    assert [of["prompt_lookup"] for of in found] == [False, True]
    assert [of["stream_interval_s"] for of in found] == [None, 0.04]


def test_hub_checkpoint_is_planned_from_small_files_and_fetched_at_the_same_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = quickstart("draft.checkpoint=org/draft", "draft.revision=main")
    folder = (config.base_dir / config.target.checkpoint).with_name("draft")
    commit = "0123456789" * 4
    calls = []

    def resolve(
        checkpoint: str,
        *,
        revision: str | None,
        base: Path,
        role: Role,
        weights: bool = True,
        small_files: Path | None = None,
    ) -> Source:
        if role == "target":
            return Source((base / checkpoint).resolve(), None, checkpoint)
        calls.append((checkpoint, revision, weights))
        return Source(folder, commit, checkpoint)

    monkeypatch.setattr("specpipe.checkpoints.source.resolve", resolve)
    stages = planning.plan(config)
    assert calls == [("org/draft", "main", False)]
    fetches = {planned.name: planned.fetch for planned in stages if planned.fetch}
    assert list(fetches) == ["draft/convert"]
    fetches["draft/convert"]()
    assert calls[1:] == [("org/draft", commit, True)]


def test_repository_that_was_not_built_says_how(tmp_path: Path) -> None:
    config = quickstart(f"output_dir={tmp_path}")
    with pytest.raises(RepositoryError) as caught:
        repositories.built_repository(config)
    assert str(caught.value) == (
        f"{tmp_path}/python-code/model_repo does not exist:"
        f" run `specpipe build --config {QUICKSTART}` first"
    )


@pytest.fixture
def parallel_draft(tmp_path: Path) -> Path:
    """The quickstart's draft, as if it were trained to propose four tokens in one pass."""
    draft = tmp_path / "draft"
    shutil.copytree(QUICKSTART.parent.parent / "models" / "python-code" / "draft", draft)
    config = json.loads((draft / "config.json").read_text())
    mask = config["vocab_size"]  # all of the target's rows are in use
    config |= {"vocab_size": mask + 8, "pard_token": mask, "specpipe_num_draft_tokens": 4}
    (draft / "config.json").write_text(json.dumps(config))
    return draft


def test_more_draft_tokens_than_a_parallel_draft_was_trained_for_are_noted(
    parallel_draft: Path,
) -> None:
    def notes(number: int) -> list[str]:
        config = quickstart(
            f"draft.checkpoint={parallel_draft}", f"speculation.num_draft_tokens={number}"
        )
        return [n for n in planning.check(config).contract.notes if "trained" in n]

    assert notes(4) == []
    assert notes(8) == [
        "speculation.num_draft_tokens is 8, but the draft was trained to propose 4 in one pass: "
        "those beyond are seldom accepted"
    ]


def test_a_parallel_draft_takes_more_room_in_an_engine_of_tensorrt(parallel_draft: Path) -> None:
    """Up to 2 K rows a step, and the mask's; the target's engine is as it was."""
    settings = ("engine={runtime: tensorrt}", "speculation.num_draft_tokens=8")
    memory = [
        planning.check(quickstart(*settings, *draft)).memory
        for draft in ((), (f"draft.checkpoint={parallel_draft}",))
    ]
    assert memory[1]["draft"].kv_cache_bytes > memory[0]["draft"].kv_cache_bytes
    assert memory[1]["target"] == memory[0]["target"]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (
            ("engine={runtime: tensorrt_llm}",),
            "engines of TensorRT-LLM give them one by one: set engine.tensorrt_llm.backend to "
            "pytorch with version 1.3.0rc23 or later, engine.runtime to torch or tensorrt",
        ),
        (
            ("engine={runtime: tensorrt_llm, tensorrt_llm: {backend: pytorch}}",),
            "TensorRT-LLM 1.2.1 does not run it so: set engine.tensorrt_llm.version to 1.3.0rc23 "
            "or later, engine.runtime to torch or tensorrt",
        ),
        (
            (
                "engine={runtime: tensorrt_llm, tensorrt_llm: {backend: pytorch, version: 1.4.0}}",
                "speculation.adaptive=false",
            ),
            "TensorRT-LLM could propose any of its 4104 rows, of which the target has 4096: train "
            "it with a mask token that the target has a row for (--mask-token), set engine.runtime "
            "to torch or tensorrt",
        ),
    ],
)
def test_a_parallel_draft_that_nothing_runs_as_such_is_refused(
    parallel_draft: Path, settings: tuple[str, ...], fault: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        planning.plan(quickstart(f"draft.checkpoint={parallel_draft}", *settings))
    assert str(caught.value) == (
        f"{QUICKSTART}: draft.checkpoint {parallel_draft} proposes several tokens in one pass "
        f"(pard_token in its config.json), and {fault}, or remove pard_token from a copy of it, "
        "to have its tokens one by one"
    )
