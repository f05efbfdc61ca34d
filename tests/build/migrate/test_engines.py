from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from specpipe.build.load import load_config
from specpipe.build.migrate.behaviour import of_backend_pytorch
from specpipe.build.migrate.engines import change
from specpipe.build.migrate.engines import from_engines as migrate
from specpipe.cli.group import main
from specpipe.errors import ConfigError

LLAMA = """\
name: llama
draft:
  checkpoint: meta-llama/Llama-3.2-1B-Instruct
target:
  checkpoint: meta-llama/Llama-3.1-70B-Instruct
  tp_size: 2
  quantization: {format: fp8, export: true}
speculation: {num_draft_tokens: 5, adaptive: true}
engine:
  runtime: tensorrt_llm   # comments stay
  max_seq_len: 8192
  tensorrt_llm:
    version: 1.1.0
    image: nvcr.io/nvidia/tritonserver:26.02-trtllm-python-py3
    draft_gpu_ids: [0]
    target_gpu_ids: [0, 1]
    build: {workers: 2}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "llama.yaml"
    path.write_text(text)
    return path


def test_settings_that_change_and_those_that_stay(tmp_path: Path) -> None:
    migration = migrate(written(tmp_path, LLAMA))
    assert migration.output == tmp_path / "llama-pytorch.yaml"
    assert yaml.safe_load(migration.output.read_text()) == {
        "name": "llama-pytorch",
        "draft": {"checkpoint": "meta-llama/Llama-3.2-1B-Instruct", "tp_size": 2},
        "target": {
            "checkpoint": "meta-llama/Llama-3.1-70B-Instruct",
            "tp_size": 2,
            "quantization": {"format": "fp8"},
        },
        "speculation": {"num_draft_tokens": 5, "adaptive": False},
        "engine": {
            "runtime": "tensorrt_llm",
            "max_seq_len": 8192,
            "tensorrt_llm": {
                "version": "1.1.0",
                "target_gpu_ids": [0, 1],
                "backend": "pytorch",
            },
        },
    }
    text = migration.output.read_text()
    assert text.startswith("# Made from llama.yaml by `specpipe migrate`.\nname: llama-pytorch\n")
    assert "\n  runtime: tensorrt_llm   # comments stay\n" in text
    assert migration.sections["settings"] == (
        "name: 'llama-pytorch', was 'llama', so that both can be built side by side",
        "engine.tensorrt_llm.backend: 'pytorch', was not given",
        "engine.tensorrt_llm.image: left out, since it has no effect with backend pytorch",
        "engine.tensorrt_llm.build: left out, since it has no effect with backend pytorch",
        "engine.tensorrt_llm.draft_gpu_ids: left out, since it has no effect with backend pytorch",
        "draft.tp_size: 2, was not given, as the target's: both models are split alike",
        "target.quantization.export: left out, since backend pytorch serves the exported folder "
        "anyway",
        "speculation.adaptive: false, was true, since K is fixed",
    )
    load_config(migration.output)


def test_a_format_that_backend_pytorch_does_not_read_is_left_out(tmp_path: Path) -> None:
    migration = migrate(written(tmp_path, LLAMA.replace("fp8, export: true", "int8_sq")))
    assert (
        "target.quantization: left out, since backend pytorch does not read int8_sq: the target is"
        " served as its checkpoint is; formats that it reads: fp8, fp8_pc_pt, int4_awq, w4a8_awq,"
        " nvfp4"
    ) in migration.sections["settings"]
    assert load_config(migration.output).target.quantization is None


def test_a_schedule_is_left_out(tmp_path: Path) -> None:
    level = "schedule: [{from_batch_size: 4, num_draft_tokens: 2}]"
    text = LLAMA.replace("adaptive: true", f"adaptive: true, {level}")
    migration = migrate(written(tmp_path, text))
    assert migration.sections["settings"][-1] == "speculation.schedule: left out, since K is fixed"
    assert load_config(migration.output).speculation.limits == ()


def test_behaviour_is_told(tmp_path: Path) -> None:
    behaviour = migrate(written(tmp_path, LLAMA)).sections["behaviour"]
    for word in ("No engine is built", "same GPUs", "num_draft_tokens", "lossless", "seed"):
        assert any(word in line for line in behaviour), word


def test_behaviour_is_that_of_the_release() -> None:
    before, since = (of_backend_pytorch(version) for version in ("1.2.1", "1.4.0rc4"))
    assert of_backend_pytorch("1.0.0") == before
    assert of_backend_pytorch("1.3.0rc29") == since
    told = (" ".join(before), " ".join(since))
    for words, holds in (
        ("Sampled output with a draft is not lossless", (True, False)),
        ("sampled output in its distribution", (False, True)),
        ("return_log_probs works for greedy requests", (True, False)),
        ("return_log_probs is refused", (False, True)),
        ("Llama or Qwen3", (False, True)),
        ("engine.tensorrt_llm.enable_penalty", (False, True)),
        ("No engine is built", (True, True)),
    ):
        assert tuple(words in text for text in told) == holds, words


def test_another_release_is_chosen(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA)
    migration = migrate(path, version="1.2.1")
    assert load_config(migration.output).engine.tensorrt_llm.version == "1.2.1"
    assert (
        "engine.tensorrt_llm.version: '1.2.1', was '1.1.0', as --to says"
        in migration.sections["settings"]
    )
    with pytest.raises(ConfigError, match=r"cannot be migrated: --to '1\.9'.*expected one of"):
        migrate(path, tmp_path / "b.yaml", version="1.9")


def test_from_engines_to_1_4(tmp_path: Path) -> None:
    text = LLAMA.replace("adaptive: true", "schedule: [{from_batch_size: 4, num_draft_tokens: 2}]")
    config = load_config(migrate(written(tmp_path, text), version="1.4.0rc4").output)
    assert config.engine.tensorrt_llm.version == "1.4.0rc4"
    assert config.speculation.limits == ((4, 2),)


def test_one_engine_keeps_the_schedule_and_shares_the_kv_cache(tmp_path: Path) -> None:
    text = LLAMA.replace(
        "adaptive: true", "schedule: [{from_batch_size: 4, num_draft_tokens: 2}]"
    ).replace("fp8, export: true", "fp8, kv_cache: fp8")
    text = text.replace("1B-Instruct\n", "1B-Instruct\n  quantization: {format: fp8}\n")
    config = load_config(written(tmp_path, text))
    data = yaml.safe_load(text)
    sentences = change(data, config, tmp_path / "b.yaml", "1.4.0rc4", is_one_engine=True)
    assert data["speculation"]["schedule"] == [{"from_batch_size": 4, "num_draft_tokens": 2}]
    assert data["draft"]["quantization"] == {"format": "fp8", "kv_cache": "fp8"}
    assert (
        "draft.quantization.kv_cache: 'fp8', was not given, as the target's: both models share its "
        "format" in sentences
    )


def test_a_smaller_split_of_the_target_goes_to_the_draft(tmp_path: Path) -> None:
    text = (
        "name: a\ndraft: {checkpoint: d, tp_size: 2}\ntarget: {checkpoint: t}\n"
        "engine: {runtime: tensorrt_llm}\n"
    )
    config = load_config(migrate(written(tmp_path, text)).output)
    assert (config.draft.tp_size, config.target.tp_size) == (1, 1)
    assert config.engine.tensorrt_llm.backend == "pytorch"


def test_folders_stay_what_they_are_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "elsewhere").mkdir()
    text = (
        "name: a\ndraft: {checkpoint: ./draft}\ntarget: {checkpoint: org/target}\n"
        "engine: {runtime: tensorrt_llm}\n"
    )
    migrate(written(tmp_path, text), tmp_path / "elsewhere" / "b.yaml")
    config = load_config(tmp_path / "elsewhere" / "b.yaml")
    assert config.draft.checkpoint == "../draft"
    assert config.target.checkpoint == "org/target"
    assert config.artifacts_dir == tmp_path / "engines" / "a-pytorch"


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        ("{runtime: torch}", "runtime torch"),
        ("{runtime: tensorrt_llm, tensorrt_llm: {backend: pytorch}}", "backend pytorch"),
    ],
)
def test_other_configs_are_refused(tmp_path: Path, engine: str, found: str) -> None:
    text = f"name: a\ndraft: {{checkpoint: d}}\ntarget: {{checkpoint: t}}\nengine: {engine}\n"
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        migrate(path)
    assert str(caught.value) == (
        f"{path} is for {found}: expected engine.runtime tensorrt_llm with backend tensorrt, "
        "which is what migrates to backend pytorch"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["llama.yaml"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA)
    output = migrate(path).output
    with pytest.raises(ConfigError, match="llama-pytorch.yaml exists: delete it, or name another"):
        migrate(path)
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        migrate(path, tmp_path / "nowhere" / "b.yaml")
    assert load_config(output).name == "llama-pytorch"


def test_the_command_prints_file_settings_and_behaviour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, LLAMA)
    result = CliRunner().invoke(main, ["migrate", "--config", "llama.yaml", "--output", "b.yaml"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        "b.yaml",
        "settings:",
        "  name: 'llama-pytorch', was 'llama', so that both can be built side by side",
    ]
    assert "behaviour:" in lines
    again = CliRunner().invoke(main, ["migrate", "--config", "llama.yaml", "--output", "b.yaml"])
    assert again.exit_code == 1
    assert again.stderr == "Error: b.yaml exists: delete it, or name another --output\n"
