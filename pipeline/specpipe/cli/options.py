"""Options that several commands share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specpipe.errors import is_utf8, show

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.stores.store import Store

Command = TypeVar("Command", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """A finite number in a range; click's takes NaN, since it is not outside, and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


class OutputFolder(click.Path):
    """A folder to write into, whose name every library can write.

    An empty name, as of a variable that is not set, would be the folder that the shell is in.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("it is empty: give the name of a folder.", param, ctx)
        folder = super().convert(value, param, ctx)
        if not is_utf8(str(folder)):
            self.fail(f"{show(folder)} is no UTF-8, which not every library can write.", param, ctx)
        return folder


def numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers above 0 of an option such as 1,4,8, each of them once."""
    from specpipe.checkpoints.files import quoted

    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"0*[1-9]\d{0,5}", part, re.ASCII) for part in parts):
        raise click.BadParameter(
            f"{quoted(text)}: expected numbers with commas between, as in 1,4,8."
        )
    return tuple(dict.fromkeys(map(int, parts)))


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Returns several options as one decorator; a command's help has them in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def config_options(
    config_help: str, set_help: str, *, is_required: bool = True
) -> Callable[[Command], Command]:
    """Returns --config and --set, with texts that say what the command takes them for."""
    return together(
        click.option(
            "--config",
            "config_path",
            required=is_required,
            type=click.Path(path_type=Path),
            help=f"The YAML of the pair{config_help}",
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help=f"Override a setting, {set_help}; may be given several times.",
        ),
    )


_BUILT_PAIR = (", which has been built.", "as for the build")
built_pair_options = config_options(*_BUILT_PAIR)
optional_pair_options = config_options(*_BUILT_PAIR, is_required=False)
pair_options = config_options("; paths in it are relative to it.", "as in engine.max_batch_size=4")

chat_option = click.option(
    "--chat",
    "is_chat",
    is_flag=True,
    help="Ask each prompt as a user's message, in the chat template.",
)
limit_option = click.option(
    "--limit", type=click.IntRange(min=1), help="Take the first prompts only."
)
prompts_options = together(
    click.option(
        "--prompts",
        default="code",
        help="A set by its name (chat, code, summarization), or a .jsonl or .txt file.",
    ),
    limit_option,
)
cut_options = together(
    click.option(
        "--top-k",
        type=click.IntRange(0, 2**31 - 1),
        default=0,
        help="0: all tokens. Needs --temperature.",
    ),
    click.option(
        "--top-p",
        type=NumberRange(0, 1, min_open=True),
        default=1.0,
        help="1: all tokens. Needs --temperature.",
    ),
)
max_tokens_option = click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=64,
    help="Tokens of an answer at most, where its prompt does not say.",
)

small_files_option = click.option(
    "--small-files",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder with the configs and tokenizers of hub ids, in ORG--NAME/; no hub is asked.",
)
key_option = click.option(
    "--key",
    "key_path",
    envvar="SPECPIPE_SIGNING_KEY",
    show_envvar=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Private key to sign with; its passphrase is SPECPIPE_SIGNING_PASSPHRASE.",
)
store_option = click.option(
    "--store",
    "store_url",
    metavar="URL",
    help="Where versions are, instead of release.store: a folder, or s3://, gs://, ssh://, oci://.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def load(path: Path, overrides: Sequence[str]) -> PipelineConfig:
    from specpipe.build.load import load_config

    return load_config(path, overrides)


def open_store_of(config: PipelineConfig, url: str | None) -> Store:
    """Returns the store of an option, relative to here, or of the YAML, relative to that."""
    from specpipe.errors import ConfigError
    from specpipe.stores.places import open_store

    if url is not None:
        return open_store(url, Path())
    if config.release.store is None:
        raise ConfigError(
            f"{config.source} names no place of versions: set release.store, or give --store URL"
        )
    return open_store(config.release.store, config.base_dir)
