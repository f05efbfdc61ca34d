"""`specpipe build` under faults: killed, interrupted, out of disk, read-only, damaged, in parallel.

After each of them what is visible is whole, and the next build ends in the bytes of an undisturbed
one. Most builds run as forks (forked_build.py); those that need a process of their own are marked
by `start_build`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specpipe.build.load import load_config
from specpipe.build.repositories import built_repository
from specpipe.errors import RepositoryError
from specpipe.triton.repository import lint
from tests.forked_build import Ended, Fault, Forks
from tests.toy import write_toy_checkpoint
from tests.toy_tokenizers import words, write_tokenizer
from tests.waiting import PATIENCE_S

pytest.importorskip("torch")

ARTIFACTS = {
    "check": "check",
    "draft/convert": "draft/checkpoint",
    "target/convert": "target/checkpoint",
    "draft/build_engine": "draft/engine",
    "target/build_engine": "target/engine",
    "package": "model_repo",
}
PLANNED = f"to build: {', '.join(ARTIFACTS)} (6 of 6)\n"
LOCKS = {
    ".check.lock",
    ".model_repo.lock",
    "draft/.checkpoint.lock",
    "draft/.engine.lock",
    "target/.checkpoint.lock",
    "target/.engine.lock",
}
NOBODY = 65534

Contents = dict[str, bytes]


@dataclass(frozen=True)
class Pair:
    """A toy pair, a second one to rebuild from, and the command that builds either."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def built(self) -> Path:
        return self.out / "toy"

    def command(self, *, second: bool = False) -> tuple[str, ...]:
        sides = ("draft", "target") if second else ()
        overrides = [f"--set={side}.checkpoint=second/{side}" for side in sides]
        return ("build", "--config", str(self.folder / "toy.yaml"), *overrides)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    # Not tmp_path, which no other user can enter.
    with tempfile.TemporaryDirectory(prefix="specpipe-test-") as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        for number, (checkpoint, num_rows) in enumerate(
            {"draft": 256, "target": 256, "second/draft": 260, "second/target": 264}.items()
        ):
            write_toy_checkpoint(folder / checkpoint, seed=number, vocab_size=num_rows)
            roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
            write_tokenizer(folder / checkpoint, words(), **roles)
        (folder / "toy.yaml").write_text(
            "name: toy\n"
            "draft: {checkpoint: draft}\n"
            "target: {checkpoint: target}\n"
            "engine: {device: cpu}\n"
            "output_dir: out\n"
        )
        yield Pair(folder)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as process:
        yield process


@pytest.fixture(autouse=True)
def no_output(pair: Pair) -> Iterator[None]:
    yield
    if pair.out.is_file():
        pair.out.unlink()
    shutil.rmtree(pair.out, ignore_errors=True)


@dataclass(frozen=True)
class Undisturbed:
    """What undisturbed builds make of both pairs; `saved` is the first one's folder."""

    saved: Path
    first: Contents
    second: Contents

    def restore(self, pair: Pair) -> None:
        """Puts the first pair's build in its place; links will do, no build writes into a file."""
        shutil.rmtree(pair.out, ignore_errors=True)
        shutil.copytree(self.saved, pair.out, copy_function=os.link)


@pytest.fixture(scope="module")
def undisturbed(pair: Pair, forks: Forks) -> Undisturbed:
    contents = []
    for second in (False, True):
        assert forks.run(*pair.command(second=second)).code == 0
        contents.append(made(pair))
        if not second:
            saved = shutil.copytree(pair.out, pair.folder / "saved", copy_function=os.link)
    shutil.rmtree(pair.out)
    first, second_ = contents
    for artifact in ARTIFACTS.values():  # or a mixture of both would pass as either
        assert below(first, artifact) != below(second_, artifact)
    return Undisturbed(saved, first, second_)


