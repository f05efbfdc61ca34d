from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specpipe.evaluate import results
from specpipe.evaluate.tune.progress import TUNE_KIND, TuneProgress


def header(**settings: Any) -> dict[str, Any]:
    return results.header(TUNE_KIND, pair="p", settings={"rounds": 3, **settings})


def interrupted(path: Path) -> str:
    """Leaves the costs of one draft; returns when that run was made."""
    made = header()
    progress = TuneProgress(path, made)
    progress.entry("org/draft", "digest", print)["costs"] = [1]
    progress.save()
    when: str = made["made_at"]
    return when


def test_the_same_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "results" / "tune.unfinished.json"
    when = interrupted(path)
    said: list[str] = []
    progress = TuneProgress(path, header())
    progress.resume(said.append)
    assert progress.entry("org/draft", "digest", said.append) == {"digest": "digest", "costs": [1]}
    assert said == [f"going on with the run of {when}"]


def test_other_settings_start_anew_and_say_why(tmp_path: Path) -> None:
    path = tmp_path / "tune.unfinished.json"
    interrupted(path)
    said: list[str] = []
    progress = TuneProgress(path, header(rounds=5, temperature=0.8))
    progress.resume(said.append)
    assert said == [
        "starting anew: settings.rounds was 3, is now 5; settings.temperature was None, is now 0.8"
    ]
    assert progress.entry("org/draft", "digest", said.append) == {"digest": "digest"}


def test_a_draft_that_was_built_again_starts_anew_alone(tmp_path: Path) -> None:
    path = tmp_path / "tune.unfinished.json"
    interrupted(path)
    said: list[str] = []
    progress = TuneProgress(path, header())
    progress.resume(lambda line: None)
    assert progress.entry("org/draft", "other", said.append) == {"digest": "other"}
    assert said == ["starting anew with org/draft: it was built again since"]


def test_nothing_to_go_on_with(tmp_path: Path) -> None:
    said: list[str] = []
    TuneProgress(tmp_path / "none.json", header()).resume(said.append)
    assert said == []


def test_a_damaged_file_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "tune.unfinished.json"
    for text in ("{", "[]", '{"kind": "tune", "format": 1}', '{"kind": "bench", "format": 1}'):
        path.write_text(text)
        said: list[str] = []
        TuneProgress(path, header()).resume(said.append)
        assert said == [f"starting anew: {path} is damaged"]


def test_removed_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "tune.unfinished.json"
    interrupted(path)
    assert json.loads(path.read_text())["kind"] == "tune"
    progress = TuneProgress(path, header())
    progress.remove()
    progress.remove()
    assert list(tmp_path.iterdir()) == []
