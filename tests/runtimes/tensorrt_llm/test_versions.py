from __future__ import annotations

from typing import get_args

import pytest

from specpipe.config.tensorrt_llm_versions import (
    DEFAULT_VERSION,
    RELEASES,
    SupportedVersion,
    release,
    version_number,
)
from specpipe.errors import ConfigError


def test_default_is_the_last_release_with_engines() -> None:
    found = release(DEFAULT_VERSION)
    assert found.image == "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    assert (found.tensorrt, found.cuda) == ("10.14.1.48", "13.1.0.036")


def test_table_is_in_order_and_complete() -> None:
    numbers = [found.number for found in RELEASES.values()]
    assert numbers == sorted(numbers, reverse=True)
    assert set(get_args(SupportedVersion)) == {
        version for version in RELEASES if version_number(version) >= (1, 0)
    }
    assert [found.triton for found in RELEASES.values()] == sorted(
        (found.triton for found in RELEASES.values()), reverse=True
    )


def test_unknown_release_names_those_that_can_be_built_with() -> None:
    with pytest.raises(ConfigError) as caught:
        release("1.3.0")
    assert str(caught.value) == (
        "TensorRT-LLM 1.3.0 is not known to specpipe: set engine.tensorrt_llm.version to one of "
        "1.0.0, 1.1.0, 1.2.0, 1.2.1"
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
