"""nightly/record.py: what is kept, when, and that two runs do not meet."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from specpipe.errors import RepositoryError
from specpipe.evaluate.nightly import record
from specpipe.machine.artifacts import Artifacts
from tests.evaluate.nightly.recorded import good_run, next_run

HEADER = {"format": 1, "kind": "nightly", "versions": {"specpipe": "0.1.0"}}


COUNTS = {"num_draft_tokens": 8, "num_accepted_tokens": 4}
PROMPT = {**COUNTS, "prompt": "p", "kind": "code", "judged_at": [4]}


def history(artifacts_dir: Path) -> list[str]:
    lines = (artifacts_dir / "results" / "nightly.jsonl").read_text().splitlines()
    return [json.loads(line)["outcome"] for line in lines]


def test_a_good_run_comes_back_as_it_was(tmp_path: Path) -> None:
    path = Artifacts(tmp_path).result("nightly")
    assert path == tmp_path / "results" / "nightly.json"
    assert record.read_last_good(path) is None
    record.keep(tmp_path, HEADER, good_run())
    assert record.read_last_good(path) == good_run()
    assert json.loads(path.read_text())["versions"] == {"specpipe": "0.1.0"}


def test_a_good_run_of_an_earlier_specpipe_is_read(tmp_path: Path) -> None:
    added = ("compared_version", "changes", "made_from", "repository", "latencies", "quality")
    run = good_run()
    data = {key: value for key, value in run.to_json().items() if key not in added}
    del data["acceptance"]["prompts"]
    (tmp_path / "nightly.json").write_text(json.dumps({**HEADER, **data}))
    assert record.read_last_good(tmp_path / "nightly.json") == replace(
        run, latencies=[], quality={}
    )


@pytest.mark.parametrize("outcome", ["bad", "unfinished"])
def test_only_a_good_run_takes_the_place_of_a_good_one(
    tmp_path: Path, outcome: record.RunOutcome
) -> None:
    record.keep(tmp_path, HEADER, good_run())
    record.keep(tmp_path, HEADER, replace(next_run(), outcome=outcome, reasons=["worse"]))
    path = Artifacts(tmp_path).result("nightly")
    assert record.read_last_good(path) == good_run()
    assert history(tmp_path) == ["good", outcome]
    better = replace(next_run(), outcome="good")
    record.keep(tmp_path, HEADER, better)
    assert record.read_last_good(path) == better
    assert history(tmp_path) == ["good", outcome, "good"]


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.keep(tmp_path, HEADER, good_run())

    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            record.keep(tmp_path, HEADER, replace(next_run(), outcome="bad"))
    assert history(tmp_path) == ["good"]
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert names == ["nightly.json", "nightly.jsonl"]


@pytest.mark.parametrize(
    "change, why",
    [
        ({"outcome": "bad"}, "outcome 'bad' is not that of a good run"),
        ({"sizes_bytes": [1]}, "sizes_bytes: Input should be a valid dictionary"),
        (
            {"acceptance": {"num_draft_tokens": 0, "num_accepted_tokens": 0}},
            "acceptance: Value error, more was accepted than drafted, or nothing was drafted",
        ),
        (
            {"acceptance": {**COUNTS, "prompts": [{**PROMPT, "accepted_at": [5]}]}},
            "acceptance.prompts.0: Value error, more was accepted than judged",
        ),
        (
            {"acceptance": {**COUNTS, "prompts": [{**PROMPT, "accepted_at": []}]}},
            "acceptance.prompts.0: Value error, more was accepted than judged",
        ),
    ],
)
def test_a_damaged_last_good_run_is_said(
    tmp_path: Path, change: dict[str, object], why: str
) -> None:
    path = tmp_path / "nightly.json"
    path.write_text(json.dumps({**HEADER, **good_run().to_json(), **change}))
    with pytest.raises(RepositoryError) as caught:
        record.read_last_good(path)
    assert str(caught.value) == (
        f"{path} is not what `specpipe nightly` writes ({why}): remove it, and the next good run "
        "takes its place"
    )


def test_a_second_run_waits(tmp_path: Path) -> None:
    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        with record.locked(tmp_path, on_wait=waits.set):
            order.append("second")

    with record.locked(tmp_path, on_wait=lambda: order.append("first waits")):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(30)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
