"""Keys of clients: where they come from, and what a minute holds."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from specpipe.errors import ConfigError
from specpipe.gateway.keys import ApiKey, Keys
from specpipe.gateway.rates import Usage

KEY = "0123456789abcdef0123"


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_keys_of_the_file_and_of_the_environment_are_known(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  - {{name: ci, sha256: {sha256(KEY)}, requests_per_minute: 60}}\n")
    keys = Keys(path, {"SPECPIPE_API_KEYS": "one-key-of-the-environment, another-key-of-it"})
    assert keys.are_needed
    assert keys.find(KEY) == ApiKey(name="ci", sha256=sha256(KEY), requests_per_minute=60)
    found = keys.find("another-key-of-it")
    assert found is not None
    assert (found.name, found.requests_per_minute) == ("environment-2", None)
    assert keys.find("nobody's") is None
    assert not Keys(None, {}).are_needed


def test_a_changed_file_is_read_again_and_a_broken_one_is_not_taken(tmp_path: Path) -> None:
    now, lines = 0.0, list[str]()
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: [{{name: old, sha256: {sha256(KEY)}}}]\n")
    keys = Keys(path, {}, log=lines.append, clock=lambda: now)
    path.write_text(f"keys: [{{name: new, sha256: {sha256('another key')}}}]\n")
    assert keys.find(KEY) is not None  # it looks once a second
    now = 1.0
    assert keys.find(KEY) is None
    assert keys.find("another key") is not None
    path.write_text("keys: [{name: new}]\n")
    os.utime(path, (1, 1))
    now = 2.0
    assert keys.find("another key") is not None
    assert lines == [
        f"{path}: read again, 1 keys",
        f"warning: the keys stay as they were: {path}:1: keys.0.sha256: Field required: see "
        "docs/openai.md",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("keys: []\n", ":1: keys: Tuple should have at least 1 item"),
        ("keys:\n  - name: a\n    sha256: abc\n", ":3: keys.0.sha256: String should match"),
        ("keys:\n  - name: a\n    sha: abc\n", ":2: keys.0.sha256: Field required"),
        (
            f"keys:\n  - {{name: a, sha256: {sha256('a')}}}\n"
            f"  - {{name: b, sha256: {sha256('a')}}}\n",
            ":3: the key b is there twice",
        ),
        (None, " does not exist: expected a YAML file"),
    ],
)
def test_a_file_that_is_none_is_refused_with_its_line(
    tmp_path: Path, text: str | None, fault: str
) -> None:
    path = tmp_path / "keys.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        Keys(path, {})
    assert str(refused.value).startswith(f"{path}{fault}")


def test_a_short_key_and_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="less than 16 characters"):
        Keys(None, {"SPECPIPE_API_KEYS": "0123456789abcdef,short"})
    with pytest.raises(ConfigError, match="has no key between its commas"):
        Keys(None, {"SPECPIPE_API_KEYS": " ,, "})
    assert not Keys(None, {"SPECPIPE_API_KEYS": ""}).are_needed


def test_a_minute_holds_what_the_key_has() -> None:
    now = 100.0
    limits = {"requests_per_minute": 2, "tokens_per_minute": 60, "max_concurrent_requests": 2}
    usage = Usage(ApiKey(name="a", sha256="0" * 64, **limits), lambda: now)
    assert usage.begin() is None
    assert usage.begin() is None
    over = usage.begin()
    assert over is not None
    assert over.message == "2 requests of this key are under way (max_concurrent_requests)"
    usage.end(num_tokens=10)
    over = usage.begin()
    assert over is not None
    assert over.message == "this key has made its 2 requests a minute (requests_per_minute)"
    assert over.retry_after_s == 30.0
    now += 30.0  # one request, and the tokens are 60 again
    assert usage.begin() is None
    usage.end(num_tokens=80)
    over = usage.begin()
    assert over is not None
    assert over.message == "this key has used its 60 tokens a minute (tokens_per_minute)"
    assert over.retry_after_s == 21.0
