"""The section `engine` as each runtime has it: what is read, what is said, what an editor sees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from specpipe.build.load import load_config
from specpipe.config.engine import EngineConfig, TorchEngineConfig
from specpipe.config.sections import json_schema
from specpipe.errors import ConfigError
from specpipe.runtimes.runtime import RUNTIMES, load_runtime

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SECTIONS = json.loads((Path(__file__).parent / "engine_sections.json").read_text())
"""What the configs meant when the section was one model for all runtimes."""

PAIR = {"name": "toy", "draft": {"checkpoint": "a"}, "target": {"checkpoint": "b"}}


def write(folder: Path, name: str, **engine: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**PAIR, "engine": engine}))
    return path


def faults(folder: Path, **engine: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, "x", **engine))
    return [line.partition(": ")[2] for line in str(caught.value).splitlines()]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_committed_config_means_what_it_did(path: Path) -> None:
    section = load_config(path).engine.model_dump(mode="json")
    if "tensorrt_llm" in section:
        del section["tensorrt_llm"]["build"], section["tensorrt_llm"]["parameters"]
    assert section == SECTIONS[path.stem]


def test_there_is_a_model_for_each_runtime() -> None:
    union, *_ = get_args(EngineConfig)
    named = [get_args(model.model_fields["runtime"].annotation) for model in get_args(union)]
    assert named == [(name,) for name in RUNTIMES]
    assert [load_runtime(name).name for name in RUNTIMES] == list(RUNTIMES)


def test_no_runtime_is_torch(tmp_path: Path) -> None:
    path = write(tmp_path, "x", max_batch_size=2)
    assert load_config(path).engine == TorchEngineConfig(max_batch_size=2)


def test_faults_of_every_kind_are_named_at_once(tmp_path: Path) -> None:
    found = faults(tmp_path, runtime="tensorrt", max_batch_size="4", kernels="plain", librari="x")
    assert found == [
        "engine.max_batch_size is '4': expected a whole number of at least 1",
        "engine.kernels is 'plain': expected nothing here, since it has no effect with"
        " engine.runtime 'tensorrt'",
        "engine.librari is not a setting: did you mean engine.library?",
    ]


@pytest.mark.parametrize(
    ("engine", "where"),
    [
        ({"runtime": "tensorrt"}, "engine.runtime 'tensorrt'"),
        ({"runtime": "tensorrt_llm"}, "engine.runtime 'tensorrt_llm'"),
        ({"kernels": "plain"}, "engine.kernels 'plain'"),
        ({"device": "cpu"}, "engine.device 'cpu'"),
        ({"dtype": "float16"}, "engine.dtype 'float16'"),
    ],
)
def test_where_there_are_no_pages_their_settings_are_refused(
    tmp_path: Path, engine: dict[str, Any], where: str
) -> None:
    no_effect = f": expected nothing here, since it has no effect with {where}"
    found = faults(tmp_path, **engine, kv_cache_memory="8GB")
    assert found == [f"engine.kv_cache_memory is '8GB'{no_effect}"]
    found = faults(tmp_path, **engine, prefix_reuse=False)
    assert found == [f"engine.prefix_reuse is false{no_effect}"]


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("8GB", 8 * 10**9), ("7.5 GiB", 15 * 2**29), ("1TB", 10**12)]
)
def test_memory_is_a_size(tmp_path: Path, text: str, num_bytes: int) -> None:
    engine = load_config(write(tmp_path, "x", kv_cache_memory=text)).engine
    assert isinstance(engine, TorchEngineConfig)
    assert engine.kv_cache_bytes == num_bytes


@pytest.mark.parametrize("value", ["8", 8, 0.5, "8 gigabytes", "-8GB", "9999999GB"])
def test_what_is_no_size_is_refused(tmp_path: Path, value: object) -> None:
    (found,) = faults(tmp_path, kv_cache_memory=value)
    assert found.endswith(': expected text (a size, as "8GB" or "7.5 GiB") or null')


@pytest.mark.parametrize("name", RUNTIMES)
def test_the_name_of_a_runtime_is_no_setting(tmp_path: Path, name: str) -> None:
    (found,) = faults(tmp_path, runtime="torch", **{name: 1})
    if name == "tensorrt_llm":
        assert found.startswith("engine.tensorrt_llm is 1: expected nothing here")
    else:
        assert found.startswith(f"engine.{name} is not a setting: ")


@pytest.mark.parametrize("runtime", [None, 3, ["torch"], "Torch", "x" * 1000])
def test_another_runtime_is_one_sentence(tmp_path: Path, runtime: object) -> None:
    (found,) = faults(tmp_path, runtime=runtime, max_batch_size=2)
    assert found.startswith("engine.runtime is ")
    assert found.endswith(": expected one of 'torch', 'tensorrt', 'tensorrt_llm'")
    assert len(found) < 120


def test_an_editor_is_told_what_the_runtime_reads(tmp_path: Path) -> None:
    """By the schema alone, as check-jsonschema and editors read it."""
    pytest.importorskip("check_jsonschema")
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(json_schema()))
    good = [
        write(tmp_path, "none"),
        write(tmp_path, "absent", kernels="fused", num_threads=2),
        write(tmp_path, "torch", runtime="torch", device="cpu"),
        write(tmp_path, "tensorrt", runtime="tensorrt", library="tensorrt", dtype="float16"),
        write(tmp_path, "llm", runtime="tensorrt_llm", tensorrt_llm={"backend": "pytorch"}),
    ]
    bad = [
        write(tmp_path, "library", library="tensorrt"),
        write(tmp_path, "section", runtime="torch", tensorrt_llm={}),
        write(tmp_path, "kernels", runtime="tensorrt", kernels="plain"),
        write(tmp_path, "dtype", runtime="tensorrt_llm", dtype="float16"),
        write(tmp_path, "unknown", runtime="vllm"),
    ]
    command = [sys.executable, "-m", "check_jsonschema", "--output-format", "json"]
    checked = subprocess.run(
        [*command, "--schemafile", schema, *CONFIGS, *good, *bad],
        capture_output=True,
        text=True,
        timeout=300,
    )
    refused = {error["filename"] for error in json.loads(checked.stdout)["errors"]}
    assert refused == {str(path) for path in bad}
    for path in bad:
        with pytest.raises(ConfigError):
            load_config(path)


def test_reading_a_yaml_imports_nothing_heavy() -> None:
    program = (
        "import sys; from pathlib import Path; from specpipe.build.load import load_config\n"
        "for path in sys.argv[1:]: load_config(Path(path))\n"
        "print(sorted({'numpy', 'torch', 'tensorrt_llm', 'huggingface_hub'} & set(sys.modules)))"
    )
    names = ("quickstart", "quickstart-rtx", "llama-70b-fp8")
    paths = [ROOT / "configs" / f"{name}.yaml" for name in names]
    read = subprocess.run(
        [sys.executable, "-c", program, *paths], capture_output=True, text=True, timeout=300
    )
    assert (read.stdout, read.stderr) == ("[]\n", "")
