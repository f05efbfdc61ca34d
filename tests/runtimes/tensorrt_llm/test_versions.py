from __future__ import annotations

import re
from itertools import pairwise
from typing import get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from specpipe.config.sections import json_schema
from specpipe.config.tensorrt_llm_versions import (
    DEFAULT_VERSION,
    ENGINE_VERSIONS,
    RELEASES,
    EngineVersion,
    SupportedVersion,
    is_without_engines,
    release,
    serving_image,
    version_number,
    version_order,
)
from specpipe.errors import ConfigError


def test_default_is_the_last_release_with_engines() -> None:
    found = release(DEFAULT_VERSION)
    assert found.image == "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    assert (found.tensorrt, found.cuda) == ("10.14.1.48", "13.1.0.036")


def test_table_is_in_order_and_complete() -> None:
    numbers = [found.number for found in RELEASES.values()]
    assert numbers == sorted(numbers, reverse=True)
    assert get_args(EngineVersion) == ENGINE_VERSIONS
    assert set(ENGINE_VERSIONS) == {
        version for version in RELEASES if version_number(version) >= (1, 0)
    }
    assert [found.triton for found in RELEASES.values()] == sorted(
        (found.triton for found in RELEASES.values()), reverse=True
    )


def test_unknown_release_names_those_that_can_be_built_with() -> None:
    with pytest.raises(ConfigError) as caught:
        release("1.3.0")
    assert str(caught.value) == (
        "TensorRT-LLM 1.3.0 is not known to build engines: set engine.tensorrt_llm.version to one "
        "of 1.0.0, 1.1.0, 1.2.0, 1.2.1"
    )


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("1.2.1", (1, 2, 1)),
        ("1.2.0rc8", (1, 2, 0)),
        ("0.17.0.post1", (0, 17, 0)),
        ("10.7.0", (10, 7, 0)),
        ("main", ()),
    ],
)
def test_version_numbers(version: str, number: tuple[int, ...]) -> None:
    assert version_number(version) == number


def test_candidates_stand_before_their_release() -> None:
    """As upstream numbered them; a patch or a post-release comes after what it is of."""
    in_order = (
        *("0.17.0", "0.21.0", "1.0.0rc2", "1.0.0", "1.0.3.2510", "1.2.0rc8", "1.2.0", "1.2.1"),
        *("1.3.0rc9", "1.3.0rc22", "1.3.0rc23", "1.3.0rc29", "1.3.0", "1.3.1", "1.4.0rc1"),
        *("1.4.0rc4", "1.4.0", "1.10.0"),
    )
    for earlier, later in pairwise(in_order):
        assert version_order(earlier) < version_order(later), (earlier, later)
    assert version_order("main") == ()


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("main", False),
        ("1.2.1", False),
        ("1.3.0rc22", False),
        ("1.3.0rc23", True),
        ("1.3.0", True),
        ("1.4.0rc4", True),
    ],
)
def test_engines_end_with_a_candidate_of_1_3(version: str, expected: bool) -> None:
    assert is_without_engines(version) is expected


@pytest.mark.parametrize(
    ("version", "image"),
    [
        ("1.1.0", "nvcr.io/nvidia/tritonserver:26.02-trtllm-python-py3"),
        ("1.3.0rc23", "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc23"),
        ("1.4.0", "nvcr.io/nvidia/tensorrt-llm/release:1.4.0"),
    ],
)
def test_from_then_on_the_image_is_tensorrt_llm_s_own(version: str, image: str) -> None:
    assert serving_image(version) == image


TAKEN = ("1.0.0", "1.2.1", "1.3.0rc23", "1.3.0rc29", "1.3.0", "1.3.1.post1", "1.4.0rc4", "1.4.0")
REFUSED = ("1.2.2", "1.3", "1.3.0rc22", "1.3.0rc", "1.4.0-rc1", "1.5.0", "v1.4.0", "1.4.0rc1\n", "")


def test_versions_that_a_config_may_name() -> None:
    adapter: TypeAdapter[str] = TypeAdapter(SupportedVersion)
    assert [adapter.validate_python(version) for version in TAKEN] == list(TAKEN)
    for version in REFUSED:
        with pytest.raises(ValidationError, match=r"1\.3 or 1\.4 from 1\.3\.0rc23 on"):
            adapter.validate_python(version)


def test_an_editor_is_told_the_same_but_for_early_candidates() -> None:
    """A pattern cannot say that 22 is too early."""
    definition = json_schema()["$defs"]["TensorRTLLMConfig"]["properties"]["version"]
    listed, later = definition["anyOf"]
    for version in (*TAKEN, *REFUSED):
        is_taken = version in listed["enum"] or re.search(later["pattern"], version) is not None
        assert is_taken == (version in TAKEN or version in ("1.3.0rc22", "1.4.0rc1\n")), version
