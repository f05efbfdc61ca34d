from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from specpipe import __version__
from specpipe.build import planning
from specpipe.build.load import load_config
from specpipe.build.planning import Plan
from specpipe.cli.group import main
from specpipe.config.sections import PipelineConfig
from specpipe.errors import SpecpipeError
from specpipe.machine.libraries import with_extras
from specpipe.machine.manifest import Manifest, manifest_path
from specpipe.speculative.request import Statistics
from specpipe.stage import PlannedStage, StageInputs
from specpipe.triton.client import Completion
from specpipe.triton.server import launcher
from tests.toy import write_parallel_draft
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "models" / "python-code"
Command = tuple[tuple[str, ...], click.Command]
MINIMAL = "name: toy\ndraft: {checkpoint: a}\ntarget: {checkpoint: b}\n"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(MINIMAL)


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


@dataclass(frozen=True)
class Write:
    """Writes the batch size, or does what the hook does."""

    batch_size: int
    hook: Callable[[], object] = lambda: None
    name: str = "draft/write"

    def inputs(self) -> StageInputs:
        return StageInputs(files=(), settings={"max_batch_size": self.batch_size})

    def run(self, out: Path) -> None:
        (out / "half").write_text("x")
        self.hook()


def plan_of(hook: Callable[[], object] = lambda: None) -> Callable[[PipelineConfig], Plan]:
    def plan(config: PipelineConfig, *, small_files: Path | None = None) -> Plan:
        stage = Write(config.engine.max_batch_size, hook)
        return (PlannedStage(stage, config.artifacts_dir / "model_repo"),)

    return plan


@pytest.fixture
def one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "plan", plan_of())


def test_help_lists_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    commands = result.output.partition("Commands:")[2].split("\n")
    assert [line.split()[0] for line in commands if re.match(r"  \w", line)] == [
        "bench",
        "build",
        "check",
        "diff",
        "doctor",
        "draft",
        "gateway",
        "generate",
        "init",
        "inspect",
        "keys",
        "lock",
        "migrate",
        "nightly",
        "promote",
        "publish",
        "quickstart",
        "report",
        "rollback",
        "schema",
        "serve",
        "sign",
        "tune",
        "verify",
        "verify-signature",
        "versions",
    ]


def all_commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[Command]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from all_commands(command, (*path, name))


@pytest.mark.parametrize(("path", "command"), [*all_commands()], ids=str)
def test_help_tells_of_each_option_and_argument(path: list[str], command: click.Command) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.opts
        else:
            told = result.output.split("\n", 1)[1].partition("Options:")[0]
            name = parameter.make_metavar(click.Context(command)).strip("[].")
            assert name in told, parameter.name


@pytest.mark.parametrize("columns", ["40", "80"])
def test_help_cuts_no_summary(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for (*above, name), command in all_commands():
        told = "".join(run(*above, "--help").output.partition("Commands:")[2].split())
        assert command.help is not None
        summary = "".join(command.help.partition("\n\n")[0].split()).rstrip(".")
        assert f"{name}{summary}" in told  # a line may end at a hyphen


def test_version() -> None:
    assert run("--version").stdout == f"specpipe, version {__version__}\n"


def test_usage_errors_exit_2() -> None:
    result = run("build")
    assert result.exit_code == 2
    assert result.stderr.endswith("Error: Missing option '--config'.\n")
    assert run("biuld").exit_code == 2


def test_config_errors_exit_1_with_one_sentence() -> None:
    result = run("build", "--config", "nothing.yaml")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "Error: nothing.yaml does not exist: expected a YAML file\n"


def test_set_is_validated() -> None:
    result = run("build", "--config", "x.yaml", "--set", "engine.max_batch_size=0")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: --set engine.max_batch_size=0: engine.max_batch_size is 0:"
        " expected a whole number of at least 1\n"
    )


