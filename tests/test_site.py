"""The site builds strictly and asks no other host; its tutorials do what they say."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from specpipe.cli.group import main
from specpipe.config.sections import PipelineConfig
from specpipe.triton.serving.tensors import ENSEMBLE_INPUTS, ENSEMBLE_OUTPUTS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_no_page_has_more_than_400_lines(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 400


def named(page: str) -> set[str]:
    """The first cell of each row of a reference page."""
    text = (REFERENCE / f"{page}.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE))


def fields(model: Any) -> Iterator[str]:
    """The names of all settings below a section, by the sections themselves."""
    for name, field in model.model_fields.items():
        sections = [found for found in walk(field.annotation) if issubclass(found, BaseModel)]
        for section in sections:
            yield from fields(section)
        if not sections:
            yield name


def walk(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        yield annotation
    for argument in get_args(annotation):
        yield from walk(argument)


def test_every_setting_stands_in_the_reference() -> None:
    settings = set(fields(PipelineConfig)) - {"source", "from_batch_size"}
    assert len(settings) > 120
    last_names = {name.rpartition(".")[2] for name in named("settings")}
    assert settings - last_names == {"num_draft_tokens"} - last_names


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_option_stands_in_the_reference(name: str) -> None:
    shown = CliRunner().invoke(main, [name, "--help"]).stdout
    options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown, re.MULTILINE))
    pages = (
        REFERENCE / f"{page}.md" for page in ("commands", "release-commands", "draft-commands")
    )
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    section = text.partition(f"## `specpipe {name}`\n")[2].partition("\n## ")[0]
    assert options and options <= set(re.findall(r"--[\w-]+", section))


def test_every_tensor_stands_in_the_reference() -> None:
    tensors = {tensor.name for tensor in (*ENSEMBLE_INPUTS, *ENSEMBLE_OUTPUTS)}
    assert named("ensemble") == tensors


def test_the_site_builds_strictly_and_asks_no_other_host(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs-material is of the extra dev")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr
    loaded = re.compile(r"<(?:script|img|link rel=.stylesheet.)[^>]*(?:src|href)=.https?:[^>]*>")
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 25
    assert [hit for page in pages for hit in loaded.findall(page.read_text("utf-8"))] == []


# Tutorials.

PORTS = ("8000", "8001", "8002")
"""Of HTTP, gRPC and metrics, where nothing else is asked for."""

BLOCK = re.compile(r"(?:<!-- (run|not run)[^>]*-->\n)?```console\n(.*?)```", re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = BLOCK.findall(page.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_block_of_a_tutorial_is_run_or_says_why_not(page: Path) -> None:
    assert blocks(page)
    assert [text for mark, text in blocks(page) if not mark] == []


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.stem == "nightly" else ())
        for page in TUTORIALS
    ],
    ids=[page.stem for page in TUTORIALS],
)
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path) -> None:
    """In a folder of its own; what a block shows, but for `...`, is printed line for line."""
    for name in ("configs", "models", "tests/small_files"):
        shutil.copytree(ROOT / name, tmp_path / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    server: subprocess.Popen[str] | None = None
    ports = dict.fromkeys(PORTS, "")
    try:
        for line, shown in run_lines(page):
            if line.startswith("specpipe serve"):
                server, printed = serve(line, tmp_path, path, ports)
            else:
                if line.startswith("specpipe generate"):
                    line += f" --url http://127.0.0.1:{ports['8000']}"
                line = line.replace("localhost:8000", f"127.0.0.1:{ports['8000']}")
                ran = subprocess.run(
                    ["bash", "-c", line],
                    cwd=tmp_path,
                    env={**os.environ, "PATH": path, "COLUMNS": "200"},
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
                assert ran.returncode == 0, (line, ran.stderr)
                printed = ran.stdout + ran.stderr
                if line.startswith("curl"):
                    assert json.loads(ran.stdout)["text_output"]
            assert [text for text in shown if text not in printed] == []
    finally:
        if server is not None:
            server.terminate()
            server.communicate(timeout=60)


def run_lines(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each command that is to be run, with the lines that it is said to print."""
    for mark, text in blocks(page):
        if mark != "run":
            continue
        for command in text.split("$ ")[1:]:
            line, *shown = command.splitlines()
            yield line, [text for text in shown if text not in ("", "...")]


def serve(
    line: str, folder: Path, path: str, ports: dict[str, str]
) -> tuple[subprocess.Popen[str], str]:
    """The server, ready, on free ports, which go into `ports`; what it printed has the usual."""
    server = subprocess.Popen(
        [*shlex.split(line), "--http-port=0", "--grpc-port=0", "--metrics-port=0"],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert server.stdout is not None
    printed = ""
    for text in server.stdout:
        printed += text
        if text.startswith("ready: "):
            ports.update(zip(PORTS, re.findall(r":(\d+)", text), strict=True))
            break
    for usual, free in ports.items():
        printed = printed.replace(f":{free}", f":{usual}")
    return server, printed