def made(pair: Pair) -> Contents:
    """Returns every visible file of a build, without the manifests, which have times in them."""
    return {
        path.relative_to(pair.built).as_posix(): path.read_bytes()
        for path in pair.built.rglob("*")
        if path.is_file() and not path.name.endswith((".manifest.json", ".lock", ".partial"))
    }


def below(contents: Contents, folder: str) -> Contents:
    return {name: data for name, data in contents.items() if name.startswith(f"{folder}/")}


def hidden(pair: Pair) -> set[str]:
    return {path.relative_to(pair.built).as_posix() for path in pair.built.rglob(".*")}


def assert_nothing_half_made(pair: Pair, *whole: Contents) -> None:
    """Each visible artifact is as some undisturbed build makes it, and as its manifest says.

    Where a build was stopped between the two, that is the manifest that it had ready.
    """
    contents = made(pair) if pair.built.exists() else {}
    for artifact in ARTIFACTS.values():
        folder = pair.built / artifact
        if folder.exists():
            assert below(contents, artifact) in [below(one, artifact) for one in whole], artifact
        manifests = [
            folder.with_name(name).read_text()
            for name in (f"{folder.name}.manifest.json", f".{folder.name}.pending")
            if folder.with_name(name).exists()
        ]
        recorded = [
            {
                f"{artifact}/{name}": record["sha256"]
                for name, record in json.loads(manifest)["outputs"].items()
            }
            for manifest in manifests
        ]
        found = {
            name: hashlib.sha256(data).hexdigest()
            for name, data in below(contents, artifact).items()
        }
        assert not found or found in recorded or not recorded


def assert_finished(pair: Pair, ended: Ended, whole: Contents) -> None:
    """The build went well, made what an undisturbed one makes, and left nothing else."""
    assert ended.code == 0, ended.log
    assert made(pair) == whole
    assert hidden(pair) == LOCKS


def remove_from(pair: Pair, stage: str) -> None:
    """Removes the artifacts of a stage and of all that come after it."""
    stages = list(ARTIFACTS)
    for later in stages[stages.index(stage) :]:
        shutil.rmtree(pair.built / ARTIFACTS[later])
        (pair.built / f"{ARTIFACTS[later]}.manifest.json").unlink()


every_change = pytest.param(1, marks=pytest.mark.slow, id="at every change")