def test_missing_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    result = run("build", "--config", "x.yaml", "--set", "draft.checkpoint=./a")
    assert result.exit_code == 1
    assert result.stderr == f"Error: draft.checkpoint ./a: there is no folder {tmp_path}/a\n"


def test_debug_adds_the_traceback() -> None:
    result = run("--debug", "build", "--config", "nothing.yaml")
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback (most recent call last):\n")
    assert result.stderr.endswith("Error: nothing.yaml does not exist: expected a YAML file\n")


def test_a_bug_is_one_sentence_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "plan", lambda config, **_: 1 / 0)
    result = run("build", "--config", "x.yaml")
    assert result.exit_code == 1
    assert re.fullmatch(
        r"Error: a fault of specpipe itself, in cli/build\.py:\d+: ZeroDivisionError: division by "
        "zero; `specpipe --debug` before the command shows more, and a report of it is welcome\n",
        result.stderr,
    )
    told = run("--debug", "build", "--config", "x.yaml").stderr
    assert told.startswith("Traceback (most recent call last):\n")


@pytest.mark.usefixtures("one_stage")
def test_what_the_system_refuses_is_told_with_its_path() -> None:
    result = run("build", "--config", "x.yaml", "--set", "output_dir=/proc/x")
    assert (result.exit_code, result.stderr) == (
        1,
        "to build: draft/write (1 of 1)\nError: /proc/x: No such file or directory\n",
    )


@pytest.mark.parametrize(
    "output_dir",
    ["/proc/x", "/dev/null", "/dev/full/x", "x.yaml", "loop", "x" * 300, "/sys/x", "a/" * 3000],
)
@pytest.mark.usefixtures("one_stage")
def test_a_folder_that_cannot_be_made_is_named(output_dir: str) -> None:
    Path("loop").symlink_to("loop")
    result = run("build", "--config", "x.yaml", "--set", f"output_dir={output_dir}")
    assert result.exit_code == 1
    message = result.stderr.splitlines()[-1]
    assert message.startswith("Error: ") and output_dir[:60] in message
    assert "fault of specpipe" not in message
    assert len(message) < 1100


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", "--file", "latin.txt"], "the prompt in latin.txt is not text in UTF-8"),
        (["generate", "--file", "/dev/zero"], "the prompt in /dev/zero has more than 67108864"),
        (["generate", "a\udcff"], "text_input is 'a\\udcff'; it must be a text in UTF-8"),
        (["generate", "a", "--seed", "-1"], "seed is -1; it must be a whole number from 0"),
        (["serve", "--config", "y.yaml"], "y.yaml:4: '0xffff"),
        (["bench", "--url", "http://h:1", "--max-tokens", "9" * 5000], "'9999"),
        (["bench", "--url", "http://h:1", "--concurrency", "9" * 5000], "'9999"),
        (["bench", "--url", "http://h:1", "--prompts", "deep.jsonl"], "deep.jsonl:1: not JSON"),
        (["bench", "--url", "http://h:1", "--prompts", "half.jsonl"], "half.jsonl:1: prompt hol"),
        (["bench", "--url", "http://h:1", "--temperature", "nan"], "nan is no finite number."),
        (["verify", "--config", "x.yaml", "--distance", "nan"], "nan is no finite number."),
        (["inspect", "."], "is no engine and holds none"),
    ],
)
def test_what_a_user_may_do_wrong_is_one_sentence(command: list[str], message: str) -> None:
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("deep.jsonl").write_text("[" * 100_000)
    Path("half.jsonl").write_text('{"prompt": "\\ud800"}')
    Path("y.yaml").write_text(f"{MINIMAL}engine: {{max_batch_size: 0x{'f' * 5000}}}\n")
    result = run(*command)
    assert result.exit_code in (1, 2)
    last = result.stderr.splitlines()[-1]
    assert message in last
    assert "a fault of specpipe" not in last
    assert len(last) < 400


