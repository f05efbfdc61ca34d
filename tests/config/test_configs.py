"""Every file in configs/ plans on a machine without GPU, hub or docker, from small files alone."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import huggingface_hub
import pytest
from click.testing import CliRunner, Result

from specpipe.build.pairing import check_pair
from specpipe.checkpoints.checkpoint import read_config
from specpipe.checkpoints.families import HEAD
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.unified_layout import part_shape, tensor_rules
from specpipe.cli.group import main
from specpipe.machine.gpus import gpus_here
from specpipe.runtimes.tensorrt_llm.engines import toolbox

ROOT = Path(__file__).parents[2]
SMALL_FILES = ROOT / "tests" / "small_files"
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program is found, no hub answers, and nobody is root."""

    def no_hub(*arguments: object, **options: object) -> str:
        raise AssertionError("a plan from small files asked the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolbox.os, "getuid", lambda: 1000)
    monkeypatch.setattr(toolbox.os, "getgid", lambda: 1000)


def run(command: str, name: str, *options: str) -> Result:
    config = str(ROOT / "configs" / f"{name}.yaml")
    small = ["--small-files", str(SMALL_FILES)]
    return CliRunner().invoke(main, [command, "--config", config, *small, *options])


def plan(name: str, output_dir: Path, *options: str) -> dict[str, list[list[str]]]:
    """The stages of a dry run, in order, with their commands."""
    into = ["--set", f"output_dir={output_dir}"]
    result = run("build", name, "--dry-run", "--json", *into, *options)
    assert result.exit_code == 0, result.stderr
    stages = json.loads(result.stdout)["stages"]
    assert [stage["reasons"] for stage in stages] == [["not built yet"]] * len(stages)
    return {stage["stage"]: stage.get("commands", []) for stage in stages}


def flags(command: list[str], program: str) -> dict[str, str]:
    """The flags that follow a program, with their values."""
    words = command[command.index(program) + 1 :]
    return {a: b for a, b in pairwise(words) if a.startswith("--")}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_dry_run_makes_nothing(name: str, tmp_path: Path) -> None:
    plan(name, tmp_path / "engines")
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pair_fits(name: str) -> None:
    result = run("check", name)
    assert (result.exit_code, result.stderr) == (0, "")


def test_the_plan_of_llama_70b(tmp_path: Path) -> None:
    stages = plan("llama-70b-fp8", tmp_path)
    assert {name: len(commands) for name, commands in stages.items()} == {
        "check": 0,
        "draft/convert": 0,
        "target/calibrate": 0,
        "target/quantize": 0,
        "draft/build_engine": 1,
        "target/build_engine": 1,
        "package": 0,
    }
    (draft,), (target,) = stages["draft/build_engine"], stages["target/build_engine"]
    folder = tmp_path / "llama-70b-fp8/target"
    assert shlex.join(target[: target.index("trtllm-build")]) == (
        "docker run --rm --name specpipe-target-build_engine --init --gpus '\"device=0,1\"' "
        "--user 1000:1000 --env HOME=/tmp --env USER=specpipe --workdir /tmp "
        f"--mount type=bind,source={folder}/checkpoint,target=/specpipe/checkpoint,readonly "
        f"--mount type=bind,source={folder}/engine,target=/specpipe/engine "
        "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    )
    assert draft[draft.index("--gpus") + 1] == '"device=0"'
    common = {
        "--max_batch_size": "16",
        "--max_seq_len": "8192",
        "--max_beam_width": "1",
        "--kv_cache_type": "paged",
        "--use_paged_context_fmha": "enable",
        "--logits_dtype": "float32",
    }
    built = flags(draft, "trtllm-build")
    assert {name: built[name] for name in common} == common
    assert (built["--gemm_plugin"], built["--use_fp8_context_fmha"]) == ("auto", "disable")
    assert not {"--speculative_decoding_mode", "--max_draft_len"} & built.keys()
    built = flags(target, "trtllm-build")
    assert {name: built[name] for name in common} == common
    assert (built["--gemm_plugin"], built["--use_fp8_context_fmha"]) == ("disable", "enable")
    assert built["--speculative_decoding_mode"] == "draft_tokens_external"
    assert built["--max_draft_len"] == "5"


def test_the_plan_of_qwen_quantizes_nothing(tmp_path: Path) -> None:
    stages = plan("qwen2.5", tmp_path)
    assert list(stages) == [
        "check",
        "draft/convert",
        "target/convert",
        "draft/build_engine",
        "target/build_engine",
        "package",
    ]
    assert flags(stages["target/build_engine"][0], "trtllm-build")["--max_draft_len"] == "4"


def test_the_plan_of_mistral_quantizes_both(tmp_path: Path) -> None:
    assert list(plan("mistral", tmp_path)) == [
        "check",
        "draft/calibrate",
        "target/calibrate",
        "draft/quantize",
        "target/quantize",
        "draft/build_engine",
        "target/build_engine",
        "package",
    ]


@pytest.mark.parametrize("name", ["llama-pytorch", "llama-pytorch-1.4"])
def test_the_plan_of_the_pytorch_backend_builds_no_engine(name: str, tmp_path: Path) -> None:
    stages = plan(name, tmp_path)
    assert stages == {"check": [], "draft/collect": [], "target/collect": [], "package": []}


def test_the_plan_of_the_pytorch_backend_quantizes_where_it_is_told(tmp_path: Path) -> None:
    stages = list(plan("llama-pytorch-1.4-fp8", tmp_path))
    assert stages == ["check", "target/calibrate", "draft/collect", "target/export", "package"]


def test_the_plan_of_tensorrt_engines(tmp_path: Path) -> None:
    engine = ["draft/build_engine", "target/build_engine"]
    converted = ["check", "draft/convert", "target/convert"]
    assert list(plan("quickstart-rtx", tmp_path)) == [*converted, *engine, "package"]
    beside = list(plan("quickstart-rtx", tmp_path, "--set", "engine.weights=beside"))
    plans = ["draft/build_plan", "target/build_plan"]
    placed = ["draft/place_weights", "target/place_weights"]
    assert beside == [*converted, *plans, *placed, "package"]


def test_the_gpu_that_is_not_here_is_the_config_s(tmp_path: Path) -> None:
    """Formats are refused by engine.tensorrt_llm.compute_capability; left out, by no GPU at all."""
    key = "engine.tensorrt_llm.compute_capability"
    result = run("build", "llama-70b-fp8", "--dry-run", "--set", f'{key}="8.0"')
    assert result.exit_code == 1
    assert "'fp8' does not run on a GPU of compute capability 8.0" in result.stderr
    assert gpus_here() == ()
    plan("llama-70b-fp8", tmp_path, "--set", f"{key}=null")


def test_a_changed_setting_changes_the_command(tmp_path: Path) -> None:
    sets = ["--set", "speculation.num_draft_tokens=7", "--set", "target.tp_size=4"]
    sets += ["--set", "engine.tensorrt_llm.target_gpu_ids=[0, 1, 2, 3]"]
    sets += ["--set", "engine.tensorrt_llm.image=nvcr.io/x@sha256:0123"]
    stages = plan("llama-70b-fp8", tmp_path, *sets)
    (target,) = stages["target/build_engine"]
    assert flags(target, "trtllm-build")["--max_draft_len"] == "7"
    assert target[target.index("--gpus") + 1] == '"device=0,1,2,3"'
    assert target[target.index("trtllm-build") - 1] == "nvcr.io/x@sha256:0123"


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("meta-llama--Llama-3.1-70B-Instruct", 70_553_706_496),
        ("meta-llama--Llama-3.2-1B-Instruct", 1_235_814_400),
        ("Qwen--Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen--Qwen2.5-0.5B-Instruct", 494_032_768),
        ("mistralai--Mistral-Large-Instruct-2407", 122_610_069_504),
        ("mistralai--Mistral-7B-Instruct-v0.3", 7_248_023_552),
    ],
)
def test_the_shapes_are_the_published_ones(name: str, num_parameters: int) -> None:
    """By the number of parameters that the models' pages on the hub name."""
    config = unified_config(read_config(SMALL_FILES / name))
    total = sum(
        math.prod(part_shape(config, part))
        for rule, _ in tensor_rules(config)
        if not (rule.name == HEAD and config.tie_word_embeddings)
        for part in rule.parts
    )
    assert total == num_parameters


