"""`specpipe lock` and `build --locked`, over the pair of the quickstart."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from click.testing import CliRunner, Result
from huggingface_hub.hf_api import RepoFile

from specpipe import __version__
from specpipe.cli.group import main
from specpipe.machine.manifest import MANIFEST_SUFFIX
from tests.fake_nvml import DRIVER, Device, be

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "models" / "python-code"
SMALL_FILES = ROOT / "tests" / "small_files"
COMMIT, LATER = "a" * 40, "b" * 40
PAIR = """\
name: pair
draft: {checkpoint: draft}
target: {checkpoint: target}
engine: {max_seq_len: 256}
"""
QUANTIZED = PAIR.replace("draft}", "draft, quantization: {format: fp8}}")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    be(monkeypatch)
    for role in ("draft", "target"):
        shutil.copytree(MODELS / role, role)
    Path("x.yaml").write_text(PAIR)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--config", "x.yaml"])


def locked() -> dict[str, Any]:
    assert run("lock").exit_code == 0
    lock: dict[str, Any] = json.loads(Path("x.lock").read_text())
    return lock


def refusal(*arguments: str) -> list[str]:
    """The lines of a `build --locked` that did nothing."""
    result = run("build", "--locked", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert not Path("engines").exists()
    return result.stderr.splitlines()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def as_built(artifacts: Path) -> Iterator[tuple[str, Any]]:
    """Everything below a pair's folder by name, with its bytes or what its manifest records."""
    for path in sorted(artifacts.rglob("*")):
        name = path.relative_to(artifacts).as_posix()
        if path.name.endswith(MANIFEST_SUFFIX):
            manifest = json.loads(path.read_text())
            yield (
                name,
                {
                    **{key: manifest[key] for key in ("stage", "settings", "versions")},
                    "inputs": [
                        {file: record["sha256"] for file, record in one["files"].items()}
                        for one in manifest["inputs"]
                    ],
                    "outputs": {f: record["sha256"] for f, record in manifest["outputs"].items()},
                },
            )
        elif path.is_file():
            yield name, sha256(path)


def test_two_clean_builds_of_one_lock_have_the_same_bytes() -> None:
    lock = locked()
    assert lock["not_reproducible"] == {}
    for folder in ("one", "two"):
        result = run("build", "--locked", "--set", f"output_dir={folder}")
        assert (result.exit_code, result.stdout) == (0, f"{folder}/pair/model_repo\n")
    one, two = (dict(as_built(Path(folder, "pair"))) for folder in ("one", "two"))
    assert one == two
    assert {"check.manifest.json", "target/engine/model.safetensors"} <= one.keys()


def test_lock_has_every_file_that_a_build_reads_and_what_works_on_it() -> None:
    Path("draft", "notes.txt").write_text("no build reads this")
    lock = locked()
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    assert lock["checkpoints"] == {
        role: {
            "source": "a folder",
            "files": {name: sha256(MODELS / role / name) for name in names},
            "weights": {"model.safetensors": sha256(MODELS / role / "model.safetensors")},
        }
        for role in ("draft", "target")
    }
    models = ("postprocessing", "preprocessing", "speculative")
    assert lock["stages"]["package"]["files"] == {
        f"model_repo/{name}/1/model.py": sha256(ROOT / "model_repo" / name / "1" / "model.py")
        for name in models
    }
    assert lock["stages"]["target/convert"] == {
        "settings": {"tp_size": 1, "pp_size": 1},
        "files": {},
        "tool": {},
    }
    assert lock["versions"] == {
        "specpipe": __version__,
        **{name: version(name) for name in ("tokenizers", "tritonclient")},
    }
    assert (lock["calibration"], lock["gpus"]) == ({}, {})


def test_lock_of_a_quantized_side_has_its_texts_and_libraries() -> None:
    Path("texts.txt").write_text("one text\nanother text\n")
    Path("x.yaml").write_text(
        QUANTIZED.replace("fp8}", "fp8, calibration: {data: texts.txt}, exclude: ['*.proj']}")
    )
    lock = locked()
    assert lock["calibration"] == {"draft": sha256(Path("texts.txt"))}
    assert lock["stages"]["draft/calibrate"]["files"] == {}
    assert {"torch", "transformers", "nvidia-modelopt"} <= lock["versions"].keys()
    Path("texts.txt").write_text("one text\nno other text\n")
    assert refusal()[1].startswith("  - calibration.draft: locked ")


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    locked()
    be(monkeypatch, Device())
    assert locked()["gpus"] == {
        "0": {"name": "NVIDIA H100", "compute_cap": "9.0", "driver_version": DRIVER}
    }
    be(monkeypatch)
    assert refusal()[1].startswith("  - gpus.0: locked {")