@pytest.mark.parametrize("step", [pytest.param(12, id="at every twelfth change"), every_change])
@pytest.mark.parametrize("second", [False, True], ids=["from nothing", "over another build"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_build_that_is_stopped_is_finished_by_the_next(
    pair: Pair,
    forks: Forks,
    undisturbed: Undisturbed,
    signum: signal.Signals,
    second: bool,
    step: int,
) -> None:
    command = pair.command(second=second)
    first, wanted = undisturbed.first, undisturbed.second if second else undisturbed.first
    stopped_in = set()
    for at in range(1, 1000, step):
        shutil.rmtree(pair.out, ignore_errors=True)
        if second:
            undisturbed.restore(pair)
        stopped = forks.run(*command, fault=Fault(signum=signum, at=at))
        assert_nothing_half_made(pair, first, wanted)
        if stopped.code == 0:
            break
        stopped_in.add(stopped.stage)
        if signum == signal.SIGINT:
            assert stopped.code == 130
            assert stopped.log.endswith("Interrupted.\n")
            assert "Traceback" not in stopped.log
        else:
            assert stopped.code == -signum
        assert_finished(pair, forks.run(*command), wanted)
    assert at > 80
    assert stopped_in >= set(ARTIFACTS)


@pytest.mark.parametrize("only_renames", [False, True], ids=["exchanged", "renamed"])
def test_repository_that_is_replaced_is_served_whatever_the_moment_of_a_kill(
    pair: Pair, forks: Forks, undisturbed: Undisturbed, only_renames: bool
) -> None:
    """One of both versions stands in its place; between two renames, a sentence says why not."""
    command = (*pair.command(), "--set=serving.max_queue_size=5")
    config = load_config(pair.folder / "toy.yaml")
    undisturbed.restore(pair)
    num_removed = sum(1 for _ in (pair.built / "model_repo").rglob("*"))
    num_changes = forks.run(*command, fault=Fault(only_renames=only_renames)).num_changes
    assert num_changes is not None
    versions = [below(undisturbed.first, "model_repo"), below(made(pair), "model_repo")]
    replacing = num_changes - num_removed
    found = []
    for at in range(replacing - 20, replacing - 8):
        undisturbed.restore(pair)
        killed = Fault(signum=signal.SIGKILL, at=at, only_renames=only_renames)
        assert forks.run(*command, fault=killed).code == -signal.SIGKILL
        try:
            built_repository(config)
        except RepositoryError as exc:
            found.append(None)
            assert str(exc) == (
                f"{pair.built}/model_repo is missing, since a build was killed while it replaced "
                f"it: run `specpipe build --config {config.source}` first"
            )
            killed = Fault(signum=signal.SIGKILL, at=replacing - 20)  # has put it back by then
            assert forks.run(*command, fault=killed).code == -signal.SIGKILL
        else:
            found.append(versions.index(below(made(pair), "model_repo")))
        lint.check(built_repository(config))
    gap = [None] if only_renames else []
    assert found == [0] * found.count(0) + gap + [1] * found.count(1)
    assert {0, 1} <= set(found)


def test_build_of_what_is_there_changes_nothing_on_the_disk(
    pair: Pair, forks: Forks, undisturbed: Undisturbed
) -> None:
    undisturbed.restore(pair)
    forks.run(*pair.command())  # notes the times and inodes of the copy
    assert forks.run(*pair.command()).num_changes == 0


@pytest.fixture
def mount() -> Iterator[Callable[..., None]]:
    """Mounts, and unmounts at the end; skips the test where that is not allowed."""
    mounted = []

    def call(target: Path, *options: str) -> None:
        done = subprocess.run(["mount", *options, str(target)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
        if "remount" not in " ".join(options):
            mounted.append(target)

    if shutil.which("mount") is None:
        pytest.skip("there is no `mount` here")
    yield call
    for target in reversed(mounted):
        subprocess.run(["umount", "--lazy", str(target)], check=True)


@pytest.mark.parametrize("step", [12, pytest.param(4, marks=pytest.mark.slow)])
def test_full_disk_in_every_stage(
    pair: Pair, forks: Forks, undisturbed: Undisturbed, mount: Callable[..., None], step: int
) -> None:
    """The disk gets `step` pages larger each time, until the build fits."""
    pair.out.mkdir()
    mount(pair.out, "-t", "tmpfs", "-o", "size=64m", "tmpfs")
    page = os.sysconf("SC_PAGE_SIZE")
    failed_in = set()
    for num_pages in range(1, 1000, step):
        shutil.rmtree(pair.built, ignore_errors=True)
        mount(pair.out, "-o", f"remount,size={num_pages * page}")
        full = forks.run(*pair.command())
        if full.code == 0:
            break
        assert full.code == 1
        assert re.search(
            r"^Error: .*(No space left on device| free, and .* are needed for .*: make room)\n\Z",
            full.log,
            re.MULTILINE,
        ), full.log
        failed_in.add(full.stage)
        assert_nothing_half_made(pair, undisturbed.first)
        mount(pair.out, "-o", "remount,size=64m")
        assert_finished(pair, forks.run(*pair.command()), undisturbed.first)
    assert failed_in >= set(ARTIFACTS)


@pytest.mark.parametrize(
    ("stage", "max_file_bytes"),
    [
        ("check", 100),
        ("draft/convert", 50_000),
        ("target/convert", 50_000),
        ("draft/build_engine", 100_000),
        ("target/build_engine", 100_000),
        ("package", 8_000),
    ],
)
def test_file_that_cannot_grow_in_any_stage(
    pair: Pair, forks: Forks, undisturbed: Undisturbed, stage: str, max_file_bytes: int
) -> None:
    undisturbed.restore(pair)
    remove_from(pair, stage)
    failed = forks.run(*pair.command(), fault=Fault(max_file_bytes=max_file_bytes))
    assert failed.code == 1
    artifact = pair.built / ARTIFACTS[stage]
    last = failed.log.splitlines()[-1]
    assert last.startswith(f"Error: {stage}: {artifact.parent}/"), failed.log
    assert last.endswith(": File too large")
    assert "Traceback" not in failed.log
    assert not artifact.exists()
    assert_nothing_half_made(pair, undisturbed.first)
    assert_finished(pair, forks.run(*pair.command()), undisturbed.first)


def test_read_only_output_folder(
    pair: Pair, forks: Forks, undisturbed: Undisturbed, mount: Callable[..., None]
) -> None:
    pair.out.mkdir()
    mount(pair.out, "--bind", str(pair.out))
    mount(pair.out, "-o", "remount,bind,ro")
    failed = forks.run(*pair.command())
    assert failed.code == 1
    assert failed.log == f"{PLANNED}Error: check: {pair.built}: Read-only file system\n"


def test_read_only_folder_of_a_finished_build_is_enough(
    pair: Pair, forks: Forks, undisturbed: Undisturbed, mount: Callable[..., None]
) -> None:
    undisturbed.restore(pair)
    mount(pair.out, "--bind", str(pair.out))
    mount(pair.out, "-o", "remount,bind,ro")
    os.utime(pair.folder / "draft" / "config.json")  # would be recorded, were it allowed
    done = forks.run(*pair.command())
    assert (done.code, done.log.count("up to date")) == (0, 6), done.log
    changed = forks.run(*pair.command(second=True))
    assert changed.code == 1
    assert (
        changed.log == f"{PLANNED}Error: check: {pair.built}/.check.lock: Read-only file system\n"
    )


def test_output_folder_of_another_user(pair: Pair, forks: Forks) -> None:
    pair.out.mkdir()
    is_root = os.getuid() == 0
    pair.out.chmod(0o755 if is_root else 0o555)
    failed = forks.run(*pair.command(), fault=Fault(uid=NOBODY if is_root else None))
    assert failed.code == 1
    assert failed.log == f"{PLANNED}Error: check: {pair.built}: Permission denied\n"


def test_output_folder_that_no_one_may_enter(pair: Pair, forks: Forks) -> None:
    is_root = os.getuid() == 0
    pair.built.mkdir(parents=True)
    pair.out.chmod(0o000 if not is_root else 0o700)
    try:
        failed = forks.run(*pair.command(), fault=Fault(uid=NOBODY if is_root else None))
    finally:
        pair.out.chmod(0o755)
    assert failed.code == 1
    assert failed.log == f"{PLANNED}Error: check: {pair.built}: Permission denied\n"


@pytest.mark.parametrize("folder", ["out", "out/toy", "out/toy/draft"])
def test_file_where_a_folder_should_be(
    pair: Pair, forks: Forks, undisturbed: Undisturbed, folder: str
) -> None:
    path = pair.folder / folder
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("not a folder")
    failed = forks.run(*pair.command())
    assert failed.code == 1
    assert failed.log.splitlines()[-1].startswith("Error: ")
    assert str(path) in failed.log.splitlines()[-1]
    assert "Traceback" not in failed.log
    path.unlink()
    assert_finished(pair, forks.run(*pair.command()), undisturbed.first)


def flip_byte(path: Path, *, keep_time: bool) -> None:
    """Changes one byte; the file keeps its size, and its time if asked to."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2)
        byte = file.read(1)[0]
        file.seek(status.st_size // 2)
        file.write(bytes([byte ^ 1]))
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


DAMAGED = {
    "check": "check/pair.json",
    "draft/convert": "draft/checkpoint/rank0.safetensors",
    "target/convert": "target/checkpoint/config.json",
    "draft/build_engine": "draft/engine/model.safetensors",
    "target/build_engine": "target/engine/config.json",
    "package": "model_repo/speculative/config.pbtxt",
}


@pytest.mark.parametrize("keep_time", [False, True])
@pytest.mark.parametrize("stage", ARTIFACTS)
def test_damaged_artifact_is_found_and_made_again(
    pair: Pair, forks: Forks, undisturbed: Undisturbed, stage: str, keep_time: bool
) -> None:
    forks.run(*pair.command())
    file = DAMAGED[stage]
    flip_byte(pair.built / file, keep_time=keep_time)
    assert made(pair) != undisturbed.first
    mended = forks.run(*pair.command())
    name = file.removeprefix(f"{ARTIFACTS[stage]}/")
    assert f"{stage}: damaged: file {name} is not what was built\n" in mended.log
    assert_finished(pair, mended, undisturbed.first)


def start_build(pair: Pair) -> subprocess.Popen[str]:
    """Starts the command as a user does, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", "from specpipe.cli.group import main; main()", *pair.command()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], path: Path) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.0005)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_process_that_is_stopped_in_each_stage(
    pair: Pair, forks: Forks, undisturbed: Undisturbed, signum: signal.Signals
) -> None:
    """Six builds one after the other, each stopped in the stage after the last one's."""
    for stage, artifact in ARTIFACTS.items():
        folder = pair.built / artifact
        while True:
            build = start_build(pair)
            wait_for(build, folder.with_name(f".{folder.name}.staging"))
            build.send_signal(signum)
            _, log = build.communicate(timeout=PATIENCE_S)
            if not folder.exists():
                break
            shutil.rmtree(folder)  # the signal came after the stage: again
        assert build.returncode == (130 if signum == signal.SIGINT else -signum), log
        assert Ended(build.returncode, log, None).stage == stage
        assert log.splitlines()[-1] == (
            "Interrupted." if signum == signal.SIGINT else f"{stage}: starts"
        )
        assert_nothing_half_made(pair, undisturbed.first)
    assert_finished(pair, forks.run(*pair.command()), undisturbed.first)


def test_second_build_waits_for_the_first_and_finds_the_work_done(
    pair: Pair, undisturbed: Undisturbed
) -> None:
    first = start_build(pair)
    wait_for(first, pair.built / "draft" / ".engine.staging")
    first.send_signal(signal.SIGSTOP)
    second = start_build(pair)
    assert second.stderr is not None
    seen = []
    while not (seen and seen[-1].endswith("waiting\n")):
        seen.append(second.stderr.readline())
        assert seen[-1], seen
    assert seen == [
        "to build: draft/build_engine, target/build_engine, package (3 of 6)\n",
        "check: up to date\n",
        "draft/convert: up to date\n",
        "target/convert: up to date\n",
        "draft/build_engine: another build of it is running, waiting\n",
    ]
    first.send_signal(signal.SIGCONT)
    logs = [process.communicate(timeout=120)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], logs
    assert logs[1].splitlines()[0] == "draft/build_engine: up to date"
    for stage in list(ARTIFACTS)[4:]:  # whoever came first made it
        assert "".join(logs).count(f"{stage}: built\n") == 1
    assert made(pair) == undisturbed.first
    assert hidden(pair) == LOCKS


def test_many_builds_at_once_make_each_artifact_once(pair: Pair, undisturbed: Undisturbed) -> None:
    builds = [start_build(pair) for _ in range(4)]
    logs = [build.communicate(timeout=300)[1] for build in builds]
    assert [build.returncode for build in builds] == [0] * 4, logs
    assert {stage: "".join(logs).count(f"{stage}: built\n") for stage in ARTIFACTS} == (
        dict.fromkeys(ARTIFACTS, 1)
    )
    assert made(pair) == undisturbed.first
    assert hidden(pair) == LOCKS
