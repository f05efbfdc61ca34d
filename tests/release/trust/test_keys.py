"""`specpipe keys`, `sign` and `verify-signature`: as they are typed, and what they refuse."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from specpipe.cli.group import main
from tests.release.trust.versions import PAIR, PASSPHRASE, new_key, write_version

TODAY = f"{datetime.now(timezone.utc):%Y-%m-%d}"
PAIR_YAML = f"""\
name: {PAIR}
draft: {{checkpoint: draft}}
target: {{checkpoint: target}}
release: {{trust: trust.json}}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key pair, ci.pem and ci.pem.pub, that tests copy."""
    return new_key(tmp_path_factory.mktemp("made") / "ci.pem")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECPIPE_SIGNING_PASSPHRASE", PASSPHRASE)
    monkeypatch.delenv("SPECPIPE_SIGNING_KEY", raising=False)
    shutil.copytree(made.parent, tmp_path, dirs_exist_ok=True)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip("\n")


def trust(*options: str, key: str = "ci.pem.pub", name: str = "ci") -> Result:
    return run("keys", "trust", key, "--name", name, "--trust", "trust.json", *options)


def digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_from_a_new_key_to_a_verified_version(monkeypatch: pytest.MonkeyPatch) -> None:
    new = run("keys", "new", "release.pem")
    key = digest("release.pem.pub")
    assert (new.exit_code, new.stdout) == (0, f"release.pem, release.pem.pub: key {key}\n")
    assert stat.S_IMODE(Path("release.pem").stat().st_mode) == 0o600
    assert Path("release.pem").read_text().startswith("-----BEGIN ENCRYPTED PRIVATE KEY-----")
    trusted = trust("--pairs", "python-*", "--expires", "2027-12-01", key="release.pem.pub")
    assert trusted.stdout == f"trust.json: ci may sign with key {key}\n"
    write_version(Path("7"))
    signed = run("sign", "7", "--key", "release.pem")
    assert (signed.exit_code, signed.stdout) == (0, "7/model.sig\n")
    told = (
        "7: version 7 of python-code, published 2026-11-29T12:00:00+00:00, 6 files signed by ci "
        f"(key {key[:16]})\n"
    )
    assert run("verify-signature", "7", "--trust", "trust.json").stdout == told
    Path("x.yaml").write_text(PAIR_YAML)
    assert run("verify-signature", "7", "--config", "x.yaml").stdout == told
    data = json.loads(run("verify-signature", "7", "--trust", "trust.json", "--json").stdout)
    assert data.pop("files")["release.json"] == digest("7/release.json")
    assert data == {
        "pair": "python-code",
        "number": 7,
        "published_at": "2026-11-29T12:00:00+00:00",
        "publisher": "ci",
        "key": key,
        "signature": digest("7/model.sig"),
    }
    monkeypatch.setenv("SPECPIPE_SIGNING_KEY", "ci.pem")
    assert run("sign", "7").exit_code == 0
    assert "signed by a key that nobody in" in refused(
        "verify-signature", "7", "--trust", "trust.json"
    )


def test_a_version_of_another_pair_is_refused_by_the_yaml() -> None:
    trust()
    write_version(Path("7"), pair="chat")
    run("sign", "7", "--key", "ci.pem")
    Path("x.yaml").write_text(PAIR_YAML)
    assert refused("verify-signature", "7", "--config", "x.yaml").startswith(
        "7 is version 7 of chat, as its publisher signed, and not pair python-code: "
    )


def test_verify_signature_asks_whose_signature_counts() -> None:
    write_version(Path("7"))
    for options in ((), ("--trust", "trust.json", "--config", "x.yaml")):
        assert run("verify-signature", "7", *options).exit_code == 2
    Path("x.yaml").write_text(PAIR_YAML.replace("release: {trust: trust.json}\n", ""))
    assert refused("verify-signature", "7", "--config", "x.yaml") == (
        "x.yaml trusts nobody: set release.trust to a file of publishers, or give --trust FILE"
    )
    assert refused("verify-signature", "7", "--trust", "trust.json") == (
        "trust.json does not exist: `specpipe keys trust KEY.pub --name PUBLISHER --trust "
        "trust.json` writes it"
    )


def test_a_yaml_that_wants_signatures_trusts_somebody() -> None:
    Path("x.yaml").write_text(PAIR_YAML.replace("trust: trust.json", "require_signature: true"))
    assert refused("verify-signature", "7", "--config", "x.yaml") == (
        "x.yaml:4: release.require_signature is true: expected false, as there is no release.trust"
    )


@pytest.mark.parametrize(
    ("passphrase", "sentence"),
    [
        (
            None,
            "a signing key is kept under a passphrase: set SPECPIPE_SIGNING_PASSPHRASE to one",
        ),
        ("short", "SPECPIPE_SIGNING_PASSPHRASE has 5 characters: expected 12 or more"),
    ],
)
def test_a_key_without_a_good_passphrase_is_not_made(
    monkeypatch: pytest.MonkeyPatch, passphrase: str | None, sentence: str
) -> None:
    monkeypatch.setenv("SPECPIPE_SIGNING_PASSPHRASE", passphrase or "")
    assert refused("keys", "new", "release.pem") == sentence
    assert not Path("release.pem").exists()


def test_a_key_is_never_replaced() -> None:
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    exists = "exists: name another file, keys are not replaced"
    Path("ci.pem.pub").rename("kept")
    assert refused("keys", "new", "ci.pem") == f"ci.pem {exists}"
    Path("kept").rename("ci.pem.pub")
    Path("ci.pem").rename("kept")
    assert refused("keys", "new", "ci.pem") == f"ci.pem.pub {exists}"
    Path("kept").rename("ci.pem")
    assert refused("keys", "new", "nowhere/ci.pem") == (
        "no key can be written: nowhere/ci.pem: No such file or directory"
    )
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def _private(key: Any, passphrase: bytes | None = None) -> bytes:
    encryption = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase)
    data: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    return data


UNREADABLE = (
    "key.pem cannot be read: it is no private key in PEM, or SPECPIPE_SIGNING_PASSPHRASE is not "
    "its passphrase"
)
KINDS = "expected an elliptic key (P-256, P-384 or P-521)"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (lambda: _private(ec.generate_private_key(ec.SECP256R1()), b"another one"), UNREADABLE),
        (lambda: b"no key at all", UNREADABLE),
        (lambda: b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", UNREADABLE),
        (lambda: Path("ci.pem.pub").read_bytes(), UNREADABLE),
        (
            lambda: _private(ec.generate_private_key(ec.SECP256K1())),
            f"key.pem is no key to sign with: {KINDS}",
        ),
        (
            lambda: _private(ed25519.Ed25519PrivateKey.generate()),
            f"key.pem is no key to sign with: {KINDS}",
        ),
        (lambda: b"\0" * 20_000, "key.pem has more than 16384 bytes: expected a key in PEM"),
        (lambda: None, "the signing key key.pem cannot be read: No such file or directory"),
    ],
    ids=["passphrase", "text", "damaged", "public", "curve", "kind", "large", "none"],
)
def test_what_is_no_signing_key_is_refused(data: Callable[[], bytes | None], sentence: str) -> None:
    write_version(Path("7"))
    if (content := data()) is not None:
        Path("key.pem").write_bytes(content)
    assert refused("sign", "7", "--key", "key.pem") == sentence
    assert not Path("7/model.sig").exists()


def test_the_passphrase_comes_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    write_version(Path("7"))
    monkeypatch.delenv("SPECPIPE_SIGNING_PASSPHRASE")
    assert refused("sign", "7", "--key", "ci.pem") == (
        "ci.pem is kept under a passphrase: set SPECPIPE_SIGNING_PASSPHRASE to it"
    )
    Path("plain.pem").write_bytes(_private(ec.generate_private_key(ec.SECP521R1())))
    assert run("sign", "7", "--key", "plain.pem").exit_code == 0
    monkeypatch.setenv("SPECPIPE_SIGNING_PASSPHRASE", PASSPHRASE)
    assert run("sign", "7", "--key", "plain.pem").exit_code == 0
    missing = run("sign", "7")
    assert missing.exit_code == 2
    assert "Missing option '--key' (or SPECPIPE_SIGNING_KEY)." in missing.stderr


def test_what_is_no_public_key_is_not_trusted() -> None:
    key = rsa.generate_private_key(65537, 2048).public_key()
    Path("rsa.pub").write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    for path, sentence in (
        ("rsa.pub", f"rsa.pub is a key of another kind: {KINDS}"),
        (
            "ci.pem",
            "ci.pem is no public key in PEM: expected what `specpipe keys new` writes as PATH.pub",
        ),
        ("none", "the public key none cannot be read: No such file or directory"),
    ):
        assert refused("keys", "trust", path, "--name", "ci", "--trust", "trust.json") == sentence
    assert not Path("trust.json").exists()


def test_a_publisher_has_an_old_and_a_new_key_until_the_old_one_is_revoked() -> None:
    new_key(Path("new.pem"))
    old, new = digest("ci.pem.pub"), digest("new.pem.pub")
    trust("--pairs", "python-*", "--pairs", "chat")
    trust("--expires", "2028-01-01", key="new.pem.pub")
    for number in (7, 8):
        write_version(Path(str(number)), number)
        run("sign", str(number), "--key", "ci.pem")
    by_new = write_version(Path("9"), 9)
    run("sign", str(by_new), "--key", "new.pem")
    shown = run("keys", "list", "--trust", "trust.json")
    assert shown.stdout.splitlines() == [
        f"{old}  ci (python-*, chat), added {TODAY}",
        f"{new}  ci (python-*, chat), added {TODAY}, expires 2028-01-01",
    ]
    revoke = ("keys", "revoke", old[:8], "--reason", "laptop lost", "--trust", "trust.json")
    assert refused(*revoke, "--keep", "9") == (
        f"9 is signed by another key ({new[:16]}), so it stays good anyway: leave it out"
    )
    done = run(*revoke, "--keep", "7")
    assert done.stdout == f"trust.json: key {old} of ci is revoked\n"
    verified = [run("verify-signature", v, "--trust", "trust.json").exit_code for v in "789"]
    assert verified == [0, 1, 0]
    listed = json.loads(run("keys", "list", "--trust", "trust.json", "--json").stdout)["keys"]
    assert listed[0]["revoked"]["still_trusted"] == [digest("7/model.sig")]
    assert run("keys", "list", "--trust", "trust.json").stdout.splitlines()[0] == (
        f"{old}  ci (python-*, chat), added {TODAY}, revoked {TODAY}: laptop lost"
    )
    assert refused(*revoke) == (
        f"trust.json: key {old[:16]} of ci was revoked at {TODAY} already: laptop lost"
    )
    assert refused("keys", "trust", "ci.pem.pub", "--name", "new", "--trust", "trust.json") == (
        "trust.json has this key already, as one of ci, revoked"
    )
    for start, count in (("", 2), (old[:7], 1), ("0" * 64, 0)):
        assert refused("keys", "revoke", start, "--reason", "x", "--trust", "trust.json") == (
            f"trust.json has {count} keys whose fingerprint begins with {start}: give 8 or more "
            "digits of one that `specpipe keys list --trust trust.json` shows"
        )


def _changed(change: Callable[[Any], None]) -> Callable[[], bytes]:
    def text() -> bytes:
        trust()
        data = json.loads(Path("trust.json").read_text())
        change(data["publishers"])
        return json.dumps(data).encode()

    return text


NO_FILE = "trust.json is no file of trusted publishers ({}): see docs/trust.md"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (lambda: b"", NO_FILE.format("Expecting value: line 1 column 1 (char 0)")),
        (lambda: b"[" * 100_000, NO_FILE.format("it is nested too deeply")),
        (lambda: b"\xff", NO_FILE.format("byte 0 is not UTF-8")),
        (lambda: b"[]", NO_FILE.format("it holds no JSON object")),
        (lambda: b"{}", NO_FILE.format("publishers: Field required")),
        (
            lambda: b" " * (2 << 20),
            NO_FILE.format("it has 2097152 bytes, expected at most 1048576"),
        ),
        (
            _changed(lambda p: p[0].update(key=p[0].pop("keys"))),
            NO_FILE.format("publishers.0.keys: Field required"),
        ),
        (
            _changed(lambda p: p[0]["keys"][0].update(expires="soon")),
            NO_FILE.format(
                "publishers.0.keys.0.expires: Input should be a valid datetime, input is too short"
            ),
        ),
        (
            _changed(lambda p: p[0]["keys"][0].update(expires="2027-01-01T00:00:00")),
            NO_FILE.format("publishers.0.keys.0.expires: Input should have timezone info"),
        ),
        (
            _changed(lambda p: p[0]["keys"][0].update(pem="a key")),
            "trust.json: key 1 of ci is no public key in PEM: expected what `specpipe keys new` "
            "writes as PATH.pub",
        ),
        (_changed(lambda p: p.append(p[0])), "trust.json has ci 2 times: expected it once"),
        (
            _changed(lambda p: p.append({**p[0], "name": "other"})),
            "trust.json has KEY 2 times: expected it once",
        ),
    ],
    ids=[
        "empty",
        "deep",
        "binary",
        "list",
        "nothing",
        "large",
        "key",
        "date",
        "no zone",
        "pem",
        "name twice",
        "key twice",
    ],
)
def test_what_is_no_trust_file_is_refused(text: Callable[[], bytes], sentence: str) -> None:
    data = text()
    Path("trust.json").write_bytes(data)
    expected = sentence.replace("KEY", digest("ci.pem.pub"))
    assert refused("keys", "list", "--trust", "trust.json") == expected
    assert refused("keys", "trust", "ci.pem.pub", "--name", "n", "--trust", "trust.json") == (
        expected
    )
    assert Path("trust.json").read_bytes() == data


def test_what_no_trust_file_can_hold_is_refused() -> None:
    no_name = refused("keys", "trust", "ci.pem.pub", "--name", "n" * 201, "--trust", "trust.json")
    assert no_name == (
        "no trust file can hold that: name: String should have at most 200 characters"
    )
    trust()
    key = digest("ci.pem.pub")
    assert refused("keys", "revoke", key, "--reason", "", "--trust", "trust.json") == (
        "no trust file can hold that: reason: String should have at least 1 character"
    )


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from specpipe.runtimes import runtime

    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    assert refused("keys", "new", "release.pem").startswith("a signature needs 'cryptography': ")
