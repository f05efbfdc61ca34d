from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from specpipe.checkpoints.source import Source, resolve
from specpipe.errors import CheckpointError, ConfigError, SpecpipeError

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = [
    ".gitattributes",
    "LICENSE",
    "README.md",
    "USE_POLICY.md",
    "added_tokens.json",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "config.json",
    "configuration_toy.py",
    "consolidated.safetensors",
    "generation_config.json",
    "merges.txt",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "onnx/LICENSE",
    "onnx/model.onnx",
    "original/consolidated.00.pth",
    "original/params.json",
    "pytorch_model.bin",
    "tokenizer.json",
    "tokenizer.model",
    "toy.gguf",
]
SMALL = [
    "LICENSE",
    "README.md",
    "USE_POLICY.md",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
]


class Hub:
    """Stands in for `snapshot_download`: records the call, and answers or fails as told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: Exception | None = None
        self.calls: list[tuple[str, str | None]] = []
        self.files: list[str] = []

    def __call__(
        self, repo_id: str, *, revision: str | None, tqdm_class: type, **patterns: Any
    ) -> str:
        self.calls.append((repo_id, revision))
        self.files += filter_repo_objects(REPOSITORY, **patterns)
        if self.failure is not None:
            raise self.failure
        return str(self.path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    snapshot = tmp_path / "cache" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    hub = Hub(snapshot)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


def refusal(checkpoint: str, base: Path, revision: str | None = None) -> str:
    with pytest.raises(SpecpipeError) as caught:
        resolve(checkpoint, revision=revision, base=base, role="draft")
    return str(caught.value).replace(str(base), "BASE")


def failure(kind: type[Exception]) -> Exception:
    """Makes an error of the hub's library without the HTTP response that it wants."""
    return kind.__new__(kind)


@pytest.mark.parametrize("given", ["org/toy", "./org/toy", "other/../org/toy"])
def test_folder_is_relative_to_the_config_and_wins_over_the_hub(
    tmp_path: Path, hub: Hub, given: str
) -> None:
    (tmp_path / "org" / "toy").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    source = resolve(given, revision=None, base=tmp_path, role="draft")
    assert source == Source(path=tmp_path / "org" / "toy", revision=None, name=given)
    assert hub.calls == []


def test_absolute_folder(tmp_path: Path, hub: Hub) -> None:
    source = resolve(str(tmp_path), revision=None, base=Path("/elsewhere"), role="target")
    assert source.path == tmp_path


def test_home_folder(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "toy").mkdir()
    source = resolve("~/toy", revision=None, base=Path("/elsewhere"), role="target")
    assert source.path == tmp_path / "toy"


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_hub_id_comes_with_its_commit(tmp_path: Path, hub: Hub, revision: str | None) -> None:
    source = resolve("org/toy", revision=revision, base=tmp_path, role="draft")
    assert source == Source(path=hub.path, revision=COMMIT, name="org/toy")
    assert hub.calls == [("org/toy", revision)]


def test_pickles_code_and_copies_are_not_fetched(tmp_path: Path, hub: Hub) -> None:
    resolve("org/toy", revision=None, base=tmp_path, role="draft")
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(hub.files) == sorted(SMALL + shards)


def test_pair_check_needs_no_weights(tmp_path: Path, hub: Hub) -> None:
    resolve("org/toy", revision=None, base=tmp_path, role="draft", weights=False)
    assert sorted(hub.files) == SMALL


def test_other_chat_templates_come_with_the_default_one(tmp_path: Path, hub: Hub) -> None:
    (hub.path / "chat_template.jinja").touch()
    resolve("org/toy", revision="main", base=tmp_path, role="draft", weights=False)
    assert hub.calls == [("org/toy", "main"), ("org/toy", COMMIT)]
    assert sorted(hub.files) == sorted([*SMALL, "additional_chat_templates/tool_use.jinja"])