@pytest.mark.parametrize("command", [["--help"], ["schema"]])
def test_output_that_cannot_be_written_is_one_sentence(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from specpipe.cli.group import main; main()", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (1, "Error: No space left on device\n")


@pytest.mark.usefixtures("one_stage")
def test_build_prints_the_repository_and_reports_progress() -> None:
    result = run("build", "--config", "x.yaml")
    assert result.exit_code == 0
    assert result.stdout == "engines/toy/model_repo\n"
    assert result.stderr == (
        "to build: draft/write (1 of 1)\ndraft/write: starts\ndraft/write: built\n"
    )
    again = run("build", "--config", "x.yaml")
    assert again.stdout == "engines/toy/model_repo\n"
    assert again.stderr == "draft/write: up to date\n"


@pytest.mark.usefixtures("one_stage")
def test_dry_run_prints_reasons_and_makes_nothing(tmp_path: Path) -> None:
    result = run("build", "--config", "x.yaml", "--dry-run")
    assert (result.exit_code, result.stdout) == (0, "draft/write: not built yet\n")
    assert not (tmp_path / "engines").exists()
    run("build", "--config", "x.yaml")
    assert run("build", "--config", "x.yaml", "--dry-run").stdout == "draft/write: up to date\n"
    changed = run("build", "--config", "x.yaml", "--dry-run", "--set", "engine.max_batch_size=4")
    assert changed.stdout == "draft/write: max_batch_size was 8, is now 4\n"


@pytest.mark.usefixtures("one_stage")
def test_json_results(tmp_path: Path) -> None:
    artifact = f"{tmp_path}/engines/toy/model_repo"
    stage = {"stage": "draft/write", "artifact": artifact, "reasons": ["not built yet"]}
    planned = run("build", "--config", "x.yaml", "--dry-run", "--json")
    assert json.loads(planned.stdout) == {"stages": [stage]}
    built = json.loads(run("build", "--config", "x.yaml", "--json").stdout)
    assert built.pop("stages")[0].items() >= stage.items()
    assert built == {"repository": artifact}


def test_failed_stage_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise SpecpipeError("the checkpoint is broken: download it again")

    monkeypatch.setattr(planning, "plan", plan_of(fail))
    result = run("build", "--config", "x.yaml")
    assert result.exit_code == 1
    assert result.stderr == (
        "to build: draft/write (1 of 1)\ndraft/write: starts\n"
        "Error: the checkpoint is broken: download it again\n"
    )
    assert [path.name for path in (tmp_path / "engines" / "toy").iterdir()] == [".model_repo.lock"]


SLOW_BUILD = """
import sys, time
sys.path.insert(0, {tests!r})
from specpipe.build import planning
from specpipe.cli.group import main
from tests.cli.test_group import plan_of

def hang():
    print("running", flush=True)
    time.sleep(600)

planning.plan = plan_of(hang)
main(["build", "--config", "x.yaml"])
"""


@pytest.fixture
def slow_build() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD.format(tests=str(ROOT))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    yield process
    process.kill()
    process.communicate()


def test_ctrl_c_exits_130_and_leaves_nothing(
    slow_build: subprocess.Popen[str], tmp_path: Path
) -> None:
    folder = tmp_path / "engines" / "toy"
    assert (folder / ".model_repo.staging" / "half").is_file()
    slow_build.send_signal(signal.SIGINT)
    _, errors = slow_build.communicate(timeout=PATIENCE_S)
    assert slow_build.returncode == 130
    assert errors == ("to build: draft/write (1 of 1)\ndraft/write: starts\nInterrupted.\n")
    assert [path.name for path in folder.iterdir()] == [".model_repo.lock"]


@pytest.mark.usefixtures("one_stage")
def test_killed_build_is_made_again(slow_build: subprocess.Popen[str], tmp_path: Path) -> None:
    slow_build.kill()
    slow_build.wait()
    assert run("build", "--config", "x.yaml").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "engines" / "toy").iterdir()) == [
        ".model_repo.lock",
        "model_repo",
        "model_repo.manifest.json",
    ]


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from specpipe.cli.group import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'yaml', 'tritonclient'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_schema_is_json() -> None:
    result = run("schema")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["title"] == "PipelineConfig"


