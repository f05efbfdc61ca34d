"""nightly/upstream.py: what changed between two runs, in words; nightly/age.py: whether any ran."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from specpipe.build.load import load_config
from specpipe.evaluate.nightly import record
from specpipe.evaluate.nightly.age import age_fault
from specpipe.evaluate.nightly.upstream import changes
from tests.evaluate.nightly.recorded import good_run

MADE_FROM: dict[str, Any] = {
    "checkpoints": {
        "draft": {
            "source": "org/draft",
            "commit": "a" * 40,
            "files": {"config.json": "1" * 64},
            "weights": {"model.safetensors": "2" * 64},
        },
        "target": {"source": "a folder", "files": {}, "weights": {"model.safetensors": "3" * 64}},
    },
    "calibration": {"target": "4" * 64},
    "stages": {
        "target/quantize": {
            "settings": {"format": {"weights": "fp8", "group": 128}},
            "files": {},
            "tool": {"image": "unknown"},
        },
        "old": {"settings": {}, "files": {}, "tool": {}},
    },
    "versions": {"specpipe": "0.2.0", "torch": "2.12"},
    "libraries": {"torch": "2.12", "scipy": "1.15"},
    "gpus": {"0": {"name": "H100", "driver_version": "570.1"}},
    "machine": {"cpu": "Xeon", "cores": 8},
    "prompts": "5" * 64,
}


def test_the_same_again_changed_nothing() -> None:
    assert changes(MADE_FROM, copy.deepcopy(MADE_FROM)) == []
    assert changes({}, MADE_FROM) == []


def test_everything_that_changes_has_a_phrase() -> None:
    now = copy.deepcopy(MADE_FROM)
    draft = now["checkpoints"]["draft"]
    draft |= {"commit": "b" * 40, "weights": {"model.safetensors": "9" * 64}}
    now["calibration"]["target"] = now["prompts"] = "6" * 64
    now["stages"]["target/quantize"] |= {
        "settings": {"format": {"weights": "int4", "group": 128}},
        "files": {"texts.jsonl": "7" * 64},
        "tool": {"image": "sha256:1"},
    }
    now["stages"]["new"] = now["stages"].pop("old")
    now["versions"] = {"specpipe": "0.3.0", "torch": "2.13"}
    now["libraries"]["torch"] = "2.13"
    now["gpus"]["0"]["driver_version"] = "580.2"
    now["machine"]["cores"] = 16
    assert changes(MADE_FROM, now) == [
        f"draft: commit {'a' * 12} → {'b' * 12}; other model.safetensors",
        "calibration data of target changed",
        "prompts changed",
        "target/quantize: format weights fp8 → int4",
        "target/quantize: other texts.jsonl",
        "new is new",
        "old is gone",
        "specpipe 0.2.0 → 0.3.0",
        "torch 2.12 → 2.13",
        "GPU 0 driver_version 570.1 → 580.2",
        "machine cores 8 → 16",
    ]


@pytest.mark.parametrize("key", [*MADE_FROM])
@pytest.mark.parametrize("value", [None, 3, [], "text", {"draft": None}, {"draft": {"files": 3}}])
def test_a_record_of_anything_is_compared(key: str, value: Any) -> None:
    """It may come from a store. Nothing is raised, whatever stands where, and lines are cut."""
    odd = {**MADE_FROM, key: value}
    for lines in (changes(odd, MADE_FROM), changes(MADE_FROM, odd)):
        assert all(isinstance(line, str) for line in lines) and len(lines) <= 31
    many = {**MADE_FROM, "libraries": {f"library{n}" + "x" * 500: "1" for n in range(99)}}
    lines = changes(MADE_FROM, many)
    assert len(lines) == 31 and lines[-1].endswith(" more") and max(map(len, lines)) < 250


@pytest.mark.parametrize(
    "hours_ago, why",
    [
        (35.9, None),
        (37, "the last good run is 37 hours old, of {made_at}; 36 are allowed: see whether "),
        (-0.01, None),
        (-1, "the last good run is of {made_at}, which is still to come: set the clock of this "),
        (None, "there is no good run, {path} does not exist: see whether `specpipe nightly` runs"),
        ("tonight", "{path} was made at tonight, which is no time: see whether "),
    ],
)
def test_an_old_run_and_none_and_one_to_come_are_told(
    tmp_path: Path, hours_ago: float | str | None, why: str | None
) -> None:
    (tmp_path / "x.yaml").write_text(
        "name: code\ndraft: {checkpoint: draft}\ntarget: {checkpoint: target}\n"
    )
    config = load_config(tmp_path / "x.yaml")
    now = datetime(2026, 11, 29, 12, tzinfo=timezone.utc)
    made_at = str(hours_ago)
    if isinstance(hours_ago, (int, float)):
        made_at = (now - timedelta(hours=hours_ago)).isoformat(timespec="seconds")
    if hours_ago is not None:
        header = {"format": 1, "kind": "nightly"}
        record.keep(config.artifacts_dir, header, replace(good_run(), made_at=made_at))
    path = config.artifacts.result("nightly")
    found = age_fault(config, 36, now)
    if why is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(f"code: {why.format(made_at=made_at, path=path)}")
    assert hours_ago != 37 or age_fault(config, 1e300, now) is None


def test_the_history_is_short_and_has_what_came_of_a_comparison(tmp_path: Path) -> None:
    run = replace(good_run(), made_from=MADE_FROM, changes=["torch 2.12 → 2.13"])
    record.keep(tmp_path, {"format": 1, "kind": "nightly"}, run)
    assert record.read_last_good(tmp_path / "results" / "nightly.json") == run
    line = json.loads((tmp_path / "results" / "nightly.jsonl").read_text())
    assert (line["made_from"], line["changes"]) == ({}, ["torch 2.12 → 2.13"])