def test_qwen_s_vocabularies_differ_by_padding() -> None:
    small, large = (SMALL_FILES / f"Qwen--Qwen2.5-{size}-Instruct" for size in ("0.5B", "7B"))
    contract = check_pair(small, large)
    assert (contract.draft_vocab_size, contract.target_vocab_size) == (151936, 152064)
    assert contract.notes == (
        "vocabularies differ only by padding: 259 used ids, 151936 and 152064 rows",
    )


OTHER = "nowhere/at-all"


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Puts the small files of the 0.5B under another layout."""

    def copy(folder: str) -> Path:
        to = tmp_path / "small" / folder
        to.mkdir(parents=True)
        for path in (SMALL_FILES / "Qwen--Qwen2.5-0.5B-Instruct").iterdir():
            (to / path.name).write_bytes(path.read_bytes())
        return tmp_path / "small"

    return copy


@pytest.mark.parametrize("folder", ["nowhere--at-all", "nowhere/at-all"])
def test_both_layouts_of_a_folder_of_small_files(
    folder: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    small = copied(folder)
    config = tmp_path / "x.yaml"
    config.write_text(f"name: x\ndraft: {{checkpoint: {OTHER}}}\ntarget: {{checkpoint: {OTHER}}}\n")
    command = ["check", "--config", str(config), "--small-files", str(small)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("draft and target fit: 259 token ids in use")


def test_small_files_that_are_not_there(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text(f"name: x\ndraft: {{checkpoint: {OTHER}}}\ntarget: {{checkpoint: b}}\n")
    result = CliRunner().invoke(
        main, ["check", "--config", str(config), "--small-files", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: draft: the small files of nowhere/at-all are not in {tmp_path}: put config.json, "
        "generation_config.json and the tokenizer's files into "
        f"{tmp_path}/nowhere--at-all\n"
    )


def test_small_files_build_nothing() -> None:
    result = run("build", "qwen2.5")
    assert result.exit_code == 2
    assert result.stderr.endswith(
        "Error: --small-files has no weights to build from: add --dry-run.\n"
    )
