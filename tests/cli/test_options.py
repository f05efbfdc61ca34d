from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from specpipe.cli.bench import bench
from specpipe.cli.group import main
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


def options_of(command: click.Command) -> Iterator[click.Parameter]:
    yield from command.params
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from options_of(inner)


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_no_range_of_numbers_takes_what_is_no_finite_number(text: str) -> None:
    ranges = [option for option in options_of(main) if isinstance(option.type, click.FloatRange)]
    assert {"--check-age", "--time-limit"} <= {option.opts[0] for option in ranges}
    for option in ranges:
        with pytest.raises(click.BadParameter):
            option.type.convert(text, option, None)
