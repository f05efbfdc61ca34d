"""What counts as signed by a trusted publisher, and all the ways in which it does not."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import SignatureError
from specpipe.machine.manifest import record_file
from specpipe.release.trust.files import digests
from specpipe.release.trust.keys import public_pem
from specpipe.release.trust.publishers import Trust
from specpipe.release.trust.signature import write_signature
from specpipe.release.trust.verification import Verified, check_not_older, sign, verify
from tests.release.trust.versions import (
    FILES,
    PAIR,
    PASSPHRASE,
    new_key,
    public_key,
    trusting,
    write_version,
)

PUBLISHED = datetime(2026, 11, 29, 12, tzinfo=timezone.utc)
MODEL = "model_repo/speculative/1/model.py"
WEIGHTS = "model_repo/speculative/1/weights.safetensors"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: new_key(folder / name) for name in ("ours", "newer", "theirs")}


@pytest.fixture
def trust(tmp_path: Path, keys: dict[str, Path]) -> Trust:
    return trusting(tmp_path / "trust.json", ci=keys["ours"], lab=keys["newer"])


@pytest.fixture
def version(tmp_path: Path, keys: dict[str, Path]) -> Path:
    """Version 7, signed by ci."""
    folder = write_version(tmp_path / "versions" / "7")
    assert sign(folder, keys["ours"], PASSPHRASE) == folder / "model.sig"
    return folder


def refusal(folder: Path, trust: Trust, **expected: Any) -> str:
    with pytest.raises(SignatureError) as caught:
        verify(folder, trust, **expected)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence.replace(str(folder), "FOLDER").replace(str(trust.path), "TRUST")


def changed(what: str) -> str:
    again = "fetch the version again, and find out who changed it"
    return f"FOLDER is not what ci signed: {what}: {again}"


def test_what_a_trusted_publisher_signed_is_told_with_every_file(
    version: Path, trust: Trust, keys: dict[str, Path]
) -> None:
    found = {path: record_file(version / path).sha256 for path in (*FILES, "release.json")}
    assert verify(version, trust, expected_pair=PAIR, expected_number=7) == Verified(
        pair=PAIR,
        number=7,
        published_at="2026-11-29T12:00:00+00:00",
        publisher="ci",
        key=record_file(keys["ours"].with_name("ours.pub")).sha256,
        signature=record_file(version / "model.sig").sha256,
        files=found,
    )


def test_a_moved_version_still_counts(version: Path, trust: Trust, tmp_path: Path) -> None:
    assert verify(version.rename(tmp_path / "elsewhere"), trust).number == 7


def _flip(folder: Path) -> None:
    path = folder / WEIGHTS
    data = bytearray(path.read_bytes())
    data[2048] ^= 1
    times = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _swap(folder: Path) -> None:
    one, other = folder / "attestations/bench.json", folder / "model_repo/speculative/config.pbtxt"
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def _add(path: str) -> Callable[[Path], None]:
    def add(folder: Path) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"")

    return add


def _add_many(folder: Path) -> None:
    for number in range(6):
        (folder / f"n{number}").touch()


TIMELESS = json.dumps(
    {
        "format": 1,
        "pair": PAIR,
        "number": 7,
        "digest": "0" * 64,
        "requires": {"runtime": "torch", "libraries": {}},
        "published_at": "2026-13-45T00:00:00+00:00",
        "specpipe": "0",
    }
).encode()
BYTECODE = "model_repo/speculative/1/__pycache__/model.cpython-311.pyc"


@pytest.mark.parametrize(
    ("attack", "named"),
    [
        (_flip, f"{WEIGHTS} was changed"),
        (lambda f: (f / MODEL).unlink(), f"{MODEL} is gone"),
        (
            lambda f: (f / MODEL).rename(f / "model_repo/speculative/1/model2.py"),
            f"{MODEL} is gone, model_repo/speculative/1/model2.py was added",
        ),
        (
            _swap,
            "attestations/bench.json was changed, model_repo/speculative/config.pbtxt was changed",
        ),
        (_add("model_repo/speculative/1/os.py"), "model_repo/speculative/1/os.py was added"),
        (_add("model_repo/.git/config"), "model_repo/.git/config was added"),
        (_add(".gitattributes"), ".gitattributes was added"),
        (_add(BYTECODE), f"{BYTECODE} was added"),
        (_add("model_repo/model.sig"), "model_repo/model.sig was added"),
        (_add("second.sig"), "second.sig was added"),
        (_add("bad\nname\x1b[2J"), r"bad\nname\x1b[2J was added"),
        (_add_many, "n0 was added, n1 was added, n2 was added, and 3 more"),
        (lambda f: (f / "release.json").write_text("{}"), "release.json was changed"),
    ],
    ids=lambda value: None if callable(value) else value,
)
def test_what_was_changed_is_named(
    version: Path, trust: Trust, attack: Callable[[Path], object], named: str
) -> None:
    verify(version, trust)
    attack(version)
    assert refusal(version, trust) == changed(named)


def _link(path: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        outside = folder.parent / "outside"
        (folder / path).rename(outside)
        (folder / path).symlink_to(outside)

    return link


@pytest.mark.parametrize("path", [MODEL, "model_repo/speculative", ".hidden"])
def test_a_link_in_place_of_the_same_file_is_refused(
    version: Path, trust: Trust, path: str, keys: dict[str, Path]
) -> None:
    _link(path)(version)
    for fails in (lambda: verify(version, trust), lambda: sign(version, keys["ours"], PASSPHRASE)):
        with pytest.raises(SignatureError) as caught:
            fails()
        assert str(caught.value) == (
            f"{version}: {path} is a link, which no signature covers: a version has files alone"
        )


def test_pipes_and_sockets_are_refused_and_not_waited_for(version: Path, trust: Trust) -> None:
    os.mkfifo(version / "pipe")
    assert "neither file nor folder, which no signature covers" in refusal(version, trust)
    (version / "pipe").unlink()
    (version / "model.sig").unlink()
    os.mkfifo(version / "model.sig")
    assert "model.sig is no signature that specpipe takes (it is no file)" in refusal(
        version, trust
    )


def test_a_signature_behind_a_link_is_refused(version: Path, trust: Trust) -> None:
    _link("model.sig")(version)
    assert "(Too many levels of symbolic links)" in refusal(version, trust)


def test_unsigned_is_refused(version: Path, trust: Trust) -> None:
    (version / "model.sig").unlink()
    assert refusal(version, trust) == (
        "FOLDER is not signed, it has no model.sig: publish it with a key, or "
        "`specpipe sign FOLDER --key KEY`"
    )
    assert refusal(version / "release.json", trust).endswith(
        "is no folder: expected that of a version"
    )


def test_a_version_is_verified_by_its_digests_before_it_is_fetched(
    version: Path, trust: Trust, tmp_path: Path
) -> None:
    whole = verify(version, trust)
    statement = tmp_path / "statement"
    statement.mkdir()
    for name in ("release.json", "model.sig"):
        shutil.copy(version / name, statement)
    assert verify(statement, trust, present=whole.files) == whole
    told = {**whole.files, MODEL: "0" * 64}
    assert refusal(statement, trust, present=told) == changed(f"{MODEL} was changed")
    lied = {**whole.files, "release.json": "0" * 64}
    assert refusal(statement, trust, present=lied) == changed("release.json was changed")


def test_a_foreign_key_is_refused(version: Path, trust: Trust, keys: dict[str, Path]) -> None:
    sign(version, keys["theirs"], PASSPHRASE)
    theirs = record_file(keys["theirs"].with_name("theirs.pub")).sha256
    assert refusal(version, trust) == (
        f"FOLDER is signed by a key that nobody in TRUST has ({theirs[:16]}): take a version of a "
        "publisher who is trusted, or add theirs with `specpipe keys trust`"
    )


def test_the_signature_of_another_folder_covers_nothing(
    version: Path, trust: Trust, keys: dict[str, Path], tmp_path: Path
) -> None:
    other = write_version(tmp_path / "8", 8, files={**FILES, MODEL: b"print('other')\n"})
    sign(other, keys["ours"], PASSPHRASE)
    shutil.copy(other / "model.sig", version)
    assert refusal(version, trust) == changed(f"{MODEL} was changed, release.json was changed")


def test_one_version_in_place_of_another_is_refused(version: Path, trust: Trust) -> None:
    replaced = "one version was put in place of another; fetch it again, and find out who did"
    signed = "FOLDER is version 7 of python-code, as its publisher signed, and not"
    assert refusal(version, trust, expected_number=9) == f"{signed} number 9: {replaced}"
    assert refusal(version, trust, expected_pair="chat") == f"{signed} pair chat: {replaced}"


def test_what_is_older_than_the_promoted_one_is_refused() -> None:
    for known in (None, 6, 7):
        check_not_older(PAIR, 7, known)
    with pytest.raises(SignatureError) as caught:
        check_not_older(PAIR, 7, 8)
    assert str(caught.value) == (
        "version 7 of python-code is older than version 8, which was promoted on this machine: "
        "`specpipe rollback` goes back; if nobody asked for that, find out who set the store back"
    )


def test_a_revoked_key_is_refused_but_for_what_is_kept(
    version: Path, trust: Trust, keys: dict[str, Path]
) -> None:
    kept = verify(version, trust)
    key = kept.key
    revoked = trust.with_revoked(key[:8], why="laptop lost")
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    assert refusal(version, revoked) == (
        f"FOLDER is signed by key {key[:16]} of ci, revoked at {today} (laptop lost): take a "
        "version that is signed by another key; one that is known to be from before is kept by the "
        f"SHA-256 of its model.sig, {kept.signature}, in `still_trusted` of TRUST"
    )
    keeping = trust.with_revoked(key, why="laptop lost", still_trusted=[kept.signature])
    assert verify(version, keeping) == kept
    # The thief signs the same files anew, or others under a time from before.
    sign(version, keys["ours"], PASSPHRASE)
    assert "revoked" in refusal(version, keeping)


def test_keys_change_without_a_gap(version: Path, tmp_path: Path, keys: dict[str, Path]) -> None:
    """The old key expires, so that what it signed before stays good, and nothing after."""
    empty = Trust(tmp_path / "rotated.json", ())
    expires = PUBLISHED + timedelta(hours=1)
    both = empty.with_key(public_key(keys["ours"]), name="ci", expires=expires).with_key(
        public_key(keys["newer"]), name="ci"
    )
    assert verify(version, both).publisher == "ci"
    later = write_version(tmp_path / "8", 8, published_at="2026-11-29T13:00:00+00:00")
    sign(later, keys["ours"], PASSPHRASE)
    key = both.publishers[0].keys[0].fingerprint
    assert refusal(later, both) == (
        f"FOLDER was published 2026-11-29T13:00:00+00:00 with key {key[:16]} of ci, which had "
        "expired 2026-11-29: publish it with a newer key"
    )
    sign(later, keys["newer"], PASSPHRASE)
    assert verify(later, both).number == 8


def test_a_publisher_publishes_their_own_pairs_only(
    version: Path, tmp_path: Path, keys: dict[str, Path]
) -> None:
    def allowed(*pairs: str) -> Trust:
        empty = Trust(tmp_path / "scoped.json", ())
        return empty.with_key(public_key(keys["ours"]), name="ci", pairs=pairs)

    assert verify(version, allowed("chat", "python-*")).pair == PAIR
    assert refusal(version, allowed("chat-*", "Python-code")) == (
        "FOLDER is a version of python-code, which ci may not publish: TRUST has chat-*, "
        "Python-code as their pairs"
    )


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"{}", "it has no format"),
        (b"[" * 100_000, "it is nested too deeply"),
        (
            b'{"format": 1, "pair": "../x"}',
            "pair: String should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'",
        ),
        (TIMELESS, "published_at: Value error, month must be in 1..12"),
        (b" " * (1 << 20) + b"{}", "it has 1048578 bytes, expected at most 1048576"),
    ],
    ids=["nothing", "deep", "pair", "no such time", "large"],
)
def test_a_folder_that_does_not_say_which_version_it_is_is_neither_signed_nor_verified(
    version: Path, keys: dict[str, Path], trust: Trust, says: bytes, why: str
) -> None:
    (version / "release.json").write_bytes(says)
    with pytest.raises(SignatureError) as caught:
        sign(version, keys["ours"], PASSPHRASE)
    wrong = f"{version}/release.json is not what `specpipe publish` writes ({why})"
    assert str(caught.value).startswith(wrong)
    # Other programs sign anything.
    write_signature(version, digests(version), keys["ours"], PASSPHRASE)
    assert refusal(version, trust).startswith(wrong.replace(str(version), "FOLDER"))


def _bundle(version: Path) -> dict[str, Any]:
    bundle: dict[str, Any] = json.loads((version / "model.sig").read_bytes())
    return bundle


def _with_statement(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], bytes]:
    def forge(version: Path) -> bytes:
        bundle = _bundle(version)
        statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        change(statement)
        payload = base64.b64encode(json.dumps(statement).encode()).decode()
        bundle["dsseEnvelope"]["payload"] = payload
        return json.dumps(bundle).encode()

    return forge


def _with_bundle(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], bytes]:
    def forge(version: Path) -> bytes:
        bundle = _bundle(version)
        change(bundle)
        return json.dumps(bundle).encode()

    return forge


def _twice(bundle: dict[str, Any]) -> None:
    bundle["dsseEnvelope"]["signatures"] *= 2


def _last_digit(statement: dict[str, Any]) -> None:
    resource = statement["predicate"]["resources"][0]
    resource["digest"] = f"{'1' if resource['digest'][0] == '0' else '0'}{resource['digest'][1:]}"


FORGED = "which did not"
HOSTILE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "empty": (lambda v: b"", "Invalid JSON: EOF while parsing"),
    "binary": (lambda v: bytes(range(256)), "Invalid JSON"),
    "deep": (lambda v: b'{"a":' * 100_000, "recursion limit exceeded"),
    "list": (lambda v: b"[]", "Input should be an object"),
    "large": (lambda v: b" " * (9 << 20), "it has more than 8388608 bytes"),
    "cut": (lambda v: (v / "model.sig").read_bytes()[:-40], "Invalid JSON"),
    "two signatures": (_with_bundle(_twice), "at most 1 item"),
    "no signature": (
        _with_bundle(lambda b: b["dsseEnvelope"].update(signatures=[])),
        "at least 1 item",
    ),
    "signature of another kind": (
        _with_bundle(lambda b: b["dsseEnvelope"].update(signatures=[7])),
        "signatures.0: Input should be",
    ),
    "empty signature": (
        _with_bundle(lambda b: b["dsseEnvelope"].update(signatures=[{"sig": "", "keyid": ""}])),
        FORGED,
    ),
    "payload type": (
        _with_bundle(lambda b: b["dsseEnvelope"].update(payloadType="text/html")),
        "dsseEnvelope.payloadType: Input should be 'application/vnd.in-toto+json'",
    ),
    "payload": (
        _with_bundle(lambda b: b["dsseEnvelope"].update(payload="?")),
        "Only base64 data is allowed",
    ),
    "media type": (_with_bundle(lambda b: b.update(mediaType="text/plain")), "mediaType: "),
    "certificate": (
        _with_bundle(lambda b: b.update(verificationMaterial={"certificate": {"rawBytes": ""}})),
        "verificationMaterial.publicKey.hint: Field required",
    ),
    "certificate and key": (
        _with_bundle(lambda b: b["verificationMaterial"].update(certificate={"rawBytes": "AA=="})),
        "verificationMaterial",
    ),
    "no hint": (
        _with_bundle(lambda b: b["verificationMaterial"]["publicKey"].update(hint=None)),
        "verificationMaterial.publicKey.hint: Input should be a valid string",
    ),
    "old statement": (
        _with_statement(lambda s: s.update(predicateType="https://model_signing/Digests/v0.1")),
        "predicateType: Input should be 'https://model_signing/signature/v1.0'",
    ),
    "no files": (_with_statement(lambda s: s.update(predicate={})), "Field required"),
    "shards": (
        _with_statement(lambda s: s["predicate"]["serialization"].update(method="shards")),
        "Input should be 'files'",
    ),
    "another digest": (
        _with_statement(lambda s: s["predicate"]["resources"][0].update(algorithm="md5")),
        "Input should be 'sha256'",
    ),
    "one file twice": (
        _with_statement(lambda s: s["predicate"].update(resources=s["predicate"]["resources"] * 2)),
        "a file is in it twice",
    ),
    "other contents": (_with_statement(_last_digit), FORGED),
    "more left out": (
        _with_statement(
            lambda s: s["predicate"]["serialization"]["ignore_paths"].append("model_repo")
        ),
        FORGED,
    ),
}


@pytest.mark.parametrize(("forge", "why"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_signature_ends_in_a_sentence(
    version: Path, trust: Trust, capfd: pytest.CaptureFixture[str], forge: Any, why: str
) -> None:
    (version / "model.sig").write_bytes(forge(version))
    sentence = refusal(version, trust)
    assert sentence.startswith("FOLDER/model.sig ")
    assert why in sentence
    assert len(sentence) < 600
    assert capfd.readouterr() == ("", "")


def by_model_signing(verb: str, folder: Path, *options: Path | str) -> tuple[int, str, str]:
    """Runs the library's own command on the signature of a folder: exit code, stdout, stderr."""
    command = [sys.executable, "-m", "model_signing", verb, "key", folder]
    done = subprocess.run(
        [*command, "--signature", folder / "model.sig", *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def opened(key: Path) -> Path:
    """Writes a private key without its passphrase: that command takes no other (1.1.1)."""
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )

    plain = key.with_name(f"{key.name}.plain")
    private = load_pem_private_key(key.read_bytes(), PASSPHRASE.encode())
    plain.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return plain


def test_model_signing_verifies_ours_and_we_verify_its(
    version: Path, trust: Trust, keys: dict[str, Path]
) -> None:
    ours = ("--public_key", keys["ours"].with_name("ours.pub"))
    assert by_model_signing("verify", version, *ours) == (0, "Verification succeeded\n", "")
    signed = by_model_signing("sign", version, "--private_key", opened(keys["newer"]))
    assert signed == (0, "Signing succeeded\n", "")
    assert verify(version, trust).publisher == "lab"


def test_what_a_bundle_leaves_out_is_not_signed(
    version: Path, trust: Trust, keys: dict[str, Path]
) -> None:
    """A publisher's own signature that leaves files out covers none of them."""
    from model_signing import hashing, signing

    signing.Config().use_elliptic_key_signer(private_key=opened(keys["ours"])).set_hashing_config(
        hashing.Config().set_ignored_paths(paths=[MODEL, "model.sig"])
    ).sign(version, version / "model.sig")
    assert b"model.py" in base64.b64decode(_bundle(version)["dsseEnvelope"]["payload"])
    assert refusal(version, trust) == changed(f"{MODEL} was added")


def test_another_curve_signs_as_well(tmp_path: Path, version: Path, trust: Trust) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path = tmp_path / "p384"
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    sign(version, path, None)
    more = trust.with_key(public_pem(key.public_key()), name="elsewhere")
    assert verify(version, more).publisher == "elsewhere"


def test_nothing_is_reached_over_the_network(
    version: Path, trust: Trust, keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    sign(version, keys["ours"], PASSPHRASE)
    verify(version, trust)
