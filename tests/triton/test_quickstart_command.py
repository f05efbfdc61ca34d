"""`specpipe quickstart`: of a `--target` folder, which Triton's models must find, too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from specpipe.triton.server import processes
from tests.installed import ROOT, Environment, run


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The folder that a wheel was installed into."""
    folder = tmp_path_factory.mktemp("quickstart")
    Environment(folder / "environment").install("--target", folder / "target", wheel)
    return folder / "target"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty at first; what the first test builds serves the others."""
    return tmp_path_factory.mktemp("folder")


def test_it_writes_builds_serves_and_compares(target: Path, folder: Path) -> None:
    command = [target / "bin" / "specpipe", "quickstart"]
    printed = run(command, cwd=folder, PYTHONPATH=str(target))
    headings = re.findall(r"^--- (.*)$", printed, re.MULTILINE)
    assert headings == [
        "the pair and its YAML go into specpipe-quickstart",
        "specpipe build --config specpipe-quickstart/configs/quickstart.yaml",
        "a Triton on free ports, as specpipe serve --config "
        "specpipe-quickstart/configs/quickstart.yaml",
        "a streamed request over gRPC",
        "a whole request over HTTP",
        "6 prompts of the set code, up to 96 tokens each, greedy, one at a time, 3 rounds in turns",
    ]
    # docs/quickstart.md shows these lines, with other numbers.
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(--- 6 prompts.*?)```", page, re.DOTALL)
    ending = printed[printed.rindex("--- ") :]
    assert re.sub(r"[\s\d.]+", " ", ending) == re.sub(r"[\s\d.]+", " ", shown)
    assert sorted(path.name for path in folder.iterdir()) == ["specpipe-quickstart"]
    for name in ("configs/quickstart.yaml", "models/python-code/target/model.safetensors"):
        assert (folder / "specpipe-quickstart" / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.parametrize(
    ("number", "returned"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_ends_it_with_its_server(
    target: Path, folder: Path, number: signal.Signals, returned: int
) -> None:
    command = [target / "bin" / "specpipe", "quickstart"]
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(target)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("ready at"):
                break
        tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
        (triton,) = (int(child) for listed in tasks for child in listed.read_text().split())
        assert len(processes.session_pids(triton)) > 1  # itself, and the models'
        process.send_signal(number)
        rest = process.stdout.read()
        errors = process.stderr.read().splitlines()
    assert process.returncode == returned
    assert "target alone" not in rest
    assert "Traceback" not in "".join(errors)
    assert errors[-1] == ("Interrupted." if number == signal.SIGINT else "package: up to date")
    assert processes.session_pids(triton) == []


def test_files_of_ones_own_are_left_as_they_are(tmp_path: Path) -> None:
    from specpipe.build.quickstart import write_files

    assert write_files(tmp_path) == []
    config = tmp_path / "configs" / "quickstart.yaml"
    config.write_text(config.read_text().replace("num_draft_tokens: 4", "num_draft_tokens: 2"))
    (tmp_path / "models/python-code/draft/config.json").unlink()
    assert write_files(tmp_path) == [config]
    assert "num_draft_tokens: 2" in config.read_text()
    assert (tmp_path / "models/python-code/draft/config.json").is_file()
    assert write_files(ROOT) == []  # a checkout has them all
