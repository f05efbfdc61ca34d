from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from specpipe import __version__
from specpipe.errors import RepositoryError
from specpipe.evaluate.prompts import Prompt, PromptSet
from specpipe.evaluate.results import header, read_result, write_result

PROMPTS = PromptSet("mine.jsonl", (Prompt(name="a", kind="k", text="x"),))


def test_a_header_says_where_numbers_come_from() -> None:
    made = header(
        "bench",
        pair="python-code",
        settings={"concurrency": [1, 4]},
        prompts=PROMPTS,
        libraries=("no-such-library",),
    )
    age = datetime.now(timezone.utc) - datetime.fromisoformat(made.pop("made_at"))
    assert timedelta() <= age + timedelta(seconds=1) < timedelta(minutes=1)
    machine = made.pop("machine")
    assert machine["num_cores"] >= 1 and machine["cpu"] and isinstance(machine["gpus"], list)
    versions = made.pop("versions")
    assert (versions["specpipe"], versions["no-such-library"]) == (__version__, "not installed")
    assert made == {
        "format": 1,
        "kind": "bench",
        "pair": "python-code",
        "settings": {"concurrency": [1, 4]},
        "prompts": {"source": "mine.jsonl", "digest": PROMPTS.digest, "count": 1},
    }


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "results" / "bench.json"
    data = {**header("bench", pair="é", settings={}), "sides": [{"rate": None}]}
    write_result(path, data)
    write_result(path, {**data, "sides": []})
    assert read_result(path, "bench") == {**data, "sides": []}
    assert [found.name for found in path.parent.iterdir()] == ["bench.json"]


def test_a_failed_write_leaves_the_old_result(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write_result(path, {"value": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_result(path, {"value": float("nan")})
    assert json.loads(path.read_text()) == {"value": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "bench.json does not exist: run `specpipe bench` first"),
        ("{", "bench.json cannot be read (Expecting property name"),
        ("[]", "bench.json cannot be read (it holds no JSON object): remove it and run"),
        ('{"kind": "tune", "format": 1}', "bench.json is of kind 'tune' and format 1, expected"),
        ('{"kind": "bench", "format": 2}', "bench.json is of kind 'bench' and format 2, expected"),
    ],
)
def test_what_is_no_such_result_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "bench.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RepositoryError) as raised:
        read_result(path, "bench")
    assert str(raised.value).startswith(f"{tmp_path}/{message}")