QUICKSTART = ("check", "--config", str(ROOT / "configs" / "quickstart.yaml"))


def test_check_states_the_contract() -> None:
    result = run(
        "check", "--config", str(ROOT / "configs" / "quickstart.yaml"), "--set", "engine.device=cpu"
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        "draft and target fit: 4096 token ids in use; embedding rows: draft 4096, target 4096\n"
        "context: draft 1024, target 1024\n"
        "end ids: 0\n"
        "memory of the draft: 21.3 MB (3.6 MB weights, 8.4 MB KV cache, 9.3 MB workspace)\n"
        "memory of the target: 103.0 MB (21.9 MB weights, 50.6 MB KV cache, 30.6 MB workspace)\n"
    )


def test_check_as_json() -> None:
    result = run(*QUICKSTART, "--json", "--set", "engine.device=cpu")
    contract = json.loads(result.stdout)
    assert contract["num_used_token_ids"] == 4096
    assert contract["end_token_ids"] == [0]
    assert contract["memory_plan"] is None


def test_check_plans_memory_for_a_named_gpu() -> None:
    result = run(*QUICKSTART, "--gpu", "L4")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[5:] == [
        "8 × 1024 tokens (batch × length):",
        "  GPU 0, L4 (compute capability 8.9): draft 64.0 MB (1.8 MB weights, 4.5 MB KV cache, "
        "57.8 MB workspace); target 109.5 MB (11.0 MB weights, 26.7 MB KV cache, 71.8 MB "
        "workspace); together 173.5 MB of 22.8 GB usable, fits",
        "largest batch × length that fits: at least 4096 × 1024",
    ]


def test_check_fails_where_the_pair_does_not_fit_and_still_says_what_would() -> None:
    result = run(*QUICKSTART, "--gpu", "0.13", "--json")
    assert result.exit_code == 1
    plan = json.loads(result.stdout)["memory_plan"]
    largest = {"max_batch_size": 1, "max_seq_len": 1024, "is_largest": True}
    assert (plan["fits"], plan["largest"]) == (False, [largest])
    assert result.stderr == (
        "Error: the pair does not fit on GPU 0: lower engine.max_batch_size or engine.max_seq_len\n"
    )


def test_check_says_what_a_kv_cache_holds() -> None:
    result = run(*QUICKSTART, "--gpu", "L4", "--set", "engine.kv_cache_memory=1TB")
    assert result.exit_code == 1
    assert "largest batch × length that fits: at least 4096 × 1024" in result.stdout
    assert "note: engine.kv_cache_memory 1TB holds " in result.stdout
    assert result.stderr == "Error: the pair does not fit on GPU 0: lower engine.kv_cache_memory\n"


def test_check_says_what_format_would_fit() -> None:
    """Published shapes: 70B in bfloat16 on two GPUs of 80 GB, and what FP8 makes of it."""
    files = str(ROOT / "tests" / "small_files")
    config = str(ROOT / "configs" / "llama-70b-fp8.yaml")
    command = ("check", "--config", config, "--small-files", files, "--gpu", "H100")
    fitting = run(*command)
    assert fitting.exit_code == 0, fitting.stderr
    assert "largest batch × length that fits: 238 × 1024, 127 × 2048, " in fitting.stdout
    assert "note: engine.max_num_tokens 8192 bounds the sum of the texts" in fitting.stdout
    plain = run(*command, "--set", "target.quantization=null")
    assert plain.exit_code == 1
    assert "would fit: target in fp8" in plain.stdout
    assert plain.stderr.endswith(", or choose a format that would fit\n")