def test_each_difference_has_a_line_before_anything_is_built() -> None:
    locked()
    before = sha256(Path("target/config.json"))
    with Path("target/config.json").open("a") as file:
        file.write("\n")
    Path("draft/added_tokens.json").write_text("{}")
    Path("target/generation_config.json").unlink()
    changed = sha256(Path("target/config.json"))
    added = sha256(Path("draft/added_tokens.json"))
    gone = sha256(MODELS / "target" / "generation_config.json")
    assert refusal("--set", "engine.max_batch_size=4") == [
        "Error: x.lock has something else locked, so nothing is built:",
        f"  - checkpoints.draft.files.added_tokens.json: locked nothing, here {added}",
        f"  - checkpoints.target.files.config.json: locked {before}, here {changed}",
        f"  - checkpoints.target.files.generation_config.json: locked {gone}, here nothing",
        "  - stages.draft/build_engine.settings.max_batch_size: locked 8, here 4",
        "  - stages.package.settings.max_batch_size: locked 8, here 4",
        "  - stages.target/build_engine.settings.max_batch_size: locked 8, here 4",
        "bring back what differs (`revision` holds a commit), or run `specpipe lock` and see what "
        "it changes",
    ]


def test_same_size_and_times_do_not_hide_another_byte() -> None:
    locked()
    weights = Path("draft/model.safetensors")
    stat = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert refusal()[1].startswith("  - checkpoints.draft.weights.model.safetensors: locked ")


def test_locking_again_says_what_changed() -> None:
    assert run("lock").output == "x.lock\n"
    assert run("lock").output == "nothing changed\nx.lock\n"
    assert run("lock", "--set", "speculation.adaptive=false").output == (
        "stages.package.settings.adaptive: was true, is now false\nx.lock\n"
    )
    assert run("lock", "--output", "other.lock").output == "other.lock\n"
    assert refusal()[1:2] == ["  - stages.package.settings.adaptive: locked false, here true"]


def test_lock_does_not_overwrite_what_is_none() -> None:
    assert run("lock", "--output", "x.yaml").output.startswith(
        "Error: x.yaml is not what `specpipe lock` writes ("
    )
    assert Path("x.yaml").read_text() == PAIR


def test_missing_lock() -> None:
    assert refusal() == [
        "Error: x.lock does not exist: run `specpipe lock`, and keep what it writes"
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"[]", "it holds no JSON object"),
        (b'{"packages": []}', "its format is None, expected 1"),
        (b'{"format": "%s"}' % (b"x" * 1000), f"its format is {'x' * 80}…, expected 1"),
        (b'{"a":' * 100_000, "it is nested too deeply"),
        (bytes((16 << 20) + 1), "it has 16777217 bytes, expected at most 16777216"),
    ],
    ids=["cut", "binary", "list", "foreign", "long", "deep", "huge"],
)
def test_what_is_no_lock_is_refused_in_a_sentence(data: bytes, reason: str) -> None:
    Path("x.lock").write_bytes(data)
    assert refusal() == [
        f"Error: x.lock is not what `specpipe lock` writes ({reason}): bring back the lock, or "
        "remove it and lock again"
    ]


def test_values_of_a_foreign_lock_are_cut() -> None:
    lock = locked()
    lock["versions"]["specpipe"] = "\x1b[31m" + "x" * 1000
    lock["gpus"] = 1
    lock["checkpoints"] |= {f"{number:03}" + "k" * 1000: 1 for number in range(100)}
    Path("x.lock").write_text(json.dumps(lock))
    lines = refusal()
    assert lines[51] == "  - 52 more"
    assert lines[1] == f"  - {('checkpoints.000' + 'k' * 1000)[:80]}…: locked 1, here nothing"
    assert max(map(len, lines)) < 200 and "\x1b" not in "".join(lines)