@pytest.mark.parametrize("given", ["models/python/draft", "../draft", "/none/draft", "a b", "x//y"])
def test_what_looks_like_a_path_is_not_asked_for_at_the_hub(
    tmp_path: Path, hub: Hub, given: str
) -> None:
    folder = (tmp_path / given).resolve()
    with pytest.raises(ConfigError) as caught:
        resolve(given, revision=None, base=tmp_path, role="draft")
    assert str(caught.value) == f"draft.checkpoint {given}: there is no folder {folder}"
    assert hub.calls == []


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert refusal("model.safetensors", tmp_path) == (
        "draft.checkpoint BASE/model.safetensors is a file; give the folder that holds config.json"
    )


def test_empty_checkpoint(tmp_path: Path) -> None:
    assert refusal("", tmp_path) == "draft.checkpoint is empty; give a folder or a hub id"


def test_revision_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    assert refusal("toy", tmp_path, "main") == (
        "draft.revision is 'main', but draft.checkpoint is the folder BASE/toy; "
        "a revision needs a hub id"
    )


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (
            failure(errors.GatedRepoError),
            "draft: org/toy is gated; accept its terms on the hub, then `hf auth login`",
        ),
        (
            failure(errors.RepositoryNotFoundError),
            "draft.checkpoint org/toy is neither a folder (BASE/org/toy) nor a hub repository that "
            "you can read; check the name, or `hf auth login` if it is private",
        ),
        (
            failure(errors.RevisionNotFoundError),
            "draft: org/toy has no revision v2; check draft.revision",
        ),
        (
            errors.LocalEntryNotFoundError("offline"),
            "draft.checkpoint org/toy is no folder (BASE/org/toy), org/toy at revision v2 is not "
            "complete in the local cache, and the hub is out of reach or switched off "
            "(HF_HUB_OFFLINE); connect, or fetch it elsewhere with `hf download org/toy`",
        ),
        (
            OSError(28, "No space left on device"),
            "draft: org/toy at revision v2 cannot be fetched from the hub: "
            "[Errno 28] No space left on device",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_faults_of_the_hub(tmp_path: Path, hub: Hub, cause: Exception, message: str) -> None:
    hub.failure = cause
    assert refusal("org/toy", tmp_path, "v2") == message


def test_offline_mode_reads_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--org--toy"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: True, raising=False)
    source = resolve("org/toy", revision=None, base=tmp_path, role="draft")
    assert source == Source(path=snapshot, revision=COMMIT, name="org/toy")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        resolve("org/absent", revision=None, base=tmp_path, role="draft")


FETCH = """
import hashlib, json, os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": bytes(3_000_000)}

class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        path = self.path.partition("?")[0]
        if path == "/api/models/org/toy/revision/main":
            siblings = [{"rfilename": name} for name in FILES]
            data = json.dumps({"id": "org/toy", "sha": COMMIT, "siblings": siblings}).encode()
        elif path == f"/api/models/org/toy/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": name}
                for name, data in FILES.items()
            ]
            data = json.dumps(entries).encode()
        elif path.startswith("/org/toy/resolve/"):
            data = FILES[path.rpartition("/")[2]]
        else:
            self.send_error(404)
            return b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", hashlib.sha256(data).hexdigest())
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        return data

    def do_GET(self):
        self.wfile.write(self.do_HEAD())

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"

from specpipe import progress
from specpipe.checkpoints.source import resolve
from tests.recorder import Recorder

recorder = Recorder()
with progress.shown(recorder):
    for _ in range(2):
        resolve("org/toy", revision=None, base=Path.cwd(), role="draft")
print([(count.phase, count.unit, count.total, count.done) for count in recorder.counts])
"""


def test_a_download_counts_its_bytes_and_the_hub_draws_nothing(tmp_path: Path) -> None:
    """The hub's library itself, which asks a server here; the second time all is there."""
    done = subprocess.run(
        [sys.executable, "-c", FETCH],
        cwd=tmp_path,
        env={
            **os.environ,
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "0",
            "PYTHONPATH": str(ROOT),
            "TQDM_POSITION": "-1",  # which makes its own bars be drawn without a terminal
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    phase = ("draft: fetching org/toy", "bytes")
    assert (done.stdout, done.stderr) == (
        f"{[(*phase, 3_000_002, 3_000_002), (*phase, None, 0)]}\n",
        "",
    )