def test_a_gpu_for_a_pair_on_the_cpu_is_a_usage_error() -> None:
    result = run(*QUICKSTART, "--gpu", "L4", "--set", "engine.device=cpu")
    assert result.exit_code == 2
    assert result.stderr.endswith("Error: --gpu has no effect: engine.device is cpu.\n")


def test_serve_without_a_build_says_what_to_run(tmp_path: Path) -> None:
    result = run("serve", "--config", "x.yaml")
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: {tmp_path}/engines/toy/model_repo does not exist:"
        " run `specpipe build --config x.yaml` first\n"
    )


def test_serve_passes_its_choices_and_the_command_that_builds_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "engines/toy/model_repo"
    repository.mkdir(parents=True)
    Manifest("package", (), {}, {}, {}, {}).write(manifest_path(repository))
    served: dict[str, object] = {}
    monkeypatch.setattr(launcher, "serve", lambda *arguments, **choices: served.update(choices))
    sets = ["--set", "engine.max_batch_size=4", "--set", "name=toy"]
    result = run("serve", "--config", "x.yaml", *sets)
    assert (result.exit_code, result.stderr) == (0, "starting Triton ...\n")
    names = ("mpi_mode", "allow_unknown_engine_facts", "build_command")
    assert [served[name] for name in names] == [
        "auto",
        False,
        "specpipe build --config x.yaml --set engine.max_batch_size=4 --set name=toy",
    ]
    run("serve", "--config", "x.yaml", "--mpi-mode", "leader", "--allow-unknown-engine-facts")
    assert [served[name] for name in names[:2]] == ["leader", True]
    assert run("serve", "--config", "x.yaml", "--mpi-mode", "both").exit_code == 2


def test_what_a_builder_prints_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("specpipe.runtimes.some.tool")
    monkeypatch.setattr(planning, "plan", plan_of(lambda: log.info("%s: layer 7", "draft/write")))
    result = run("build", "--config", "x.yaml")
    assert result.exit_code == 0
    assert result.stderr.splitlines()[1:3] == ["draft/write: starts", "draft/write: layer 7"]
    assert logging.getLogger("specpipe").handlers == []


def test_init_writes_a_config_that_loads(tmp_path: Path) -> None:
    result = run("init", str(PAIR / "draft"), str(PAIR / "target"))
    assert (result.exit_code, result.stdout) == (0, "python-code.yaml\n")
    config = load_config(Path("python-code.yaml"))
    assert config.name == "python-code"
    assert (tmp_path / config.draft.checkpoint).resolve() == PAIR / "draft"
    assert (tmp_path / config.target.checkpoint).resolve() == PAIR / "target"
    assert config.engine.max_seq_len == 1024
    planning.plan(config)


def test_init_has_as_many_draft_tokens_as_a_draft_proposes_in_one_pass(tmp_path: Path) -> None:
    draft = write_parallel_draft(PAIR / "draft", tmp_path / "draft", num_draft_tokens=12)
    assert run("init", str(draft), str(PAIR / "target")).exit_code == 0
    assert load_config(Path("python-code.yaml")).speculation.num_draft_tokens == 12


def test_init_takes_paths_from_here_and_writes_them_from_the_file(tmp_path: Path) -> None:
    os.symlink(PAIR, "pair")
    Path("configs").mkdir()
    result = run("init", "pair/draft", "pair/target", "--output", "configs/a.yaml", "--name", "no")
    assert (result.exit_code, result.stdout) == (0, "configs/a.yaml\n")
    config = load_config(Path("configs/a.yaml"))
    assert config.name == "no"
    assert (tmp_path / "configs" / config.draft.checkpoint).resolve() == PAIR / "draft"


def test_init_keeps_an_existing_file() -> None:
    result = run("init", str(PAIR / "draft"), str(PAIR / "target"), "--output", "x.yaml")
    assert result.exit_code == 1
    assert result.stderr == "Error: x.yaml exists: delete it, or name another --output\n"
    assert Path("x.yaml").read_text() == MINIMAL


