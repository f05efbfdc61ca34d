"""The servers that `specpipe bench` asks: their options, and the sides that they come to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specpipe.cli.options import together
from specpipe.cli.progress import log

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.evaluate.bench.run import BenchSide

url_options = together(
    click.option(
        "--url",
        metavar="URL",
        help="A running server: http://HOST:PORT or grpc://HOST:PORT for Triton (our ensemble or "
        "NVIDIA's), openai+http://HOST:PORT for vLLM, SGLang, trtllm-serve and the like.",
    ),
    click.option(
        "--model",
        metavar="NAME",
        help="The server's model; an OpenAI-compatible server needs it. Left out: ensemble.",
    ),
)
api_key_option = click.option(
    "--api-key-variable",
    metavar="NAME",
    help="Environment variable that holds the key for OpenAI-compatible servers.",
)
server_options = together(
    url_options,
    click.option(
        "--metrics-url",
        metavar="URL",
        help="The server's metrics endpoint, for acceptance by position. Left out: of a server "
        "that this command starts it is known, of others nothing is read.",
    ),
    click.option(
        "--against",
        metavar="URL",
        help="A second server, the baseline: both are compared as they are.",
    ),
    click.option("--against-model", metavar="NAME", help="As --model, for --against."),
    click.option("--against-metrics-url", metavar="URL", help="As --metrics-url, for --against."),
    click.option(
        "--protocol",
        type=click.Choice(["grpc", "http"]),
        default="grpc",
        help="How to ask a server that this command starts.",
    ),
    api_key_option,
)


def check(config: Path | None, options: dict[str, Any]) -> None:
    """Raises UsageError for server options that do not go together; nothing is asked."""
    against = options["against"]
    if config is None and options["url"] is None:
        raise click.UsageError("Give --config, --url or both.")
    if against is None and (options["against_model"] or options["against_metrics_url"]):
        raise click.UsageError("--against-model and --against-metrics-url need --against.")
    if against is not None and options["num_draft_tokens"] is not None:
        raise click.UsageError("--against compares servers as they are: no --num-draft-tokens.")
    check_api_key(options["api_key_variable"])


def check_api_key(variable: str | None) -> None:
    """Raises UsageError for an environment variable that is not set."""
    if variable is not None and variable not in os.environ:
        raise click.UsageError(f"--api-key-variable: {variable} is not set.")


def open_sides(
    stack: ExitStack, config: PipelineConfig | None, options: dict[str, Any]
) -> Sequence[BenchSide]:
    """Returns what is compared, opened, the baseline first; closing the stack closes it.

    Without --url the built pair is served meanwhile. The baseline is the other server, or the same
    one without speculation.
    """
    from specpipe.evaluate.bench.sides import named_apart, open_side, without_and_with
    from specpipe.evaluate.endpoints import takes_draft_length

    variable, num_draft_tokens = options["api_key_variable"], options["num_draft_tokens"]
    api_key = None if variable is None else os.environ[variable]

    def opened(url: str, model: str | None, metrics_url: str | None) -> BenchSide:
        side = open_side(url, model=model, metrics_url=metrics_url, api_key=api_key)
        stack.callback(side.endpoint.close)
        return side

    url, metrics_url = options["url"], options["metrics_url"]
    if url is None:
        assert config is not None
        url, metrics_url = _serve(stack, config, options["protocol"])
    side = opened(url, options["model"], metrics_url)
    if (against := options["against"]) is not None:
        baseline = opened(against, options["against_model"], options["against_metrics_url"])
        return named_apart(baseline, side)
    if takes_draft_length(side.endpoint):
        return without_and_with(side, num_draft_tokens)
    if num_draft_tokens is not None:
        raise click.UsageError(f"{url} takes no draft length: no --num-draft-tokens.")
    log(f"{url} takes no draft length: to compare it with another server, give --against")
    return [side]


def _serve(stack: ExitStack, config: PipelineConfig, protocol: str) -> tuple[str, str]:
    """Serves a built pair until the stack is closed; returns its URL and that of its metrics."""
    from specpipe.build.repositories import built_repository
    from specpipe.evaluate.serving import served
    from specpipe.triton.repository import lint

    repository = built_repository(config)
    lint.check(repository)
    log("starting a server")
    server = stack.enter_context(served(repository))
    return server.grpc_url if protocol == "grpc" else server.http_url, server.metrics_url