def test_deep_values_of_a_foreign_lock_are_compared() -> None:
    lock = locked()
    lock["versions"]["specpipe"] = 1
    text = json.dumps(lock).replace('"specpipe": 1', '"specpipe": ' + "[" * 900 + "]" * 900)
    Path("x.lock").write_text(text)
    assert refusal()[1].startswith("  - versions.specpipe: locked ")


def test_what_small_files_leave_unknown_is_not_compared() -> None:
    Path("x.yaml").write_text(
        "name: pair\n"
        "draft: {checkpoint: Qwen/Qwen2.5-0.5B-Instruct}\n"
        "target: {checkpoint: Qwen/Qwen2.5-7B-Instruct}\n"
    )
    unknown = (
        "not compared, since unknown: checkpoints.draft.commit, checkpoints.draft.weights, "
        "checkpoints.target.commit, checkpoints.target.weights\n"
    )
    small = ("--small-files", str(SMALL_FILES))
    result = run("lock", *small)
    assert (result.stdout, result.stderr) == ("x.lock\n", unknown)
    result = run("build", "--locked", "--dry-run", *small)
    assert (result.exit_code, result.stderr) == (0, unknown)
    result = run("build", "--locked", "--dry-run", *small, "--set", "engine.max_batch_size=4")
    assert result.exit_code == 1
    assert unknown in result.stderr


class Hub:
    """A hub with the quickstart's pair: what was fetched of it, and what it tells of files."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.commit = COMMIT
        self.tells_digests = True
        self.fetched: list[str] = []

    def fetch(self, repo_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        role = repo_id.partition("/")[2]
        snapshot = self.cache / f"models--org--{role}" / "snapshots" / self.commit
        snapshot.mkdir(parents=True, exist_ok=True)
        for path in (MODELS / role).iterdir():
            is_weights = path.suffix == ".safetensors"
            if is_weights and "*.safetensors" not in allow_patterns:
                continue
            if is_weights:
                self.fetched.append(role)
            if not (snapshot / path.name).exists():
                shutil.copy(path, snapshot)
        return str(snapshot)

    def tree(self, repo_id: str, *, revision: str) -> Iterator[RepoFile]:
        path = MODELS / repo_id.partition("/")[2] / "model.safetensors"
        digest = sha256(path)
        lfs = {"size": 1, "oid": digest, "pointerSize": 1} if self.tells_digests else None
        for name in ("model.safetensors", "consolidated.safetensors", "onnx/model.safetensors"):
            yield RepoFile(path=name, size=1, oid="0", lfs=lfs)
        yield RepoFile(path="config.json", size=1, oid="0")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.fetch)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", staticmethod(hub.tree))
    Path("x.yaml").write_text(
        PAIR.replace("{checkpoint: draft}", "{checkpoint: org/draft}").replace(
            "{checkpoint: target}", "{checkpoint: org/target}"
        )
    )
    return hub


@pytest.mark.parametrize("tells_digests", [True, False])
def test_weights_are_fetched_only_where_the_hub_tells_no_digests(
    hub: Hub, tells_digests: bool
) -> None:
    hub.tells_digests = tells_digests
    checkpoints = locked()["checkpoints"]
    assert hub.fetched == ([] if tells_digests else ["draft", "target"])
    for role in ("draft", "target"):
        assert checkpoints[role]["source"] == f"org/{role}"
        assert checkpoints[role]["commit"] == COMMIT
        assert checkpoints[role]["weights"] == {
            "model.safetensors": sha256(MODELS / role / "model.safetensors")
        }
    # What was fetched is what was told, whichever way it came to be known.
    assert run("build", "--locked", "--dry-run").exit_code == 0


def test_another_commit_is_refused_and_nothing_fetched(hub: Hub) -> None:
    locked()
    hub.commit = LATER
    assert refusal()[1:3] == [
        f"  - checkpoints.draft.commit: locked {COMMIT}, here {LATER}",
        f"  - checkpoints.target.commit: locked {COMMIT}, here {LATER}",
    ]
    assert hub.fetched == []


def test_weights_that_are_not_what_the_hub_told_are_refused(hub: Hub) -> None:
    locked()
    damaged = hub.cache / "models--org--target" / "snapshots" / COMMIT / "model.safetensors"
    damaged.write_bytes(b"another file")
    assert refusal()[1].startswith("  - checkpoints.target.weights.model.safetensors: locked ")
    assert hub.fetched == ["draft", "target"]