@pytest.mark.parametrize("command", ["check", "build", "build --dry-run", "init"])
def test_pickles_are_refused_alike(command: str, tmp_path: Path) -> None:
    shutil.copytree(PAIR / "target", "target")
    Path("target/model.safetensors").rename("target/pytorch_model.bin")
    Path("y.yaml").write_text(
        f"name: toy\ndraft: {{checkpoint: {PAIR / 'draft'}}}\ntarget: {{checkpoint: target}}\n"
    )
    of_yaml = [*command.split(), "--config", "y.yaml"]
    words = ["init", str(PAIR / "draft"), "target"] if command == "init" else of_yaml
    refused = run(*words)
    assert refused.exit_code == 1
    assert re.fullmatch(
        r"Error: target: \S*target holds its weights as pickles only \(pytorch_model.bin\), which "
        r"can run code when they are read; save the model as safetensors\n",
        refused.stderr,
    )
    assert not Path("engines").exists() and not Path("target.yaml").exists()


@pytest.mark.parametrize("command", ["check", "build", "init"])
def test_a_mixture_of_experts_is_refused_alike(command: str) -> None:
    shutil.copytree(PAIR / "target", "target")
    config = json.loads(Path("target/config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    Path("target/config.json").write_text(json.dumps(config))
    Path("y.yaml").write_text(
        f"name: toy\ndraft: {{checkpoint: {PAIR / 'draft'}}}\ntarget: {{checkpoint: target}}\n"
    )
    words = ["init", str(PAIR / "draft"), "target"] if command == "init" else [command]
    refused = run(*words, *(() if command == "init" else ("--config", "y.yaml")))
    assert refused.exit_code == 1
    assert "target: MixtralForCausalLM" in refused.stderr.replace(f"{Path.cwd()}/", "")
    assert not Path("target.yaml").exists()


def test_init_refuses_a_name_that_no_config_may_have() -> None:
    result = run("init", str(PAIR / "draft"), str(PAIR / "target"), "--name", "a/b")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: --name a/b: expected letters, digits, '.', '_' and '-', a letter or digit first\n"
    )


STATISTICS = Statistics(
    num_input_tokens=3,
    num_output_tokens=4,
    num_steps=2,
    total_draft_tokens=5,
    total_accepted_draft_tokens=2,
    seed_used=7,
    acceptance_rate=0.4,
    draft_status="drafted",
)


class FakeClient:
    """Stands in for a server; remembers what it was asked."""

    asked: list[tuple[str, str | None, dict[str, object]]] = []

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompt: str | None, **settings: object) -> Completion:
        self._remember(prompt, settings)
        return Completion(text="ab", finish_reason="stop", statistics=STATISTICS)

    def stream(self, prompt: str | None, **settings: object) -> Iterator[Completion]:
        self._remember(prompt, settings)
        yield Completion(text="a")
        yield Completion(text="b", finish_reason="stop", statistics=STATISTICS)

    def _remember(self, prompt: str | None, settings: dict[str, object]) -> None:
        given = {key: value for key, value in settings.items() if value is not None}
        self.asked.append((self.url, prompt, given))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, dict[str, object]]]:
    monkeypatch.setattr("specpipe.triton.client.Client", FakeClient)
    FakeClient.asked = []
    return FakeClient.asked


Asked = list[tuple[str, str | None, dict[str, object]]]


def summary(stderr: str) -> list[str]:
    """The parts of the line below a text, but for the tokens per second, which are a number."""
    (line,) = stderr.splitlines()
    parts = line.split(" · ")
    (speed,) = [part for part in parts if part.endswith(" tokens/s")]
    assert float(speed.removesuffix(" tokens/s")) > 0
    return [part for part in parts if part != speed]


