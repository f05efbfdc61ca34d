"""Every example runs: the clients against one real Triton with the quickstart pair, the configs by
their commands.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from openai import OpenAI

from specpipe import Client
from specpipe.build import execution, planning, repositories
from specpipe.build.load import load_config
from specpipe.cli.group import main
from specpipe.machine.manifest import read_manifest
from specpipe.triton.server import launcher
from specpipe.triton.server.server import Server
from tests.chat_templates import TEMPLATES
from tests.quiet import Quiet

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
CALIBRATION = EXAMPLES / "calibration" / "pair.yaml"
NIGHTLY = sorted((EXAMPLES / "nightly").glob("*.yaml"))

PROMPT = "def fibonacci(n):"


QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What is set of the quickstart pair: it gets a chat template, which it has not."""
    folder = tmp_path_factory.mktemp("pair")
    # K is as asked: the adaptive one is 0 on a machine that is busy.
    overrides = [f"output_dir={folder}", "speculation.adaptive=false"]
    for role in ("draft", "target"):
        shutil.copytree(ROOT / "models" / "python-code" / role, folder / role)
        settings = folder / role / "tokenizer_config.json"
        changed = {**json.loads(settings.read_text()), "chat_template": TEMPLATES["qwen_2_tools"]}
        settings.write_text(json.dumps(changed))
        overrides.append(f"{role}.checkpoint={folder / role}")
    return overrides


@pytest.fixture(scope="module")
def server(overrides: list[str]) -> Iterator[Server]:
    config = load_config(QUICKSTART, overrides)
    execution.run(planning.plan(config), Quiet())
    with launcher.running(repositories.built_repository(config)) as running:
        yield running


@pytest.fixture(scope="module")
def door(server: Server, overrides: list[str]) -> Iterator[str]:
    """The address of the door for OpenAI's clients in front of the server."""
    options = [word for value in overrides for word in ("--set", value)]
    command = ["gateway", "--config", QUICKSTART, "--url", server.grpc_url, "--listen", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "specpipe", *map(str, command), *options],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield line.removeprefix("ready: ").strip()
        process.terminate()


@pytest.fixture(scope="module")
def answer(server: Server) -> str:
    """The greedy answer of 32 tokens to the prompt of the examples."""
    with Client(server.grpc_url) as client:
        return client.generate(PROMPT, max_tokens=32).text


def run(*command: object) -> str:
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    ).stdout


def address(url: str) -> str:
    return url.partition("://")[2]


def test_each_example_stands_in_their_list() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([^)]+)\)", readme))
    files = (path for path in EXAMPLES.rglob("*.*") if "__pycache__" not in path.parts)
    assert {str(path.relative_to(EXAMPLES)) for path in files} - {"README.md"} == listed


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_own_client(protocol: str, server: Server, answer: str) -> None:
    url = server.http_url if protocol == "http" else server.grpc_url
    with Client(url) as client:
        sampled = client.generate("import os\n", max_tokens=32, temperature=0.8, seed=7).text
    printed = run(sys.executable, EXAMPLES / "client.py", url)
    assert printed.startswith(f"{answer}\nfinished by: length\nStatistics(num_input_tokens=")
    assert f"\n{sampled}\nrefused: temperature" in printed


def test_curl(server: Server, answer: str) -> None:
    whole, *lines = run(EXAMPLES / "curl.sh", server.http_url).splitlines()
    assert json.loads(whole)["text_output"] == answer
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert len(chunks) > 1
    assert "".join(chunk["text_output"] for chunk in chunks) == answer
    assert chunks[-1]["finish_reason"] == "length"


def test_tritonclient_over_http(server: Server, answer: str) -> None:
    printed = run(sys.executable, EXAMPLES / "triton_http.py", address(server.http_url))
    inputs, _, rest = printed.partition("\n")
    assert {"text_input", "max_tokens", "stop_words"} <= set(inputs[len("inputs: ") :].split(", "))
    text, stop, _ = answer.partition("\n\n")
    assert stop and rest == f"{text}\nfinished by: stop\n"


def test_tritonclient_over_grpc(server: Server, answer: str) -> None:
    printed = run(sys.executable, EXAMPLES / "triton_grpc.py", address(server.grpc_url))
    accepted = re.fullmatch(
        re.escape(f"{answer}\nfinished by: length\naccepted: ") + r"(\d+)\n", printed
    )
    assert accepted is not None and int(accepted[1]) > 0


