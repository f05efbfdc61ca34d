"""What `specpipe serve` asks of signatures before it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specpipe.build.load import load_config
from specpipe.cli.group import main
from specpipe.config.sections import PipelineConfig
from specpipe.errors import SignatureError
from specpipe.release.trust.serving import check_signature
from specpipe.release.trust.verification import Verified, sign
from specpipe.triton.server import launcher
from tests.release.trust.versions import PAIR, PASSPHRASE, new_key, trusting, write_version

YAML = f"""\
name: {PAIR}
draft: {{checkpoint: draft}}
target: {{checkpoint: target}}
"""


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_key(tmp_path_factory.mktemp("keys") / "ci.pem")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(YAML)
    trusting(Path("trust.json"), ci=key)


def config(*, trust: bool = True, require: bool = False) -> PipelineConfig:
    sets = ["release.trust=trust.json"] * trust + ["release.require_signature=true"] * require
    return load_config(Path("x.yaml"), sets)


def version(pair: PipelineConfig, number: int = 7, *, says: int | None = None) -> Path:
    """Writes an unsigned version; returns its folder."""
    return write_version(pair.artifacts.versions / str(number), says or number)


def checked(
    pair: PipelineConfig, folder: Path, **options: Any
) -> tuple[Verified | None, list[str]]:
    lines: list[str] = []
    return check_signature(pair, folder / "model_repo", log=lines.append, **options), lines


def refusal(pair: PipelineConfig, folder: Path, **options: Any) -> str:
    with pytest.raises(SignatureError) as caught:
        checked(pair, folder, **options)
    return str(caught.value).replace(str(folder), "FOLDER")


def test_a_signed_version_is_verified_wherever_somebody_is_trusted(key: Path) -> None:
    for require in (False, True):
        pair = config(require=require)
        folder = version(pair, 7 + require)
        sign(folder, key, PASSPHRASE)
        verified, lines = checked(pair, folder)
        assert verified is not None and verified.number == 7 + require
        assert lines == [f"{folder}: {verified}"]


def test_a_bad_signature_is_refused_whatever_is_allowed(key: Path) -> None:
    pair = config()
    folder = version(pair)
    sign(folder, key, PASSPHRASE)
    (folder / "model_repo" / "speculative" / "config.pbtxt").write_text("")
    assert refusal(pair, folder, allow_unsigned=True).startswith(
        "FOLDER is not what ci signed: model_repo/speculative/config.pbtxt was changed: "
    )
    (folder / "model.sig").unlink()
    (folder / "model.sig").symlink_to("nowhere")
    assert "model.sig is no signature" in refusal(pair, folder, allow_unsigned=True)


def test_a_version_in_another_ones_folder_is_refused(key: Path) -> None:
    pair = config()
    folder = version(pair, 9, says=7)
    sign(folder, key, PASSPHRASE)
    assert "is version 7 of python-code, as its publisher signed, and not number 9" in refusal(
        pair, folder
    )


ADVICE = (
    "and release.require_signature is true in x.yaml: `specpipe publish` with a key and promote "
    "that, or serve it as it is with --allow-unsigned"
)


def test_the_unsigned_is_served_unless_signatures_are_required() -> None:
    folder = version(config())
    for lenient in (config(trust=False), config()):
        assert checked(lenient, folder) == (None, [])
    strict = config(require=True)
    assert refusal(strict, folder) == f"FOLDER is not signed, {ADVICE}"
    built = strict.artifacts.folder
    assert refusal(strict, built) == f"FOLDER/model_repo was built here, unsigned, {ADVICE}"
    assert checked(strict, folder, allow_unsigned=True) == (
        None,
        [f"warning: {folder}/model_repo is not signed; allowed by --allow-unsigned"],
    )


def test_a_signature_beside_what_was_built_here_counts_for_nothing(key: Path) -> None:
    strict = config(require=True)
    built = write_version(strict.artifacts.folder)
    sign(built, key, PASSPHRASE)
    assert "was built here, unsigned" in refusal(strict, built)


def test_serve_refuses_before_it_starts_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Path] = []
    monkeypatch.setattr(launcher, "serve", lambda folder, *_, **__: served.append(folder))
    repository = config().artifacts.repository
    repository.mkdir(parents=True)
    serve = ["serve", "--config", "x.yaml", "--allow-damaged", "--set", "release.trust=trust.json"]
    strict = [*serve, "--set", "release.require_signature=true"]
    result = CliRunner().invoke(main, strict)
    assert result.exit_code == 1
    assert result.stderr.endswith(f"Error: {repository} was built here, unsigned, {ADVICE}\n")
    assert served == []
    assert CliRunner().invoke(main, [*strict, "--allow-unsigned"]).exit_code == 0
    assert served == [repository]