@pytest.mark.parametrize("streamed", [[], ["--stream"]])
def test_generate_prints_text_and_statistics(asked: Asked, streamed: list[str]) -> None:
    result = run("generate", "def f", "--seed", "7", "--stop", "\n", "--stop", "a,b", *streamed)
    assert result.exit_code == 0
    assert result.stdout == "ab\n"
    assert summary(result.stderr) == [
        "finish reason: stop",
        "4 tokens in 2 steps",
        "draft status: drafted",
        "acceptance rate 0.40 (2/5)",
    ]
    settings = {"max_tokens": 128, "seed": 7, "stop_words": ["\n", "a,b"]}
    assert asked == [("http://127.0.0.1:8000", "def f", settings)]


DRAFT_COUNTS = ("total_draft_tokens", "total_accepted_draft_tokens", "acceptance_rate")


def test_generate_says_why_nothing_was_drafted(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    undrafted: dict[str, Any] = dict.fromkeys(DRAFT_COUNTS, 0)
    head = ["finish reason: stop", "4 tokens in 2 steps"]
    for status, told in (("does_not_pay", ["draft status: does_not_pay"]), (None, [])):
        changed = dataclasses.replace(STATISTICS, draft_status=status, **undrafted)
        monkeypatch.setattr(sys.modules[__name__], "STATISTICS", changed)
        assert summary(run("generate", "def f").stderr) == [*head, *told]


def test_generate_as_json(asked: Asked) -> None:
    result = run("generate", "x", "--json", "--url", "grpc://host:1", "--stream")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[0] == {"text": "a"}
    assert lines[1]["finish_reason"] == "stop"
    assert lines[1]["statistics"]["acceptance_rate"] == 0.4
    assert result.stderr == ""
    assert asked[0][0] == "grpc://host:1"


def test_generate_reads_file_and_stdin(asked: Asked) -> None:
    Path("prompt.txt").write_text("from file\n")
    assert run("generate", "--file", "prompt.txt").exit_code == 0
    assert run("generate", "--file", "-", stdin="from stdin").exit_code == 0
    assert run("generate", stdin="piped").exit_code == 0
    assert [prompt for _, prompt, _ in asked] == ["from file\n", "from stdin", "piped"]


def test_generate_takes_one_prompt(asked: Asked) -> None:
    result = run("generate", "a", "--file", "x.yaml")
    assert result.exit_code == 2
    assert result.stderr.endswith("Error: Give the prompt once: as PROMPT or with --file.\n")
    assert asked == []


def test_generate_sends_chat_as_messages(asked: Asked) -> None:
    run("generate", "hi", "--chat", "--max-tokens", "5")
    assert asked[0][1:] == (
        None,
        {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    )


def test_generate_without_a_server_is_one_sentence() -> None:
    result = run("generate", "x", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: http://127.0.0.1:1 does not answer")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here")
def test_build_without_torch_is_refused_before_it_starts(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "quickstart.yaml")
    result = run("build", "--config", config, "--set", f"output_dir={tmp_path / 'out'}")
    assert result.exit_code == 1
    assert result.stderr == f"Error: runtime 'torch' needs 'torch': {with_extras('torch')}\n"
    assert not (tmp_path / "out").exists()


def test_quickstart_builds_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", "from specpipe.cli.group import main; main()", "build"]
    command += ["--config", str(ROOT / "configs" / "quickstart.yaml")]
    command += ["--set", f"output_dir={tmp_path}"]

    def build() -> list[str]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "python-code/model_repo\n"
        return done.stderr.splitlines()

    begun_s = cpu_seconds_of_children()
    first = build()
    assert first[1] == "check: starts"
    assert first[-1] == "package: built"
    built_s = cpu_seconds_of_children()
    assert build() == [
        "check: up to date",
        "draft/convert: up to date",
        "target/convert: up to date",
        "draft/build_engine: up to date",
        "target/build_engine: up to date",
        "package: up to date",
    ]
    # It imports no torch, which is most of a build of this pair.
    assert cpu_seconds_of_children() - built_s < (built_s - begun_s) / 2


def cpu_seconds_of_children() -> float:
    """Processor time, since the tests of others may run on the same cores."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
