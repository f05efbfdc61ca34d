"""README.md and docs/ are kept true: commands, links and files exist, the YAML loads."""

from __future__ import annotations

import importlib
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import yaml
from click.testing import CliRunner

from specpipe.build.load import load_config
from specpipe.cli.group import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
WRITTEN = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    ROOT / "benchmarks" / "README.md",
    *PAGES,
]
LINKED = [*WRITTEN, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
MANUAL = "\n".join([README, *(page.read_text(encoding="utf-8") for page in PAGES)])


def commands() -> list[str]:
    """Every specpipe command line in a console block, continuation lines joined."""
    lines = re.sub(r"\\\n\s*", "", MANUAL).splitlines()
    return [line[2:] for line in lines if line.startswith("$ specpipe ")]


@pytest.mark.parametrize("line", commands())
def test_command_lines_parse(line: str) -> None:
    command: click.Command = main
    arguments = shlex.split(line)[1:]
    while isinstance(command, click.Group) and arguments[0] in command.commands:
        command = command.commands[arguments.pop(0)]
    assert command is not main
    command.parse_args(click.Context(command), arguments)


def test_there_are_commands_to_test() -> None:
    assert len(commands()) >= 5


BENCHMARKS = re.findall(
    r"python -m benchmarks\.(gpu|gpu_load|parallel_draft|bits) ([^`\n]*)",
    re.sub(r"\\\n\s*", "", (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")),
)


@pytest.mark.parametrize(("name", "words"), BENCHMARKS)
def test_benchmark_command_lines_parse(name: str, words: str) -> None:
    folder = ROOT / "benchmarks" / name
    module = importlib.import_module(f"benchmarks.{name}{'.__main__' if folder.is_dir() else ''}")
    assert module.parse_arguments(shlex.split(words))


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`?make ([\w-]+)", MANUAL)) <= set(targets)


def test_a_newcomer_reads_no_more_than_150_lines() -> None:
    assert len(README.splitlines()) <= 150


def test_the_two_commands_stand_in_the_readme() -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    assert [line.split("  ")[0] for line in block.splitlines()] == ["make quickstart", "make test"]


def prose(page: Path) -> list[str]:
    """The lines outside code blocks, tables and images."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [line for line in text.splitlines() if not line.startswith(("|", "!["))]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_have_at_most_100_columns(page: Path) -> None:
    assert [line for line in prose(page) if len(line) > 100] == []


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings: lower case, hyphens for spaces, no punctuation."""
    headings = (line.lstrip("# ") for line in prose(page) if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_nowhere(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    return not target.exists() or (anchor != "" and anchor not in anchors(target))


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if not re.match(r"https?:", link)]
    assert [link for link in local if leads_nowhere(page, link)] == []


def test_a_link_without_its_file_or_heading_is_found() -> None:
    page = ROOT / "README.md"
    links = ["LICENSE", "docs/results.md#results", "docs/results.md#result", "docs/result.md"]
    assert [leads_nowhere(page, link) for link in links] == [False, False, True, True]


def test_every_page_has_its_line_in_the_list_of_pages() -> None:
    listed = re.findall(
        r"^\| \[[^]]+\]\((\S+\.md)\) \| \S", (ROOT / "docs/README.md").read_text(), re.M
    )
    names = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]
    assert sorted(listed) == sorted(name for name in names if name != "README.md")


def test_every_command_is_documented() -> None:
    assert [name for name in main.commands if f"specpipe {name}" not in MANUAL] == []


def yaml_blocks() -> list[dict[str, Any]]:
    """The YAML of all pages: whole files, and sections that are added to one."""
    blocks = re.findall(r"^ *```yaml\n(.*?)```", MANUAL, re.DOTALL | re.MULTILINE)
    return [yaml.safe_load(textwrap.dedent(block)) for block in blocks]


def test_the_yaml_loads(tmp_path: Path) -> None:
    wholes = [block for block in yaml_blocks() if "name" in block]
    parts = [block for block in yaml_blocks() if "name" not in block]
    assert [whole["name"] for whole in wholes] == ["qwen2.5", "python-code"] and parts
    path = tmp_path / "readme.yaml"
    for settings in (*wholes, *(wholes[0] | part for part in parts)):
        path.write_text(yaml.safe_dump(settings))
        assert load_config(path).name == settings["name"]


def test_the_first_yaml_of_nine_lines_is_a_pair_that_fits(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert text.count("\n") == 9
    path = tmp_path / "pair.yaml"
    path.write_text(text)
    small_files = str(ROOT / "tests" / "small_files")
    checked = CliRunner().invoke(
        main, ["check", "--config", str(path), "--small-files", small_files]
    )
    assert (checked.exit_code, checked.stderr) == (0, "")
    assert checked.stdout.startswith("draft and target fit: ")


def rows(text: str) -> list[list[str]]:
    """The cells of the rows that begin with a runtime; links without where they lead."""
    lines = re.findall(r"^\| (`t.*) \|$", re.sub(r"\]\([^)]*\)", "]", text), re.MULTILINE)
    return [line.split(" | ") for line in lines]


def test_what_was_run_stands_in_the_readme_as_in_the_documents() -> None:
    told = rows((ROOT / "docs" / "runtimes.md").read_text(encoding="utf-8"))
    assert len(told) == 6
    assert rows(README) == told


def test_every_input_of_the_ensemble_that_works_is_named() -> None:
    from specpipe.triton.serving.tensors import ENSEMBLE_INPUTS

    supported = [tensor.name for tensor in ENSEMBLE_INPUTS if tensor.neutral is None]
    assert [n for n in supported if f"`{n}`" not in MANUAL and n not in QUIET_INPUTS] == []


def test_every_output_that_is_sent_and_every_draft_status_is_named() -> None:
    from specpipe.speculative.draft_status import DraftStatus
    from specpipe.triton.serving.tensors import STATISTICS_OUTPUTS

    names = [tensor.name for tensor in STATISTICS_OUTPUTS] + list(get_args(DraftStatus))
    assert [name for name in names if f"`{name}`" not in MANUAL] == []


# Accepted, and without effect: one sequence a response has no padding, and what they ask for is
# always sent.
QUIET_INPUTS = {
    "pad_id",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_perf_metrics",
}