def test_tritonclient_over_grpc_decoupled(server: Server, answer: str) -> None:
    printed = run(sys.executable, EXAMPLES / "triton_grpc_stream.py", address(server.grpc_url))
    assert printed == f"{answer}\n"


def test_openai_chat(door: str) -> None:
    with OpenAI(base_url=f"{door}/v1", api_key="none") as client:
        whole, sampled = (
            client.chat.completions.create(
                model="python-code",
                messages=[{"role": "user", "content": "Write fibonacci(n)."}],
                max_tokens=32,
                temperature=temperature,
                seed=7,
            )
            for temperature in (0, 0.8)
        )
    printed = run(sys.executable, EXAMPLES / "openai_chat.py", f"{door}/v1")
    assert printed.startswith(f"{whole.choices[0].message.content}\nfinished by: length\n")
    assert f"\n{sampled.choices[0].message.content}\ntokens: " in printed
    assert "\nrefused: {'message': 'temperature" in printed


def test_openai_tools(door: str) -> None:
    first, call, answer = run(sys.executable, EXAMPLES / "openai_tools.py", f"{door}/v1").split(
        "\n", maxsplit=2
    )
    assert first == "finished by: tool_calls"
    arguments = re.fullmatch(r"call: weather \{'city': (.{1,42}), 'days': (\d+)\}", call)
    assert arguments is not None and 0 <= int(arguments[2]) <= 14
    assert answer.startswith("answer: ")


def test_openai_structured_output(door: str) -> None:
    printed = run(sys.executable, EXAMPLES / "openai_structured.py", f"{door}/v1")
    assert re.fullmatch(
        r"parsed: verdict='(good|bad)' stars=[1-5] why=.*\n"
        r"chosen: (yes|no)\nmatched: 20\d\d-[01]\d-[0-3]\d\n",
        printed,
        re.DOTALL,
    )


def test_openai_with_curl(door: str, answer: str) -> None:
    name, whole, *lines, chat = run(EXAMPLES / "openai_curl.sh", door).splitlines()
    assert name == "python-code"
    assert json.loads(whole)["choices"][0]["text"] == answer
    *chunks, end = [line.removeprefix("data: ") for line in lines if line]
    assert end == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == answer
    content = json.loads(json.loads(chat)["choices"][0]["message"]["content"])
    assert content in ({"is_prime": True}, {"is_prime": False})


@pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="no ModelOpt here")
def test_calibration_on_own_texts(tmp_path: Path) -> None:
    # What it costs is measured by tests/quantization; here it would take most of the time.
    options = ["--set", f"output_dir={tmp_path}", "--set", "quality.measure=false"]
    built = CliRunner().invoke(main, ["build", "--config", str(CALIBRATION), *options])
    assert (built.exit_code, built.stdout) == (0, f"{tmp_path}/own-texts/model_repo\n")
    measured = read_manifest(tmp_path / "own-texts" / "target" / "scales")
    assert measured is not None
    read = [Path(given.path).name for given in measured.inputs]
    assert "texts.jsonl" in read and "builtin.jsonl" not in read


@pytest.mark.parametrize("path", NIGHTLY, ids=lambda path: path.stem)
def test_a_pair_of_the_nightly_run_can_be_built(path: Path, tmp_path: Path) -> None:
    config = load_config(path, [f"output_dir={tmp_path}"])
    stages = [report.stage for report in execution.preview(planning.plan(config)) if report.reasons]
    assert (stages[0], stages[-1]) == ("check", "package")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="no SciPy here")
def test_nightly_of_two_pairs(tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    command = ["nightly", *map(str, NIGHTLY), "--summary", str(summary), "--in-process"]
    done = CliRunner().invoke(main, [*command, "--set", f"output_dir={tmp_path}"])
    assert done.exit_code == 0, done.stderr
    written = summary.read_text(encoding="utf-8")
    assert written.startswith("## specpipe nightly: 2 of 2 good\n")
    rows = re.findall(r"^\| (\S+) \| (\w+) \| 6 of 6 stages \| (\w+) \|", written, re.MULTILINE)
    assert rows == [("nightly-code", "good", "identical"), ("nightly-lookup", "good", "identical")]
