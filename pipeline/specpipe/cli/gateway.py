"""`specpipe gateway`: the door for OpenAI's clients, in front of Tritons that run already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specpipe.cli.options import Command, built_pair_options, load, together
from specpipe.cli.progress import log

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.gateway.settings import GatewaySettings


def door_options(when: str = "") -> Callable[[Command], Command]:
    """Returns the options of a door; their texts begin with `when`."""

    def option(*names: str, help: str, **settings: Any) -> Callable[[Command], Command]:
        return click.option(*names, help=f"{when}{help}", **settings)

    return together(
        option(
            "--keys",
            "keys_path",
            type=click.Path(path_type=Path, dir_okay=False),
            help="File of hashed keys and their limits; keys may also be in SPECPIPE_API_KEYS.",
        ),
        option(
            "--allow-no-keys",
            is_flag=True,
            help="Answer other machines even where no keys are set.",
        ),
        option(
            "--served-model-name",
            "names",
            multiple=True,
            metavar="NAME",
            help="What clients may call the model, instead of the pair's name; may be given "
            "several times. Answers have the first.",
        ),
        option(
            "--lenient",
            "is_lenient",
            is_flag=True,
            help="Log fields of a request that are unknown, instead of refusing it.",
        ),
        option(
            "--no-access-log",
            "has_access_log",
            flag_value=False,
            default=True,
            show_default=False,
            help="Write no line for each request.",
        ),
        option(
            "--log-prompts",
            is_flag=True,
            help="Write the beginning of each request's body, with the prompt, into its line.",
        ),
    )


DOOR_DEFAULTS = {
    "keys_path": None,
    "allow_no_keys": False,
    "names": (),
    "is_lenient": False,
    "has_access_log": True,
    "log_prompts": False,
}
"""What `door_options` come to where none is given."""


@click.command()
@built_pair_options
@click.option(
    "--url",
    "urls",
    multiple=True,
    required=True,
    metavar="URL",
    help="A Triton that serves the pair, grpc://HOST:PORT; may be given several times.",
)
@click.option(
    "--listen",
    metavar="[HOST:]PORT",
    default="127.0.0.1:8080",
    help="Where clients are answered; port 0: any free one.",
)
@door_options()
def gateway(
    config_path: Path, overrides: Sequence[str], urls: Sequence[str], listen: str, **door: Any
) -> None:
    """Answer OpenAI's clients, by Tritons that serve a pair.

    A server that does not answer is left out until it does. What is built here gives the tokenizer,
    the limits and the name.
    """
    require_gateway()
    from specpipe.build.repositories import built_repository
    from specpipe.gateway.run import run

    config = load(config_path, overrides)
    settings = door_settings(config, built_repository(config), listen, urls, door)
    run(settings, log=log, on_ready=lambda url: click.echo(f"ready: {url}"))


def require_gateway() -> None:
    """Raises RuntimeUnavailable where the door's libraries are missing."""
    from specpipe.machine.libraries import require_installed

    libraries = ("fastapi", "httptools", "uvicorn", "uvloop")
    require_installed("the door for OpenAI's clients", *libraries, extra="openai")


def door_settings(
    config: PipelineConfig,
    repository: Path,
    listen: str,
    urls: Sequence[str],
    door: Mapping[str, Any],
) -> GatewaySettings:
    """Returns what the options of `door_options` and a pair's YAML come to."""
    from specpipe.gateway.settings import GatewaySettings

    keys_path = door["keys_path"]
    if not all(name.strip() for name in door["names"]):
        raise click.UsageError("--served-model-name is empty: give a name, or leave it out.")
    return GatewaySettings(
        listen=listen,
        urls=tuple(urls),
        repository=repository.resolve(),
        names=door["names"] or (config.name,),
        request_timeout_s=config.serving.request_timeout_s,
        keys=None if keys_path is None else keys_path.resolve(),
        allow_no_keys=door["allow_no_keys"],
        is_lenient=door["is_lenient"],
        has_access_log=door["has_access_log"],
        log_prompts=door["log_prompts"],
    )
