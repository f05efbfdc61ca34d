from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from specpipe.cli.bench import bench
from specpipe.cli.options import numbers
from specpipe.cli.tune import tune
from specpipe.cli.verify import verify


@pytest.mark.parametrize(
    ("text", "found"), [("4", (4,)), ("8, 1,4", (8, 1, 4)), ("1,4,1,01", (1, 4))]
)
def test_numbers_keep_their_order_and_are_taken_once(text: str, found: tuple[int, ...]) -> None:
    assert numbers(text) == found


@pytest.mark.parametrize("text", ["", "1;4", "1,", "0", "-1", "1,x", "1.5", "1000000", "٣"])
@pytest.mark.parametrize(
    ("command", "arguments", "option"),
    [
        (bench, ("--url", "http://h:1"), "--concurrency"),
        (tune, ("--config", "x.yaml"), "--concurrency"),
        (verify, ("--config", "x.yaml"), "--num-draft-tokens"),
    ],
)
def test_what_is_no_list_of_numbers_is_a_usage_error(
    command: click.Command, arguments: tuple[str, ...], option: str, text: str
) -> None:
    done = CliRunner().invoke(command, [*arguments, option, text])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == (
        f"Error: Invalid value for '{option}': {text!r}: expected numbers with commas between, "
        "as in 1,4,8."
    )
