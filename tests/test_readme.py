"""README.md is kept true: its commands exist, its files exist, its YAML loads."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml

from specpipe.cli import main
from specpipe.config import load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Every specpipe command line in a console block, continuation lines joined."""
    lines = re.sub(r"\\\n\s*", "", README).splitlines()
    return [line[2:] for line in lines if line.startswith("$ specpipe ")]


@pytest.mark.parametrize("line", commands())
def test_command_lines_parse(line: str) -> None:
    name, *arguments = shlex.split(line)[1:]
    command = main.commands[name]
    context = click.Context(command)
    command.parse_args(context, arguments)


def test_there_are_commands_to_test() -> None:
    assert len(commands()) >= 5


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`?make ([\w-]+)", README)) <= set(targets)


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_command_is_documented() -> None:
    assert [name for name in main.commands if f"specpipe {name}" not in README] == []


def test_the_yaml_loads(tmp_path: Path) -> None:
    whole, *parts = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert parts
    path = tmp_path / "readme.yaml"
    for part in ("", *parts):
        settings = {**yaml.safe_load(whole), **(yaml.safe_load(textwrap.dedent(part)) or {})}
        path.write_text(yaml.safe_dump(settings))
        assert load_config(path).name == "python-code"


def test_every_input_of_the_ensemble_that_works_is_named() -> None:
    from specpipe.triton.serving import ENSEMBLE_INPUTS

    supported = [tensor.name for tensor in ENSEMBLE_INPUTS if tensor.neutral is None]
    assert [n for n in supported if f"`{n}`" not in README and n not in QUIET_INPUTS] == []


def test_every_output_that_is_sent_and_every_draft_status_is_named() -> None:
    from specpipe.speculative.draft_status import DraftStatus
    from specpipe.triton.serving import STATISTICS_OUTPUTS

    names = [tensor.name for tensor in STATISTICS_OUTPUTS] + list(get_args(DraftStatus))
    assert [name for name in names if f"`{name}`" not in README] == []


# Accepted, and without effect: one sequence a response has no padding, and what they ask for is
# always sent.
QUIET_INPUTS = {
    "pad_id",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_perf_metrics",
}
