"""From a night to production and back, as a user types it: real Triton, S3 server and keys.

A good night is signed, published and served; a worse draft is stopped by the night's gate; another
target passes every gate that there is, is promoted under requests, and rolled back.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("model_signing")
pytest.importorskip("moto")
pytest.importorskip("s3fs")

import torch  # noqa: E402
from click.testing import CliRunner, Result  # noqa: E402
from s3fs import S3FileSystem  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from specpipe.cli.group import main  # noqa: E402
from specpipe.release.release_file import digest_of  # noqa: E402
from specpipe.stores.places import open_store  # noqa: E402
from specpipe.stores.records import write_version  # noqa: E402
from specpipe.triton.client import Client  # noqa: E402
from tests.stores.servers import S3Place  # noqa: E402

MODELS = Path(__file__).parents[2] / "models" / "python-code"
YAML = """
name: python-code
draft: {checkpoint: draft}
target: {checkpoint: target}
engine: {max_batch_size: 8, max_seq_len: 256}
# A test must not fail for a machine that is busy: no thresholds on speed.
nightly: {num_prompts: 2, max_tokens: 8, concurrencies: [2], rounds: 1, min_speed_up: null,
          min_speed_up_ratio: null}
release: {store: STORE, trust: trust.json, require_signature: true}
"""
PROMPTS = ["def add(a, b):\n", "import os\n", "class Point:\n", "for i in range(10):\n"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Place]:
    """An S3 server of this machine."""
    place = S3Place(tmp_path_factory.mktemp("s3"))
    with pytest.MonkeyPatch.context() as patch:
        place.prepare(patch)
        patch.setenv("SPECPIPE_SIGNING_PASSPHRASE", "not for production")
        place.start()
        yield place
        place.kill()


@pytest.fixture
def pair(
    place: S3Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """The folder of a pair, which is the working directory, with a publisher who is trusted."""
    folder = tmp_path / "pair"
    shutil.copytree(MODELS, folder)
    (folder / "pair.yaml").write_text(YAML.replace("STORE", place.url(request.node.name)))
    monkeypatch.chdir(folder)
    typed("keys new ci.pem", config="")
    typed("keys trust ci.pem.pub --name ci --trust trust.json", config="")
    return folder


def run(words: str, *, config: str = " --config pair.yaml") -> Result:
    return CliRunner().invoke(main, (words + config).split())


def typed(words: str, *, config: str = " --config pair.yaml") -> str:
    """What a command prints, which must succeed."""
    result = run(words, config=config)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(words: str, *, config: str = " --config pair.yaml") -> str:
    result = run(words, config=config)
    assert result.exit_code == 1, result.output
    return result.stderr.splitlines()[-1].removeprefix("Error: ")


def change(path: Path, amount: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes the weights of a checkpoint."""
    weights = {name: amount(tensor) for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def noise(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(tensor.shape, generator=generator) * tensor.std()
        return ((1 - share) * tensor + share * drawn).to(tensor.dtype)

    return changed


@contextmanager
def serving(words: str) -> Iterator[str]:
    """A `specpipe serve` in a process of its own; yields its address."""
    words += " --verbose --http-port 0 --grpc-port 0 --metrics-port 0 --config pair.yaml"
    command = [sys.executable, "-m", "specpipe", "serve", *words.split()]
    with (
        Path("serve.log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        assert ready[:1] == ["ready:"], Path("serve.log").read_text()
        try:
            yield next(word for word in ready if word.startswith("grpc"))
        finally:
            process.send_signal(signal.SIGTERM)


def answers(url: str, **settings: Any) -> list[str]:
    with Client(url) as client:
        return [client.generate(prompt, max_tokens=24, **settings).text for prompt in PROMPTS]


def test_from_a_night_to_production_and_back(
    pair: Path, place: S3Place, request: pytest.FixtureRequest
) -> None:
    store_url = place.url(request.node.name)
    night = "nightly pair.yaml --in-process"
    refusal = refused("serve --promoted")
    assert refusal.startswith("no version of python-code is promoted: ")
    typed(night, config="")
    assert "would be version 1 of python-code" in typed("publish --key ci.pem --dry-run")
    assert "version 1 of python-code" in typed("publish --key ci.pem")
    assert "`specpipe serve --promoted` begins with it" in typed("promote 1")

    with serving("--promoted") as url:
        first = answers(url)

        # A worse draft does not pass the night, and so is not published.
        good_draft = (pair / "draft" / "model.safetensors").read_bytes()
        change(pair / "draft" / "model.safetensors", noise(1.0))
        assert "acceptance rate" in run(night, config="").stderr
        assert "is bad (acceptance rate" in refused("publish --key ci.pem --allow-unproved")
        (pair / "draft" / "model.safetensors").write_bytes(good_draft)

        # Another target is as lossless as the first one: only people see that it is the wrong one.
        change(pair / "target" / "model.safetensors", noise(0.2))
        typed(f"{night} --new-baseline", config="")
        typed("publish --key ci.pem")
        promoted = json.loads(typed("promote latest --json"))
        assert (promoted["number"], promoted["previous"], promoted["is_served"]) == (2, 1, True)
        assert promoted["change"]["gap_s"] == 0.0
        second = answers(url)
        assert second != first
        marks = [line.split()[-2:] for line in typed("versions").splitlines()[1:3]]
        assert marks == [["served,", "here"], ["loaded,", "here"]]

        back = json.loads(typed("rollback --json"))
        assert (back["number"], back["was_loaded"], back["is_served"]) == (1, True, True)
        assert back["duration_s"] < 20
        assert answers(url) == first
        assert "promoted, served, here" in typed("versions").splitlines()[2]
    store = open_store(store_url, pair)
    promotion = store.promotion("python-code")
    assert promotion is not None and (promotion.number, promotion.previous) == (1, None)

    # What nobody signed is not promoted.
    with Path("pair.yaml").open("a") as file:
        file.write("# The same, but for this line.\n")
    typed("publish")
    assert refused("promote 3") == (
        f"{store_url}: version 3 of python-code is not signed, and release.require_signature is "
        "true in pair.yaml: publish it with a key"
    )


def test_what_was_changed_in_the_store_is_promoted_nowhere(
    pair: Path,
    place: S3Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.name
    typed("build")
    for line in ("# One.\n", "# Two.\n"):
        with Path("pair.yaml").open("a") as file:
            file.write(line)
        typed("publish --key ci.pem --allow-unproved")
    (tmp_path / "there").mkdir()
    for file_name in ("pair.yaml", "trust.json"):
        shutil.copy(file_name, tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    store = open_store(place.url(name), pair)
    first, second = store.versions("python-code")[-2:]

    # Another file in the record, with the digest that goes with it, as who may write there can.
    files = {**first.files, "pair.yaml": second.files["pair.yaml"]}
    forged = replace(first, files=files, digest=digest_of(files))
    path = f"bucket/{name}/pairs/python-code/versions/{first.number:06d}.json"
    S3FileSystem(skip_instance_cache=True).pipe_file(path, write_version(forged))
    assert refused(f"promote {first.number}").startswith(
        f"version {first.number} is not what ci signed: pair.yaml was changed: "
    )
    place.damage(name, second.files["model_repo/speculative/1/target/model.safetensors"])
    assert "is damaged there" in refused(f"promote {second.number}")
    assert [path.name for path in Path("engines/python-code").iterdir()] == ["versions"]


@pytest.mark.slow
def test_32_streams_during_promotes_and_rollbacks_lose_and_mix_nothing(pair: Path) -> None:
    """Every answer is the target's own of one version; the two versions have different targets."""
    for amount in (None, noise(0.2)):
        if amount is not None:
            change(pair / "target" / "model.safetensors", amount)
        typed("build")
        typed("publish --key ci.pem --allow-unproved")
    with serving("--version 1") as url:
        alone = [answers(url, num_draft_tokens=0)]
        typed("promote 1")
        typed("promote 2")
        alone.append(answers(url, num_draft_tokens=0))
        wholes = [set(texts) for texts in zip(*alone, strict=True)]
        assert all(len(texts) == 2 for texts in wholes)

        is_over = threading.Event()
        found: list[list[tuple[int, str]]] = [[] for _ in range(32)]

        def stream(number: int) -> None:
            with Client(url) as client:
                while not is_over.is_set():
                    for prompt, text in enumerate(PROMPTS):
                        chunks = client.stream(text, max_tokens=24)
                        answer = "".join(chunk.text for chunk in chunks)
                        found[number].append((prompt, answer))

        with ThreadPoolExecutor(len(found)) as pool:
            streams = [pool.submit(stream, number) for number in range(len(found))]
            try:
                for words in (
                    "rollback", "promote 2", "rollback", "promote 2",
                    "promote 1 --older", "promote 2", "promote 1 --older",
                ):  # fmt: skip
                    typed(words)
            finally:
                is_over.set()
            for done in streams:
                done.result()  # raises what failed
    every = [answer for of_one in found for answer in of_one]
    assert all(text in wholes[prompt] for prompt, text in every)
    assert {text for _, text in every} == set().union(*wholes)
    print(f"{len(every)} answers over 5 promotes and 2 rollbacks, 0 failed, each of one version")
