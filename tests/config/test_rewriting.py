from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpipe.config.document import parse_yaml
from specpipe.config.rewriting import rewritten
from specpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]
TEXT = """\
# A pair.
name:   'x'      # as it is called

draft: &small {checkpoint: d}
target: *small

# What is built.
engine:
    # by what
    runtime:  torch   # or another
    gone: [1,
           2]   # goes with its value
    nothing:
    words: |
      one

    # stays
    last: null

# The end.
"""


def changed(change: Callable[[dict[str, Any]], object], text: str = TEXT) -> str:
    data = copy.deepcopy(parse_yaml(text, origin="x.yaml").data)
    change(data)
    return rewritten(text, data, origin="x.yaml")


def test_what_does_not_change_stays_as_it_is() -> None:
    assert changed(lambda data: None) == TEXT
    for path in (ROOT / "configs").glob("*.yaml"):
        assert changed(lambda data: None, path.read_text()) == path.read_text()


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ({"runtime": "tensorrt"}, "runtime:  torch   #", "runtime:  tensorrt   #"),
        ({"runtime": "yes: no"}, "runtime:  torch   #", "runtime:  'yes: no'   #"),
        ({"gone": ...}, "    gone: [1,\n           2]   # goes with its value\n", ""),
        ({"nothing": True}, "    nothing:\n", "    nothing: true\n"),
        ({"words": "two"}, "    words: |\n      one\n", "    words: two\n"),
        ({"last": 1}, "last: null\n", "last: 1\n"),
        ({"last": ...}, "    last: null\n", ""),
        ({"new": {"a": [1, 2]}}, "last: null\n", "last: null\n    new:\n      a: [1, 2]\n"),
    ],
)
def test_one_value_of_a_section_changes(change: dict[str, Any], before: str, after: str) -> None:
    def change_engine(data: dict[str, Any]) -> None:
        for key, value in change.items():
            if value is ...:
                del data["engine"][key]
            else:
                data["engine"][key] = value

    assert TEXT.count(before) == 1
    assert changed(change_engine) == TEXT.replace(before, after)


def test_a_section_that_loses_all_is_an_empty_one() -> None:
    assert changed(lambda data: data.update(a={}), "a:\n  b: 1\nc: 2\n") == "a: {}\nc: 2\n"


def test_true_is_not_1() -> None:
    assert changed(lambda data: data.update(a=True), "a: 1  # one\n") == "a: true  # one\n"


def test_a_new_section_comes_after_the_last_line_of_the_last() -> None:
    text = "a: 1\nb:\n  c: 2\n\n# end\n"
    assert changed(lambda data: data.update(d={"e": 3}), text) == (
        "a: 1\nb:\n  c: 2\nd: {e: 3}\n\n# end\n"
    )


@pytest.mark.parametrize(
    "text", ["{a: {b: 1}}", "x: &x\n  b: 1\na: *x\n", "x: &x {b: 1}\na:\n  <<: *x\n  c: 1\n"]
)
def test_what_its_lines_cannot_say_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="^x.yaml cannot be changed by its lines$"):
        changed(lambda data: data.update(a={**data["a"], "b": 2}), text)
